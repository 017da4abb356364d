"""Index codings: the formats in which a sparse codec sends the positions of the kept elements.

Every coding has a static size, so that all messages of a channel have the same length. K of D
positions take per sample: `int32` 32 K bits, `packed` K ceil(log2 D), `bitmap` D, `block_local`
8 K + 9 D / 256, `elias_fano` about K (2 + log2(D / K)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jaxmp.codecs import select
from jaxmp.wire import Payload, pack, unpack
from jaxmp.wire.words import Origin, known, named


@known
class IndexCoding(NamedTuple):
    """The format in which ascending positions below ``n`` are sent.

    Attributes:
      encode: ``(words, support, n) -> payload`` from the bitmap and the positions; use either.
      decode: ``(payload, n, k) -> support`` of shape ``(B, k)``.
      origin: the name of the coding in texts (`jaxmp.wire.words`).
    """

    encode: Callable[[UInt32[Array, 'B w'], Int[Array, 'B K'], int], Payload]
    decode: Callable[[Payload, int, int], Int[Array, 'B K']]
    origin: Origin | None = None


def _width(n: int) -> int:
    return max(1, math.ceil(math.log2(n)))


int32 = named(
    'int32', IndexCoding(lambda _, support, n: support.astype(jnp.int32), lambda m, n, k: m)
)
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
"""One bit per element, rounded up to a multiple of 32 bits per sample."""


def _encode_local(words: Array, support: Array, n: int) -> dict[str, Array]:
    rows, blocks = len(words), -(-n // 256)
    words = jnp.pad(words, ((0, 0), (0, blocks * 8 - words.shape[1])))
    counts = jax.lax.population_count(words.reshape(rows, blocks, 8)).sum(2, dtype=jnp.uint32)
    return {'counts': pack(counts, 9), 'low': (support & 255).astype(jnp.uint8)}


def _decode_local(m: dict[str, Array], n: int, k: int) -> Array:
    rows, blocks = len(m['low']), -(-n // 256)
    counts = unpack(m['counts'], 9, blocks).astype(jnp.int32)
    starts = jnp.cumsum(counts, axis=1) - counts
    # The number of a block is written at its first slot (the maximum, where several blocks share
    # it) and then copied to the right.
    mark = jnp.zeros((rows, k), jnp.int32).at[jnp.arange(rows)[:, None], starts]
    high = mark.max(jnp.arange(blocks, dtype=jnp.int32), mode='drop')
    return (jax.lax.cummax(high, axis=1) << 8) | m['low'].astype(jnp.int32)


block_local = named('block_local', IndexCoding(_encode_local, _decode_local))
"""One byte per index, relative to its block of 256 elements, and a 9-bit count per block."""


def _split(n: int, k: int) -> tuple[int, int]:
    """The number of low bits that makes the message shortest, and the bits of its high parts."""
    high = lambda low: k + ((n - 1) >> low)
    low = min(range(_width(n) + 1), key=lambda low: k * low + high(low))
    return low, high(low)


def _encode_high(words: Array, support: Array, n: int) -> dict[str, Array]:
    k = support.shape[1]
    low, size = _split(n, k)
    high = select.bitmap((support >> low) + jnp.arange(k), size)
    least = (support & (2**low - 1)).astype(jnp.uint32)
    return {'high': high, **({'low': pack(least, low)} if low else {})}


def _decode_high(m: dict[str, Array], n: int, k: int) -> Array:
    low, _ = _split(n, k)
    high = (select.positions(m['high'], k) - jnp.arange(k)) << low
    return high | unpack(m['low'], low, k).astype(jnp.int32) if low else high


elias_fano = named('elias_fano', IndexCoding(_encode_high, _decode_high))
"""Elias-Fano: low bits as they are, high bits as a bitmap of ``high + i`` for position i of K.

With l low bits it takes ``K l + K + (D - 1) / 2**l`` bits, the last two terms rounded up to a
multiple of 32, for the best l: between half a bit and one bit per position above the entropy of K
of D random positions. 64 of 4096 positions take 8 bits each (their entropy is 7.36 bits).

References:
  Efficient Storage and Retrieval by Content and Address of Static Files, Journal of the ACM 1974.
"""
