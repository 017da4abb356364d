"""Quantiser on a geometric scale: neighbouring levels have a constant ratio, not a distance."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.extremes import magnitudes
from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, elements, pack, samples, unpack, wide
from jaxmp.wire.words import word


def _geometric(a: Array, ratio: Array, n: Array, digits: int) -> Array:
    """``a ratio**n`` for integers n of ``digits`` bits, by products, which round alike everywhere.

    The highest power could leave the range of floats, so it is applied as two factors.
    """
    for i in range(digits):
        factor = jnp.where(n >> i & 1, ratio, 1)
        a = a * factor * (factor if i == digits - 1 else 1)
        ratio = ratio * ratio if i < digits - 2 else ratio
    return a


@word
def log_scale(bits: int) -> Codec:
    """Sign and ``bits - 1`` bits of magnitude, on a geometric scale over each sample's non-zeros.

    With ``L = 2**(bits - 1) - 1`` levels and ``a = |x|``:
    ``q = 0`` if ``a = 0``, else ``1 + round((L - 1) log(a / lo) / log(hi / lo))``;
    ``C(x) = sign(x) lo (hi / lo)**((q - 1) / (L - 1))``. ``lo`` and ``hi`` are the smallest and the
    largest non-zero ``a`` of the sample; with ``L = 1`` the only level is ``sqrt(lo hi)``. Zeros
    are exact. Numbers below the smallest normal number count as zeros. If a sample holds NaN or an
    infinity, its non-zeros decode to NaN. ``lo`` and the ratio of two neighbouring levels are sent
    as float32, and the receiver computes the levels by products.

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
        x = wide(samples(x))
        a, tiny = jnp.abs(x), jnp.finfo(x.dtype).tiny
        some = ~(a < tiny)
        ends = jnp.stack(magnitudes(x, 1), 1)
        hi = ends[:, 1:]
        ends = jnp.where(jnp.isfinite(hi), jnp.log(ends), jnp.nan)
        ends = jnp.where(hi < tiny, 0, ends)
        lo, width = ends[:, :1], ends[:, 1:] - ends[:, :1]
        # q - 1 is steps (log a - log lo) / (log hi - log lo), rounded.
        scale = steps / jnp.where(width > 0, width, 1)
        q = 1 + jnp.round((jnp.log(jnp.where(some, a, 1)) - lo) * scale)
        codes = jnp.where(some, jnp.clip(jnp.nan_to_num(q), 1, steps + 1), 0)
        codes = codes + jnp.where(x < 0, sign_bit, 0)
        levels = lo if steps else lo + width / 2, width / max(steps, 1)
        scale = jnp.exp(jnp.concatenate(levels, 1))
        return {'codes': pack(codes.astype(jnp.uint8), bits), 'scale': scale}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        codes = unpack(m['codes'], bits, elements(like))
        a, ratio = m['scale'][:, :1], m['scale'][:, 1:]
        q = codes & (sign_bit - 1)
        a = jnp.minimum(_geometric(a, ratio, q - 1, bits - 1), jnp.finfo(a.dtype).max)
        a = jnp.where(q == 0, 0, a)
        return jnp.where(codes >= sign_bit, -a, a).reshape(like.shape).astype(like.dtype)

    return Codec(encode, decode, samples='alone')
