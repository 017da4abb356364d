"""The message of components by their entropy: one step for all, and as fine as the bits allow.

`jaxmp.feedback.klt` says which components a position has. Here each is a row of numbers, centred,
and rounded to multiples of one step, so that none has a larger error than another; what varies more
takes more bits. `jaxmp.codecs.rans` writes them. A message has its size whatever it holds: the
step is about the least with which all numbers fit. With a trellis the numbers of a lane are chosen
together (`jaxmp.codecs.dependent`), for an error about a sixth less.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs import dependent, rans
from jaxmp.codecs.lloyd import scale_of, scale_words, scaled, unit_rms
from jaxmp.feedback.components import centred, placed
from jaxmp.wire import Like, Payload

FINENESS, FINEST, COARSEST = 64, -640, 640  # steps of 2^(k / 64) times the components' RMS
FINER = 2  # steps below the one that fits by the distributions' entropies, tried first


def words_of(size: int, bits: float) -> int:
    """Words of the stream of so many numbers, which with the lanes' states takes the bits."""
    return max(1, round(bits * size / 16) - 2 * rans.lanes(size)[1])


def coded(z: Array, widths: Array, bits: float, trellis: bool = False) -> dict[str, Array]:
    """The message of components.

    Args:
      z: a component per row, a position per column.
      widths: one per component, as in `jaxmp.feedback.components`; only their number counts.
      bits: mean number of bits per element, of which the message has the size.
      trellis: whether numbers are chosen together.
    """
    z, mean = centred(z)
    words = words_of(z.size, bits)
    unit, rms = unit_rms(z.reshape(1, -1))
    a = z * (1 / unit)
    size = jnp.mean(jnp.abs(a), 1, keepdims=True)
    steps = rms[0] * 2 ** (jnp.arange(FINEST, COARSEST + 1, dtype=z.dtype) / FINENESS)
    bits_of = dependent.bits_of if trellis else rans.bits_of
    needs = bits_of(size / steps).sum(0)
    fits = needs * z.shape[1] <= 16 * words
    first = jnp.where(jnp.any(fits), jnp.argmax(fits) - FINER, len(steps) - 1)

    def at(k: Array) -> tuple[Array, dict[str, Array], Array]:
        word = scale_words(steps[k], jnp.ones_like(rms), unit, rms)
        step = scale_of(word, Like(z.shape, z.dtype)) / unit
        numbers, quantisers, table = (_together if trellis else _rounded)(a / step, size / step)
        tables = table + quantisers.astype(table.dtype) * rans.TABLES
        stream, states, used = rans.encode(numbers, jnp.broadcast_to(tables, z.shape), words)
        states = jax.lax.bitcast_convert_type(states, jnp.uint16)
        return k, {'codes': stream, 'states': states, 'table': table, 'step': word}, used

    _, message, _ = jax.lax.while_loop(
        lambda trial: (trial[2] > words) & (trial[0] < len(steps) - 1),
        # A finer step by 1 / FINENESS of an octave takes at most as many bits of each number.
        lambda trial: at(trial[0] + jnp.maximum(1, 16 * FINENESS * (trial[2] - words) // z.size)),
        at(jnp.maximum(first, 0)),
    )
    return {**message, 'mean': mean}


def _rounded(x: Array, size: Array) -> tuple[Array, Array, Array]:
    """The numbers of components in steps, their quantiser, and each row's table."""
    numbers = jnp.clip(jnp.round(x), -rans.LARGEST, rans.LARGEST)
    numbers = jnp.where(jnp.isfinite(numbers), numbers, 0).astype(jnp.int32)
    return numbers, jnp.zeros((1, 1), int), rans.table_of(size)


def _together(x: Array, size: Array) -> tuple[Array, Array, Array]:
    """The same with two quantisers."""
    table = dependent.table_of(size)
    return *dependent.chosen(x, table), table


def decoded(
    m: Payload, widths: Array, like: Like, bits: float, middle: bool = False, trellis: bool = False
) -> Array:
    """The components of a message for a tensor like ``like``; inverse of `coded`.

    A number is decoded as the mean of its cell, or in the cell's middle; with a trellis as its
    level, for which `jaxmp.codecs.dependent.PRICE` has made the level the mean.
    """
    table = jnp.broadcast_to(m['table'], (len(widths), like.size // len(widths)))
    states = jax.lax.bitcast_convert_type(m['states'], jnp.uint32)
    machine = dependent.MACHINE if trellis else rans.ROUNDED
    numbers, quantisers = rans.decode(m['codes'], states, table, machine)
    if trellis:
        size = jnp.abs(dependent.level_of(numbers, quantisers))
    else:
        nearer = 0 if middle else jnp.asarray(rans.tables().centre)[m['table'].astype(int)]
        size = jnp.maximum(jnp.abs(numbers) - nearer, 0)
    step = scale_of(m['step'], like)
    y = scaled(size.astype(step.dtype), step)
    return placed(jnp.where(numbers < 0, -y, y), m, like)
