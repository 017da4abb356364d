"""Microscaling formats: floats of 4 to 8 bits, and a scale that the elements of a block share.

They are the formats in which matrix units of recent GPUs compute. The scale of `mx` is a power of
two, that of `nvfp4` is a small float times a scale of the tensor. Blocks are runs of the flattened
tensor. A block that holds NaN or an infinity has the scale NaN and decodes to NaN throughout. The
scales have a least value, such that no decoded number is below the smallest normal float32: the
products of a decoder then need no rounding (`jaxmp.codecs.exact`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.exact import short
from jaxmp.codecs.extremes import largest
from jaxmp.wire import Codec, Ctx, Like, compute_dtype, pack, unpack, wide
from jaxmp.wire.words import named, word

ROW = 32  # elements that are packed together: a block of `mx`, two of `nvfp4`
BIAS = 127  # of the exponents of float32 and E8M0
NAN = {'E8M0': 255, 'E4M3': 127}


class Minifloat(NamedTuple):
    """A float of few bits: a sign, ``exponent`` bits and ``mantissa`` bits, without infinities."""

    exponent: int
    mantissa: int
    most: float

    @property
    def bits(self) -> int:
        """Its width."""
        return 1 + self.exponent + self.mantissa

    @property
    def least(self) -> int:
        """The exponent of its smallest normal number, below which numbers have equal steps."""
        return 2 - 2 ** (self.exponent - 1)


E4M3 = Minifloat(4, 3, 448.0)
E2M3 = Minifloat(2, 3, 7.5)
E2M1 = Minifloat(2, 1, 6.0)
ELEMENTS = {8: E4M3, 6: E2M3, 4: E2M1}


def exponent(x: Float[Array, '...']) -> Int[Array, '...']:
    """``floor(log2 x)`` of normal numbers ``x > 0``, from their bits."""
    info = jnp.finfo(x.dtype)
    words = jax.lax.bitcast_convert_type(x, f'int{info.bits}')
    return (words >> info.nmant) + (info.minexp - 1)


def power(e: Int[Array, '...'], dtype: jnp.dtype) -> Float[Array, '...']:
    """``2**e``, exactly."""
    info = jnp.finfo(dtype)
    words = (e.astype(f'int{info.bits}') - (info.minexp - 1)) << info.nmant
    return jax.lax.bitcast_convert_type(words, dtype)


def code(x: Float[Array, '...'], of: Minifloat) -> UInt8[Array, '...']:
    """The nearest numbers of a format, halves to even; what is beyond its largest becomes that."""
    a = jnp.abs(x)
    a = jnp.where(a < of.most, a, of.most)  # NaN too: the scale says that it is one
    e = jnp.maximum(exponent(a), of.least)
    steps = jnp.round(a / power(e - of.mantissa, x.dtype))
    q = ((e - of.least) << of.mantissa) + steps.astype(e.dtype)
    return jnp.where(x < 0, q + 2 ** (of.bits - 1), q).astype(jnp.uint8)


def value(codes: UInt8[Array, '...'], of: Minifloat, dtype: jnp.dtype) -> Float[Array, '...']:
    """The numbers that `code` wrote.

    >>> value(jnp.arange(8, dtype='uint8'), E2M1, 'float32').tolist()
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    """
    q = codes.astype(jnp.int32) & (2 ** (of.bits - 1) - 1)
    whole = 2**of.mantissa
    e = jnp.maximum(q >> of.mantissa, 1) - 1
    steps = jnp.where(q < whole, q, (q & (whole - 1)) + whole).astype(dtype)
    y = steps * power(e + (of.least - of.mantissa), dtype)
    return jnp.where(codes >> (of.bits - 1) == 1, -y, y)


def _rows(x: Array) -> Float[Array, 'rows ROW']:
    flat = wide(x).reshape(-1)
    return jnp.pad(flat, (0, -flat.size % ROW)).reshape(-1, ROW)


def _joined(codes: Array, of: Minifloat, scales: Float[Array, ' blocks'], like: Like) -> Array:
    """The tensor of packed codes, each block times its scale."""
    q = unpack(codes, of.bits, ROW).reshape(len(scales), -1)
    y = value(q, of, scales.dtype) * scales[:, None]
    return saturated(y.reshape(-1)[: like.size].reshape(like.shape), like.dtype)


@word
def mx(bits: int) -> Codec:
    r"""Microscaling MXFP8, MXFP6 or MXFP4: small floats, 32 of which share a power of two.

    .. math:: C(x) = 2^s \operatorname{round}(x / 2^s),\quad
              s = \lfloor \log_2 \max |x| \rfloor - \lfloor \log_2 r \rfloor

    Elements are E4M3, E2M3 or E2M1, with the largest number r = 448, 7.5 or 6; beyond it they
    saturate. The scale is E8M0, 8 bits: ``bits + 8 / 32`` bits per element. Of the two MXFP6
    formats E2M3 errs less on normal data than E3M2: a block has one scale, and within a block
    precision is worth more than range. A block without a number above ``2**-109`` (MXFP8) or
    ``2**-121`` is rounded more coarsely than in the standard, because the scale has a least value.

    Args:
      bits: 8, 6 or 4.

    Raises:
      ValueError: if ``bits`` is another number.

    >>> import jaxmp
    >>> x, C = jnp.array([[1.0, -2.2, 3.3, 5.0]]), mx(4)
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).tolist()
    [[1.0, -2.0, 3.0, 4.0]]

    References:
      Microscaling Data Formats for Deep Learning, arXiv 2310.10537.
    """
    if isinstance(bits, bool) or not isinstance(bits, int) or bits not in ELEMENTS:
        raise ValueError(f'mx bits {bits!r} is not 8, 6 or 4; for MXFP4 write mx(4)')
    of = ELEMENTS[bits]
    finest = 1 - BIAS - (of.least - of.mantissa)  # its smallest number is a normal float32
    high = math.floor(math.log2(of.most))

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = _rows(x)
        most = largest(x, 1)
        s = jnp.clip(exponent(most) - high, finest, BIAS)
        u = x / power(s, x.dtype)[:, None]
        scale = jnp.where(jnp.isfinite(most), s + BIAS, NAN['E8M0'])
        return {'codes': pack(code(u, of), bits), 'scale': scale.astype(jnp.uint8)}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        s = m['scale'].astype(jnp.int32) - BIAS
        scales = jnp.where(m['scale'] == NAN['E8M0'], jnp.nan, power(s, compute_dtype(like)))
        return _joined(m['codes'], of, scales, like)

    return Codec(encode, decode)


def _encode_nvfp4(x: Array, ctx: Ctx) -> dict[str, Array]:
    rows = _rows(x)
    x = rows.reshape(-1, 16)
    most = largest(x, 1)
    ends = jnp.finfo(jnp.float32)
    top = jnp.max(jnp.where(jnp.isfinite(most), most, 0)) / (E4M3.most * E2M1.most)
    # Cut to 18 bits: its product with a scale (4 bits) and an element (2) needs no rounding, and is
    # no larger than the largest float.
    s = short(jnp.clip(top, ends.tiny * 2**10, ends.max).astype(jnp.float32), 18)
    scales = code(most / E2M1.most / s.astype(x.dtype), E4M3)
    scales = jnp.where(jnp.isfinite(most), scales, NAN['E4M3']).astype(jnp.uint8)
    unit = value(scales, E4M3, x.dtype) * s.astype(x.dtype)
    unit = jnp.where(unit > 0, unit, 1).reshape(-1, 2)  # a row is two blocks, and two runs of codes
    codes = pack(rows, 4, lambda run, i: code(run / unit[:, i : i + 1], E2M1))
    return {'codes': codes, 'scales': scales, 'scale': s}


def _decode_nvfp4(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
    dtype = compute_dtype(like)
    scales = value(m['scales'], E4M3, dtype) * m['scale'].astype(dtype)
    scales = jnp.where(m['scales'] == NAN['E4M3'], jnp.nan, scales)
    return _joined(m['codes'], E2M1, scales, like)


nvfp4 = named('nvfp4', Codec(_encode_nvfp4, _decode_nvfp4))
"""NVFP4: E2M1 elements, 16 of which share an E4M3 scale, and one float32 scale per tensor.

``C(x) = s b round(x / (s b))`` with ``s = max |x| / (448 * 6)`` over the tensor, cut to 18
significant bits, and ``b = round(max |x| / (6 s))`` over the block: 4.5 bits per element.

References:
  Pretraining Large Language Models with NVFP4, arXiv 2509.25149.
"""
