"""Feedback rules: each is its equation, with sender and receiver run apart, message by message."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx, Like
from tests import laws

CODECS = ('log_scale(3)', 'block(2, size=32, rounding=stochastic)')  # top_k: test_golden.py
RULES = {  # text with a place for the codec
    'direct': '{}',
    'ef': 'ef({})',
    'ef21': 'ef21({})',
    'ef_mixed': 'ef_mixed({})',
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
    """The same by the equations of ../shared/notes/reference.md, section 1."""
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
            case 'ef_mixed':
                y = C(x, ctx.fold(0)) + C(state, ctx.fold(1))
                state = state + x - y
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
        for rule, form in RULES.items():
            ys, txs, rxs = run(form.format(codec), xs)
            want = equations(rule, lambda x, ctx: pair.cross(x, (), (), ctx)[1], xs)
            for y, tx, rx, (y_want, state) in zip(ys, txs, rxs, want, strict=True):
                np.testing.assert_allclose(y, y_want, atol=1e-12, err_msg=rule)
                for end in (tx, rx):
                    if not isinstance(end, tuple):
                        np.testing.assert_allclose(end, state, atol=1e-12, err_msg=rule)
            check_law(rule, xs, ys, txs)


def check_law(rule, xs, ys, states):
    """What follows from the equations, from the results alone."""
    if rule in ('ef', 'ef_mixed'):
        np.testing.assert_allclose(np.sum(ys, 0) + states[-1], np.sum(xs, 0), atol=1e-12)
        assert np.abs(states[-1]).max() > 0.01, 'something was left to remember'
    if rule == 'aqsgd':
        before = np.zeros_like(states[0])
        for ids, y, after in zip(IDS, ys, states, strict=True):
            others = np.setdiff1d(np.arange(7), ids)
            np.testing.assert_array_equal(np.asarray(after)[others], before[others])
            np.testing.assert_array_equal(np.asarray(after)[ids], y)
            before = np.asarray(after)


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


def test_ef_mixed_sends_two_messages_and_no_support():
    like = Like(SHAPE, 'float32')
    one, two = (jaxmp.bits(jaxmp.parse(t), like) for t in ('top_k(0.1)', 'ef_mixed(top_k(0.1))'))
    assert two == 2 * one
    codec = jaxmp.parse('ef_mixed(top_k(0.1))').codec
    assert codec.support(None, like, Ctx()) is None


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
        assert jaxmp.parse(form.format('raw')).per_example == (rule == 'aqsgd')


@pytest.mark.parametrize('rule', [jaxmp.direct, jaxmp.ef, jaxmp.ef21, jaxmp.ef_mixed])
@pytest.mark.parametrize('wrong', [jaxmp.ef(jaxmp.raw), jaxmp.bitmap, 3, jaxmp.top_k])
def test_a_rule_takes_a_codec(rule, wrong):
    with pytest.raises(TypeError, match=f'{rule.__name__} takes a codec'):
        rule(wrong)
