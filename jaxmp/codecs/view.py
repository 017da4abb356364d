"""Which elements a codec sees as one sample."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from jaxmp.wire import Codec, Ctx, Like, compute_dtype
from jaxmp.words import word


@word
def per_token(codec: Codec) -> Codec:
    """Applies ``codec`` to every vector along the last axis by itself.

    A tensor ``(B, ..., C)`` is coded as one of ``B ...`` samples of C elements: TopK then keeps the
    same number in every token. The paper's TopK is per sample, over all its tokens.

    Args:
      codec: what codes the ``(B ..., C)`` tensor; it gets no ids.

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

    def rows(like: Like) -> Like:
        return jax.ShapeDtypeStruct((like.size // like.shape[-1], like.shape[-1]), like.dtype)

    def encode(x: Array, ctx: Ctx) -> Any:
        compute_dtype(x)
        return codec.encode(x.reshape(-1, x.shape[-1]), ctx._replace(ids=None))

    def decode(m: Any, like: Like, ctx: Ctx) -> Array:
        return codec.decode(m, rows(like), ctx._replace(ids=None)).reshape(like.shape)

    def support(m: Any, like: Like, ctx: Ctx) -> Array | None:
        return codec.support(m, rows(like), ctx._replace(ids=None))

    def halves() -> Any:
        half, whole = codec.halves or (None, None)
        if half is None or whole is None:
            return None
        return lambda x: half(x.reshape(-1, x.shape[-1])).reshape(x.shape), per_token(whole)

    return Codec(encode, decode, support, halves=halves())
