r"""`Unflushed`: a driver whose pipeline stays full from one step to the next.

A step of a stage runs the forwards of its batch, and backwards of earlier ones: whichever has its
message, backwards first. It ends when the batch N steps before has its gradients, and their norm
over all stages where that is needed; until then, backwards of this batch run too. N may be less of
a stage that is nearer to the last one. So a stage has at most :math:`(N + 1) M` micro-batches under
way, the last stage one, and a step takes

.. math:: \max\Big(c,\ \frac{d + c}{N + 1}\Big)

where :math:`c` is the time in which a stage computes, :math:`d` that of a micro-batch through all
stages and back, with its messages. A backward runs at the weights of its forward, of which a stage
keeps N + 1 versions. The order within a stage changes no number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field, fields
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver, Result, Under, squared, told
from jaxmp.runtimes.links import usable, wait_first
from jaxmp.runtimes.schedule import UNIT, Action, Costs, Message, Task, earliest
from jaxmp.runtimes.state import Accumulator, MicroBatch, StageState
from jaxmp.runtimes.worker import CompiledStage, Reader, Worker
from jaxmp.wire import Ctx, Payload


def most_kept(microbatches: int, delays: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches that each stage keeps at once.

    >>> most_kept(8, (1, 1, 1, 1)), most_kept(8, (4, 3, 2, 0)), most_kept(2, (3,))
    ((16, 16, 16, 1), (40, 32, 24, 1), (1,))
    """
    return (*((n + 1) * microbatches for n in delays[:-1]), 1)


def due(begun: int, late: int) -> int:
    """The number of backwards with which a stage ends a step, of so many forwards begun."""
    return max(0, begun - late)


def late_of(microbatches: int, delays: Sequence[int]) -> tuple[int, ...]:
    """The micro-batches that each stage ends in a later step; the last one, which waits for nobody,
    has none.
    """
    return (*(n * microbatches for n in delays[:-1]), 0)


def stream(
    home: Sequence[int],
    microbatches: int,
    delays: Sequence[int],
    steps: int,
    costs: Costs = UNIT,
) -> tuple[Action, ...]:
    """The actions of a pipeline that is filled and emptied once, at such costs.

    Args:
      home: device of each stage.
      microbatches: M.
      delays: N of each stage.
      steps: batches.
      costs: of actions and messages.

    >>> [(a.kind, a.microbatch) for a in stream((0, 1), 1, (1, 1), 3) if not a.stage]
    [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    late = late_of(microbatches, delays)

    def choices(device: int, done: Counter[Any]) -> Iterator[Task]:
        for s in [s for s in reversed(range(len(home))) if home[s] == device]:
            begun, ended = done['F', s], done['B', s]
            if ended < begun:
                yield 'B', s, ended
            whole = begun - begun % microbatches  # those of the steps before
            if begun < steps * microbatches and ended >= due(whole, late[s]):
                yield 'F', s, begun

    return earliest(dict(enumerate(home)), choices, costs, lambda s, m: False)


class Passing(Worker):
    """A stage from step to step: it ends the sums of a batch with its last micro-batch."""

    def __init__(self, stage: CompiledStage, state: StageState, microbatches: int) -> None:
        """``microbatches`` is M."""
        super().__init__(stage, state)
        self._count, self.means = microbatches, deque[Accumulator]()

    def backward(self, m: int, message: Payload) -> Payload:
        """The message to the stage before; the sums of its batch grow, or end."""
        out = super().backward(m, message)
        if (m + 1) % self._count == 0:
            self.means.append(self.mean(self._count))
            self.total = None
        return out

    def gradients(self) -> Any:
        """Those of the oldest batch that has ended."""
        return self.means.popleft().grads


@dataclass
class Flight:
    """What is under way between two steps.

    Attributes:
      start: number of the first micro-batch since the pipeline was last empty.
      end: number of the next one.
      steps: the step of each batch under way, by its number.
      workers: of the stages here.
      ended: the number of the next backward of each of them.
      leaving: messages that no action has made.
      arriving: messages that no action has read.
    """

    start: int = 0
    end: int = 0
    steps: dict[int, int] = field(default_factory=dict)
    workers: dict[int, Any] = field(default_factory=dict)
    ended: dict[int, int] = field(default_factory=dict)
    leaving: dict[Task, Any] = field(default_factory=dict)
    arriving: dict[Task, Any] = field(default_factory=dict)

    def clear(self) -> None:
        """Forgets all but the number of the next micro-batch."""
        self.start = self.end
        for part in (self.steps, self.workers, self.ended, self.leaving, self.arriving):
            part.clear()


@dataclass(frozen=True)
class Unflushed(Driver):
    """A driver that begins a batch before it has ended the last ones.

    Attributes:
      delays: N of each stage.
      group: the processes, which count the steps.
      flight: what is under way.
    """

    delays: tuple[int, ...] = ()
    group: ProcessGroup = field(default_factory=ProcessGroup)
    flight: Flight = field(default_factory=Flight)

    def step(
        self, states: Mapping[int, StageState], x: Any, y: Any, ctx: Ctx | None = None
    ) -> Result:
        """Runs a batch forwards, and backwards what is due; see `Driver.step`.

        Returns:
          The loss of this batch, and the gradients of the batch N steps before. A stage has none
          in the first N steps after the pipeline was empty.
        """
        flight, n, delay = self.flight, self.num_microbatches, max(self.delays)
        batch = x, y, (Ctx() if ctx is None else ctx).reading(x)
        begin, ids = flight.end, np.asarray(batch[2].ids)
        known = {begin + m for m in self.kept.known(ids)} if self.kept else set[int]()
        parts = self._cut_all(self.stages, batch, begin)
        flight.end += n
        flight.steps[begin // n] = self.group.step
        flight.steps.pop(begin // n - delay - 1, None)
        sent = [
            message
            for m in range(begin, flight.end)
            for task in self._tasks(m, known)
            for message in self._messages(task, known)
        ]
        out, arriving = self._post(sent)
        flight.leaving |= out
        flight.arriving |= arriving
        begun = (flight.end - flight.start) // n
        used = begin // n - delay if begun > delay else None  # the batch whose norm is due
        norms = self._go(states, parts, known, late_of(n, self.delays), used)
        if self.kept:
            self.kept.seen[ids] = True
        last = flight.workers.get(len(self.devices) - 1)
        mean = last.means[-1] if last else None  # the last stage ends a batch in its own step
        return Result(
            mean.loss if mean else None,
            mean.aux if mean else None,
            {s: self._oldest(s) for s in self.stages if begun > self.delays[s]},
            self._states(),
            self.moved(sent),
            self.norms.total(self._batch(used), norms) if self.norms and used is not None else None,
        )

    def drain(
        self, states: Mapping[int, StageState]
    ) -> tuple[dict[int, tuple[Any, ...]], dict[int, StageState]]:
        """Ends all that is under way.

        Returns:
          By stage the gradients of each batch that had none, the oldest first; the states after.
        """
        flight, n = self.flight, self.num_microbatches
        if flight.start == flight.end:
            return {}, dict(states)
        self._go(states, {}, (), (0,) * len(self.devices), None)
        if self.norms:  # gradients that wait are counted when they are used; what was told is read
            first = max(flight.start, flight.end - max(self.delays) * n)
            for b in range(first // n, flight.end // n):
                self.norms.total(self._batch(b), self._coming(b))
        begun, after = (flight.end - flight.start) // n, self._states()
        count = {s: min(self.delays[s], begun) for s in self.stages}
        rows = {s: tuple(self._oldest(s) for _ in range(c)) for s, c in count.items()}
        flight.clear()
        return rows, after

    def init(self, key: Array, draw: bool = True) -> dict[int, StageState]:
        """States of the stages here, with nothing under way; see `Driver.init`."""
        self.flight.clear()
        return super().init(key, draw)

    def again(self) -> None:
        """Forgets what was under way; see `Driver.again`."""
        super().again()
        self.flight.end = 0
        self.flight.clear()

    def _tasks(self, m: int, known: Collection[int]) -> list[Task]:
        """All tasks of a micro-batch here."""
        trained = [s for s in self.stages if s >= self.first]
        forwards = [s for s in self.stages if s in trained or m not in known]
        return [('F', s, m) for s in forwards] + [('B', s, m) for s in trained]

    def _go(
        self,
        states: Mapping[int, StageState],
        parts: Mapping[int, Mapping[int, MicroBatch]],
        known: Collection[int],
        late: Sequence[int],
        used: int | None,
    ) -> dict[int, Future[Any]]:
        """Runs the stages here to the end of a step, from their states.

        Args:
          states: of the stages here.
          parts: of each the micro-batches of the batch that begins, if one does.
          known: micro-batches whose messages are kept here.
          late: of each stage the most micro-batches that end in a later step.
          used: the batch whose gradients are due; the step ends with what others tell of it.

        Returns:
          That, by stage.
        """
        flight = self.flight
        for s, program in self.stages.items():
            if s not in flight.workers:
                trains = s >= self.first
                new = Passing(program, states[s], self.num_microbatches) if trains else None
                flight.workers[s] = new or Reader(program, states[s])
                flight.ended[s] = flight.start
            worker = flight.workers[s]
            worker.params, worker.model_state, worker.feedback = states[s]
        under = Under(flight.workers, parts, known, flight.leaving, flight.arriving)
        left = {}  # of each stage the forwards, and the number of backwards with which it ends
        for s in sorted(self.stages, reverse=True):
            trains, begun = s >= self.first, flight.end - flight.start
            forwards = deque(m for m in sorted(parts.get(s, ())) if trains or m not in known)
            end = flight.start + due(begun, late[s]) if trains else flight.ended[s]
            left[s] = forwards, end
        norms: dict[int, Future[Any]] | None = None
        with told(flight.leaving):
            while True:
                tasks = [task for s, (f, end) in left.items() for task in self._next(s, f, end)]
                if not tasks and norms is None:  # to wait earlier would hide who hangs: `net.blame`
                    norms = {} if used is None else self._coming(used)
                    wait_futures(norms.values(), 1e-3)  # one that is there comes before a backward
                missing = [] if tasks else [f for f in (norms or {}).values() if not usable(f)]
                if not tasks and not missing:
                    break
                ahead = [task for s in left for task in self._next(s, (), flight.end)]
                if (next_ := self._arrived(tasks or ahead, missing)) is None:
                    continue
                kind, s, m = next_
                made = self._one(Action(float(m), s, m, kind, s, m + 1.0), under)
                if len(left) == 1:  # what may run next is asked when the device is free
                    jax.block_until_ready((made, flight.workers[s].total))
                if kind == 'F':
                    left[s][0].popleft()
                else:
                    self._ended(s, m)
        return norms or {}

    def _next(self, s: int, forwards: Sequence[int], end: int) -> list[Task]:
        """What a stage may run next when its message is there, backwards first."""
        m, begun = self.flight.ended[s], forwards[0] if forwards else self.flight.end
        if not forwards and m >= end:
            return []
        backwards = [('B', s, m)] if s >= self.first and m < begun else []
        return backwards + ([('F', s, begun)] if forwards else [])

    def _arrived(self, tasks: Sequence[Task], others: Sequence[Future[Any]]) -> Task | None:
        """The first of some tasks whose message is there, or None once one of ``others`` is."""
        arriving = {task: self.flight.arriving.get(task) for task in tasks}
        while True:
            for task, message in arriving.items():
                if message is None or usable(message):
                    return task
            if any(map(usable, others)):
                return None
            wait_first([*others, *(message for message in arriving.values() if message)])

    def _ended(self, s: int, m: int) -> None:
        """Counts a backward; with the last one of a batch, others are told the stage's norm."""
        flight, n = self.flight, self.num_microbatches
        flight.ended[s] = m + 1
        if (m + 1) % n == 0 and self.norms:
            b = m // n
            square = squared(flight.workers[s].means[-1].grads)
            self.norms.tell(s, square, (flight.steps[b], b))

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

    def _batch(self, number: int) -> tuple[int, int]:
        return self.flight.steps[number], number

    def _coming(self, number: int) -> dict[int, Future[Any]]:
        """What other processes tell of the norm of a batch's gradients."""
        return self.norms.coming(self._batch(number), self.first) if self.norms else {}

    def _oldest(self, s: int) -> Any:
        """The gradients of a stage that have waited longest."""
        return self.flight.workers[s].gradients() if s >= self.first else {}

    def _states(self) -> dict[int, StageState]:
        return {s: w.state() for s, w in self.flight.workers.items()}


def unflushed(driver: Driver, delays: Sequence[int], group: ProcessGroup) -> Unflushed:
    """``driver`` with gradients of each stage that come ``delays`` steps later."""
    values = {f.name: getattr(driver, f.name) for f in fields(driver)}
    return Unflushed(**values, delays=tuple(delays), group=group)
