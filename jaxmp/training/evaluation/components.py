r"""Components of a boundary, from the activations of a text and the gradients by them.

An error e of a token costs about :math:`e^T M e / 2` nats, where M is the mean of :math:`g g^T`
over tokens and g the gradient of `jaxmp.training.evaluation.divergence`. Components are those of
:math:`M^{1/2} x`, which are uncorrelated and whose errors cost alike, so that one step serves all.

Tokens differ in loudness l, the mean over components of how large they are for their component,
and a token's step is as coarse as the token is loud. So a token counts by l in both means: x by
1 / l and g by l. The loudest, attention's sinks, are close to a few means of their own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jaxmp.codecs import rans
from jaxmp.codecs.components import CLASSES, FINENESS, Components, beside

LOUD = 4.0  # times the median: tokens with means of their own
FAINTEST = 1 / 8
MEANS = 3  # of those
ROUNDS = 3  # in which loudness and components are found
WIDE = 2.0**5  # steps: of a larger component the last byte is sent as it is

Tokens = Float[np.ndarray, 'N C']


class Directions(NamedTuple):
    """Components without a number of bits; see `Components` for the fields."""

    means: Float[np.ndarray, 'K C']
    forward: Float[np.ndarray, 'C C']
    backward: Float[np.ndarray, 'C C']
    sizes: Float[np.ndarray, ' C']


def learned(x: Tokens, g: Tokens, share: float) -> Directions:
    """The components of tokens.

    Args:
      x: activations, more tokens than channels.
      g: gradients of nats by them.
      share: of the gradients in M; the rest is an even one.

    Raises:
      ValueError: if there are no more tokens than channels.
    """
    count = x.shape[1]
    if len(x) <= count:
        raise ValueError(
            f'{len(x)} tokens are not enough for {count} channels; give a longer text, or more '
            f'--tokens: {8 * count} or more are good'
        )
    x, g = x.astype(np.float64), g.astype(np.float64)
    means = _means(x)
    rest = x - means[nearest(x, means)]
    loud = _floored(np.sqrt(np.mean(rest**2, 1, keepdims=True)))
    for _ in range(ROUNDS - 1):
        forward, _ = _turned(rest / loud, g * loud, share)
        size = np.abs(rest @ forward.T)
        loud = _floored(np.mean(size / np.mean(size / loud, 0), 1, keepdims=True))
    forward, backward = _turned(rest / loud, g * loud, share)
    sizes = np.mean(np.abs(rest @ forward.T) / loud, 0)
    return Directions(*(a.astype(np.float32) for a in (means, forward, backward, sizes)))


def _turned(x: Tokens, g: Tokens, share: float) -> tuple[np.ndarray, np.ndarray]:
    """The matrix of components, and its inverse."""
    square, fisher = (a.T @ a / len(a) for a in (x, g))
    even = np.eye(len(fisher)) * np.trace(fisher) / len(fisher)
    root, back = _roots(share * fisher + (1 - share) * even)
    vectors = np.linalg.eigh(root @ square @ root)[1]
    return vectors.T @ root, back @ vectors


def _floored(loud: np.ndarray) -> np.ndarray:
    """Loudness over its median, at least `FAINTEST`: what equals its mean weighs not infinitely."""
    return np.maximum(loud / np.median(loud), FAINTEST)


def nearest(x: Tokens, means: Float[np.ndarray, 'K C']) -> np.ndarray:
    """The number of the mean that is nearest to each token."""
    return np.argmax(x @ means.T - np.sum(means**2, 1) / 2, 1)


def _roots(square: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The square root of a matrix whose trace is its size, and the root's inverse."""
    values, vectors = np.linalg.eigh(square * len(square) / np.trace(square))
    root = np.sqrt(np.maximum(values, values[-1] * 1e-12))
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _means(x: Tokens) -> np.ndarray:
    """The mean of tokens that are not loud, then means of those that are, by Lloyd's algorithm."""
    loud = np.sqrt(np.mean(x**2, 1))
    heavy = x[loud > LOUD * np.median(loud)]
    first = x[loud <= LOUD * np.median(loud)].mean(0)[None]
    count = min(MEANS, CLASSES - 1, len(heavy) // 3)
    if not count:
        return first
    order = np.argsort(np.mean(heavy**2, 1))
    means = heavy[order[np.linspace(0, len(heavy) - 1, count).astype(int)]]
    for _ in range(10):
        of = nearest(heavy, means)
        means = np.stack([heavy[of == k].mean(0) if (of == k).any() else m
                          for k, m in enumerate(means)])  # fmt: skip
    return np.concatenate([first, means])


def in_bits(found: Directions, bits: float) -> Components:
    """Components with the widest distributions whose numbers take ``bits`` of a channel.

    Raises:
      ValueError: if so few bits have no room for a token's step and state.
    """
    words = math.floor(bits * len(found.sizes) / 16)
    if words <= beside(0):
        least = 16 * (beside(0) + 1) / len(found.sizes)
        raise ValueError(
            f"--bits={bits} of {len(found.sizes)} channels have no room for a token's step; give "
            f'at least {least:.2f}'
        )
    entropy = rans.tables().entropy
    finest = math.ceil(FINENESS * math.log2(found.sizes.max() / 2**12))
    for step in range(finest, finest + 32 * FINENESS):
        size = found.sizes / 2.0 ** (step / FINENESS)
        wide = size > WIDE
        octaves = np.log2(np.where(wide, size / 256, size)) - rans.SMALLEST
        table = np.clip(np.round(rans.STEPS * octaves), 0, rans.TABLES - 1).astype(np.uint8)
        if entropy[table].sum() <= 16 * (words - beside(int(wide.sum()))):
            return Components(*found, table, wide.astype(np.uint8), step, words)
    raise ValueError(f'no step of these components takes as few as {bits} bits of a channel')
