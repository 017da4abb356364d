"""Both ends of a channel hold the same bits, compiled apart: one without FMA, one with it.

Neither fusion nor FMA is what a CPU of an older instruction set has, too: the same numbers drifted
under `XLA_FLAGS=--xla_cpu_max_isa=AVX` at one end as did here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Codec, Ctx
from tests import laws

STEPS, EXAMPLES = 3, 20
CODECS = (
    *('raw', 'fp16', 'bf16', 'max_scaled(4)', 'one_bit', 'as_bool', 'natural', 'qsgd(3)'),
    *('uniform(1)', 'uniform(4)', 'uniform(8, stochastic)', 'block(4)', 'block(8, size=32)'),
    *('log_scale(2)', 'log_scale(4)', 'log_scale(8)', 'polar(0.5, 32)', 'rotate(uniform(4), 32)'),
)
HURRIED = {'xla_backend_optimization_level': 1, 'xla_cpu_use_fusion_emitters': False}  # with FMA


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


NAMES = {'all': mean(CODECS), 'careless': careless()}


def tensors(shape, dtype):
    r = np.random.default_rng(1)
    x = r.standard_normal((STEPS, *shape)) * np.exp(r.standard_normal(shape))
    return np.asarray(jnp.asarray(x, dtype))


def context(shape, step):
    """Another key and other ids in every step."""
    ids = np.random.default_rng(step).choice(EXAMPLES, shape[0], replace=False)
    return Ctx(jax.random.key(step), jnp.asarray(ids))


def drift(text, shape, dtype='float32', options=HURRIED):
    """How many numbers are unequal, by what they are."""
    channel, like = jaxmp.parse(text, NAMES), jax.ShapeDtypeStruct(shape, dtype)

    def recv(m, rx, ctx):
        return channel.recv(m, rx, like, ctx)

    def send(x, tx, rx, ctx):  # and a receiver in the same program
        m, tx = channel.send(x, tx, ctx)
        return m, tx, *recv(m, rx, ctx)

    sender = jax.jit(send, compiler_options=laws.QUICK)
    receiver = jax.jit(recv, compiler_options=options)
    tx, rx = channel.init(like)
    beside, unequal = rx, {}
    for step, x in enumerate(tensors(shape, dtype)):
        ctx, before = context(shape, step), tx
        m, tx, believed, beside = sender(x, tx, beside, ctx)
        y, rx = receiver(laws.as_bytes(m), rx, ctx)
        pairs = {'received': (believed, y), 'state': (beside, rx)}
        if channel.mirrored:
            pairs['mirror'] = tx, rx
        elif not isinstance(tx, tuple):  # e <- x + e - y
            pairs['error'] = tx, np.float32(x) + before - np.float32(y)
        for name, pair in pairs.items():
            a, b = map(jax.tree.leaves, pair)
            unequal[name] = unequal.get(name, 0) + sum(map(different, a, b))
    return unequal


def different(a, b):
    return np.count_nonzero(np.asarray(a) != np.asarray(b))


@pytest.mark.parametrize(
    ('text', 'shape', 'dtype', 'options'),
    [
        ('direct(top_k(0.4, values=all))', (8, 4096), 'float32', HURRIED),
        ('ef(top_k(0.4, values=all))', (8, 4096), 'float32', HURRIED),
        ('ef21(top_k(0.4, values=all))', (4, 301), 'bfloat16', HURRIED),
        ('ef21(top_k(0.4, values=all))', (8, 4096), 'float32', None),  # as users compile
        ('ef_mixed(top_k(0.4, values=all))', (4, 301), 'float32', HURRIED),
        (f'aqsgd(random_k(0.4, values=all), {EXAMPLES})', (8, 4096), 'float32', HURRIED),
    ],
)
def test_both_ends_hold_the_same_bits(text, shape, dtype, options):
    """What the receiver sees is what the sender believes, and their states stay equal."""
    assert set(drift(text, shape, dtype, options).values()) == {0}


def test_a_careless_decoder_is_found():
    unequal = drift('ef21(careless)', (4, 301))
    assert all(unequal.values()), unequal
