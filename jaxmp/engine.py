"""What a run needs of a runtime; and the runtime that is one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmp.evaluate import evaluator
from jaxmp.train import Epoch, Setting, create, epoch_by_scan, epoch_by_step


class Engine(NamedTuple):
    """How a setting is trained and scored.

    Attributes:
      create: the state before the first step; a pytree that a checkpoint can hold.
      epoch: given whether the run is warming up, a function that runs (the rest of) an epoch.
      evaluate: ``(state, compressed) -> {'loss', 'accuracy'}`` on the whole test split.
      moved: what this runtime knows of bytes on wires, for the summary.
    """

    create: Callable[[], Any]
    epoch: Callable[[bool], Epoch]
    evaluate: Callable[[Any, bool], dict[str, float]]
    moved: Callable[[], dict[str, Any]]


def one_program(s: Setting) -> Engine:
    """All stages in one program on one device: convergence studies, notebooks."""
    form = epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan

    def epoch(warming: bool) -> Epoch:
        return form(s, s.warm_model if warming else s.model)

    return Engine(lambda: create(s), epoch, evaluator(s), dict)
