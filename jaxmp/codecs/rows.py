"""Numbers by their entropy, where each row is a stream of its own: a token needs no other token.

`jaxmp.codecs.rans` has the tables, and a coder whose lanes share a stream. Here a row is a lane
with words of its own, as many in every row, and a column has one table. What a row needs is known
before it is coded, within a few bits, so that its sender can choose the finest step that fits.

References:
  Duda, Asymmetric numeral systems, arXiv 1311.2540.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8, UInt16

from jaxmp.codecs.rans import LARGEST, LEAST, PRECISION, SMALLEST, STEPS, TABLES, pushed, tables
from jaxmp.wire import varying_as

STATE = 2  # words of a row's last state, half of which is information


@functools.cache
def largest() -> Int[np.ndarray, ' TABLES']:
    """The largest number of each table."""
    return (tables().frequency[:TABLES] > 0).sum(1) // 2


def cost(
    numbers: Float[Array, 'N C'], table: UInt8[np.ndarray, ' C'], part: int = 4
) -> Float[Array, ' N']:
    r"""About the bits of each row: of the logistic distributions that the tables round.

    .. math:: -\log_2 p(n) = \log_2 (\cosh(n / s) + \cosh(1 / 2 s)) - \log_2 \sinh(1 / 2 s)

    Args:
      numbers: whole, of any size.
      table: of each column.
      part: columns whose logarithm is taken at once.
    """
    scale = 2 ** (SMALLEST + np.asarray(table, float) / STEPS) / (2 * math.log(2))
    half = 0.5 / scale
    fixed = np.log2(2 * np.exp(-half) / -np.expm1(-2 * half))  # of a half less than is left below
    u = jnp.abs(numbers) * jnp.asarray(1 / scale, numbers.dtype)
    small = jnp.exp(-u)
    about = 1 + small * (jnp.asarray(2 * np.cosh(np.minimum(half, 40)), u.dtype) + small)
    short = -about.shape[1] % part
    about = jnp.pad(about, ((0, 0), (0, short)), constant_values=1)
    logs = jnp.log2(jnp.prod(about.reshape(len(about), -1, part), -1))
    return logs.sum(1) + u.sum(1) / math.log(2) + float(np.sum(fixed - 1))


def encode(
    numbers: Int[Array, 'N C'], table: UInt8[np.ndarray, ' C'], words: int
) -> tuple[UInt16[Array, 'N W'], Int[Array, ' N']]:
    """A stream of ``words`` for each row after its state, and the words that it needs.

    Args:
      numbers: of the tables; what a table has not is sent as its largest.
      table: of each column.
      words: of a row's stream; if it needs more the rest is lost.
    """
    t, most = tables(), largest()[table]
    cell = jnp.clip(numbers, -most, most).T + LARGEST
    of = lambda rows: jnp.take_along_axis(jnp.asarray(rows[table], jnp.uint32), cell, 1)

    states, word, large = pushed(of(t.frequency), of(t.start))
    none = varying_as(jnp.zeros_like(numbers[:, 0]), large)
    used, before = jax.lax.scan(lambda n, row: (n + row, n), none, large)
    lane = jnp.broadcast_to(jnp.arange(len(numbers)), large.shape)
    to = jnp.where(large, before, words)
    stream = jnp.zeros((len(numbers), words), jnp.uint16).at[lane, to].set(word, mode='drop')
    return jnp.concatenate([jax.lax.bitcast_convert_type(states, jnp.uint16), stream], 1), used


def decode(stream: UInt16[Array, 'N W'], table: UInt8[np.ndarray, ' C']) -> Int[Array, 'N C']:
    """The numbers of `encode`, by the table of each column.

    >>> numbers, table = jnp.array([[0, -3, 7], [1, 0, 0]]), np.array([0, 16, 20], np.uint8)
    >>> stream, used = encode(numbers, table, 2)
    >>> decode(stream, table).tolist(), used.tolist()
    ([[0, -3, 7], [1, 0, 0]], [0, 1])
    """
    t = tables()
    frequency, start, number = (jnp.asarray(a) for a in (t.frequency, t.start, t.number))
    states = jax.lax.bitcast_convert_type(stream[:, :STATE], jnp.uint32)
    last, lane = stream.shape[1] - 1, jnp.arange(len(stream))

    def pop(state: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], Array]:
        x, at = state
        slot = x & ((1 << PRECISION) - 1)
        index = number[row, slot]
        f, s = (rows[row, index].astype(jnp.uint32) for rows in (frequency, start))
        x = f * (x >> PRECISION) + slot - s
        small = x < LEAST
        x = jnp.where(small, x << 16 | stream[lane, jnp.minimum(at, last)], x)
        return (x, at + small), index.astype(jnp.int32) - LARGEST

    first = varying_as((states, jnp.full(len(stream), STATE)), stream)
    return jax.lax.scan(pop, first, jnp.asarray(table, jnp.int32))[1].T
