"""Arithmetic with the same bits in every program and on every CPU.

Sender and receiver decode a message in two programs, perhaps on two kinds of CPU, and a feedback
rule that both follow must not let them drift apart. IEEE operations round alike everywhere; what
differs is which operations a compiler chooses. It may fuse a product with the sum after it (FMA),
which rounds once instead of twice; exp and log are polynomials of the compiler's; the order of a
long sum is its own. A decoder is exact if it has none of that: a product that feeds a sum has few
enough bits to need no rounding, a product that rounds feeds no sum, and sums are of two. (Numbers
below the smallest normal one, 1.2e-38, are excepted: a product is flushed to zero, and inside an
FMA it is not.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array


def short(x: Array, bits: int) -> Array:
    """``x`` without its last significant bits, so that products with so short a number are exact.

    >>> float(short(jnp.float32(1.999), 2) * 2)
    3.0
    """
    info = jnp.finfo(x.dtype)
    words = jax.lax.bitcast_convert_type(x, f'int{info.bits}')
    return jax.lax.bitcast_convert_type(words & -(2 ** (info.nmant + 1 - bits)), x.dtype)


def product(a: Array, b: Array) -> Array:
    """``a b``, rounded even where a sum follows; a of float16's precision, 11 bits."""
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
