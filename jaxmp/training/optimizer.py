"""The optimizer that a configuration describes, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

from jaxmp.config import KEYS, Config
from jaxmp.plugins import called


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

    Raises:
      ValueError: as `rate_of`; if an own function returns no optimizer.
    """
    c, rate = config.optimizer, rate_of(config, epoch_steps)
    if c.name == 'adamw':
        return optax.adamw(rate, weight_decay=c.weight_decay)
    if c.name == 'sgd':
        return optax.chain(optax.add_decayed_weights(c.weight_decay), optax.sgd(rate, c.momentum))
    chosen = called('optimizer.name', c.name, KEYS['optimizer.name'].own, config, rate)
    if not isinstance(chosen, optax.GradientTransformation):
        raise ValueError(
            f'config.optimizer.name={c.name!r} returned {type(chosen).__name__}; it must be '
            f'{KEYS["optimizer.name"].own}'
        )
    return chosen
