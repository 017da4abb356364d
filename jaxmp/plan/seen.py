"""`seen`: what decides which codecs fit a tensor: heavy tokens, heavy channels, its spectrum.

A token is what stands at one position, over all channels, the last axis. In many pretrained
language models the first token of a sequence, the attention sink, has up to 160 times the norm of
the others. A codec with one scale for the tensor then leaves nothing of them, and a rotation
spreads the sink over what is beside it.

References:
  Efficient Streaming Language Models with Attention Sinks, arXiv 2309.17453.
  Massive Activations in Large Language Models, arXiv 2402.17762.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

SINK = 20.0  # times the median norm: a token that has more is a sink
HEAVY = 8.0  # times the RMS of all: a channel that has more is heavy
FLAT = 0.5  # of the components: fewer that hold `MOST` of the energy are a falling spectrum
MOST = 0.9  # of the energy


class Seen(NamedTuple):
    """What a tensor is like.

    Attributes:
      token: the largest norm of a token over the median norm.
      channel: the largest RMS of a channel over that of all, without heavy tokens.
      components: the part of the components that holds `MOST` of the energy of what is left
        without heavy tokens and the mean token.
    """

    token: float
    channel: float
    components: float

    @property
    def has_sink(self) -> bool:
        """Whether a token is so heavy that no other may share its scale."""
        return self.token > SINK

    @property
    def has_heavy_channel(self) -> bool:
        """Whether a channel is, whose scale others cannot share either."""
        return self.channel > HEAVY

    @property
    def falls(self) -> bool:
        """Whether few components hold the energy, so that klt spends bits on these."""
        return self.components < FLAT

    def __str__(self) -> str:
        """The numbers, as the planner tells them."""
        return (
            f'the heaviest token has {self.token:.1f} times the norm of the median one, the '
            f'heaviest channel {self.channel:.1f} times the RMS; {100 * MOST:.0f} % of the energy '
            f'is in {100 * self.components:.0f} % of the components'
        )


def seen(x: ArrayLike) -> Seen:
    """What a tensor ``(..., C)`` is like.

    >>> x = np.random.default_rng(0).normal(size=(2, 64, 32))
    >>> x[:, 0] *= 100
    >>> seen(x).has_sink, seen(x[:, 1:]).has_sink, seen(x).falls
    (True, False, False)
    """
    rows, norms = tokens(x)
    median, others = float(np.median(norms)), rows[~sinks(norms)]
    energies = (others**2).mean(0)
    spectrum = np.linalg.svd(others - others.mean(0), compute_uv=False) ** 2
    return Seen(
        float(norms.max()) / median if median else 1.0,
        float(np.sqrt(energies.max() / max(energies.mean(), 1e-300))),
        components_for(spectrum) / len(energies),
    )


def tokens(x: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a tensor ``(..., C)``, and their norms."""
    rows = np.asarray(x, np.float64)
    rows = rows.reshape(-1, rows.shape[-1])
    return rows, np.linalg.norm(rows, axis=1)


def sinks(norms: np.ndarray) -> np.ndarray:
    """Which tokens are sinks."""
    return norms > SINK * np.median(norms)


def relative_error(x: ArrayLike, y: ArrayLike) -> float:
    """The squared error of ``y`` over the energy of all tokens of ``x`` but sinks.

    A sink has most of the energy; over all of it the loss of every other token is a small error.

    >>> x = np.ones((4, 64, 32))
    >>> x[:, 0] *= 1000
    >>> round(relative_error(x, np.where(x == 1, 0, x)), 2)
    1.0
    """
    rows, norms = tokens(x)
    wrong, whole = np.sum((tokens(y)[0] - rows) ** 2), np.sum(norms[~sinks(norms)] ** 2)
    return float(wrong / whole) if whole else float(wrong > 0)


def components_for(spectrum: np.ndarray, part: float = MOST) -> int:
    """How many of the largest components hold a part of the energy.

    >>> components_for(np.array([8.0, 1.5, 0.5]))
    2
    """
    parts = np.cumsum(np.sort(spectrum)[::-1])
    return int(np.searchsorted(parts, part * parts[-1])) + 1
