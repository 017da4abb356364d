r"""`Unflushed`: a driver whose pipeline stays full from one step to the next.

The micro-batches of all batches are one stream. A step of stage s runs the forwards of its batch,
and after the forward of micro-batch m the backward of micro-batch :math:`m - k_s`:

.. math:: k_s = \lfloor N M (S - 1 - s) / (S - 1) \rfloor

So the first stage has the gradients of a batch N steps later, and the last one at once; every stage
hands them over N steps later. A backward runs at the weights of its forward, of which a stage keeps
N + 1 versions. Nothing waits for a link whose way there and back takes N / (S - 1) steps.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver, Result, Traffic
from jaxmp.runtimes.norms import Norms
from jaxmp.runtimes.schedule import Action, Message, Task
from jaxmp.runtimes.state import Accumulator, MicroBatch, StageState, in_dtypes, squared_norm
from jaxmp.runtimes.worker import CompiledStage, Reader, Worker
from jaxmp.wire import Ctx, Payload


def ahead(stages: int, microbatches: int, delay: int) -> tuple[int, ...]:
    """How many micro-batches each stage has begun and not ended, after a step.

    >>> ahead(4, 8, 1), ahead(2, 2, 3), ahead(1, 2, 3)
    ((8, 5, 2, 0), (6, 0), (0,))
    """
    after = max(1, stages - 1)
    return tuple(delay * microbatches * (stages - 1 - s) // after for s in range(stages))


def turn(m: int, stages: Sequence[int], ahead: Sequence[int], begun: range) -> list[Task]:
    """What stages run at the turn of a micro-batch: its forward, then a backward that is due.

    >>> turn(3, (0, 1), (2, 0), range(9))
    [('F', 0, 3), ('F', 1, 3), ('B', 1, 3), ('B', 0, 1)]
    """
    forwards = [('F', s, m) for s in stages if m in begun]
    return forwards + [('B', s, m - ahead[s]) for s in reversed(stages) if m - ahead[s] in begun]


def stream(stages: int, microbatches: int, delay: int, steps: int) -> list[Task]:
    """All tasks of a pipeline that is filled and emptied once, in an order that ends."""
    early, begun = ahead(stages, microbatches, delay), range(steps * microbatches)
    turns = range(len(begun) + max(early))
    return [task for m in turns for task in turn(m, range(stages), early, begun)]


class Passing(Worker):
    """A stage from step to step: it ends the sums of a batch with its last micro-batch."""

    def __init__(self, stage: CompiledStage, state: StageState, microbatches: int) -> None:
        """``microbatches`` is M."""
        super().__init__(stage, state)
        self._count, self.means = microbatches, deque[Accumulator]()
        self.squares: dict[int, Array] = {}

    def backward(self, m: int, message: Payload) -> Payload:
        """The message to the stage before; the sums of its batch grow, or end."""
        out = super().backward(m, message)
        if (m + 1) % self._count == 0:
            mean = self.stage.mean(self.total, np.float32(self._count))
            mean = mean._replace(grads=in_dtypes(mean.grads, self.stage.trained(self.params)))
            self.means.append(mean)
            self.squares[m // self._count] = _square(mean.grads)
            self.total = None
        return out

    def gradients(self) -> Any:
        """Those of the oldest batch that has ended."""
        return self.means.popleft().grads


_square = jax.jit(squared_norm)


@dataclass
class Flight:
    """What is under way between two steps.

    Attributes:
      start: number of the first micro-batch since the pipeline was last empty.
      end: number of the next one.
      steps: the step of each batch under way, by its number.
      workers: of the stages here.
      arriving: messages that no action has read.
    """

    start: int = 0
    end: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    workers: dict[int, Any] = field(default_factory=dict)
    arriving: dict[Task, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets all but the number of the next micro-batch."""
        self.start = self.end
        for part in (self.steps, self.workers, self.arriving):
            part.clear()


@dataclass(frozen=True)
class Unflushed(Driver):
    """A driver that begins a batch before it has ended the last ones.

    Attributes:
      delay: N.
      group: the processes, which count the steps.
      norms: of the gradients, by stage, where all need them.
      flight: what is under way.
    """

    delay: int = 1
    group: ProcessGroup = field(default_factory=ProcessGroup)
    norms: Norms | None = None
    flight: Flight = field(default_factory=Flight)

    @functools.cached_property
    def ahead(self) -> tuple[int, ...]:
        """See `ahead`."""
        return ahead(len(self.devices), self.num_microbatches, self.delay)

    def step(
        self, states: Mapping[int, StageState], x: Any, y: Any, ctx: Ctx | None = None
    ) -> Result:
        """Runs a batch forwards, and backwards what is due; see `Driver.step`.

        Returns:
          The loss of this batch, and the gradients of the batch N steps before. They are None in
          the first N steps after the pipeline was empty.
        """
        flight, n = self.flight, self.num_microbatches
        batch = x, y, (Ctx() if ctx is None else ctx).reading(x)
        begin, ids = flight.end, np.asarray(batch[2].ids)
        known = {begin + m for m in self.kept.known(ids)} if self.kept else set[int]()
        parts = self._cut_all(self.stages, batch, begin)
        flight.end += n
        flight.steps[begin // n] = self.group.step
        flight.steps.pop(begin // n - self.delay - 1, None)
        tasks = [t for m in range(begin, flight.end) for t in self._tick(m, known)]
        moved = self._go(states, tasks, parts, known)
        if self.kept:
            self.kept.seen[ids] = True
        due = flight.end - flight.start > self.delay * n
        last = flight.workers.get(len(self.devices) - 1)
        mean = last.means[-1] if last else None  # the last stage ends a batch in its own step
        return Result(
            mean.loss if mean else None,
            mean.aux if mean else None,
            self._gradients() if due else None,
            self._states(),
            moved,
            self._norm(tasks, begin // n - self.delay) if self.norms else None,
        )

    def drain(
        self, states: Mapping[int, StageState]
    ) -> tuple[list[dict[int, Any]], dict[int, StageState], Traffic]:
        """Ends all that is under way.

        Returns:
          The gradients of each batch that had none, the oldest first; the states after; the bytes
          that were sent.
        """
        flight = self.flight
        if flight.start == flight.end:
            return [], dict(states), {}
        rest = range(flight.end, flight.end + max(self.ahead))
        moved = self._go(states, [t for m in rest for t in self._tick(m)], {})
        count = min(self.delay, (flight.end - flight.start) // self.num_microbatches)
        if self.norms:  # gradients that wait are counted when they are used
            self.norms.forget()
        rows, after = [self._gradients() for _ in range(count)], self._states()
        flight.clear()
        return rows, after, moved

    def init(self, key: Array, draw: bool = True) -> dict[int, StageState]:
        """States of the stages here, with nothing under way; see `Driver.init`."""
        self.flight.clear()
        return super().init(key, draw)

    def again(self) -> None:
        """Forgets what was under way; see `Driver.again`."""
        super().again()
        self.flight.end = 0
        self.flight.clear()

    def _tick(self, m: int, known: Collection[int] = ()) -> list[Task]:
        """What the stages here run at the turn of a micro-batch, in an order that ends."""
        first, begun = self.first, range(self.flight.start, self.flight.end)
        tasks = turn(m, sorted(self.stages), self.ahead, begun)
        return [t for t in tasks if t[1] >= first or (t[0] == 'F' and t[2] not in known)]

    def _go(
        self,
        states: Mapping[int, StageState],
        tasks: Sequence[Task],
        parts: Mapping[int, Mapping[int, MicroBatch]],
        known: Collection[int] = (),
    ) -> Traffic:
        """Runs tasks on the stages here, from their states; the bytes of the messages."""
        workers = self.flight.workers
        for s, program in self.stages.items():
            if s not in workers:
                trains = s >= self.first
                new = Passing(program, states[s], self.num_microbatches) if trains else None
                workers[s] = new or Reader(program, states[s])
            workers[s].params, workers[s].model_state, workers[s].feedback = states[s]
        actions = [Action(float(i), s, m, kind, s, i + 1.0) for i, (kind, s, m) in enumerate(tasks)]
        sent = [message for task in tasks for message in self._messages(task, known)]
        self._run(actions, sent, workers, parts, known)
        return self.moved(sent)

    def _messages(self, task: Task, known: Collection[int]) -> list[Message]:
        """What a task sends, and what it reads of another process."""
        (kind, s, m), last = task, len(self.devices) - 1
        forward = 1 if kind == 'F' else -1
        before, after = s - forward, s + forward
        reads = 0 <= before <= last and before not in self.stages
        reads &= not (kind == 'F' and s == self.first and m in known)
        sends = 0 <= after <= last and (kind == 'F' or after >= self.first)
        pairs = [(before, s)] * reads + [(s, after)] * sends
        return [Message(0.0, source, target, m, kind) for source, target in pairs]

    def _norm(self, tasks: Sequence[Task], due: int) -> Callable[[], Any] | None:
        """Tells others the norms that are new; gives that of all gradients of the batch ``due``."""
        flight, n = self.flight, self.num_microbatches
        assert self.norms
        for s, b in [(s, m // n) for kind, s, m in tasks if kind == 'B' and (m + 1) % n == 0]:
            self.norms.tell(s, flight.workers[s].squares.pop(b), (flight.steps[b], b))
        if due * n < flight.start:
            return None
        return self.norms.total((flight.steps[due], due), self.first)

    def _gradients(self) -> dict[int, Any]:
        workers = self.flight.workers
        return {s: w.gradients() if s >= self.first else {} for s, w in workers.items()}

    def _states(self) -> dict[int, StageState]:
        return {s: w.state() for s, w in self.flight.workers.items()}

    def _arriving(self) -> dict[Task, Any]:
        """The messages that an action of a later step reads."""
        return self.flight.arriving

    def _place(self, m: Message) -> tuple[int, int]:
        """The step of the message's batch, and the number of its micro-batch."""
        return self.flight.steps[m.microbatch // self.num_microbatches], m.microbatch


def unflushed(
    driver: Driver, delay: int, group: ProcessGroup, norms: Norms | None = None
) -> Unflushed:
    """``driver`` with gradients that come ``delay`` steps later."""
    values = {f.name: getattr(driver, f.name) for f in fields(driver)}
    return Unflushed(**values, delay=delay, group=group, norms=norms)
