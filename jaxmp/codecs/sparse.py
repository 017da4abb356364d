"""Some elements sent, the rest taken as zero: which ones, and how their positions are written.

A sparse codec is a selection and two parts: a codec for the kept values, and an *index coding* for
their positions. All four codings have a static size, so that messages of one setting are equally
long. For K of D positions a sample: `int32` takes 32 K bits, `packed` K ceil(log2 D), `bitmap` D,
`block_local` 8 K + 9 D / 256.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxmp.codecs import select
from jaxmp.codecs.dense import raw
from jaxmp.wire import Codec, Ctx, Like, pack, samples, unpack, wide
from jaxmp.words import Origin, known, named, word


@known
class IndexCoding(NamedTuple):
    """How ascending positions below ``n`` are written.

    Attributes:
      encode: ``(words, support, n) -> payload`` from the bitmap and the positions; use either.
      decode: ``(payload, n, k) -> support`` of shape ``(B, k)``.
      origin: its name in texts (`jaxmp.words`).
    """

    encode: Callable[[UInt32[Array, 'B w'], Int[Array, 'B K'], int], Any]
    decode: Callable[[Any, int, int], Int[Array, 'B K']]
    origin: Origin | None = None


def _width(n: int) -> int:
    return max(1, math.ceil(math.log2(n)))


int32 = named('int32', IndexCoding(lambda _, at, n: at.astype(jnp.int32), lambda m, n, k: m))
"""Positions as 32-bit integers."""

packed = named(
    'packed',
    IndexCoding(
        encode=lambda words, support, n: pack(support.astype(jnp.uint32), _width(n)),
        decode=lambda m, n, k: unpack(m, _width(n), k).astype(jnp.int32),
    ),
)
"""Positions in ``ceil(log2 D)`` bits each."""

bitmap = named(
    'bitmap',
    IndexCoding(
        encode=lambda words, support, n: words,
        decode=lambda m, n, k: select.positions(m, k),
    ),
)
"""One bit an element, rounded up to 32 a sample."""


def _encode_local(words: Array, support: Array, n: int) -> dict[str, Array]:
    rows, blocks = len(words), -(-n // 256)
    words = jnp.pad(words, ((0, 0), (0, blocks * 8 - words.shape[1])))
    counts = jax.lax.population_count(words.reshape(rows, blocks, 8)).sum(2, dtype=jnp.uint32)
    return {'counts': pack(counts, 9), 'low': (support & 255).astype(jnp.uint8)}


def _decode_local(m: dict[str, Array], n: int, k: int) -> Array:
    rows, blocks = len(m['low']), -(-n // 256)
    counts = unpack(m['counts'], 9, blocks).astype(jnp.int32)
    starts = jnp.cumsum(counts, axis=1) - counts
    # A block's number is written at its first slot (later blocks win), then carried to the right.
    mark = jnp.zeros((rows, k), jnp.int32).at[jnp.arange(rows)[:, None], starts]
    high = mark.max(jnp.arange(blocks, dtype=jnp.int32), mode='drop')
    return (jax.lax.cummax(high, axis=1) << 8) | m['low'].astype(jnp.int32)


block_local = named('block_local', IndexCoding(_encode_local, _decode_local))
"""One byte an index, local to its block of 256 elements, and a 9-bit count a block."""


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
            f'{name} indices must be int32, packed, bitmap or block_local; got {_kind(indices)}'
        )


def _kind(part: object) -> str:
    known = {'Channel': 'a feedback rule', 'Codec': 'a codec', 'IndexCoding': 'an index coding'}
    return known.get(type(part).__name__, getattr(part, '__name__', repr(part)))


def _inner(like: Like, k: int) -> Like:
    return jax.ShapeDtypeStruct((like.shape[0], k), like.dtype)


def _elements(like: Array | Like) -> int:
    return math.prod(like.shape[1:])


def _scatter(values: Array, support: Array, like: Like) -> Array:
    return select.scatter(values, support, _elements(like)).reshape(like.shape)


@word
def top_k(fraction: float, values: Codec = raw, indices: IndexCoding = bitmap) -> Codec:
    """Keeps the K largest magnitudes of each sample.

    ``C(x)_i = x_i`` if ``i`` is among the K largest ``|x_i|``, else 0, with
    ``K = D - int(D (1 - fraction))`` for D elements a sample. Exactly K are kept: of equal
    magnitudes the lower index wins. NaN counts as larger than infinity, and both stay inside
    their sample.

    Args:
      fraction: K / D in (0, 1].
      values: codec of the ``(B, K)`` kept values.
      indices: coding of their positions: ``int32``, ``packed``, ``bitmap`` or ``block_local``.

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
        kept, at, _ = _largest(samples(x), half)
        return _scatter(kept, at, jax.ShapeDtypeStruct(x.shape, x.dtype))

    whole = _top(lambda n: min(n, 2 * half(n)), values, indices)
    codec = _top(lambda n: select.count(n, fraction), values, indices)
    return codec._replace(halves=(largest, whole))


def _largest(x: Array, count: Callable[[int], int]) -> tuple[Array, Array, Array]:
    """Of every row the largest, their positions, and the bitmap of these."""
    k = count(x.shape[1])
    words = select.k_largest(x, k)
    at = select.positions(words, k)
    return select.gather(x, at), at, words


def _top(count: Callable[[int], int], values: Codec, indices: IndexCoding) -> Codec:
    """TopK with ``count(D)`` of D elements."""

    def encode(x: Array, ctx: Ctx) -> dict[str, Any]:
        x = samples(x)
        kept, at, words = _largest(x, count)
        kept = values.encode(kept, ctx._replace(support=None))
        return {'indices': indices.encode(words, at, x.shape[1]), 'values': kept}

    def read(m: dict[str, Any], like: Like, ctx: Ctx) -> tuple[Array, Array]:
        n = _elements(like)
        at = indices.decode(m['indices'], n, count(n))
        kept = values.decode(m['values'], _inner(like, at.shape[1]), ctx._replace(support=None))
        return kept, at

    def support(m: dict[str, Any], like: Like, ctx: Ctx) -> Array:
        kept, at = read(m, like, ctx)
        return jnp.where(kept == 0, ~at, at)

    def decode(m: dict[str, Any], like: Like, ctx: Ctx) -> Array:
        return _scatter(*read(m, like, ctx), like)

    return Codec(encode, decode, support)


@word
def random_k(fraction: float, values: Codec = raw) -> Codec:
    """Keeps K positions drawn from the crossing's key; only values are sent.

    Both ends draw the same positions from ``ctx.key``, one set for all samples of the tensor.
    ``E |x - C(x)|^2 = (1 - K / D) |x|^2``: a contraction, not rescaled.

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
        if ctx.key is None:
            raise ValueError('random_k needs ctx.key; pass Ctx(key=jax.random.key(seed))')
        k = select.count(n, fraction)
        at = select.positions(select.k_largest(jax.random.uniform(ctx.key, (1, n)), k), k)
        return jnp.broadcast_to(at, (rows, k))

    def part(ctx: Ctx) -> Ctx:  # the draw has used the key: stochastic values need another
        return ctx.fold(1)._replace(support=None)

    def encode(x: Array, ctx: Ctx) -> Any:
        x = samples(x)
        return values.encode(select.gather(x, draw(x.shape[0], x.shape[1], ctx)), part(ctx))

    def support(m: Any, like: Like, ctx: Ctx) -> Array:
        del m
        return draw(like.shape[0], _elements(like), ctx)

    def decode(m: Any, like: Like, ctx: Ctx) -> Array:
        at = support(m, like, ctx)
        return _scatter(values.decode(m, _inner(like, at.shape[1]), part(ctx)), at, like)

    return Codec(encode, decode, support, values.numbers)


@word
def unbiased_random_k(fraction: float, values: Codec = raw) -> Codec:
    """`random_k` times D / K: unbiased, ``E |x - C(x)|^2 = (D / K - 1) |x|^2``.

    No contraction: for feedback rules take `random_k`.

    Args:
      fraction: K / D in (0, 1].
      values: codec of the kept values.

    Raises:
      ValueError: if ``fraction`` is out of range or the context has no key.

    References:
      Sparsified SGD with Memory, arXiv 1809.07599.
    """
    check_parts('unbiased_random_k', fraction, values)
    kept = random_k(fraction, values)

    def encode(x: Array, ctx: Ctx) -> Any:
        n = _elements(x)
        y, top = wide(x) * (n / select.count(n, fraction)), float(jnp.finfo(x.dtype).max)
        beyond = jnp.isfinite(x) & (jnp.abs(y) > top)
        return kept.encode(jnp.where(beyond, jnp.copysign(top, y), y).astype(x.dtype), ctx)

    return kept._replace(encode=encode)


@word
def same_support(values: Codec = raw) -> Codec:
    """Keeps the positions that the forward message of this crossing kept; only values are sent.

    ``C(g)_i = g_i`` if the activation at ``i`` was sent and not zero, else 0: the default of the
    paper's GPT-2 runs, where independent positions diverge. (Fewer than K non-zeros leave places
    in the message; the forward codec marks those positions by their complement.)

    Args:
      values: codec of the ``(B, K)`` kept values.

    Raises:
      ValueError: if the forward channel sends no positions.

    References:
      Activations and Gradients Compression for Model-Parallel Training, arXiv 2401.07788, 3.2.
    """
    check_parts('same_support', 1.0, values)

    def known(ctx: Ctx) -> Array:
        if ctx.support is None:
            raise ValueError(
                'same_support reuses the positions of the forward message, and there are none; '
                'use it as bwd with a forward channel over top_k or random_k'
            )
        return ctx.support

    def encode(x: Array, ctx: Ctx) -> Any:
        s = known(ctx)
        kept = jnp.where(s < 0, 0, select.gather(samples(x), jnp.maximum(s, ~s)))
        return values.encode(kept, ctx._replace(support=None))

    def decode(m: Any, like: Like, ctx: Ctx) -> Array:
        s = known(ctx)
        kept = values.decode(m, _inner(like, s.shape[1]), ctx._replace(support=None))
        return _scatter(kept, jnp.maximum(s, ~s), like)

    return Codec(encode, decode, lambda m, like, ctx: known(ctx))
