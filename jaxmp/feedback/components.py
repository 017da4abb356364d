"""The message of components in 0 to 5 bits each, and the bits that are worth most.

`jaxmp.feedback.klt` says which components a position has. Here each is a row of numbers, centred,
and coded by the Lloyd-Max quantiser of its width for normal data. The planes of all codes lie one
after another, so a message has the same size whichever component has the bits.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxmp.codecs.lloyd import (
    ERRORS,
    normal_levels,
    scale_of,
    scale_words,
    scaled,
    unit_rms,
)
from jaxmp.wire import Like, Payload, half_bytes, pack, unpack

WIDEST = len(ERRORS) - 1


def total(count: int, bits: float) -> int:
    """Bits of a position of ``count`` components with a mean of ``bits``."""
    return max(1, round(bits * count))


def best_widths(variances: Array, bits: float) -> Array:
    """The widths with a mean of ``bits`` of least squared error."""
    variances = jnp.where(jnp.any(variances > 0), variances, 1)  # nothing known: all alike
    gains = jnp.maximum(variances, 0)[:, None] * -jnp.diff(jnp.array(ERRORS, variances.dtype))
    most = jnp.argsort(-gains.reshape(-1), stable=True)[: total(len(variances), bits)]
    return jnp.zeros(len(variances), variances.dtype).at[most // WIDEST].add(1)


def _fitting(widths: Array, bits: float) -> Array:
    """The widths, or those of ``bits`` where the book is of a phase of more or fewer."""
    fits = jnp.sum(widths) == total(len(widths), bits)
    return jnp.where(fits, widths, best_widths(4**widths, bits))


def _planes(widths: Array, total: int) -> tuple[Int[Array, ' T'], Int[Array, ' T']]:
    """The component of each plane of bits, and the bit of its code."""
    plane, ends = jnp.arange(total), jnp.cumsum(widths.astype(int))
    of = jnp.searchsorted(ends, plane, side='right')
    return of, (plane - (ends - widths.astype(int))[of]).astype(jnp.uint8)


def _levels(widths: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The positive levels of each component and the ends of their cells; those beyond are inf."""
    levels, ends = np.zeros((WIDEST + 1, 16)), np.full((WIDEST + 1, 16), np.inf)
    for width in range(1, WIDEST + 1):
        count = 2 ** (width - 1)
        levels[width, :count] = positive = normal_levels(count)
        ends[width, 1:count] = (np.array(positive[1:]) + positive[:-1]) / 2
    of = lambda table: jnp.asarray(table, dtype)[widths.astype(int)].T[..., None]
    return of(levels), of(ends)


def centred(z: Array) -> tuple[Array, Array]:
    """Components without their means, and the means as they are sent."""
    most, largest = float(jnp.finfo(jnp.bfloat16).max), jnp.finfo(z.dtype).max
    mean = jnp.sum(z / z.shape[1], 1, keepdims=True)  # their sum may be beyond the largest float
    mean = half_bytes(jnp.clip(mean, -most, most).astype(jnp.bfloat16))
    apart = z - scale_of(mean, Like(z.shape, z.dtype))
    return jnp.where(jnp.isfinite(z), jnp.clip(apart, -largest, largest), apart), mean


def placed(y: Array, m: Payload, like: Like) -> Array:
    """Components around the means of a message."""
    largest = jnp.finfo(y.dtype).max
    return jnp.clip(y + scale_of(m['mean'], like), -largest, largest)


def coded(z: Array, widths: Array, bits: float) -> dict[str, Array]:
    """The message of components.

    Args:
      z: a component per row, a position per column.
      widths: bits of each component.
      bits: their mean number, of which the message has the size.
    """
    widths = _fitting(widths, bits)
    z, mean = centred(z)
    unit, rms = unit_rms(z)
    a, (levels, ends) = jnp.abs(z) * (1 / unit), _levels(widths, z.dtype)
    level, number = jnp.broadcast_to(levels[0], z.shape), jnp.zeros(z.shape, jnp.uint8)
    for i in range(1, len(levels)):
        above = a > ends[i] * rms
        level, number = jnp.where(above, levels[i], level), number + above.astype(jnp.uint8)
    codes = 2 * number + (z < 0).astype(jnp.uint8)
    of, bit = _planes(widths, total(len(widths), bits))
    mixed, energy = (jnp.sum(b * level, 1, keepdims=True) for b in (a, level))
    words = scale_words(mixed, energy, unit, rms)
    return {'codes': pack(codes[of] >> bit[:, None] & 1, 1), 'scale': words, 'mean': mean}


def decoded(m: Payload, widths: Array, like: Like, bits: float) -> Array:
    """The components of a message for a tensor like ``like``; inverse of `coded`."""
    count, widths = like.size // len(widths), _fitting(widths, bits)
    of, bit = _planes(widths, total(len(widths), bits))
    codes = jnp.zeros((len(widths), count), jnp.uint8)
    codes = codes.at[of].add(unpack(m['codes'], 1, count) << bit[:, None])
    levels, _ = _levels(widths, widths.dtype)
    y = jnp.broadcast_to(levels[0], codes.shape)
    for i in range(1, len(levels)):
        y = jnp.where(codes >> 1 >= i, levels[i], y)
    y = scaled(y, scale_of(m['scale'], like))
    return placed(jnp.where(codes & 1, -y, y), m, like)
