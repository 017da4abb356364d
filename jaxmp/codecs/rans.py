"""Asymmetric numeral systems: whole numbers in about as many bits as their probabilities say.

`encode` and `decode` are one range coder (rANS) of many lanes that share a stream of 16-bit words.
A number's probability is that of a `Table`, a logistic distribution with cells of width 1, and a
table's index is all that a receiver has to know of it.

References:
  Duda, Asymmetric numeral systems, arXiv 1311.2540. Lanes with one stream: Giesen, Interleaved
  entropy coders, arXiv 1402.3392.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt8, UInt16, UInt32

from jaxmp.wire import varying_as

PRECISION = 12  # bits of a probability
LEAST = 1 << 16  # of a lane's state, between two numbers
LARGEST = 255  # of a number; what is larger is sent as this
STEPS, SMALLEST, TABLES = 4, -4, 44  # mean sizes 2^-4, 2^-3.75, ... 2^6.75
LENGTH = 1024  # numbers of a lane, whose state takes 32 bits


class Tables(NamedTuple):
    """The distributions: `TABLES` rows of rounded numbers, then of two quantisers as many each.

    The second one's cells lie a half nearer to zero but for that of zero itself, as in
    `jaxmp.codecs.dependent`. Both have further numbers than rounding has.

    Attributes:
      frequency: of each number from -255 to 255, of 4096.
      start: the sum of those before it.
      number: for each of the 4096 the number plus 255.
      entropy: bits per number.
      centre: of a cell, how much nearer to zero than its middle the mean lies, in cells; of the
        first `TABLES`.
    """

    frequency: np.ndarray
    start: np.ndarray
    number: np.ndarray
    entropy: np.ndarray
    centre: np.ndarray


class Machine(NamedTuple):
    """Which of the two quantisers a number of a lane belongs to, by the parities of those before.

    Attributes:
      after: by state, the next one after an even and after an odd number; the first is 0.
      quantiser: by state, 0 or 1.
    """

    after: tuple[tuple[int, int], ...]
    quantiser: tuple[int, ...]


ROUNDED = Machine(((0, 0),), (0,))


@functools.cache
def tables() -> Tables:
    """Logistic distributions of mean sizes from 2^-4 to 2^6.75 cells.

    >>> [round(float(b), 2) for b in tables().entropy[[0, 16, 40]]]
    [0.01, 2.46, 8.23]
    """
    one, rows = 1 << PRECISION, []
    numbers = np.arange(-LARGEST, LARGEST + 1)
    kinds = (
        (0, 0.25),
        (0, 0.01),
        (1, 0.01),
    )  # the quantiser; of 4096, how many are left from the last number on
    for (quantiser, least), i in itertools.product(kinds, range(TABLES)):
        scale = 2 ** (SMALLEST + i / STEPS) / (2 * math.log(2))
        end = np.abs(numbers) + 0.5 * (1 - quantiser)  # of a cell
        end[LARGEST] = 0.5 / (1 + quantiser)
        start = np.where(np.abs(numbers) == 1, end[LARGEST], end - 1)
        tail, beyond = (1 / (1 + np.exp(np.minimum(x / scale, 700))) for x in (start, end))
        p = np.where(numbers == 0, 1 - 2 * beyond, tail - beyond)
        used = (tail * one > least) | (np.abs(numbers) <= 1)
        row = np.where(used, 1 + np.floor(p / p[used].sum() * (one - used.sum())), 0).astype(int)
        row[LARGEST] += one - row.sum()
        rows.append(row)
    frequency = np.array(rows)
    start = np.cumsum(frequency, 1) - frequency
    number = np.array([np.repeat(np.arange(len(numbers)), row) for row in rows])
    share = frequency / one
    entropy = -(share * np.log2(np.maximum(share, 1e-9))).sum(1)
    a = 2 * math.log(2) / 2 ** (SMALLEST + np.arange(TABLES) / STEPS)  # the decay of a tail
    centre = 0.5 - (1 / a - 1 / np.expm1(np.minimum(a, 500)))
    return Tables(
        frequency.astype(np.uint16), start.astype(np.uint16), number.astype(np.uint16),
        entropy.astype(np.float32), centre.astype(np.float32),
    )  # fmt: skip


def table_of(size: Array) -> UInt8[Array, '...']:
    """The index of the table for numbers of a mean size, in cells."""
    number = STEPS * (jnp.log2(jnp.maximum(size, 1e-30)) - SMALLEST)
    return jnp.clip(jnp.round(number), 0, TABLES - 1).astype(jnp.uint8)


def bits_of(size: Array) -> Array:
    """The bits of a number of a mean size, in cells."""
    return jnp.asarray(tables().entropy)[table_of(size).astype(int)]


def lanes(count: int) -> tuple[int, int]:
    """Numbers of a lane, and lanes, for so many numbers."""
    width = max(1, count // LENGTH)
    return -(-count // width), width


def grid(x: Array) -> Array:
    """Numbers in rows, of which a lane is a column; the last ones are zeros."""
    length, width = lanes(x.size)
    return jnp.pad(x.reshape(-1), (0, length * width - x.size)).reshape(length, width)


def encode(
    numbers: Int[Array, '...'], table: UInt8[Array, '...'], words: int
) -> tuple[UInt16[Array, ' words'], UInt32[Array, ' lanes'], Int[Array, '']]:
    """The stream of numbers, the lanes' states, and how many words it needs.

    Args:
      numbers: from -255 to 255; what a table has not is sent as the largest that it has.
      table: the index of each number's table.
      words: of the stream; if it needs more the rest is lost.
    """
    t = tables()
    most = jnp.asarray((t.frequency > 0).sum(1) // 2)[table.astype(int)]
    cell = table.astype(int), jnp.clip(numbers, -most, most) + LARGEST
    of = lambda rows: grid(jnp.asarray(rows)[cell].astype(jnp.uint32))
    frequency, start = of(t.frequency), of(t.start)
    frequency = jnp.where(frequency == 0, (1 << PRECISION) - 1, frequency)  # beyond the last one
    states, word, large = pushed(frequency, start)
    order = jnp.cumsum(large.reshape(-1).astype(jnp.int32))
    to = jnp.where(large.reshape(-1), order - 1, words)
    stream = jnp.zeros(words, jnp.uint16).at[to].set(word.reshape(-1), mode='drop')
    return stream, states, order[-1]


def pushed(
    frequency: UInt32[Array, 'L N'], start: UInt32[Array, 'L N']
) -> tuple[UInt32[Array, ' N'], UInt16[Array, 'L N'], Bool[Array, 'L N']]:
    """The last states of lanes, and words by number with which of them are of the stream.

    Args:
      frequency: of each number, in the rows of a lane.
      start: the sum of those before it.
    """

    def push(x: Array, row: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        f, s = row
        large, word = x >= f * (LEAST >> PRECISION << 16), x.astype(jnp.uint16)
        x = jnp.where(large, x >> 16, x)
        return (x // f << PRECISION) + x % f + s, (word, large)

    rows = frequency, start
    first = varying_as(jnp.full(frequency.shape[1], LEAST, jnp.uint32), rows)
    states, (word, large) = jax.lax.scan(push, first, rows, reverse=True)
    return states, word, large


def decode(
    stream: UInt16[Array, ' words'],
    states: UInt32[Array, ' lanes'],
    table: UInt8[Array, '...'],
    machine: Machine = ROUNDED,
) -> tuple[Int[Array, '...'], Int[Array, '...']]:
    """The numbers of a stream, for the table of each, and their quantisers; inverse of `encode`.

    Args:
      stream: of `encode`, whose tables were these, `TABLES` further on for the second quantiser.
      states: likewise.
      table: the index of each number's table of the first quantiser.
      machine: what says which quantiser a number belongs to.
    """
    t = tables()
    frequency, start, number = (jnp.asarray(rows) for rows in (t.frequency, t.start, t.number))
    after, quantiser = (jnp.asarray(rows, jnp.int32) for rows in machine)

    def pop(state: tuple[Array, Array, Array], row: Array) -> tuple[tuple, tuple[Array, Array]]:
        x, used, at = state
        q = quantiser[at]
        row = row + q * TABLES
        slot = (x & ((1 << PRECISION) - 1)).astype(jnp.uint16)
        index = number[row, slot]
        f, s = (rows[row, index].astype(jnp.uint32) for rows in (frequency, start))
        x = f * (x >> PRECISION) + slot - s
        small = x < LEAST
        order = _sums(small)
        word = stream[jnp.minimum(used + order - 1, len(stream) - 1)]
        at = after[at, (index - LARGEST) & 1]
        return (jnp.where(small, x << 16 | word, x), used + order[-1], at), (index, q)

    rows = grid(table.astype(jnp.int32))
    first = jnp.zeros(rows.shape[1], jnp.int32)
    begin = varying_as((states, jnp.int32(0), first), (states, stream, rows))
    _, found = jax.lax.scan(pop, begin, rows)
    indices, quantisers = (a.reshape(-1)[: table.size].reshape(table.shape) for a in found)
    return indices.astype(jnp.int32) - LARGEST, quantisers


def _sums(x: Bool[Array, ' n']) -> Int[Array, ' n']:
    """The numbers of the true ones up to each; two small products, faster than a scan."""
    side = math.isqrt(len(x) - 1) + 1
    rows = jnp.pad(x, (0, side * side - len(x))).reshape(side, side).astype(jnp.float32)
    within = rows @ jnp.triu(jnp.ones((side, side)))
    before = jnp.tril(jnp.ones((side, side)), -1) @ within[:, -1]
    return (within + before[:, None]).reshape(-1)[: len(x)].astype(jnp.int32)
