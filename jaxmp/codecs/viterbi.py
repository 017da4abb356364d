"""Viterbi's algorithm: the cheapest path through a trellis in which two states lead to each one."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from jaxmp.wire import varying_as

Row = TypeVar('Row')
Ways = Sequence[Sequence[tuple[int, int]]]


def cheapest(
    prices: Callable[[Row], Sequence[Array]], rows: Row, ways: Ways, paths: int
) -> UInt8[Array, 'rows paths']:
    """The label of each step of the paths of least cost, which begin in state 0.

    Args:
      prices: for a row, what a step of each label costs, of every path.
      rows: an array, or several, whose first axis counts the steps.
      ways: by state, at most 32, the two that it is reached from, each with the label of that
        step, from 0 to 7.
      paths: how many, searched side by side.
    """
    states = range(len(ways))
    word = jnp.dtype(f'uint{max(8, 1 << (len(ways) - 1).bit_length())}')

    # The cheaper of a state's two ways survives.
    def forward(cost: tuple[Array, ...], row: Row) -> tuple[tuple[Array, ...], Array]:
        price = prices(row)
        pairs = [[cost[s] + price[label] for s, label in ways[after]] for after in states]
        survivors = [(b < a).astype(word) << after for after, (a, b) in enumerate(pairs)]
        return tuple(jnp.minimum(*p) for p in pairs), functools.reduce(operator.or_, survivors)

    table = jnp.asarray([s | label << 5 for way in ways for s, label in way], jnp.uint8)

    def backward(state: Array, survivors: Array) -> tuple[Array, Array]:
        way = (survivors >> state & 1).astype(jnp.uint8)
        came = table.at[2 * state.astype(jnp.uint8) + way].get(mode='promise_in_bounds')
        return (came & 31).astype(word), came >> 5

    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), rows)
    first = jnp.zeros(paths, jax.eval_shape(prices, row)[0].dtype)
    start = (first, *[first + jnp.inf] * (len(ways) - 1))
    cost, survivors = jax.lax.scan(forward, varying_as(start, rows), rows)
    last = jnp.argmin(jnp.stack(cost), 0).astype(word)
    return jax.lax.scan(backward, last, survivors, reverse=True)[1]
