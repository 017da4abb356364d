"""Arithmetic with the same bits in every program and on every CPU.

Sender and receiver decode a message in two programs, perhaps on two kinds of CPU. A feedback rule
keeps equal buffers at both ends only if both programs decode to equal bits. An IEEE operation
rounds in the same way everywhere, but the compiler chooses the operations: it may fuse a product
with the sum after it (FMA), which rounds once instead of twice; it computes exp and log by
polynomials of its own; and it chooses the order of a long sum. A decoder is exact if it avoids all
three: a product that feeds a sum has few enough bits to need no rounding, a product that rounds
feeds no sum, and every sum has two terms. (One exception: a product below the smallest normal
number, 1.2e-38, is flushed to zero, but not inside an FMA.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def short(x: Array, bits: int) -> Array:
    """``x`` cut to ``bits`` significant bits, so that its products with short numbers are exact.

    >>> float(short(jnp.float32(1.999), 2) * 2)
    3.0
    """
    info = jnp.finfo(x.dtype)
    words = jax.lax.bitcast_convert_type(x, f'int{info.bits}')
    return jax.lax.bitcast_convert_type(words & -(2 ** (info.nmant + 1 - bits)), x.dtype)


def product(a: Array, b: Array) -> Array:
    """``a b``, rounded also where a sum follows; ``a`` has at most 11 significant bits."""
    high = short(b, jnp.finfo(b.dtype).nmant - 10)
    return a * high + a * (b - high)


def quotient(x: Array, divisor: int) -> tuple[Array, Array]:
    """``x / divisor`` as a sum of two numbers whose products with integers below 256 are exact.

    Args:
      x: any floats.
      divisor: an integer from 1 to 255.
    """
    bits = jnp.finfo(x.dtype).nmant - 7
    coarse = short(x / divisor, bits)
    return coarse, short((x - coarse * divisor) / divisor, bits)
