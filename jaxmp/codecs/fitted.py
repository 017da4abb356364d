"""`fitted`: components of a boundary that a file has, learned once for a model, by `jaxmp fit`.

A token is coded by itself, without what came before and after it: both ends know the components
and their distributions from the file, and a message has no more than a step and numbers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt16

from jaxmp.codecs import rows
from jaxmp.codecs.components import CLASSES, FINENESS, Components, beside, opened
from jaxmp.codecs.dense import saturated
from jaxmp.codecs.rans import LARGEST, tables
from jaxmp.wire import Codec, Ctx, Like, compute_dtype, samples, wide
from jaxmp.wire.words import check_whole, word

SPARE = 8  # bits of a row by which its cost may be wrong
NOT_FINITE = 0xFFFF  # a token's first word; else a mean's number is in its last three bits
ZERO, COARSEST = 4096, 8190  # of a step, as that word has it


@word
def fitted(file: str, cut: int) -> Codec:
    r"""Components that a file has of a boundary: ``y = m + B (d n)``, where ``n = F (x - m) / d``.

    x is a token, m the nearest of a few means of the file, which loud tokens have of their own, the
    rows of F are components for which an error counts as the model's divergence does, and B is the
    inverse. Numbers n are rounded, and each component's are coded by a logistic distribution whose
    size the file says. d is a token's step, the finest with which its numbers have room: 2^(k/16).
    A token takes the same bits whatever it holds. It is decoded without other tokens, and
    generation decodes one at a time as training decodes a batch.

    The products by B may differ in their last bits between machines: not below `ef21`, `aqsgd` or
    `anchored`, whose ends have to stay equal.

    Args:
      file: of ``jaxmp fit``.
      cut: which boundary of the file: the number of blocks before it.

    Raises:
      TypeError: if ``file`` is no text.
      ValueError: if the file cannot be read, has no such boundary, or is of other channels.

    References:
      Transform coding: Goyal, Theoretical Foundations of Transform Coding, IEEE Signal Processing
      Magazine 18(5), 2001.
    """
    if not isinstance(file, str):
        raise TypeError(f"fitted file {file!r} is no text; write fitted('codec.npz', 8)")
    check_whole('fitted cut', cut, 'a number of blocks')
    found = opened(file)[1]
    if cut not in found:
        has = ', '.join(map(str, found))
        raise ValueError(f'{file} has boundaries behind {has} blocks, and none behind {cut}')
    return codec_of(found[cut], f'fitted({file!r}, {cut})')


def codec_of(c: Components, name: str = 'fitted') -> Codec:
    """The codec of components."""

    def rows_of(x: Array) -> Array:
        if x.shape[-1] != len(c.sizes):
            raise ValueError(
                f'{name} is of {len(c.sizes)} channels, and the tensor has {x.shape[-1]}; fit '
                'components to this model'
            )
        return wide(x).reshape(-1, x.shape[-1])

    def encode(x: Array, ctx: Ctx) -> UInt16[Array, 'B W']:
        samples(x)
        message = _coded(c, rows_of(x))
        return message.reshape(len(x), -1)

    def decode(m: UInt16[Array, 'B W'], like: Like, ctx: Ctx) -> Array:
        y = _decoded(c, m.reshape(-1, c.words), compute_dtype(like))
        return saturated(y.reshape(like.shape), like.dtype)

    return Codec(encode, decode, samples='alone')


def _coded(c: Components, x: Float[Array, 'N C']) -> UInt16[Array, 'N W']:
    """The message of tokens."""
    sound = jnp.all(jnp.isfinite(x), 1)
    x = jnp.where(sound[:, None], x, 0)
    means = jnp.asarray(c.means, x.dtype)
    nearest = jnp.argmax(x @ means.T - jnp.sum(means**2, 1) / 2, 1)
    z = (x - means[nearest]) @ jnp.asarray(c.forward.T, x.dtype)
    k = _step(c, z, 16 * c.coded + 16 - SPARE)

    def trial(k: Array) -> tuple[Array, Array, Array, Array]:
        n = jnp.round(z * _over(k, z.dtype))
        high = jnp.clip(_high(c, n), -LARGEST, LARGEST)
        last = (n - 256 * high)[:, c.bytes]
        stream, used = rows.encode(high.astype(jnp.int32), c.table, c.coded)
        return k, stream, _bytes(last), used > c.coded

    k, stream, last, _ = jax.lax.while_loop(
        lambda found: jnp.any(found[3] & (found[0] < COARSEST - ZERO)),
        lambda found: trial(found[0] + found[3].astype(k.dtype)),
        trial(k),
    )
    first = jnp.where(sound, (k + ZERO) * CLASSES + nearest, NOT_FINITE).astype(jnp.uint16)
    return jnp.concatenate([first[:, None], last, stream], 1)


def _high(c: Components, n: Array) -> Array:
    """The numbers that have tables: of wide components without their last bytes."""
    return jnp.round(n * jnp.asarray(1 / c.over, n.dtype)) if len(c.bytes) else n


def _bytes(last: Float[Array, 'N L']) -> UInt16[Array, 'N L2']:
    """Numbers from -128 to 128 in bytes, two a word."""
    low = jnp.clip(last, -128, 127).astype(jnp.int8).astype(jnp.uint8)
    low = jnp.pad(low, ((0, 0), (0, low.shape[1] % 2)))
    return jax.lax.bitcast_convert_type(low.reshape(len(low), -1, 2), jnp.uint16)


def _over(k: Array, dtype: jnp.dtype) -> Array:
    """One over a step, of each row; exponents of float32 reach further than a step may."""
    half = jnp.exp2(-(k[:, None] / (2 * FINENESS)).astype(dtype))
    return half * half


def _step(c: Components, z: Array, room: int) -> Array:
    """The finest step of each row whose numbers fit, by halving, from what its loudness says."""
    most = jnp.asarray(rows.largest()[c.table], z.dtype)
    loud = jnp.mean(jnp.abs(z) * jnp.asarray(1 / c.sizes, z.dtype), 1)
    begin = c.step + jnp.round(FINENESS * jnp.log2(jnp.maximum(loud, 1e-30)))
    begin = jnp.clip(begin, 4 * FINENESS - ZERO, COARSEST - ZERO - 4 * FINENESS).astype(jnp.int32)

    def fits(k: Array) -> Array:
        high = _high(c, jnp.round(z * _over(k, z.dtype)))
        whole = jnp.all(jnp.abs(high) <= most, 1)
        return whole & (rows.cost(high, c.table) <= room)

    def coarser(ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        return low, jnp.where(fits(high), high, jnp.minimum(2 * high - low, COARSEST - ZERO))

    def narrower(i: int, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) // 2
        good = fits(middle)
        return jnp.where(good, low, middle), jnp.where(good, middle, high)

    ends = begin - FINENESS, begin + FINENESS
    more = lambda ends: jnp.any(~fits(ends[1]) & (ends[1] < COARSEST - ZERO))
    low, high = jax.lax.while_loop(more, coarser, ends)
    wide = jnp.max(high - low)
    steps = jnp.ceil(jnp.log2(wide.astype(z.dtype))).astype(jnp.int32)
    return jax.lax.fori_loop(0, steps, narrower, (low, high))[1]


def _decoded(c: Components, m: UInt16[Array, 'N W'], dtype: jnp.dtype) -> Float[Array, 'N C']:
    """The tokens of a message."""
    first = m[:, 0].astype(jnp.int32)
    words, last = jnp.split(m[:, 1:], [beside(len(c.bytes)) - 1 - rows.STATE], 1)
    n = rows.decode(last, c.table)
    low = jax.lax.bitcast_convert_type(words, jnp.int8).reshape(len(m), -1)[:, : len(c.bytes)]
    n = n.at[:, c.bytes].set(256 * n[:, c.bytes] + low)
    nearer = np.where(c.wide, 0, tables().centre[c.table])
    size = jnp.maximum(jnp.abs(n) - jnp.asarray(nearer, dtype), 0)
    half = jnp.exp2(((first // CLASSES - ZERO)[:, None] / (2 * FINENESS)).astype(dtype))
    z = jnp.where(n < 0, -size, size) * half * half
    y = z @ jnp.asarray(c.backward.T, dtype)
    y = y + jnp.asarray(c.means, dtype)[jnp.minimum(first % CLASSES, len(c.means) - 1)]
    return jnp.where((first == NOT_FINITE)[:, None], jnp.nan, y)
