"""`Outer`: the optimizer of the parameters that replicas share once per round."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import optax

from jaxmp.wire.words import Origin, known, word


@known
class Outer(NamedTuple):
    """An outer optimizer, as an optax gradient transformation whose call is recorded.

    Attributes:
      init: ``parameters -> state``.
      update: ``(pseudo-gradient, state, parameters) -> (change of the parameters, state)``.
      origin: the call that built it, its text and identity (`jaxmp.wire.words`).
    """

    init: Callable[[optax.Params], optax.OptState]
    update: Callable[..., tuple[optax.Updates, optax.OptState]]
    origin: Origin | None = None


@word
def sgd(lr: float) -> Outer:
    """Plain SGD as the outer optimizer: ``theta <- theta - lr D`` for the shared change D.

    Args:
      lr: the outer learning rate, above 0; SparseLoCo takes 1, with which the result of a lossless
        rule is the mean of the replicas' parameters.

    Raises:
      ValueError: if ``lr`` is out of range.
    """
    _check('sgd', lr)
    return Outer(*optax.sgd(lr))


@word
def nesterov(lr: float, momentum: float) -> Outer:
    """Nesterov momentum: ``u <- m u + D``, ``theta <- theta - lr (D + m u)`` for the change D.

    Args:
      lr: the outer learning rate, above 0.
      momentum: the number m, in [0, 1).

    Raises:
      ValueError: if an argument is out of range.

    References:
      DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105.
    """
    _check('nesterov', lr, momentum)
    return Outer(*optax.sgd(lr, momentum, nesterov=True))


def _check(name: str, lr: object, momentum: object = 0.0) -> None:
    for thing in (lr, momentum):
        if isinstance(thing, bool) or not isinstance(thing, int | float):
            raise ValueError(f'{name} takes numbers, got {thing!r}; write nesterov(0.7, 0.9)')
    if not 0 < float(lr) < float('inf') or not 0 <= float(momentum) < 1:  # pyright: ignore
        raise ValueError(
            f'{name} lr={lr}, momentum={momentum}: the rate is above 0 and the momentum in [0, 1)'
        )
