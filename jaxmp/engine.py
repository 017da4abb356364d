"""What a run needs of a runtime; and the runtime that is one program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxmp.evaluate import evaluator
from jaxmp.pipeline import Pipeline
from jaxmp.setting import Setting, model_at
from jaxmp.train import Epoch, create, epoch_form, train_step


class Engine(NamedTuple):
    """How a setting is trained and scored.

    Attributes:
      create: the state before the first step of a setting that differs in nothing but its seed; a
        pytree that a checkpoint can hold.
      epoch: given the number of an epoch from 0, a function that runs (the rest of) it.
      evaluate: ``(state, compressed) -> {'loss', 'accuracy'}`` on the whole test split.
      moved: what this runtime knows of bytes on wires, for the summary.
      check: raises if the state is not what it must be (replicas that differ).
      weights: the variables of all stages, where this process has them; else None.
    """

    create: Callable[[Setting], Any]
    epoch: Callable[[int], Epoch]
    evaluate: Callable[[Any, bool], dict[str, float]]
    moved: Callable[[], dict[str, Any]]
    check: Callable[[Any], None] = lambda state: None
    weights: Callable[[Any], Any] = lambda state: None


def one_program(s: Setting) -> Engine:
    """All stages in one program on one device: convergence studies, notebooks."""

    @functools.lru_cache(maxsize=2)  # in the warm-up and after it, for run after run
    def compiled(model: Pipeline) -> Epoch:
        return epoch_form()(s, functools.partial(train_step, s, model))

    return Engine(
        create=create,
        epoch=lambda n: compiled(model_at(s, n)),
        evaluate=evaluator(s),
        moved=dict,
        weights=lambda state: state.variables,
    )
