"""`dct`: a codec of the cosine coefficients of each run of elements."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.exact import product
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, wide
from jaxmp.wire.words import word

SIZES = [2**n for n in range(1, 13)]
BITS = 11  # of a factor, so that `product` is exact
ROOM = 2.0**16


def _times(x: Array, factors: tuple[float, ...]) -> Array:
    """``x`` times constants of 22 bits, rounded alike in every program."""
    m, e = np.frexp(np.array(factors))
    high = np.ldexp(np.round(np.ldexp(m, BITS)), e - BITS)
    m, e = np.frexp(np.array(factors) - high)
    low = np.ldexp(np.round(np.ldexp(m, BITS)), e - BITS)
    return product(jnp.asarray(high, x.dtype), x) + product(jnp.asarray(low, x.dtype), x)


@functools.cache
def _secants(n: int) -> tuple[float, ...]:
    return tuple(0.5 / math.cos((i + 0.5) * math.pi / n) for i in range(n // 2))


@functools.cache
def _norms(n: int) -> tuple[float, ...]:
    return (math.sqrt(1 / n), *[math.sqrt(2 / n)] * (n - 1))


def _forward(x: Array) -> Array:
    n = x.shape[-1]
    if n == 1:
        return x
    a, b = x[..., : n // 2], x[..., : n // 2 - 1 : -1]
    halves = _forward(jnp.stack([a + b, _times(a - b, _secants(n))], -2))  # one call for both
    even, odd = halves[..., 0, :], halves[..., 1, :]
    odd = odd + _shifted(odd, -1)
    return jnp.stack([even, odd], -1).reshape(x.shape)


def _backward(y: Array) -> Array:
    n = y.shape[-1]
    if n == 1:
        return y
    even, odd = y[..., ::2], y[..., 1::2]
    halves = _backward(jnp.stack([even, odd + _shifted(odd, 1)], -2))
    a, b = halves[..., 0, :], _times(halves[..., 1, :], _secants(n))
    return jnp.concatenate([a + b, (a - b)[..., ::-1]], -1)


def _shifted(x: Array, by: int) -> Array:
    """``x`` moved along its last axis, with a zero where nothing comes."""
    zero = jnp.zeros_like(x[..., :1])
    return jnp.concatenate([x[..., 1:], zero] if by < 0 else [zero, x[..., :-1]], -1)


def _in_range(f: Callable[[Array], Array], x: Array) -> Array:
    """A linear function computed on smaller numbers, so that sums of finite values stay finite."""
    y, most = f(x / ROOM), float(jnp.finfo(x.dtype).max) / ROOM
    return jnp.where(jnp.isfinite(y), jnp.clip(y, -most, most), jnp.nan) * ROOM


def cosines(x: Float[Array, '... n']) -> Float[Array, '... n']:
    """The orthonormal DCT-II along the last axis, of a power of two, by sums of two terms.

    >>> cosines(jnp.ones(4)).round(5).tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    return _in_range(lambda x: _times(_forward(x), _norms(x.shape[-1])), x)


def of_cosines(y: Float[Array, '... n']) -> Float[Array, '... n']:
    """Inverse of `cosines`, which is its transpose."""
    return _in_range(lambda y: _backward(_times(y, _norms(y.shape[-1]))), y)


@word
def dct(codec: Codec, size: int = 64) -> Codec:
    r"""Applies ``codec`` to the cosine transform of each run of ``size`` elements.

    .. math:: C(x) = D^T\, C'(D x),\quad
              D_{kj} = \sqrt{2 / n}\, \cos\frac{\pi k (2 j + 1)}{2 n},\quad D_{0j} = \sqrt{1 / n}

    The runs are of the flattened tensor, the last one padded with zeros; the codec gets them as
    samples of n = ``size`` elements, without ids. TopK among the coefficients of several runs is
    ``dct(per_chunk(top_k(0.0078125), 4096), 64)``.

    Args:
      codec: codec of the coefficients.
      size: the number n of elements per run, a power of two up to 4096.

    Raises:
      TypeError: if ``codec`` is not a codec.
      ValueError: if ``size`` is out of range.

    >>> import jaxmp
    >>> x = jnp.array([[1.0, 1.1, 1.2, 1.3]])
    >>> C = dct(jaxmp.top_k(0.25), 4)
    >>> print(C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).round(2))
    [[1.15 1.15 1.15 1.15]]

    References:
      DeMo: Decoupled Momentum Optimization, arXiv 2411.19870.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f'dct needs a codec, got {codec!r}; write dct(top_k(0.1), 64)')
    if isinstance(size, bool) or not isinstance(size, int) or size not in SIZES:
        raise ValueError(f'dct size {size!r} is not a power of two from 2 to 4096')
    part = lambda ctx: ctx._replace(ids=None, tokens=None, indices=None)

    def encode(x: Array, ctx: Ctx) -> Payload:
        flat = wide(x).reshape(-1)
        x = jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)
        return codec.encode(cosines(x), part(ctx))

    def decode(m: Payload, like: Like, ctx: Ctx) -> Array:
        rows = jax.ShapeDtypeStruct((-(-like.size // size), size), compute_dtype(like))
        y = of_cosines(codec.decode(m, rows, part(ctx)))
        return saturated(y.reshape(-1)[: like.size].reshape(like.shape), like.dtype)

    return Codec(encode, decode, needs=codec.needs)
