"""`rotate`: a random rotation around another codec, which makes heavy tails nearly normal.

A Hadamard matrix mixes all elements of a block with equal weights. A rotated element is therefore a
sum of many elements and nearly normal, whatever the distribution in the block. Random signs, which
both ends draw from the crossing's key, keep structured data from aligning with a row of the matrix.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.wire import KEY, Codec, Ctx, Like, compute_dtype, wide
from jaxmp.words import word

BLOCKS = [2**n for n in range(1, 21)]


def hadamard(x: Float[Array, 'rows n']) -> Float[Array, 'rows n']:
    """Each row times the Hadamard matrix divided by ``sqrt(n)``: a rotation, its own inverse.

    >>> hadamard(jnp.array([[2.0, 0.0, 0.0, 0.0]])).tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """
    rows, n = x.shape
    for level in range(n.bit_length() - 1):  # sums of two terms have the same bits on every CPU
        halves = (x / 2).reshape(rows, -1, 2, 2**level)  # means, so that finite values stay finite
        a, b = halves[:, :, 0], halves[:, :, 1]
        x = jnp.stack([a + b, a - b], 2).reshape(rows, n)
    scaled = x * np.sqrt(n).astype(x.dtype)
    largest = jnp.finfo(x.dtype).max
    return jnp.where(jnp.isfinite(x), jnp.clip(scaled, -largest, largest), jnp.nan)


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

    def signs(rows: int, ctx: Ctx) -> Array:
        return jax.random.rademacher(ctx.key_of('rotate'), (rows, block), jnp.float32)

    def part(ctx: Ctx) -> Ctx:  # the signs are drawn from the key, so the codec gets another one
        return ctx.fold(1)._replace(ids=None, tokens=None, indices=None)

    def encode(x: Array, ctx: Ctx) -> Any:
        flat = wide(x).reshape(-1)
        x = jnp.pad(flat, (0, -flat.size % block)).reshape(-1, block)
        return codec.encode(hadamard(x * signs(len(x), ctx).astype(x.dtype)), part(ctx))

    def decode(m: Any, like: Like, ctx: Ctx) -> Array:
        dtype = compute_dtype(like)
        rows = jax.ShapeDtypeStruct((-(-like.size // block), block), dtype)
        x = hadamard(codec.decode(m, rows, part(ctx))) * signs(rows.shape[0], ctx).astype(dtype)
        return saturated(x.reshape(-1)[: like.size].reshape(like.shape), like.dtype)

    return Codec(encode, decode, needs=codec.needs | KEY)
