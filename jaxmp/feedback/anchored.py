"""`anchored`: the difference to the mean activation or gradient of a token, kept at both ends."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxmp.codecs.exact import product, short
from jaxmp.feedback.channel import Channel, check_codec
from jaxmp.feedback.rules import read
from jaxmp.feedback.settled import finite, kept_if
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, like
from jaxmp.wire.words import check_bools, check_whole, word


class Anchors(NamedTuple):
    """The table of an end.

    Attributes:
      mean: the anchor of each token.
      weight: occurrences that it is the mean of; beyond the window the oldest ones fade.
      pairs: the table of what pairs of tokens add, with that of triples in its own ``pairs``, or
        nothing.
    """

    mean: Float[Array, 'V C']
    weight: Float[Array, ' V']
    pairs: PyTree = ()


@word
def anchored(
    codec: Codec,
    vocabulary: int,
    window: int = 1024,
    pairs: int = 0,
    target: bool = False,
    triples: int = 0,
) -> Channel:
    """Anchors, the difference to a token's mean: ``y = a[token] + C(x - a[token])``.

    Every position of a tensor ``(B, ..., C)`` has a token, ``ctx.tokens``, which both ends
    know. A token that occurred n times in the batch moves its anchor by the mean of what was sent,
    ``a[t] <- a[t] + sum m / w[t]`` with ``w[t] <- max(n, min(w[t] + n, window))``: a running mean
    of what arrived until there are ``window`` occurrences, and an exponential mean beyond. The
    sums are of integers, which no order of addition changes, and ``1 / w`` has 11 bits, so both
    ends hold the same bits. A table takes ``vocabulary`` times the bytes of one position; unlike
    that of `aqsgd` it does not grow with the training set, and helps from a token's second
    occurrence on, within the first epoch and in a test. A token out of range has no anchor, and NaN
    arrives for its position.

    With ``pairs`` a second table has what the token before tells: ``y = a[t] + b[p] + C(x - a[t] -
    b[p])``, where the row is ``p = (vocabulary * before + t) mod pairs`` and the first token of a
    sequence comes after token 0. Its mean has one occurrence of zero more, ``b[p] <- b[p] + sum m /
    (w[p] + 1)``, and then ``a[t] <- a[t] + sum (b[p] + m) / w[t]``. With ``vocabulary**2`` rows
    each pair has its own; take fewer as a multiple of the vocabulary. With ``triples`` a third
    table has what the two tokens before tell, likewise; its rows are hashed numbers of triples.

    With ``target`` the token of a position is the one that follows, which the position is to
    predict, and the last position of a sequence has token 0. So it is for gradients: that of the
    logits is the softmax less the target's unit vector, and the same pull comes back through every
    stage. Take a short window, for gradients change as fast as the model, and an unbiased codec,
    such as ``rotate(trellis(2, unbiased=True))``: a codec of least squares shrinks what anchors do
    not know, in every step again.

    Args:
      codec: C.
      vocabulary: number of tokens; ids are ``0 .. vocabulary - 1``.
      window: occurrences over which an anchor is a mean.
      pairs: rows for pairs of tokens; 0: none.
      target: whether an anchor is that of the next token, for gradients.
      triples: rows for triples of tokens, beside those for pairs; 0: none.

    Raises:
      TypeError: if ``codec`` is not a codec, or ``target`` is not a truth value.
      ValueError: if a number is not a positive integer (``pairs`` and ``triples`` may be 0), there
        are triples without pairs, or the context has not a token for each position.

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
    check_whole('anchored vocabulary', vocabulary, 'a positive integer')
    check_whole('anchored window', window, 'a positive integer')
    check_whole('anchored pairs', pairs, '0 or a positive integer', 0)
    check_whole('anchored triples', triples, '0 or a positive integer', 0)
    check_bools('anchored', target=target)
    if triples and not pairs:
        raise ValueError(f'anchored triples={triples} needs pairs too, such as pairs={triples}')
    sizes = [n for n in (vocabulary, pairs, triples) if n]

    def place(x: Array | Like, ctx: Ctx) -> list[Array]:
        """The row of each position in the table of tokens, and in those of pairs and triples."""
        tokens = _tokens(ctx, x.shape)
        if target:
            tokens = _beside(tokens, -1)
        fit, number, rows = (tokens >= 0) & (tokens < vocabulary), jnp.uint32(0), []
        for k, n in enumerate(sizes):
            number += tokens.astype(jnp.uint32) * jnp.uint32(vocabulary**k % 2**32)
            row = (number if k < 2 else hashed(number)) % jnp.uint32(n)
            rows.append(jnp.where(fit, row.astype(jnp.int32), n))
            tokens = _beside(tokens, 1)
        return rows

    def send(x: Array, a: Anchors, ctx: Ctx) -> tuple[Payload, Anchors]:
        rows = place(x, ctx)
        means = _known(a, rows)
        m = codec.encode((x - sum(means[1:], means[0])).astype(x.dtype), ctx)
        return m, _after(a, rows, means, read(codec, m, like(x), ctx), window)

    def recv(m: Payload, a: Anchors, like: Like, ctx: Ctx) -> tuple[Array, Anchors]:
        rows, change = place(like, ctx), read(codec, m, like, ctx)
        means = _known(a, rows)
        y = sum(means[1:], means[0]) + change
        return y.astype(like.dtype), _after(a, rows, means, change, window)

    def warm_start(x: Array, a: Anchors, ctx: Ctx) -> Anchors:
        rows = place(x, ctx)
        means = _known(a, rows)
        return _after(a, rows, means, x - sum(means[1:], means[0]), window)

    init = lambda like: (_zeros(sizes, like), _zeros(sizes, like))
    return Channel(
        codec, init, send, recv, warm_start, shared_state=True,
        state_of='target' if target else 'token', reads=frozenset({'tokens'}),
        values=lambda a, like: a.mean,
    )  # fmt: skip


def _zeros(sizes: list[int], like: Like) -> Anchors | tuple[()]:
    """Tables without anything in them, each in the one before."""
    if not sizes:
        return ()
    mean = jnp.zeros((sizes[0], like.shape[-1]), compute_dtype(like))
    return Anchors(mean, mean[:, 0], _zeros(sizes[1:], like))


def _known(a: Anchors, rows: list[Array]) -> list[Array]:
    """What the table of tokens and those of pairs and triples tell of each position."""
    more = _known(a.pairs, rows[1:]) if rows[1:] else []
    return [a.mean.at[rows[0]].get(mode='fill'), *more]


def _after(
    a: Anchors, rows: list[Array], means: list[Array], change: Array, window: int, rest: int = 0
) -> Anchors:
    """The tables after a message: each takes what the more precise ones had added as well."""
    pairs = _after(a.pairs, rows[1:], means[1:], change, window, rest=1) if rows[1:] else ()
    for mean in reversed(means[1:]):
        change = mean + change
    return _moved(a, rows[0], change, window, rest)._replace(pairs=pairs)


def _beside(tokens: Array, shift: int) -> Array:
    """The token ``shift`` positions before each, and 0 beyond the end of a sequence."""
    if tokens.ndim < 2:
        return jnp.zeros_like(tokens)
    return jnp.roll(tokens, shift, -1).at[..., 0 if shift > 0 else -1].set(0)


def hashed(number: Array) -> Array:
    """The number with all of its bits in the low ones (Fibonacci hashing)."""
    mixed = number * jnp.uint32(0x9E3779B1)
    return mixed ^ mixed >> 15


def _tokens(ctx: Ctx, shape: tuple[int, ...]) -> Array:
    if ctx.tokens is None or ctx.tokens.shape != shape[:-1]:
        came = 'none' if ctx.tokens is None else f'tokens of shape {ctx.tokens.shape}'
        raise ValueError(
            f'anchored needs ctx.tokens of shape {shape[:-1]} for a tensor of shape {shape}, got '
            f'{came}; it is for models whose input is token ids, at every stage; use ef21 or aqsgd'
        )
    return ctx.tokens


def _moved(
    a: Anchors, rows: Int[Array, 'B ...'], change: Array, window: int, rest: int = 0
) -> Anchors:
    """The anchors after a message, with equal bits in every program.

    A mean counts ``rest`` occurrences of no change besides its weight.

    Changes are rounded to multiples of a power of two so small that their sums fit in 31 bits. The
    sums of a token stand at one of its positions, not in a table, and all of its positions write
    the same row. If a change is not finite, no anchor moves; a token out of range has none.
    """
    vocabulary, channels = a.mean.shape
    rows, change = rows.reshape(-1), change.reshape(-1, channels).astype(a.mean.dtype)
    change = jnp.where((rows < vocabulary)[:, None], change, 0)
    sound = finite(change)
    count = len(rows)
    spare = 29 - (count - 1).bit_length()
    most = jnp.clip(jnp.max(jnp.abs(change)), 2.0**-60, 2.0**60)
    unit = short(most, 1) * 2.0**-spare
    scaled = jnp.clip(jnp.round(change / unit), -(2 ** (spare + 1)), 2 ** (spare + 1))
    number = jnp.zeros(vocabulary + 1, jnp.int32)
    place = number.at[rows].max(jnp.arange(count, dtype=jnp.int32))[rows]
    total = jnp.zeros(change.shape, jnp.int32).at[place].add(scaled.astype(jnp.int32))
    occurred = jnp.zeros(count, jnp.int32).at[place].add(1)
    n = occurred[place].astype(a.weight.dtype)
    weight = jnp.maximum(n, jnp.minimum(a.weight[rows] + n, window))
    # XLA makes a quotient by a column a product with its reciprocal, which rounds otherwise.
    share = short(1 / (weight + rest), 11)[:, None]
    mean = a.mean[rows] + product(share, total[place].astype(change.dtype) * unit)
    mean, weight = kept_if(sound, (mean, weight), (a.mean[rows], a.weight[rows]))
    return Anchors(
        a.mean.at[rows].set(mean, mode='drop'), a.weight.at[rows].set(weight, mode='drop')
    )
