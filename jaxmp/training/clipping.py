"""Gradients are clipped by their norm over all stages, though a stage sees its own alone.

`jaxmp.training.step` sums the squares of all stages, and every stage multiplies its gradients with
the same `clip_scale`. An own optimizer that clips by itself is a `WholeNorm`: it is given the norm
of the other stages' gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
        updates: Tree  # of the form of what it is given
        updates, state = optimizer.update(
            _beside(grads, others), state, _beside(params, jnp.zeros(()))
        )
        leaves = jax.tree.structure(grads).flatten_up_to(updates)
        leaves[:1] = [leaf for leaf, _ in leaves[:1]]
        return jax.tree.unflatten(jax.tree.structure(grads), leaves), state

    return WholeNorm(lambda params: optimizer.init(_beside(params, jnp.zeros(()))), update)


def _beside(tree: Tree, number: ArrayLike) -> Tree:
    """``tree`` with a number beside its first array, so that names are found where they were."""
    leaves, structure = jax.tree.flatten(tree)
    leaves[:1] = [(leaf, number) for leaf in leaves[:1]]
    return jax.tree.unflatten(structure, leaves)


NAMELESS = [np.ones((2, 2)), np.ones(2)]


def of_stage(
    optimizer: optax.GradientTransformation, name: str, groups: Sequence[Params] = ()
) -> optax.GradientTransformation | WholeNorm:
    """An own optimizer as that of one stage, which sees the gradients of its stage alone.

    It is tried on two stages of a few numbers: as one tree, and each by itself.

    Args:
      optimizer: written for the parameters of all stages.
      name: ``config.optimizer.name``, for the message.
      groups: parameters that it may be given, whose names and axes the few numbers have; none: two
        arrays without names.

    Returns:
      ``optimizer`` if both give the same updates; `whole_norm` of it if they do so once each stage
      knows the norm of the other.

    Raises:
      ValueError: if it fails, or needs more of other stages than the norm of their gradients.

    >>> clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    >>> isinstance(of_stage(clipped, 'own.py:clipped'), WholeNorm)
    True
    >>> plain = optax.adam(0.1)
    >>> of_stage(plain, 'own.py:plain') is plain
    True
    """
    few = (
        jax.tree.map(lambda a: np.ones([min(n, 2) for n in a.shape], np.float32), g)
        for g in groups or (NAMELESS,)
    )
    trees = {str(jax.tree.map(np.shape, tree)): tree for tree in few if jax.tree.leaves(tree)}
    # Of one array by itself nobody can tell by which norm it is clipped.
    several = any(len(jax.tree.leaves(tree)) > 1 for tree in trees.values())
    needed = [_needs_norm(optimizer, name, tree, several) for tree in trees.values()]
    return whole_norm(optimizer) if any(needed) else optimizer


def _needs_norm(
    optimizer: optax.GradientTransformation, name: str, params: Params, several: bool
) -> bool:
    """Whether an optimizer of ``params`` needs the norm of others; see `of_stage`."""
    ramp = jax.tree.map(lambda a: np.arange(1, 1 + a.size, dtype=a.dtype).reshape(a.shape), params)
    grads = [jax.tree.map(lambda a, c=c: c * a, ramp) for c in (1.0, -3.0)]  # of either stage
    norms = [np.sqrt(sum(np.vdot(a, a) for a in jax.tree.leaves(g))) for g in grads]
    run = jax.jit(functools.partial(_updates, optimizer))
    two = functools.partial(jax.tree.map, lambda *arrays: arrays)
    says = f'config.optimizer.name={name!r}'
    try:
        apart = [run(params, g) for g in grads]
    except Exception as error:  # of the user's own function, which may raise anything
        raise ValueError(
            f'{says} fails on arrays with the names of a stage and at most 2 numbers an axis '
            f'({type(error).__name__}: {error}), by which it is seen how it clips; mend it'
        ) from error
    try:
        whole = run(two(params, params), two(*grads))
        normed = [
            jax.tree.leaves(run(_beside(params, 0.0), _beside(g, n)))
            for g, n in zip(grads, norms[::-1], strict=True)
        ]
    except Exception as error:  # it takes its arrays in no other tree
        if not several or _mixes(run, params, grads[0]):
            raise ValueError(
                f'{says} may move parameters by gradients of other stages, and cannot be given '
                f'their norm beside its arrays ({type(error).__name__}: {error}); take '
                'config.optimizer.clip_norm to clip, or look names up by all of their path'
            ) from error
        return False
    if _close(two(*apart), whole):
        return False
    if _close(two(*([leaves[0], *leaves[2:]] for leaves in normed)), whole):
        return True
    raise ValueError(
        f'{says} moves parameters by gradients of other stages, and every '
        'stage has an optimizer of its own, which knows their norm alone; take '
        'config.optimizer.clip_norm to clip, and rules that look at an array at a time'
    )


def _mixes(run: Callable[[Params, Grads], Grads], params: Params, grads: Grads) -> bool:
    """Whether the update of an array depends on the gradients of others."""
    leaves, structure = jax.tree.flatten(grads)
    before = jax.tree.leaves(run(params, grads))
    for i, leaf in enumerate(leaves):
        other = jax.tree.unflatten(structure, [*leaves[:i], -3 * leaf, *leaves[i + 1 :]])
        after = jax.tree.leaves(run(params, other))
        if not _close(before[:i] + before[i + 1 :], after[:i] + after[i + 1 :]):
            return True
    return False


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
