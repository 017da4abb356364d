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
from collections.abc import Callable, Sequence
from statistics import NormalDist

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.exact import short
from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, compute_dtype, half_bytes, pack, samples, unpack, wide
from jaxmp.words import check_bools, word

RUNS = 32  # of a row, whose sums are formed side by side
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


def sums(x: Float[Array, 'B n'], *functions: Callable[[Array], Array]) -> list[Array]:
    """Sums of elementwise functions over each sample, ``(B, 1)``, all in one pass.

    XLA:CPU adds the elements of a row one by one. Runs of a row are added by vectors, if the
    results are joined; with a function alone XLA would put the last sum back into the loop.
    """
    width = x.shape[1] // RUNS
    runs = [x[:, i * width : (i + 1) * width] for i in range(RUNS)] * (width > 0)
    rest = x[:, RUNS * width :]
    parts = [functools.reduce(jnp.add, map(f, runs)) for f in functions] if runs else []
    joined = jnp.concatenate(parts, 1).reshape(len(x), -1, width).sum(2) if runs else 0
    totals = joined + jnp.stack([f(rest).sum(1) for f in functions], 1)
    return jnp.split(totals, len(functions), 1)


@functools.partial(jax.jit, inline=True)  # else an eager call would compile its branches again
def unit_rms(x: Float[Array, 'B n']) -> tuple[Array, Array]:
    """A power of two near the RMS of each sample, and the RMS of the sample divided by it.

    Of zeros both are 1; of a sample that holds NaN or an infinity the RMS is NaN.
    """
    least, square = float(jnp.finfo(x.dtype).tiny), jnp.mean(x * x, 1, keepdims=True)
    in_range = (square > least * 2**24) & (square < jnp.inf)
    rms = jax.lax.cond(jnp.all(in_range), lambda: jnp.sqrt(square), lambda: _rms_of_any(x))
    unit = _power(rms)
    return unit, rms * (1 / unit)


def _rms_of_any(x: Array) -> Array:
    """The RMS of samples whose squares may be beyond the range of floats; 1 of zeros."""
    most = jnp.max(jnp.abs(x), 1, keepdims=True)  # may miss NaN, which the sum does not
    unit = _power(most)  # a quotient by `most` may be made through its reciprocal, which may be 0
    rms = jnp.sqrt(jnp.mean(jnp.square(x * (1 / unit)), 1, keepdims=True)) * unit
    return jnp.where(rms == 0, 1, jnp.where(jnp.isfinite(rms), rms, jnp.nan))


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
    """``s y`` for levels ``y >= 0``; what is beyond the largest float becomes that."""
    return jnp.minimum(y * s, jnp.finfo(y.dtype).max)


def nearest(a: Array, levels: Sequence[float], rms: Array) -> Array:
    """The number of the nearest of ascending levels times ``rms`` to each ``a``."""
    middles = ((low + high) / 2 for low, high in itertools.pairwise(levels))
    return sum(((a > m * rms).astype(jnp.uint8) for m in middles), jnp.zeros(a.shape, jnp.uint8))


def of_nearest(f: Callable[[float], Array], a: Array, levels: Sequence[float], rms: Array) -> Array:
    """``f`` of the nearest level by comparisons, which XLA:CPU vectorises, unlike ``level * a``."""
    y = jnp.broadcast_to(f(levels[0]), a.shape)
    for low, high in itertools.pairwise(levels):
        y = jnp.where(a > (low + high) / 2 * rms, f(high), y)
    return y


def chosen(number: Array, levels: Sequence[float], dtype: jnp.dtype) -> Array:
    """``levels[number]`` by comparisons, which XLA:CPU vectorises where a table is not."""
    level = jnp.full(number.shape, levels[0], dtype)
    for i, value in enumerate(levels[1:], 1):
        level = jnp.where(number >= i, value, level)
    return level


# Functions of a run of rows. A program holds each once for all runs, which are traced once.

of_runs = functools.partial(jax.jit, static_argnames=('levels', 'signed'))


def _size(run: Array, unit: Array, signed: bool) -> Array:
    return (jnp.abs(run) if signed else run) * (1 / unit)


@of_runs
def _code(run: Array, unit: Array, sigma: Array, levels: tuple[float, ...], signed: bool) -> Array:
    number = nearest(_size(run, unit, signed), levels, sigma)
    return number + len(levels) * (run < 0).astype(jnp.uint8) if signed else number


@of_runs
def _magnitude(
    run: Array, unit: Array, sigma: Array, levels: tuple[float, ...], signed: bool
) -> Array:
    return _size(run, unit, signed)


@of_runs
def _mixed(run: Array, unit: Array, sigma: Array, levels: tuple[float, ...], signed: bool) -> Array:
    size = _size(run, unit, signed)
    return of_nearest(lambda level: level * size, size, levels, sigma)


@of_runs
def _energy(
    run: Array, unit: Array, sigma: Array, levels: tuple[float, ...], signed: bool
) -> Array:
    size = _size(run, unit, signed)
    return of_nearest(lambda y: jnp.full((), y**2, size.dtype), size, levels, sigma)


@of_runs
def _square(
    run: Array, unit: Array, sigma: Array, levels: tuple[float, ...], signed: bool
) -> Array:
    return jnp.square(_size(run, unit, signed))


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

        def of(f: Callable[..., Array], run: Array, *_: int) -> Array:
            return f(run, unit, sigma, levels, signed)

        terms = (_square, _mixed) if unbiased else (_mixed, _energy)
        total = (_magnitude,) if signed and bits > 1 else ()
        above, below, *rest = sums(x, *(functools.partial(of, f) for f in (*terms, *total)))
        for magnitudes in rest:
            one = alike(magnitudes, rms, x.shape[1], ERRORS[bits])
            above = jnp.where(one, -magnitudes, above)
            below = jnp.where(one, x.shape[1], below)
        codes = pack(x, bits, functools.partial(of, _code))
        return {'codes': codes, 'scale': scale_words(above, below, unit, rms)}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        s = scale_of(m['scale'], like)
        q = unpack(m['codes'], bits, math.prod(like.shape[1:]))
        level = chosen(q & (half - 1) if signed else q, levels, s.dtype)
        y = scaled(jnp.where(s < 0, 1, level), jnp.abs(s))
        y = jnp.where(q >= half, -y, y) if signed else y
        return saturated(y.reshape(like.shape), like.dtype)

    return Codec(encode, decode, samples='alone')
