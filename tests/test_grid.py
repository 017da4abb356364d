"""Replicas of a pipeline over 2 x 2 devices: against one pipeline, and a loop over replicas."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxmp import Ctx, exchange, parse
from jaxmp.devices import device_mesh
from jaxmp.exchange import operands, over
from jaxmp.grid import grid
from jaxmp.models.mlp import mlp
from jaxmp.spmd import Parts, spmd
from tests.laws import QUICK

ROWS = P('replica')
R, S, M, B = 2, 2, 2, 3  # replicas, stages, micro-batches a replica, samples a micro-batch
jit = partial(jax.jit, compiler_options=QUICK)


def squared(out, y):
    return jnp.mean((out - y) ** 2)


PARTS = Parts(*mlp(S, 16, 3), squared)
OPTIMISER = optax.sgd(0.3, momentum=0.5)


def make(fwd, bwd, text, mesh=None):
    mesh = mesh or device_mesh(replica=R, stage=S)
    channels = parse(fwd), parse(bwd)
    return grid(PARTS, channels, exchange.parse(text), OPTIMISER, mesh, M)


def batches(steps=3):
    r = np.random.default_rng(0)
    return r.standard_normal((steps, R * M * B, 5)), r.standard_normal((steps, R * M * B, 3))


def start(g, x):
    """The first state in float64, on the host; Flax makes float32."""
    double = lambda a: np.asarray(a, np.float64 if a.dtype.kind == 'f' else a.dtype)
    return jax.tree.map(double, jax.device_get(g.init(jax.random.key(1), x)))


def at(tree, i):
    return jax.tree.map(lambda a: a[i], tree)


def stacked(trees):
    return jax.tree.map(lambda *a: np.stack(a), *jax.device_get(trees))


def stack(tree):
    return jax.tree.map(lambda a: a[None], tree)


def close(a, b):
    near = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    jax.tree.map(near, *jax.device_get((a, b)))


def test_raw_and_exact_are_one_pipeline_on_the_joined_batch():
    with jax.enable_x64(True):
        g = make('raw', 'raw', 'mean')
        pipe = spmd(PARTS, parse('raw'), parse('raw'), device_mesh(stage=S), R * M)
        x, y = batches()
        state = start(g, x[0])
        params, links = at(state.params, 0), pipe.init(jax.random.key(1), x[0])[1]
        memory, step, one = OPTIMISER.init(params), jit(g.step), jit(pipe.value_and_grad)
        for t in range(3):
            state, loss = step(state, x[t], y[t])
            want, grads, links = one(params, links, x[t], y[t])
            updates, memory = OPTIMISER.update(grads, memory)
            params = optax.apply_updates(params, updates)
            close(loss, want)
            close(state.params, stacked([params] * R))


@pytest.mark.parametrize(
    ('fwd', 'bwd', 'text'),
    [
        ('ef(uniform(4, stochastic))', 'ef(top_k(0.3))', 'all_reduce(ef(random_k(0.2)))'),
        ('ef21(top_k(0.3))', 'same_support()', 'power_sgd(1)'),
    ],
)
def test_both_compressions_are_a_loop_over_replicas(fwd, bwd, text):
    """Each replica's pipeline by itself; each stage's exchange by itself; then the same step."""
    with jax.enable_x64(True):
        g = make(fwd, bwd, text)
        x, y = batches()
        state = start(g, x[0])
        rows, step, one = [at(state, i) for i in range(R)], jit(g.step), jit(g.pipe.value_and_grad)

        @jit
        @partial(
            jax.shard_map, mesh=device_mesh(replica=R), in_specs=(ROWS, ROWS, P()), out_specs=ROWS
        )
        def share(grads, held, key):
            return stack(g.exchange.apply(at(grads, 0), at(held, 0), key, over()))

        for t in range(3):
            key, losses, grads = jax.random.key(t), [], []
            state, loss = step(state, x[t], y[t], Ctx(key))
            for i, cut in enumerate(zip(np.split(x[t], R), np.split(y[t], R), strict=True)):
                found = one(rows[i].params, rows[i].links, *cut, Ctx(key).fold(0).fold(i))
                losses.append(found[0])
                grads.append(found[1])
                rows[i] = rows[i].replace(links=jax.device_get(found[2]))
            close(loss, np.mean(losses))
            stages = []
            for s in range(S):
                own = [(at(a, s), at(row.exchange, s)) for a, row in zip(grads, rows, strict=True)]
                stages.append(share(*stacked(own), Ctx(key).fold(1).fold(s).key))
            for i in range(R):
                mean, held = stacked([at(stage, i) for stage in stages])
                updates, memory = jax.vmap(OPTIMISER.update)(mean, rows[i].opt_state)
                params = optax.apply_updates(rows[i].params, updates)
                rows[i] = rows[i].replace(params=params, opt_state=memory, exchange=held)
            close(state, stacked(rows))
        kept = jax.tree.leaves((state.links, state.exchange))
        assert any(not np.array_equal(*a) for a in kept), 'replicas have states of their own'


def test_bytes_of_both_in_one_table():
    """What is reported is what the compiled step's collectives are handed."""
    g = make('top_k(0.25)', 'uniform(4)', 'all_gather(ef(one_bit))')
    x, y = (a.astype(np.float32) for a in batches())
    sizes = g.bytes(x[0])
    state = g.init(jax.random.key(0), x[0])
    found = operands(jit(g.step).lower(state, x[0], y[0]).compile().as_text())
    [row] = sizes['bytes']
    assert row['uncompressed'] == M * B * 16 * 4
    assert M * found['collective-permute'] == row['forward'] + row['backward']
    handed = sizes['exchange']['handed']
    assert found['all-gather'] == handed['all-gather']
    losses = 2 * 4  # summed over the stages, and over the replicas
    assert found['all-reduce'] == handed['all-reduce'] + losses
    params = sum(a.size for a in jax.tree.leaves(state.params)) // R // S
    assert sizes['exchange']['uncompressed'] == 4 * params


def test_refused():
    g = make('raw', 'raw', 'mean')
    with pytest.raises(ValueError, match='batch of 7 does not divide into 2 replicas'):
        g.init(jax.random.key(0), np.ones((7, 5), np.float32))
    with pytest.raises(ValueError, match='exchange changes with the epochs'):
        make('raw', 'raw', 'dgc(0.1, warmup=2)')
    drawn, x = make('raw', 'raw', 'all_reduce(random_k(0.1))'), np.ones((12, 5), np.float32)
    state = drawn.init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r'random_k needs ctx\.key'):
        drawn.step(state, x, x[:, :3])
    kept = make('ef(raw)', 'raw', 'mean')
    state, x = kept.init(jax.random.key(0), x), np.ones((8, 5), np.float32)
    with pytest.raises(ValueError, match='links were made for buffers'):
        kept.step(state, x, x[:, :3])
    with pytest.raises(ValueError, match=r"axes 'replica' and 'stage', got \('stage',\); make it"):
        make('raw', 'raw', 'mean', device_mesh(stage=2))
    devices = np.array(jax.devices()).reshape(4, 1)
    with pytest.raises(ValueError, match='2 stages on a mesh of 1 devices'):
        make('raw', 'raw', 'mean', Mesh(devices, ('replica', 'stage')))
    with pytest.raises(ValueError, match='2 replicas x 4 stages need 8 devices, there are 4'):
        device_mesh(replica=2, stage=4)
