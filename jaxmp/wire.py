"""The message: what a crossing knows, what a codec is, how codes become bytes.

A *payload* is a pytree of arrays, and those arrays are what travels: nothing is added later, so the
size of a message is read from its arrays. Codes of b bits are packed into bytes plane by plane: the
bits of b are split into powers of two (6 = 4 + 2), a row of codes is cut into equal runs, and in
the plane of a part of p bits 8/p runs share their bytes, each under its own shift. Runs, unlike
neighbouring codes, need no strided access, so packing costs about as much as reading. XLA:CPU
widens bf16 and int4 in its collectives; bytes travel as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt8

from jaxmp.words import Origin, known

Payload = Any
Like = jax.ShapeDtypeStruct

FLOATS = ('float16', 'bfloat16', 'float32', 'float64')  # what codecs take


class Ctx(NamedTuple):
    """What a crossing knows besides the tensor.

    Attributes:
      key: randomness of this crossing, the same at both ends.
      ids: positions of the examples in the training set, shape ``(B,)`` (AQ-SGD).
      support: ascending flat positions already sent forward here, shape ``(B, K)`` (index reuse);
        a position ``p`` that was sent as a zero stands there as ``~p``.
      microbatch: number of the micro-batch within its step, from 0 (`jaxmp.feedback`'s slots).
    """

    key: Array | None = None
    ids: Int[Array, ' B'] | None = None
    support: Int[Array, 'B K'] | None = None
    microbatch: Any = 0

    def fold(self, n: int | Array) -> Ctx:
        """The same context with the key of sub-stream ``n``."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, n))


def _no_support(payload: Payload, like: Like, ctx: Ctx) -> None:
    del payload, like, ctx


@known
class Codec(NamedTuple):
    """Stateless: what bits are sent for a tensor.

    Attributes:
      encode: tensor to payload.
      decode: payload to a tensor of ``like``'s shape and dtype. The two ends of ``ef21`` and
        ``aqsgd`` hold equal states only if it gives equal bits in both their programs: see
        `jaxmp.codecs.exact`.
      support: the positions a receiver of the payload knows, ``(B, K)``, or None if it knows none.
      numbers: where messages can be added (of equal keys, ``C(a) + C(b) = C(a + b)`` but for
        rounding): a payload as arrays that add, and back; None where they cannot.
      halves: where a message has a number of places: ``x`` with all but the elements that half of
        them would hold set to zero, and the codec that sends the sum of two such; else None.
      origin: the call that made it, its text and identity (`jaxmp.words`).
    """

    encode: Callable[[Array, Ctx], Payload]
    decode: Callable[[Payload, Like, Ctx], Array]
    support: Callable[[Payload, Like, Ctx], Array | None] = _no_support
    numbers: tuple[Callable[[Payload], Any], Callable[[Any], Payload]] | None = None
    halves: tuple[Callable[[Array], Array], Codec] | None = None
    origin: Origin | None = None


def like(x: Array | Like) -> Like:
    """Shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not one array.
    """
    if not (hasattr(x, 'shape') and hasattr(x, 'dtype')):
        raise TypeError(
            f'a message is made of one array, got {type(x).__name__}; send the arrays of a pytree '
            'one by one, and a number as jnp.array([number])'
        )
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


def compute_dtype(x: Array | Like) -> jnp.dtype:
    """The dtype in which a codec computes on ``x``: its own, but at least float32.

    Raises:
      TypeError: if ``x`` is not one array of real floats of 16 to 64 bits.
      ValueError: if it has no axis or no element.
    """
    shape, dtype = like(x).shape, x.dtype
    if dtype.name not in FLOATS:
        halves = jnp.issubdtype(dtype, jnp.complexfloating)
        cure = 'jnp.stack([x.real, x.imag], 1)' if halves else 'x.astype(jnp.float32)'
        raise TypeError(f'a codec takes {", ".join(FLOATS)}, got {dtype.name}; send {cure}')
    if not shape or 0 in shape:
        raise ValueError(
            f'a codec takes a tensor of one axis and one element at least, got shape {shape}; send '
            f'{"x[None]" if not shape else "no empty tensor"}'
        )
    return jnp.promote_types(dtype, jnp.float32)


def wide(x: Array) -> Array:
    """``x`` in its `compute_dtype`, so that codes do not depend on a 16-bit range."""
    return x.astype(compute_dtype(x))


def samples(x: Array) -> Array:
    """``x`` as ``(samples, elements)``: axis 0 is the sample.

    Raises:
      TypeError: as `compute_dtype`.
      ValueError: if ``x`` has no axis besides the samples, or no element.
    """
    compute_dtype(x)
    if x.ndim < 2:
        raise ValueError(
            f'a codec that works per sample got shape {x.shape}; axis 0 is the sample, '
            'so give it at least two axes, for one vector x[None]'
        )
    return x.reshape(x.shape[0], -1)


def half_bytes(x: Array) -> UInt8[Array, '...']:
    """The bytes of a 16-bit array, as uint16 words that every backend sends as they are."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _parts(width: int) -> list[tuple[int, int]]:
    """The parts of a code, and the bits below each."""
    parts = [p for p in (16, 8, 4, 2, 1) if width & p]
    return [(p, sum(parts[:i])) for i, p in enumerate(parts)]


def _runs(width: int) -> int:
    return max(1, 8 // (width & -width))


def _identity(run: Array, number: int) -> Array:
    del number
    return run


def pack(
    x: Array, width: int, code: Callable[[Array, int], Array] = _identity
) -> UInt8[Array, '... bytes']:
    """Packs unsigned codes below ``2**width`` (1 to 31 bits) into bytes, along the last axis.

    Args:
      x: the codes, of shape ``(..., n)``, or what ``code`` makes codes of.
      width: bits a code.
      code: elementwise function of a run and its number. XLA:CPU vectorises the coding of separate
        runs, and not the cutting of what was coded whole.

    Returns:
      The bytes, ``(..., m)`` with ``m = n * width / 8``, n rounded up to whole runs.

    >>> pack(jnp.arange(8, dtype=jnp.uint8), 3).shape
    (3,)
    """
    runs = _runs(width)
    if short := -x.shape[-1] % runs:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, short)])
    codes = [code(run, i) for i, run in enumerate(jnp.split(x, runs, -1))]
    planes = []
    for part, shift in _parts(width):
        below = 2 ** (shift + part)
        cut = [(c if below == 2**width else c & (below - 1)) >> shift for c in codes]
        planes += _wide_plane(cut, part) if part >= 8 else _narrow_plane(cut, part)
    return planes[0] if len(planes) == 1 else _join(planes)


def _join(planes: list[Array]) -> Array:
    """Concatenates along the last axis, by updates: XLA:CPU does not vectorise into a concat."""
    if len({p.shape for p in planes}) > 1:  # 16-bit parts: only indices, which are few
        return jnp.concatenate(planes, -1)
    out = jnp.zeros((len(planes), *planes[0].shape), jnp.uint8)
    for i, plane in enumerate(planes):
        out = out.at[i].set(plane)
    return jnp.moveaxis(out, 0, -2).reshape(*planes[0].shape[:-1], -1)


def _wide_plane(codes: list[Array], part: int) -> list[Array]:
    if part == 8:
        return [c.astype(jnp.uint8) for c in codes]
    pairs = [jax.lax.bitcast_convert_type(c.astype(jnp.uint16), jnp.uint8) for c in codes]
    return [p.reshape(*p.shape[:-2], -1) for p in pairs]


def _narrow_plane(codes: list[Array], part: int) -> list[Array]:
    """Byte j of the plane holds a part of each of the runs j, j + step, j + 2 step, ..."""
    codes = [c.astype(jnp.uint8) for c in codes]
    step = len(codes) * part // 8
    shifted = [c << (i // step * part) for i, c in enumerate(codes)]
    return [functools.reduce(jnp.bitwise_or, shifted[j::step]) for j in range(step)]


def unpack(packed: UInt8[Array, '... bytes'], width: int, count: int) -> Array:
    """The ``count`` codes of ``pack(codes, width)``, as uint8, uint16 or uint32 by width."""
    dtype = jnp.uint8 if width <= 8 else jnp.uint16 if width <= 16 else jnp.uint32
    runs = _runs(width)
    size, start, found = -(-count // runs), 0, []
    for part, shift in _parts(width):
        length = max(1, part // 8) * size
        step = runs * part // 8 if part < 8 else runs
        plane = [packed[..., start + j * length :][..., :length] for j in range(step)]
        start += step * length
        found.append([_part_of(plane, part, i).astype(dtype) << shift for i in range(runs)])
    codes = [functools.reduce(jnp.bitwise_or, parts) for parts in zip(*found, strict=True)]
    return jnp.concatenate(codes, -1)[..., :count]


def _part_of(plane: list[Array], part: int, run: int) -> Array:
    chunk = plane[run % len(plane)]
    if part == 16:
        return jax.lax.bitcast_convert_type(chunk.reshape(*chunk.shape[:-1], -1, 2), jnp.uint16)
    return chunk if part == 8 else (chunk >> (run // len(plane) * part)) & (2**part - 1)
