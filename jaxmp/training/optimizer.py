"""The optimizer that a configuration describes, and its learning rate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jaxtyping import Array

from jaxmp.config import KEYS, Config
from jaxmp.exchange.collectives import Params, Tree
from jaxmp.plugins import called
from jaxmp.training.clipping import WholeNorm, of_stage
from jaxmp.training.late import corrected
from jaxmp.training.masters import with_masters
from jaxmp.training.workdir.points import points_of, steps_of

MUON_RMS = 0.2  # of an update of Adam; Muon is Scalable for LLM Training, arXiv 2502.16982
Optimizer = optax.GradientTransformation | WholeNorm
Rate = Callable[[Any], Any]  # the learning rate, given the number of a step
DECAY = '20%'  # of the run, over which wsd falls unless it says another length
STACKED = ('weight', 'lora_a', 'lora_b')  # names of the matrices of a decoder's blocks


def rate_of(config: Config, epoch_steps: int) -> Rate:
    """The learning rate as a function of the step.

    It rises from 0 in a straight line over ``warmup``, and then follows ``schedule``. Steps are
    those that move the parameters: with late gradients the first ``delay`` of a run do not.

    Raises:
      ValueError: if the run is too short for its parts.
    """
    c, steps = config.optimizer, points_of(config, epoch_steps).end
    end = steps - c.delay
    if end <= 0 < c.delay:
        raise ValueError(
            f'config.optimizer.delay={c.delay} leaves none of {steps} steps that moves the '
            f'parameters; give a delay of {steps - 1} at most, or more steps'
        )
    warmup = steps_of(c.warmup, epoch_steps, end)
    kind, length = schedule_of(c.schedule)
    decay = steps_of(length or DECAY, epoch_steps, end) if kind == 'wsd' else 0
    if warmup + max(decay, 1) > end:
        parts = f'config.optimizer.warmup={c.warmup!r}'
        parts += f' and config.optimizer.schedule={c.schedule!r}' * bool(decay)
        late = f', of which config.optimizer.delay={c.delay} move nothing' * bool(c.delay)
        raise ValueError(
            f'{parts} are {warmup + decay} steps and the run has {steps}{late}; shorten them, or '
            'give more config.steps or config.epochs'
        )
    rate = _schedule(config, epoch_steps, end - warmup, decay)
    if not warmup:
        return rate
    return optax.join_schedules(
        [optax.linear_schedule(0.0, float(rate(0)), warmup), rate], [warmup]
    )


def schedule_of(text: str) -> tuple[str, str]:
    """The word of ``config.optimizer.schedule``, and the length that it has in brackets, if any.

    >>> schedule_of('cosine(20)'), schedule_of('linear'), schedule_of('own.py:rate')
    (('cosine', '20'), ('linear', ''), ('own.py:rate', ''))
    """
    word, _, length = text.removesuffix(')').partition('(')
    return word, length


def _schedule(config: Config, epoch_steps: int, steps: int, decay: int) -> Rate:
    """The rate after its warm-up, as a function of the step since.

    ``constant``; ``linear`` and ``cosine``, which fall to 0 over all ``steps``; ``wsd``, which is
    constant and falls to 0 in a straight line over the last ``decay`` steps; ``cosine(N)``, which
    moves once per epoch and reaches 0 after N; or an own function.
    """
    c, (kind, length) = config.optimizer, schedule_of(config.optimizer.schedule)
    if ':' in c.schedule:
        wanted = KEYS['optimizer.schedule'].own
        return called('optimizer.schedule', c.schedule, wanted, config, epoch_steps)
    if kind == 'linear':
        return optax.linear_schedule(c.lr, 0.0, steps)
    if kind == 'wsd':
        fall = optax.linear_schedule(c.lr, 0.0, decay)
        return optax.join_schedules([optax.constant_schedule(c.lr), fall], [steps - decay])
    if kind == 'constant':
        return lambda step: c.lr
    if not length:
        return optax.cosine_decay_schedule(c.lr, steps)

    def cosine(step: Array | int) -> Array:
        return c.lr * 0.5 * (1 + jnp.cos(jnp.pi * (step // epoch_steps) / int(length)))

    return cosine


def optimizer_of(
    config: Config, epoch_steps: int, delay: int = 0, groups: Callable[[], Sequence[Params]] = tuple
) -> Optimizer:
    r"""The optimizer of one stage's parameters; where those have 16 bits, with float32 copies.

    ``sgd``: momentum, weight decay on all parameters. ``adamw``: decoupled weight decay.
    ``muon``: Muon for all kernels, as matrices whose last axis is the output, and for each block's
    matrices ``(out, in)`` of a decoder, low-rank factors included; AdamW with Nesterov's momentum
    for the rest, tables included, at ``adamw_scale`` times the rate. The momentum ``M = U S V'``
    moves an ``m x n`` matrix by the RMS that AdamW's updates have, so that one rate may serve both:

    .. math:: W \leftarrow W - 0.2\,\eta\,\sqrt{\max(m, n)}\; U V^\top

    Args:
      config: of the run.
      epoch_steps: steps per epoch.
      delay: steps that the stage's gradients are late.
      groups: gives the parameters that it may be given, on which an own optimizer is tried.

    Raises:
      ValueError: as `rate_of`, `check_whole_norm` and `of_stage`, and if an own function returns
        no optimizer.
    """
    c, whole = config.optimizer, _whole(config, rate_of(config, epoch_steps))
    is_own, trees = ':' in c.name, groups() if ':' in c.name else ()
    if c.delay and is_own and isinstance(of_stage(whole, c.name, trees), WholeNorm):
        check_whole_norm(config)
    whole = corrected(whole, delay, c.correction)
    if config.model.param_dtype == 'bfloat16':
        whole = with_masters(whole)
    return of_stage(whole, c.name, trees) if is_own else whole


def check_whole_norm(config: Config) -> None:
    """Raises ValueError where late gradients leave an optimizer without the norm of all stages."""
    c = config.optimizer
    clips = f'config.optimizer.name={c.name!r} clips by the norm over all stages, and '
    if c.delay_by_stage:
        raise ValueError(
            f'{clips}with config.optimizer.delay_by_stage=True a step has gradients of several '
            'batches; take config.optimizer.clip_norm, which then clips each group by itself, or '
            'leave delay_by_stage out'
        )


def _whole(config: Config, rate: Rate) -> optax.GradientTransformation:
    """The optimizer that ``config.optimizer`` names, as that of one tree of parameters."""
    c = config.optimizer
    if c.name == 'adamw':
        return optax.adamw(rate, weight_decay=c.weight_decay)
    if c.name == 'muon':
        scale = float(c.adamw_scale)
        rest = lambda step: scale * rate(step)
        return optax.contrib.muon(
            rate, weight_decay=c.weight_decay, adam_weight_decay=c.weight_decay,
            adam_learning_rate=rate if scale == 1 else rest,
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


def _matrices(params: Params) -> Tree:
    """Of each matrix its axes, of any other parameter None.

    A ``kernel`` is one matrix, whose last axis is the output. Under ``layers``, where
    `jaxmp.models.decoder` stacks the blocks of a stage, an array of three axes is one matrix
    ``(out, in)`` per block; two axes are vectors, such as scales.
    """

    def axes(path: KeyPath, a: Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = jax.tree_util.keystr(path, simple=True, separator='.').split('.')
        if names[-1] == 'kernel' and a.ndim >= 2:
            return optax.contrib.MuonDimensionNumbers(tuple(range(a.ndim - 1)), a.ndim - 1)
        if 'layers' in names[:-1] and names[-1] in STACKED and a.ndim == 3:
            return optax.contrib.MuonDimensionNumbers(2, 1)
        return None

    return jax.tree.map_with_path(axes, params)
