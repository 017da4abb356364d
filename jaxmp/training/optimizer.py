"""The optimizer that a configuration describes, and its learning rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmp.config import KEYS, Config
from jaxmp.plugins import called
from jaxmp.training.late import corrected
from jaxmp.training.masters import with_masters
from jaxmp.training.points import points_of, steps_of

MUON_RMS = 0.2  # of an update of Adam; Muon is Scalable for LLM Training, arXiv 2502.16982
STACKED = ('weight', 'lora_a', 'lora_b')  # names of the matrices of a decoder's blocks


def rate_of(config: Config, epoch_steps: int) -> Callable[[Any], Any]:
    """The learning rate as a function of the step.

    It rises from 0 in a straight line over ``warmup``, and then follows ``schedule``.

    Raises:
      ValueError: if the run is too short for its parts.
    """
    c, end = config.optimizer, points_of(config, epoch_steps).end
    warmup = steps_of(c.warmup, epoch_steps, end)
    decay = steps_of(c.decay, epoch_steps, end) if c.schedule == 'wsd' else 0
    if warmup + max(decay, 1) > end:
        parts = f'config.optimizer.warmup={c.warmup!r}'
        parts += f' and config.optimizer.decay={c.decay!r}' * bool(decay)
        raise ValueError(
            f'{parts} are {warmup + decay} steps and the run has {end}; shorten them, or give more '
            'config.steps or config.epochs'
        )
    rate = _schedule(config, epoch_steps, end - warmup, decay)
    if not warmup:
        return rate
    return optax.join_schedules(
        [optax.linear_schedule(0.0, float(rate(0)), warmup), rate], [warmup]
    )


def _schedule(config: Config, epoch_steps: int, steps: int, decay: int) -> Callable[[Any], Any]:
    """The rate after its warm-up, as a function of the step since.

    ``constant``; ``linear`` and ``cosine``, which fall to 0 over all ``steps``; ``wsd``, which is
    constant and falls to 0 in a straight line over the last ``decay`` steps; a cosine that moves
    once per epoch and reaches 0 after ``cosine_epochs``; or an own function.
    """
    c = config.optimizer
    if ':' in c.schedule:
        wanted = KEYS['optimizer.schedule'].own
        return called('optimizer.schedule', c.schedule, wanted, config, epoch_steps)
    if c.schedule == 'linear':
        return optax.linear_schedule(c.lr, 0.0, steps)
    if c.schedule == 'wsd':
        fall = optax.linear_schedule(c.lr, 0.0, decay)
        return optax.join_schedules([optax.constant_schedule(c.lr), fall], [steps - decay])
    if c.schedule == 'constant':
        return lambda step: c.lr
    if not c.cosine_epochs:
        return optax.cosine_decay_schedule(c.lr, steps)

    def cosine(step: Any) -> Any:
        return c.lr * 0.5 * (1 + jnp.cos(jnp.pi * (step // epoch_steps) / c.cosine_epochs))

    return cosine


def optimizer_of(config: Config, epoch_steps: int) -> Optimizer:
    r"""The optimizer of one stage's parameters; where those have 16 bits, with float32 copies.

    ``sgd``: momentum, weight decay on all parameters. ``adamw``: decoupled weight decay.
    ``muon``: Muon for all kernels, as matrices whose last axis is the output, and for each block's
    matrices ``(out, in)`` of a decoder, low-rank factors included; AdamW with Nesterov's momentum
    for the rest, tables included. The momentum ``M = U S V'`` moves an ``m x n`` matrix by the RMS
    that AdamW's updates have, so that one rate serves both:

    .. math:: W \leftarrow W - 0.2\,\eta\,\sqrt{\max(m, n)}\; U V^\top

    Raises:
      ValueError: as `rate_of` and `of_stage`, and if an own function returns no optimizer.
    """
    c, whole = config.optimizer, _whole(config, rate_of(config, epoch_steps))
    whole = corrected(whole, c.delay, c.correction)
    if config.model.param_dtype != 'float32':
        whole = with_masters(whole)
    return of_stage(whole, c.name) if ':' in c.name else whole


def _whole(config: Config, rate: Callable[[Any], Any]) -> optax.GradientTransformation:
    """The optimizer that ``config.optimizer`` names, as that of one tree of parameters."""
    c = config.optimizer
    if c.name == 'adamw':
        return optax.adamw(rate, weight_decay=c.weight_decay)
    if c.name == 'muon':
        return optax.contrib.muon(
            rate, weight_decay=c.weight_decay, adam_weight_decay=c.weight_decay,
            muon_weight_dimension_numbers=_matrices, consistent_rms=MUON_RMS,
        )  # fmt: skip
    if c.name == 'sgd':
        return optax.chain(optax.add_decayed_weights(c.weight_decay), optax.sgd(rate, c.momentum))
    chosen = called('optimizer.name', c.name, KEYS['optimizer.name'].own, config, rate)
    if not isinstance(chosen, optax.GradientTransformation):
        raise ValueError(
            f'config.optimizer.name={c.name!r} returned {type(chosen).__name__}; it must be '
            f'{KEYS["optimizer.name"].own}'
        )
    return chosen


class WholeNorm(NamedTuple):
    """An optimizer of one stage that knows the norm of the gradients of all others.

    It gets that norm as the gradient of one more number, so that the norm of its tree is that of
    all stages.

    Attributes:
      init: ``parameters -> state``.
      update: ``(gradients, norm of all others, state, parameters) -> (updates, state)``.
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any, Any], tuple[Any, Any]]


Optimizer = optax.GradientTransformation | WholeNorm


def whole_norm(optimizer: optax.GradientTransformation) -> WholeNorm:
    """``optimizer``, which clips by the norm of its tree, as one of a stage."""

    def update(grads: Any, others: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates: Any
        updates, state = optimizer.update((grads, others), state, (params, jnp.zeros(())))
        return updates[0], state

    return WholeNorm(lambda params: optimizer.init((params, jnp.zeros(()))), update)


def of_stage(optimizer: optax.GradientTransformation, name: str) -> Optimizer:
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


def _updates(optimizer: optax.GradientTransformation, start: Any, grads: Any) -> Any:
    """The updates of three steps, whose gradients grow and fall, stacked."""
    params, state, steps = start, optimizer.init(start), []
    for scale in (1.0, 1e6, 1e-3):
        given = jax.tree.map(lambda g, c=scale: c * g, grads)
        updates, state = optimizer.update(given, state, params)
        params = optax.apply_updates(params, updates)
        steps.append(updates)
    return jax.tree.map(lambda *a: jnp.stack(a), *steps)


def _close(a: Any, b: Any) -> bool:
    """Whether all numbers of two trees agree to five digits."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.allclose(x, y, rtol=1e-5, atol=0, equal_nan=True) for x, y in pairs)


def _matrices(params: Any) -> Any:
    """Of each matrix its axes, of any other parameter None.

    A ``kernel`` is one matrix, whose last axis is the output. Under ``layers``, where
    `jaxmp.models.decoder` stacks the blocks of a stage, an array of three axes is one matrix
    ``(out, in)`` per block; two axes are vectors, such as scales.
    """

    def axes(path: Any, a: Any) -> Any:
        names = jax.tree_util.keystr(path, simple=True, separator='.').split('.')
        if names[-1] == 'kernel' and a.ndim >= 2:
            return optax.contrib.MuonDimensionNumbers(tuple(range(a.ndim - 1)), a.ndim - 1)
        if 'layers' in names[:-1] and names[-1] in STACKED and a.ndim == 3:
            return optax.contrib.MuonDimensionNumbers(2, 1)
        return None

    return jax.tree.map_with_path(axes, params)
