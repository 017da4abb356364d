"""The optimizer that a configuration describes, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmp.config import KEYS, Config
from jaxmp.plugins import called

MUON_RMS = 0.2  # of an update of Adam; Muon is Scalable for LLM Training, arXiv 2502.16982


def rate_of(config: Config, epoch_steps: int) -> Callable[[Any], Any]:
    """The learning rate as a function of the step.

    ``constant``; ``cosine``, which moves once per epoch and reaches 0 after ``cosine_epochs``;
    ``linear``, which falls to 0 at the last step; or an own function.

    Raises:
      ValueError: if a cosine has no length.
    """
    c = config.optimizer
    if ':' in c.schedule:
        wanted = KEYS['optimizer.schedule'].own
        return called('optimizer.schedule', c.schedule, wanted, config, epoch_steps)
    if c.schedule == 'linear':
        return optax.linear_schedule(c.lr, 0.0, config.epochs * epoch_steps)
    if c.schedule == 'constant':
        return lambda step: c.lr
    if not c.cosine_epochs:
        raise ValueError(
            "config.optimizer.schedule='cosine' needs config.optimizer.cosine_epochs, the epochs "
            'of half a period; give as many as config.epochs to end near 0'
        )

    def cosine(step: Any) -> Any:
        return c.lr * 0.5 * (1 + jnp.cos(jnp.pi * (step // epoch_steps) / c.cosine_epochs))

    return cosine


def optimizer_of(config: Config, epoch_steps: int) -> optax.GradientTransformation:
    """The optimizer of one stage's parameters.

    ``sgd``: momentum, weight decay on all parameters. ``adamw``: decoupled weight decay.
    ``muon``: Muon for all kernels, as matrices whose last axis is the output, with updates of the
    RMS that AdamW's have, so that one rate serves both; AdamW with Nesterov's momentum
    for the rest, tables included.

    Raises:
      ValueError: as `rate_of`; if an own function returns no optimizer.
    """
    c, rate = config.optimizer, rate_of(config, epoch_steps)
    if c.name == 'adamw':
        return optax.adamw(rate, weight_decay=c.weight_decay)
    if c.name == 'muon':
        return optax.contrib.muon(
            rate, weight_decay=c.weight_decay, adam_weight_decay=c.weight_decay,
            muon_weight_dimension_numbers=_kernels, consistent_rms=MUON_RMS,
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


def _kernels(params: Any) -> Any:
    """Of each kernel the axes of its matrix, of any other parameter None."""

    def axes(path: Any, a: Any) -> Any:
        if jax.tree_util.keystr(path[-1:], simple=True) != 'kernel' or a.ndim < 2:
            return None
        return optax.contrib.MuonDimensionNumbers(tuple(range(a.ndim - 1)), a.ndim - 1)

    return jax.tree.map_with_path(axes, params)
