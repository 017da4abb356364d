"""Gradients are clipped by their norm over all stages, though a stage sees its own alone.

`jaxmp.training.step` sums the squares of all stages, and every stage multiplies its gradients with
the same `clip_scale`. An own optimizer that clips by itself is a `WholeNorm`: it is given the norm
of the other stages' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import Grads, Params, Tree

OptState = PyTree  # of an optimizer, as its `init` returns it


def clip_scale(limit: float, square: ArrayLike) -> Array:
    """What gradients of the given squared global norm are multiplied with."""
    return jnp.minimum(1, limit / (jnp.sqrt(square) + 1e-12))


def scaled(grads: Grads, scale: ArrayLike) -> Grads:
    """Gradients times the scale, in their own dtypes."""
    return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)


class WholeNorm(NamedTuple):
    """An optimizer of one stage that knows the norm of the gradients of all others.

    It gets that norm as the gradient of one more number, so that the norm of its tree is that of
    all stages.

    Attributes:
      init: ``parameters -> state``.
      update: ``(gradients, norm of all others, state, parameters) -> (updates, state)``.
    """

    init: Callable[[Params], OptState]
    update: Callable[[Grads, Array, OptState, Params], tuple[Grads, OptState]]


def whole_norm(optimizer: optax.GradientTransformation) -> WholeNorm:
    """``optimizer``, which clips by the norm of its tree, as one of a stage."""

    def update(
        grads: Grads, others: Array, state: OptState, params: Params
    ) -> tuple[Grads, OptState]:
        updates: Tree  # a pair, as what it is given
        updates, state = optimizer.update((grads, others), state, (params, jnp.zeros(())))
        return updates[0], state

    return WholeNorm(lambda params: optimizer.init((params, jnp.zeros(()))), update)


def of_stage(
    optimizer: optax.GradientTransformation, name: str
) -> optax.GradientTransformation | WholeNorm:
    """An own optimizer as that of one stage, which sees the gradients of its stage alone.

    It is tried on two stages of a few numbers: as one tree, and each by itself.

    Args:
      optimizer: written for the parameters of all stages.
      name: ``config.optimizer.name``, for the message.

    Returns:
      ``optimizer`` if both give the same updates; `whole_norm` of it if they do so once each stage
      knows the norm of the other.

    Raises:
      ValueError: if it needs more of other stages than the norm of their gradients.

    >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    >>> isinstance(of_stage(clipped, 'own.py:clipped'), WholeNorm)
    True
    >>> plain = optax.adam(0.1)
    >>> of_stage(plain, 'own.py:plain') is plain
    True
    """
    params = {'kernel': jnp.ones((2, 2)), 'bias': jnp.ones(2)}
    ramp = {'kernel': jnp.arange(1.0, 5.0).reshape(2, 2), 'bias': jnp.arange(1.0, 3.0)}
    grads = [jax.tree.map(lambda a, c=c: c * a, ramp) for c in (1.0, -3.0)]  # of either stage
    norms = [jnp.sqrt(sum(jnp.vdot(a, a) for a in g.values())) for g in grads]
    run = jax.jit(functools.partial(_updates, optimizer))
    try:
        whole = run((params, params), tuple(grads))
        apart = tuple(run(params, g) for g in grads)
        normed = tuple(
            run((params, 0.0), (g, n))[0] for g, n in zip(grads, norms[::-1], strict=True)
        )
    except Exception:  # an optimizer that knows its own parameters' names alone
        return optimizer
    if _close(apart, whole):
        return optimizer
    if _close(normed, whole):
        return whole_norm(optimizer)
    raise ValueError(
        f'config.optimizer.name={name!r} moves parameters by gradients of other stages, and every '
        'stage has an optimizer of its own, which knows their norm alone; take '
        'config.optimizer.clip_norm to clip, and rules that look at an array at a time'
    )


def _updates(optimizer: optax.GradientTransformation, start: Params, grads: Grads) -> Grads:
    """The updates of three steps, whose gradients grow and fall, stacked."""
    params, state, steps = start, optimizer.init(start), []
    for scale in (1.0, 1e6, 1e-3):
        scaled_grads = jax.tree.map(lambda g, c=scale: c * g, grads)
        updates, state = optimizer.update(scaled_grads, state, params)
        params = optax.apply_updates(params, updates)
        steps.append(updates)
    return jax.tree.map(lambda *a: jnp.stack(a), *steps)


def _close(a: Tree, b: Tree) -> bool:
    """Whether all numbers of two trees agree to five digits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True) for x, y in pairs)
