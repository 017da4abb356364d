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
FINITE, AFTER = 12, 4  # steps of a trial, until one stage has NaN, and from then on


def of_stage(
    optimizer: optax.GradientTransformation, name: str, groups: Sequence[Params] = ()
) -> optax.GradientTransformation | WholeNorm:
    """An own optimizer as that of one stage, which sees the gradients of its stage alone.

    It is tried on two stages of a few numbers: as one tree, and each by itself, for 16 steps. What
    it does later by gradients of other stages is not seen.

    Args:
      optimizer: written for the parameters of all stages.
      name: ``config.optimizer.name``, for the message.
      groups: parameters that it may be given, whose names and axes the few numbers have; none: two
        arrays without names.

    Returns:
      ``optimizer`` if both give the same updates; `whole_norm` of it if they do so once each stage
      knows the norm of the other.

    Raises:
      ValueError: if it fails, moves nothing, or needs more of other stages than the norm of their
        gradients in the step.

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
    if not trees:
        return optimizer
    trials = (_trial(optimizer, name, tree, several) for tree in trees.values())
    moves, alone, normed = zip(*trials, strict=True)
    says = f'config.optimizer.name={name!r} moves'
    if not any(moves):
        raise ValueError(
            f'{says} no parameter in {FINITE} steps, by which it is seen how it clips; let it do '
            'so, by its rate or fewer steps a move, and take config.optimizer.clip_norm to clip'
        )
    if all(alone):
        return optimizer
    if all(normed):
        return whole_norm(optimizer)
    raise ValueError(
        f'{says} parameters by more of other stages than the norm of their gradients in the step, '
        'all that a stage knows; take config.optimizer.clip_norm to clip, and an optimizer that '
        'clips no momentum or sum of steps, and has no statistics over all arrays'
    )


def _trial(
    optimizer: optax.GradientTransformation, name: str, params: Params, several: bool
) -> tuple[bool, bool, bool]:
    """Whether an optimizer moves ``params``; two stages as one tree; as `whole_norm` of it."""
    stages = _gradients(params)
    norms = [[np.sqrt(sum(np.vdot(a, a) for a in jax.tree.leaves(g))) for g in s] for s in stages]
    plain = WholeNorm(optimizer.init, lambda grads, _, *rest: optimizer.update(grads, *rest))
    two = functools.partial(jax.tree.map, lambda *arrays: arrays)
    says = f'config.optimizer.name={name!r}'
    try:
        apart = _updates(plain, params, stages, norms)
    except Exception as error:  # of the user's own function, which may raise anything
        raise ValueError(
            f'{says} fails on arrays with the names of a stage and at most 2 numbers an axis '
            f'({type(error).__name__}: {error}), by which it is seen how it clips; mend it'
        ) from error
    moves = any(np.any(a[:FINITE]) for a in jax.tree.leaves(apart))
    try:
        (whole,) = _updates(plain, two(params, params), [list(map(two, *stages))], norms)
        normed = _updates(whole_norm(optimizer), params, stages, norms[::-1])
    except Exception as error:  # it takes its arrays in no other tree
        if several and not _mixes(plain, params, stages):
            return moves, True, False
        raise ValueError(
            f'{says} may move parameters by gradients of other stages, and cannot be given their '
            f'norm beside its arrays ({type(error).__name__}: {error}); take '
            'config.optimizer.clip_norm to clip, or look names up by all of their path'
        ) from error
    return moves, _close(two(*apart), whole), _close(two(*normed), whole)


def _gradients(params: Params) -> list[list[Grads]]:
    """Gradients of each step of two stages, of other directions and sizes; NaN once in one."""
    random = np.random.default_rng(0)
    sizes = np.exp(random.normal(size=(2, FINITE + AFTER)))
    # They grow, so that parameters which have moved far round no small update away.
    sizes *= 10.0 ** np.linspace(-3, 6, FINITE + AFTER)
    sizes[0, FINITE] = np.nan
    draw = lambda size, a: np.asarray(size * random.normal(size=a.shape), np.float32)
    return [[jax.tree.map(functools.partial(draw, c), params) for c in row] for row in sizes]


def _mixes(rule: WholeNorm, params: Params, stages: list[list[Grads]]) -> bool:
    """Whether the update of an array depends on the gradients of others."""
    structure = jax.tree.structure(params)
    other, base = (list(zip(*map(jax.tree.leaves, steps), strict=True)) for steps in stages)
    rows = [base, *([*base[:i], a, *base[i + 1 :]] for i, a in enumerate(other))]
    grads = [[structure.unflatten(leaves) for leaves in zip(*row, strict=True)] for row in rows]
    zeros = [[0.0] * (FINITE + AFTER)] * len(rows)
    before, *after = map(jax.tree.leaves, _updates(rule, params, grads, zeros))
    pairs = ((before[:i] + before[i + 1 :], a[:i] + a[i + 1 :]) for i, a in enumerate(after))
    return not all(_close(*pair) for pair in pairs)


def _updates(
    rule: WholeNorm, start: Params, stages: Sequence[list[Grads]], norms: Sequence[list]
) -> list[Grads]:
    """The updates of each stage, whose arrays have the steps in front."""

    @jax.jit
    def step(
        grads: Grads, others: Array, state: OptState, params: Params
    ) -> tuple[Grads, OptState, Params]:
        updates, state = rule.update(grads, others, state, params)
        return updates, state, optax.apply_updates(params, updates)

    init, rows = jax.jit(rule.init), []
    for grads_of_steps, others_of_steps in zip(stages, norms, strict=False):
        params, state, steps = start, init(start), []
        for grads, others in zip(grads_of_steps, others_of_steps, strict=True):
            updates, state, params = step(grads, others, state, params)
            steps.append(updates)
        rows.append(jax.tree.map(lambda *a: np.stack(a), *jax.device_get(steps)))
    return rows


def _close(a: Tree, b: Tree) -> bool:
    """Whether all numbers of two trees agree to five digits of the largest in array and step."""
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        sizes = np.where(np.isfinite(y), np.abs(y), 0).reshape(len(y), -1)
        largest = sizes.max(1, initial=0).reshape(-1, *[1] * (y.ndim - 1))
        if not np.isclose(x, y, rtol=0, atol=1e-5 * largest, equal_nan=True).all():
            return False
    return True
