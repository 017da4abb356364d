"""Dense codecs: every element is sent, in its own format or in a 16-bit float format."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jaxmp.wire import Codec, Ctx, Like, half_bytes, wide
from jaxmp.wire.words import named


def _encode_raw(x: Array, ctx: Ctx) -> Array:
    return x


def _decode_raw(m: Array, like: Like, ctx: Ctx) -> Array:
    return m.astype(like.dtype)


def saturated(x: Array, dtype: DTypeLike) -> Array:
    """``x`` in ``dtype``; finite values beyond its largest number become that number."""
    x = x.astype(jnp.promote_types(jnp.promote_types(x.dtype, dtype), jnp.float32))
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x).astype(dtype)


def _sixteen(dtype: DTypeLike) -> Codec:
    def encode(x: Array, ctx: Ctx) -> Array:
        return half_bytes(saturated(wide(x), dtype))

    def decode(m: Array, like: Like, ctx: Ctx) -> Array:
        return saturated(jax.lax.bitcast_convert_type(m, dtype), like.dtype)

    def view(dtype: DTypeLike) -> Callable[[PyTree], PyTree]:
        return lambda m: jax.tree.map(lambda a: jax.lax.bitcast_convert_type(a, dtype), m)

    return Codec(encode, decode, additive=(view(dtype), view(jnp.uint16)), samples='alone')


_same = lambda m: m
raw = named('raw', Codec(_encode_raw, _decode_raw, additive=(_same, _same), samples='alone'))
"""The tensor itself, in its own dtype: ``C(x) = x``."""

fp16 = named('fp16', _sixteen(jnp.float16))
"""IEEE half precision, rounded to nearest even; finite values beyond 65504 saturate."""

bf16 = named('bf16', _sixteen(jnp.bfloat16))
"""bfloat16, rounded to nearest even: float32's range with 8 bits of precision.

Finite values beyond 3.39e38, its largest number, saturate."""
