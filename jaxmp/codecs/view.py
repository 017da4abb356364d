"""`per_token`, `per_sample`, `per_chunk`: a codec applied to each token, sample or run by itself.

The codec gets the parts as its samples. A codec that joins samples, as `uniform` does by its range,
gets them one at a time instead, so that each part has a range of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, samples
from jaxmp.wire.words import check_whole, word


def each(codec: Codec) -> Codec:
    """``codec`` of each sample by itself, with a key of its own; the same codec if it does that."""
    if codec.samples != 'joined':
        return codec

    # C(x)_i = codec(x_i) with the key of sub-stream i, so that no two samples draw alike.
    def alone(ctx: Ctx, number: Array, count: int) -> Ctx:
        part = lambda a: None if a is None or len(a) != count else a[number][None]
        ids, indices, tokens = map(part, (ctx.ids, ctx.indices, ctx.tokens))
        return ctx.fold(number)._replace(ids=ids, indices=indices, tokens=tokens)

    def one(like: Array | Like) -> Like:
        return jax.ShapeDtypeStruct((1, *like.shape[1:]), like.dtype)

    def encode(x: Array, ctx: Ctx) -> Payload:
        send = lambda i, row: codec.encode(row[None], alone(ctx, i, len(x)))
        return jax.vmap(send)(jnp.arange(len(x)), x)

    def decode(m: Payload, like: Like, ctx: Ctx) -> Array:
        count = like.shape[0]
        read = lambda i, row: codec.decode(row, one(like), alone(ctx, i, count))[0]
        return jax.vmap(read)(jnp.arange(count), m)

    def support(m: Payload, like: Like, ctx: Ctx) -> Array | None:
        def read(i: Array, row: Payload) -> Array | None:
            positions = codec.indices(row, one(like), alone(ctx, i, like.shape[0]))
            return None if positions is None else positions[0]

        return jax.vmap(read)(jnp.arange(like.shape[0]), m)

    halves = None
    if codec.halves is not None:
        half, whole = codec.halves
        halves = jax.vmap(lambda row: half(row[None])[0]), each(whole)
    return Codec(encode, decode, support, halves=halves, samples='alone', needs=codec.needs)


def _in_rows(codec: Codec, length: Callable[[Array | Like], int]) -> Codec:
    """``codec`` of each row of the flattened tensor, of ``length(like)`` elements.

    The last row may be shorter. It is padded with zeros to be a sample beside the others; where
    rows are sent one at a time it is sent as it is, because zeros would widen its range.
    """
    row, apart = each(codec), codec.samples == 'joined'

    def parts(like: Array | Like) -> list[Like]:
        """The rows of full length, and the shorter one if it is sent as it is."""
        n, rest = length(like), like.size % length(like) if apart else 0
        shapes = [((like.size - rest + n - 1) // n, n)] + [(1, rest)] * (rest > 0)
        return [jax.ShapeDtypeStruct(shape, like.dtype) for shape in shapes]

    def cut(x: Array) -> list[Array]:
        compute_dtype(x)
        sizes = [part.size for part in parts(x)]
        flat = jnp.pad(x.reshape(-1), (0, sum(sizes) - x.size))
        pieces = jnp.split(flat, sizes[:-1])
        return [a.reshape(part.shape) for a, part in zip(pieces, parts(x), strict=True)]

    def joined(ys: list[Array], like: Array | Like) -> Array:
        flat = jnp.concatenate([y.reshape(-1) for y in ys])
        return flat[: like.size].reshape(like.shape)

    def contexts(like: Array | Like, ctx: Ctx) -> list[Ctx]:
        first = ctx._replace(ids=None, tokens=None)  # positions are known of full rows only
        return [first, first.fold(like.size)._replace(indices=None)][: len(parts(like))]

    def encode(x: Array, ctx: Ctx) -> list[Payload]:
        return [row.encode(a, c) for a, c in zip(cut(x), contexts(x, ctx), strict=True)]

    def decode(m: list[Payload], like: Like, ctx: Ctx) -> Array:
        each_part = zip(m, parts(like), contexts(like, ctx), strict=True)
        return joined([row.decode(*part) for part in each_part], like)

    def support(m: list[Payload], like: Like, ctx: Ctx) -> Array | None:
        if len(m) != 1:
            return None
        return row.indices(m[0], parts(like)[0], contexts(like, ctx)[0])

    halves = None
    if codec.halves is not None and row.halves is not None:
        half, whole = row.halves[0], codec.halves[1]
        halves = lambda x: joined([half(a) for a in cut(x)], x), _in_rows(whole, length)
    return Codec(encode, decode, support, halves=halves, needs=codec.needs)


def _check(name: str, codec: object, example: str) -> None:
    if not isinstance(codec, Codec):
        raise TypeError(f'{name} needs a codec, got {codec!r}; write {example}')


@word
def per_token(codec: Codec) -> Codec:
    """Applies ``codec`` to each vector along the last axis separately.

    A tensor ``(B, ..., C)`` is coded as ``B ...`` samples of C elements. TopK then keeps the same
    number of elements per token; the paper's TopK chooses among all tokens of a sample. Int8 with a
    range per token is ``per_token(uniform(8))``. `adaptive` and `max_scaled` compare the tokens.

    Args:
      codec: codec of a token; it gets no ids.

    Raises:
      TypeError: if ``codec`` is not a codec.

    >>> import jax.numpy as jnp, jaxmp
    >>> x = jnp.array([[[0.0, 300.0], [3.0, -2.0]]])
    >>> for c in jaxmp.uniform(1), jaxmp.per_token(jaxmp.uniform(1)):
    ...     print(c.decode(c.encode(x, jaxmp.Ctx()), x, jaxmp.Ctx()).tolist())
    [[[-2.0, 300.0], [-2.0, -2.0]]]
    [[[0.0, 300.0], [3.0, -2.0]]]
    """
    _check('per_token', codec, 'per_token(top_k(0.1))')
    rows = _in_rows(codec, lambda like: like.shape[-1])
    return rows._replace(samples='compared' if codec.samples == 'compared' else 'alone')


@word
def per_sample(codec: Codec) -> Codec:
    """Applies ``codec`` to each sample separately.

    A sample of a tensor ``(B, ...)`` is ``(1, ...)`` to the codec: ``per_sample(uniform(8))`` has a
    range per sample, where `uniform` has one for the batch. Codecs that treat samples separately
    stay as they are; `adaptive` and `max_scaled`, which compare samples, do too.

    Args:
      codec: codec of a sample.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if the tensor has no axis besides the samples.

    >>> import jax.numpy as jnp, jaxmp
    >>> x = jnp.array([[0.0, 300.0], [3.0, -2.0]])
    >>> c = jaxmp.per_sample(jaxmp.uniform(1))
    >>> c.decode(c.encode(x, jaxmp.Ctx()), x, jaxmp.Ctx()).tolist()
    [[0.0, 300.0], [3.0, -2.0]]
    """
    _check('per_sample', codec, 'per_sample(uniform(8))')
    codec = each(codec)

    def encode(x: Array, ctx: Ctx) -> Payload:
        samples(x)
        return codec.encode(x, ctx)

    return codec._replace(encode=encode)


@word
def per_chunk(codec: Codec, size: int) -> Codec:
    """Applies ``codec`` to each run of ``size`` elements of the flattened tensor separately.

    A tensor of n elements is coded as ``ceil(n / size)`` samples. The last, if it is shorter, is
    padded with zeros, which are sent too; a codec with a range or blocks of its own, such as
    `uniform`, gets it as it is. A tensor of fewer than ``size`` elements is one sample, without
    padding. One scale serves a chunk, and positions within it are short: 64 of 4096 elements, as
    SparseLoCo sends them, take
    ``per_chunk(top_k(0.015625, values=k_means(2), indices=elias_fano), 4096)``, 10.5 bits per
    element that is sent. `adaptive` and `max_scaled` compare the chunks.

    Args:
      codec: codec of a chunk; it gets no ids.
      size: number of elements per chunk.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if ``size`` is not a positive integer.

    >>> import jax.numpy as jnp, jaxmp
    >>> x = jnp.array([1.0, 9.0, 3.0, -2.0, 5.0])
    >>> c = jaxmp.per_chunk(jaxmp.top_k(0.5), 2)
    >>> c.decode(c.encode(x, jaxmp.Ctx()), x, jaxmp.Ctx()).tolist()
    [0.0, 9.0, 3.0, 0.0, 5.0]

    References:
      Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """
    _check('per_chunk', codec, 'per_chunk(top_k(0.1), 4096)')
    check_whole('per_chunk size', size, 'a positive integer, such as 4096')
    return _in_rows(codec, lambda like: min(size, like.size))
