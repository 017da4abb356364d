"""`lloyd`: levels that lie close where normal data is dense.

Uniform levels waste codes on the rare ends of a normal distribution. Of all quantisers that code
each element alone with a fixed number of bits, that of Lloyd and Max has the least squared error: a
level is the mean of its cell, and a cell ends halfway between two levels.

The scale is the sender's least squares, not the range, so an outlier costs its own error only.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.exact import short
from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, compute_dtype, half_bytes, pack, samples, unpack, wide
from jaxmp.wire.words import check_bools, word

RUNS = 32  # of a row, whose maxima are formed side by side
AT_ONCE = 8  # runs of a row, whose sums are formed side by side
ERRORS = (1.0, 0.3634, 0.1175, 0.0345, 0.0095, 0.0025)  # on normal data, by bits
GRID = 2**10  # levels are multiples of 1 / GRID, so that products with a bfloat16 scale are exact


@functools.cache
def normal_levels(count: int, zero: bool = False) -> tuple[float, ...]:
    """The positive Lloyd-Max levels for unit normal data, rounded to `GRID`.

    Args:
      count: how many are positive.
      zero: whether zero is a level below them.

    >>> normal_levels(2)
    (0.453125, 1.5107421875)
    """
    unit = NormalDist()
    x = np.array([unit.inv_cdf(0.5 + (k + 0.5) / (2 * count)) for k in range(count)])
    for _ in range(400 * count):
        ends = [x[0] / 2 if zero else 0.0, *(x[1:] + x[:-1]) / 2, np.inf]
        density, below = (np.array([f(e) for e in ends]) for f in (unit.pdf, unit.cdf))
        x = -np.diff(density) / np.diff(below)
    return tuple(float(v) for v in np.round(x * GRID) / GRID)


@functools.partial(jax.jit, inline=True)  # else an eager call would compile a reduction again
def sums(*terms: Float[Array, 'B n']) -> list[Array]:
    """Sums of several arrays over each sample, ``(B, 1)``, all in one pass.

    XLA:CPU adds the elements of a row one by one. `AT_ONCE` runs of it are added by vectors, if all
    sums are results of one reduction; then each term is computed in it, and never written.
    """
    zero, width = jnp.zeros((), terms[0].dtype), terms[0].shape[1] // AT_ONCE
    runs = [t[:, : AT_ONCE * width].reshape(len(t), AT_ONCE, width) for t in terms]
    added = lambda a, b: tuple(p + q for p, q in zip(a, b, strict=True))
    totals = jax.lax.reduce(tuple(runs), (zero,) * len(terms), added, (1,))
    ones = jnp.ones((width, 1), zero.dtype)  # a product, into which XLA does not fuse the reduction
    rest = [t[:, AT_ONCE * width :].sum(1, keepdims=True) for t in terms]
    return [jnp.dot(t, ones, precision='highest') + r for t, r in zip(totals, rest, strict=True)]


def unit_rms(x: Float[Array, 'B n']) -> tuple[Array, Array]:
    """A power of two near the RMS of each sample, and the RMS of the sample divided by it.

    Of zeros both are 1; of a sample that holds NaN or an infinity the RMS is NaN.
    """
    info = jnp.finfo(x.dtype)
    far = 2.0 ** (info.maxexp * 5 // 8)  # squares of very small and very large numbers, in range
    squares = sums(x * x, jnp.square(x * far), jnp.square(x * (1 / far)))
    middle, small, large = (s / x.shape[1] for s in squares)
    rms = jnp.where(middle < jnp.inf, jnp.sqrt(middle), jnp.sqrt(large) * far)
    rms = jnp.where(middle < float(info.tiny) * 2**24, jnp.sqrt(small) / far, rms)
    rms = jnp.where(rms == 0, 1, jnp.where(jnp.isfinite(rms), rms, jnp.nan))
    unit = _power(rms)
    return unit, rms * (1 / unit)


def _power(x: Array) -> Array:
    """A power of two near ``x``, whose reciprocal is a normal number too."""
    least = 4 * float(jnp.finfo(x.dtype).tiny)
    return short(jnp.clip(x, least, 1 / least), 1)


def scale_words(above: Array, below: Array, unit: Array, rms: Array) -> Array:
    """The bfloat16 scale ``unit above / below``, per sample, as 16-bit words.

    For levels y of elements ``unit x`` the sums of ``x y`` and ``y y`` give the scale of least
    squares, and those of ``x x`` and ``x y`` the unbiased one.

    Args:
      above: a sum over a sample.
      below: another; the quotient by zero is ``above``.
      unit: from `unit_rms`; x is in this unit.
      rms: likewise; not finite where the sample is not.
    """
    s = above / jnp.where(below > 0, below, 1) * unit
    s = jnp.minimum(s, float(jnp.finfo(jnp.bfloat16).max))
    return half_bytes(jnp.where(jnp.isfinite(rms), s, jnp.nan).astype(jnp.bfloat16))


def alike(magnitudes: Array, rms: Array, count: int, error: float) -> Array:
    """Whether the magnitudes of each sample lie so close together that one level is best for all.

    A rotation makes one large element plus or minus a constant everywhere, perhaps where two cells
    meet, and the small rest decides between two levels. One level at the mean magnitude has the
    error ``1 - mean^2 / rms^2`` of the energy, and is taken if that is less than ``error``, which
    no normal data of more than some ten elements has.

    Args:
      magnitudes: their sum, in the unit of `unit_rms`.
      rms: from `unit_rms`.
      count: elements of a sample.
      error: of the codec on normal data.
    """
    mean = magnitudes / count / rms
    return 1 - mean * mean < error


def scale_of(words: Array, like: Like) -> Array:
    """The scale of `scale_words`, in the dtype in which a codec computes."""
    return jax.lax.bitcast_convert_type(words, jnp.bfloat16).astype(compute_dtype(like))


def scaled(y: Array, s: Array) -> Array:
    """``s y`` for levels ``y``; what is beyond the largest float becomes that."""
    most = jnp.finfo(y.dtype).max
    return jnp.clip(y * s, -most, most)


def _tests(a: Array, levels: Sequence[float], rms: Array) -> list[Array]:
    """The bits, lowest first, of the number of the nearest of ``2**k`` levels times ``rms``.

    They are found from the highest, each by a comparison with one end of a cell.
    """
    ends = [(low + high) / 2 * rms for low, high in itertools.pairwise(levels)]
    bits: list[Array] = []
    for step in [2**k for k in reversed(range(len(levels).bit_length() - 1))]:
        bits = [a > _picked(bits, ends[step - 1 :: 2 * step]), *bits]
    return bits


def _picked(bits: Sequence[Array], choices: Sequence[Array]) -> Array:
    """One of ``2**k`` choices, by the k bits of its number."""
    for odd in bits:
        pairs = zip(choices[::2], choices[1::2], strict=True)
        choices = [jnp.where(odd, high, low) for low, high in pairs]
    return choices[0]


def nearest(a: Array, levels: Sequence[float], rms: Array) -> Array:
    """The number of the nearest of ``2**k`` ascending levels times ``rms`` to each ``a``."""
    bits = [bit.astype(jnp.uint8) << i for i, bit in enumerate(_tests(a, levels, rms))]
    return functools.reduce(jnp.bitwise_or, bits, jnp.zeros(a.shape, jnp.uint8))


def level_of(a: Array, levels: Sequence[float], rms: Array) -> Array:
    """The nearest of ascending levels times ``rms`` to each ``a``, in units of ``rms``."""
    y = jnp.full(a.shape, levels[0], a.dtype)
    for low, high in itertools.pairwise(levels):  # in a sum as fast as half as many comparisons
        y = jnp.where(a > (low + high) / 2 * rms, high, y)
    return y


def chosen(number: Array, levels: Sequence[float], dtype: jnp.dtype) -> Array:
    """``levels[number]`` of ``2**k`` levels by k tests of bits, as XLA:CPU vectorises no table."""
    y = [jnp.full(number.shape, level, dtype) for level in levels]
    return _picked([(number >> k & 1) == 1 for k in range(len(levels).bit_length() - 1)], y)


@word
def lloyd(bits: int, signed: bool = True, unbiased: bool = False) -> Codec:
    r"""Lloyd-Max quantiser for normal data, with one least-squares scale per sample.

    .. math:: C(x) = s\, l_q,\quad q_i = \arg\min_j |x_i / \sigma - l_j|,\quad
              s = \langle x, l_q\rangle / |l_q|^2

    The :math:`l_j` are the ``2**bits`` levels of least squared error for a unit normal
    distribution, :math:`\sigma` is the sample's root mean square. The scale is sent as bfloat16. A
    sample that holds NaN or an infinity decodes to NaN. Put it inside `rotate` for data that is not
    normal: ``rotate(lloyd(2))``. A sample whose magnitudes are all alike, such as one large element
    after a rotation, gets one level: its scale is the mean magnitude, with a minus sign.

    Args:
      bits: 1 to 5.
      signed: False for data without negative numbers, such as the output of a ReLU: one level is
        zero, and the others are positive.
      unbiased: the scale is ``s = |x|^2 / <x, l_q>``, with which the mean of C(x) over the random
        signs of `rotate` is x. The squared error is larger, and the part along x is not shrunk.

    Raises:
      TypeError: if ``signed`` or ``unbiased`` is not a truth value.
      ValueError: if ``bits`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C = lloyd(1)
    >>> x = jnp.array([[1.0, -1.0, 3.0, -3.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).round(1).tolist()
    [[2.0, -2.0, 2.0, -2.0]]

    References:
      EDEN: Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning,
      arXiv 2108.08842.
    """
    check_bits('lloyd', bits, 1, 5)
    check_bools('lloyd', signed=signed, unbiased=unbiased)
    half = 2 ** (bits - 1)
    levels = normal_levels(half) if signed else (0.0, *normal_levels(2**bits - 1, zero=True))

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(samples(x))
        unit, rms = unit_rms(x)
        # Of a rectified normal distribution only one half of the elements has energy.
        sigma = rms if signed else rms * np.float32(math.sqrt(2))

        size = (jnp.abs(x) if signed else x) * (1 / unit)
        level = level_of(size, levels, sigma)
        terms = [size * size, size * level] if unbiased else [size * level, level * level]
        above, below, *rest = sums(*terms, *([size] if signed and bits > 1 else []))
        for magnitudes in rest:
            one = alike(magnitudes, rms, x.shape[1], ERRORS[bits])
            above = jnp.where(one, -magnitudes, above)
            below = jnp.where(one, x.shape[1], below)

        def code(run: Array, _: int) -> Array:
            number = nearest((jnp.abs(run) if signed else run) * (1 / unit), levels, sigma)
            return number + half * (run < 0).astype(jnp.uint8) if signed else number

        return {'codes': pack(x, bits, code), 'scale': scale_words(above, below, unit, rms)}

    def read(m: dict[str, Array], like: Like, ctx: Ctx) -> tuple[Array, Array]:
        s = scale_of(m['scale'], like)

        def value(q: Array) -> Array:
            level = chosen(q & (half - 1) if signed else q, levels, s.dtype)
            y = jnp.where(s < 0, 1, level)
            return jnp.where(q >= half, -y, y) if signed else y

        return unpack(m['codes'], bits, math.prod(like.shape[1:]), value), jnp.abs(s)

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        return saturated(scaled(*read(m, like, ctx)).reshape(like.shape), like.dtype)

    return Codec(encode, decode, levels=read, samples='alone')
