"""Positions of a tensor: squares of an image, or runs of a text, each as a row of numbers.

A rule that learns what the numbers of a position have in common (`jaxmp.feedback.klt`) sees a
tensor as these rows.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.codecs.lloyd import scale_of, scale_words, unit_rms
from jaxmp.wire import Like, wide


def normed(x: Array) -> tuple[Array, dict[str, Array]]:
    """The samples divided by their RMS, and the RMS as it is sent; zeros stay zeros."""
    x = wide(x)
    flat = x.reshape(len(x), -1)
    unit, rms = unit_rms(flat)
    some = jnp.any(flat != 0, 1, keepdims=True).astype(x.dtype)  # of zeros the RMS would be 1
    words = scale_words(rms * some, jnp.ones_like(rms), unit, rms)
    s = scale_of(words, Like(x.shape, x.dtype)).reshape(-1, *[1] * (x.ndim - 1))
    return x / jnp.where(s > 0, s, 1), {'norm': words}


def positions(x: Array, patch: int) -> Float[Array, 'P C']:
    """The patches of all samples, each as a row."""
    middle = x.shape[1:-1]
    if patch > 1 and (not middle or any(n % patch for n in middle)):
        raise ValueError(
            f'klt patch {patch} does not divide the axes {middle} between samples and channels of '
            f'a tensor {x.shape}; take one that divides them, or 1'
        )
    split = x.reshape(-1, *(k for n in middle for k in (n // patch, patch)), x.shape[-1])
    count = len(middle)
    order = (0, *range(1, 2 * count, 2), *range(2, 2 * count + 1, 2), 2 * count + 1)
    return wide(split).transpose(order).reshape(-1, patch**count * x.shape[-1])


def joined(rows: Array, shape: tuple[int, ...], patch: int) -> Array:
    """The tensor of the rows of `positions`."""
    middle = shape[1:-1]
    split = (shape[0], *(n // patch for n in middle), *(patch,) * len(middle), shape[-1])
    count = len(middle)
    order = (0, *(k for i in range(count) for k in (1 + i, 1 + count + i)), 2 * count + 1)
    return rows.reshape(split).transpose(order).reshape(shape)
