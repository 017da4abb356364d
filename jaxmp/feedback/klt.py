"""`klt`: the channels' principal components, each in as many bits as its variance is worth.

An activation's channels are correlated, and so are neighbouring pixels: few directions have most of
its variance. The sender estimates the covariance, and sends its eigenvectors to the receiver, a
part in every message, which thus keeps its size. Both ends change to the new basis when its last
part has arrived.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.lloyd import normal_levels, scale_of, scale_words, scaled, unit_rms
from jaxmp.feedback.channel import Channel, Rx, Tx
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, half_bytes, pack, unpack, wide
from jaxmp.words import check_whole, word

ERRORS = (1.0, 0.3634, 0.1175, 0.0345, 0.0095, 0.0025)  # of Lloyd-Max quantisers, by bits
WIDEST = len(ERRORS) - 1


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
    """

    known: Receiver
    weight: Float[Array, '']
    square: Float[Array, 'C C']


@word
def klt(
    bits: float,
    refresh: int = 50,
    patch: int = 1,
    by_sample: bool = False,
    signed: bool = True,
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

    Args:
      bits: mean number of bits per element, at least ``1 / C`` and at most 5.
      refresh: number of messages that bring a basis; of about as many is the covariance a mean.
      patch: side of a position, along each axis between the samples and the channels.
      by_sample: whether each sample has a scale.
      signed: False if x is never negative, as after a ReLU; what would be decoded as less than zero
        is zero then.

    Raises:
      TypeError: if ``by_sample`` or ``signed`` is not a bool.
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
      Magazine 18(5), 2001.
    """
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 0 < bits <= WIDEST:
        raise ValueError(f'klt bits {bits!r} is not a number above 0 and at most {WIDEST}')
    check_whole('klt refresh', refresh, 'a positive number of messages')
    check_whole('klt patch', patch, 'a positive number of pixels or tokens')
    for name, value in (('by_sample', by_sample), ('signed', signed)):
        if not isinstance(value, bool):
            raise TypeError(f'klt {name} must be True or False, got {value!r}')

    def first(like: Like) -> Receiver:
        count = jax.eval_shape(lambda x: _positions(x, patch), like).shape[-1]
        book = _book(jnp.eye(count, dtype=compute_dtype(like)), jnp.ones(count), bits)
        return Receiver(book, _parts(book, refresh), jnp.zeros((), book.dtype))

    def estimated(x: Array, tx: Sender) -> Sender:
        return _estimated(tx, _positions(_normed(x)[0] if by_sample else x, patch), refresh)

    def init(like: Like) -> tuple[Tx, Rx]:
        known = first(like)
        zeros = jnp.zeros_like(known.book[1:])
        return Sender(known, zeros[0, 0], zeros), known

    def encode(x: Array, book: Array) -> dict[str, Array]:
        x, norm = _normed(x) if by_sample else (x, {})
        return {**_encode(_positions(x, patch), book, bits), **norm}

    def decode(m: Payload, book: Array, like: Like) -> Array:
        y = _joined(_decode(m, book, like, bits), like.shape, patch)
        if by_sample:
            y = y * scale_of(m['norm'], like).reshape(-1, *[1] * (y.ndim - 1))
        return saturated(y if signed else jnp.maximum(y, 0), like.dtype)

    def send(x: Array, tx: Sender, ctx: Ctx) -> tuple[Payload, Sender]:
        tx = estimated(x, tx)
        new = lambda: _parts(_components(tx, bits), refresh)
        coming = jax.lax.cond(tx.known.step == 0, new, lambda: tx.known.coming)
        part = half_bytes(coming[tx.known.step.astype(int)].astype(jnp.bfloat16))
        message = {**encode(x, tx.known.book), 'part': part}
        return message, tx._replace(known=_advanced(tx.known._replace(coming=coming), part))

    def recv(m: Payload, rx: Receiver, like: Like, ctx: Ctx) -> tuple[Array, Receiver]:
        return decode(m, rx.book, like), _advanced(rx, m['part'])

    def warm_start(x: Array, state: Tx | Rx, ctx: Ctx) -> Tx | Rx:
        return estimated(x, state) if isinstance(state, Sender) else state

    codec = Codec(
        lambda x, ctx: encode(x, first(x).book),
        lambda m, like, ctx: decode(m, first(like).book, like),
    )
    return Channel(
        codec, init, send, recv, warm_start, values=lambda state, like: (),
        form=('klt', refresh, patch, by_sample),
    )  # fmt: skip


def _normed(x: Array) -> tuple[Array, dict[str, Array]]:
    """The samples divided by their RMS, and the RMS as it is sent; zeros stay zeros."""
    x = wide(x)
    flat = x.reshape(len(x), -1)
    unit, rms = unit_rms(flat)
    some = jnp.any(flat != 0, 1, keepdims=True).astype(x.dtype)  # of zeros the RMS would be 1
    words = scale_words(rms * some, jnp.ones_like(rms), unit, rms)
    s = scale_of(words, Like(x.shape, x.dtype)).reshape(-1, *[1] * (x.ndim - 1))
    return x / jnp.where(s > 0, s, 1), {'norm': words}


def _positions(x: Array, patch: int) -> Float[Array, 'P C']:
    """The patches of all samples, each as a row."""
    middle = x.shape[1:-1]
    if patch > 1 and (not middle or any(n % patch for n in middle)):
        raise ValueError(
            f'klt patch {patch} does not divide the axes {middle} between samples and channels of '
            f'a tensor {x.shape}; take one that divides them, or 1'
        )
    split = x.reshape(-1, *(k for n in middle for k in (n // patch, patch)), x.shape[-1])
    count = len(middle)
    order = (0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2), 2 * count + 1)
    return wide(split).transpose(order).reshape(-1, patch**count * x.shape[-1])


def _joined(rows: Array, shape: tuple[int, ...], patch: int) -> Array:
    """The tensor of the rows of `_positions`."""
    middle = shape[1:-1]
    split = (shape[0], *(n // patch for n in middle), *(patch,) * len(middle), shape[-1])
    count = len(middle)
    order = (0, *(k for i in range(count) for k in (1 + i, 1 + count + i)), 2 * count + 1)
    return rows.reshape(split).transpose(order).reshape(shape)


def _estimated(tx: Sender, rows: Array, refresh: int) -> Sender:
    """The sender with one more message in its means, unless it holds NaN or an infinity."""
    rows, fade = rows - rows.mean(0), 1 - 1 / refresh
    square = rows.T @ rows / len(rows)
    sound = jnp.all(jnp.isfinite(square))
    new = fade * tx.weight + 1, fade * tx.square + square
    return Sender(tx.known, *(jnp.where(sound, a, b) for a, b in zip(new, tx[1:], strict=True)))


def _components(tx: Sender, bits: float) -> Array:
    """The book of the sender's estimate."""
    values, vectors = jnp.linalg.eigh(tx.square / jnp.maximum(tx.weight, 1e-30))
    return _book(vectors.T, values, bits)


def _book(basis: Array, variances: Array, bits: float) -> Array:
    """A book in numbers of bfloat16: widths and basis."""
    count = len(basis)
    gains = jnp.maximum(variances, 0)[:, None] * -jnp.diff(jnp.array(ERRORS, basis.dtype))
    most = jnp.argsort(-gains.reshape(-1), stable=True)[: _total(count, bits)]
    widths = jnp.zeros(count, basis.dtype).at[most // WIDEST].add(1)
    book = jnp.concatenate([widths[None], basis])
    return jnp.asarray(book, jnp.bfloat16).astype(basis.dtype)


def _total(count: int, bits: float) -> int:
    return max(1, round(bits * count))


def _parts(book: Array, refresh: int) -> Array:
    short = -book.size % refresh
    return jnp.pad(book.reshape(-1), (0, short)).reshape(refresh, -1)


def _advanced(known: Receiver, part: Array) -> Receiver:
    """What an end knows after a message."""
    at, last = known.step.astype(int), len(known.coming) - 1
    part = jax.lax.bitcast_convert_type(part, jnp.bfloat16).astype(known.book.dtype)
    coming = known.coming.at[at].set(part)
    book = coming.reshape(-1)[: known.book.size].reshape(known.book.shape)
    done = at == last
    return Receiver(jnp.where(done, book, known.book), coming, jnp.where(done, 0, known.step + 1))


def _fitting(widths: Array, bits: float) -> Array:
    """The widths, but none for components beyond ``bits``: a book may be of a phase of more."""
    return jnp.where(jnp.cumsum(widths) <= _total(len(widths), bits), widths, 0)


def _planes(widths: Array, total: int) -> tuple[Int[Array, ' T'], Int[Array, ' T']]:
    """The component of each plane of bits, and the bit of its code."""
    plane, ends = jnp.arange(total), jnp.cumsum(widths.astype(int))
    of = jnp.searchsorted(ends, plane, side='right')
    return of, (plane - (ends - widths.astype(int))[of]).astype(jnp.uint8)


def _levels(widths: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The positive levels of each component and the ends of their cells; those beyond are inf."""
    levels, ends = np.zeros((WIDEST + 1, 16)), np.full((WIDEST + 1, 16), np.inf)
    for width in range(1, WIDEST + 1):
        count = 2 ** (width - 1)
        levels[width, :count] = own = normal_levels(count)
        ends[width, 1:count] = (np.array(own[1:]) + own[:-1]) / 2
    of = lambda table: jnp.asarray(table, dtype)[widths.astype(int)].T[..., None]
    return of(levels), of(ends)


def _encode(rows: Array, book: Array, bits: float) -> dict[str, Array]:
    widths, z = _fitting(book[0], bits), book[1:] @ rows.T
    most = float(jnp.finfo(jnp.bfloat16).max)
    mean = jnp.clip(z.mean(1, keepdims=True), -most, most)
    mean = half_bytes(mean.astype(jnp.bfloat16))
    z = z - scale_of(mean, Like(z.shape, z.dtype))
    unit, rms = unit_rms(z)
    a, (levels, ends) = jnp.abs(z) * (1 / unit), _levels(widths, z.dtype)
    level, number = jnp.broadcast_to(levels[0], z.shape), jnp.zeros(z.shape, jnp.uint8)
    for i in range(1, len(levels)):
        above = a > ends[i] * rms
        level, number = jnp.where(above, levels[i], level), number + above.astype(jnp.uint8)
    codes = 2 * number + (z < 0).astype(jnp.uint8)
    of, bit = _planes(widths, _total(len(widths), bits))
    mixed, energy = (jnp.sum(b * level, 1, keepdims=True) for b in (a, level))
    words = scale_words(mixed, energy, unit, rms)
    return {'codes': pack(codes[of] >> bit[:, None] & 1, 1), 'scale': words, 'mean': mean}


def _decode(m: Payload, book: Array, like: Like, bits: float) -> Array:
    widths, basis, count = _fitting(book[0], bits), book[1:], like.size // book.shape[-1]
    of, bit = _planes(widths, _total(len(widths), bits))
    codes = jnp.zeros((len(widths), count), jnp.uint8)
    codes = codes.at[of].add(unpack(m['codes'], 1, count) << bit[:, None])
    levels, _ = _levels(widths, book.dtype)
    y = jnp.broadcast_to(levels[0], codes.shape)
    for i in range(1, len(levels)):
        y = jnp.where(codes >> 1 >= i, levels[i], y)
    y = scaled(y, scale_of(m['scale'], like))
    y = jnp.where(codes & 1, -y, y) + scale_of(m['mean'], like)
    return (basis.T @ y).T
