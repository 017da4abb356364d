"""The feedback rules: no memory, error feedback, EF21, EF-mixed, AQ-SGD; and their warm-up."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.dense import raw
from jaxmp.feedback.channel import Channel, EndState, Rx, Slots, Tx, check_codec
from jaxmp.feedback.lean import lean
from jaxmp.feedback.slots import slotted
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, like
from jaxmp.wire.words import check_bools, check_whole, word


def _buffer(like: Like) -> Array:
    return jnp.zeros(like.shape, compute_dtype(like))


def decoded(codec: Codec, m: Payload, like: Like, ctx: Ctx) -> Array:
    """The decoded message, of the shape and dtype that it stands for.

    Raises:
      ValueError: if the codec returns others, which arithmetic would broadcast or convert.
    """
    y, of = codec.decode(m, like, ctx), lambda a: f'{jnp.dtype(a.dtype).name}{list(a.shape)}'
    if of(y) != of(like):
        raise ValueError(
            f'decode of {codec} returned {of(y)} for a tensor {of(like)}; '
            'end it with .reshape(like.shape).astype(like.dtype)'
        )
    return y


def read(codec: Codec, m: Payload, like: Like, ctx: Ctx) -> Array:
    """The decoded message, with the same bits at both ends, so that their states stay equal.

    The two ends are two programs. The package's decoders round alike in every program
    (`jaxmp.codecs.exact`); for another decoder the barriers at least keep XLA from fusing it with
    the operations around it. They also keep XLA:CPU from packing and unpacking codes in one loop,
    which takes more than twice the time.
    """
    m = jax.lax.optimization_barrier(m)
    return jax.lax.optimization_barrier(decoded(codec, m, like, ctx))


def _receiver(codec: Codec) -> Callable[[Payload, Rx, Like, Ctx], tuple[Array, Rx]]:
    """The receiver that decodes a message and keeps no state."""
    return lambda m, rx, like, ctx: (decoded(codec, m, like, ctx), rx)


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
    return Channel(codec, lambda like: ((), ()), send, _receiver(codec), state_of='')


@word
def ef(codec: Codec, decay: float = 1.0) -> Channel:
    """Error feedback: ``m = C(x + d e)``, ``e <- x + d e - m``, with a decay d (1 if not given).

    With ``d < 1`` an element that is not sent is added to the tensor of t steps later times
    ``d**t``. SparseLoCo takes ``d = 0.95``.

    Args:
      codec: C.
      decay: d in (0, 1].

    Raises:
      TypeError: if ``codec`` is not a codec, or ``decay`` is not a number.
      ValueError: if ``decay`` is out of range.

    >>> import jaxmp
    >>> rule = ef(jaxmp.top_k(0.5))
    >>> x, ctx = jnp.array([[3.0, 2.0]]), jaxmp.Ctx()
    >>> m, e = rule.send(x, rule.init(jaxmp.like(x))[0], ctx)
    >>> m, e = rule.send(x, e, ctx)
    >>> rule.recv(m, (), jaxmp.like(x), ctx)[0].tolist(), e.tolist()
    ([[0.0, 4.0]], [[3.0, 0.0]])

    References:
      Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Error Feedback Fixes
      SignSGD, arXiv 1901.09847; Communication Efficient LLM Pre-training with SparseLoCo,
      arXiv 2508.15706.
    """
    check_codec('ef', codec)
    if isinstance(decay, bool) or not isinstance(decay, int | float):
        raise TypeError(f'ef decay must be a number in (0, 1], got {decay!r}')
    if not 0 < decay <= 1:
        raise ValueError(f'ef decay {decay} is not in (0, 1]; write ef({codec}, decay=0.95)')

    def send(x: Array, e: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        p = x + decay * e
        m = codec.encode(p.astype(x.dtype), ctx)
        return m, p - read(codec, m, like(x), ctx)

    return Channel(codec, lambda like: (_buffer(like), ()), send, _receiver(codec), _cleared)


def _cleared(x: Array, state: EndState, ctx: Ctx) -> EndState:
    """No error, of either end; not finite where ``x`` is not."""
    return jax.tree.map(lambda e: jnp.where(jnp.isfinite(x), 0, x).astype(e.dtype), state)


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
        return m, g + read(codec, m, like(x), ctx)

    def recv(m: Payload, g: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        g = g + read(codec, m, like, ctx)
        return g.astype(like.dtype), g

    return Channel(
        codec,
        init=lambda like: (_buffer(like), _buffer(like)),
        send=send,
        recv=recv,
        warm_start=lambda x, g, ctx: x.astype(g.dtype),
        shared_state=True,
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
    check_bools('ef_mixed', accumulate=accumulate)
    if codec.halves is None:
        raise TypeError(
            f'ef_mixed sends K / 2 values of the tensor and K / 2 of the error as one message, and '
            f'{codec} has no number K of values; take ef_mixed(top_k(0.1)), or ef({codec})'
        )
    half, whole = codec.halves

    def send(x: Array, e: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        error_half = half(e)
        m = whole.encode((half(x) + error_half).astype(x.dtype), ctx)
        y = read(whole, m, like(x), ctx)
        return m, e + x - y if accumulate else x - (y - error_half)

    return Channel(whole, lambda like: (_buffer(like), ()), send, _receiver(whole), _cleared)


@word
def aqsgd(codec: Codec, examples: int, table: int = 32) -> Channel:
    """AQ-SGD, the change of an example since its last visit: ``m[id] += C(x - m[id])``, both ends.

    That is `ef21` with a buffer per training example, zero before the first visit, so the first
    visit is compressed too; after a warm-up epoch (`warm`) every ``m[id]`` is the activation
    itself, which is the 'first visit in full precision' of AQ-SGD. A table takes ``examples`` times
    the bytes of one example's activation. An id out of range has no buffer, and NaN arrives for its
    example.

    With ``table`` below 32 both ends keep ``Q(m[id])``, rounded to that many bits per element (and
    half a bit for the levels' ends), in place of ``m[id]``. The next stage still sees
    ``Q(m[id]) + C(x - Q(m[id]))``, and the rounding error is a part of the next difference,
    ``x - Q(m[id])``, which the codec sends: it is corrected at every visit and never adds up.

    Args:
      codec: C.
      examples: number of training examples; ids are ``0 .. examples - 1``.
      table: bits per element of the table: 32 (as computed), 8, 4 or 2.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if ``examples`` is not a positive integer, ``table`` is no such number, or the
        context has no ids.

    References:
      Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees,
      arXiv 2206.01299.
    """
    check_codec('aqsgd', codec)
    check_whole('aqsgd examples', examples, 'the number of training examples')
    if not isinstance(table, int) or table not in (2, 4, 8, 32):
        raise ValueError(f'aqsgd table {table!r} is not 32, 8, 4 or 2 bits per element')

    def ids(ctx: Ctx) -> Array:
        if ctx.ids is None:
            raise ValueError("aqsgd needs ctx.ids; the data pipeline must yield 'id'")
        return jnp.where((ctx.ids >= 0) & (ctx.ids < examples), ctx.ids, examples)

    rule = ef21(codec) if table == 32 else lean(ef21(codec), table)
    rule = rule._replace(state_of='example', reads=frozenset({'ids'}))

    def init(like: Like) -> tuple[Tx, Rx]:
        compute_dtype(like)  # raises for what no codec takes
        return rule.init(jax.ShapeDtypeStruct((examples, *like.shape[1:]), like.dtype))

    return slotted(Slots(rule, ids), init)


@word
def warm(channel: Channel, codec: Codec = raw) -> Channel:
    """The same channel in a phase with another codec, which primes both states with what arrives.

    ``y = C'(x)``; afterwards EF has ``e = 0``, EF21 ``g = y``, AQ-SGD ``m[id] = y``. In a warm-up
    C' is `raw`, so that ``y = x``.

    Args:
      channel: the channel of the other phases; the states are its own.
      codec: C'.

    Raises:
      TypeError: if ``codec`` is not a codec.
    """
    check_codec('warm', codec)
    if channel.slots:
        one = warm(channel.slots.channel, codec)
        return slotted(channel.slots._replace(channel=one), channel.init)

    def send(x: Array, tx: Tx, ctx: Ctx) -> tuple[Payload, Tx]:
        m = codec.encode(x, ctx)
        return m, channel.warm_start(read(codec, m, like(x), ctx), tx, ctx)

    def recv(m: Payload, rx: Rx, like: Like, ctx: Ctx) -> tuple[Array, Rx]:
        y = read(codec, m, like, ctx)
        return y, channel.warm_start(y, rx, ctx)

    reads = channel.reads - {'spread'}  # with which klt makes a message, and not its state
    return channel._replace(codec=codec, send=send, recv=recv, reads=reads)
