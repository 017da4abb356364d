"""`Flight`: what is under way in a pipeline."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from jaxmp.runtimes.links import Arrived
from jaxmp.runtimes.norms import Batch
from jaxmp.runtimes.schedule import Task
from jaxmp.runtimes.state import StageState
from jaxmp.runtimes.worker import Worker
from jaxmp.wire import Payload


class Flight(NamedTuple):
    """What is under way in a pipeline, of the stages of a process.

    Attributes:
      workers: of the stages.
      batches: those whose gradients some stage has not given, the oldest first.
      leaving: messages that no action has made.
      arriving: messages that no action has read.
    """

    workers: Mapping[int, Worker]
    batches: deque[Batch]
    leaving: dict[Task, Future[Payload]]
    arriving: dict[Task, Arrived]

    def resume(self, states: Mapping[int, StageState]) -> None:
        """Goes on from states of the stages."""
        for s, worker in self.workers.items():
            worker.params, worker.model_state, worker.feedback = states[s]

    def states(self) -> dict[int, StageState]:
        """The next state of each stage."""
        return {s: w.state() for s, w in self.workers.items()}

    def next_tasks(self, late: Sequence[int]) -> list[Task]:
        """What each stage may run once its message is there, the last one first, backwards first.

        Args:
          late: of each stage the most micro-batches that end in a later step.
        """
        tasks: list[Task] = []
        for s in sorted(self.workers, reverse=True):
            waiting, saved = self.workers[s].waiting, self.workers[s].saved
            if waiting or len(saved) > late[s]:
                tasks += [('B', s, m) for m in itertools.islice(saved, 1)]
                tasks += [('F', s, m) for m in itertools.islice(waiting, 1)]
        return tasks
