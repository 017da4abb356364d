"""Polar codes: the transform, and the set of its inputs that carry the message.

A word u of N bits, N a power of two, becomes ``x = u F^(kron n)`` over GF(2), ``F = [[1, 0],
[1, 1]]``, in natural order; the transform is its own inverse. As a source code, K of the inputs
carry the message and N - K are frozen to zero. Under successive cancellation the inputs polarise:
given the source and the inputs before it, input i is either nearly determined (entropy ``H_i`` near
0; it must follow the source, so it is sent) or nearly uniform (``H_i`` near 1; it can be zero). A
construction estimates all ``H_i``; the inputs with the K smallest are sent.

Sender and receiver compute the set separately and must get identical indices. `genie` therefore
uses integers, and a random generator whose stream is fixed.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float64, UInt8

UNIT = 1024  # the integer with which `genie` represents a log-likelihood ratio of 1
SAMPLES = 1 << 22  # log-likelihood ratios that `genie` draws, over all blocks
SIZES = [2**n for n in range(1, 17)]
COLUMNS = 1 << 18  # samples computed at once; so many fit the cache

Bits = UInt8[Array, 'N ...']
Levels = Float64[np.ndarray, ' levels']
Source = Callable[[float], Levels]
Construction = Callable[[int, Levels], Float64[np.ndarray, ' N']]


class Code(NamedTuple):
    """A polar code: the inputs of a transform of N bits that carry the message.

    Attributes:
      size: N.
      sent: ascending positions of the K inputs that carry the message; the others are zero.
    """

    size: int
    sent: tuple[int, ...]


def transform(u: Bits) -> Bits:
    """``u F^(kron n)`` along the first axis, its own inverse.

    Raises:
      ValueError: if the length is not a power of two.

    >>> transform(jnp.array([0, 0, 0, 1], jnp.uint8)).tolist()
    [1, 1, 1, 1]

    References:
      Channel Polarization: A Method for Constructing Capacity-Achieving Codes, arXiv 0807.3917.
    """
    check_size('transform', u.shape[0])
    rest = u.shape[1:]
    half = u.shape[0] // 2
    while half:
        pairs = u.reshape(-1, 2, half, *rest)
        u = jnp.stack([pairs[:, 0] ^ pairs[:, 1], pairs[:, 1]], 1).reshape(-1, *rest)
        half //= 2
    return u


def check_size(name: str, size: object) -> None:
    """Raises ValueError unless ``size`` is a power of two from 2 to 65536."""
    if isinstance(size, bool) or not isinstance(size, int) or size not in SIZES:
        raise ValueError(
            f'{name} works on blocks of a power of two, 2 to 65536, got {size!r}; '
            'longer blocks compress better, 1024 is usual'
        )


def check_rate(name: str, rate: float, size: int) -> None:
    """Raises ValueError unless ``rate`` is in (0, 1] and sends at least one of ``size`` bits."""
    if not 0 < rate <= 1 or size * rate < 1:
        cure = f'; for {rate:g} % write {name}({rate / 100:g})' if 1 < rate <= 100 else ''
        raise ValueError(
            f'{name} rate {rate} is not in [{1 / size:g}, 1], in bits per element for blocks of '
            f'{size}{cure}'
        )


def entropy(p: Float64[np.ndarray, '...']) -> Float64[np.ndarray, '...']:
    """``h2(p) = -p log2 p - (1 - p) log2 (1 - p)``, in bits.

    >>> entropy(np.array([0.0, 0.11, 0.5])).round(4).tolist()
    [0.0, 0.4999, 1.0]
    """
    p = np.clip(p, 1e-300, 1 - 1e-16)
    return -(p * np.log2(p) + (1 - p) * np.log1p(-p) / math.log(2))


def bisect(rising: Callable[[float], float], target: float, high: float) -> float:
    """The argument in ``[0, high]`` at which ``rising`` reaches ``target``, rounded to 2**-20."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return round(high * 2**20) / 2**20


def distortion(rate: float) -> float:
    """Shannon's bound on the share of wrong bits: D with ``1 - h2(D) = rate``.

    >>> [round(distortion(r), 3) for r in (0.1, 0.5, 0.9)]
    [0.316, 0.11, 0.013]
    """
    return bisect(lambda d: float(entropy(np.array(d))), 1 - rate, 0.5)


def ratio(rate: float) -> float:
    """``ln((1 - D) / D)``, the log-likelihood ratio of a bit that is wrong with probability D."""
    d = max(distortion(rate), 2.0**-20)
    return math.log((1 - d) / d)


@functools.lru_cache(64)
def slope(rate: float) -> float:
    """The inverse temperature at which the sign of a normal number carries ``rate`` bits.

    It is beta with ``1 - E h2(sigma(beta x)) = rate``, x standard normal: the test channel
    ``P(s = 1 | x) = sigma(beta x)``, whose output costs ``rate`` bits per element.

    >>> round(slope(0.5), 2)
    3.17
    """
    x = np.array([statistics.NormalDist().inv_cdf((i + 0.5) / 4096) for i in range(2048, 4096)])
    carried = lambda beta: 1 - float(entropy(1 / (1 + np.exp(-beta * x))).mean())
    return bisect(carried, rate, 4096.0)


# A source is given to a construction as equally likely log-likelihood ratios of the all-zero word.


def hard_source(rate: float) -> Levels:
    """Fair bits reproduced with `distortion` D: values `ratio`, a share D with the wrong sign."""
    wrong = round(distortion(rate) * 2**16)
    return ratio(rate) * np.where(np.arange(2**16) < wrong, -1.0, 1.0)


def soft_source(rate: float) -> Levels:
    """``beta x`` for normal x, given that its reproduction is positive; beta is `slope`."""
    beta, x = slope(rate), np.linspace(-8, 8, 2**16 + 1)
    mass = np.exp(-x * x / 2 - np.logaddexp(0, -beta * x))
    below = np.cumsum(mass) / mass.sum()
    return beta * np.interp((np.arange(2**16) + 0.5) / 2**16, below, x)


def genie(size: int, source: Levels) -> Float64[np.ndarray, 'N']:
    """``H(U_i | past)`` of each input, in bits, by Monte Carlo on the all-zero word.

    The construction is genie-aided: successive cancellation uses the true past, so that all nodes
    of a level are computed at once. ``H_i`` is the mean of ``h2(sigma(L_i))``. By the chain rule
    the mean over i is the entropy of a source bit given its log-likelihood ratio, which is
    ``h2(D)`` for `hard_source`.

    >>> round(float(genie(16, hard_source(0.5)).mean()), 2)
    0.5
    """
    levels = np.rint(source * UNIT).astype(np.int32)
    stream = np.random.PCG64(size)
    blocks = max(SAMPLES // size, 64)
    step = max(1, COLUMNS // size)
    total, done = np.zeros(size, np.int64), 0
    entropies = np.rint(entropy(1 / (1 + np.exp(-np.arange(32 * UNIT) / UNIT))) * 2**16)
    entropies = entropies.astype(np.int64)
    while done < blocks:
        raw = stream.random_raw(-(-size * step // 4)).astype('<u8').view('<u2')
        llr = _split(levels[raw[: size * step]].reshape(1, size, step))
        total += entropies[np.minimum(np.abs(llr), len(entropies) - 1)].sum(1)
        done += step
    return total / (done * 2**16)


def _split(a: np.ndarray) -> np.ndarray:
    """Log-likelihood ratios of all inputs ``(N, columns)`` if every decision is zero."""
    soft = np.rint(UNIT * np.log1p(np.exp(-np.arange(8 * UNIT) / UNIT))).astype(np.int32)
    soft[-1] = 0
    while (size := a.shape[1]) > 1:
        first, second = a[:, : size // 2], a[:, size // 2 :]
        total, apart = first + second, np.abs(first - second)
        f = (np.abs(total) - apart) // 2  # exact: total and apart differ by an even number
        f += soft[np.minimum(np.abs(total), len(soft) - 1)]
        f -= soft[np.minimum(apart, len(soft) - 1)]
        a = np.stack([f, total], 1).reshape(-1, size // 2, a.shape[2])
    return a[:, 0]


def bhattacharyya(size: int, source: Levels) -> Float64[np.ndarray, 'N']:
    """``ln Z_i``, bounds of the Bhattacharyya parameters: fast, but up to 20 % worse than `genie`.

    ``Z = E exp(-L / 2)``, which is ``2 sqrt(D (1 - D))`` for `hard_source`. Each level maps ``Z``
    to ``2 Z - Z^2`` and to ``Z^2``, which is exact only for erasures.
    """
    log_z = np.log(np.exp(-source / 2).mean(keepdims=True))
    while len(log_z) < size:
        worse = log_z + np.log1p(-np.expm1(log_z))  # ln(2 Z - Z^2)
        log_z = np.stack([worse, 2 * log_z], 1).reshape(-1)
    return log_z


@functools.lru_cache(64)
def code(size: int, rate: float, source: Source, construction: Construction = genie) -> Code:
    """The code that sends the ``floor(rate size)`` inputs with the lowest scores.

    Args:
      size: N, a power of two.
      rate: message bits per source bit, in (0, 1].
      source: `hard_source` or `soft_source`.
      construction: `genie` or `bhattacharyya`.

    Raises:
      ValueError: if ``size`` or ``rate`` is out of range, or no input is sent.

    >>> code(8, 0.5, hard_source)
    Code(size=8, sent=(3, 5, 6, 7))
    """
    check_size('code', size)
    check_rate('code', rate, size)
    score = construction(size, source(rate))
    order = np.argsort(score, kind='stable')  # among equal scores, both ends take the lower index
    return Code(size, tuple(sorted(order[: int(size * rate)].tolist())))
