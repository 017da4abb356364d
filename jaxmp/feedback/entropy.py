"""The message of components by their entropy: one step for all, and as fine as the bits allow.

`jaxmp.feedback.klt` says which components a position has. Here each is a row of numbers, centred,
and rounded to multiples of one step, so that none has a larger error than another; what varies more
takes more bits. `jaxmp.codecs.rans` writes them. A message has its size whatever it holds: the
step is about the least with which all numbers fit.

With a trellis the numbers of a lane are chosen together (`jaxmp.codecs.dependent`). A position then
has a size too, where that is few bits: the numbers of a token may all be larger than another's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs import dependent, rans
from jaxmp.codecs.lloyd import scale_of, scale_words, scaled, unit_rms
from jaxmp.feedback.components import centred, placed
from jaxmp.wire import Like, Payload, pack, unpack

FINENESS, FINEST, COARSEST = 64, -640, 640  # steps of 2^(k / 64) times the components' RMS
FINER = 2  # steps below the one that fits by the distributions' entropies, tried first
WIDTH, EVEN = 4, 8  # bits of a position's size, in quarters of an octave; the number of size 1
SHARE = 0.03  # of a message, which the positions' sizes take at most
LOUDEST = 2**5.75  # steps of the largest component: beyond 255 a number is cut
SAVED = 32  # steps that positions' sizes make finer at most


def words_of(components: int, positions: int, bits: float, sizes: bool) -> int:
    """Words of the stream; the lanes' states and the positions' sizes take the other bits."""
    size = components * positions
    beside = 2 * rans.lanes(size)[1] + sizes * -(-WIDTH * positions // 16)
    return max(1, round(bits * size / 16) - beside)


def _has_sizes(components: int, bits: float, trellis: bool) -> bool:
    return trellis and SHARE * bits * components >= WIDTH


def _first(fits: Array) -> Array:
    """The number of the first that fits, or the last."""
    return jnp.where(jnp.any(fits), jnp.argmax(fits), len(fits) - 1)


def _even(positions: int) -> Array:
    """Positions of equal sizes."""
    return jnp.zeros((1, positions), jnp.int32)


def _louder(a: Array, size: Array, step: Array) -> Array:
    """How many quarters of an octave the positions' numbers are larger than their components'.

    Components of half a step or more have a say, by the mean of what they are over their size.
    """
    counts = size > step / 2
    ratio = jnp.where(counts, jnp.abs(a) / jnp.where(counts, size, 1), 0).sum(0, keepdims=True)
    quarters = jnp.round(rans.STEPS * jnp.log2(jnp.maximum(ratio, 1e-30) / counts.sum()))
    return jnp.clip(jnp.where(jnp.any(counts), quarters, 0), -EVEN, EVEN - 1).astype(jnp.int32)


def _times(quarters: Array, dtype: jnp.dtype) -> Array:
    return 2 ** (quarters.astype(dtype) / rans.STEPS)


def _table(rows: Array, quarters: Array, trellis: bool) -> Array:
    """The table of each number, by its component's and its position's size."""
    first = dependent.FIRST if trellis else 0
    rows = jnp.clip(rows.astype(jnp.int32) + quarters, first, first + rans.TABLES - 1)
    return rows.astype(jnp.uint8)


def coded(z: Array, widths: Array, bits: float, trellis: bool = False) -> dict[str, Array]:
    """The message of components.

    Args:
      z: a component per row, a position per column.
      widths: one per component, as in `jaxmp.feedback.components`; only their number counts.
      bits: mean number of bits per element, of which the message has the size.
      trellis: whether numbers are chosen together, and positions have sizes.
    """
    z, mean = centred(z)
    sizes = _has_sizes(len(z), bits, trellis)
    words = words_of(z.shape[0], z.shape[1], bits, sizes)
    unit, rms = unit_rms(z.reshape(1, -1))
    a = z * (1 / unit)
    size = jnp.mean(jnp.abs(a), 1, keepdims=True)
    steps = rms[0] * 2 ** (jnp.arange(FINEST, COARSEST + 1, dtype=z.dtype) / FINENESS)
    model = dependent if trellis else rans
    uncut = jnp.max(size) <= LOUDEST * steps
    first = _first(uncut & (model.bits_of(size / steps).sum(0) * z.shape[1] <= 16 * words))
    quarters = _even(z.shape[1])
    if sizes:
        quarters = _louder(a, size, steps[first])
        size = jnp.mean(jnp.abs(a) / _times(quarters, a.dtype), 1, keepdims=True)
        often = jnp.stack([jnp.mean(quarters == k) for k in range(-EVEN, EVEN)])
        near = jnp.maximum(first - SAVED + jnp.arange(SAVED + 1), 0)
        of = size * _times(jnp.arange(-EVEN, EVEN), a.dtype)
        needs = often @ model.bits_of(of[..., None] / steps[near]).sum(0) * z.shape[1]
        first = near[_first(uncut[near] & (needs <= 16 * words))]

    def at(k: Array) -> tuple[Array, dict[str, Array], Array]:
        word = scale_words(steps[k], jnp.ones_like(rms), unit, rms)
        step = scale_of(word, Like(z.shape, z.dtype)) / unit
        rows = model.table_of(size / step)
        table = jnp.broadcast_to(_table(rows, quarters, trellis), z.shape)
        if trellis:
            numbers, quantisers = dependent.chosen(a / step, table)
            table = table + quantisers.astype(table.dtype) * rans.TABLES
        else:
            numbers = jnp.clip(jnp.round(a / step), -rans.LARGEST, rans.LARGEST)
            numbers = jnp.where(jnp.isfinite(numbers), numbers, 0).astype(jnp.int32)
        stream, states, used = rans.encode(numbers, table, words)
        states = jax.lax.bitcast_convert_type(states, jnp.uint16)
        return k, {'codes': stream, 'states': states, 'table': rows, 'step': word}, used

    _, message, _ = jax.lax.while_loop(
        lambda trial: (trial[2] > words) & (trial[0] < len(steps) - 1),
        # A step coarser by 1 / FINENESS of an octave saves about as many bits of a number, or less.
        lambda trial: at(trial[0] + jnp.maximum(1, 16 * FINENESS * (trial[2] - words) // z.size)),
        at(jnp.maximum(first - FINER, 0)),
    )
    if sizes:
        message['sizes'] = pack((quarters[0] + EVEN).astype(jnp.uint8), WIDTH)
    return {**message, 'mean': mean}


def decoded(
    m: Payload, widths: Array, like: Like, bits: float, middle: bool = False, trellis: bool = False
) -> Array:
    """The components of a message for a tensor like ``like``; inverse of `coded`.

    A number is decoded as the mean of its cell, or in the cell's middle. With a trellis it is
    decoded as its level, which `jaxmp.codecs.dependent.PRICE` makes about the mean.
    """
    positions = like.size // len(widths)
    quarters = _even(positions)
    if _has_sizes(len(widths), bits, trellis):
        quarters = unpack(m['sizes'], WIDTH, positions).astype(jnp.int32)[None] - EVEN
    table = jnp.broadcast_to(_table(m['table'], quarters, trellis), (len(widths), positions))
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
