"""Feedback rules: each is its equation, with sender and receiver run apart, message by message."""

import itertools
import math
from functools import lru_cache
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx, Like, spec
from jaxmp.feedback import settled
from jaxmp.feedback.anchored import hashed
from jaxmp.feedback.channel import StateOf
from jaxmp.feedback.components import ERRORS
from jaxmp.feedback.positions import joined, positions
from jaxmp.feedback.slots import per_microbatch
from jaxmp.wire import Need
from tests import laws

CODECS = ('log_scale(3)', 'block(2, size=32, rounding=stochastic)')  # top_k: test_golden.py
RULES = {  # text with a place for the codec
    'direct': '{}',
    'ef': 'ef({})',
    'ef21': 'ef21({})',
    'ef_mixed': 'ef_mixed(top_k(0.2, values={}))',
    'aqsgd': 'aqsgd({}, examples=7)',
}
STEPS, SHAPE = 4, (3, 40)
IDS = np.array([[0, 4, 2], [6, 4, 1], [2, 0, 4], [4, 5, 6]], np.int32)


def tensors(dtype):
    x = np.random.default_rng(0).standard_normal((STEPS, *SHAPE)) + np.arange(STEPS)[:, None, None]
    return np.asarray(jnp.asarray(x, dtype))


def at(step):
    return Ctx(jax.random.key(step), jnp.asarray(IDS[step]))


def run(text, xs):
    """The messages' effect: what arrives, and both ends' states after every step."""
    pair = laws.ends(jaxmp.parse(text), jaxmp.like(xs[0]))
    ys, txs, rxs = [], [], []
    tx, rx = pair.init()
    for step, x in enumerate(xs):
        _, y, tx, rx = pair.cross(x, tx, rx, at(step))
        ys.append(y)
        txs.append(tx)
        rxs.append(rx)
    return ys, txs, rxs


def equations(rule, C, xs):
    """The same by the paper's equations."""
    state = np.zeros((7, *SHAPE[1:]) if rule == 'aqsgd' else SHAPE)
    for step, x in enumerate(xs):
        ctx, ids = at(step), IDS[step]
        match rule:
            case 'direct':
                y = C(x, ctx)
            case 'ef':
                y = C(x + state, ctx)
                state = x + state - y
            case 'ef21':
                y = state = state + C(x - state, ctx)
            case 'aqsgd':
                y = state[ids] + C(x - state[ids], ctx)
                state = state.copy()
                state[ids] = y
        yield y, state


@pytest.mark.parametrize('codec', CODECS)
def test_rules_are_their_equations(codec):
    with jax.enable_x64(True):
        xs = tensors('float64')
        pair = laws.ends(jaxmp.parse(codec), jaxmp.like(xs[0]))
        for rule in ('direct', 'ef', 'ef21', 'aqsgd'):
            ys, txs, rxs = run(RULES[rule].format(codec), xs)
            want = equations(rule, lambda x, ctx: pair.cross(x, (), (), ctx)[1], xs)
            for y, tx, rx, (y_want, state) in zip(ys, txs, rxs, want, strict=True):
                np.testing.assert_allclose(y, y_want, atol=1e-12, err_msg=rule)
                for end in (tx, rx):
                    if not isinstance(end, tuple):
                        np.testing.assert_allclose(end, state, atol=1e-12, err_msg=rule)
            check_law(rule, xs, ys, txs)


def check_law(rule, xs, ys, states):
    """What follows from the equations, from the results alone."""
    if rule == 'ef':
        np.testing.assert_allclose(np.sum(ys, 0) + states[-1], np.sum(xs, 0), atol=1e-12)
        assert np.abs(states[-1]).max() > 0.01, 'something was left to remember'
    if rule == 'aqsgd':
        before = np.zeros_like(states[0])
        for ids, y, after in zip(IDS, ys, states, strict=True):
            others = np.setdiff1d(np.arange(7), ids)
            np.testing.assert_array_equal(np.asarray(after)[others], before[others])
            np.testing.assert_array_equal(np.asarray(after)[ids], y)
            before = np.asarray(after)


def test_ef_decays_what_was_not_sent():
    with jax.enable_x64(True):
        xs = tensors('float64')
        ys, es, _ = run('ef(top_k(0.25), decay=0.5)', xs)
    e = np.zeros(SHAPE)
    for x, y, e_sent in zip(xs, ys, es, strict=True):
        p = x + 0.5 * e
        e = p - largest(p, 10)
        np.testing.assert_allclose(y, p - e, rtol=1e-15, atol=0)
        np.testing.assert_allclose(e_sent, e, rtol=0, atol=1e-14)


def test_a_decay_of_1_is_error_feedback_and_others_are_refused():
    assert jaxmp.parse('ef(top_k(0.1), decay=1.0)') == jaxmp.parse('ef(top_k(0.1))')
    assert str(jaxmp.ef(jaxmp.fp16, decay=1.0)) == 'ef(fp16)'
    for decay in ('0', '1.5'):
        with pytest.raises(ValueError, match=rf'ef decay {decay} is not in \(0, 1\]; write ef'):
            jaxmp.parse(f'ef(fp16, decay={decay})')
    with pytest.raises(ValueError, match=r'ef decay must be a number in \(0, 1\], got True'):
        jaxmp.parse('ef(fp16, decay=True)')


def test_ef_remembers_what_bfloat16_rounds_off():
    xs = tensors('bfloat16')
    ys, es, _ = run('ef(log_scale(3))', xs)
    assert es[-1].dtype == 'float32'
    total = np.sum([y.astype(np.float64) for y in ys], 0) + es[-1]
    np.testing.assert_allclose(total, np.sum([x.astype(np.float64) for x in xs], 0), atol=1e-5)


def test_ef21_contracts_to_a_constant_input():
    """``|x - g|^2`` shrinks by ``1 - k / n`` a message under TopK, and so does what arrives."""
    x = tensors('float32')[0]
    ys, _, _ = run('ef21(top_k(0.25))', [x] * STEPS)
    left = [np.square(x).sum(1), *(np.square(x - y).sum(1) for y in ys)]
    for before, after in itertools.pairwise(left):
        assert (after <= 0.75 * before * (1 + 1e-6)).all()
    np.testing.assert_allclose(ys[-1], x, atol=1e-6)


def largest(x, k):
    """Every row's k largest magnitudes, the others zero."""
    kept = np.zeros_like(x)
    at = np.argsort(-np.abs(x), axis=1, kind='stable')[:, :k]
    np.put_along_axis(kept, at, np.take_along_axis(x, at, 1), 1)
    return kept


@pytest.mark.parametrize('accumulate', [False, True])
def test_ef_mixed_is_its_equation(accumulate):
    """8 of 40 values, 4 of the tensor and 4 of the error, added before they are sent."""
    with jax.enable_x64(True):
        xs = tensors('float64')
        ys, es, _ = run(f'ef_mixed(top_k(0.2), accumulate={accumulate})', xs)
    e, met = np.zeros(SHAPE), 0
    for x, y, e_sent in zip(xs, ys, es, strict=True):
        want = largest(x, 4) + largest(e, 4)
        np.testing.assert_allclose(y, want, rtol=1e-15, atol=0)
        e = e + x - want if accumulate else x - largest(x, 4)
        np.testing.assert_allclose(e_sent, e, rtol=0, atol=1e-14)
        met += 8 * len(x) - (y != 0).sum()
    assert met > 12, 'the two halves have met, besides in the first message, which has no error'
    if accumulate:
        np.testing.assert_allclose(np.sum(ys, 0) + np.asarray(es[-1]), np.sum(xs, 0), atol=1e-12)


def test_ef_mixed_is_one_message_of_k_values_whose_positions_are_known():
    like = Like((2, 65536), 'float32')
    mixed, plain = (jaxmp.parse(t) for t in ('ef_mixed(top_k(0.1))', 'top_k(0.1)'))
    assert jaxmp.bits(mixed, like) == jaxmp.bits(plain, like) == 2 * (6554 * 32 + 65536)
    x = tensors('float32')[0]

    @jax.jit
    def known(x):
        m, _ = mixed.send(x, jnp.zeros(SHAPE), Ctx())
        return mixed.codec.indices(m, jaxmp.like(x), Ctx())

    at = known(x)
    assert at.shape == (3, 4)
    assert [sorted(a[a >= 0]) for a in np.asarray(at)] == [
        sorted(np.flatnonzero(row)) for row in largest(x, 2)
    ], 'of a first message half the places are empty'
    odd = jaxmp.parse('ef_mixed(top_k(1.0))')
    assert jaxmp.bits(odd, Like((1, 7), 'float32')) == 7 * 32 + 32, 'no more than there are'


def test_ef_mixed_of_every_token():
    x = tensors('float32')[0].reshape(3, 4, 10)
    mixed = jaxmp.parse('ef_mixed(per_token(top_k(0.2)))')
    y, e = (a.reshape(12, 10) for a in sent(mixed, x, np.flip(x, 2)))
    want = largest(x.reshape(12, 10), 1) + largest(np.flip(x, 2).reshape(12, 10), 1)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(e, x.reshape(12, 10) - largest(x.reshape(12, 10), 1))


def sent(channel, x, state):
    m, after = jax.jit(channel.send)(x, state, Ctx())
    return jax.jit(lambda m: channel.recv(m, (), jaxmp.like(x), Ctx())[0])(m), after


@pytest.mark.parametrize('codec', ['uniform(4)', 'random_k(0.1)', 'rotate(top_k(0.1))'])
def test_ef_mixed_takes_what_has_a_number_of_values(codec):
    with pytest.raises(TypeError, match='no number K of values; take ef_mixed') as caught:
        jaxmp.ef_mixed(jaxmp.parse(codec).codec)
    assert str(caught.value).endswith(f'or ef({codec})')


def test_ids_out_of_range_are_not_dropped_silently():
    """NaN arrives for them, as a NaN of the data would, and no buffer changes."""
    x = tensors('float32')[0]
    channel = jaxmp.parse('aqsgd(top_k(0.1), examples=3)')
    pair = laws.ends(channel, jaxmp.like(x))
    ids = jnp.array([3, 1, -1])
    _, y, tx, rx = pair.cross(x, *pair.init(), Ctx(ids=ids))
    assert np.isnan(y[[0, 2]]).all()
    np.testing.assert_array_equal(y[1], largest(x, 4)[1])
    for end in (tx, rx):
        np.testing.assert_array_equal(end, np.stack([0 * y[1], y[1], 0 * y[1]]))


PRIMED = {  # either end's state after x itself was sent with ids 6, 4, 1
    'direct': lambda x, table: (),
    'ef': lambda x, table: np.zeros_like(x),
    'ef21': lambda x, table: x,
    'ef_mixed': lambda x, table: np.zeros_like(x),
    'aqsgd': lambda x, table: table,
}


@pytest.mark.parametrize('rule', RULES)
def test_warm_sends_the_tensor_and_primes(rule):
    channel = jaxmp.parse(RULES[rule].format('log_scale(3)'))
    xs = tensors('float32')
    like = jaxmp.like(xs[0])
    cold, warm = laws.ends(channel, like), laws.ends(jaxmp.warm(channel), like)
    _, _, tx, rx = cold.cross(xs[0], *cold.init(), at(0))
    table = np.array(tx) if rule == 'aqsgd' else np.zeros((7, *SHAPE[1:]))
    table[IDS[1]] = xs[1]
    m, y, tx, rx = warm.cross(xs[1], tx, rx, at(1))
    np.testing.assert_array_equal(m, xs[1])
    np.testing.assert_array_equal(y, xs[1])
    want = PRIMED[rule](xs[1], table)
    for end in (tx, rx):
        if not isinstance(end, tuple):
            np.testing.assert_array_equal(end, want)
    assert jaxmp.bits(jaxmp.warm(channel), like) == jaxmp.bits(jaxmp.parse('raw'), like)
    again = cold.cross(xs[1], tx, rx, at(1))[1]  # the states are the channel's own
    if rule in ('ef21', 'aqsgd'):
        np.testing.assert_array_equal(again, xs[1])  # nothing has changed since


def test_states_have_the_batch_shape_or_one_slot_an_example():
    for rule, form in RULES.items():
        shapes = [
            a.shape
            for a in jax.tree.leaves(
                jax.eval_shape(lambda f=form: jaxmp.parse(f.format('raw')).init(Like(SHAPE, 'f4')))
            )
        ]
        both = {'direct': 0, 'ef': 1, 'ef21': 2, 'ef_mixed': 1, 'aqsgd': 2}[rule]
        assert shapes == [(7, 40) if rule == 'aqsgd' else SHAPE] * both
        assert (jaxmp.parse(form.format('raw')).state_of == 'example') == (rule == 'aqsgd')


@pytest.mark.parametrize('rule', [jaxmp.direct, jaxmp.ef, jaxmp.ef21, jaxmp.ef_mixed])
@pytest.mark.parametrize('wrong', [jaxmp.ef(jaxmp.raw), jaxmp.bitmap, 3, jaxmp.top_k])
def test_a_rule_takes_a_codec(rule, wrong):
    with pytest.raises(TypeError, match=f'{rule.__name__} takes a codec'):
        rule(wrong)


# Every rule.


def test_the_laws_are_of_every_rule():
    said = ' '.join(laws.CHANNELS)
    assert all(f'{rule}(' in said for rule in spec.RULES)


@pytest.mark.parametrize('text', laws.CHANNELS)
def test_a_first_state_can_be_donated(text):
    channel, x = jaxmp.parse(text), Like((4, 8, 6), 'float32')
    laws.donate([c.init(x) for c in (channel, per_microbatch(channel, 1), jaxmp.warm(channel))])


@pytest.mark.slow
def test_a_channel_says_what_it_needs_and_what_its_state_belongs_to():
    """By a word alone, over a codec that draws, and in a phase."""
    words = [f'direct({t})' for t in laws.one_of_each_word()]
    channels = {t: jaxmp.parse(t) for t in (*laws.CHANNELS, *laws.DRAWING, *words)}
    warm = {f'warm({t})': jaxmp.warm(channels[t]) for t in laws.CHANNELS}
    indices = jnp.tile(jnp.array([3, ~7, 11, 40]), (4, 1))
    book = jnp.concatenate([jnp.arange(6.0)[None], jnp.eye(6)[::-1]])
    tokens = jnp.arange(32).reshape(4, 8) % 7
    ctx = Ctx(jax.random.key(2), jnp.array([3, 0, 8, 5]), indices, tokens=tokens, spread=book)
    laws.check_needs(channels | warm, Like((4, 8, 6), 'float32'), ctx)
    assert {c.state_of for c in channels.values()} == {*get_args(StateOf)}
    assert {need for c in channels.values() for need in c.needs} == {*get_args(Need)}


FINITE, BAD = (2, 4, 8, 6), (np.nan, np.inf, -np.inf)


def over(cut, step=0):
    """Messages over a boundary whose ends are apart: ``(x, states, number) -> (y, states)``."""

    def cross(x, states, number):
        tokens = number + jnp.arange(32).reshape(4, 8)
        ctx = Ctx(jax.random.key(number), jnp.array([3, 0, 8, 5]), tokens=tokens % 7)
        m, tx, _ = cut.send('fwd', x, states[0], ctx._replace(microbatch=step))
        y, rx, _ = cut.recv('fwd', m, states[1], (jaxmp.like(x), ctx._replace(microbatch=step)))
        return y, (tx, rx)

    return jax.jit(cross, compiler_options=laws.QUICK)


@lru_cache(64)
def crossing(text, step=0, slots=0):
    channel = jaxmp.parse(text)
    channel = per_microbatch(channel, slots) if slots else channel
    back = 'klt(2, refresh=2)' if 'by_gradient' in text else 'raw'
    return channel, over(jaxmp.boundary(channel, jaxmp.parse(back)), step)


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize('text', laws.CHANNELS)
def test_a_message_that_is_not_finite_leaves_both_ends_as_they_were(text):
    """And what comes after it arrives as if it had never been sent."""
    channel, cross = crossing(text)
    first, later = np.random.default_rng(0).standard_normal(FINITE).astype('f4')
    _, before = cross(first, channel.init(jaxmp.like(first)), 0)
    want = cross(later, before, 2)
    for bad in BAD:
        one = first.copy()
        one[:, 3, 2] = bad
        for x in (one, np.full_like(first, bad)):
            y, after = cross(x, before, 1)
            assert all(np.isfinite(a).all() for a in jax.tree.leaves(after))
            if np.isfinite(y).all():  # the element that was not has not been sent
                assert x is one
                assert 'random_k' in text
                continue
            same(after, before)
            same(cross(later, after, 2), want)


@pytest.mark.parametrize('text', laws.CHANNELS)
def test_a_warm_up_leaves_the_ends_as_they_were_too(text):
    channel, cold = crossing(text)
    hot = over(jaxmp.boundary(jaxmp.warm(channel, jaxmp.bf16), jaxmp.parse('klt(2, refresh=2)')))
    x = np.random.default_rng(0).standard_normal(FINITE[1:]).astype('f4')
    _, before = cold(x, channel.init(jaxmp.like(x)), 0)
    x[:, 3, 2] = np.nan
    y, after = hot(x, before, 1)
    assert np.isnan(y[:, 3, 2]).all()
    same(after, before)


def test_an_example_and_a_micro_batch_have_a_message_of_their_own():
    """What is not finite in one is nothing to the others."""
    x = np.random.default_rng(0).standard_normal(FINITE[1:]).astype('f4')
    for text in ('aqsgd(raw, 9)', 'aqsgd(raw, 9, table=4)'):
        channel, cross = crossing(text)
        _, before = cross(x, channel.init(jaxmp.like(x)), 0)
        bad = 2 * x
        bad[1, 3, 2] = np.inf  # of example 0
        _, after = cross(bad, before, 1)
        _, all_ = cross(2 * x, before, 1)
        for i, want in ((0, before), (3, all_), (8, all_), (5, all_)):
            jax.tree.map(lambda a, b, i=i: np.testing.assert_array_equal(a[i], b[i]), after, want)
    channel, cross = crossing('ef(top_k(0.1))', step=1, slots=3)
    _, ((e, _)) = cross(x, channel.init(jaxmp.like(x)), 0)
    assert [bool(a.any()) for a in e] == [False, True, False]
    _, (after, _) = cross(bad, (e, ()), 1)
    same(after, e)


def test_the_largest_numbers_are_finite():
    """What is kept is not decided by a sum that is beyond the largest float."""
    x = np.full((4, 3000), np.finfo('f4').max)
    for finite in (settled.finite, jax.jit(settled.finite, static_argnames='rows')):
        assert finite({'a': x, 'b': np.zeros(3, 'i4'), 'c': -x})
        assert finite(())
        for bad in BAD:
            y = x.copy()
            y[2, -1] = bad
            assert not finite([x, y])
            assert finite([x, y], rows=True).tolist() == [True, True, False, True]


# Tables in few bits.


def rounded(m, bits):
    """The rows of ``m``, of at most 64 elements, at ``2**bits`` levels from least to largest."""
    low, high = np.float16(m.min(1, keepdims=True)), m.max(1, keepdims=True)
    step = np.float16((high - np.float32(low)) * np.float32(1 / (2**bits - 1)))
    codes = np.clip(np.round((m - np.float32(low)) * (1 / np.float32(step))), 0, 2**bits - 1)
    return np.float32(low) + np.float32(codes) * np.float32(step)


@pytest.mark.parametrize('bits', [8, 4, 2])
def test_a_lean_table_is_its_equation_and_corrects_its_own_rounding(bits):
    """``y = Q(m) + C(x - Q(m))``, ``m = y``; under the raw codec y is x whatever Q lost."""
    xs, lost = tensors('float32'), []
    for codec in ('log_scale(3)', 'raw'):
        pair = laws.ends(jaxmp.parse(codec), jaxmp.like(xs[0]))
        ys, txs, rxs = run(f'aqsgd({codec}, examples=7, table={bits})', xs)
        table = np.zeros((7, SHAPE[1]), np.float32)
        for step, (x, y, tx, rx) in enumerate(zip(xs, ys, txs, rxs, strict=True)):
            known = table[IDS[step]]
            want = known + pair.cross(x - known, (), (), at(step))[1]
            np.testing.assert_array_equal(y, want)
            table[IDS[step]] = rounded(want, bits)
            jax.tree.map(np.testing.assert_array_equal, tx, rx)
            lost.append(np.abs(table[IDS[step]] - want).max())
            if codec == 'raw':
                np.testing.assert_allclose(y, x, rtol=0, atol=1e-6)
    assert {8: 1e-3, 4: 0.05, 2: 0.3}[bits] < max(lost) < {8: 0.05, 4: 0.5, 2: 2.5}[bits]


def test_a_lean_table_takes_its_bits():
    """And half a bit an element for the ends of the levels; a full one 32."""
    x = Like((4, 8, 8, 64), 'float32')
    for bits in (2, 4, 8, 32):
        channel = jaxmp.parse(f'aqsgd(raw, 100, table={bits})')
        size = sum(a.nbytes for a in jax.tree.leaves(channel.init(x)[0]))
        assert 8 * size / (100 * 8 * 8 * 64) == bits + 0.5 * (bits < 32)
    with pytest.raises(ValueError, match='table 3 is not 32, 8, 4 or 2 bits'):
        jaxmp.aqsgd(jaxmp.raw, 5, table=3)


# Anchors.

WORDS, LENGTH = 6, 5


def anchored_run(text, xs, tokens):
    pair = laws.ends(jaxmp.parse(text), jaxmp.like(xs[0]))
    tx, rx = pair.init()
    for step, x in enumerate(xs):
        _, y, tx, rx = pair.cross(x, tx, rx, at(step)._replace(tokens=tokens[step]))
        jax.tree.map(np.testing.assert_array_equal, tx, rx)
        yield y, tx


def sentences():
    r = np.random.default_rng(3)
    xs = r.standard_normal((STEPS, 3, LENGTH, 8)).astype('f4')
    return xs, r.integers(0, WORDS - 1, (STEPS, 3, LENGTH)).astype(np.int32)


@pytest.mark.parametrize(
    ('window', 'pairs', 'target', 'triples'),
    [
        *((w, p, False, 0) for w in (4, 1024) for p in (0, 2 * WORDS, WORDS**2)),
        (4, 0, True, 0),
        (1024, WORDS**2, True, 0),
        (1024, WORDS**2, False, 64),
        (4, 2 * WORDS, True, 37),
    ],
)
def test_anchors_are_their_equation(window, pairs, target, triples):
    """A loop over tokens; one of them never occurs, most occur several times in a batch."""
    xs, tokens = sentences()
    own = tokens
    if target:
        tokens = np.pad(own[..., 1:], ((0, 0), (0, 0), (0, 1)))
    before = np.pad(tokens[..., :-1], ((0, 0), (0, 0), (1, 0)))
    first = np.pad(before[..., :-1], ((0, 0), (0, 0), (1, 0)))
    codec, of_pair = 'block(2, size=32)', WORDS * before + tokens
    sizes = [WORDS, *filter(None, (pairs, triples))]
    numbers = [tokens, of_pair, np.asarray(hashed(jnp.uint32(WORDS**2 * first + of_pair)))]
    places = [a % n for a, n in zip(numbers, sizes, strict=False)]
    pair = laws.ends(jaxmp.parse(codec), jaxmp.like(xs[0]))
    tables = [np.zeros((n, 8)) for n in sizes]
    weights = [np.zeros(n) for n in sizes]
    words = f'window={window}, pairs={pairs}, target={target}, triples={triples}'
    for step, (y, found) in enumerate(
        anchored_run(f'anchored({codec}, {WORDS}, {words})', xs, own)
    ):
        rows = [p[step] for p in places]
        means = [table[at] for table, at in zip(tables, rows, strict=True)]
        known = sum(means).astype('f4')
        m = pair.cross((xs[step] - known).astype('f4'), (), (), at(step))[1]
        np.testing.assert_allclose(y, known + m, rtol=0, atol=1e-5)
        for k in range(len(sizes)):
            change = sum(means[k + 1 :]) + m
            for t in range(sizes[k]):
                here = change[rows[k] == t].astype('f8')
                weights[k][t] = max(len(here), min(weights[k][t] + len(here), window))
                tables[k][t] += here.sum(0) / max(weights[k][t] + (k > 0), 1)
            np.testing.assert_array_equal(found.weight, weights[k])
            np.testing.assert_allclose(found.mean, tables[k], rtol=0, atol=4e-3)  # 11 bits of 1 / w
            tables[k] = np.asarray(found.mean, 'f8')
            found = found.pairs
    assert weights[0].max() > 4 or window == 4, 'the window has been reached'
    assert not tables[0][-1].any()
    assert all(w.max() > 1 for w in weights)


def test_rows_of_triples_differ_in_each_token():
    """With 65,536 rows for bytes too, where a remainder alone would drop the first of three."""
    any_token = jnp.arange(256, dtype=jnp.uint32)
    numbers = 256**2 * any_token + 256 * 7 + 9, 256**2 * 3 + 256 * 7 + any_token
    rows = [np.unique(hashed(n) % 2**16) for n in numbers]
    assert min(map(len, rows)) > 250


def test_anchors_are_means_of_what_came_and_stay_in_the_vocabulary():
    xs, tokens = sentences()
    *_, (_, table) = anchored_run(f'anchored(raw, {WORDS})', xs, tokens)
    for t in range(WORDS - 1):
        np.testing.assert_allclose(table.mean[t], xs[tokens == t].mean(0), rtol=0, atol=4e-3)
    tokens[0, 0, :2] = -1, WORDS  # have no anchor; NaN arrives
    [(y, table)] = anchored_run(f'anchored(raw, {WORDS})', xs[:1], tokens)
    assert np.isnan(y[0, :2]).all()
    assert np.isnan(y).sum() == 2 * 8
    for t in range(WORDS - 1):
        want = xs[0][tokens[0] == t].mean(0) if (tokens[0] == t).any() else 0
        np.testing.assert_allclose(table.mean[t], want, rtol=0, atol=4e-3)


def test_anchors_need_a_token_for_each_position():
    x = Like((3, LENGTH, 8), 'float32')
    channel = jaxmp.parse(f'anchored(raw, {WORDS})')
    for ctx in (Ctx(), Ctx(tokens=jnp.zeros((3, 4), int))):
        with pytest.raises(ValueError, match=r'needs ctx.tokens of shape \(3, 5\).*use ef21'):
            jax.eval_shape(channel.send, x, channel.init(x)[0], ctx)
    with pytest.raises(ValueError, match='vocabulary 0 is not a positive integer'):
        jaxmp.anchored(jaxmp.raw, 0)
    with pytest.raises(ValueError, match='pairs -1 is not 0 or a positive integer'):
        jaxmp.anchored(jaxmp.raw, 3, pairs=-1)
    with pytest.raises(TypeError, match='target must be True or False, got 1'):
        jaxmp.anchored(jaxmp.raw, 3, target=1)
    with pytest.raises(ValueError, match='triples -1 is not 0 or a positive integer'):
        jaxmp.anchored(jaxmp.raw, 3, pairs=9, triples=-1)
    with pytest.raises(ValueError, match='triples=27 needs pairs too'):
        jaxmp.anchored(jaxmp.raw, 3, triples=27)


def coloured(steps, count=8):
    """Positions whose principal components have the variances 1, 1/4, 1/16, ..., off zero."""
    r = np.random.default_rng(0)
    basis, _ = np.linalg.qr(r.standard_normal((count, count)))
    x = r.standard_normal((steps, 4, 64, count)) * 2.0 ** -np.arange(count)
    return np.float32(x @ basis.T + 3)


def klt_run(text, xs):
    pair, rows = laws.ends(jaxmp.parse(text), jaxmp.like(xs[0])), []
    tx, rx = pair.init()
    for x in xs:
        m, y, tx, rx = pair.cross(x, tx, rx, at(0))
        np.testing.assert_array_equal(tx.known.book, rx.book)
        rows.append((m, np.asarray(y, np.float64), rx))
    return rows


def test_klt_spends_bits_where_the_variance_is():
    """Errors before a basis has arrived, with the first one, and those that theory gives."""
    xs = coloured(7)
    rows = klt_run('klt(1.5, refresh=3)', xs)
    errors = [
        np.mean((y - x) ** 2) / np.mean((x - 3) ** 2) for x, (_, y, _) in zip(xs, rows, strict=True)
    ]
    assert min(errors[:3]) > 0.1
    widths = np.sort(rows[-1][2].book[0])[::-1]
    assert widths.tolist() == [5, 4, 2, 1, 0, 0, 0, 0]
    variances = 4.0 ** -np.arange(8)
    want = sum(variances * np.array(ERRORS)[widths.astype(int)]) / sum(variances)
    np.testing.assert_allclose(errors[3:], want, rtol=0.25)
    parts = jaxmp.nbytes(rows[0][0]['part']), jaxmp.nbytes(rows[0][0]['codes'])
    assert parts == (2 * math.ceil(9 * 8 / 3), 12 * 256 / 8)


def test_klt_follows_a_tensor_that_shrinks_and_moves():
    """Gradients do: neither the mean nor the size of earlier messages enters."""
    xs = np.float32(coloured(8) * 0.2 ** np.arange(8)[:, None, None, None])
    for x, (_, y, _) in list(zip(xs, klt_run('klt(1.5, refresh=2)', xs), strict=True))[2:]:
        assert np.mean((y - x) ** 2) < 0.1 * np.mean((x - x.mean((0, 1, 2))) ** 2)


def smooth(steps, sizes):
    """Images whose neighbouring pixels are alike, of samples of so many sizes."""
    r = np.random.default_rng(0)
    x = r.standard_normal((steps, len(sizes), 4, 4, 2)).repeat(2, 2).repeat(2, 3)
    x = x + 0.05 * r.standard_normal(x.shape)
    return np.float32(x * np.array(sizes)[:, None, None, None])


def test_klt_that_is_fixed_goes_on_with_what_both_ends_know():
    """Its messages have no part of a basis, and it is the basis that was learned."""
    r = np.random.default_rng(3)
    xs = (r.standard_normal((8, 60, 2)) @ r.standard_normal((2, 12))).astype(np.float32)
    like = jaxmp.like(xs[0])
    learning, fixed = (jaxmp.parse(f'klt(1, refresh=2{t})') for t in ('', ', fixed=True'))
    assert learning.form == fixed.form
    pair, ctx = laws.ends(learning, like), Ctx()
    tx, rx = pair.init()
    for x in xs[:6]:
        _, _, tx, rx = pair.cross(x, tx, rx, ctx)
    parts = {n: jaxmp.bits(c, like) for n, c in (('learning', learning), ('fixed', fixed))}
    assert parts['learning'] - parts['fixed'] == 16 * -(-13 * 12 // 2)
    _, y, after, known = laws.ends(fixed, like).cross(xs[6], tx, rx, ctx)
    assert float(jnp.mean((y - xs[6]) ** 2)) < 0.05 * float(jnp.mean(xs[6] ** 2))
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, (after, known), (tx, rx))))


def test_klt_decodes_the_mean_of_a_cell_or_its_middle():
    """The middles are multiples of a step, the means lie nearer to zero, with a smaller error."""
    x = np.random.default_rng(3).laplace(size=(500, 4)).astype(np.float32)
    x, ctx, found = x - x.mean(0), Ctx(), {}
    for middle in False, True:
        rule = jaxmp.parse(f'klt(1, refresh=2, entropy=True, middle={middle})')
        (tx, rx), like = rule.init(jaxmp.like(x)), jaxmp.like(x)
        m, _ = jax.jit(rule.send)(x, tx, ctx)
        found[middle] = np.asarray(jax.jit(rule.recv, static_argnums=2)(m, rx, like, ctx)[0])
    mean, middle = found[False], found[True]
    some = np.abs(middle) > 0.1
    assert (np.abs(mean)[some] < np.abs(middle)[some]).all()
    assert np.square(mean - x).mean() < np.square(middle - x).mean()
    for name in 'middle', 'trellis':
        with pytest.raises(jaxmp.SpecError, match=f'{name}=True is of numbers by entropy'):
            jaxmp.parse(f'klt(2, {name}=True)')
    with pytest.raises(jaxmp.SpecError, match='middle=True or trellis=True'):
        jaxmp.parse('klt(2, entropy=True, middle=True, trellis=True)')


@pytest.mark.parametrize(
    ('channels', 'spread', 'bits', 'most'),
    [(8, 1, 0.6, 0.9), (8, 1, 2.2, 0.9), (128, 1, 2.2, 0.75), (128, 0, 0.3, 0.95)],
)
def test_klt_by_a_trellis_errs_less_in_messages_of_the_same_size(channels, spread, bits, most):
    """The less if there are many components, as positions of several sizes send theirs then."""
    r = np.random.default_rng(0)
    x = r.standard_normal((2, 3000, channels)) * 2.0 ** (-np.arange(channels) * 8 / channels)
    x, errors, sizes = np.float32(x * 2 ** (spread * r.standard_normal((2, 3000, 1)))), [], []
    for text in '', ', trellis=True':
        m, y, _ = klt_run(f'klt({bits}, refresh=1, entropy=True{text})', x)[-1]
        errors.append(np.square(y - x[-1]).mean())
        sizes.append(jaxmp.nbytes(m))
    assert errors[1] < most * errors[0]
    assert 0 <= sizes[0] - sizes[1] < 2
    assert ('sizes' in m) == (channels * bits > 100)


def test_klt_of_patches_codes_what_neighbours_have_in_common():
    """Four pixels of two channels have two large components of eight: five bits each for 1.25."""
    xs = smooth(6, [1.0] * 16)
    errors = {}
    for patch in (1, 2):
        rows = klt_run(f'klt(1.25, refresh=2, patch={patch})', xs)
        errors[patch] = np.mean((rows[-1][1] - xs[-1]) ** 2) / np.mean(xs[-1] ** 2)
        widths = np.sort(rows[-1][2].book[0])[::-1].tolist()
        assert widths == ([1, 1] if patch == 1 else [5, 5, *[0] * 6])
    assert errors[2] < 0.01 < 0.2 < errors[1]


def test_klt_by_sample_does_not_mind_of_what_size_samples_are():
    """Relative to each sample; without, what is small drowns in the steps of what is large."""
    sizes = 10.0 ** np.linspace(-6, 6, 16)
    xs = smooth(6, sizes)
    xs[:, 5] = 0
    for by_sample in (False, True):
        _, y, _ = klt_run(f'klt(1.25, refresh=2, patch=2, by_sample={by_sample})', xs)[-1]
        error = np.square(y - xs[-1]).sum((1, 2, 3)) / sizes**2 / 32
        assert (error < 0.05).all() == by_sample
    assert not y[5].any()
    m = klt_run('klt(1.25, refresh=2, patch=2, by_sample=True)', xs)[0][0]
    assert jaxmp.nbytes(m['norm']) == 2 * 16


def test_klt_of_what_is_not_negative_decodes_nothing_negative():
    """Where it decodes zero in place of less, it errs less; elsewhere it is the same."""
    xs = np.maximum(smooth(6, [1.0] * 16), 0)
    plain, cut = (
        klt_run(f'klt(2, refresh=2, patch=2{t})', xs)[-1][1] for t in ('', ', signed=False')
    )
    np.testing.assert_array_equal(cut, np.maximum(plain, 0))
    assert plain.min() < 0
    assert np.square(cut - xs[-1]).sum() < 0.95 * np.square(plain - xs[-1]).sum()


@pytest.mark.slow
def test_klt_by_gradient_codes_what_the_gradient_asks_for():
    """The gradient is in the two channels of least variance; they have no bits but for that."""
    r, scale = np.random.default_rng(0), 2.0 ** (-np.arange(8) / 2)
    xs = np.float32(r.standard_normal((7, 4, 64, 8)) * scale)
    gs = np.float32(r.standard_normal(xs.shape) * np.array([1e-3] * 6 + [1.0] * 2))
    errors = {}
    for text in ('', ', by_gradient=0.9'):
        cut = jaxmp.boundary(
            jaxmp.parse(f'klt(1.5, refresh=2{text})'), jaxmp.parse('klt(1.25, refresh=2)')
        )

        def loss(move, feedback, x, g, cut=cut):
            y, feedback = cut.cross(x + move, feedback)
            return jnp.sum(y * g), (feedback, y)

        step, feedback = jax.jit(jaxmp.value_and_grad(loss)), cut.init(xs[0])
        for x, g in zip(xs, gs, strict=True):
            (_, y), _, feedback = step(jnp.zeros(()), feedback, x, g)
        errors[text] = np.square(y - xs[-1]).mean((0, 1)) / scale**2
    plain, weighed = errors.values()
    assert plain[6:].min() > 0.9
    assert weighed[6:].max() < 0.4
    assert plain[:2].max() < weighed[:2].max() < 0.2
    assert (feedback.bwd[1].book[0] == 5).sum() == 2


def test_klt_by_gradient_asks_for_a_gradient_of_the_same_patch():
    fwd, like = jaxmp.parse('klt(2, patch=2, by_gradient=0.3)'), jaxmp.like(jnp.ones((2, 4, 4, 2)))
    for ways in ((fwd, jaxmp.parse('uniform(4)')), (jaxmp.parse('raw'), fwd)):
        with pytest.raises(ValueError, match=r'returns through klt; write fwd klt\(2, by_gradient'):
            jaxmp.boundary(*ways)
    with pytest.raises(ValueError, match='of 8 forward and 2 backward; give both the same patch'):
        jaxmp.boundary(fwd, jaxmp.parse('klt(2)')).bits(like)
    assert jaxmp.boundary(fwd, jaxmp.parse('klt(2, patch=2)')).bits(like)


def test_klt_patches_are_cut_and_joined():
    """Pixels of any number of axes; one that does not fit is named."""
    for shape in ((3, 4, 6, 5), (2, 8, 3), (2, 4, 4, 2, 3)):
        x = np.random.default_rng(0).standard_normal(shape)
        rows = positions(x, 2)
        assert rows.shape == (
            x.size // (2 ** (x.ndim - 2) * shape[-1]),
            2 ** (x.ndim - 2) * shape[-1],
        )
        np.testing.assert_array_equal(joined(rows, shape, 2), x)
        first = x[0][(slice(2),) * (x.ndim - 2)]
        np.testing.assert_array_equal(rows[0], first.reshape(-1))
    for shape in ((2, 6, 6, 3), (2, 3)):
        with pytest.raises(ValueError, match=r'klt patch 4 does not divide the axes .* or 1'):
            jaxmp.parse('klt(2, patch=4)').init(jax.ShapeDtypeStruct(shape, np.float32))
    for name in ('by_sample', 'signed', 'entropy'):
        with pytest.raises(TypeError, match=f'klt {name} must be True or False, got 1'):
            jaxmp.klt(2, **{name: 1})


@pytest.mark.slow
@pytest.mark.parametrize('bits', [0.5, 1.0, 2.5, 4.0])
def test_klt_by_entropy_errs_less_in_as_many_bits(bits):
    """Of what a ReLU leaves, whose components are no normal data: by a fourth at least."""
    r = np.random.default_rng(0)
    x = np.maximum(r.standard_normal((5, 16, 8, 8, 6)) @ r.standard_normal((6, 6)), 0)
    xs = np.float32(np.maximum(x.cumsum(2) - x.cumsum(3), 0))
    errors, sizes = [], []
    for text in ('', ', entropy=True'):
        m, y, _ = klt_run(f'klt({bits}, refresh=2, patch=2, signed=False{text})', xs)[-1]
        errors.append(np.square(y - xs[-1]).sum())
        sizes.append(jaxmp.nbytes(m))
    assert errors[1] < 0.75 * errors[0]
    assert sizes[1] < sizes[0]


@pytest.mark.parametrize(('copies', 'trellis'), [(1, False), (1, True), (32, True)])
def test_klt_by_entropy_fits_whatever_comes(copies, trellis):
    """An outlier, zeros, equal numbers, then a tensor again: all within one size, none infinite."""
    xs = np.tile(coloured(7), copies)
    xs[1, 0, 0, 0], xs[2], xs[3], xs[4, :, 0] = 1e9, 0, -7, 300
    rows = klt_run(f'klt(1.5, refresh=1, entropy=True, trellis={trellis})', xs)
    assert ('sizes' in rows[0][0]) == (copies > 1)
    assert len({jaxmp.nbytes(m) for m, *_ in rows}) == 1
    assert np.isfinite([y for _, y, _ in rows]).all()
    assert not rows[2][1].any()
    np.testing.assert_array_equal(rows[3][1], rows[3][1][0, 0] * np.ones_like(xs[3]))
    assert np.mean((rows[6][1] - xs[6]) ** 2) < 0.05 * np.var(xs[6])


@pytest.mark.parametrize('trellis', [False, True])
def test_klt_by_entropy_errs_no_more_with_more_bits(trellis):
    """Where one component has all energy: its numbers go up to 255, and a finer step cuts more."""
    r, errors = np.random.default_rng(0), []
    x = np.float32(np.multiply.outer(r.standard_normal((2, 1000)), r.standard_normal(8)))
    for bits in 0.8, 2, 4:
        y = klt_run(f'klt({bits}, refresh=1, entropy=True, trellis={trellis})', x)[-1][1]
        errors.append(np.mean((y - x[-1]) ** 2) / np.var(x[-1]))
    assert max(errors) < 2e-3


@pytest.mark.parametrize('channels', [8, 128])
def test_klt_by_entropy_crosses_in_float64(channels):
    x = np.random.default_rng(0).standard_normal((2, 20, channels))
    with jax.enable_x64(True):
        for text in '', ', trellis=True':
            _, y, _ = klt_run(f'klt(3, refresh=1, entropy=True{text})', jnp.asarray(x))[-1]
            assert np.mean((y - x[-1]) ** 2) < 0.05


def test_klt_after_a_message_of_zeros_has_equal_widths():
    """The book that is made of it, of which nothing is known."""
    xs = coloured(3)
    xs[0] = 0
    widths = klt_run('klt(2, refresh=1)', xs)[0][2].book[0]
    assert widths.tolist() == [2] * 8


@pytest.mark.slow
def test_klt_by_gradient_waits_for_the_gradients_first_book():
    """Until then its book has widths that nothing is known of, and no direction counts more."""
    x = np.float32(np.random.default_rng(0).standard_normal((9, 4, 64, 8)))
    rule, like = jaxmp.parse('klt(1.5, refresh=2, by_gradient=0.9)'), jaxmp.like(x[0])
    first = jaxmp.parse('klt(1.5, refresh=2)').init(like)[1].book
    tx, rx = rule.init(like)
    for one in x:
        m, tx = rule.send(one, tx, at(0)._replace(spread=first))
        y, rx = rule.recv(m, rx, like, at(0))
    errors = np.square(y - x[-1]).mean((0, 1))
    assert errors.mean() < 0.3
    assert np.linalg.eigvalsh(rx.book[1:] @ rx.book[1:].T) == pytest.approx(1, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(('before', 'after', 'most'), [(4, 1.5, 0.2), (1.5, 4, 0.01)])
def test_klt_with_other_bits_has_the_components_of_most_variance(before, after, most):
    """The first message after a phase, whose book has the widths of other bits."""
    xs = coloured(4)
    _, _, rx = klt_run(f'klt({before}, refresh=2)', xs)[-1]
    rule, like = jaxmp.parse(f'klt({after}, refresh=2)'), jaxmp.like(xs[0])
    tx, _ = rule.init(like)
    m, _ = rule.send(xs[3], tx._replace(known=rx), at(0))
    y, _ = rule.recv(m, rx, like, at(0))
    assert np.mean((np.asarray(y) - xs[3]) ** 2) < most * np.mean((xs[3] - 3) ** 2)


def test_klt_goes_on_after_a_message_that_is_not_finite():
    xs = coloured(3)
    xs[0, 0, 0, 0] = np.nan
    rows = klt_run('klt(2, refresh=1)', xs)
    assert np.isnan(rows[0][1]).any()
    assert np.mean((rows[2][1] - xs[2]) ** 2) < 0.01 * np.var(xs[2])


@pytest.mark.parametrize('shape', [(), (5,), (0, 3)])
def test_klt_asks_for_samples_and_channels(shape):
    with pytest.raises(ValueError, match=r'at least (two axes|one axis)'):
        jaxmp.parse('klt(2)').init(jax.ShapeDtypeStruct(shape, np.float32))


def test_a_warm_up_gives_klt_its_first_basis():
    xs, channel = coloured(2), jaxmp.parse('klt(2, refresh=1)')
    tx, rx = channel.init(jaxmp.like(xs[0]))
    m, tx = jaxmp.warm(channel).send(xs[0], tx, at(0))
    _, rx = jaxmp.warm(channel).recv(m, rx, jaxmp.like(xs[0]), at(0))
    assert tx.weight == 1
    np.testing.assert_array_equal(tx.known.book, rx.book)


@pytest.mark.parametrize(
    'text',
    [
        'klt(0)',
        'klt(5.5)',
        'klt(2, refresh=0)',
        'klt(2, refresh=1.5)',
        'klt(2, patch=0)',
        'klt(2, by_gradient=1.1)',
        'klt(2, by_gradient=True)',
    ],
)
def test_klt_refuses(text):
    with pytest.raises(
        ValueError, match=r'klt (bits|refresh|patch|by_gradient) [\d.True]+ is not a '
    ):
        jaxmp.parse(text)


@pytest.mark.parametrize('rule', ['{}', 'ef({})', 'ef21({})'])
def test_a_codec_that_loses_the_shape_is_named(rule):
    """Arithmetic would give its one row to all samples, and train."""
    narrow = jaxmp.Codec(lambda x, ctx: {'q': x[:1]}, lambda m, like, ctx: m['q'])
    make = {'{}': jaxmp.direct, 'ef({})': jaxmp.ef, 'ef21({})': jaxmp.ef21}[rule]
    channel, x = make(narrow), jnp.ones((8, 4))
    _, rx = channel.init(jaxmp.like(x))
    with pytest.raises(ValueError, match=r'returned float32\[1, 4\] for .* float32\[8, 4\]; end'):
        channel.recv({'q': x[:1]}, rx, jaxmp.like(x), Ctx())
