"""Heavy elements: what a tensor's few heavy tokens and channels are, and what is left without them.

In a pretrained language model the first token of a sequence has up to 140 times the norm of the
others, and a few channels have most of what is left (massive activations, attention sinks). One
scale for such a tensor leaves nothing of the other elements. `taken` sends the heavy ones apart.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.codecs.dense import bf16, saturated
from jaxmp.codecs.extremes import largest
from jaxmp.codecs.lloyd import RUNS, unit_rms
from jaxmp.codecs.microscaling import BIAS, exponent, power
from jaxmp.codecs.view import each
from jaxmp.wire import Codec, Ctx, Like, Payload, compute_dtype, like, samples, wide


class Heavy(NamedTuple):
    """What is sent apart.

    Attributes:
      tokens: heavy tokens per sample; at most half of its tokens are heavy.
      channels: heavy channels per sample; at most half of its channels are heavy.
      scaled: whether what is left of a token is divided by a power of two near its RMS.
      values: codec of the heavy tokens and channels.
    """

    tokens: int
    channels: int
    scaled: bool
    values: Codec


def _rows(x: Array) -> Float[Array, 'B T C']:
    """The tokens of each sample: the vectors along the last axis."""
    samples(x)
    return wide(x).reshape(len(x), -1, x.shape[-1])


def _sizes(x: Array | Like, of: Heavy) -> tuple[int, int, int, int, int]:
    """Samples, tokens, channels; heavy tokens and heavy channels."""
    count, channels = x.shape[0], x.shape[-1]
    tokens = x.size // (count * channels)
    return count, tokens, channels, min(of.tokens, tokens // 2), min(of.channels, channels // 2)


def _put(rows: Array, places: Int[Array, 'B K'], values: Array) -> Array:
    """The rows of each sample with those at some places replaced."""
    return jax.vmap(lambda r, a, v: r.at[a].set(v, unique_indices=True))(rows, places, values)


def _with_columns(rows: Array, places: Int[Array, 'B K'], values: Float[Array, 'B K T']) -> Array:
    """The rows with some of their columns replaced."""
    put = lambda r, a, v: r.at[:, a].set(v, unique_indices=True)
    return jax.vmap(put)(rows, places, values.swapaxes(1, 2))


def _gathered(rows: Array, places: Int[Array, 'B K']) -> Array:
    return jnp.take_along_axis(rows, places[:, :, None], 1)


def _words(places: Array, below: int) -> Array:
    return places.astype(jnp.uint16 if below <= 2**16 else jnp.uint32)


def _heaviest(x: Float[Array, 'B T C'], tokens: int, channels: int) -> tuple[Array, Array]:
    """The tokens with the largest magnitudes, and the channels with the largest mean magnitude.

    A token that holds NaN is among the first.
    """
    width = x.shape[2] // RUNS  # runs side by side: XLA:CPU takes a row one by one
    runs = [jnp.abs(x[..., i * width : (i + 1) * width]) for i in range(RUNS)] * (width > 0)
    rest = x[..., RUNS * width :]
    most = jnp.concatenate([functools.reduce(jnp.maximum, runs), rest], 2) if runs else rest
    heaviest = jax.lax.top_k(largest(most, 2), tokens)[1]
    mean = jnp.sum(jnp.abs(x) * (1 / x.shape[1]), 1)
    return heaviest, jax.lax.top_k(jnp.where(jnp.isnan(mean), jnp.inf, mean), channels)[1]


def _scaled(rest: Float[Array, 'B T C']) -> tuple[Array, Array]:
    """What is left over a power of two near the RMS of each token, and its exponent in 8 bits.

    The codec of the rest errs alike at all tokens, so a token of zeros gets the least power. So
    does one whose RMS is no normal number, which is sent as zeros: it has no size to be read.
    """
    least = jnp.finfo(rest.dtype).tiny * np.sqrt(rest.shape[2])
    rest = jnp.where(largest(rest, 2)[..., None] < least, 0, rest)
    rms = jnp.prod(jnp.stack(unit_rms(rest.reshape(-1, rest.shape[2]))), 0)
    rms = jnp.where(jnp.isfinite(rms), rms, 1).reshape(rest.shape[:2])
    rms = jnp.where(jnp.any(rest != 0, 2), rms, 0)
    e = jnp.clip(exponent(rms), 1 - BIAS, BIAS - 1)
    return rest * (1 / power(e, rest.dtype)[..., None]), (e + BIAS).astype(jnp.uint8)


def taken(x: Array, of: Heavy, ctx: Ctx) -> tuple[dict[str, Payload], Array]:
    """The message of the heavy elements, and what is left, of the shape of ``x``.

    A heavy channel is left as zeros, and a heavy token as the mean of the others, which costs the
    codec of the rest least; the receiver replaces both. What is not finite is left so, for a rule
    must not remember anything of such a message.
    """
    rows = _rows(x)
    _, count, width, t, c = _sizes(x, of)
    tokens, channels = _heaviest(rows, t, c)
    whole = _gathered(rows, tokens)
    columns = jnp.take_along_axis(rows, channels[:, None], 2).swapaxes(1, 2)
    message: dict[str, Payload] = {}
    values = each(of.values)
    if c:
        message |= {'channels': _words(channels, width)}
        message |= {'columns': values.encode(columns, ctx.fold(1)._replace(indices=None))}
        rest = _with_columns(rows, channels, 0 * columns)
    else:
        rest = rows
    if t:
        message |= {'tokens': _words(tokens, count)}
        message |= {'whole': values.encode(whole, ctx.fold(2)._replace(indices=None))}
        zeros = _put(rest, tokens, 0 * whole)
        mean = jnp.sum(zeros * (1 / (count - t)), 1, keepdims=True)
        rest = _put(rest, tokens, jnp.broadcast_to(mean, whole.shape))
    if t and c:
        message |= {'both': bf16.encode(_gathered(whole.swapaxes(1, 2), channels), ctx)}
    if of.scaled:
        rest, message['scales'] = _scaled(rest)
    return message, rest.reshape(x.shape)


def put_back(m: dict[str, Payload], rest: Array, like: Like, of: Heavy, ctx: Ctx) -> Array:
    """The tensor of a message of `taken` and of what was left."""
    n, count, width, t, c = _sizes(like, of)
    dtype = compute_dtype(like)
    part = lambda *shape: jax.ShapeDtypeStruct((n, *shape), dtype)
    values = each(of.values)
    y = rest.astype(dtype).reshape(n, count, width)
    if of.scaled:
        scale, most = power(m['scales'].astype(jnp.int32) - BIAS, dtype), jnp.finfo(dtype).max
        y = jnp.where(jnp.isfinite(y), jnp.clip(y * scale[..., None], -most, most), y)
    channels = m['channels'].astype(jnp.int32) if c else None
    if channels is not None:
        columns = values.decode(m['columns'], part(c, count), ctx.fold(1)._replace(indices=None))
        y = _with_columns(y, channels, columns)
    if t:
        tokens = m['tokens'].astype(jnp.int32)
        whole = values.decode(m['whole'], part(t, width), ctx.fold(2)._replace(indices=None))
        if channels is not None:
            crossings = bf16.decode(m['both'], part(c, t), ctx)
            whole = _with_columns(whole, channels, crossings)
        y = _put(y, tokens, whole)
    return saturated(y.reshape(like.shape), like.dtype)


def left(x: Array | Like) -> Like:
    """Shape and dtype of what is left of a tensor like ``x``."""
    return like(jax.ShapeDtypeStruct(x.shape, compute_dtype(x)))
