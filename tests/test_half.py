"""Half precision: sums over micro-batches and replicas, and norms, are those of float32.

Every gradient here is a number of 8 bits, so that only how they are added can spoil it. Their sums
and squares leave the range of float16, and sums in bfloat16 stand still.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import config, exchange
from jaxmp.data import Dataset, Split
from jaxmp.exchange import AXIS, bytes_of, over
from jaxmp.exchange.traffic import compiled_operands
from jaxmp.models.tied import WTE
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.placement import device_mesh
from jaxmp.training import loop
from tests.base import slow
from tests.laws import QUICK

HALVES = 'float16', 'bfloat16'
MICROBATCHES = 16
close = functools.partial(np.testing.assert_allclose, rtol=2.0**-8)


# A training step.


class Ones(nn.Module):
    """A dense layer that starts at one."""

    features: int
    dtype: str

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(
            self.features, use_bias=False, dtype=self.dtype, param_dtype=self.dtype,
            kernel_init=nn.initializers.ones,
        )(x)  # fmt: skip


@functools.cache
def momenta(dtype, runtime, replicas, clip_norm):
    """What the optimizer's momentum is after one step, by stage and replica."""
    count = replicas * MICROBATCHES
    x = np.repeat(8192 + 64 * np.arange(count, dtype=np.float32)[:, None], 2, 1)
    split = Split(x, np.zeros((count, 1), np.float32))
    task = jaxmp.Task(
        data=Dataset('ramp', split, split, classes=0, mean=(), std=()),
        stages=(Ones(2, dtype), Ones(1, dtype)),
        prepare=lambda x, key: jnp.asarray(x, dtype),
        score=lambda y, target: {'loss': y.astype(jnp.float32).mean(1)},
        metric=jaxmp.Metric('loss', 'loss', higher_is_better=False),
        scores=('loss',),
    )
    changes = {
        'batch_size': count,
        'optimizer': {'momentum': 0.9, 'clip_norm': clip_norm},
        'parallel': {
            'runtime': runtime, 'replicas': replicas, 'num_microbatches': MICROBATCHES,
        },
    }  # fmt: skip
    trainer = loop.prepare(config.complete(changes), ProcessGroup(), task)
    steps = trainer.epoch(0, trainer.create(), np.arange(count))
    state = next(iter(steps))[0]
    parts = trainer.export(state).parts
    found = {name: jax.tree.leaves(part['opt_state'])[0] for name, part in parts.items()}
    assert {a.dtype.name for a in found.values()} == {dtype}
    return {name: np.asarray(a, np.float32) for name, a in found.items()}


@pytest.mark.parametrize('dtype', slow(HALVES, 'bfloat16'.__eq__))
@pytest.mark.parametrize('replicas', [1, 2])
@pytest.mark.parametrize('runtime', ['local', 'mpmd', 'spmd'])
def test_gradients_of_microbatches_and_replicas(runtime, replicas, dtype):
    wanted = momenta('float32', 'local', 1, 0.0)
    middle = 64 * 8 * (replicas - 1)  # more replicas see larger inputs
    for name, a in momenta(dtype, runtime, replicas, 0.0).items():
        stage = int(name.partition('.')[0])
        close(a, wanted[f'{stage}.0'] + middle * (1 + stage), err_msg=name)


@pytest.mark.parametrize('dtype', HALVES)
def test_the_norm_that_clips(dtype):
    wanted = momenta('float32', 'local', 1, 1.0)
    for name, a in momenta(dtype, 'local', 1, 1.0).items():
        close(a, wanted[name])
    assert sum(np.sum(a**2) for a in wanted.values()) == pytest.approx(1, 1e-5)


@pytest.mark.parametrize('dtype', HALVES)
def test_the_norm_over_stages_with_a_tied_parameter(dtype):
    grads = [{'wte': jnp.full(4, 300, dtype)}, {'h': jnp.full(5, 1000, dtype)}, {'wte': 0}]
    wide = [{'wte': jnp.full(4, 300.0)}, {'h': jnp.full(5, 1000.0)}, {'wte': 0}]
    close(WTE.global_norm(grads), WTE.global_norm(wide))


# Exchanges.

N = 4
SHAPES = {'b': (5,), 'w': (16, 20)}
TEXTS = [
    'mean',
    'local_sgd(1)',
    'diloco(1, mean, outer=sgd(1.0))',
    'all_reduce(raw)',
    'all_reduce(random_k(1.0))',
    'all_gather(raw)',
    'all_gather(ef(raw))',
    'all_gather(ef21(raw))',
    'scatter_gather(raw, raw)',
    'bucketed(all_reduce(raw))',
    'momentum(all_gather(raw))',
    'power_sgd(2)',
    'power_sgd(10)',
    'dgc(1.0, clip=1.0)',
    'frozen_adam(all_gather(raw), 1)',
    'frozen_adam(all_gather(raw), 2)',
    'per_layer(all_gather(raw), smallest=100)',
]  # power_sgd(10) is no smaller than the array, which is then averaged
SIMILAR = (
    'all_gather(raw)',
    'all_gather(ef(raw))',
    'frozen_adam(all_gather(raw), 2)',
    'power_sgd(10)',
)


def gradients():
    """Of each replica; numbers of 8 bits, and ``w`` of rank one."""
    r = np.random.default_rng(0)
    numbers = lambda *shape: 128 * r.integers(128, 224, shape).astype(np.float32)
    return {'b': numbers(N, 5), 'w': numbers(N, 16, 1) * np.ones(20, np.float32)}


@functools.cache
def exchanged(text, dtype):
    """What replica 0 gets in the second of two steps of the same gradients."""
    e = exchange.parse(text)
    grads = jax.tree.map(lambda a: jnp.asarray(a, dtype), gradients())

    def steps(grads):
        own = jax.tree.map(lambda a: a[0], grads)
        state, y = e.init(jax.tree.map(jnp.zeros_like, own), N), own
        for t in range(2):
            key = jax.random.key(t)
            y, state = e.phase(t).reduce(own, state, key, over())
            y, state = e.phase(t).after_update(y, state, key, over())
        return jax.tree.map(lambda a: a[None], y)

    specs = {'in_specs': P(AXIS), 'out_specs': P(AXIS), 'check_vma': False}
    run = jax.shard_map(steps, mesh=device_mesh(replica=N), **specs)
    out = jax.jit(run, compiler_options=QUICK)(grads)
    assert all(a.dtype == dtype for a in out.values())
    return {k: np.asarray(a[0], np.float32) for k, a in out.items()}


@pytest.mark.parametrize('dtype', slow(HALVES, 'bfloat16'.__eq__))
@pytest.mark.parametrize('text', slow(TEXTS, lambda t: t in SIMILAR))
def test_what_replicas_share(text, dtype):
    wanted = exchanged(text, 'float32')
    for name, a in exchanged(text, dtype).items():
        close(a, wanted[name], err_msg=name)


@pytest.mark.parametrize('text', ['mean', 'all_reduce(raw)', 'scatter_gather(raw, raw)'])
def test_bytes_of_a_mean_of_halves_are_those_that_travel(text):
    params = {k: jax.ShapeDtypeStruct(s, 'bfloat16') for k, s in SHAPES.items()}
    e = exchange.parse(text)
    handed = bytes_of(e, params, N)['handed']
    assert handed == compiled_operands(e, params, device_mesh(replica=N))
    if text == 'mean':
        assert handed == {'all-reduce': 2 * bytes_of(e, params, N)['uncompressed']}
