"""Both ends of a channel hold the same bits, compiled apart: one without FMA, one with it.

Neither fusion nor FMA is what a CPU of an older instruction set has, too: the same numbers drifted
under `XLA_FLAGS=--xla_cpu_max_isa=AVX` at one end as did here.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Codec, Ctx
from jaxmp.codecs import exact
from tests import laws
from tests.base import slow

STEPS, EXAMPLES, TOKENS = 3, 20, 5
CODECS = (
    *('raw', 'fp16', 'bf16', 'max_scaled(4)', 'one_bit', 'as_bool', 'natural', 'qsgd(3)'),
    *('uniform(1)', 'uniform(4)', 'uniform(8, stochastic)', 'block(4)', 'block(8, size=32)'),
    *('log_scale(2)', 'log_scale(4)', 'log_scale(8)', 'asinh(5)', 'polar(0.5, 32)'),
    'rotate(uniform(4), 32)',
    *('lloyd(3)', 'lloyd(2, signed=False, unbiased=True)', 'trellis(2, 4, unbiased=True)'),
    *('outliers(lloyd(3), 1, 1)', 'outliers(trellis(2), causal=True)'),
    *('rotate(lloyd(4), 64)', 'rotate(trellis(2), 128)'),
    *('mx(8)', 'mx(6)', 'mx(4)', 'nvfp4', 'spikes(block(2), 5)'),
    *('per_chunk(adaptive(lloyd(2), mx(4)), 50)', 'per_token(uniform(4))'),
)
FULL = {**laws.QUICK, 'xla_backend_optimization_level': 3}
FULL |= dict.fromkeys(FULL.keys() & {'xla_cpu_use_fusion_emitters'}, True)
HURRIED = {**laws.QUICK, 'xla_backend_optimization_level': 1}  # with FMA


def mean(texts):
    """Codecs as one, so that they share the price of a compilation: the mean of what they make."""
    codecs = [jaxmp.parse(t).codec for t in texts]

    def encode(x, ctx):
        return [c.encode(x, ctx) for c in codecs]

    def decode(ms, like, ctx):
        ys = [c.decode(m, like, ctx) for c, m in zip(codecs, ms, strict=True)]
        return functools.reduce(jnp.add, ys) / 32  # sums, with which a careless product is fused

    return Codec(encode, decode)


def careless():
    """`uniform` with levels by a weighted mean: two products that round, and their sum."""
    uniform = jaxmp.uniform(4)

    def decode(m, like, ctx):
        lo, hi = m['ends']
        t = uniform.decode(m | {'ends': jnp.array([0.0, 1.0])}, like, ctx)
        return lo * (1 - t) + hi * t

    return Codec(uniform.encode, decode)


# `some` for further rules: what they add to a codec's numbers is a matter of the rule.
NAMES = {'all': mean(CODECS), 'some': mean(CODECS[::5]), 'careless': careless()}


def tensors(shape, dtype):
    r = np.random.default_rng(1)
    x = r.standard_normal((STEPS, *shape)) * np.exp(r.standard_normal(shape))
    return np.asarray(jnp.asarray(x, dtype))


def context(shape, step):
    """Another key and other ids in every step."""
    r = np.random.default_rng(step)
    ids, tokens = r.choice(EXAMPLES, shape[0], replace=False), r.integers(0, TOKENS, shape[:-1])
    return Ctx(jax.random.key(step), jnp.asarray(ids), tokens=jnp.asarray(tokens))


def drift(text, shape, dtype='float32', options=HURRIED):
    """How many numbers of the state differ from what the receiver's side says they are."""
    channel, like = jaxmp.parse(text, NAMES), jax.ShapeDtypeStruct(shape, dtype)

    def recv(m, rx, ctx):
        return channel.recv(m, rx, like, ctx)

    sender = jax.jit(channel.send, compiler_options=laws.QUICK)
    receiver = jax.jit(recv, compiler_options=options)
    tx, rx = channel.init(like)
    unequal = 0
    for step, x in enumerate(tensors(shape, dtype)):
        ctx, before = context(shape, step), tx
        m, tx = sender(x, tx, ctx)
        y, rx = receiver(laws.as_bytes(m), rx, ctx)
        want = rx if channel.shared_state else np.float32(x) + before - np.float32(y)
        for a, b in zip(jax.tree.leaves(tx), jax.tree.leaves(want), strict=True):
            unequal += np.count_nonzero(np.asarray(a) != b)
            assert np.abs(a).max() > 0
    assert y.dtype == dtype
    return unequal


@pytest.mark.parametrize(
    ('text', 'shape', 'dtype', 'options'),
    slow(
        [
            ('ef(top_k(0.4, values=all))', (8, 4096), 'float32', HURRIED),
            ('ef21(top_k(0.4, values=all))', (4, 301), 'bfloat16', HURRIED),
            ('ef21(top_k(0.4, values=all))', (8, 4096), 'float32', FULL),  # as users compile
            ('ef_mixed(top_k(0.4, values=some), True)', (4, 301), 'float32', HURRIED),
            (f'aqsgd(random_k(0.4, values=some), {EXAMPLES})', (8, 4096), 'float32', HURRIED),
            (f'aqsgd(uniform(4), {EXAMPLES}, table=4)', (8, 301), 'float32', HURRIED),
            (f'aqsgd(uniform(4), {EXAMPLES}, table=2)', (8, 301), 'float32', FULL),
            (f'anchored(block(4), {TOKENS})', (8, 9, 30), 'float32', HURRIED),
            (f'anchored(block(4), {TOKENS}, window=7)', (8, 9, 30), 'bfloat16', FULL),
            (f'anchored(block(4), {TOKENS}, pairs={2 * TOKENS})', (8, 9, 30), 'float32', FULL),
            (f'anchored(block(4), {TOKENS}, 7, {TOKENS}, True)', (8, 9, 30), 'float32', HURRIED),
            (f'anchored(block(4), {TOKENS}, pairs=64, triples=64)', (8, 9, 30), 'float32', FULL),
        ],
        lambda case: re.search('values=all|values=some|pairs|window', case[0]),
    ),
)
def test_both_ends_hold_the_same_bits(text, shape, dtype, options):
    """States that mirror each other are equal; what `ef` keeps is what the receiver lacks.

    (`direct` keeps nothing, and its receiver is that of `ef`.)
    """
    assert drift(text, shape, dtype, options) == 0


@pytest.mark.parametrize('text', [f'anchored(raw, {TOKENS})', f'aqsgd(raw, {EXAMPLES}, table=4)'])
def test_a_warm_up_leaves_the_same_bits(text):
    """Though the sender makes what it sends, a sum of products, in the same program."""
    shape = (8, 9, 30)
    channel = jaxmp.warm(jaxmp.parse(text))
    w, *xs = tensors((4, *shape), 'float32').reshape(-1, *shape)
    sender = jax.jit(lambda x, tx, ctx: channel.send(x * w + x[::-1] * 3.3, tx, ctx))
    like = jax.ShapeDtypeStruct(shape, 'float32')
    receiver = jax.jit(
        lambda m, rx, ctx: channel.recv(m, rx, like, ctx)[1], compiler_options=HURRIED
    )
    tx, rx = channel.init(like)
    for step in range(STEPS):
        ctx = context(shape, step)
        m, tx = sender(xs[step], tx, ctx)
        rx = receiver(m, rx, ctx)
        for a, b in zip(jax.tree.leaves(tx), jax.tree.leaves(rx), strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_careless_decoder_is_found():
    assert drift('ef21(careless)', (4, 301)) > 0
    assert drift('ef(careless)', (4, 301)) > 0


def test_products_that_need_no_rounding():
    r = np.random.default_rng(0)
    a, x = r.standard_normal((2, 1000)).astype('f4')
    a = np.float32(np.float16(a))
    np.testing.assert_array_equal(exact.product(a, x), np.float32(np.float64(a) * x))
    for divisor in (1, 3, 15, 255):
        coarse, fine = map(np.float64, exact.quotient(x, divisor))
        np.testing.assert_allclose(coarse + fine, np.float64(x) / divisor, rtol=2**-30)
        for n in (127, 255):
            for part in (n * coarse, n * fine):
                np.testing.assert_array_equal(np.float32(part), part)
