"""Uniform quantisers: k-bit codes on evenly spaced levels, sent together with their range.

`uniform` is that of the paper, with one range for the whole tensor. `max_scaled` is that of the
AQ-SGD authors, with one scale per feature. `block` has one range per run of `size` elements, so
that an outlier affects 64 elements instead of the whole tensor. A group (tensor, feature or block)
that holds NaN or an infinity has no range: it decodes to NaN throughout, which the trainer's check
of the loss detects.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt8

from jaxmp.codecs.exact import product, quotient
from jaxmp.codecs.extremes import largest, span
from jaxmp.wire import (
    KEY,
    Codec,
    Ctx,
    Like,
    Need,
    compute_dtype,
    elements,
    half_bytes,
    pack,
    unpack,
    wide,
)
from jaxmp.wire.words import check_whole, word

Rounding = Callable[[Array, int, Ctx], Array]


def nearest(x: Array, top: int, ctx: Ctx) -> Array:
    """Rounds ``x`` in ``[0, top]`` to the nearest integer, halves to even."""
    return jnp.round(x)


def stochastic(x: Array, top: int, ctx: Ctx) -> Array:
    """Rounds ``x`` in ``[0, top]`` up with probability ``x - floor(x)``: ``E[round(x)] = x``.

    Raises:
      ValueError: if the context has no key.
    """
    x = jnp.minimum(x, top)
    up = jnp.floor(x + jax.random.uniform(ctx.key_of('stochastic rounding'), x.shape, x.dtype))
    return jnp.minimum(up, jnp.ceil(x))  # x + 0.99999994 may round above the next integer


def check_bits(name: str, width: object, least: int, most: int = 8) -> None:
    """Raises ValueError unless ``width`` is an integer number of bits in ``[least, most]``."""
    kind = f'an integer from {least} to {most}; for 4 bits write {name}(4)'
    check_whole(f'{name} bits', width, kind, least, most)


def _name(part: object) -> str:
    return getattr(part, '__name__', type(part).__name__)


def check_rounding(name: str, rounding: object) -> None:
    """Raises TypeError unless ``rounding`` is a rounding function."""
    if rounding not in (nearest, stochastic):
        raise TypeError(f'{name} rounding must be nearest or stochastic, got {_name(rounding)}')


def _needs(rounding: Rounding) -> frozenset[Need]:
    return KEY if rounding is stochastic else frozenset()


def _to_unit(x: Array, lo: Array, hi: Array) -> Array:
    """``(x - lo) / (hi - lo)``, also where ``hi - lo`` exceeds the largest float."""
    # XLA divides by a scalar through its reciprocal, which is flushed to zero beyond 2**126.
    c = 1 / 16
    width = hi * c - lo * c
    return (x * c - lo * c) / jnp.where(width > 0, width, 1)


def _code(
    x: Array, lo: Array, hi: Array, levels: int, rounding: Rounding, ctx: Ctx
) -> UInt8[Array, '...']:
    return rounding(_to_unit(x, lo, hi) * levels, levels, ctx).astype(jnp.uint8)


def _steps(lo: Array, hi: Array, levels: int) -> tuple[Array, Array]:
    """A quarter of a step (``hi - lo`` may exceed the largest float), and its rounding error."""
    return quotient(hi / 4 - lo / 4, levels)


def _level(q: Array, levels: int, lo: Array, hi: Array, *steps: Array) -> Array:
    """Level ``q`` of ``0 .. levels``, computed from the nearer end; both ends are exact."""
    q = q.astype(jnp.int32)
    upper = q > levels // 2
    y = jnp.where(upper, hi, lo)
    quarters = (4 * jnp.where(upper, q - levels, q)).astype(lo.dtype)
    for step in steps:
        y = y + quarters * step
    return y


def _written(*rows: Array) -> Array:
    """The rows in one array; else XLA:CPU computes them again for each element that uses them."""
    out = jnp.zeros((len(rows), *rows[0].shape), rows[0].dtype)
    for i, row in enumerate(rows):
        out = out.at[i].set(row)
    return out


@word
def uniform(bits: int, rounding: Rounding = nearest) -> Codec:
    """k-bit min-max quantiser over the whole tensor.

    ``q = round((x - lo) / (hi - lo) * L)``, ``C(x) = lo + q / L * (hi - lo)``, ``L = 2**bits - 1``,
    ``lo, hi = min x, max x``. A constant tensor and the two ends of the range are exact. A sample's
    message thus depends on the others; `per_sample` and `per_token` make ranges of their own.

    Args:
      bits: 1 to 8.
      rounding: ``nearest`` (to even) or ``stochastic``.

    Raises:
      ValueError: if ``bits`` is out of range.

    >>> import jaxmp
    >>> C = uniform(2)
    >>> x = jnp.array([[0.0, 1.0, 2.2, 3.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).tolist()
    [[0.0, 1.0, 2.0, 3.0]]

    References:
      Activations and Gradients Compression for Model-Parallel Training, arXiv 2401.07788, 2.2.
    """
    check_bits('uniform', bits, 1)
    check_rounding('uniform', rounding)
    levels = 2**bits - 1

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(x).reshape(-1)
        ends = jnp.stack(span(x, 0))

        def code(run: Array, i: int) -> Array:
            return _code(run, ends[0], ends[1], levels, rounding, ctx.fold(i))

        return {'codes': pack(x, bits, code), 'ends': ends}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        lo, hi = m['ends']
        q = unpack(m['codes'], bits, like.size)
        y = _level(q, levels, lo, hi, *_steps(lo, hi, levels))
        return y.reshape(like.shape).astype(like.dtype)

    return Codec(encode, decode, needs=_needs(rounding))


@word
def max_scaled(bits: int) -> Codec:
    """Signed quantiser with one float16 scale per feature, as in the AQ-SGD authors' code.

    ``C(x) = q / 2**f * s`` with ``f = bits - 1``, ``s = max |x|`` over the batch and
    ``q = clip(round(x / (s + 1e-6) * 2**f), -2**f, 2**f - 1)``. ``s`` and the divisor are float16.

    Args:
      bits: 2 to 8.

    Raises:
      ValueError: if ``bits`` is out of range.

    References:
      Fine-tuning Language Models over Slow Networks using Activation Compression with Guarantees,
      arXiv 2206.01299.
    """
    check_bits('max_scaled', bits, 2)
    top = 2 ** (bits - 1)

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(x).reshape(len(x), -1)
        s = largest(x, 0)
        s = jnp.where(jnp.isfinite(s), jnp.minimum(s, 65504.0), jnp.nan).astype(jnp.float16)
        divisor = (s.astype(x.dtype) + 1e-6).astype(jnp.float16).astype(x.dtype)
        q = jnp.clip(jnp.round(x / divisor * top), -top, top - 1)
        return {
            'codes': pack((jnp.nan_to_num(q) + top).astype(jnp.uint8), bits),
            'scale': half_bytes(s),
        }

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        dtype = compute_dtype(like)
        s = jax.lax.bitcast_convert_type(m['scale'], jnp.float16).astype(dtype)
        q = unpack(m['codes'], bits, elements(like)).astype(dtype) - top
        return (q / top * s).reshape(like.shape).astype(like.dtype)

    return Codec(encode, decode, samples='compared')


@word
def block(bits: int, size: int = 64, rounding: Rounding = nearest) -> Codec:
    """k-bit min-max quantiser with a separate range per run of ``size`` elements.

    Each block is coded as by `uniform`. Its two ends are sent as float16, in units in which the
    largest magnitude of the tensor, sent as one float32, is 2**15. They add ``32 / size`` bits per
    element. Their error is at most 2**-11 of themselves, or 2**-40 of that magnitude. An element
    beyond a rounded end is sent as that end.

    Args:
      bits: 1 to 8.
      size: 32, 64 or 128 elements.
      rounding: ``nearest`` or ``stochastic`` (which draws from the crossing's key).

    Raises:
      ValueError: if ``bits`` or ``size`` is out of range.
    """
    check_bits('block', bits, 1)
    check_rounding('block', rounding)
    if not isinstance(size, int) or size not in (32, 64, 128):
        raise ValueError(f'block size {size} is not 32, 64 or 128; write block(4, size=64)')
    levels = 2**bits - 1

    def ends_of(m: dict[str, Array], dtype: jnp.dtype) -> tuple[Array, ...]:
        ends = jax.lax.bitcast_convert_type(m['ends'], jnp.float16).astype(dtype)
        return tuple(product(ends, m['scale'].astype(dtype)))

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        flat = wide(x).reshape(-1)
        if short := -flat.size % size:
            flat = jnp.pad(flat, (0, short), mode='edge')
        x = flat.reshape(-1, size)
        lo, hi = span(x, 1)
        scale = jnp.max(jnp.nan_to_num(jnp.maximum(-lo, hi))) * 2**-15
        ends = jnp.stack([lo, hi]) / jnp.where(scale > 0, scale, 1)
        m = {'ends': half_bytes(ends.astype(jnp.float16)), 'scale': scale.astype(jnp.float32)}
        # The ends as the receiver reads them: rounded, so that an element may lie beyond one.
        lo, hi = (end[:, None] for end in ends_of(m, x.dtype))
        q = _code(jnp.clip(x, lo, hi), lo, hi, levels, rounding, ctx)
        return m | {'codes': pack(q, bits)}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        q = unpack(m['codes'], bits, size)
        lo, hi = ends_of(m, compute_dtype(like))
        ends = _written(lo, hi, *_steps(lo, hi, levels))
        x = _level(q, levels, *ends[:, :, None])
        return x.reshape(-1)[: like.size].reshape(like.shape).astype(like.dtype)

    return Codec(encode, decode, needs=_needs(rounding))
