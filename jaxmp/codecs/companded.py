"""`asinh`: levels that are even near zero and geometric beyond, for channels of unlike sizes."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.extremes import largest
from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, compute_dtype, elements, pack, samples, unpack, wide
from jaxmp.wire.words import word

KNEE = 0.25  # of the mean magnitude: below it levels are even
FINENESS = 8  # ratios of the largest magnitude to the knee, an octave
RATIOS = 256


@functools.cache
def levels(bits: int) -> Float[np.ndarray, 'R L']:
    """The positive levels over the knee, a row for each ratio of the largest magnitude to it."""
    count = 2 ** (bits - 1)
    widths = np.arcsinh(2 ** (np.arange(RATIOS) / FINENESS)) / (count - 0.5)
    return np.sinh((np.arange(count) + 0.5) * widths[:, None]).astype(np.float32)


@word
def asinh(bits: int) -> Codec:
    r"""Sign and ``bits - 1`` bits of magnitude: the inverse hyperbolic sine of it, in equal steps.

    .. math:: C(x) = \mathrm{sign}(x) \, a \sinh((q + 1/2) d), \quad
              q = \lfloor \mathrm{asinh}(|x| / a) / d \rfloor

    a is a quarter of the sample's mean magnitude, d the step with which the last level is about the
    largest magnitude. Below a the levels are even, beyond it their ratio is constant, so that an
    error is a part of its element there. In some pretrained models small channels move the loss
    most (Gemma 3: a channel's gradients fall as its activations grow), and what serves channels of
    all sizes alike loses them. a is sent as bfloat16, the largest magnitude over it in 8 bits.

    Args:
      bits: 2 to 8.

    Raises:
      ValueError: if ``bits`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C = asinh(4)
    >>> x = jnp.array([[0.02, -0.1, 0.5, 2.0, -30.0]])
    >>> print(C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).round(1))
    [[  0.4  -0.4   0.4   2.5 -31.1]]

    References:
      Companding: Bennett, Spectra of Quantized Signals, 1948.
    """
    check_bits('asinh', bits, 2)
    table, sign_bit = levels(bits), 2 ** (bits - 1)
    steps = np.arcsinh(2 ** (np.arange(RATIOS) / FINENESS)) / (sign_bit - 0.5)

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(samples(x))
        tiny = jnp.finfo(x.dtype).tiny
        most = largest(x, 1)[:, None]
        knee = KNEE * jnp.sum(jnp.abs(x) * (1 / x.shape[1]), 1, keepdims=True)
        knee = jnp.where(jnp.isfinite(most), knee, jnp.nan).astype(jnp.bfloat16)
        a = knee.astype(x.dtype)
        some = a >= 2**10 * tiny  # so that no level is below the normal numbers
        a = jnp.where(some, a, 1)
        octaves = jnp.log2(jnp.maximum(most / a, 1))
        ratio = jnp.clip(jnp.ceil(FINENESS * octaves), 0, RATIOS - 1).astype(jnp.uint8)
        step = jnp.asarray(steps, x.dtype)[ratio.astype(jnp.int32)]
        q = jnp.floor(jnp.arcsinh(jnp.abs(x) / a) / step)
        q = jnp.clip(jnp.nan_to_num(q), 0, sign_bit - 1)
        codes = (q + jnp.where(x < 0, sign_bit, 0)).astype(jnp.uint8)
        knee = jax.lax.bitcast_convert_type(jnp.where(some | jnp.isnan(knee), knee, 0), jnp.uint16)
        return {'codes': pack(codes, bits), 'knee': knee, 'ratio': ratio}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        dtype = compute_dtype(like)
        codes = unpack(m['codes'], bits, elements(like))
        a = jax.lax.bitcast_convert_type(m['knee'], jnp.bfloat16).astype(dtype)
        rows = jnp.asarray(table, dtype)[m['ratio'][:, 0].astype(jnp.int32)]
        y = jnp.take_along_axis(rows, (codes & (sign_bit - 1)).astype(jnp.int32), 1)
        y = jnp.where(codes >= sign_bit, -y, y) * a
        most = jnp.finfo(dtype).max
        y = jnp.where(jnp.isinf(y), jnp.sign(y) * most, y)
        return saturated(y.reshape(like.shape), like.dtype)

    return Codec(encode, decode, samples='alone')
