"""Codecs that send a sign and few more bits per element, mainly for gradients between replicas.

They treat each sample (axis 0) as one vector of D elements; a gradient is passed as one sample.
`one_bit` is biased and needs feedback to train; `natural` and `qsgd` are unbiased and do not.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.dense import saturated
from jaxmp.wire import KEY, Codec, Ctx, Like, elements, pack, samples, unpack, wide
from jaxmp.wire.words import check_whole, named, word

EXPONENT_BITS, MANTISSA_BITS = 8, 23  # of float32
SMALL = 2.0**-16  # keeps sums over the largest floats finite


def _into(y: Array, like: Like) -> Array:
    return saturated(y.reshape(like.shape), like.dtype)


def _mean_size(x: Array) -> Array:
    """Mean magnitude of each row."""
    return jnp.sum(jnp.abs(x) * SMALL, 1, keepdims=True) / (x.shape[1] * SMALL)


def _encode_one_bit(x: Array, ctx: Ctx) -> dict[str, Array]:
    x = wide(samples(x))
    return {'bits': pack((x < 0).astype(jnp.uint8), 1), 'scale': _mean_size(x)}


def _decode_one_bit(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
    negative = unpack(m['bits'], 1, elements(like)) > 0
    return _into(jnp.where(negative, -m['scale'], m['scale']), like)


one_bit = named('one_bit', Codec(_encode_one_bit, _decode_one_bit, samples='alone'))
"""The sign of each element times the mean magnitude: ``C(x) = mean |x| sign(x)``, sign(0) = +1.

It takes D / 8 + 4 bytes per sample. ``|x - C(x)|^2 = (1 - |x|_1^2 / (D |x|_2^2)) |x|^2``: this is a
contraction, and error feedback (``ef``) corrects its bias.

References:
  1-Bit Stochastic Gradient Descent, Interspeech 2014; Error Feedback Fixes SignSGD, arXiv
  1901.09847.
"""


def _encode_bool(x: Array, ctx: Ctx) -> dict[str, Array]:
    x = wide(samples(x))
    return {'bits': pack((x != 0).astype(jnp.uint8), 1), 'scale': _mean_size(x)}


def _decode_bool(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
    return _into(jnp.where(unpack(m['bits'], 1, elements(like)) > 0, m['scale'], 0), like)


as_bool = named('as_bool', Codec(_encode_bool, _decode_bool, samples='alone'))
"""The mean magnitude where an element is not zero, else 0: the '1-bit' code of a thesis.

It is here to show why it fails: a cast to a truth value loses the sign, so that no decoded gradient
is negative. (In the thesis the scale is a running mean over all tensors, here that of the tensor.)
"""


def _float32_words(x: Array) -> Array:
    """The bits of ``x`` in float32; finite values beyond the largest float32 saturate."""
    if x.dtype == jnp.float64:
        largest = float(jnp.finfo(jnp.float32).max)
        x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def _encode_natural(x: Array, ctx: Ctx) -> Array:
    words = _float32_words(samples(x))
    exponent = (words >> MANTISSA_BITS) & (2**EXPONENT_BITS - 1)
    rest = words & (2**MANTISSA_BITS - 1)
    draw = jax.random.bits(ctx.key_of('natural'), words.shape, jnp.uint32) >> (32 - MANTISSA_BITS)
    up = jnp.minimum(exponent + (draw < rest), 2**EXPONENT_BITS - 2)
    code = jnp.where(exponent == 2**EXPONENT_BITS - 1, exponent, up)
    return pack((words >> 31 << EXPONENT_BITS) | code, 1 + EXPONENT_BITS)


def _decode_natural(m: Array, like: Like, ctx: Ctx) -> Array:
    code = unpack(m, 1 + EXPONENT_BITS, elements(like)).astype(jnp.uint32)
    sign, exponent = code >> EXPONENT_BITS, code & (2**EXPONENT_BITS - 1)
    words = (sign << 31) | (exponent << MANTISSA_BITS)
    y = jax.lax.bitcast_convert_type(words, jnp.float32)
    # Clipping would flush numbers below the smallest normal number to zero.
    return y.reshape(like.shape) if like.dtype == jnp.float32 else _into(y, like)


natural = named('natural', Codec(_encode_natural, _decode_natural, samples='alone', needs=KEY))
"""Natural compression: the magnitude is rounded at random to one of the two nearest powers of two.

``C(x) = sign(x) 2^floor(log2 |x|)``, doubled with probability ``|x| / 2^floor(log2 |x|) - 1``. It
is unbiased, with a variance of at most ``x^2 / 8``, and exact on 0 and on powers of two. It takes 9
bits per element: the sign and the exponent of float32. (Numbers below the smallest normal float32
are still unbiased; the largest numbers saturate.)

References:
  Natural Compression for Distributed Deep Learning, arXiv 1905.10988.
"""


@word
def qsgd(levels: int) -> Codec:
    """QSGD: the quotient of magnitude and norm, rounded at random to one of ``s`` levels.

    ``C(x)_i = |x|_2 sign(x_i) z_i / s``. ``z_i`` is the floor or the ceiling of
    ``s |x_i| / |x|_2``; the probability of the ceiling is the fractional part. It is unbiased, and
    ``E |x - C(x)|^2 <= min(D / s^2, sqrt(D) / s) |x|^2``. Codes have a fixed width of
    ``ceil(log2(2 s + 1))`` bits per element, and one norm is sent per sample.

    Args:
      levels: the number s, from 1 to 32767.

    Raises:
      ValueError: if ``levels`` is out of range or the context has no key.

    >>> import jaxmp
    >>> x, ctx = jnp.array([[0.0, -3.0, 0.0]]), jaxmp.Ctx(jax.random.key(0))
    >>> qsgd(4).decode(qsgd(4).encode(x, ctx), jaxmp.like(x), ctx).tolist()
    [[0.0, -3.0, 0.0]]

    References:
      QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, arXiv 1610.02132.
    """
    check_whole('qsgd levels', levels, 'an integer from 1 to 32767', 1, 32767)
    width = math.ceil(math.log2(2 * levels + 1))

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        # Without the barriers XLA reorders the products, and some of them overflow.
        x = jax.lax.optimization_barrier(wide(samples(x)) * SMALL)
        top = jnp.max(jnp.abs(x), 1, keepdims=True)
        unit = x / jnp.where(top > 0, top, 1)
        norm = jnp.sqrt(jnp.sum(unit**2, 1, keepdims=True))
        share = jnp.abs(unit) / jnp.where(norm > 0, norm, 1) * levels
        draw = jax.random.uniform(ctx.key_of('qsgd'), x.shape, x.dtype)
        z = jnp.minimum(jnp.floor(share + draw), levels)
        code = (jnp.where(x < 0, -z, z) + levels).astype(jnp.uint32)
        return {'codes': pack(code, width), 'norm': top * norm}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        code = unpack(m['codes'], width, elements(like)).astype(m['norm'].dtype)
        y = jax.lax.optimization_barrier((code - levels) / levels * m['norm'])
        top = float(jnp.finfo(y.dtype).max) * SMALL
        return _into(jnp.where(jnp.isfinite(y), jnp.clip(y, -top, top), y) / SMALL, like)

    return Codec(encode, decode, samples='alone', needs=KEY)
