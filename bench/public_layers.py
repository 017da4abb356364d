"""Public layers with `jaxmp.lax`: python bench/public_layers.py RING MAXTEXT OUT

RING is ringattention/ringattention_jax.py of haoliuhl/ringattention at 6305e2fb. Its attention
trains over eight devices, each with an eighth of the tokens. MAXTEXT is
src/maxtext/layers/pipeline_deprecated.py of AI-Hypercomputer/maxtext at e591f30c. Its pipeline of
four stages trains a small layer; what it takes from the rest of MaxText is below. Both run as they
are, and again where the only change is the import of ``lax`` (RING) or the name of its
``jax.lax.ppermute`` (MAXTEXT): with raw, and inside ``with lax.codecs(...)``. OUT.json is as that
of bench/public_programs.py.
"""

import json
import os
import sys
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

if __name__ == '__main__':
    os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
from flax import linen
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.public_programs import CALLS, STEPS, WAYS, rows_of
from jaxmp import lax
from jaxmp.exchange.hlo import operands
from jaxmp.training.summary import provenance

TOKENS, WIDTH, HEADS = 512, 64, 2
STAGES, MICROBATCHES, BATCH, LENGTH = 4, 8, 16, 16
RATES = {'ring attention': 1.0, "MaxText's pipeline": 0.1}


def module(name: str, text: str):
    """The module of a text."""
    made = ModuleType(name)
    sys.modules[name] = made
    exec(text, made.__dict__)
    return made


def line(count: int, axis: str):
    """A mesh of some devices."""
    return jax.make_mesh((count,), (axis,), (AxisType.Auto,), devices=jax.devices()[:count])


def normal(seed: int, *shape: int, scale: float = 1.0):
    """Random numbers."""
    return jax.random.normal(jax.random.key(seed), shape) * scale


def ring(text: str, own: bool):
    """A layer of ring attention that learns another one: its loss, parameters and batch."""
    if own:
        text = text.replace('import jax.lax as lax', 'from jaxmp import lax')
    blockwise = {
        'causal_block_size': 1, 'deterministic': True, 'dropout_rng': None, 'attn_pdrop': 0.0,
        'query_chunk_size': 64, 'key_chunk_size': 64, 'dtype': jnp.float32, 'precision': None,
        'policy': jax.checkpoint_policies.nothing_saveable, 'prevent_cse': True,
    }  # fmt: skip
    attention = partial(
        module('public_ring', text).ring_attention, cache_idx=None, axis_name='sp',
        float32_logits=True, blockwise_kwargs=blockwise,
    )  # fmt: skip
    part = P(None, 'sp', None, None)
    specs = part, part, part, P(None, None, None, None), P(None, None)
    attention = jax.shard_map(
        attention, mesh=line(8, 'sp'), in_specs=specs, out_specs=part, check_vma=False
    )
    rest = jnp.zeros((1, 1, 1, TOKENS)), jnp.zeros((1, TOKENS), int)

    def layer(params, x):
        q, k, v = (jnp.reshape(x @ w, (1, TOKENS, HEADS, -1)) for w in params[:3])
        return attention(q, k, v, *rest).reshape(x.shape) @ params[3]

    x = normal(0, 1, TOKENS, WIDTH)
    start, wanted = (
        [normal(4 * i + j, WIDTH, WIDTH, scale=WIDTH**-0.5) for j in range(4)] for i in (1, 2)
    )
    y = jax.jit(layer)(wanted, x) if not own else None
    return lambda params, batch: jnp.mean((layer(params, batch[0]) - batch[1]) ** 2), start, (x, y)


class Layer(linen.Module):
    """What each stage of the pipeline runs."""

    @linen.compact
    def __call__(self, x, segments, positions, deterministic, mode):
        """Adds a network of one hidden layer."""
        return x + linen.Dense(WIDTH)(linen.gelu(linen.Dense(2 * WIDTH)(x)))


def maxtext(text: str, own: bool):
    """MaxText's pipeline of four layers that learns a function: its loss, parameters and batch."""
    names = Enum('ShardMode', ['AUTO', 'EXPLICIT'])
    rules = ('activation_stage', 'stage'), ('activation_batch', None)

    def axes(logical, mesh, rules=None):
        return linen.logical_to_mesh_axes(logical, rules)

    def with_logical(x, logical, mesh, rules, **more):
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, axes(logical, mesh, rules)))

    for name, what in {
        'maxtext': {}, 'maxtext.common': {}, 'maxtext.utils': {},
        'maxtext.common.common_types': {
            'Config': SimpleNamespace, 'MODEL_MODE_TRAIN': 'train', 'ShardMode': names,
        },
        'maxtext.utils.sharding': {
            'maybe_shard_with_logical': with_logical, 'create_sharding': None,
            'maybe_shard_with_name': lambda x, s, **_: jax.lax.with_sharding_constraint(x, s),
            'logical_to_mesh_axes': axes, 'logical_to_mesh': lambda spec, mesh, rules=None: spec,
        },
    }.items():  # fmt: skip
        module(name, '').__dict__.update(what)
    if own:
        text = CALLS.sub(r'jaxmp_lax.\1', f'from jaxmp import lax as jaxmp_lax\n{text}')
    config = SimpleNamespace(
        ici_pipeline_parallelism=STAGES, dcn_pipeline_parallelism=1, num_pipeline_repeats=1,
        num_pipeline_microbatches=MICROBATCHES, micro_batch_size_to_train_on=BATCH,
        max_target_length=LENGTH, emb_dim=WIDTH, logical_axis_rules=rules,
        pipeline_delay_activation_forwarding=False, shard_mode=names.AUTO, debug_sharding=False,
        enable_dropout=False, scan_layers=False, scan_pipeline_iterations=True,
        set_remat_policy_on_pipeline_iterations=True, remat_policy='minimal',
        pipeline_fsdp_ag_once=False,
    )  # fmt: skip
    pipeline = module('public_maxtext', text).Pipeline(config, Layer(), line(STAGES, 'stage'))
    x = normal(0, BATCH, LENGTH, WIDTH)
    params = pipeline.init(jax.random.key(1), x, None, None, True)
    y = jnp.tanh(x @ normal(2, WIDTH, WIDTH, scale=WIDTH**-0.5))

    def loss(params, batch):
        return jnp.mean((pipeline.apply(params, batch[0], None, None, True) - batch[1]) ** 2)

    return loss, params, (x, y)


LAYERS = {'ring attention': ring, "MaxText's pipeline": maxtext}


def measured(texts, way: str) -> dict:
    """Loss, gradient, bytes and the loss after training of each layer."""
    found = {}
    for name, make in LAYERS.items():
        loss, params, batch = make(texts[name], WAYS[way] is not None)
        if batch[1] is None:  # what the layer as it is made
            batch = batch[0], make(texts[name], False)[2][1]
        both = jax.jit(jax.value_and_grad(loss))
        value, grads = both(params, batch)
        text = both.lower(params, batch).compile().as_text()
        for _ in range(STEPS):
            step = both(params, batch)[1]
            params = jax.tree.map(lambda p, g, rate=RATES[name]: p - rate * g, params, step)
        found[name] = {
            'loss': float(value), 'grads': grads, 'bytes': operands(text),
            'trained': float(both(params, batch)[0]),
        }  # fmt: skip
        print(way, name, found[name]['loss'], found[name]['trained'], found[name]['bytes'])
    return found


def main() -> None:
    """Runs all ways, and writes the figures."""
    *files, out = sys.argv[1:]
    texts = {name: Path(file).read_text() for name, file in zip(LAYERS, files, strict=True)}
    runs = {}
    for way, codecs in WAYS.items():
        with lax.codecs(*(codecs or ('raw', 'raw'))):
            runs[way] = measured(texts, way)
    rows = rows_of(runs, RATES)
    Path(out).write_text(json.dumps(provenance() | {'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
    main()
