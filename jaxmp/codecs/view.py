"""`per_token` and `per_chunk`: a codec applied to each token or run instead of each sample.

The two differ in the length of the rows into which a tensor is cut; the codec gets the rows as its
samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.wire import Codec, Ctx, Like, compute_dtype
from jaxmp.words import check_whole, word


def _in_rows(codec: Codec, length: Callable[[Array | Like], int]) -> Codec:
    """``codec`` of the flattened tensor in rows of a length; the last row is padded with zeros."""

    def rows(like: Array | Like) -> Like:
        n = length(like)
        return jax.ShapeDtypeStruct((-(-like.size // n), n), like.dtype)

    def cut(x: Array) -> Array:
        compute_dtype(x)
        to = rows(x)
        return jnp.pad(x.reshape(-1), (0, to.size - x.size)).reshape(to.shape)

    def joined(y: Array, like: Array | Like) -> Array:
        return y.reshape(-1)[: like.size].reshape(like.shape)

    def encode(x: Array, ctx: Ctx) -> Any:
        return codec.encode(cut(x), ctx._replace(ids=None, tokens=None))

    def decode(m: Any, like: Like, ctx: Ctx) -> Array:
        return joined(codec.decode(m, rows(like), ctx._replace(ids=None, tokens=None)), like)

    def support(m: Any, like: Like, ctx: Ctx) -> Array | None:
        return codec.indices(m, rows(like), ctx._replace(ids=None, tokens=None))

    halves = None
    if codec.halves is not None:
        half, whole = codec.halves
        halves = lambda x: joined(half(cut(x)), x), _in_rows(whole, length)
    return Codec(encode, decode, support, halves=halves)


@word
def per_token(codec: Codec) -> Codec:
    """Applies ``codec`` to each vector along the last axis separately.

    A tensor ``(B, ..., C)`` is coded as ``B ...`` samples of C elements. TopK then keeps the same
    number of elements per token; the paper's TopK chooses among all tokens of a sample.

    Args:
      codec: codec of the ``(B ..., C)`` tensor; it gets no ids.

    Raises:
      TypeError: if ``codec`` is not a codec.

    >>> import jax.numpy as jnp, jaxmp
    >>> x = jnp.array([[[1.0, 9.0], [3.0, -2.0]]])
    >>> c = jaxmp.per_token(jaxmp.top_k(0.5))
    >>> c.decode(c.encode(x, jaxmp.Ctx()), x, jaxmp.Ctx()).tolist()
    [[[0.0, 9.0], [3.0, 0.0]]]
    """
    if not isinstance(codec, Codec):
        raise TypeError(f'per_token needs a codec, got {codec!r}; write per_token(top_k(0.1))')
    return _in_rows(codec, lambda like: like.shape[-1])


@word
def per_chunk(codec: Codec, size: int) -> Codec:
    """Applies ``codec`` to each run of ``size`` elements of the flattened tensor separately.

    A tensor of n elements is coded as ``ceil(n / size)`` samples; the last is padded with zeros,
    which are sent too. A tensor of fewer than ``size`` elements is one sample, without padding.
    One scale serves a chunk, and positions within it are short: 64 of 4096 elements, as SparseLoCo
    sends them, take ``per_chunk(top_k(0.015625, values=k_means(2), indices=elias_fano), 4096)``,
    10.5 bits per element that is sent.

    Args:
      codec: codec of the ``(chunks, size)`` tensor; it gets no ids.
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
    if not isinstance(codec, Codec):
        raise TypeError(
            f'per_chunk needs a codec, got {codec!r}; write per_chunk(top_k(0.1), 4096)'
        )
    check_whole('per_chunk size', size, 'a positive integer, such as 4096')
    return _in_rows(codec, lambda like: min(size, like.size))
