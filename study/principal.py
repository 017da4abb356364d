"""`principal`: the projections of a bottleneck at first, in a network that is trained already.

Without weights a bottleneck starts with the first channels (`study.bottleneck`). A trained
network would lose what the others say. Its activations vary in few directions, though, and with
these it loses little, before the first step of the fine-tuning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

ABSENT = 2.0  # occurrences of the mean that a token's own is averaged with
TOKENS = 2**18  # about as many activations are read, of rows from all over the inputs
ROWS = 64  # at a time


class Network(NamedTuple):
    """A trained network without a bottleneck.

    Attributes:
      stages: its stages.
      read: the variables of a stage, given its number.
      x: inputs, tokens ``(N, T)``.
      vocabulary: number of tokens, if later stages will embed them; else 0.
    """

    stages: Sequence[Any]
    read: Callable[[int], dict[str, PyTree]]
    x: Int[np.ndarray, 'N T']
    vocabulary: int


class Start(NamedTuple):
    """Parameters at a boundary, at first.

    Attributes:
      narrow: ``(C, K)``, of the stage before.
      widen: ``(K, C)``, of the stage after.
      tokens: ``(V, C)``, its embedding of the tokens.
    """

    narrow: Float[np.ndarray, 'C K']
    widen: Float[np.ndarray, 'K C']
    tokens: Float[np.ndarray, 'V C']


def principal(
    parts: Iterable[tuple[Float[np.ndarray, 'N C'], Int[np.ndarray, ' N']]],
    channels: int,
    vocabulary: int,
) -> Start:
    r"""The directions in which activations vary most, and what tokens tell of the rest.

    .. math:: m_v = \bar x + \frac{\sum_{t_n = v} (x_n - \bar x)}{n_v + 2},\quad
              U = \text{eigenvectors of} \sum_n (x_n - m_{t_n}) (x_n - m_{t_n})^T,\quad
              E = U_K^T,\ D = U_K,\ T_v = (I - U_K U_K^T)\, m_v

    What arrives for an activation x of token v is :math:`D E x + T_v`; ``narrow`` is the transpose
    of E, and ``widen`` that of D. Without a vocabulary m is 0.

    Args:
      parts: activations at the boundary, ``(N, C)``, and the token of each, part by part.
      channels: K.
      vocabulary: number of tokens, V; 0: the stage after has no embedding.

    Returns:
      Arrays of float32. Each direction has a positive largest component.

    >>> x = np.array([[1.0, 2.0], [-1.0, -2.0], [2.0, 4.0]])
    >>> e, d, _ = principal([(x, np.zeros(3, int))], 1, 0)
    >>> bool(np.allclose(x @ e @ d, x, atol=1e-6)), (100 * d).round().tolist()
    (True, [[45.0, 89.0]])

    References:
      Activations of low rank: Protocol Models (arXiv 2506.01260).
    """
    squares, sums, counts = np.zeros(()), np.zeros((vocabulary, 0)), np.zeros(vocabulary)
    for part, tokens in parts:
        x = part.astype(np.float64)
        squares = squares + x.T @ x
        sums = sums if sums.shape[1] else np.zeros((vocabulary, x.shape[1]))
        if vocabulary:
            np.add.at(sums, tokens, x)
            counts += np.bincount(tokens, minlength=vocabulary)
    weights = counts[:, None]
    middle = sums.sum(0) / max(1, counts.sum())
    means = middle + (sums - weights * middle) / (weights + ABSENT)
    crossed = sums.T @ means
    rest = squares - crossed - crossed.T + means.T @ (weights * means)
    u = np.linalg.eigh(rest)[1][:, ::-1][:, :channels]  # ascending eigenvalues
    u = u * np.sign(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0))
    maps = u, u.T, means - means @ u @ u.T
    return Start(*(a.astype(np.float32) for a in maps))


def fitted(
    components: Callable[[int, int], Start], stage: int, params: Mapping[str, PyTree]
) -> dict[str, PyTree]:
    """The parameters of a stage at its boundaries, at first.

    The two ends of a boundary compute them apart, so both need the same kind of device.

    Args:
      components: those of a boundary, given the number of the stage before and of the channels.
      stage: number of the stage.
      params: its parameters; of these a ``narrow`` and a ``widen``, with its ``tokens``, are made.
    """
    starts: dict[str, PyTree] = {}
    if 'narrow' in params:
        kernel = components(stage, params['narrow']['kernel'].shape[1]).narrow
        starts['narrow'] = {'kernel': kernel}
    if 'widen' in params:
        start = components(stage - 1, params['widen']['kernel'].shape[0])
        starts['widen'] = {'kernel': start.widen}
        if 'tokens' in params:
            starts['tokens'] = {'embedding': start.tokens}
    return jax.tree.map(jnp.asarray, starts)


def components(network: Network, boundary: int, channels: int) -> Start:
    """`principal` of the activations that stage ``boundary`` of a network sends."""
    stages = network.stages[: boundary + 1]
    variables = [network.read(s) for s in range(len(stages))]

    @jax.jit
    def activations(
        variables: Sequence[Mapping[str, PyTree]], tokens: Int[Array, 'B T']
    ) -> Float[Array, 'N C']:
        h = tokens
        for stage, collections in zip(stages, variables, strict=True):
            h = stage.apply(collections, h)
        return h.reshape(-1, h.shape[-1])

    def parts() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        x = np.asarray(network.x[:: max(1, network.x.size // TOKENS)], np.int32)
        for start in range(0, len(x), ROWS):
            rows = x[start : start + ROWS]
            yield np.asarray(activations(variables, rows)), rows.ravel()

    return principal(parts(), channels, network.vocabulary)
