"""`trellis`: a quantiser that chooses the codes of many elements together.

There are twice as many levels as a code has values; the bits before an element decide which half it
may take (a convolutional code). The sender picks the sequence of codes that lies nearest to the
data (Viterbi's algorithm), so that the error is that of a quantiser with many dimensions. The
receiver shifts bits and reads a table.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import TypeVar

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from jaxmp.codecs.dense import saturated
from jaxmp.codecs.lloyd import (
    GRID,
    alike,
    chosen,
    scale_of,
    scale_words,
    scaled,
    sums,
    unit_rms,
)
from jaxmp.codecs.uniform import check_bits
from jaxmp.codecs.viterbi import cheapest
from jaxmp.wire import Codec, Ctx, Like, elements, pack, samples, unpack, wide
from jaxmp.wire.words import check_bools, word

# Ungerboeck's codes for amplitudes: parity checks (h1, h0) by the number of states.
CHECKS = {4: (2, 5), 8: (4, 11), 16: (4, 19), 32: (8, 37)}

# The positive levels for unit normal data, in 1024ths: means of what eight states assign to them.
LEVELS = {
    1: (359, 1229),
    2: (200, 619, 1097, 1912),
    3: (108, 312, 542, 773, 1047, 1365, 1822, 2543),
}
ERRORS = {1: 0.1, 2: 0.086, 3: 0.024}  # on normal data; at 1 bit less, for it is near one level's
RUN = 256  # elements whose codes are chosen together
Bit = TypeVar('Bit', int, Array)


def _subset(bits: list[Bit], states: int) -> Bit:
    """The number of the subset of levels, 0 to 3, from an element's bit and those before it."""
    low, high = (
        functools.reduce(operator.xor, [b for k, b in enumerate(bits) if check >> k & 1])
        for check in CHECKS[states]
    )
    return 2 * high + low


def _path(u: Float[Array, 'rows n'], levels: Sequence[float], states: int) -> UInt8[Array, '...']:
    """Of each element the subset of levels on the path of least squared error (Viterbi).

    The first bit of its code is added as ``4 * bit``.

    A state is the bits before an element, the newest as the highest. The two that lead to one
    differ in the bit that is dropped.
    """
    memory, half = states.bit_length() - 1, states // 2

    def way(after: int, dropped: int) -> tuple[int, int]:
        """The state before, and the label of the step: its bit and its subset."""
        before, first = 2 * after % states + dropped, after // half
        bits = [first, *(before >> k & 1 for k in reversed(range(memory)))]
        return before, 4 * first + _subset(bits, states)

    def prices(x: Array) -> list[Array]:
        errors = [[jnp.square(x - level) for level in levels[s::4]] for s in range(4)]
        return 2 * [functools.reduce(jnp.minimum, rows) for rows in errors]

    ways = [(way(after, 0), way(after, 1)) for after in range(states)]
    return cheapest(prices, u.T, ways, len(u)).T


@word
def trellis(bits: int, states: int = 8, unbiased: bool = False) -> Codec:
    r"""Trellis-coded quantiser for normal data, with one least-squares scale per sample.

    .. math:: C(x) = s\, l_q,\quad q = \arg\min_{q \in T} |x / \sigma - l_q|^2,\quad
              s = \langle x, l_q\rangle / |l_q|^2

    T is the set of paths through a trellis of ``states`` states, over runs of 256 elements of a
    sample, and the :math:`l_j` are ``2**(bits + 1)`` levels; :math:`\sigma` is the sample's root
    mean square. On normal data it spends 0.15, 0.23 and 0.30 bits more per element than Shannon's
    bound at 1, 2 and 3 bits. The scale is sent as bfloat16. A sample that holds NaN or an infinity
    decodes to NaN. Magnitudes that are all alike get one level, as in `lloyd`. Put it in `rotate`
    for data that is not normal: ``rotate(trellis(2))``.

    Args:
      bits: 1 to 3.
      states: 4, 8, 16 or 32; the time of the sender is proportional to it.
      unbiased: the scale is ``s = |x|^2 / <x, l_q>``, as in `lloyd`.

    Raises:
      TypeError: if ``unbiased`` is not a truth value.
      ValueError: if an argument is out of range or the tensor has no axis besides the samples.

    >>> import jax, jaxmp
    >>> C, x = trellis(2), jax.random.normal(jax.random.key(0), (1, 4096))
    >>> error = C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()) - x
    >>> 0.08 < float(jnp.mean(error**2)) < 0.09  # Shannon's bound is 0.0625
    True

    References:
      Trellis Coded Quantization of Memoryless and Gauss-Markov Sources, IEEE Transactions on
      Communications 38 (1990).
    """
    check_bits('trellis', bits, 1, 3)
    if not isinstance(states, int) or states not in CHECKS:
        raise ValueError(f'trellis states {states!r} is not one of {", ".join(map(str, CHECKS))}')
    check_bools('trellis', unbiased=unbiased)
    positive = [k / GRID for k in LEVELS[bits]]
    levels = [*(-k for k in reversed(positive)), *positive]

    def subsets(first: Array) -> Array:
        """The subset of levels of each element, from the first bits of a run."""
        n, memory = first.shape[1], states.bit_length() - 1
        late = jnp.concatenate([jnp.zeros((len(first), memory), first.dtype), first], 1)
        return _subset([late[:, memory - k :][:, :n] for k in range(memory + 1)], states)

    def in_runs(x: Array) -> Array:
        """Samples in runs of 256 elements, of which a shorter sample is one."""
        run = min(RUN, x.shape[1])
        return jnp.pad(x, ((0, 0), (0, -x.shape[1] % run))).reshape(-1, run)

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x = wide(samples(x))
        unit, rms = unit_rms(x)
        v = x * (1 / unit)
        runs = in_runs(v / rms)
        path = _path(runs, levels, states)
        subset, first = path & 3, path >> 2
        middles = [(low + high) / 2 for low, high in zip(levels, levels[4:], strict=False)]
        # Of a subset's levels the nearest: its number is how many of their middles lie below.
        number = jnp.zeros(path.shape, jnp.uint8)
        for k in range(0, len(middles), 4):
            number += (runs > chosen(subset, middles[k : k + 4], v.dtype)).astype(jnp.uint8)
        y = chosen(4 * number + subset, levels, v.dtype)
        y, codes = (a.reshape(len(x), -1)[:, : v.shape[1]] for a in (y, number << 1 | first))
        products = (v * v, v * y) if unbiased else (v * y, y * y)
        above, below, magnitudes = sums(*products, jnp.abs(v))
        one = alike(magnitudes, rms, v.shape[1], ERRORS[bits])
        above, below = jnp.where(one, -magnitudes, above), jnp.where(one, v.shape[1], below)
        codes = jnp.where(one, (v < 0).astype(codes.dtype), codes)
        return {'codes': pack(codes, bits), 'scale': scale_words(above, below, unit, rms)}

    def read(m: dict[str, Array], like: Like, ctx: Ctx) -> tuple[Array, Array]:
        n, s = elements(like), scale_of(m['scale'], like)
        codes = unpack(m['codes'], bits, n)
        runs = in_runs(codes)
        number = (runs >> 1) * 4 + subsets(runs & 1)
        number = number.reshape(len(codes), -1)[:, :n]
        y = jnp.where(s < 0, jnp.where(codes & 1 == 0, 1, -1), chosen(number, levels, s.dtype))
        return y, jnp.abs(s)

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        return saturated(scaled(*read(m, like, ctx)).reshape(like.shape), like.dtype)

    return Codec(encode, decode, levels=read, samples='alone')
