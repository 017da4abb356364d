"""The memory of a channel that keeps many states, one per micro-batch or one per example."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.feedback.channel import Channel, EndState, Rx, Slots, Tx
from jaxmp.feedback.settled import settled
from jaxmp.wire import Ctx, Like, Payload


def per_microbatch(channel: Channel, n: int) -> Channel:
    """The same channel with a state per micro-batch, ``(n, ...)``; crossing m uses the m-th.

    A buffer belongs to a position in the batch, so with a slot per micro-batch no schedule changes
    a number. A channel with a state per example or token is returned as it is: all
    micro-batches share it.

    Args:
      channel: a channel.
      n: micro-batches per step.

    Raises:
      ValueError: if ``n`` is not a positive integer.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f'{n!r} is not a number of micro-batches; give 1 or more')
    if channel.slots or channel.is_table:
        return channel

    def init(like: Like) -> tuple[Tx, Rx]:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), channel.init(like))

    return slotted(Slots(channel, lambda ctx: ctx.microbatch), init)


def take(channel: Channel, memory: EndState, ctx: Ctx) -> EndState:
    """The state of a crossing in the ``memory`` of a channel with slots."""
    if channel.slots is None:
        return memory
    slot = channel.slots.at(ctx)
    return jax.tree.map(lambda a: a.at[slot].get(mode='fill'), memory)


def put(channel: Channel, memory: EndState, ctx: Ctx, state: EndState) -> EndState:
    """``memory`` with a crossing's next state; inverse of `take`."""
    if channel.slots is None:
        return state
    slot = channel.slots.at(ctx)
    return jax.tree.map(lambda a, b: a.at[slot].set(b), memory, state)


def slotted(slots: Slots, init: Callable[[Like], tuple[Tx, Rx]]) -> Channel:
    """The channel that runs ``slots.channel`` on a crossing's state of a larger memory.

    Args:
      slots: the channel of one state, and the place of a crossing's state.
      init: ``like -> (tx, rx)``, the memories of the two ends.
    """
    one = slots.channel

    def send(x: Array, memory: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        before = take(channel, memory, ctx)
        m, state = one.send(x, before, ctx)
        return m, put(channel, memory, ctx, settled(one, state, before))

    def recv(m: Payload, memory: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        before = take(channel, memory, ctx)
        y, state = one.recv(m, before, like, ctx)
        return y, put(channel, memory, ctx, settled(one, state, before))

    def warm_start(x: Array, memory: EndState, ctx: Ctx) -> EndState:
        before = take(channel, memory, ctx)
        return put(channel, memory, ctx, settled(one, one.warm_start(x, before, ctx), before))

    def spread(memory: Rx, ctx: Ctx) -> Array:
        assert one.spread
        return one.spread(take(channel, memory, ctx), ctx)

    channel = one._replace(
        init=init, send=send, recv=recv, warm_start=warm_start, slots=slots,
        spread=one.spread and spread, mirror=one.mirror and jax.vmap(one.mirror),
    )  # fmt: skip
    return channel
