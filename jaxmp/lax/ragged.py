"""`ragged_all_to_all`: rows to the devices of their experts, each row a message of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.feedback import Channel
from jaxmp.lax import calls
from jaxmp.lax.collectives import How
from jaxmp.lax.ways import Axes, States, Way, varying
from jaxmp.wire import Like

Slices = tuple[Array, ...]  # the four arrays of offsets and sizes, as `jax.lax` takes them


def ragged_all_to_all(
    operand: Array, output: Array, input_offsets: Array, send_sizes: Array, output_offsets: Array,
    recv_sizes: Array, *, axis_name: Axes,
    fwd: How = None, bwd: How = None, key: Array | None = None, **more: Any,
) -> Array:  # fmt: skip
    """`jax.lax.ragged_all_to_all`: to each device as many rows as its experts have tokens.

    XLA has it on GPUs and TPUs. On a CPU everyone gets all rows and keeps its own, for tests.

    Args:
      operand: rows that are sent, ``(N, ...)``.
      output: what the rows that arrive are written into, ``(M, ...)``.
      input_offsets: of each slice that is sent, the first row.
      send_sizes: its number of rows.
      output_offsets: its first row in the ``output`` of the device to which it goes.
      recv_sizes: of each slice that arrives, the number of rows.
      axis_name: of the mesh.
      fwd: codec of each row.
      bwd: codec of each row's gradient, which returns the same way.
      key: for a codec that draws, the same numbers for all rows.
      **more: of `jax.lax.ragged_all_to_all`; a call that has some is that of `jax.lax`.
    """
    slices = input_offsets, send_sizes, output_offsets, recv_sizes
    how = calls.How(fwd, bwd, None, key, more=slices)
    if more:
        return lax.ragged_all_to_all(operand, output, *slices, axis_name=axis_name, **more)
    plain = lambda x: _move(axis_name, x, output, slices)
    if operand.ndim < 2 or calls.channels_of(axis_name, operand, how) is None:
        return plain(operand)

    def routes(like: Like, *slices: Array) -> calls.Routes:
        n, m = like.shape[0], output.shape[0]
        start, sent, to, received = slices
        back = lambda: (_swap(axis_name, to), received, _swap(axis_name, start), sent)
        return _rows(axis_name, n, m, lambda: slices), _rows(axis_name, m, n, back)

    y = calls.call(operand, axis_name, routes, plain, how)
    return jnp.where(_source(axis_name, y, slices) >= 0, y, output)


class _Rows(Way):
    """A way on which no state of a row can stay."""

    def states(self, channel: Channel, like: Like) -> States:
        if jax.tree.leaves(states := super().states(channel, like)):
            raise ValueError(
                f'{channel} has a state, and rows are others in each call; use a codec'
            )
        return states


def _rows(axis: Axes, n: int, m: int, slices: Callable[[], Slices]) -> Way:
    """The way of ``n`` rows, of which ``m`` may arrive; zeros are where none does."""

    def move(piece: Array) -> Array:
        return _move(axis, piece, jnp.zeros((m, *piece.shape[1:]), piece.dtype), slices())

    join = lambda rows: jnp.where(_source(axis, rows, slices()) >= 0, rows, 0)
    numbers = lambda: (jnp.zeros(n, int), jnp.zeros(m, int))
    return _Rows(axis, lambda x: x, move, join, numbers)


def _move(axis: Axes, x: Array, output: Array, slices: Slices) -> Array:
    theirs = lambda x, y, slices: lax.ragged_all_to_all(x, y, *slices, axis_name=axis)
    x, output = varying(x, axis), varying(output, axis)
    return lax.platform_dependent(x, output, slices, cpu=partial(_by_all, axis), default=theirs)


def _by_all(axis: Axes, x: Array, output: Array, slices: Slices) -> Array:
    """`jax.lax.ragged_all_to_all` by an all-gather."""
    row = _source(axis, output, slices, len(x))
    everyone = lax.all_gather(x, axis).reshape(-1, *x.shape[1:])
    return jnp.where(row >= 0, everyone[row.reshape(-1)], output)


def _source(axis: Axes, y: Array, slices: Slices, n: int = 0) -> Array:
    """Which of all devices' rows, ``n`` each, arrives as each row of ``y``; -1 where none does."""
    count = len(slices[0])
    within = jnp.arange(len(y))[:, None] - _swap(axis, slices[2])
    first = jnp.arange(count) // (count // lax.axis_size(axis)) * n + _swap(axis, slices[0])
    row = jnp.where((within >= 0) & (within < slices[3]), first + within, -1).max(1)
    return row.reshape(-1, *[1] * (y.ndim - 1))


def _swap(axis: Axes, a: Array) -> Array:
    return lax.all_to_all(a, axis, 0, 0, tiled=True)
