"""Sparse codecs: some elements are sent with their positions, and the others are decoded as zero.

A sparse codec has a selection rule and two parts: a codec for the kept values, and an index coding
for their positions (`jaxmp.codecs.indices`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs import select
from jaxmp.codecs.dense import raw
from jaxmp.codecs.indices import IndexCoding, bitmap
from jaxmp.wire import KEY, Codec, Ctx, Like, Need, Payload, elements, samples, wide
from jaxmp.wire.words import word


def check_parts(name: str, fraction: object, values: object, indices: object = bitmap) -> None:
    """Raises unless ``fraction`` is in (0, 1], ``values`` a Codec, ``indices`` an IndexCoding."""
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f'{name} fraction must be a number in (0, 1], got {fraction!r}')
    if not 0 < fraction <= 1:
        cure = (
            f'; for {fraction:g} % write {name}({fraction / 100:g})' if 1 < fraction <= 100 else ''
        )
        raise ValueError(f'{name} fraction {fraction} is not in (0, 1]{cure}')
    if not isinstance(values, Codec):
        raise TypeError(f'{name} values must be a codec such as fp16, got {_kind(values)}')
    if not isinstance(indices, IndexCoding):
        raise TypeError(
            f'{name} indices must be int32, packed, bitmap, block_local or elias_fano; '
            f'got {_kind(indices)}'
        )


def _kind(part: object) -> str:
    kinds = {'Channel': 'a feedback rule', 'Codec': 'a codec', 'IndexCoding': 'an index coding'}
    return kinds.get(type(part).__name__, getattr(part, '__name__', repr(part)))


def _inner(like: Like, k: int) -> Like:
    return jax.ShapeDtypeStruct((like.shape[0], k), like.dtype)


def _scatter(values: Array, support: Array, like: Like) -> Array:
    return select.scatter(values, support, elements(like)).reshape(like.shape)


@word
def top_k(fraction: float, values: Codec = raw, indices: IndexCoding = bitmap) -> Codec:
    """Keeps the K largest magnitudes of each sample.

    ``C(x)_i = x_i`` if ``i`` is among the K largest ``|x_i|``, else 0, with
    ``K = D - int(D (1 - fraction))`` for D elements per sample. Exactly K are kept: among equal
    magnitudes those with the lower indices. NaN counts as larger than infinity; neither affects
    other samples.

    Args:
      fraction: K / D in (0, 1].
      values: codec of the ``(B, K)`` kept values.
      indices: coding of their positions: ``int32``, ``packed``, ``bitmap``, ``block_local`` or
        ``elias_fano``.

    Raises:
      ValueError: if ``fraction`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C, x = top_k(0.5), jnp.array([[1.0, -4.0, 3.0, 2.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).tolist()
    [[0.0, -4.0, 3.0, 0.0]]

    References:
      Activations and Gradients Compression for Model-Parallel Training, arXiv 2401.07788, 2.3.
    """
    check_parts('top_k', fraction, values, indices)
    half = lambda n: select.count(n, fraction / 2)

    def largest(x: Array) -> Array:
        largest, support, _ = _largest(samples(x), half)
        return _scatter(largest, support, jax.ShapeDtypeStruct(x.shape, x.dtype))

    whole = _top(lambda n: min(n, 2 * half(n)), values, indices)
    codec = _top(lambda n: select.count(n, fraction), values, indices)
    return codec._replace(halves=(largest, whole))


def _largest(x: Array, count: Callable[[int], int]) -> tuple[Array, Array, Array]:
    """The largest elements of each row, their positions, and the bitmap of the positions."""
    k = count(x.shape[1])
    words = select.k_largest(x, k)
    support = select.positions(words, k)
    return select.gather(x, support), support, words


def _top(count: Callable[[int], int], values: Codec, indices: IndexCoding) -> Codec:
    """TopK that keeps ``count(D)`` of D elements."""

    def encode(x: Array, ctx: Ctx) -> dict[str, Payload]:
        x = samples(x)
        largest, support, words = _largest(x, count)
        sent = values.encode(largest, ctx._replace(indices=None))
        return {'indices': indices.encode(words, support, x.shape[1]), 'values': sent}

    def read(m: dict[str, Payload], like: Like, ctx: Ctx) -> tuple[Array, Array]:
        n = elements(like)
        place = indices.decode(m['indices'], n, count(n))
        inner = _inner(like, place.shape[1])
        return values.decode(m['values'], inner, ctx._replace(indices=None)), place

    def support(m: dict[str, Payload], like: Like, ctx: Ctx) -> Array:
        y, place = read(m, like, ctx)
        return jnp.where(y == 0, ~place, place)

    def decode(m: dict[str, Payload], like: Like, ctx: Ctx) -> Array:
        return _scatter(*read(m, like, ctx), like)

    return Codec(encode, decode, support, samples=values.samples, needs=values.needs)


@word
def random_k(fraction: float, values: Codec = raw) -> Codec:
    """Keeps K random positions, which both ends draw from the crossing's key; sends only values.

    All samples of the tensor share one set of positions, drawn from ``ctx.key``. Values are not
    rescaled, so this is a contraction: ``E |x - C(x)|^2 = (1 - K / D) |x|^2``.

    Args:
      fraction: K / D in (0, 1].
      values: codec of the kept values.

    Raises:
      ValueError: if ``fraction`` is out of range or the context has no key.

    References:
      Sparsified SGD with Memory, arXiv 1809.07599.
    """
    check_parts('random_k', fraction, values)

    def draw(rows: int, n: int, ctx: Ctx) -> Array:
        k, drawn = select.count(n, fraction), jax.random.uniform(ctx.key_of('random_k'), (1, n))
        row = select.positions(select.k_largest(drawn, k), k)
        return jnp.broadcast_to(row, (rows, k))

    def part(ctx: Ctx) -> Ctx:  # positions are drawn from the key; stochastic values need another
        return ctx.fold(1)._replace(indices=None)

    def encode(x: Array, ctx: Ctx) -> Payload:
        x = samples(x)
        return values.encode(select.gather(x, draw(x.shape[0], x.shape[1], ctx)), part(ctx))

    def support(_: Payload, like: Like, ctx: Ctx) -> Array:
        return draw(like.shape[0], elements(like), ctx)

    def decode(m: Payload, like: Like, ctx: Ctx) -> Array:
        place = support(m, like, ctx)
        return _scatter(values.decode(m, _inner(like, place.shape[1]), part(ctx)), place, like)

    needs = values.needs | KEY
    return Codec(encode, decode, support, values.additive, samples=values.samples, needs=needs)


@word
def unbiased_random_k(fraction: float, values: Codec = raw) -> Codec:
    """`random_k` times D / K: unbiased, ``E |x - C(x)|^2 = (D / K - 1) |x|^2``.

    It is not a contraction: use `random_k` under feedback rules.

    Args:
      fraction: K / D in (0, 1].
      values: codec of the kept values.

    Raises:
      ValueError: if ``fraction`` is out of range or the context has no key.

    References:
      Sparsified SGD with Memory, arXiv 1809.07599.
    """
    check_parts('unbiased_random_k', fraction, values)
    biased = random_k(fraction, values)

    def encode(x: Array, ctx: Ctx) -> Payload:
        n = elements(x)
        y, top = wide(x) * (n / select.count(n, fraction)), float(jnp.finfo(x.dtype).max)
        beyond = jnp.isfinite(x) & (jnp.abs(y) > top)
        return biased.encode(jnp.where(beyond, jnp.copysign(top, y), y).astype(x.dtype), ctx)

    return biased._replace(encode=encode)


@word
def same_support(values: Codec = raw) -> Codec:
    """Keeps the positions that the forward message of this crossing kept; sends only values.

    ``C(g)_i = g_i`` if the activation at ``i`` was sent and was not zero, else 0. The paper's GPT-2
    runs use it; with independently chosen positions they diverge. (If fewer than K activations
    were not zero, the forward codec marks the positions of zeros by their complement ``~i``.)

    Args:
      values: codec of the ``(B, K)`` kept values.

    Raises:
      ValueError: if the forward channel sends no positions.

    References:
      Activations and Gradients Compression for Model-Parallel Training, arXiv 2401.07788, 3.2.
    """
    check_parts('same_support', 1.0, values)

    def known(ctx: Ctx) -> Array:
        if ctx.indices is None:
            raise ValueError(
                'same_support reuses the positions of the forward message, and it has none; '
                'use it as bwd with a forward channel over top_k or random_k'
            )
        return ctx.indices

    def encode(x: Array, ctx: Ctx) -> Payload:
        s = known(ctx)
        inner = jnp.where(s < 0, 0, select.gather(samples(x), jnp.maximum(s, ~s)))
        return values.encode(inner, ctx._replace(indices=None))

    def decode(m: Payload, like: Like, ctx: Ctx) -> Array:
        s = known(ctx)
        y = values.decode(m, _inner(like, s.shape[1]), ctx._replace(indices=None))
        return _scatter(y, jnp.maximum(s, ~s), like)

    support = lambda m, like, ctx: known(ctx)
    positions: frozenset[Need] = frozenset({'indices'})
    needs = values.needs | positions
    return Codec(encode, decode, support, samples=values.samples, needs=needs)
