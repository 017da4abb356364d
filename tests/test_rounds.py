"""Exchanges in rounds against numpy in float64: a loop over steps, replicas and fragments."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from jaxmp import exchange
from jaxmp.exchange import AXIS, bytes_of, over
from jaxmp.exchange.traffic import compiled_operands
from jaxmp.runtimes.placement import device_mesh
from tests.base import slow
from tests.laws import QUICK

RATE, ROUNDS = 0.05, 3
SHAPES = {'a': (20, 12), 'b': (12,), 'c': (16, 18)}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def start():
    r = np.random.default_rng(0)
    return {k: r.standard_normal(s) for k, s in SHAPES.items()}


def targets(n, steps):
    """Of every step and replica a point that the parameters are drawn to."""
    r = np.random.default_rng(n)
    return [{k: r.standard_normal((n, *s)) for k, s in SHAPES.items()} for _ in range(steps)]


@functools.cache
def ran(text, n, steps):
    """Parameters of all replicas after each of some steps of SGD, and the last state."""
    e, sgd = exchange.parse(text), optax.sgd(RATE)

    def device(both, batch, key):
        (params, held), batch = jax.tree.map(lambda a: a[0], (both, batch))
        grads = jax.tree.map(lambda p, y: p - y, params, batch)
        grads, held = e.reduce(grads, held, key, over())
        updates, _ = sgd.update(grads, sgd.init(params))
        both = e.after_update(optax.apply_updates(params, updates), held, key, over())
        return jax.tree.map(lambda a: a[None], both)

    with jax.enable_x64(True):
        specs = {'in_specs': (P(AXIS), P(AXIS), P()), 'out_specs': P(AXIS)}
        step = jit(jax.shard_map(device, mesh=device_mesh(replica=n), **specs))
        state = jax.tree.map(
            lambda a: np.broadcast_to(a, (n, *np.shape(a))), (start(), e.init(start(), n))
        )
        found = []
        for t, batch in enumerate(targets(n, steps)):
            state = jax.device_get(step(state, batch, jax.random.key(t)))
            found.append(state[0])
        return found, state[1]


# The equations.


def mean(changes, memory):
    return changes.mean(0), memory


def one_bit(changes, memory, decay=1.0):
    """With error feedback; a vector is averaged."""
    if changes.ndim == 2:
        return changes.mean(0), memory
    p = changes + decay * memory
    sent = np.stack([np.mean(np.abs(a)) * np.where(a < 0, -1, 1) for a in p])
    return sent.mean(0), p - sent


def momentum(lr, m):
    def outer(shared, change, u):
        u = m * u + change
        return shared - lr * (change + m * u), u

    return outer


def plain(lr):
    return lambda shared, change, u: (shared - lr * change, u)


class Case:
    """A text, and what it says; ``firsts`` has the step in which an array is first sent."""

    def __init__(self, text, rule, outer, H=2, firsts=None, delay=0, mix=0.0):
        self.text, self.rule, self.outer, self.H = text, rule, outer, H
        self.firsts, self.delay, self.mix = firsts or dict.fromkeys(SHAPES, H), delay, mix


EF = 'all_gather(ef(one_bit))'
CASES = [
    Case('local_sgd(2)', mean, plain(1.0)),
    Case('diloco(2, mean, outer=sgd(1.0))', mean, plain(1.0)),
    Case('diloco(2, mean)', mean, momentum(0.7, 0.9)),
    Case('diloco(2, all_gather(raw), nesterov(0.5, 0.8))', mean, momentum(0.5, 0.8)),
    Case(f'diloco(2, {EF}, outer=nesterov(0.7, 0.9))', one_bit, momentum(0.7, 0.9)),
    Case(
        'diloco(3, all_gather(ef(one_bit, decay=0.5)), outer=sgd(1.0))',
        functools.partial(one_bit, decay=0.5), plain(1.0), H=3,
    ),
    Case(  # 'a' and 'b' are less than half of the elements
        f'diloco(4, {EF}, outer=sgd(0.9), fragments=2, delay=1, mix=0.5)',
        one_bit, plain(0.9), 4, {'a': 2, 'b': 2, 'c': 4}, 1, 0.5,
    ),
    Case('diloco(4, mean, delay=3)', mean, momentum(0.7, 0.9), 4, None, 3),
]  # fmt: skip


def equations(case, n, steps):
    """The parameters of all replicas after each step, and the shared ones."""
    own = {k: np.stack([a] * n) for k, a in start().items()}
    shared, u = start(), {k: np.zeros_like(a) for k, a in start().items()}
    memory, flying = {k: np.zeros_like(a) for k, a in own.items()}, {}
    for t, batch in enumerate(targets(n, steps), 1):
        for k, first in case.firsts.items():
            own[k] = own[k] - RATE * (own[k] - batch[k])
            if t >= first and (t - first) % case.H == 0:
                flying[k], memory[k] = case.rule(shared[k] - own[k], memory[k])
            if k in flying and (t - first) % case.H == case.delay:
                shared[k], u[k] = case.outer(shared[k], flying[k], u[k])
                own[k] = case.mix * own[k] + (1 - case.mix) * shared[k]
        yield dict(own), dict(shared)


@pytest.mark.parametrize('n', slow([2, 4], (2).__eq__))
@pytest.mark.parametrize('case', CASES, ids=lambda case: case.text)
def test_rounds_do_what_the_equations_say(case, n):
    """Through three rounds; the shared parameters of all replicas have the same bits."""
    steps = ROUNDS * case.H + case.delay
    found, state = ran(case.text, n, steps)
    wanted = list(equations(case, n, steps))
    for t, (y, (own, _)) in enumerate(zip(found, wanted, strict=True), 1):
        for k in SHAPES:
            np.testing.assert_allclose(y[k], own[k], rtol=1e-12, atol=1e-13, err_msg=f'{t} {k}')
            if t % case.H == 0 and not case.mix and not case.delay:
                assert (y[k] == y[k][0]).all()
    if case.text != 'local_sgd(2)':
        equal = exchange.parse(case.text).shared(state)
        assert all((a == a[0]).all() for a in jax.tree.leaves(equal))
        got = dict(zip(sorted(SHAPES), [a for part in equal for a in part], strict=True))
        for k, a in got.items():
            np.testing.assert_allclose(a[0], wanted[-1][1][k], rtol=1e-12, atol=1e-13)


STREAMED = 'diloco(4, all_gather(ef(one_bit)), fragments=2, delay=1, mix=0.5)'
TEXTS = ('diloco(4, mean)', 'diloco(4, scatter_gather(fp16, one_bit))', STREAMED)


@pytest.mark.parametrize('text', TEXTS)
def test_bytes_of_a_round_are_those_of_the_compiled_collectives(text):
    """Per step a quarter of what the rule inside sends once; fragments change nothing."""
    e, inside = exchange.parse(text), exchange.parse(text[10:-1].partition(', frag')[0])
    like = {k: jax.ShapeDtypeStruct(s, 'float32') for k, s in SHAPES.items()}
    found, once = bytes_of(e, like, 4), bytes_of(inside, like, 4)
    assert found['handed'] == {k: v // 4 for k, v in once['handed'].items()}
    assert compiled_operands(e, like, device_mesh(replica=4)) == found['handed']


REFUSED = {
    'diloco(0, mean)': 'diloco steps 0 is not a positive integer',
    'diloco(8, one_bit)': 'diloco takes a rule such as',
    'diloco(8, local_sgd(2))': r'takes an exchange of gradients, and local_sgd\(2\) shares param',
    'diloco(8, mean, outer=mean)': r'outer must be nesterov\(0.7, 0.9\) or sgd\(1.0\), got mean',
    'diloco(8, mean, fragments=9)': 'fragments 9 is not an integer from 1 to the 8 steps',
    'diloco(8, mean, delay=8)': 'delay 8 is not an integer from 0 to 7, below steps',
    'diloco(8, mean, mix=1.0)': r'mix 1.0 is not in \[0, 1\); 0 takes the shared parameters',
    'diloco(8, mean, outer=sgd(0))': 'sgd lr=0, momentum=0.0: the rate is above 0',
    'diloco(8, mean, outer=nesterov(1.0, 1.0))': r'the momentum in \[0, 1\)',
    'nesterov(0.7, 0.9)': 'is not an exchange between replicas',
}


@pytest.mark.parametrize('text', REFUSED)
def test_refused(text):
    with pytest.raises(exchange.text.spec.SpecError, match=REFUSED[text]):
        exchange.parse(text)


@pytest.mark.parametrize('words', ['', ', fragments=2, delay=1, mix=0.5'])
def test_a_round_that_is_not_finite_is_no_round(words):
    """One replica's parameters are lost: it takes the shared ones, and all else goes on."""
    e = exchange.parse(f'diloco(2, all_gather(ef(one_bit)), outer=nesterov(0.5, 0.9){words})')

    def device(both, key):
        params, held = jax.tree.map(lambda a: a[0], both)
        return jax.tree.map(lambda a: a[None], e.after_update(params, held, key, over()))

    specs = {'in_specs': (P(AXIS), P()), 'out_specs': P(AXIS)}
    run = jit(jax.shard_map(device, mesh=device_mesh(replica=2), **specs))
    rows = lambda tree: jax.tree.map(lambda a: np.stack([a, a]).astype(np.asarray(a).dtype), tree)
    own, r = jax.tree.map(np.float32, start()), np.random.default_rng(1)
    moved = lambda params: {
        k: a + r.standard_normal(a.shape).astype('f4') for k, a in params.items()
    }
    params, state = rows(own), rows(e.init(own, 2))
    for t in range(4):
        params, state = jax.device_get(run((moved(params), state), jax.random.key(t)))
    bad = moved(params)
    bad['a'][1, 3, 3] = np.nan
    after, now = bad, state
    for t in range(4, 6 + 2 * bool(words)):  # until what was sent has come
        after, now = jax.device_get(run((after, now), jax.random.key(t)))
    for part, before in zip(now['parts'], state['parts'], strict=True):
        for name in ('start', 'memory', 'held'):
            assert all(np.isfinite(a).all() for a in jax.tree.leaves((after, part[name])))
            if not words:
                jax.tree.map(np.testing.assert_array_equal, part[name], before[name])
    if not words:
        for k, a in after.items():
            np.testing.assert_array_equal(a[0], bad[k][0])  # its steps go into the next round
        own = jax.tree.leaves({k: a[1] for k, a in after.items()})
        jax.tree.map(np.testing.assert_array_equal, own, [a[1] for a in now['parts'][0]['start']])
