"""`Engine`: the functions by which a run creates, trains, scores and saves a state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import Boundary, boundary
from jaxmp.feedback import per_microbatch
from jaxmp.runtimes.types import Model
from jaxmp.training.evaluate import scored
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.training.portable import Portable
from jaxmp.training.step import Rules

Values = dict[str, Any]  # the scores of one step, or of each of several
Stopped = Callable[[], bool]
Epoch = Callable[..., Iterator[tuple[Any, Values, bool]]]


class Engine(NamedTuple):
    """The functions of one way to train and score an experiment.

    Attributes:
      create: the state before the first step of an experiment that differs in nothing but its seed;
        a pytree that a checkpoint can hold.
      epoch: given the number of an epoch from 0, a function that runs (the rest of) it.
      export: a state as a checkpoint holds it, this process's part.
      load: ``(a state, what all processes exported) -> state``; it may be of another runtime.
      evaluate: ``(state, compressed) -> scores``, means over the whole test split.
      moved: measured bytes on the links, for the summary.
      check: raises if the state is not what it must be (replicas that differ).
      weights: the variables of all stages, where this process has those of replica 0; else None.
      probe: a row per boundary and direction; see `jaxmp.training.probe`.
      enter: the state with which this process joins others that have gone on without it.
      leave: told the last state, and whether the run has finished there.
      profile: asks for a profile of one of the next steps, in a folder; see
        `jaxmp.training.profile`.
    """

    create: Callable[[Experiment], Any]
    epoch: Callable[[int], Epoch]
    evaluate: Callable[[Any, bool], dict[str, float]]
    export: Callable[[Any], Portable]
    load: Callable[[Any, Portable], Any]
    moved: Callable[[], dict[str, Any]]
    check: Callable[[Any], None] = lambda state: None
    weights: Callable[[Any], Any] = lambda state: None
    probe: Callable[[Any], list[dict[str, Any]]] = lambda state: []
    enter: Callable[[Any], Any] = lambda state: state
    leave: Callable[[Any, bool], None] = lambda state, finished: None
    profile: Callable[[Path], None] = lambda folder: None


def model_of(exp: Experiment, cuts: tuple[Boundary, ...]) -> Model:
    """The model of an experiment, with some boundaries between its stages."""
    n = exp.config.parallel.num_microbatches
    cuts = tuple(boundary(per_microbatch(b.fwd, n), per_microbatch(b.bwd, n), b.via) for b in cuts)

    def loss(output: Array, y: Array) -> tuple[Array, dict[str, Array]]:
        scores = {k: jnp.mean(v) for k, v in scored(exp, output, y).items()}
        return scores['loss'], scores

    remat = exp.config.parallel.remat
    return Model(exp.task.stages, cuts, exp.task.prepare, loss, microbatch_like(exp), n, remat)


def rules_of(exp: Experiment, epoch: int) -> Rules:
    """What a step of an epoch does with the gradients."""
    groups = tuple(g._replace(exchange=g.exchange.phase(epoch)) for g in exp.groups)
    return Rules(groups, exp.config.optimizer.clip_norm)
