"""Smallest and largest element of a group, the range of a quantiser; NaN if an element is NaN.

`jnp.max` of floats is not sufficient: XLA:CPU reduces a row of more than about 2,000 elements in
pieces and then ignores NaN. The functions here compare magnitudes as integers: bit patterns have
the order of magnitudes, with NaN above infinity. One pass finds both extremes, where `jnp.min` and
`jnp.max` take two. The functions are jitted, because JAX would otherwise compile a reduction by a
Python function again at every eager call. (`qsgd` and `polar` use `jnp.max` and detect NaN by a sum
of the same numbers.)
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array


@partial(jax.jit, static_argnums=1, inline=True)
def span(x: Array, axis: int) -> tuple[Array, Array]:
    """Smallest and largest element along ``axis``; both are NaN where either is not finite."""
    lo, hi = _ends(x, x, axis, (-jnp.inf, jnp.inf))
    finite = jnp.isfinite(lo) & jnp.isfinite(hi)
    return jnp.where(finite, lo, jnp.nan), jnp.where(finite, hi, jnp.nan)


def largest(x: Array, axis: int) -> Array:
    """The largest magnitude along ``axis``; NaN if there is one.

    >>> largest(jnp.array([[1.0, jnp.nan, -3.0], [1.0, -jnp.inf, 3.0]]), 1).tolist()
    [nan, inf]
    """
    return _floats(jnp.max(_words(x), axis), x)


@partial(jax.jit, static_argnums=1, inline=True)
def magnitudes(x: Array, axis: int) -> tuple[Array, Array]:
    """Smallest and largest magnitude of the normal numbers along an axis.

    Without a normal number the smallest is infinite, and the largest is below every normal number.
    """
    words = _words(x)
    normal, inf = (_words(jnp.array(v, x.dtype)) for v in (jnp.finfo(x.dtype).tiny, jnp.inf))
    bounds = jnp.iinfo(words.dtype)
    lo, hi = _ends(jnp.where(words < normal, inf, words), words, axis, (bounds.min, bounds.max))
    return _floats(lo, x), _floats(hi, x)


def _ends(low: Array, high: Array, axis: int, bounds: tuple) -> tuple[Array, Array]:
    least, most = (jnp.array(b, low.dtype) for b in bounds)
    ends = lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))
    return jax.lax.reduce((low, high), (most, least), ends, (axis,))


def _words(x: Array) -> Array:
    return jax.lax.bitcast_convert_type(jnp.abs(x), f'int{8 * x.dtype.itemsize}')


def _floats(words: Array, x: Array) -> Array:
    return jax.lax.bitcast_convert_type(words, x.dtype)
