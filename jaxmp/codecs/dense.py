"""Every element sent, in its own or in a 16-bit float format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.wire import Codec, Ctx, Like, half_bytes


def _encode_raw(x: Array, ctx: Ctx) -> Array:
    del ctx
    return x


def _decode_raw(m: Array, like: Like, ctx: Ctx) -> Array:
    del ctx
    return m.astype(like.dtype)


def _sixteen(dtype: jnp.dtype, largest: float | None) -> Codec:
    def encode(x: Array, ctx: Ctx) -> Array:
        del ctx
        if largest is not None:
            x = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
        return half_bytes(x.astype(dtype))

    def decode(m: Array, like: Like, ctx: Ctx) -> Array:
        del ctx
        return jax.lax.bitcast_convert_type(m, dtype).astype(like.dtype)

    return Codec(encode, decode)


raw = Codec(_encode_raw, _decode_raw)
"""The tensor itself, in its own dtype: ``C(x) = x``."""

fp16 = _sixteen(jnp.float16, 65504.0)
"""IEEE half precision, rounded to nearest even; finite values beyond 65504 saturate."""

bf16 = _sixteen(jnp.bfloat16, None)
"""bfloat16, rounded to nearest even: float32's range with 8 bits of precision."""
