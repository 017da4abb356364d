"""Rules that average the gradients of each step, by all-reduce, all-gather or reduce and broadcast.

Messages that can be added are sent by all-reduce, whose cost does not grow with the number of
replicas. Other messages are sent by all-gather, where each replica reads all of them, or in two
phases: each replica reduces one n-th of the gradient, for which it receives all messages, and then
sends a message of the mean to all replicas.

The feedback rules are those of a stage boundary (`jaxmp.feedback`). A receiver of EF21 only adds to
its buffers, so it keeps the mean of the buffers of all senders instead of each one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import Collectives, Grads
from jaxmp.exchange.layout import Exchange, Rule, State
from jaxmp.feedback import Channel, direct, ef
from jaxmp.feedback.channel import EndState, Rx
from jaxmp.wire import Codec, Ctx, Index, Like, Payload, widened
from jaxmp.wire.words import named, word

UNROLLED = 4  # largest number of replicas whose messages are decoded without a loop


def _reduce_mean(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
    via.own(grads)
    return via.mean(grads), state


mean = named('mean', Exchange(lambda grads, n: (), _reduce_mean))
"""The mean of all gradients by one all-reduce: n replicas equal one replica on the joined batch."""


def channel_of(name: str, thing: Channel | Codec) -> Channel:
    """``thing``, a codec wrapped in ``direct``; raises unless it can code gradients of replicas."""
    channel = direct(thing) if isinstance(thing, Codec) else thing
    if not isinstance(channel, Channel):
        raise TypeError(f'{name} takes a codec or a feedback rule such as ef(one_bit), got {thing}')
    if 'ids' in channel.needs:
        raise ValueError(f'{name}: aqsgd stores activations per example; use ef or ef21')
    if 'tokens' in channel.needs:
        raise ValueError(f'{name}: anchored stores activations per token; use ef or ef21')
    if 'indices' in channel.needs:
        raise ValueError(
            f'{name}: same_support reuses the positions of an activation, and a gradient between '
            'replicas has none; use top_k or random_k'
        )
    if channel.state_of == 'channel':
        raise ValueError(
            f'{name}: klt keeps the square of a row, and a gradient between replicas is one row of '
            'all its elements; use power_sgd for matrices, or ef'
        )
    return channel


def _row(x: Array | Like) -> Like:
    """Shape and dtype of a gradient as it is passed to a codec: one sample."""
    return jax.ShapeDtypeStruct((1, math.prod(x.shape)), x.dtype)


def _buffer(channel: Channel, like: Like) -> Rx:
    """The state of a receiver: the mean of the senders' buffers, or ``()`` if there are none."""
    return channel.init(like)[1] if channel.shared_state else ()


def _each(f: Callable[[PyTree], PyTree], rows: PyTree, n: int) -> PyTree:
    """``f`` of each row; the loop is unrolled if there are few."""
    return lax.scan(lambda _, row: (None, f(row)), None, rows, unroll=n <= UNROLLED)[1]


def _mean(
    channel: Channel, arrived: Payload, message_of: tuple[Like, Callable[[Index], Ctx]], buffer: Rx
) -> tuple[Array, Rx]:
    """The mean of the decoded messages of n senders, and the next buffer.

    Args:
      channel: channel of the messages.
      arrived: messages with a leading axis n.
      message_of: shape and dtype of the tensor that was sent, and a function from the number of a
        sender to its context.
      buffer: the receiver's buffer, as from `_buffer`.
    """
    like, context = message_of
    n = jax.tree.leaves(arrived)[0].shape[0]
    rx = channel.init(like)[1]

    def add(total: Array, row: tuple[Array, Payload]) -> tuple[Array, None]:
        return total + channel.recv(row[1], rx, like, context(row[0]))[0], None

    first = jax.tree.map(lambda a: a[0], arrived)
    start = jnp.zeros_like(widened(channel.recv(first, rx, like, context(0))[0]))
    total, _ = lax.scan(add, start, (jnp.arange(n), arrived), unroll=n <= UNROLLED)
    y = total / n
    if not channel.shared_state:
        return y.astype(like.dtype), buffer
    y = y + buffer
    return y.astype(like.dtype), y


@word
def all_reduce(channel: Channel | Codec) -> Rule:
    """The mean of compressed gradients by one all-reduce of messages: ``mean C(x_i)``.

    All replicas use the same key, so that ``random_k`` keeps the same positions in all of them.
    Each replica compresses ``x / n``, so that a sum in fp16 cannot overflow. Gradients of 16 bits
    are compressed as float32, so that ``raw`` adds them in 32 bits.

    Args:
      channel: a codec whose messages can be added (raw, fp16, bf16, random_k), or ef or ef21 of it.

    Raises:
      TypeError: if ``channel`` is not a codec or feedback rule.
      ValueError: if its messages cannot be added, or if their sums are rounded and a buffer would
        accumulate the rounding error.

    References:
      Sparsified SGD with Memory, arXiv 1809.07599; Mixed Precision Training, arXiv 1710.03740.
    """
    channel = channel_of('all_reduce', channel)
    if channel.codec.additive is None:
        raise ValueError(
            'all_reduce adds messages, and these cannot be added; those of raw, fp16, bf16 and '
            'random_k can; use all_gather(...) or scatter_gather(...)'
        )
    numbers, words = channel.codec.additive
    if channel.shared_state and _narrow(channel.codec):
        raise ValueError(
            'all_reduce adds 16-bit messages in 16 bits, and the buffers of ef21 would accumulate '
            'the rounding error; use all_gather(ef21(...)) or all_reduce(ef(...))'
        )

    def move(messages: Payload, via: Collectives) -> Payload:
        total = words(via.all_reduce(numbers(messages)))
        return jax.tree.map(lambda a: a[None], total)

    return _widened(_one_way(channel, move, lambda c, sender: c, lambda n: 1 / n))


def _widened(rule: Rule) -> Rule:
    """``rule`` on arrays in float32 or wider; its results have the dtypes that it was given."""

    def init(xs: Sequence[Array | Like], n: int) -> State:
        return rule.init(jax.eval_shape(widened, xs), n)

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        out, state = rule.reduce(widened(xs), state, key, via)
        return [y.astype(x.dtype) for y, x in zip(out, xs, strict=True)], state

    return Rule(init, reduce)


def _narrow(codec: Codec) -> bool:
    """Whether messages of a float32 tensor are added in fewer than 32 bits."""

    def added() -> PyTree:
        ctx = Ctx(jax.random.key(0))
        return codec.additive[0](codec.encode(jnp.zeros((1, 8)), ctx))  # pyright: ignore

    return any(a.dtype.itemsize < 4 for a in jax.tree.leaves(jax.eval_shape(added)))


@word
def all_gather(channel: Channel | Codec) -> Rule:
    """The mean of compressed gradients by one all-gather of messages: ``mean C(x_i)``.

    Each replica decodes the messages of all replicas. With ``ef21`` each keeps the mean of the
    senders' buffers: ``g_i += C(x_i - g_i)``, and the optimizer gets ``mean g_i``.

    Args:
      channel: a codec or a feedback rule.

    Raises:
      TypeError: if ``channel`` is not a codec or feedback rule.
      ValueError: if it has a state per example, or reuses the positions of another message.

    References:
      Error Feedback Fixes SignSGD, arXiv 1901.09847; EF21, arXiv 2106.05203.
    """
    channel = channel_of('all_gather', channel)
    return _one_way(channel, lambda m, via: via.all_gather(m), lambda c, sender: c.fold(sender))


def _one_way(
    channel: Channel,
    move: Callable[[Payload, Collectives], Payload],
    context: Callable[[Ctx, Index], Ctx],
    share: Callable[[int], float] = lambda n: 1.0,
) -> Rule:
    """The rule that sends one message per array and takes the mean of the received messages.

    Args:
      channel: channel of the messages.
      move: a function from the messages sent to those received, with a leading axis of senders.
      context: ``(context of an array, number of the sender) -> context`` of a message.
      share: the factor, given n, by which an array is multiplied before it is compressed.
    """

    def init(xs: Sequence[Array | Like], n: int) -> State:
        return [(channel.init(_row(x))[0], _buffer(channel, _row(x))) for x in xs]

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        contexts = [Ctx(key).fold(i) for i in range(len(xs))]
        sent = []
        for x, (tx, _), c in zip(xs, state, contexts, strict=True):
            x = (x * share(via.size)).reshape(1, -1)
            sent.append(channel.send(x, tx, context(c, via.index)))
        arrived, out, after = move([m for m, _ in sent], via), [], []
        for x, m, (_, tx), (_, rx), c in zip(xs, arrived, sent, state, contexts, strict=True):
            y, rx = _mean(channel, m, (_row(x), functools.partial(context, c)), rx)
            out.append(y.reshape(x.shape))
            after.append((tx, rx))
        return out, after

    return Rule(init, reduce)


@word
def scatter_gather(up: Channel | Codec, down: Channel | Codec) -> Rule:
    """The mean of gradients by a reduce-scatter and an all-gather, both of compressed messages.

    Replica j computes the mean of the j-th of n equal parts. The reduce-scatter is an all-to-all of
    messages. The bytes that a replica sends do not grow with n.

    Args:
      up: channel of the parts of a gradient.
      down: channel of the mean of a part.

    Raises:
      TypeError: if either is not a codec or feedback rule.
      ValueError: if either has a state per example.
    """
    up, down = channel_of('scatter_gather up', up), channel_of('scatter_gather down', down)

    def part(x: Array | Like, n: int) -> Like:
        return jax.ShapeDtypeStruct((1, -(-_row(x).shape[1] // n)), x.dtype)

    def init(xs: Sequence[Array | Like], n: int) -> State:
        def one(like: Like) -> dict[str, EndState]:
            stack = lambda tree: jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), tree)
            tx, rx = down.init(like)
            ends = {'up': stack(up.init(like)[0]), 'sum': _buffer(up, like)}
            return {**ends, 'down': tx, 'read': stack(rx)}

        return [one(part(x, n)) for x in xs]

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        n = via.size
        likes, contexts = [part(x, n) for x in xs], [Ctx(key).fold(i) for i in range(len(xs))]
        messages, state = [], [dict(s) for s in state]
        # A message's key is of the array, its sender and its part: both ends fold the same three.
        for x, s, like, c in zip(xs, state, likes, contexts, strict=True):
            rows = jnp.pad(x.reshape(-1), (0, n * like.shape[1] - x.size)).reshape(n, *like.shape)
            send = lambda r, c=c: up.send(r[0], r[1], c.fold(via.index).fold(r[2]))
            m, s['up'] = _each(send, (rows, s['up'], jnp.arange(n)), n)
            messages.append(m)
        replies = []
        for m, s, like, c in zip(via.all_to_all(messages), state, likes, contexts, strict=True):
            y, s['sum'] = _mean(up, m, (like, lambda i, c=c: c.fold(i).fold(via.index)), s['sum'])
            m, s['down'] = down.send(y, s['down'], c.fold(n + via.index))
            replies.append(m)
        out = []
        for x, m, s, like, c in zip(
            xs, via.all_gather(replies), state, likes, contexts, strict=True
        ):
            read = lambda r, c=c, like=like: down.recv(r[0], r[1], like, c.fold(n + r[2]))
            y, s['read'] = _each(read, (m, s['read'], jnp.arange(n)), n)
            out.append(y.reshape(-1)[: x.size].reshape(x.shape))
        return out, state

    return Rule(init, reduce)


@word
def double_squeeze(codec: Codec) -> Rule:
    """DoubleSqueeze: error feedback when gradients are sent and again when their mean is returned.

    It is ``scatter_gather(ef(C), ef(C))``. With errors e_i of the gradients and E of the mean,
    ``x_T = x_0 - lr sum_t mean_i g + lr (E + mean_i e_i)``.

    Args:
      codec: the codec C in both directions.

    Raises:
      TypeError: if ``codec`` is not a codec.

    References:
      DoubleSqueeze: Parallel Stochastic Gradient Descent with Double-Pass Error-Compensated
      Compression, arXiv 1905.05957.
    """
    return scatter_gather(ef(codec), ef(codec))
