"""`lean`: a rule whose state is kept in few bits, between its crossings alone."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float16, UInt8

from jaxmp.feedback.channel import Channel, Rx, Tx
from jaxmp.wire import Ctx, Like, Payload, compute_dtype, elements, like, pack, unpack

BLOCK = 64


class Stored(NamedTuple):
    """Rows in few bits.

    Attributes:
      codes: of each row, packed.
      ends: the lowest level and the step of each block of a row; NaN of one that is not finite.
    """

    codes: UInt8[Array, 'B bytes']
    ends: Float16[Array, 'B blocks 2']


def lean(channel: Channel, bits: int) -> Channel:
    """The channel with its state, one array, rounded to ``bits`` bits per element.

    A block of 64 elements of a row has ``2**bits`` evenly spaced levels from its least to its
    largest element. Both ends round the same numbers by operations that round alike in every
    program (`jaxmp.codecs.exact`): minima, maxima, differences, reciprocals, products that feed no
    sum, and products of at most 19 bits.

    Args:
      channel: a channel whose state at either end has the shape of the tensor, and starts at zero.
      bits: 1 to 8.
    """

    def init(x: Like) -> tuple[Tx, Rx]:
        stored = lambda: tuple(_stored(a, bits) for a in channel.init(x))
        zero = lambda a: jnp.zeros(a.shape, a.dtype)
        return jax.tree.map(zero, jax.eval_shape(stored))

    def send(x: Array, tx: Stored, ctx: Ctx) -> tuple[Payload, Stored]:
        m, state = channel.send(x, _loaded(tx, like(x), bits), ctx)
        return m, _stored(state, bits)

    def recv(m: Payload, rx: Stored, x: Like, ctx: Ctx) -> tuple[Array, Stored]:
        y, state = channel.recv(m, _loaded(rx, x, bits), x, ctx)
        return y, _stored(state, bits)

    def warm_start(x: Array, state: Stored, ctx: Ctx) -> Stored:
        return _stored(channel.warm_start(x, _loaded(state, like(x), bits), ctx), bits)

    return channel._replace(
        init=init, send=send, recv=recv, warm_start=warm_start,
        values=lambda state, x: _loaded(state, x, bits),
    )  # fmt: skip


def _blocks(n: int) -> tuple[int, int]:
    """Number and size of the blocks of a row of n elements."""
    size = min(BLOCK, n)
    return -(-n // size), size


def _stored(a: Array, bits: int) -> Stored:
    """The rows of ``a``, axis 0, in ``bits`` bits per element."""
    n = elements(a)
    count, size = _blocks(n)
    rows = jnp.pad(a.reshape(len(a), n), ((0, 0), (0, count * size - n)), mode='edge')
    rows = rows.reshape(len(a), count, size)
    half = lambda x: jnp.clip(x, -65504, 65504).astype(jnp.float16)
    least, most = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    low = half(least)
    base = low.astype(a.dtype)
    step = half((most - base) * (1 / (2**bits - 1)))
    steps = (rows - base) * (1 / jnp.maximum(step.astype(a.dtype), 2.0**-24))
    codes = jnp.clip(jnp.round(steps), 0, 2**bits - 1).astype(jnp.uint8)
    ends = jnp.concatenate([low, step], -1)
    ends = jnp.where(jnp.isfinite(least) & jnp.isfinite(most), ends, jnp.nan)
    return Stored(pack(codes.reshape(len(a), -1), bits), ends)


def _loaded(stored: Stored, x: Like, bits: int) -> Array:
    """The rows of a tensor like ``x``, of any number; inverse of `_stored` but for the rounding."""
    n, rows = elements(x), len(stored.codes)
    count, size = _blocks(n)
    codes = unpack(stored.codes, bits, count * size).reshape(rows, count, size)
    low, step = (stored.ends[..., i : i + 1].astype(compute_dtype(x)) for i in (0, 1))
    a = low + codes.astype(low.dtype) * step
    return a.reshape(rows, -1)[:, :n].reshape(rows, *x.shape[1:])
