"""`rotate`: a random rotation around another codec, which makes heavy tails nearly normal.

A Hadamard matrix mixes all elements of a block with equal weights. A rotated element is therefore a
sum of many elements and nearly normal, whatever the distribution in the block. Random signs, which
both ends draw from the crossing's key, keep structured data from aligning with a row of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.wire import KEY, Codec, Ctx, Like, Payload, compute_dtype, wide
from jaxmp.wire.words import word

BLOCKS = [2**n for n in range(1, 21)]
MOST_EXACT = 2**12  # levels, whose sum has no more than the 24 bits of a float32
Level = Callable[[Array, int], Array]
SIDE = 32  # of the matrix of a product, which a core multiplies as fast as it reads memory


def _level(x: Float[Array, 'rows n'], level: int) -> Float[Array, 'rows n']:
    """Sums and differences of the elements that lie ``2**level`` apart."""
    a, b = jnp.split(x.reshape(-1, 2 * 2**level), 2, 1)
    return jnp.concatenate([a + b, a - b], 1).reshape(x.shape)


def _level_of_elements(x: Float[Array, 'rows n'], level: int) -> Float[Array, 'rows n']:
    """The same, faster where XLA:CPU fuses it with elementwise work before it, not after it."""
    a, b = jnp.split(x.reshape(len(x), -1, 2, 2**level), 2, 2)
    return (a + np.array([[1], [-1]], x.dtype) * b).reshape(x.shape)


def _of_means(x: Float[Array, 'rows n']) -> Float[Array, 'rows n']:
    """A rotation from means, in which all finite values have stayed finite."""
    scaled = x * np.sqrt(x.shape[1]).astype(x.dtype)
    largest = jnp.finfo(x.dtype).max
    return jnp.where(jnp.isfinite(x), jnp.clip(scaled, -largest, largest), jnp.nan)


def hadamard(x: Float[Array, 'rows n']) -> Float[Array, 'rows n']:
    """Each row times the Hadamard matrix divided by ``sqrt(n)``: a rotation, its own inverse.

    >>> hadamard(jnp.array([[2.0, 0.0, 0.0, 0.0]])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    for level in range(x.shape[1].bit_length() - 1):
        x = _level(x / 2, level)  # sums of two terms have the same bits on every CPU
    return _of_means(x)


# A product with the Hadamard matrix of ones is that of `hadamard` but for rounding, and several
# times as fast. A row is a matrix X of rows of `SIDE` elements: the product is H X H, in any order.


def _within(x: Float[Array, 'rows n']) -> Float[Array, 'rows n']:
    """``X H``."""
    matrix = np.ones((1, 1), x.dtype)
    while len(matrix) < min(x.shape[1], SIDE):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return jnp.dot(x.reshape(-1, len(matrix)), matrix, precision='highest').reshape(x.shape)


def _across(x: Float[Array, 'rows n'], level: Level = _level) -> Float[Array, 'rows n']:
    """``H X``: sums and differences of the rows of X, or products if there are many."""
    rows, n = x.shape
    if n > 4 * SIDE:
        columns = x.reshape(rows, -1, SIDE).swapaxes(1, 2).reshape(-1, n // SIDE)
        return _across(_within(columns)).reshape(rows, SIDE, -1).swapaxes(1, 2).reshape(rows, n)
    for number in reversed(range(SIDE.bit_length() - 1, n.bit_length() - 1)):
        x = level(x, number)
    return x


def _negated(x: Array, minus: Array) -> Array:
    """``-x`` where the highest bit of a word is set, by the sign bit of x."""
    bits = jnp.finfo(x.dtype).bits
    sign = minus.astype(f'uint{bits}') << (bits - 32)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, sign.dtype) ^ sign, x.dtype)


@word
def rotate(codec: Codec, block: int = 1024) -> Codec:
    r"""Applies ``codec`` to the randomly rotated tensor, and rotates back.

    .. math:: C(x) = D H\, C'(H D x)

    H is the Hadamard rotation of each run of ``block`` elements, D a diagonal matrix of random
    signs. The codec gets the blocks as samples of ``block`` elements; it gets no ids. A range per
    block is ``rotate(per_sample(uniform(4)))``.

    A large element is spread over its block. If there is one, `lloyd` and `trellis` leave the
    others an error of no more than their own size. Where there are more, as in a pretrained
    language model, the others of the block are lost: send the large ones apart first, by
    ``outliers(rotate(trellis(2)))``.

    Args:
      codec: codec of the rotated tensor.
      block: number of elements that are mixed, a power of two. The last block is padded with zeros,
        and the rotated padding is sent too: choose a block no larger than the tensor.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if ``block`` is out of range, or the context has no key.

    >>> import jaxmp
    >>> x, ctx = jnp.array([[8.0, 0, 0, 0, 0, 0, 0, 0]]), jaxmp.Ctx(jax.random.key(0))
    >>> C = rotate(jaxmp.fp16, block=8)
    >>> jnp.abs(C.decode(C.encode(x, ctx), jaxmp.like(x), ctx)).round(2).tolist()
    [[8.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]

    References:
      Distributed Mean Estimation with Limited Communication, arXiv 1611.00429.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f'rotate needs a codec, got {codec!r}; write rotate(polar(0.5))')
    if isinstance(block, bool) or not isinstance(block, int) or block not in BLOCKS:
        raise ValueError(f'rotate block {block!r} is not a power of two from 2 to 2**20')

    def flipped(x: Array, ctx: Ctx) -> Array:
        """Each element with a random sign: 32 signs are the bits of one random word."""
        words = -(-block // 32)  # drawn as one run, which XLA:CPU draws by vectors
        drawn = jax.random.bits(ctx.key_of('rotate'), (len(x) * words,), jnp.uint32)
        place = jnp.arange(min(block, 32), dtype=jnp.uint32)
        minus = drawn.reshape(len(x), words, 1) >> place << 31
        return _negated(x, minus.reshape(x.shape))

    def part(ctx: Ctx) -> Ctx:  # the signs are drawn from the key, so the codec gets another one
        return ctx.fold(1)._replace(ids=None, tokens=None, indices=None)

    def encode(x: Array, ctx: Ctx) -> Payload:
        flat = wide(x).reshape(-1)
        x = jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)
        x = _within(_across(flipped(x, ctx) * (1 / block), _level_of_elements))
        return codec.encode(_of_means(x), part(ctx))

    def rotated(m: Payload, rows: Like, ctx: Ctx) -> Array:
        if codec.levels is None or block > MOST_EXACT:
            return hadamard(codec.decode(m, rows, ctx))
        levels, scale = codec.levels(m, rows, ctx)
        most = jnp.finfo(rows.dtype).max
        return jnp.clip(_within(_across(levels)) * (scale * block**-0.5), -most, most)

    def decode(m: Payload, like: Like, ctx: Ctx) -> Array:
        rows = jax.ShapeDtypeStruct((-(-like.size // block), block), compute_dtype(like))
        x = flipped(rotated(m, rows, part(ctx)), ctx)
        return saturated(x.reshape(-1)[: like.size].reshape(like.shape), like.dtype)

    return Codec(encode, decode, needs=codec.needs | KEY)
