"""What is remembered: feedback rules make a channel, two state machines, out of a codec.

A channel has a state at each end of the wire. The sender turns a tensor and its state into a
message and its next state; the receiver turns the message and its own state into what the next
stage sees. Buffers have the shape of the batch (position i of this batch meets position i of the
last one) and start at zero; AQ-SGD's has one slot a training example. Where both ends hold the same
buffer the channel is `mirrored`, and a boundary inside one process keeps a single copy of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.dense import raw
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype
from jaxmp.words import Origin, known, word

Tx = Any
Rx = Any


def _keep(x: Array, state: Any, ctx: Ctx) -> Any:
    del x, ctx
    return state


@known
class Channel(NamedTuple):
    """A feedback rule over a codec: what is sent, and what both ends remember.

    Attributes:
      codec: the codec that makes the messages.
      init: ``like -> (tx, rx)``, the states of the two ends.
      send: ``(x, tx, ctx) -> (payload, tx)``.
      recv: ``(payload, rx, like, ctx) -> (y, rx)``.
      prime: ``(x, state, ctx) -> state``, either end's state after ``x`` itself was sent (warm-up).
      mirrored: whether the two ends always hold equal states.
      slots: where a crossing's state lies in the memory of a channel that keeps many, or None.
      origin: the call that made it, its text and identity (`jaxmp.words`).
    """

    codec: Codec
    init: Callable[[Like], tuple[Tx, Rx]]
    send: Callable[[Array, Tx, Ctx], tuple[Payload, Tx]]
    recv: Callable[[Payload, Rx, Like, Ctx], tuple[Array, Rx]]
    prime: Callable[[Array, Any, Ctx], Any] = _keep
    mirrored: bool = False
    slots: Slots | None = None
    origin: Origin | None = None

    @property
    def per_example(self) -> bool:
        """Whether the state is indexed by ``ctx.ids`` (unseen examples have none)."""
        return self.slots is not None and self.slots.per_example


class Slots(NamedTuple):
    """A memory of many states, of which a crossing uses one: those of its rows or its number.

    Attributes:
      channel: the channel that acts on one state.
      at: where in the memory's first axis the state of a crossing is.
      per_example: whether that depends on ``ctx.ids``.
    """

    channel: Channel
    at: Callable[[Ctx], Any]
    per_example: bool


def _buffer(like: Like) -> Array:
    return jnp.zeros(like.shape, compute_dtype(like))


def _like(x: Array) -> Like:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def check_codec(rule: str, codec: object) -> None:
    """Raises TypeError unless ``codec`` is a Codec."""
    if isinstance(codec, Channel):
        raise TypeError(f'{rule} takes a codec and got a feedback rule; rules do not nest')
    if not isinstance(codec, Codec):
        raise TypeError(f'{rule} takes a codec such as top_k(0.1), got {codec!r}')


def _read(codec: Codec, m: Payload, like: Like, ctx: Ctx) -> Array:
    """Decodes to the same bits at both ends, or their states would drift apart.

    They are two programs. The package's decoders round alike in any (`jaxmp.codecs.exact`); for one
    that does not, the barriers keep at least XLA from rewriting it with what stands around it.
    """
    m = jax.lax.optimization_barrier(m)
    return jax.lax.optimization_barrier(codec.decode(m, like, ctx))


def _decoded(codec: Codec) -> Callable[[Payload, Rx, Like, Ctx], tuple[Array, Rx]]:
    """A receiver that sees the message as it is, and remembers nothing."""
    return lambda m, rx, like, ctx: (codec.decode(m, like, ctx), rx)


@word
def direct(codec: Codec) -> Channel:
    """No memory: ``y = C(x)``.

    Args:
      codec: C.

    Raises:
      TypeError: if ``codec`` is not a codec.
    """
    check_codec('direct', codec)
    send = lambda x, tx, ctx: (codec.encode(x, ctx), tx)
    return Channel(codec, lambda like: ((), ()), send, _decoded(codec))


@word
def ef(codec: Codec) -> Channel:
    """Error feedback: ``m = C(x + e)``, ``e <- x + e - m``.

    Args:
      codec: C.

    Raises:
      TypeError: if ``codec`` is not a codec.

    >>> import jaxmp
    >>> rule = ef(jaxmp.top_k(0.5))
    >>> x, ctx = jnp.array([[3.0, 2.0]]), jaxmp.Ctx()
    >>> m, e = rule.send(x, rule.init(jaxmp.like(x))[0], ctx)
    >>> m, e = rule.send(x, e, ctx)
    >>> rule.recv(m, (), jaxmp.like(x), ctx)[0].tolist(), e.tolist()
    ([[0.0, 4.0]], [[3.0, 0.0]])

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Error Feedback Fixes
      SignSGD, arXiv 1901.09847.
    """
    check_codec('ef', codec)

    def send(x: Array, e: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        p = x + e
        m = codec.encode(p.astype(x.dtype), ctx)
        return m, p - codec.decode(m, _like(x), ctx)

    return Channel(codec, lambda like: (_buffer(like), ()), send, _decoded(codec), _cleared)


def _cleared(x: Array, state: Any, ctx: Ctx) -> Any:
    del x, ctx
    return jax.tree.map(jnp.zeros_like, state)


@word
def ef21(codec: Codec) -> Channel:
    """EF21: ``m = C(x - g)``, ``g <- g + m`` at both ends; the next stage sees ``g``.

    Args:
      codec: C.

    Raises:
      TypeError: if ``codec`` is not a codec.

    References:
      EF21: A New, Simpler, Theoretically Better, and Practically Faster Error Feedback,
      arXiv 2106.05203.
    """
    check_codec('ef21', codec)

    def send(x: Array, g: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        m = codec.encode((x - g).astype(x.dtype), ctx)
        return m, g + _read(codec, m, _like(x), ctx)

    def recv(m: Payload, g: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        g = g + _read(codec, m, like, ctx)
        return g.astype(like.dtype), g

    return Channel(
        codec,
        init=lambda like: (_buffer(like), _buffer(like)),
        send=send,
        recv=recv,
        prime=lambda x, g, ctx: x.astype(g.dtype),
        mirrored=True,
    )


@word
def ef_mixed(codec: Codec, accumulate: bool = False) -> Channel:
    """EF-mixed: half of the values are the tensor's largest, half the error's, in one message.

    With H the K / 2 largest of each sample: ``y = H(x) + H(e)``, at most K values, coded by
    ``codec``; where the halves meet fewer are sent, and the message keeps its size. The paper's
    error is that of the last message, ``e = x - H(x)``; its text also calls it accumulated, which
    is the second reading: ``e <- e + x - y``, and nothing is ever lost.

    Args:
      codec: a codec with a number K of values: `top_k`. (K is twice the K of half the fraction.)
      accumulate: whether what was not sent of the error stays in it.

    Raises:
      TypeError: if ``codec`` is not a codec, or has no number of values.

    >>> import jaxmp
    >>> rule, ctx = ef_mixed(jaxmp.top_k(0.5)), jaxmp.Ctx()
    >>> x = jnp.array([[5.0, 4.0, 3.0, 2.0]])
    >>> m, e = rule.send(x, rule.init(jaxmp.like(x))[0], ctx)
    >>> m, _ = rule.send(x, e, ctx)
    >>> e.tolist(), rule.recv(m, (), jaxmp.like(x), ctx)[0].tolist()
    ([[0.0, 4.0, 3.0, 2.0]], [[5.0, 4.0, 0.0, 0.0]])

    References:
      Activations and Gradients Compression for Model-Parallel Training, arXiv 2401.07788, 2.4.
    """
    check_codec('ef_mixed', codec)
    if not isinstance(accumulate, bool):
        raise TypeError(f'ef_mixed accumulate must be True or False, got {accumulate!r}')
    if codec.halves is None:
        raise TypeError(
            f'ef_mixed sends K / 2 values of the tensor and K / 2 of the error as one message, and '
            f'{codec} has no number K of values; take ef_mixed(top_k(0.1)), or ef({codec})'
        )
    half, whole = codec.halves

    def send(x: Array, e: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        given = half(e)
        m = whole.encode((half(x) + given).astype(x.dtype), ctx)
        y = whole.decode(m, _like(x), ctx)
        return m, e + x - y if accumulate else x - (y - given)

    return Channel(whole, lambda like: (_buffer(like), ()), send, _decoded(whole), _cleared)


@word
def aqsgd(codec: Codec, examples: int) -> Channel:
    """AQ-SGD, the change of an example since its last visit: ``m[id] += C(x - m[id])``, both ends.

    That is `ef21` with a buffer per training example, zero before the first visit, so the first
    visit is compressed too; after a warm-up epoch (`warm`) every ``m[id]`` is the activation
    itself, which is the 'first visit in full precision' of AQ-SGD. A table takes ``examples`` times
    the bytes of one example's activation. An id out of range has no buffer, and NaN arrives for its
    example.

    Args:
      codec: C.
      examples: number of training examples; ids are ``0 .. examples - 1``.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if ``examples`` is not a positive integer, or the context has no ids.

    References:
      Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees,
      arXiv 2206.01299.
    """
    check_codec('aqsgd', codec)
    if isinstance(examples, bool) or not isinstance(examples, int) or examples < 1:
        raise ValueError(f'aqsgd examples {examples!r} is not the number of training examples')

    def ids(ctx: Ctx) -> Array:
        if ctx.ids is None:
            raise ValueError("aqsgd needs ctx.ids; the data pipeline must yield 'id'")
        return jnp.where((ctx.ids >= 0) & (ctx.ids < examples), ctx.ids, examples)

    rule = ef21(codec)

    def init(like: Like) -> tuple[Tx, Rx]:
        compute_dtype(like)  # raises for what no codec takes
        return rule.init(jax.ShapeDtypeStruct((examples, *like.shape[1:]), like.dtype))

    return _slotted(Slots(rule, ids, per_example=True), init)


def per_microbatch(channel: Channel, n: int) -> Channel:
    """The same channel with a state per micro-batch, ``(n, ...)``; crossing m uses the m-th.

    A buffer belongs to a position in the batch, so with a slot per micro-batch no schedule changes
    a number. A channel with a state per example is returned as it is: all micro-batches share it.

    Args:
      channel: a channel.
      n: micro-batches per step.

    Raises:
      ValueError: if ``n`` is not a positive integer.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f'{n!r} is not a number of micro-batches; give 1 or more')
    if channel.slots:
        return channel

    def init(like: Like) -> tuple[Tx, Rx]:
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), channel.init(like))

    return _slotted(Slots(channel, lambda ctx: ctx.microbatch, per_example=False), init)


def take(channel: Channel, memory: Any, ctx: Ctx) -> Any:
    """The state of a crossing in the ``memory`` of a channel with slots."""
    if channel.slots is None:
        return memory
    at = channel.slots.at(ctx)
    return jax.tree.map(lambda a: a.at[at].get(mode='fill', fill_value=jnp.nan), memory)


def put(channel: Channel, memory: Any, ctx: Ctx, state: Any) -> Any:
    """``memory`` with a crossing's next state; inverse of `take`."""
    if channel.slots is None:
        return state
    at = channel.slots.at(ctx)
    return jax.tree.map(lambda a, b: a.at[at].set(b), memory, state)


def _slotted(slots: Slots, init: Callable[[Like], tuple[Tx, Rx]]) -> Channel:
    one = slots.channel

    def send(x: Array, memory: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        m, state = one.send(x, take(channel, memory, ctx), ctx)
        return m, put(channel, memory, ctx, state)

    def recv(m: Payload, memory: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        y, state = one.recv(m, take(channel, memory, ctx), like, ctx)
        return y, put(channel, memory, ctx, state)

    def prime(x: Array, memory: Any, ctx: Ctx) -> Any:
        return put(channel, memory, ctx, one.prime(x, take(channel, memory, ctx), ctx))

    channel = one._replace(init=init, send=send, recv=recv, prime=prime, slots=slots)
    return channel


@word
def warm(channel: Channel) -> Channel:
    """The same channel in its warm-up: sends the tensor itself and primes both states with it.

    ``y = x``; afterwards EF has ``e = 0``, EF21 ``g = x``, AQ-SGD ``m[id] = x``.

    Args:
      channel: the channel that takes over when the warm-up ends; the states are its own.
    """
    if channel.slots:
        return _slotted(channel.slots._replace(channel=warm(channel.slots.channel)), channel.init)

    def send(x: Array, tx: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        return raw.encode(x, ctx), channel.prime(x, tx, ctx)

    def recv(m: Payload, rx: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        y = raw.decode(m, like, ctx)
        return y, channel.prime(y, rx, ctx)

    return channel._replace(codec=raw, send=send, recv=recv)
