"""Messages: the context of a crossing, the type `Codec`, and the packing of codes into bytes.

A *crossing* is one transfer of a tensor over a boundary in one direction. A *payload* is a pytree
of arrays, and these arrays are the message: nothing is added later, so the size of a message is the
size of its arrays.

Codes of b bits are packed into bytes plane by plane: b is split into powers of two (6 = 4 + 2), a
row of codes is cut into equal runs, and in the plane of a part of p bits each byte has the parts of
8/p runs, at different shifts. Unlike neighbouring codes, runs need no strided access, so packing
takes about as long as reading. XLA:CPU widens bf16 and int4 in its collectives, but not bytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType
from jaxtyping import Array, Int, PyTree, UInt8

from jaxmp.wire.words import Origin, known

Payload = PyTree  # of arrays, which are the message
Index = int | np.integer | Array  # known now, or when the program runs
Samples = Literal['alone', 'compared', 'joined']  # in this order on more and more samples
Need = Literal['key', 'ids', 'indices', 'tokens', 'spread']  # fields of `Ctx`
KEY: frozenset[Need] = frozenset({'key'})  # what a codec needs that draws random numbers
Like = jax.ShapeDtypeStruct

FLOATS = ('float16', 'bfloat16', 'float32', 'float64')  # dtypes that codecs take


class Ctx(NamedTuple):
    """The context of a crossing: its inputs besides the tensor.

    Attributes:
      key: random key of this crossing, the same at both ends.
      ids: positions of the examples in the training set, shape ``(B,)`` (for AQ-SGD).
      indices: ascending flat positions that the forward message of this crossing has sent, shape
        ``(B, K)`` (for index reuse). A position ``p`` that was sent as a zero is given as ``~p``.
      microbatch: number of the micro-batch within its step, from 0 (for the slots of
        `jaxmp.feedback`).
      tokens: ids of the model's input at the tensor's positions, integers of the tensor's shape
        without its last axis (for `anchored`, and stages that read them).
      spread: components of the gradients that returned in earlier steps, and their bits, as the
        receiver of the gradient knows them (for ``klt(2, by_gradient=0.3)``).
    """

    key: Array | None = None
    ids: Int[Array, ' B'] | None = None
    indices: Int[Array, 'B K'] | None = None
    microbatch: Index = 0
    tokens: Int[Array, 'B ...'] | None = None
    spread: Array | None = None

    def reading(self, x: PyTree) -> Ctx:
        """The same context with ``x``, the model's input, as its tokens if it has integers."""
        dtype = getattr(x, 'dtype', None)
        ids = self.tokens is None and dtype is not None and jnp.issubdtype(dtype, jnp.integer)
        return self._replace(tokens=x) if ids else self

    @classmethod
    def example(cls, x: Array | Like) -> Ctx:
        """A context that a tensor like ``x`` may have, without indices."""
        ids, tokens = (jnp.zeros(shape, jnp.int32) for shape in (x.shape[:1], x.shape[:-1]))
        return cls(jax.random.key(0), ids, tokens=tokens)

    def fold(self, n: Index) -> Ctx:
        """The same context with the key of sub-stream ``n``."""
        return self if self.key is None else self._replace(key=jax.random.fold_in(self.key, n))

    def key_of(self, word: str) -> Array:
        """The key, which ``word`` needs; raises ValueError if there is none."""
        if self.key is None:
            raise ValueError(f'{word} needs ctx.key; pass Ctx(key=jax.random.key(seed))')
        return self.key


@known
class Codec(NamedTuple):
    """A codec: a pair of stateless functions between tensors and payloads.

    Attributes:
      encode: ``(tensor, ctx) -> payload``.
      decode: ``(payload, like, ctx) -> tensor`` of the shape and dtype of ``like``. The two ends of
        ``ef21``, ``aqsgd`` and ``anchored`` have equal states only if it returns equal bits in both
        programs; see `jaxmp.codecs.exact`.
      indices: ``(payload, like, ctx) -> positions`` ``(B, K)`` that a receiver of the payload
        knows, or None if it knows none.
      additive: if messages with equal keys can be added (``C(a) + C(b) = C(a + b)`` up to
        rounding), a function from a payload to arrays that add, and its inverse; else None.
      halves: if a message has a fixed number of elements, a function that keeps the elements of
        ``x`` that half a message would send and sets the others to zero, and a codec that sends
        the sum of two such tensors; else None.
      levels: if ``decode`` returns a scale per sample times fixed levels, ``(payload, like, ctx) ->
        (levels, scale)``, both in `compute_dtype` and the levels of ``(B, n)``. Levels are
        multiples of ``2**-10`` below 4: no order of addition changes their sums (`rotate`).
      samples: what the message of a sample (axis 0) depends on: ``'joined'``, perhaps on all
        samples, as one range does; ``'alone'``, on that sample only; ``'compared'``, on how it
        compares with the others, which is what the codec is for.
      needs: the fields of the context that it reads, those of its inner codecs included.
      origin: the call that built it, its text and identity (`jaxmp.wire.words`).
    """

    encode: Callable[[Array, Ctx], Payload]
    decode: Callable[[Payload, Like, Ctx], Array]
    indices: Callable[[Payload, Like, Ctx], Array | None] = lambda payload, like, ctx: None
    additive: tuple[Callable[[Payload], PyTree], Callable[[PyTree], Payload]] | None = None
    halves: tuple[Callable[[Array], Array], Codec] | None = None
    levels: Callable[[Payload, Like, Ctx], tuple[Array, Array]] | None = None
    samples: Samples = 'joined'
    needs: frozenset[Need] = frozenset()
    origin: Origin | None = None


def like(x: Array | Like) -> Like:
    """Shape and dtype of ``x``.

    Raises:
      TypeError: if ``x`` is not one array.
    """
    if not (hasattr(x, 'shape') and hasattr(x, 'dtype')):
        raise TypeError(
            f'a message encodes one array, got {type(x).__name__}; send the arrays of a pytree '
            'one by one, and a number as jnp.array([number])'
        )
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def elements(x: Array | Like) -> int:
    """Number of elements of a sample of ``x``: axis 0 is the sample."""
    return math.prod(x.shape[1:])


def nbytes(payload: Payload) -> int:
    """Bytes of a payload, summed over its arrays (or their shapes)."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(payload))


def bits(channel: Any, x: Array | Like, ctx: Ctx | None = None) -> int:
    """Bits of the message of ``channel.send`` for a tensor like ``x``, without computing it.

    Args:
      channel: a `Channel`.
      x: a tensor, or its shape and dtype.
      ctx: a context; the default is `Ctx.example`.

    >>> import jax, jaxmp
    >>> x = jax.ShapeDtypeStruct((4, 8, 8, 4), 'float32')
    >>> [jaxmp.bits(jaxmp.parse(t), x) for t in ('raw', 'top_k(0.1, values=fp16, indices=packed)')]
    [32768, 2496]
    """
    ctx = Ctx.example(x) if ctx is None else ctx
    tx = jax.eval_shape(lambda: channel.init(like(x))[0])
    payload, _ = jax.eval_shape(channel.send, like(x), tx, ctx)
    return 8 * nbytes(payload)


def explicit_mesh(x: object) -> AbstractMesh | None:
    """The mesh of ``x`` if it has axes of the type Explicit, else None."""
    mesh = jax.typeof(x).sharding.mesh if isinstance(x, jax.Array) else None
    return mesh if mesh is not None and AxisType.Explicit in mesh.axis_types else None


def varying_as(start: PyTree, rows: PyTree) -> PyTree:
    """``start``, the first carry of a loop over ``rows``, as varying along the same mesh axes.

    Under ``check_vma`` `jax.shard_map` refuses a loop whose carry begins to vary inside of it.
    """
    axes = {axis for a in jax.tree.leaves(rows) for axis in varies(a)}
    return jax.tree.map(lambda a: vary(a, axes), start)


def varies(a: Array) -> frozenset[str]:
    """The mesh axes along which JAX knows that an array varies."""
    return jax.typeof(a).manual_axis_type.varying


def vary(a: Array, axes: Iterable[str]) -> Array:
    """``a``, which JAX then takes to vary along mesh axes."""
    missing = tuple(axis for axis in axes if axis not in varies(a))
    return jax.lax.pcast(a, missing, to='varying') if missing else a


def compute_dtype(x: Array | Like) -> jnp.dtype:
    """The dtype in which a codec computes on ``x``: that of ``x``, but at least float32.

    Raises:
      TypeError: if ``x`` is not one array of real floats of 16 to 64 bits.
      ValueError: if it has no axis or no element, or lies on a mesh of Explicit axes.
    """
    if (mesh := explicit_mesh(x)) is not None:
        raise ValueError(
            f'a codec by itself takes no array on Explicit axes {mesh.axis_names} of a mesh; send '
            'it through Boundary.cross, or give the mesh axis_types=(jax.sharding.AxisType.Auto,)'
        )
    shape, dtype = like(x).shape, x.dtype
    if dtype.name not in FLOATS:
        real = not jnp.issubdtype(dtype, jnp.complexfloating)
        cure = 'x.astype(jnp.float32)' if real else 'jnp.stack([x.real, x.imag], 1)'
        raise TypeError(f'a codec takes {", ".join(FLOATS)}, got {dtype.name}; send {cure}')
    if not shape or 0 in shape:
        raise ValueError(
            f'a codec takes a tensor with at least one axis and one element, got shape {shape}; '
            f'{"send x[None]" if not shape else "do not send empty tensors"}'
        )
    return jnp.promote_types(dtype, jnp.float32)


def widened(tree: PyTree) -> PyTree:
    """``tree`` with each array in float32 or wider, as a sum needs: in 16 bits it stands still.

    >>> half = jnp.ones(2, jnp.bfloat16)
    >>> [a.dtype.name for a in widened([half, jnp.ones(2)])]
    ['float32', 'float32']
    """
    return jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), tree)


def wide(x: Array) -> Array:
    """``x`` in its `compute_dtype`, so that codes do not depend on a 16-bit range."""
    return x.astype(compute_dtype(x))


def samples(x: Array) -> Array:
    """``x`` as ``(samples, elements)``: axis 0 is the sample.

    Raises:
      TypeError: if ``x`` is not an array of real floats, as in `compute_dtype`.
      ValueError: if ``x`` has no axis besides the samples, or no element.
    """
    compute_dtype(x)
    if x.ndim < 2:
        raise ValueError(
            f'a codec that works per sample got shape {x.shape}; axis 0 is the sample, '
            'so give at least two axes, and x[None] for one vector'
        )
    return x.reshape(x.shape[0], -1)


def half_bytes(x: Array) -> UInt8[Array, '...']:
    """A 16-bit array as uint16, which collectives of all backends send without conversion."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _parts(width: int) -> list[tuple[int, int]]:
    """The widths of the parts of a code, each with the number of bits below it."""
    parts = [p for p in (16, 8, 4, 2, 1) if width & p]
    return [(p, sum(parts[:i])) for i, p in enumerate(parts)]


def _runs(width: int) -> int:
    return max(1, 8 // (width & -width))


def pack(
    x: Array, width: int, code: Callable[[Array, int], Array] = lambda run, number: run
) -> UInt8[Array, '... bytes']:
    """Packs unsigned codes below ``2**width`` (1 to 31 bits) into bytes, along the last axis.

    Args:
      x: codes of shape ``(..., n)``, or numbers that ``code`` maps to codes.
      width: bits per code.
      code: elementwise function of a run and its number. XLA:CPU vectorises it if it is applied to
        separate runs, but does not vectorise the cutting of an array of codes into runs.

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
    """Concatenates along the last axis in the way that XLA:CPU vectorises: rows, or one row."""
    if len({p.shape for p in planes}) > 1:  # 16-bit parts occur only in indices, which are few
        return jnp.concatenate(planes, -1)
    if planes[0].ndim > 1:
        return jnp.stack(planes, -2).reshape(*planes[0].shape[:-1], -1)
    out = jnp.zeros((len(planes), *planes[0].shape), jnp.uint8)
    for i, plane in enumerate(planes):
        out = out.at[i].set(plane)
    return out.reshape(-1)


def _wide_plane(codes: list[Array], part: int) -> list[Array]:
    if part == 8:
        return [c.astype(jnp.uint8) for c in codes]
    pairs = [jax.lax.bitcast_convert_type(c.astype(jnp.uint16), jnp.uint8) for c in codes]
    return [p.reshape(*p.shape[:-2], -1) for p in pairs]


def _narrow_plane(codes: list[Array], part: int) -> list[Array]:
    """The plane of a narrow part: array j has one part of each of the runs j, j + step, ..."""
    codes = [c.astype(jnp.uint8) for c in codes]
    step = len(codes) * part // 8
    shifted = [c << (i // step * part) for i, c in enumerate(codes)]
    return [functools.reduce(jnp.bitwise_or, shifted[j::step]) for j in range(step)]


def unpack(
    packed: UInt8[Array, '... bytes'],
    width: int,
    count: int,
    value: Callable[[Array], Array] = lambda run: run,
) -> Array:
    """The ``count`` codes of ``pack(codes, width)``, as uint8, uint16 or uint32 by width.

    Args:
      packed: what `pack` returned.
      width: bits per code.
      count: number of codes along the last axis.
      value: elementwise function of a run of codes, whose values are returned instead; as for
        `pack`, it is faster than a function of all codes.
    """
    dtype = jnp.uint8 if width <= 8 else jnp.uint16 if width <= 16 else jnp.uint32
    runs = _runs(width)
    size, start, planes = -(-count // runs), 0, []
    for part, shift in _parts(width):
        length = max(1, part // 8) * size
        step = runs * part // 8 if part < 8 else runs
        plane = [packed[..., start + j * length :][..., :length] for j in range(step)]
        start += step * length
        planes.append([_part_of(plane, part, i).astype(dtype) << shift for i in range(runs)])
    codes = [functools.reduce(jnp.bitwise_or, parts) for parts in zip(*planes, strict=True)]
    return jnp.concatenate([value(code) for code in codes], -1)[..., :count]


def _part_of(plane: list[Array], part: int, run: int) -> Array:
    chunk = plane[run % len(plane)]
    if part == 16:
        return jax.lax.bitcast_convert_type(chunk.reshape(*chunk.shape[:-1], -1, 2), jnp.uint16)
    return chunk if part == 8 else (chunk >> (run // len(plane) * part)) & (2**part - 1)
