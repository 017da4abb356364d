"""`anchored`: the difference to the mean activation of a token, kept alike at both ends."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmp.codecs.exact import product, short
from jaxmp.feedback.channel import Channel, check_codec
from jaxmp.feedback.rules import read
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, like
from jaxmp.words import word


class Anchors(NamedTuple):
    """The table of an end.

    Attributes:
      mean: the anchor of each token.
      weight: occurrences that it is the mean of; beyond the window the oldest ones fade.
    """

    mean: Float[Array, 'V C']
    weight: Float[Array, ' V']


@word
def anchored(codec: Codec, vocabulary: int, window: int = 1024) -> Channel:
    """Anchors, the difference to a token's mean activation: ``y = a[token] + C(x - a[token])``.

    Every position of an activation ``(B, ..., C)`` has a token, ``ctx.tokens``, which both ends
    know. A token that occurred n times in the batch moves its anchor by the mean of what was sent,
    ``a[t] <- a[t] + sum m / w[t]`` with ``w[t] <- max(n, min(w[t] + n, window))``: a running mean
    of what arrived until there are ``window`` occurrences, and an exponential mean beyond. The
    sums are of integers, which no order of addition changes, and ``1 / w`` has 11 bits, so both
    ends hold the same bits. A
    table takes ``vocabulary`` times the bytes of one position; unlike that of `aqsgd` it does not
    grow with the training set, and helps from a token's second occurrence on, within the first
    epoch and in a test. A token out of range has no anchor, and NaN arrives for its position.

    Args:
      codec: C.
      vocabulary: number of tokens; ids are ``0 .. vocabulary - 1``.
      window: occurrences over which an anchor is a mean.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if a number is not a positive integer, or the context has not a token for each
        position.

    >>> import jaxmp
    >>> rule, ctx = anchored(jaxmp.raw, 3), jaxmp.Ctx(tokens=jnp.array([[1, 2, 1]]))
    >>> x = jnp.array([[[4.0], [5.0], [8.0]]])
    >>> rule.send(x, rule.init(jaxmp.like(x))[0], ctx)[1].mean.tolist()
    [[0.0], [6.0], [5.0]]

    References:
      Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees,
      arXiv 2206.01299, whose table is keyed by example.
    """
    check_codec('anchored', codec)
    for name, value in (('vocabulary', vocabulary), ('window', window)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f'anchored {name} {value!r} is not a positive integer')

    def table(like: Like) -> Anchors:
        dtype = compute_dtype(like)
        mean = jnp.zeros((vocabulary, like.shape[-1]), dtype)
        return Anchors(mean, jnp.zeros(vocabulary, dtype))

    def own(a: Anchors, x: Array | Like, ctx: Ctx) -> tuple[Array, Array]:
        """The token of each position, and its anchor."""
        at = _tokens(ctx, x.shape)
        at = jnp.where((at >= 0) & (at < vocabulary), at, vocabulary)
        return at, a.mean.at[at].get(mode='fill')

    def send(x: Array, a: Anchors, ctx: Ctx) -> tuple[Payload, Anchors]:
        at, mean = own(a, x, ctx)
        m = codec.encode((x - mean).astype(x.dtype), ctx)
        return m, _moved(a, at, read(codec, m, like(x), ctx), window)

    def recv(m: Payload, a: Anchors, like: Like, ctx: Ctx) -> tuple[Array, Anchors]:
        (at, mean), change = own(a, like, ctx), read(codec, m, like, ctx)
        return (mean + change).astype(like.dtype), _moved(a, at, change, window)

    def warm_start(x: Array, a: Anchors, ctx: Ctx) -> Anchors:
        at, mean = own(a, x, ctx)
        return _moved(a, at, x - mean, window)

    init = lambda like: (table(like), table(like))
    return Channel(
        codec, init, send, recv, warm_start, shared_state=True, per_token=True,
        values=lambda a, like: a.mean,
    )  # fmt: skip


def _tokens(ctx: Ctx, shape: tuple[int, ...]) -> Array:
    if ctx.tokens is None or ctx.tokens.shape != shape[:-1]:
        given = 'none' if ctx.tokens is None else f'tokens of shape {ctx.tokens.shape}'
        raise ValueError(
            f'anchored needs ctx.tokens of shape {shape[:-1]} for a tensor of shape {shape}, got '
            f'{given}; it is for models whose input is token ids, at every stage; use ef21 or aqsgd'
        )
    return ctx.tokens


def _moved(a: Anchors, at: Int[Array, 'B ...'], change: Array, window: int) -> Anchors:
    """The anchors after a message, with equal bits in every program.

    Changes are rounded to multiples of a power of two so small that their sums fit in 31 bits. The
    sums of a token stand at one of its positions, not in a table, and all of its positions write
    the same row.
    """
    vocabulary, channels = a.mean.shape
    at, change = at.reshape(-1), change.reshape(-1, channels).astype(a.mean.dtype)
    change = jnp.where(jnp.isfinite(change), change, 0)
    count = len(at)
    spare = 29 - (count - 1).bit_length()
    most = jnp.clip(jnp.max(jnp.abs(change)), 2.0**-60, 2.0**60)
    unit = short(most, 1) * 2.0**-spare
    scaled = jnp.clip(jnp.round(change / unit), -(2 ** (spare + 1)), 2 ** (spare + 1))
    place = jnp.zeros(vocabulary + 1, jnp.int32).at[at].max(jnp.arange(count, dtype=jnp.int32))[at]
    total = jnp.zeros(change.shape, jnp.int32).at[place].add(scaled.astype(jnp.int32))
    occurred = jnp.zeros(count, jnp.int32).at[place].add(1)
    n = occurred[place].astype(a.weight.dtype)
    weight = jnp.maximum(n, jnp.minimum(a.weight[at] + n, window))
    # XLA makes a quotient by a column a product with its reciprocal, which rounds otherwise.
    share = short(1 / weight, 11)[:, None]
    mean = a.mean[at] + product(share, total[place].astype(change.dtype) * unit)
    return Anchors(a.mean.at[at].set(mean, mode='drop'), a.weight.at[at].set(weight, mode='drop'))
