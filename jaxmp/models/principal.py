"""`principal`: the projections of a bottleneck at first, in a network that is trained already.

Without weights a bottleneck starts with the first channels (`jaxmp.models.bottleneck`). A trained
network would lose what the others say. Its activations vary in few directions, though, and with
these it loses little, before the first step of the fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

ABSENT = 2.0  # occurrences of the mean that a token's own is averaged with
TOKENS = 2**15  # of the inputs, from all of which the activations are taken


class Model(NamedTuple):
    """A trained network without a bottleneck.

    Attributes:
      stages: its stages.
      variables: theirs.
      x: inputs, tokens ``(N, T)``.
      vocabulary: number of tokens, if later stages will embed them; else 0.
    """

    stages: Sequence[Any]
    variables: Sequence[Any]
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
    x_NC: Float[np.ndarray, 'N C'],
    channels: int,
    tokens_N: Int[np.ndarray, ' N'],
    vocabulary: int,
) -> Start:
    r"""The directions in which activations vary most, and what tokens tell of the rest.

    .. math:: m_v = \bar x + \frac{\sum_{t_n = v} (x_n - \bar x)}{n_v + 2},\quad
              U = \text{eigenvectors of} \sum_n (x_n - m_{t_n}) (x_n - m_{t_n})^T,\quad
              E = U_K,\ D = U_K^T,\ T_v = (I - U_K U_K^T)\, m_v

    What arrives for an activation x of token v is :math:`D E x + T_v`. Without a vocabulary m is 0.

    Args:
      x_NC: activations at the boundary.
      channels: K.
      tokens_N: the token of each; not read without a vocabulary.
      vocabulary: number of tokens, V; 0: the stage after has no embedding.

    Returns:
      Arrays of the dtype of ``x_NC``. Each direction has a positive largest component.

    >>> x = np.array([[1.0, 2.0], [-1.0, -2.0], [2.0, 4.0]])
    >>> e, d, _ = principal(x, 1, np.zeros(3, int), 0)
    >>> bool(np.allclose(x @ e @ d, x)), d.round(2).tolist()
    (True, [[0.45, 0.89]])

    References:
      Activations of low rank: Protocol Models (arXiv 2506.01260).
    """
    x = x_NC.astype(np.float64)
    means, rest = np.zeros((vocabulary, x.shape[1])), x
    if vocabulary:
        middle, counts = x.mean(0), np.bincount(tokens_N, minlength=vocabulary)
        np.add.at(means, tokens_N, x - middle)
        means = middle + means / (counts[:, None] + ABSENT)
        rest = x - means[tokens_N]
    u = np.linalg.eigh(rest.T @ rest)[1][:, ::-1][:, :channels]  # ascending eigenvalues
    u = u * np.sign(np.take_along_axis(u, np.abs(u).argmax(0)[None], 0))
    made = u, u.T, means - means @ u @ u.T
    return Start(*(a.astype(x_NC.dtype) for a in made))


def fitted(model: Model, stage: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a stage at its boundaries, at first, by `principal`.

    Args:
      model: the network.
      stage: number of the stage.
      params: its parameters; of these a ``narrow`` and a ``widen``, with its ``tokens``, are made.
    """
    made: dict[str, Any] = {}
    if 'narrow' in params:
        kernel = _start(model, stage, params['narrow']['kernel'].shape[1]).narrow
        made['narrow'] = {'kernel': kernel}
    if 'widen' in params:
        start = _start(model, stage - 1, params['widen']['kernel'].shape[0])
        made['widen'] = {'kernel': start.widen}
        if 'tokens' in params:
            made['tokens'] = start.tokens
    return jax.tree.map(jnp.asarray, made)


def _start(model: Model, boundary: int, channels: int) -> Start:
    x = np.asarray(model.x[:: max(1, model.x.size // TOKENS)])
    with jax.ensure_compile_time_eval():  # `fitted` may be traced, for its shapes
        h: Any = jnp.asarray(x, jnp.int32)
        for s in range(boundary + 1):
            h = jax.jit(model.stages[s].apply)(model.variables[s], h)
    return principal(np.asarray(h).reshape(-1, h.shape[-1]), channels, x.ravel(), model.vocabulary)
