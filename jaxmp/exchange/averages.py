"""Rules that share every step's gradient: added as it is, gathered in messages, or both ways.

Messages that add travel by all-reduce, whose cost does not grow with the replicas. Others are
gathered, every replica reading all of them, or go two ways: each replica is the reducing end of one
n-th of the gradient, receives the messages of that part, and sends all a message of the mean.

The feedback rules are those of a stage boundary (`jaxmp.feedback`). What a receiver of EF21 does is
an addition, so of all its senders' buffers it keeps the mean.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.codecs.sparse import same_support
from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Exchange, Rule, State
from jaxmp.feedback import Channel, direct, ef
from jaxmp.wire import Codec, Ctx, Like, Payload
from jaxmp.words import functions, named, word

UNROLLED = 4  # replicas whose messages are read without a loop


def _apply_mean(grads: Any, state: State, key: Any, via: Collectives) -> tuple[Any, State]:
    del key
    via.own(grads)
    return jax.tree.map(lambda a: a / via.size, via.total(grads)), state


mean = named('mean', Exchange(lambda grads, n: (), _apply_mean))
"""The mean of all gradients by one all-reduce: n replicas are one replica on the joined batch."""


def channel_of(name: str, thing: Channel | Codec) -> Channel:
    """A channel, or a codec as ``direct``; raises unless it can code gradients of replicas."""
    given = direct(thing) if isinstance(thing, Codec) else thing
    if not isinstance(given, Channel):
        raise TypeError(f'{name} takes a codec or a feedback rule such as ef(one_bit), got {thing}')
    if given.per_example:
        raise ValueError(f'{name}: aqsgd remembers activations by example; use ef or ef21')
    if same_support in functions(given):
        raise ValueError(
            f'{name}: same_support reuses the positions of an activation, and a gradient between '
            'replicas has none; use top_k or random_k'
        )
    return given


def _row(x: Any) -> Like:
    """A gradient as a codec sees it: one sample."""
    return jax.ShapeDtypeStruct((1, math.prod(x.shape)), x.dtype)


def _buffer(channel: Channel, like: Like) -> Any:
    """The receivers' state: the mean of the senders' buffers, or nothing."""
    return channel.init(like)[1] if channel.mirrored else ()


def _each(f: Any, rows: Any, n: int) -> Any:
    """``f`` of every row; a loop only where there are many."""
    return lax.scan(lambda _, row: (None, f(row)), None, rows, unroll=n <= UNROLLED)[1]


def _mean(
    channel: Channel, arrived: Payload, at: tuple[Like, Any], buffer: Any
) -> tuple[Array, Any]:
    """The mean of what n senders' messages say, and the next buffer.

    Args:
      channel: of the messages.
      arrived: messages under a leading axis n.
      at: what a message stands for, and the n contexts (a function of the sender's number).
      buffer: from `_buffer`.
    """
    like, context = at
    n = jax.tree.leaves(arrived)[0].shape[0]
    rx = channel.init(like)[1]

    def add(total: Array, row: tuple[Array, Payload]) -> tuple[Array, None]:
        return total + channel.recv(row[1], rx, like, context(row[0]))[0], None

    first = jax.tree.map(lambda a: a[0], arrived)
    start = jnp.zeros_like(channel.recv(first, rx, like, context(0))[0])
    total, _ = lax.scan(add, start, (jnp.arange(n), arrived), unroll=n <= UNROLLED)
    y = total / n
    if not channel.mirrored:
        return y, buffer
    y = y + buffer
    return y.astype(like.dtype), y


@word
def all_reduce(channel: Channel | Codec) -> Rule:
    """Messages that add, added on their way: ``mean C(x_i)`` by one all-reduce.

    All replicas use the same key, so that ``random_k`` keeps the same positions everywhere. What is
    compressed is ``x / n``, so that a sum of fp16 cannot overflow.

    Args:
      channel: a codec whose messages add (raw, fp16, bf16, random_k), perhaps under ef or ef21.

    Raises:
      TypeError: if it is no codec or feedback rule.
      ValueError: if its messages do not add, or their sums are rounded and a buffer would gather
        what is lost.

    References:
      Sparsified SGD with Memory, arXiv 1809.07599; Mixed Precision Training, arXiv 1710.03740.
    """
    given = channel_of('all_reduce', channel)
    if given.codec.numbers is None:
        raise ValueError(
            'all_reduce adds messages, and these do not add; raw, fp16, bf16 and random_k do; use '
            'all_gather(...) or scatter_gather(...)'
        )
    numbers, words = given.codec.numbers
    if given.mirrored and _narrow(given.codec):
        raise ValueError(
            'all_reduce adds 16-bit messages in 16 bits, and the buffers of ef21 would keep that '
            'error and gather it; take all_gather(ef21(...)) or all_reduce(ef(...))'
        )

    def move(messages: Payload, via: Collectives) -> Payload:
        total = words(via.total(numbers(messages)))
        return jax.tree.map(lambda a: a[None], total)

    return _one_way(given, move, lambda c, sender: c, lambda n: 1 / n)


def _narrow(codec: Codec) -> bool:
    """Whether messages of float32 are added in fewer bits."""

    def added() -> Any:
        ctx = Ctx(jax.random.key(0))
        return codec.numbers[0](codec.encode(jnp.zeros((1, 8)), ctx))  # pyright: ignore

    return any(a.dtype.itemsize < 4 for a in jax.tree.leaves(jax.eval_shape(added)))


@word
def all_gather(channel: Channel | Codec) -> Rule:
    """Every replica reads the messages of all: ``mean C(x_i)`` by one all-gather.

    With ``ef21`` all hold the mean of the senders' buffers: ``g_i += C(x_i - g_i)``, used is
    ``mean g_i``.

    Args:
      channel: a codec or a feedback rule.

    Raises:
      TypeError: if it is no codec or feedback rule.
      ValueError: if it has a state per example, or sends the positions of another message.

    References:
      Error Feedback Fixes SignSGD, arXiv 1901.09847; EF21, arXiv 2106.05203.
    """
    given = channel_of('all_gather', channel)
    return _one_way(given, lambda m, via: via.gather(m), lambda c, sender: c.fold(sender))


def _one_way(
    channel: Channel,
    move: Callable[[Payload, Collectives], Payload],
    context: Callable[[Ctx, Any], Ctx],
    share: Callable[[int], float] = lambda n: 1.0,
) -> Rule:
    """A message an array, moved, and the mean of what arrived.

    Args:
      channel: of the messages.
      move: messages to what arrives, under an axis of the senders.
      context: that of an array and its sender's number.
      share: what arrays are multiplied with before they are compressed.
    """

    def init(xs: list[Any], n: int) -> State:
        del n
        return [(channel.init(_row(x))[0], _buffer(channel, _row(x))) for x in xs]

    def apply(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        at = [Ctx(key).fold(i) for i in range(len(xs))]
        sent = []
        for x, (tx, _), c in zip(xs, state, at, strict=True):
            x = (x * share(via.size)).reshape(1, -1)
            sent.append(channel.send(x, tx, context(c, via.index)))
        arrived, out, after = move([m for m, _ in sent], via), [], []
        for x, m, (_, tx), (_, rx), c in zip(xs, arrived, sent, state, at, strict=True):
            y, rx = _mean(channel, m, (_row(x), functools.partial(context, c)), rx)
            out.append(y.reshape(x.shape))
            after.append((tx, rx))
        return out, after

    return Rule(init, apply)


@word
def scatter_gather(up: Channel | Codec, down: Channel | Codec) -> Rule:
    """Compressed on the way to the reducing ends and on the way back.

    Replica j adds up the j-th of n equal parts: a reduce-scatter of messages (all-to-all), then
    an all-gather of messages. What travels does not grow with n.

    Args:
      up: of the parts of a gradient.
      down: of the mean of a part.

    Raises:
      TypeError: if one is no codec or feedback rule.
      ValueError: if one has a state per example.
    """
    up, down = channel_of('scatter_gather up', up), channel_of('scatter_gather down', down)

    def part(x: Any, n: int) -> Like:
        return jax.ShapeDtypeStruct((1, -(-_row(x).shape[1] // n)), x.dtype)

    def init(xs: list[Any], n: int) -> State:
        def one(like: Like) -> dict[str, Any]:
            stack = lambda tree: jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), tree)
            tx, rx = down.init(like)
            ends = {'up': stack(up.init(like)[0]), 'sum': _buffer(up, like)}
            return {**ends, 'down': tx, 'read': stack(rx)}

        return [one(part(x, n)) for x in xs]

    def apply(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        n = via.size
        likes, contexts = [part(x, n) for x in xs], [Ctx(key).fold(i) for i in range(len(xs))]
        messages, state = [], [dict(s) for s in state]
        for x, s, like, c in zip(xs, state, likes, contexts, strict=True):
            rows = jnp.pad(x.reshape(-1), (0, n * like.shape[1] - x.size)).reshape(n, *like.shape)
            send = lambda r, c=c: up.send(r[0], r[1], c.fold(via.index).fold(r[2]))
            m, s['up'] = _each(send, (rows, s['up'], jnp.arange(n)), n)
            messages.append(m)
        replies = []
        for m, s, like, c in zip(via.swap(messages), state, likes, contexts, strict=True):
            y, s['sum'] = _mean(up, m, (like, lambda i, c=c: c.fold(i).fold(via.index)), s['sum'])
            m, s['down'] = down.send(y, s['down'], c.fold(n + via.index))
            replies.append(m)
        out = []
        for x, m, s, like, c in zip(xs, via.gather(replies), state, likes, contexts, strict=True):
            read = lambda r, c=c, like=like: down.recv(r[0], r[1], like, c.fold(n + r[2]))
            y, s['read'] = _each(read, (m, s['read'], jnp.arange(n)), n)
            out.append(y.reshape(-1)[: x.size].reshape(x.shape))
        return out, state

    return Rule(init, apply)


@word
def double_squeeze(codec: Codec) -> Rule:
    """DoubleSqueeze: error feedback at the workers and at the reducing ends.

    ``scatter_gather(ef(C), ef(C))``. With errors e_i at the workers and E at the reducing ends,
    ``x_T = x_0 - lr sum_t mean_i g + lr (E + mean_i e_i)``.

    Args:
      codec: C, both ways.

    Raises:
      TypeError: if ``codec`` is not a codec.

    References:
      DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
      Compression, arXiv 1905.05957.
    """
    return scatter_gather(ef(codec), ef(codec))
