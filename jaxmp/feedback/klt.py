"""`klt`: the channels' principal components, each in as many bits as its variance is worth.

An activation's channels are correlated, and so are neighbouring pixels: few directions have most of
its variance. The sender estimates the covariance, and sends its eigenvectors to the receiver, a
part in every message, which thus keeps its size. Both ends change to the new basis when its last
part has arrived.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.lloyd import scale_of
from jaxmp.feedback import components as by_width
from jaxmp.feedback import entropy as by_entropy
from jaxmp.feedback.channel import Channel, Rx, Tx
from jaxmp.feedback.components import WIDEST, best_widths
from jaxmp.feedback.positions import joined, normed, positions
from jaxmp.feedback.settled import finite, kept_if
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, half_bytes, samples
from jaxmp.wire.words import check_bools, check_whole, word


class Receiver(NamedTuple):
    """What both ends know.

    Attributes:
      book: row 0 has the bits of each component, the others are the components.
      coming: the next book, in the parts that messages bring.
      step: messages so far, modulo their number per book.
    """

    book: Float[Array, 'C+1 C']
    coming: Float[Array, 'parts size']
    step: Float[Array, '']


class Sender(NamedTuple):
    """What the sender knows besides: means over the last messages, one of them fading.

    Attributes:
      known: what the receiver knows too; of the next book, also what it will know.
      weight: number of messages in the means.
      square: of the covariance of the positions of a message.
      inverse: of the components' matrix, where they are not orthogonal; else empty.
    """

    known: Receiver
    weight: Float[Array, '']
    square: Float[Array, 'C C']
    inverse: PyTree = ()


@word
def klt(
    bits: float,
    refresh: int = 50,
    patch: int = 1,
    by_sample: bool = False,
    signed: bool = True,
    by_gradient: float = 0.0,
    entropy: bool = False,
    fixed: bool = False,
    middle: bool = False,
    trellis: bool = False,
) -> Channel:
    r"""Karhunen-Loeve transform of the channels: ``y = U^T (m + Q(U x - m))``.

    The rows of U are eigenvectors of the covariance of a position's C channels, the last axis, as
    the sender has estimated it, and m is the mean of a message's components. Q is the Lloyd-Max
    quantiser of each component, in 0 to 5 bits: of all widths with a mean of ``bits`` those of
    least squared error for a normal distribution. Every message has m and a scale per component,
    and a part of the next U and widths, all as bfloat16: ``16 / P (2 + (C + 1) / refresh)`` bits
    per element besides ``bits``, for P positions.
    The first ``refresh`` messages have the channels themselves as components. An eigenvalue problem
    of size C is solved once per ``refresh`` messages.

    With a patch a position is a square of an image, or a run of a text, with all its channels: C is
    ``patch^2`` or ``patch`` times theirs, and P as many times less. By sample, x is divided by the
    RMS of its sample first, which is sent as bfloat16, 16 bits more per sample: gradients are of
    many sizes, and Q is not.

    By gradient, with a share r, an error e of an activation counts as ``e^T M e``, where
    ``M = (1 - r) I + r G^T diag(4^w / mean(4^w)) G`` has what the gradient's own book, components G
    of w bits, says of the loss: the gradients' covariance is close to its curvature. The sender of
    the activation has that book, as it receives the gradient. The rows of U are then the components
    of ``M^(1/2) x``, and their inverse takes the place of ``U^T``.

    By entropy, Q rounds all components to multiples of one step, the least with which the message
    has room: `jaxmp.codecs.rans` writes each number in as many bits as its logistic distribution
    says, of which a component's mean size is sent in 8 bits. ``bits`` count the coder's states,
    32 per 1024 numbers, and the sizes of positions, too.

    Args:
      bits: mean number of bits per element, at least ``1 / C`` and at most 5.
      refresh: number of messages that bring a basis; of about as many is the covariance a mean.
      patch: side of a position, along each axis between the samples and the channels.
      by_sample: whether each sample has a scale.
      signed: False if x is never negative, as after a ReLU; what would be decoded as less than zero
        is zero then.
      by_gradient: r in [0, 1]; above 0 for an activation whose gradient returns through a ``klt``
        of the same patch.
      entropy: whether components have bits by their entropy instead of widths.
      fixed: whether U and the widths stay as they are, and no message has a part of the next: for a
        phase of a run after one that has learned them. The components of a pretrained model hardly
        change in fine-tuning.
      middle: with entropy, whether a number is decoded in the middle of its cell, not as the cell's
        mean. The error is larger, but large components do not shrink, of which a language model
        at less than one bit makes more than of the error.
      trellis: with entropy, whether the numbers are chosen together, as `jaxmp.codecs.dependent`
        says. Where that takes 3 % of a message at most, a position has a size too, in 4 bits. From
        half a bit on, as many bits have an error 10 to 25 % smaller. The sender takes three to four
        times as long.

    Raises:
      TypeError: if ``by_sample`` or another choice is not a bool.
      ValueError: if another argument is out of range, or ``patch`` does not divide an axis.

    >>> import jaxmp
    >>> rule, ctx = klt(0.5, refresh=2), jaxmp.Ctx()
    >>> x = jax.random.normal(jax.random.key(0), (50, 1)) * jnp.array([[1.0, 1.0]])
    >>> (tx, rx), errors = rule.init(jaxmp.like(x)), []
    >>> send, like = jax.jit(rule.send), jaxmp.like(x)
    >>> recv = jax.jit(lambda m, rx: rule.recv(m, rx, like, ctx))
    >>> for _ in range(3):
    ...     m, tx = send(x, tx, ctx)
    ...     y, rx = recv(m, rx)
    ...     errors += [float(jnp.mean((y - x) ** 2) / jnp.mean(x ** 2))]
    >>> [round(e, 1) for e in errors]
    [0.7, 0.7, 0.4]

    References:
      Transform coding: Goyal, Theoretical Foundations of Transform Coding, IEEE Signal Processing
      Magazine 18(5), 2001. Covariance of gradients and curvature: Martens, New Insights and
      Perspectives on the Natural Gradient Method, arXiv 1412.1193.
    """
    choices = {'signed': signed, 'entropy': entropy, 'fixed': fixed, 'middle': middle}
    choices |= {'trellis': trellis, 'by_sample': by_sample}
    _check(bits, refresh, patch, by_gradient, choices)
    write, read = by_width.coded, by_width.decoded
    if entropy:
        write = functools.partial(by_entropy.coded, trellis=trellis)
        read = functools.partial(by_entropy.decoded, middle=middle, trellis=trellis)
    first = functools.partial(_first, bits=bits, refresh=refresh, patch=patch)

    def estimated(x: Array, tx: Sender) -> Sender:
        return _estimated(tx, positions(normed(x)[0] if by_sample else x, patch), refresh)

    def init(like: Like) -> tuple[Tx, Rx]:
        receiver, unit = first(like), first(like).book[1:]
        sender = Sender(receiver, unit[0, 0] * 0, unit * 0, unit if by_gradient else ())
        return sender, first(like)  # arrays of its own, so that a step can donate the state

    def encode(x: Array, widths: Array, matrix: Array) -> dict[str, Array]:
        x, norm = normed(x) if by_sample else (x, {})
        return {**write(matrix @ positions(x, patch).T, widths, bits), **norm}

    def decode(m: Payload, book: Array, like: Like) -> Array:
        y = (book[1:].T @ read(m, book[0], like, bits)).T
        y = joined(y, like.shape, patch)
        if by_sample:
            y = y * scale_of(m['norm'], like).reshape(-1, *[1] * (y.ndim - 1))
        return saturated(y if signed else jnp.maximum(y, 0), like.dtype)

    def message_of(x: Array, tx: Sender) -> dict[str, Array]:
        return encode(x, tx.known.book[0], tx.inverse if by_gradient else tx.known.book[1:])

    def send(x: Array, before: Sender, ctx: Ctx) -> tuple[Payload, Sender]:
        if fixed:
            return message_of(x, before), before
        tx = estimated(x, before)
        spread = _fit(ctx.spread, tx.known.book) if by_gradient else None
        part, after = _taught(tx, bits, spread, by_gradient)
        message = {**message_of(x, tx), 'part': part}
        return message, kept_if(_sound(message), after, before)

    def recv(m: Payload, rx: Receiver, like: Like, ctx: Ctx) -> tuple[Array, Receiver]:
        after = rx if fixed else kept_if(_sound(m), _advanced(rx, m['part']), rx)
        return decode(m, rx.book, like), after

    warm_start = lambda x, state, ctx: estimated(x, state) if isinstance(state, Sender) else state
    codec = Codec(
        lambda x, ctx: encode(x, first(x).book[0], first(x).book[1:]),
        lambda m, like, ctx: decode(m, first(like).book, like),
    )
    return Channel(
        codec, init, send, recv, warm_start, state_of='channel',
        reads=frozenset({'spread'}) if by_gradient else frozenset(), mirror=_mirror,
        values=lambda state, like: (), spread=lambda rx, ctx: rx.book,
        form=('klt', refresh, patch, by_sample, by_gradient > 0),
    )  # fmt: skip


def _check(
    bits: float, refresh: int, patch: int, by_gradient: float, choices: dict[str, bool]
) -> None:
    """Raises TypeError or ValueError if an argument of `klt` is none, or out of range."""
    check_bools('klt', **choices)
    for name in ('middle', 'trellis'):
        if choices[name] and not choices['entropy']:
            raise ValueError(f'klt {name}=True is of numbers by entropy; write entropy=True too')
    if choices['middle'] and choices['trellis']:
        raise ValueError('klt has middle=True or trellis=True, whose levels are no cells; drop one')
    number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
    if not number(bits) or not 0 < bits <= WIDEST:
        raise ValueError(f'klt bits {bits!r} is not a number above 0 and at most {WIDEST}')
    if not number(by_gradient) or not 0 <= by_gradient <= 1:
        raise ValueError(f'klt by_gradient {by_gradient!r} is not a number from 0 to 1; try 0.3')
    check_whole('klt refresh', refresh, 'a positive number of messages')
    check_whole('klt patch', patch, 'a positive number of pixels or tokens')


def _first(like: Array | Like, bits: float, refresh: int, patch: int) -> Receiver:
    """What both ends know before the first message: the channels themselves."""
    count = jax.eval_shape(lambda x: (samples(x), positions(x, patch)), like)[1].shape[-1]
    book = _book(jnp.eye(count, dtype=compute_dtype(like)), jnp.ones(count), bits)
    return Receiver(book, _parts(book, refresh), jnp.zeros((), book.dtype))


def _estimated(tx: Sender, rows: Array, refresh: int) -> Sender:
    """The sender with one more message in its means, unless it holds NaN or an infinity."""
    rows, fade = rows - rows.mean(0), 1 - 1 / refresh
    square = rows.T @ rows / len(rows)
    sound = jnp.all(jnp.isfinite(square))
    new = fade * tx.weight + 1, fade * tx.square + square
    weight, square = (jnp.where(sound, a, b) for a, b in zip(new, tx[1:3], strict=True))
    return tx._replace(weight=weight, square=square)


def _taught(tx: Sender, bits: float, spread: Array | None, share: float) -> tuple[Array, Sender]:
    """The part of the next book that a message brings, and the sender after it."""
    new = lambda: _parts(_components(tx, bits, spread, share), len(tx.known.coming))
    coming = jax.lax.cond(tx.known.step == 0, new, lambda: tx.known.coming)
    part = half_bytes(coming[tx.known.step.astype(int)].astype(jnp.bfloat16))
    after = tx._replace(known=_advanced(tx.known._replace(coming=coming), part))
    return part, _inverted(after) if share else after


def _inverted(tx: Sender) -> Sender:
    """The sender with the inverse of its components, which change when a book has arrived."""
    new = lambda: jnp.linalg.inv(tx.known.book[1:].T)
    return tx._replace(inverse=jax.lax.cond(tx.known.step == 0, new, lambda: tx.inverse))


def _fit(spread: Array | None, book: Array) -> Array | None:
    """The gradient's book; of a channel alone, without a gradient, None."""
    if spread is not None and spread.shape != book.shape:
        sizes = f'{book.shape[1]} forward and {spread.shape[1]} backward'
        raise ValueError(f'klt by_gradient got positions of {sizes}; give both the same patch')
    return spread


def _components(tx: Sender, bits: float, spread: Array | None, share: float) -> Array:
    """The book of the sender's estimate, for errors that count as ``spread`` says."""
    square = tx.square / jnp.maximum(tx.weight, 1e-30)
    if spread is None:
        values, vectors = jnp.linalg.eigh(square)
        return _book(vectors.T, values, bits)
    learned = jnp.any(spread[1:] != jnp.eye(spread.shape[1]))  # the first book says nothing
    gradient = 4 ** jnp.where(learned, spread[:1].T, 0)
    root = jnp.sqrt(1 - share + share * gradient / gradient.mean())  # of M, by component
    weighed, back = spread[1:] * root, spread[1:] / root
    values, vectors = jnp.linalg.eigh(weighed @ square @ weighed.T)
    return _book(vectors.T @ back, values, bits)


def _book(basis: Array, variances: Array, bits: float) -> Array:
    """A book in numbers of bfloat16: widths and basis."""
    book = jnp.concatenate([best_widths(variances.astype(basis.dtype), bits)[None], basis])
    return jnp.asarray(book, jnp.bfloat16).astype(basis.dtype)


def _mirror(tx: Sender) -> Receiver:
    """What the receiver knows: the parts sent of the next book, and the others of this one."""
    receiver, count = tx.known, len(tx.known.coming)
    sent = jnp.arange(count)[:, None] < receiver.step
    return receiver._replace(coming=jnp.where(sent, receiver.coming, _parts(receiver.book, count)))


def _parts(book: Array, refresh: int) -> Array:
    short = -book.size % refresh
    return jnp.pad(book.reshape(-1), (0, short)).reshape(refresh, -1)


def _sound(m: Payload) -> Array:
    """Whether a message is finite, which both ends see by the scales of its components."""
    words = [m[name] for name in ('scale', 'step') if name in m]
    return finite([jax.lax.bitcast_convert_type(w, jnp.bfloat16) for w in words])


def _advanced(receiver: Receiver, part: Array) -> Receiver:
    """What an end knows after a message."""
    number, last = receiver.step.astype(int), len(receiver.coming) - 1
    part = jax.lax.bitcast_convert_type(part, jnp.bfloat16).astype(receiver.book.dtype)
    coming = receiver.coming.at[number].set(part)
    book = coming.reshape(-1)[: receiver.book.size].reshape(receiver.book.shape)
    done = number == last
    return Receiver(
        jnp.where(done, book, receiver.book), coming, jnp.where(done, 0, receiver.step + 1)
    )
