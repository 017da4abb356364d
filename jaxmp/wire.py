"""The message: what a crossing knows, what a codec is, how codes become bytes.

A *payload* is a pytree of arrays, and those arrays are what travels: nothing is added later, so the
size of a message is read from its arrays. Codes of b bits are packed into bytes plane by plane. The
bits of b are split into powers of two (6 = 4 + 2), and for a part of p bits the flat codes are cut
into 8/p equal runs which share a byte array, one run a shift. Runs, unlike neighbouring codes,
need no strided access, so packing costs about as much as reading. XLA:CPU widens bf16 and int4 in
its collectives; bytes travel as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

Payload = Any
Like = jax.ShapeDtypeStruct


class Ctx(NamedTuple):
    """What a crossing knows besides the tensor.

    Attributes:
      key: randomness of this crossing, the same at both ends.
      ids: positions of the examples in the training set, shape ``(B,)`` (AQ-SGD).
      support: ascending flat positions already sent forward here, shape ``(B, K)`` (index reuse);
        a position ``p`` that was sent as a zero stands there as ``~p``.
    """

    key: Array | None = None
    ids: Int[Array, ' B'] | None = None
    support: Int[Array, 'B K'] | None = None

    def fold(self, n: int) -> Ctx:
        """The same context with the key of sub-stream ``n``."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, n))


def _no_support(payload: Payload, like: Like, ctx: Ctx) -> None:
    del payload, like, ctx


class Codec(NamedTuple):
    """Stateless: what bits are sent for a tensor.

    Attributes:
      encode: tensor to payload.
      decode: payload to a tensor of ``like``'s shape and dtype.
      support: the positions a receiver of the payload knows, ``(B, K)``, or None if it knows none.
    """

    encode: Callable[[Array, Ctx], Payload]
    decode: Callable[[Payload, Like, Ctx], Array]
    support: Callable[[Payload, Like, Ctx], Array | None] = _no_support


def like(x: Array | Like) -> Like:
    """Shape and dtype of ``x``."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def nbytes(payload: Payload) -> int:
    """Bytes of a payload, summed over its arrays (or their shapes)."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(payload))


def bits(channel: Any, x: Array | Like, ctx: Ctx | None = None) -> int:
    """Bits of the message that ``channel.send`` makes of a tensor like ``x``, without computing it.

    Args:
      channel: a Channel.
      x: a tensor or its shape and dtype.
      ctx: a context; the default has a key and ids but no support.

    >>> import jax, jaxmp
    >>> x = jax.ShapeDtypeStruct((4, 8, 8, 4), 'float32')
    >>> [jaxmp.bits(jaxmp.parse(t), x) for t in ('raw', 'top_k(0.1, values=fp16, indices=packed)')]
    [32768, 2496]
    """
    given = Ctx(jax.random.key(0), jnp.zeros(x.shape[:1], jnp.int32)) if ctx is None else ctx
    tx = jax.eval_shape(lambda: channel.init(like(x))[0])
    payload, _ = jax.eval_shape(channel.send, like(x), tx, given)
    return 8 * nbytes(payload)


def samples(x: Array) -> Array:
    """``x`` as ``(samples, elements)``: axis 0 is the sample.

    Raises:
      ValueError: if ``x`` has no axis besides the samples.
    """
    if x.ndim < 2:
        raise ValueError(
            f'a codec that works per sample got shape {x.shape}; axis 0 is the sample, '
            'so give it at least two axes, for one vector x[None]'
        )
    return x.reshape(x.shape[0], -1)


def half_bytes(x: Array) -> UInt8[Array, '...']:
    """The bytes of a 16-bit array, as uint16 words that every backend sends as they are."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _parts(width: int) -> list[int]:
    return [p for p in (16, 8, 4, 2, 1) if width & p]


def pack(codes: Array, width: int) -> UInt8[Array, ' bytes']:
    """Packs unsigned codes below ``2**width`` (1 to 31 bits) into bytes.

    Args:
      codes: unsigned or int32 array of any shape.
      width: bits a code.

    Returns:
      The bytes: for n codes and each part p of the width, ``ceil(n * p / 8)``.

    >>> pack(jnp.arange(8, dtype=jnp.uint8), 3).shape
    (3,)
    """
    flat, shift, planes = codes.reshape(-1), 0, []
    for part in _parts(width):
        plane = flat >> shift if shift else flat
        planes.append(_pack_part(plane, part, last=shift + part == width))
        shift += part
    return planes[0] if len(planes) == 1 else jnp.concatenate(planes)


def _pack_part(codes: Array, part: int, last: bool) -> Array:
    if part == 16:
        pairs = jax.lax.bitcast_convert_type(codes.astype(jnp.uint16), jnp.uint8)
        return pairs.reshape(-1)
    codes = codes.astype(jnp.uint8)
    if part == 8:
        return codes
    if not last:
        codes = codes & (2**part - 1)
    runs = 8 // part
    if short := -codes.size % runs:
        codes = jnp.pad(codes, (0, short))
    size = codes.size // runs
    out = codes[:size]
    for i in range(1, runs):
        out = out | (codes[i * size : (i + 1) * size] << (part * i))
    return out


def unpack(packed: UInt8[Array, ' bytes'], width: int, count: int) -> Array:
    """The first ``count`` codes of ``pack(codes, width)``, as uint8, uint16 or uint32 by width."""
    dtype = jnp.uint8 if width <= 8 else jnp.uint16 if width <= 16 else jnp.uint32
    shift, start, planes = 0, 0, []
    for part in _parts(width):
        size = -(-count * part // 8)
        plane = _unpack_part(packed[start : start + size], part, count).astype(dtype)
        planes.append(plane << shift if shift else plane)
        shift, start = shift + part, start + size
    return functools.reduce(jnp.bitwise_or, planes)


def _unpack_part(packed: Array, part: int, count: int) -> Array:
    if part == 16:
        return jax.lax.bitcast_convert_type(packed.reshape(-1, 2), jnp.uint16)
    if part == 8:
        return packed
    mask = 2**part - 1
    runs = [(packed >> (part * i)) & mask for i in range(8 // part)]
    return jnp.concatenate(runs)[:count]
