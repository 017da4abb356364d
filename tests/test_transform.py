"""An exchange in an optax loop of one's own: written by hand, and as a gradient transformation."""

import functools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxmp import exchange
from jaxmp.exchange import AXIS, over, transform
from jaxmp.runtimes.placement import device_mesh
from tests import laws
from tests.base import slow
from tests.laws import QUICK

SEED = 7
KERNEL = {'w': np.zeros((20, 15), np.float32)}
EACH = P(AXIS)
jit = functools.partial(jax.jit, compiler_options=QUICK)


def loss(params, x, y):
    h = jnp.tanh(x @ params['w'] + params['b'])
    return jnp.mean((h @ params['v'] - y) ** 2)


def parameters():
    r = np.random.default_rng(0)
    return {k: r.standard_normal(s) for k, s in (('w', (20, 15)), ('b', (15,)), ('v', (15, 14)))}


def by_hand(e, optimizer, state, batch, key):
    """The next parameters and states of a replica."""
    params, memory, held = state
    grads, held = e.reduce(jax.grad(loss)(params, *batch), held, key, over())
    updates, memory = optimizer.update(grads, memory, params)
    params, held = e.after_update(optax.apply_updates(params, updates), held, key, over())
    return params, memory, held


def one(tree):
    return jax.tree.map(lambda a: a[0], tree)


def rows(tree, n):
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *np.shape(a))), tree)


def trained(device, state, n, steps=3):
    """The states after each of some steps of n replicas, on the same joined batches."""
    r, specs = np.random.default_rng(1), (EACH, EACH, P())
    step = jit(jax.shard_map(device, mesh=device_mesh(replica=n), in_specs=specs, out_specs=EACH))
    found = []
    for t in range(steps):
        key = jax.random.fold_in(jax.random.key(SEED), t)
        batch = r.standard_normal((8, 20)), r.standard_normal((8, 14))
        state = step(state, batch, key)
        found.append(jax.device_get(state))
    return found


def trained_by_hand(text, n, optimizer):
    e, params = exchange.parse(text), parameters()

    def device(state, batch, key):
        return rows(by_hand(e, optimizer, one(state), batch, key), 1)

    return trained(device, rows((params, optimizer.init(params), e.init(params, n)), n), n)


@pytest.mark.parametrize(
    'text',
    slow(
        ['mean', 'all_gather(ef21(raw))', 'scatter_gather(ef(raw), ef(raw))', 'local_sgd(1)'],
        lambda text: text in ('mean', 'all_gather(ef21(raw))'),
    ),
)
def test_exact_exchanges_are_one_replica_on_the_joined_batch(text):
    with jax.enable_x64(True):
        optimizer = optax.sgd(0.1, momentum=0.9)
        want = trained_by_hand('mean', 1, optimizer)[-1][0]
        for n in (2, 4):
            found = trained_by_hand(text, n, optimizer)[-1][0]
            for name, a in found.items():
                for i in range(n):
                    np.testing.assert_allclose(a[i], want[name][0], rtol=1e-12, atol=1e-12)


# The same loop with a gradient transformation.


def alike(a, b):
    """Equal but for the rounding of float64, in every leaf."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ('text', 'chained'),
    slow(
        [
            ('all_gather(ef(one_bit))', True),
            ('all_gather(qsgd(4))', True),  # draws anew in every step
            ('power_sgd(2)', False),
            ('local_sgd(2)', False),
        ],
        lambda case: case[0].startswith(('power', 'all_gather(qsgd')),
    ),
)
def test_a_transformation_is_the_loop_written_by_hand(text, chained):
    with jax.enable_x64(True):
        sgd, params, n = optax.sgd(0.1, momentum=0.9), parameters(), 2
        give = functools.partial(transform, key=SEED, replicas=n)
        optimizer = optax.chain(give(text), sgd) if chained else give(text, sgd)

        def device(state, batch, key):
            params, memory = state
            params = one(params)
            memory = (memory[0], one(memory[1])) if chained else memory
            updates, memory = optimizer.update(jax.grad(loss)(params, *batch), memory, params)
            memory = (memory[0], rows(memory[1], 1)) if chained else memory
            return rows(optax.apply_updates(params, updates), 1), memory

        memory = optimizer.init(params)
        memory = (memory[0], rows(memory[1], n)) if chained else memory
        found = trained(device, (rows(params, n), memory), n)
        want = trained_by_hand(text, n, sgd)
        for t, ((p, state), (p_, memory_, held_)) in enumerate(zip(found, want, strict=True), 1):
            own = state[0] if chained else state
            alike(p, p_)
            alike(own.held, held_)
            alike(state[1] if chained else own.inner, memory_)
            assert own.step.tolist() == [t, t]
            apart = max(np.max(np.abs(a[0] - a[1])) for a in p.values())
            assert apart > 1e-3 if text == 'local_sgd(2)' and t != 2 else apart < 1e-15


def test_the_loop_in_the_documentation_runs():
    """One step of 1 bit, from zeros, is minus the rate times the mean of what replicas sent."""
    page = (pathlib.Path(__file__).parents[1] / 'docs' / 'exchanges.md').read_text()
    (code,) = (c for c in re.findall(r'```python\n(.*?)```', page, re.S) if 'shard_map' in c)
    names = {}
    exec(code, names)
    x, y = (np.asarray(names[k], np.float64).reshape(4, 8, -1) for k in 'xy')
    grads = np.stack([-2 * a.T @ b / b.size for a, b in zip(x, y, strict=True)])
    sent = np.stack([np.mean(np.abs(g)) * np.where(g < 0, -1, 1) for g in grads])
    np.testing.assert_allclose(names['params']['w'], -0.1 * sent.mean(0), rtol=1e-4)
    np.testing.assert_allclose(names['params']['b'], 0.2 / 10, rtol=1e-5)
    state, _ = names['state']
    ((errors, _),) = state.held[0]
    np.testing.assert_allclose(errors.reshape(4, 20, 10), grads - sent, atol=1e-6)
    assert all(a.sharding.spec[0] == AXIS for a in jax.tree.leaves(state))


def test_a_state_may_be_made_inside_or_outside():
    """The same rows; of a random key and of random factors, too."""
    mesh, key = device_mesh(replica=2), jax.random.key(3, impl='rbg')
    make = lambda **words: transform('power_sgd(2)', optax.adam(0.1), key=key, **words).init
    inside = jit(jax.shard_map(make(), mesh=mesh, in_specs=P(), out_specs=EACH))(KERNEL)
    outside = make(replicas=2)(KERNEL)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def refused(text='all_gather(ef(one_bit))', over=AXIS, spec=EACH, **words):
    """What a wrong use of the transformation raises, without a compilation."""
    if text == 'local_sgd(2)':
        words = {'optimizer': optax.sgd(0.1), **words}
    optimizer, grads = transform(text, **words), {'w': jnp.zeros((2, 20, 15))}
    update = lambda g, s: optimizer.update(one(g), s)
    if over:
        mesh = device_mesh(**{over: 2})
        update = jax.shard_map(update, mesh=mesh, in_specs=(P(over), spec), out_specs=P(over))
    jax.eval_shape(lambda g: update(g, optimizer.init(one(g))), grads)


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (
            {},
            r'number of replicas along .replica. is not known; give \w+\(..., replicas=n\), or',
        ),
        ({'replicas': 2, 'over': None}, 'where there is no mesh axis .replica.; call it inside'),
        ({'replicas': 2, 'over': 'data', 'spec': P('data')}, r'or name .*\(..., axis=...\)'),
        ({'replicas': 4}, r'got a step of shape \(2,\); give .* call .*\(..., replicas=2\)'),
        ({'replicas': 2, 'spec': P()}, r"of shape \(2,\); give .* PartitionSpec\('replica'\) in"),
        ({'text': 'local_sgd(2)', 'replicas': 2}, r'call update\(grads, state, params\)'),
        ({'text': 'local_sgd(2)', 'optimizer': None}, r"write transform\('local_sgd\(2\)', optax."),
        ({'text': 'dgc(0.1, warmup=2)'}, r"\(parse\('dgc\(0.1, warmup=2\)'\).phase\(t\)\)"),
    ],
)
def test_a_wrong_use_is_refused(words, says):
    with pytest.raises(ValueError, match=says):
        refused(**words)


def test_another_number_of_replicas_is_refused():
    init = transform('mean', replicas=4).init
    run = jax.shard_map(init, mesh=device_mesh(replica=2), in_specs=P(), out_specs=EACH)
    with pytest.raises(ValueError, match=r'=4\), and the mesh axis .replica. has 2 replicas'):
        jax.eval_shape(run, KERNEL)


def test_the_states_of_all_phases_are_alike():
    e = exchange.parse('dgc(0.1, warmup=2)')
    first, last = (jax.eval_shape(transform(e.phase(t), replicas=2).init, KERNEL) for t in (0, 2))
    assert first == last
    assert e.phase(0) != e.phase(2)


# Gradients that are not finite.

PHASES = [(t, p) for t in laws.EXCHANGES for p in range(1 + ('frozen_adam' in t))]

SIMILAR = 'bucketed|demo|random_k|dgc|ef21|qsgd|per_layer|diloco.1'  # to others


@pytest.mark.parametrize(
    ('text', 'phase'),
    slow(PHASES, lambda case: re.search(SIMILAR, case[0])),
)
def test_a_step_that_one_replica_cannot_take_is_taken_by_none(text, phase):
    """Nor remembered: the next is as if it had never been. One element of one replica is bad."""
    r, params = np.random.default_rng(0), {'b': np.zeros(7, 'f4'), 'w': np.zeros((20, 15), 'f4')}
    gradients = lambda: {
        k: r.standard_normal((2, *a.shape)).astype('f4') for k, a in params.items()
    }

    def stepping(e):
        optimizer = transform(e, optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 5), replicas=2)

        def device(grads, state, params):
            updates, state = optimizer.update(one(grads), state, one(params))
            return rows(optax.apply_updates(one(params), updates), 1), state

        words = {'mesh': device_mesh(replica=2), 'in_specs': EACH, 'out_specs': EACH}
        return optimizer, jit(jax.shard_map(device, **words, check_vma=False))

    (optimizer, warm), e = (
        stepping(exchange.parse(text).phase(0)),
        exchange.parse(text).phase(phase),
    )
    run, before, state = stepping(e)[1] if phase else warm, rows(params, 2), optimizer.init(params)
    for _ in range(2):
        before, state = warm(gradients(), state, before)
    later = gradients()
    want, wanted = run(later, state._replace(step=state.step + 1), before)
    for bad, name in ((np.nan, 'w'), (np.inf, 'b'), (-np.inf, 'w')):
        grads = gradients()
        grads[name].reshape(2, -1)[1, 5] = bad
        now, after = run(grads, state, before)
        assert all(np.isfinite(a).all() for a in jax.tree.leaves((now, after)))
        if e.shares_params:  # each takes its own step, or not
            continue
        equal((now, after.held), (before, state.held))
        assert after.inner.notfinite_count.tolist() == [1, 1]
        now, after = run(later, after, now)
        equal((now, after.held), (want, wanted.held))
        equal(after.inner.inner_state, wanted.inner.inner_state)


def equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)
