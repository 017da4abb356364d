"""Exchanges over four devices: each against its equations, its bytes against the compiled program.

The equations are written with numpy, a loop over the replicas, in float64.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.fft
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Ctx, exchange
from jaxmp.contrib.frozen_adam import frozen_adam
from jaxmp.exchange import AXIS, bytes_of, over
from jaxmp.exchange.collectives import sent
from jaxmp.exchange.hlo import operands
from jaxmp.runtimes.placement import device_mesh
from tests import laws
from tests.base import slow
from tests.laws import QUICK

STEPS = 3
SHAPES = {'b': (7,), 'w': (2, 3, 5, 7)}  # biases are small, the kernel is compressed
TWO = {**SHAPES, 'z': (21, 10)}
jit = functools.partial(jax.jit, compiler_options=QUICK)


def gradients(n, dtype=np.float64):
    """Of every step, by name, ``(n, ...)``."""
    r = np.random.default_rng(n)
    make = lambda shape: (r.standard_normal((n, *shape)) * r.uniform(0.1, 3)).astype(dtype)
    return [{k: make(s) for k, s in SHAPES.items()} for _ in range(STEPS)]


def program(text, n, cast=True):
    """``(gradients, state, key) -> (gradients, state)`` of all replicas, not compiled.

    As in a user's loop: the parameters are replicated, and of a loss of each replica's own batch
    jax.grad makes the given gradient. Without ``cast`` it makes the sum over the replicas.
    """
    e = exchange.parse(text)

    def device(params, batch, state, key):
        batch, state = jax.tree.map(lambda a: a[0], (batch, state))
        own = jax.lax.pcast(params, AXIS, to='varying') if cast else params
        grads = jax.grad(lambda p: sum(jnp.vdot(p[k], batch[k]) for k in p))(own)
        grads, state = e.reduce(grads, state, key, over())
        return jax.tree.map(lambda a: a[None], e.after_update(grads, state, key, over()))

    specs = (P(), P(AXIS), P(AXIS), P())
    run = jax.shard_map(device, mesh=device_mesh(replica=n), in_specs=specs, out_specs=P(AXIS))
    zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape[1:], a.dtype), tree)
    return jit(lambda grads, state, key: run(zeros(grads), grads, state, key))


def first(text, grads, n):
    state = exchange.parse(text).init(jax.tree.map(lambda a: a[0], grads), n)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), state)


@functools.cache
def ran(text, n, dtype=np.float64):
    """Compiled program, results of every step and the last state; replicas are alike to the bit."""
    with jax.enable_x64(dtype == np.float64):
        grads = gradients(n, dtype)
        state = first(text, grads[0], n)
        compiled = program(text, n).lower(grads[0], state, jax.random.key(0)).compile()
        out = []
        for t, g in enumerate(grads):
            y, state = jax.device_get(compiled(g, state, jax.random.key(t)))
            if 'local' not in text:
                for a in jax.tree.leaves(y):
                    assert all((a[0] == row).all() for row in a)
            out.append(y)
        return compiled.as_text(), out, state


# The equations.


def one_bit(p):
    return np.mean(np.abs(p)) * np.where(p < 0, -1, 1)


def top(fraction):
    def C(p):
        flat = p.reshape(-1)
        k = flat.size - int(flat.size * (1 - fraction))
        y = np.zeros_like(flat)
        at = np.argsort(-np.abs(flat), kind='stable')[:k]
        y[at] = flat[at]
        return y.reshape(p.shape)

    return C


def ef(C):
    def mean(grads, key):
        e = {}
        for g in grads:
            p = g + e.get('e', 0)
            m = np.stack([C(row) for row in p])
            e['e'] = p - m
            yield m.mean(0)

    return mean


def ef21(C):
    def mean(grads, key):
        state = np.zeros_like(grads[0])
        for g in grads:
            state = state + np.stack([C(a - b) for a, b in zip(g, state, strict=True)])
            yield state.mean(0)

    return mean


def plain(text, shared=False):
    """A random codec, with the keys that a replica uses: of step, array and sender."""
    codec = jaxmp.parse(text).codec

    code = jit(lambda x, c: codec.decode(codec.encode(x, c), jaxmp.like(x), c))

    def mean(grads, leaf):
        for t, g in enumerate(grads):
            rows = []
            for i, x in enumerate(g):
                c = Ctx(jax.random.key(t)).fold(leaf)
                c = c if shared else c.fold(i)
                x = x.reshape(1, -1)
                rows.append(code(x, c).reshape(g.shape[1:]))
            yield np.mean(rows, 0)

    return mean


def random_with_memory(grads, leaf):
    codec, e = jaxmp.parse('random_k(0.1)').codec, 0
    code = jit(lambda x, c: codec.decode(codec.encode(x, c), jaxmp.like(x), c))
    for t, g in enumerate(grads):
        c, p = Ctx(jax.random.key(t)).fold(leaf), np.mean(g, 0).reshape(1, -1) + e
        y = np.asarray(code(p, c))
        e = p - y
        yield y.reshape(g.shape[1:])


def two_ways(grads, leaf):
    C = one_bit
    n, size = len(grads[0]), grads[0][0].size
    part = -(-size // n)
    e, E = np.zeros((n, n, part)), np.zeros((n, part))
    for g in grads:
        p = np.pad(g.reshape(n, -1), ((0, 0), (0, n * part - size))).reshape(n, n, part) + e
        m = np.stack([[C(a) for a in row] for row in p])
        e = p - m
        q = m.mean(0) + E
        reply = np.stack([C(a) for a in q])
        E = q - reply
        yield reply.reshape(-1)[:size].reshape(g.shape[1:])


def low_rank(grads, leaf):
    rank = 2
    rows, columns = int(np.prod(grads[0].shape[1:-1])), grads[0].shape[-1]
    Q = np.asarray(jax.random.normal(jax.random.key(leaf), (columns, rank), jnp.float64))
    e = np.zeros((len(grads[0]), rows, columns))
    for g in grads:
        M = g.reshape(-1, rows, columns) + e
        P = np.linalg.qr(np.mean(M @ Q, 0))[0]
        Q = np.mean(M.transpose(0, 2, 1) @ P, 0)
        e = M - P @ Q.T
        yield (P @ Q.T).reshape(g.shape[1:])


def momentum_corrected(grads, leaf):
    C = top(0.1)
    u = v = np.zeros_like(grads[0])
    for g in grads:
        u = 0.5 * u + g
        v = v + u
        sends = np.stack([C(row) for row in v])
        u, v = np.where(sends != 0, 0, u), np.where(sends != 0, 0, v)
        yield sends.mean(0)


def of_momentum(equation, m):
    def mean(grads, leaf):
        heavy = [grads[0]]
        for g in grads[1:]:
            heavy.append(m * heavy[-1] + g)
        yield from equation(heavy, leaf)

    return mean


EQUATIONS = {
    'mean': lambda grads, leaf: (g.mean(0) for g in grads),
    'all_reduce(random_k(0.1))': plain('random_k(0.1)', shared=True),
    'all_reduce(ef(random_k(0.1)))': random_with_memory,
    'all_gather(ef(one_bit))': ef(one_bit),
    'all_gather(ef21(top_k(0.1)))': ef21(top(0.1)),
    'all_gather(qsgd(4))': plain('qsgd(4)'),
    'double_squeeze(one_bit)': two_ways,
    'power_sgd(2)': low_rank,
    'dgc(0.1, momentum=0.5)': momentum_corrected,
    'momentum(all_gather(ef21(top_k(0.1))), 0.5)': of_momentum(ef21(top(0.1)), 0.5),
    'per_layer(all_gather(ef(one_bit)), smallest=100)': ef(one_bit),
}
ALSO_TWO = ('mean', 'all_gather(ef(one_bit))', 'double_squeeze(one_bit)')


@pytest.mark.parametrize(
    ('text', 'n'),
    slow(
        [*((t, 4) for t in EQUATIONS), *((t, 2) for t in ALSO_TWO)],
        lambda case: re.search('random_k|qsgd|^momentum|per_layer', case[0]) or case[1] == 2,
    ),
)
def test_replicas_do_what_the_equations_say(text, n):
    grads = gradients(n)
    _, out, _ = ran(text, n)
    with jax.enable_x64(True):
        for y, want in zip(out, EQUATIONS[text]([g['w'] for g in grads], 0), strict=True):
            np.testing.assert_allclose(y['w'][0], want, rtol=1e-12, atol=1e-12)
    heavy = 0.0
    for g, y in zip(grads, out, strict=True):  # the small ones: their mean, perhaps with momentum
        heavy = (0.5 if 'momentum' in text else 0.0) * heavy + g['b'].mean(0)
        np.testing.assert_allclose(y['b'][0], heavy, rtol=1e-12)


@pytest.mark.parametrize('text', ['mean', 'power_sgd(2)', 'all_reduce(ef(random_k(0.1)))'])
def test_what_adds_is_one_replica_on_the_mean(text):
    """Four replicas give what one gives on their mean gradient: on the joined batch."""
    with jax.enable_x64(True):
        joined = [jax.tree.map(lambda a: a.mean(0, keepdims=True), g) for g in gradients(4)]
        run, state = program(text, 1), first(text, joined[0], 1)
        for t, (g, y) in enumerate(zip(joined, ran(text, 4)[1], strict=True)):
            one, state = run(g, state, jax.random.key(t))
            for name in SHAPES:
                np.testing.assert_allclose(y[name][0], one[name][0], rtol=1e-12, atol=1e-12)


def test_double_squeeze_telescopes():
    """sum y = sum mean g - (E + mean e)."""
    _, out, state = ran('double_squeeze(one_bit)', 4)
    (kept,), size = state[0], out[0]['w'][0].size
    e, E = kept['up'][:, :, 0], kept['down'][:, 0]  # by replica and part; by replica
    left = (e.mean(0) + E).reshape(-1)[:size].reshape(SHAPES['w'])
    all_ = sum(g['w'].mean(0) for g in gradients(4))
    np.testing.assert_allclose(sum(y['w'][0] for y in out), all_ - left, rtol=1e-9, atol=1e-12)


def test_ef21_uses_the_mean_of_the_senders_buffers():
    _, out, state = ran('all_gather(ef21(top_k(0.1)))', 4)
    ((mine, mean),) = state[0]
    np.testing.assert_allclose(mine.mean(0), mean[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(mean[0].reshape(SHAPES['w']), out[-1]['w'][0], rtol=1e-12)


def alone(text, grads, steps):
    """One replica, without a mesh: the results of ``steps`` of the same gradient."""
    e = exchange.parse(text)
    via, found = exchange.metered(1, {}), []
    state = e.init(grads, 1)
    run = jit(lambda g, s, key: e.reduce(g, s, key, via))
    for t in range(steps):
        y, state = run(grads, state, jax.random.key(t))
        found.append(y)
    return found


def test_ef21_of_a_constant_gradient_comes_closer_by_its_contraction():
    with jax.enable_x64(True):
        g = {'w': np.random.default_rng(0).standard_normal((20, 20))}
        lost = [np.sum((y['w'] - g['w']) ** 2) for y in alone('all_gather(ef21(top_k(0.2)))', g, 4)]
        for t, square in enumerate(lost, 1):
            assert square <= 0.8**t * np.sum(g['w'] ** 2)
        same = alone('all_gather(ef21(raw))', g, 2)
        np.testing.assert_array_equal(same[1]['w'], g['w'])


def test_power_sgd_is_exact_for_its_rank():
    with jax.enable_x64(True):
        r = np.random.default_rng(0)
        g = {'w': r.standard_normal((30, 2)) @ r.standard_normal((2, 25)), 'z': np.zeros((30, 25))}
        for y in alone('power_sgd(2)', g, 2):
            np.testing.assert_allclose(y['w'], g['w'], rtol=1e-10, atol=1e-12)
            np.testing.assert_array_equal(y['z'], 0)


@pytest.mark.parametrize('masking', [True, False])
def test_dgc_that_sends_all_is_sgd_with_or_without_momentum(masking):
    """With factor masking the momentum never gathers."""
    with jax.enable_x64(True):
        g = {'w': np.random.default_rng(0).standard_normal((20, 20))}
        found = alone(f'dgc(1.0, momentum=0.5, masking={masking})', g, 3)
        for t, y in enumerate(found):
            m = 1.0 if masking else sum(0.5**i for i in range(t + 1))
            np.testing.assert_allclose(y['w'], m * g['w'], rtol=1e-12)


def test_dgc_sends_or_keeps_all_of_its_momentum():
    """sent + v = sum of u, replica by replica in the mean; a masked u starts again."""
    with jax.enable_x64(True):
        e = exchange.parse('dgc(0.1, momentum=0.5, masking=False)')
        via, state, total, sent_ = exchange.metered(1, {}), None, 0, 0
        run = jit(lambda g, state, key: e.reduce(g, state, key, via))
        for g in (g['w'][0] for g in gradients(2)):
            state = e.init({'w': g}, 1) if state is None else state
            y, state = run({'w': g}, state, jax.random.key(0))
            total, sent_ = total + state[0]['u'][0], sent_ + y['w']
        np.testing.assert_allclose(sent_ + state[0]['v'][0], total, rtol=1e-12, atol=1e-12)


def test_dgc_clips_and_warms_up():
    g = {'w': np.ones((20, 20), np.float32)}
    (y,) = alone('dgc(1.0, clip=2.0)', g, 1)
    np.testing.assert_allclose(np.linalg.norm(y['w']), 2.0, rtol=1e-5)
    e = exchange.parse('dgc(0.01, warmup=2)')
    x = {'w': np.zeros((100, 100), np.float32)}
    sizes = [bytes_of(e.phase(t), x, 2)['handed']['all-gather'] for t in range(5)]
    # Values, and places of 14 bits in whole runs of 4.
    assert sizes == [2500 * 4 + 4375, 625 * 4 + 1099, *[100 * 4 + 175] * 3]


def test_local_sgd_meets_every_so_many_steps():
    """What settles is the mean in step 2 of 2; before that each replica's own."""
    grads, (_, out, _) = gradients(4), ran('local_sgd(2)', 4)
    np.testing.assert_array_equal(out[0]['w'], grads[0]['w'])
    np.testing.assert_allclose(out[1]['w'][3], grads[1]['w'].mean(0), rtol=1e-12)
    np.testing.assert_array_equal(out[2]['w'], grads[2]['w'])


def test_sums_of_halves_do_not_overflow():
    e, top_ = exchange.parse('all_reduce(fp16)'), np.full((4, 20, 20), 65504.0, np.float32)
    device = lambda g: e.reduce(g[0], e.init(g[0], 4), None, over())[0][None]
    run = jax.shard_map(device, mesh=device_mesh(replica=4), in_specs=P(AXIS), out_specs=P(AXIS))
    np.testing.assert_array_equal(jit(run)(top_), top_)


# Adam and cosines.


@functools.cache
def reducer(e):
    def device(grads, state, key):
        grads, state = jax.tree.map(lambda a: a[0], (grads, state))
        return jax.tree.map(lambda a: a[None], e.reduce(grads, state, key, over()))

    specs = {'in_specs': (P(AXIS), P(AXIS), P()), 'out_specs': P(AXIS)}
    return jit(jax.shard_map(device, mesh=device_mesh(replica=4), **specs))


def phased(text, steps):
    """Four replicas in a new epoch every step: their gradients, and what the optimizer gets."""
    e, found = exchange.parse(text), []
    grads = [*gradients(4), *({k: a[4:] for k, a in g.items()} for g in gradients(8))][:steps]
    with jax.enable_x64(True):
        state = first(text, grads[0], 4)
        for t, g in enumerate(grads):
            y, state = jax.device_get(reducer(e.phase(t))(g, state, jax.random.key(t)))
            assert all((a == a[:1]).all() for a in jax.tree.leaves(y))
            found.append({k: a[0] for k, a in y.items()})
    return grads, found


@pytest.mark.parametrize('inside', ['all_gather(raw)', 'all_gather(ef(one_bit))'])
def test_frozen_adam_is_adam_until_its_variance_is_frozen(inside):
    """Two steps of optax's Adam; then the momentum with error feedback, and no new variance."""
    grads, found = phased(f'frozen_adam({inside}, warmup=2)', 5)
    adam = optax.scale_by_adam(b1=0.9, b2=0.999, eps=1e-8)
    with jax.enable_x64(True):
        state = adam.init({k: a[0] for k, a in grads[0].items()})
        for g, y in zip(grads[:2], found[:2], strict=True):
            want, state = adam.update({k: a.mean(0) for k, a in g.items()}, state)
            for k in SHAPES:
                np.testing.assert_allclose(y[k], want[k], rtol=1e-12)
        m, e = jax.device_get(state.mu), 0.0
        for t, (g, y) in enumerate(zip(grads[2:], found[2:], strict=True), 3):
            p = 0.9 * m['w'] + 0.1 * g['w'] + e
            sent = p if 'raw' in inside else np.stack([one_bit(a) for a in p])
            e = p - sent
            m = {'w': sent.mean(0), 'b': 0.9 * m['b'] + 0.1 * g['b'].mean(0)}
            for k in SHAPES:
                root = np.sqrt(state.nu[k] / (1 - 0.999**2)) + 1e-8
                np.testing.assert_allclose(y[k], m[k] / (1 - 0.9**t) / root, rtol=1e-12)


def test_demo_shares_the_signs_of_the_largest_cosines_of_the_momentum():
    grads, found = phased('demo(0.25, 0.9, size=16, chunk=64)', 3)
    u = np.zeros((4, 256))
    for g, y in zip(grads, found, strict=True):
        u[:, :217] = 0.9 * u[:, :217] + np.concatenate([g['b'], g['w'].reshape(4, -1)], 1)
        c = scipy.fft.dct(u.reshape(4, 16, 16), norm='ortho').reshape(4, 4, 64)
        kept = np.stack([[top(0.25)(chunk) for chunk in row] for row in c])
        kept = kept.astype(jnp.bfloat16).astype(float)
        q = scipy.fft.idct(kept.reshape(4, 16, 16), norm='ortho').reshape(4, 256)
        q[:, 217:] = 0
        u = u - q
        want = q.mean(0)[7:217].reshape(SHAPES['w'])
        clear = np.abs(want) > 1e-4
        assert clear.mean() > 0.9
        np.testing.assert_array_equal(y['w'][clear], np.sign(want)[clear])


# Every exchange.


def test_the_laws_are_of_every_exchange():
    said = ' '.join(laws.EXCHANGES)
    assert all(f'{word}(' in said for word in exchange.RULES if word != 'mean')


@pytest.mark.parametrize('text', laws.EXCHANGES)
def test_a_first_state_can_be_donated(text):
    """With the parameters, of which it may be a copy."""
    params = {'b': jnp.ones(7), 'w': jnp.ones((20, 15))}
    e = exchange.parse(text).phase(0)
    states = e.init(params, 2), exchange.transform(e, optax.adam(0.1), replicas=2).init(params)
    laws.donate((params, states))


NO_GRADIENT = np.zeros((24, 20), bool)
NO_GRADIENT[4:8], NO_GRADIENT[:, 15:17], NO_GRADIENT[::3, ::4] = True, True, True
NOISY = ('all_gather(one_bit)', 'all_gather(trellis(2))', 'all_gather(ef21(rotate(lloyd(2), 64)))')


def travelled(exchanges, optimizer):
    """How far each element has gone after 12 steps of rate 1, in a kernel that is compressed."""
    r, steps = np.random.default_rng(0), 12
    size = np.exp(r.standard_normal(NO_GRADIENT.shape))
    params = {'w': np.zeros(NO_GRADIENT.shape, 'f4')}
    via, state = exchange.metered(1, {}), exchanges[0].init(params, 1)

    def step(e, g, held, memory, params, key):
        y, held = exchange.reduced(e, g, held, key, via)
        updates, memory = optimizer.update(y, memory, params)
        return held, memory, optax.apply_updates(params, updates)

    run, memory = jit(step, static_argnums=0), optimizer.init(params)
    for t in range(steps):
        g = np.where(NO_GRADIENT, 0, (r.standard_normal((2, *size.shape)).sum(0)) * size)
        e = exchanges[min(3 * t // steps, len(exchanges) - 1)]
        g = {'w': g.astype('f4')}
        state, memory, params = run(e, g, state, memory, params, jax.random.key(t))
    return np.abs(params['w'])


ADAPTIVE = {
    'frozen_adam': optax.sgd(1.0),
    'adamw': optax.adamw(1.0, weight_decay=0.0),
    'muon': optax.contrib.muon(1.0),
}


def adapts(text, name):
    """An exchange of gradients; `frozen_adam` takes those without a momentum of their own."""
    e = exchange.parse(text)
    return not (e.shares_params or e.by_epoch or (name == 'frozen_adam' and e.momentum))


PAIRS = [(t, n) for t in (*laws.EXCHANGES, *NOISY) for n in ADAPTIVE if adapts(t, n)]


@pytest.mark.parametrize(
    ('text', 'name'),
    slow(PAIRS, lambda pair: pair[1] != 'frozen_adam' or 'random_k' in pair[0]),
)
def test_an_element_without_a_gradient_goes_no_further_than_others(text, name):
    """What compression makes of its zeros is noise, which no variance of zero may divide."""
    e = exchange.parse(text)
    phases = frozen_adam(e).by_epoch if name == 'frozen_adam' else (e,)
    moved = travelled(phases, ADAPTIVE[name])
    assert moved[NO_GRADIENT].max() <= 1.5 * moved[~NO_GRADIENT].max()
    assert (moved[~NO_GRADIENT] > 0).mean() > 0.1
    if name == 'frozen_adam':
        assert not moved[NO_GRADIENT].any()


# In a loop of one's own.


@pytest.mark.parametrize('text', [*EQUATIONS, 'bucketed(all_gather(one_bit))', 'local_sgd(2)'])
def test_a_gradient_that_is_summed_already_is_refused(text):
    """Replicated parameters under JAX's default: n times the mean, and never compressed."""
    grads = gradients(4, np.float32)[0]
    with pytest.raises(ValueError, match=r"pcast\(params, 'replica', to='varying'\), or give"):
        jax.eval_shape(program(text, 4, cast=False), grads, first(text, grads, 4), None)


# Bytes.

MORE = ('all_reduce(fp16)', 'bucketed(all_gather(natural), 100)', 'scatter_gather(fp16, bf16)')


@pytest.mark.parametrize('text', [*EQUATIONS, *MORE, 'local_sgd(2)'])
def test_bytes_are_those_of_the_compiled_collectives(text):
    """In what is handed over and, after the compiler, in the operands; parameters as they are."""
    dtype = np.float64 if text in EQUATIONS or 'local' in text else np.float32
    compiled, _, _ = ran(text, 4, dtype)
    like = {k: jax.ShapeDtypeStruct(s, dtype) for k, s in SHAPES.items()}
    with jax.enable_x64(dtype == np.float64):
        e = exchange.parse(text)
        found = bytes_of(e, like, 4)
    assert {k: v // e.period for k, v in operands(compiled).items()} == found['handed']


def test_bytes_by_hand():
    """Two matrices of 210 elements, 7 biases raw; 2 replicas on a ring, or below a server."""
    like = {k: jax.ShapeDtypeStruct(s, 'float32') for k, s in TWO.items()}
    table = {
        'mean': ({'all-reduce': 1708}, 1708, {'up': 1708, 'down': 1708}),
        'all_gather(one_bit)': (
            {'all-gather': 2 * (27 + 4), 'all-reduce': 28},
            62 + 28,
            {'up': 90, 'down': 1708},
        ),
        'power_sgd(2)': (
            {'all-reduce': 4 * (2 * (30 + 7) + 2 * (21 + 10)) + 28},
            572,
            {'up': 572, 'down': 572},
        ),
        'scatter_gather(fp16, fp16)': (
            {'all-to-all': 840, 'all-gather': 420, 'all-reduce': 28},
            420 + 420 + 28,
            {'up': 868, 'down': 868},
        ),
        'scatter_gather(raw, one_bit)': (
            {'all-to-all': 1680, 'all-gather': 2 * (14 + 4), 'all-reduce': 28},
            840 + 36 + 28,
            {'up': 1708, 'down': 2 * 36 + 28},
        ),
        'local_sgd(2)': ({'all-reduce': 854}, 854, {'up': 854, 'down': 854}),
    }
    for text, (handed, ring, server) in table.items():
        found = bytes_of(exchange.parse(text), like, 2)
        assert found == {
            'uncompressed': 1708, 'handed': handed, 'sent': ring, 'server': server,
        }, text  # fmt: skip
    assert sent({'all-gather': 10}, 4) == 30


# Text.

REFUSED = {
    'top_k(0.1)': r'top_k\(0.1\) is not an exchange between replicas; write mean, all_gather',
    'all_reduce(one_bit)': 'these cannot be added; those of raw, fp16, bf16 and random_k can',
    'all_reduce(ef21(fp16))': r'would accumulate the rounding error; use all_gather\(ef21',
    'all_reduce(ef21(random_k(0.1, values=bf16)))': 'would accumulate the rounding error',
    'all_gather(aqsgd(raw, 3))': 'aqsgd stores activations per example; use ef or ef21',
    'all_gather(mean)': r'takes a codec or a feedback rule such as ef\(one_bit\), got mean$',
    'all_gather(same_support())': 'all_gather: same_support reuses the positions of an activation',
    'all_gather(klt(2))': 'all_gather: klt keeps the square of a row',
    'scatter_gather(fp16, ef(top_k(0.1, same_support())))': 'scatter_gather down: same_support',
    'double_squeeze(ef(raw))': 'ef takes a codec and got a feedback rule; rules do not nest',
    'power_sgd(0)': 'power_sgd rank 0 is not a positive integer',
    'local_sgd(0.5)': 'local_sgd steps 0.5 is not a positive integer',
    'dgc(10)': r'for 10 % write dgc\(0.1\)',
    'dgc(0.1, momentum=1.0)': r'the momentum is in \[0, 1\)',
    'momentum(mean)': 'momentum takes a rule such as all_gather',
    'momentum(all_gather(ef21(raw)), 1.0)': r'momentum m=1.0 is not in \[0, 1\)',
    'momentum(dgc(0.1), 0.5)': 'its rule has momentum already',
    'per_layer(mean)': 'per_layer takes a rule such as all_gather',
    'per_layer(power_sgd(1), smallest=-1)': 'smallest -1 is not a number of elements',
    'by_size(mean, power_sgd(1), 9)': "'by_size' is no word: per_layer does it; write per_layer",
    'by_name(mean, mean, mean)': "'by_name' is no word: no run used it",
    'frozen_adam(local_sgd(2))': r'and local_sgd\(2\) shares parameters',
    'frozen_adam(mean, 0)': 'warmup 0 is not a number of epochs, 1 or more',
    'frozen_adam(mean, b1=0.0)': r'b1 is in \(0, 1\)',
    'frozen_adam(dgc(0.1))': 'the rule has no momentum of its own',
    'demo(10)': r'for 10 % write demo\(0.1\)',
    'bucketed(power_sgd(1), elements=-1)': 'elements -1 is not a number of elements',
    'all_gather': r'all_gather needs its arguments: all_gather\(channel\)',
    'all_gathr(raw)': r"unknown word 'all_gathr' \(did you mean all_gather\?\)",
    '__import__("os")': "unknown word '__import__'",
}


@pytest.mark.parametrize('text', REFUSED)
def test_refused(text):
    with pytest.raises(jaxmp.SpecError, match=REFUSED[text]):
        exchange.parse(text)


def test_too_few_devices():
    with pytest.raises(ValueError, match=r'5 replicas need 5 devices, there are 4; on a CPU start'):
        device_mesh(replica=5)


@pytest.mark.parametrize('text', ['all_gather(one_bit)', 'double_squeeze(one_bit)', 'dgc(0.1)'])
def test_a_model_of_small_arrays_is_averaged(text):
    grads = {'w': np.arange(200, dtype=np.float32).reshape(2, 10, 10)}
    grads['b'] = np.ones((2, 10), np.float32)
    y, _ = program(text, 2)(grads, first(text, grads, 2), jax.random.key(0))
    for name, g in grads.items():
        np.testing.assert_allclose(y[name], np.broadcast_to(g.mean(0), g.shape), rtol=1e-6)
