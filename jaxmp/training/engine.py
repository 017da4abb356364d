"""`Engine`: what a run asks of the way in which it is trained and scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import Boundary, boundary
from jaxmp.codecs import raw
from jaxmp.feedback import direct, per_microbatch
from jaxmp.runtimes.types import Model
from jaxmp.setting import Setting, micro_like
from jaxmp.training.portable import Portable
from jaxmp.training.step import Rules

Values = dict[str, Any]  # loss and accuracy of one step, or of each of several
Stopped = Callable[[], bool]
Epoch = Callable[..., Iterator[tuple[Any, Values, bool]]]
STREAM = 2**32 - 1  # of a run's key; 0 is the initial parameters', a step has its number's


class Engine(NamedTuple):
    """How an experiment is trained and scored.

    Attributes:
      create: the state before the first step of a setting that differs in nothing but its seed; a
        pytree that a checkpoint can hold.
      epoch: given the number of an epoch from 0, a function that runs (the rest of) it.
      export: a state as a checkpoint holds it, this process's part.
      load: ``(a state, what all processes exported) -> state``; it may be of another runtime.
      evaluate: ``(state, compressed) -> {'loss', 'accuracy'}`` on the whole test split.
      moved: what this runtime knows of bytes on links, for the summary.
      check: raises if the state is not what it must be (replicas that differ).
      weights: the variables of all stages, where this process has them; else None.
    """

    create: Callable[[Setting], Any]
    epoch: Callable[[int], Epoch]
    evaluate: Callable[[Any, bool], dict[str, float]]
    export: Callable[[Any], Portable]
    load: Callable[[Any, Portable], Any]
    moved: Callable[[], dict[str, Any]]
    check: Callable[[Any], None] = lambda state: None
    weights: Callable[[Any], Any] = lambda state: None


def model_of(s: Setting, cuts: tuple[Boundary, ...]) -> Model:
    """The model of an experiment, with some boundaries between its stages."""
    n = s.config.micro_batches
    kept = tuple(boundary(per_microbatch(b.fwd, n), per_microbatch(b.bwd, n), b.via) for b in cuts)

    def loss(output: Array, y: Array) -> tuple[Array, dict[str, Array]]:
        nll, right = s.task.score(output, y)
        value = jnp.mean(nll)
        return value, {'loss': value, 'accuracy': jnp.mean(right)}

    return Model(s.task.stages, kept, s.task.prepare, loss, micro_like(s), n)


def rules_of(s: Setting, epoch: int) -> Rules:
    """What a step of an epoch does with the gradients."""
    return Rules(s.optimiser, s.exchange.phase(epoch), s.config.clip_norm, s.task.tied)


def cuts_at(s: Setting, epoch: int) -> tuple[Boundary, ...]:
    """The boundaries of an epoch: in the warm-up, or after it."""
    warming = epoch < s.config.warmup_epochs
    return (s.warm_model if warming else s.model).boundaries


# Scoring.


def forgets(s: Setting, cut: Boundary) -> bool:
    """Whether the test goes through ``cut`` as plain ``C(x)``."""
    return cut.fwd.per_example or s.config.eval_feedback == 'direct'


def cuts_to_score(s: Setting, compressed: bool) -> tuple[Boundary, ...]:
    """The boundaries of a test: open, or compressed as in training.

    Feedback buffers belong to the training. A test works on a private copy that is thrown away
    (``config.eval_feedback = 'carry'``), reads the training state and never writes (``frozen``), or
    does without (``direct``: plain ``C(x)``). A channel with a buffer per training example is
    always ``C(x)``, for test examples have none.
    """
    if not compressed:
        return (boundary(direct(raw), direct(raw)),) * len(s.model.boundaries)
    return tuple(
        Boundary(direct(b.fwd.codec), b.bwd, b.via) if forgets(s, b) else b
        for b in s.model.boundaries
    )


def keeps(s: Setting, compressed: bool) -> list[bool]:
    """For each boundary whether its test starts from the training's forward state."""
    return [compressed and not forgets(s, b) for b in s.model.boundaries]


def evaluation_key(key: Array, batch: int) -> Array:
    """Randomness of a batch of the test split, which no training step shares.

    Args:
      key: of the run.
      batch: its number in the split.
    """
    return jax.random.fold_in(jax.random.fold_in(key, STREAM), batch)


def sums(s: Setting, output: Array, batch: Any) -> Array:
    """Sums of loss and of right answers over a batch whose padding is masked."""
    return jnp.stack([jnp.sum(v * batch['mask']) for v in s.task.score(output, batch['y'])])


def means(s: Setting, total: Any) -> dict[str, float]:
    """Sums over the test split as means."""
    loss, accuracy = total / len(s.data.test.y)
    return {'loss': float(loss), 'accuracy': float(accuracy)}
