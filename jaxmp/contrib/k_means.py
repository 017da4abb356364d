"""`k_means`: levels fitted to the magnitudes of each sample, which are sent with the codes.

Levels for a fixed distribution fail for what TopK keeps, a tail without its centre: no magnitude is
near zero, and the largest may be far from the others.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.lloyd import scale_of
from jaxmp.codecs.uniform import check_bits
from jaxmp.wire import Codec, Ctx, Like, elements, half_bytes, pack, samples, unpack, wide
from jaxmp.wire.words import word

ROUNDS = 4  # of Lloyd's algorithm, after the cells have been split at their means


def _centres(a: Float[Array, 'B n'], ends: list[Array]) -> list[Array]:
    """The mean of each cell that ``ends`` separate, or its lower end if it is empty."""
    low, centres = jnp.full((len(a), 1), -1, a.dtype), []
    for high in [*ends, jnp.ones_like(low)]:
        inside = (a > low) & (a <= high)
        count = jnp.sum(inside, 1, keepdims=True)
        total = jnp.sum(jnp.where(inside, a, 0), 1, keepdims=True)
        centres.append(jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.maximum(low, 0)))
        low = high
    return centres


def _fitted(a: Float[Array, 'B n'], splits: int) -> tuple[list[Array], list[Array]]:
    """Ends of ``2**splits`` cells and their centres, for magnitudes in [0, 1]."""
    ends: list[Array] = []
    for _ in range(splits):
        centres = _centres(a, ends)
        ends = [e for pair in itertools.zip_longest(centres, ends) for e in pair if e is not None]
    for _ in range(ROUNDS):
        ends = [(low + high) / 2 for low, high in itertools.pairwise(_centres(a, ends))]
    return ends, _centres(a, ends)


@word
def k_means(bits: int) -> Codec:
    r"""Sign and the nearest of ``2**(bits - 1)`` magnitudes that are fitted to each sample.

    .. math:: C(x)_i = \mathrm{sign}(x_i)\, l_{q_i},\quad
              l_q = \mathrm{mean} \{|x_i| : q_i = q\}

    The cells come from Lloyd's algorithm, which begins with cells split at their means. The
    levels are sent as bfloat16, ``16 * 2**(bits - 1)`` bits per sample; `one_bit` is the case of
    one level. A sample that holds NaN or an infinity decodes to NaN. It is meant for the values of
    TopK: ``top_k(0.015625, values=k_means(2))``.

    Args:
      bits: 2 to 4.

    Raises:
      ValueError: if ``bits`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C = k_means(2)
    >>> x = jnp.array([[1.0, -1.5, 8.0, -6.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).tolist()
    [[1.25, -1.25, 7.0, -7.0]]

    References:
      Communication Efficient LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """
    check_bits('k_means', bits, 2, 4)
    half = 2 ** (bits - 1)

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(samples(x))
        most = jnp.max(jnp.abs(x), 1, keepdims=True)
        x = x / jnp.where(most > 0, most, 1)
        ends, levels = _fitted(jnp.abs(x), bits - 1)

        def code(run: Array, i: int) -> Array:
            above = sum((jnp.abs(run) > e).astype(jnp.uint8) for e in ends)
            return above + half * (run < 0).astype(jnp.uint8)

        top = float(jnp.finfo(jnp.bfloat16).max)
        scaled = jnp.minimum(jnp.concatenate(levels, 1) * most, top)
        fine = jnp.isfinite(jnp.sum(x, 1, keepdims=True)) & jnp.isfinite(most)
        words = half_bytes(jnp.where(fine, scaled, jnp.nan).astype(jnp.bfloat16))
        return {'codes': pack(x, bits, code), 'levels': words}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        q, levels = unpack(m['codes'], bits, elements(like)), scale_of(m['levels'], like)
        y = jnp.broadcast_to(levels[:, :1], q.shape)
        for i in range(1, half):
            y = jnp.where(q & (half - 1) >= i, levels[:, i : i + 1], y)
        return saturated(jnp.where(q >= half, -y, y).reshape(like.shape), like.dtype)

    return Codec(encode, decode, samples='alone')
