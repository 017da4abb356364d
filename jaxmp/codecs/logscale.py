"""Sign and magnitude on a geometric scale: equal relative, not absolute, steps."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, pack, samples, unpack
from jaxmp.words import word


@word
def log_scale(bits: int) -> Codec:
    """Sign and ``bits - 1`` bits of magnitude between a sample's smallest and largest non-zero.

    With ``L = 2**(bits - 1) - 1`` levels and ``a = |x|``:
    ``q = 0`` if ``a = 0``, else ``1 + round((L - 1) log(a / lo) / log(hi / lo))``;
    ``C(x) = sign(x) lo (hi / lo)**((q - 1) / (L - 1))``; with ``L = 1`` the level is
    ``sqrt(lo hi)``. Zeros stay exact; numbers below the smallest normal count as zeros; a
    sample that holds NaN or an infinity has NaN for its non-zeros.

    Args:
      bits: 2 to 8.

    Raises:
      ValueError: if ``bits`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C = log_scale(3)
    >>> x = jnp.array([[0.0, 1.0, -9.0, 110.0, 100.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).round(1).tolist()
    [[0.0, 1.0, -10.5, 110.0, 110.0]]
    """
    check_bits('log_scale', bits, 2)
    steps = 2 ** (bits - 1) - 2
    sign_bit = 2 ** (bits - 1)

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        del ctx
        x = samples(x).astype(jnp.promote_types(x.dtype, jnp.float32))
        a = jnp.abs(x)
        some = ~(a < jnp.finfo(x.dtype).tiny)
        hi = jnp.max(a, axis=1, keepdims=True)
        lo = jnp.min(jnp.where(some, a, jnp.inf), axis=1, keepdims=True)
        ends = jnp.log(jnp.concatenate([lo, hi], 1))
        ends = jnp.where(jnp.isfinite(hi), ends, jnp.nan)
        ends = jnp.where(jnp.any(some, axis=1)[:, None], ends, 0)
        lo, width = ends[:, :1], ends[:, 1:] - ends[:, :1]
        scale = steps / jnp.where(width > 0, width, 1)
        q = 1 + jnp.round((jnp.log(jnp.where(some, a, 1)) - lo) * scale)
        codes = jnp.where(some, jnp.clip(jnp.nan_to_num(q), 1, steps + 1), 0)
        codes = codes + jnp.where(x < 0, sign_bit, 0)
        return {'codes': pack(codes.astype(jnp.uint8), bits), 'ends': ends}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        del ctx
        codes = unpack(m['codes'], bits, math.prod(like.shape[1:]))
        lo, hi = m['ends'][:, :1], m['ends'][:, 1:]
        q = (codes & (sign_bit - 1)).astype(lo.dtype)
        t = (q - 1) / steps if steps else jnp.full_like(q, 0.5)
        a = jnp.minimum(jnp.exp(lo * (1 - t) + hi * t), jnp.finfo(lo.dtype).max)
        a = jnp.where(q == 0, 0, a)
        return jnp.where(codes >= sign_bit, -a, a).reshape(like.shape).astype(like.dtype)

    return Codec(encode, decode)
