r"""`Driver`: this process's part of a pipeline of unequal stages, a program each.

Python runs the actions of this process's stages. An action waits for the message that it reads and
hands over the one that it makes; between two actions messages travel in the lanes of
`jaxmp.runtimes.links`, packed, while stages compute.

Gradients on time run in the order of a schedule, and nothing is under way between two steps.
Gradients that come N steps late leave the pipeline full. A step of a stage then runs the forwards
of its batch, and backwards of earlier ones: whichever has its message, backwards first. It ends
when the batch N steps before has its gradients, and their norm over all stages where that is
needed; until then, backwards of this batch run too. N may be less of a stage that is nearer to the
last one. So a stage has at most :math:`(N + 1) M` micro-batches under way, the last stage one, and
a step takes

.. math:: \max\Big(c,\ \frac{d + c}{N + 1}\Big)

where :math:`c` is the time in which a stage computes, :math:`d` that of a micro-batch through all
stages and back, with its messages. A backward runs at the weights of its forward, of which a stage
keeps N + 1 versions. The order within a stage changes no number.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import Aux
from jaxmp.exchange.collectives import Grads
from jaxmp.runtimes.kept import Kept
from jaxmp.runtimes.links import Arrived, Lane, first_usable, usable, wait
from jaxmp.runtimes.microbatch import microbatches
from jaxmp.runtimes.norms import Batch, Norms
from jaxmp.runtimes.placement import Device, is_here
from jaxmp.runtimes.schedule import Action, Message, check, messages, size
from jaxmp.runtimes.schedules import most_kept
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import Input, MicroBatch, StageState, Target, squared_norm
from jaxmp.runtimes.worker import CompiledStage, Flight, Reader, Worker
from jaxmp.wire import Ctx, Payload, nbytes


class Result(NamedTuple):
    """The results of a step for the stages of this process.

    Attributes:
      loss: mean over micro-batches; None in a process without the last stage.
      aux: means of what comes with the loss; None in a process without the last stage.
      grads: gradients of the parameters of each stage here, without stages where those of a batch
        come steps later, and none has come.
      states: the next state of each stage here, its parameters unchanged.
      square: gives the squared norm of the gradients of all stages, if stages tell each other.
    """

    loss: Array | None
    aux: Aux
    grads: dict[int, Grads]
    states: dict[int, StageState]
    square: Callable[[], Array] | None = None


squared = jax.jit(squared_norm)


class Driver:
    """This process's part of a pipeline; see the module.

    Attributes:
      stages: the stages of this process.
      lanes: the lanes that end in this process, by the stages that send and receive.
      sizes: payload bytes of a message of each.
      carried: number of messages of each in all steps so far.
      late: of each stage the most micro-batches that end in a later step.
      measured: a list to which every action is added as it ran, with the times of
        `time.monotonic`. Each device then has a thread, which waits for the end of every action;
        no number changes. None measures nothing.
      flight: what is under way between two steps, if gradients come late.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        devices: Sequence[Device],
        actions: Sequence[Action],
        lane: Callable[[int, int, Payload], Lane],
        compiler_options: Mapping[str, Any] | None = None,
        first: int = 0,
        kept: int = 0,
        delays: Sequence[int] = (),
        norms: Norms | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          programs: of all stages, from `jaxmp.runtimes.stage.programs`; channels keep a state per
            micro-batch of the schedule.
          devices: one per stage, of any process.
          actions: a schedule of that many stages; it says how many micro-batches there are.
          lane: ``(stage that sends, stage that receives, shapes of a message)`` -> the lane.
          compiler_options: those of `jax.jit`, for every program of a stage.
          first: number of the first stage that runs backwards.
          kept: number of examples whose messages to it are kept.
          delays: N of each stage; none where all gradients are on time.
          norms: of the gradients, by stage, where all need them.

        Raises:
          ValueError: if the schedule is broken, or stages, devices and schedule differ in number.
        """
        n = len(programs)
        if n != len(devices):
            raise ValueError(f'{n} stages need a device each, got {len(devices)} devices')
        self.devices, self.first, self.norms = devices, first, norms
        self.delays = delays or (0,) * n
        self.stages = {
            s: CompiledStage(programs[s], compiler_options)
            for s, device in enumerate(devices)
            if is_here(device)
        }
        self.follow(actions)
        frame = lambda t: jax.ShapeDtypeStruct((1, *t.shape), t.dtype)
        # A lane is at both ends, though the sender alone has messages: their shapes are known.
        self.lanes: dict[tuple[int, int], Lane] = {}
        self.sizes: dict[tuple[int, int], int] = {}
        for a, b in sorted({(m.source, m.target) for m in self.sent}):
            boundary, y = programs[min(a, b)].right, programs[min(a, b)].y
            if boundary:
                like = boundary.messages(y)[a > b]
                self.lanes[a, b] = lane(a, b, jax.tree.map(frame, like))
                self.sizes[a, b] = nbytes(like)
        self.carried = Counter[tuple[int, int]]()
        self.kept: Kept | None = None
        if kept:
            cut, x = programs[first].left, programs[first].x
            assert cut, 'the first stage receives nothing'
            like = jax.tree.map(frame, cut.messages(x)[0]) if first in self.stages else None
            self.kept = Kept(kept, x.shape[0], like)
        self.measured: list[Action] | None = None
        self.flight: Flight | None = None
        self._sending: list[Arrived] = []  # messages of the last step, perhaps still on their way

    def follow(self, actions: Sequence[Action]) -> None:
        """Takes a schedule: the actions of this process, and what it sends or receives.

        Raises:
          ValueError: if it is broken, or of another number of stages.
        """
        check(actions)
        (n, self.num_microbatches, _), here = size(actions), self.stages.keys()
        if n != len(self.devices):
            raise ValueError(
                f'{len(self.devices)} stages and {self.num_microbatches} micro-batches need a '
                f'schedule of as many, got {n} and {self.num_microbatches}'
            )
        most = most_kept(self.num_microbatches, self.delays)
        self.late = [max(0, n - self.num_microbatches) for n in most]
        kinds = 'FB' if any(self.delays) else 'FBW'  # while steps overlap, no backward is in halves
        run = [a for a in actions if a.kind in kinds and (a.kind == 'F' or a.stage >= self.first)]
        sent = [m for m in messages(run) if m.kind == 'F' or m.target >= self.first]
        self.actions = [a for a in run if a.stage in here]
        self.sent = [m for m in sent if here & {m.source, m.target}]

    def init(self, key: Array, draw: bool = True) -> dict[int, StageState]:
        """States of the stages of this process; see `jaxmp.runtimes.types.Runtime`."""
        self.flight = None
        put = lambda s: jax.device_put(key, self.devices[s])
        return {s: p.init(put(s), draw) for s, p in self.stages.items()}

    def step(
        self, states: Mapping[int, StageState], x: Input, y: Target, ctx: Ctx | None = None
    ) -> Result:
        """Runs a batch forwards, and backwards what is due; the optimizer's step is the caller's.

        Args:
          states: of the stages of this process, from `init` or the last step; their feedback and
            statistics are donated.
          x: the whole batch, axis 0 the sample; used where the first stage is, and of tokens
            wherever a boundary has `anchored` or a stage reads them.
          y: targets; used where the last stage is.
          ctx: key and ids of the step.

        Returns:
          The loss of this batch, and the gradients of the batch N steps before. A stage has none
          in the first N steps after the pipeline was empty.

        Raises:
          ValueError: if the micro-batches are not of the size the pipeline was built for.
        """
        batch, late = (x, y, (Ctx() if ctx is None else ctx).reading(x)), max(self.delays)
        parts, ids = self._cut(batch), np.asarray(batch[2].ids)
        known = self.kept.known(ids) if self.kept else frozenset()
        idle = lambda stage, m: stage < self.first and m in known  # what it leads to is kept
        sent = [m for m in self.sent if not idle(m.source, m.microbatch)]
        actions = [a for a in self.actions if not idle(a.stage, a.microbatch)]
        flight, self.flight = self.flight or self._empty(states), None  # a step that fails loses it
        flight.resume(states)
        number = flight.batches[-1].number + 1 if flight.batches else 0
        flight.batches.append(Batch(self.norms.step if self.norms else 0, number))
        begin = number * self.num_microbatches
        for s, worker in flight.workers.items():
            own = {begin + m: part for m, part in enumerate(parts[s]) if not idle(s, m)}
            worker.waiting.update(own)
        self._post(sent, flight, begin)
        used = flight.batches[0] if len(flight.batches) > late else None
        self._run(self._due(flight, self.late, used) if late else actions, flight)
        self.carried.update((m.source, m.target) for m in sent)
        if self.kept:
            self.kept.seen[ids] = True
        if late:
            self.flight = flight
        last = flight.workers.get(len(self.devices) - 1)
        mean = last.means[-1] if last else None  # the last stage ends a batch in its own step
        due = [s for s in self.stages if len(flight.batches) > self.delays[s]]
        return Result(
            mean.loss if mean else None,
            mean.aux if mean else None,
            {s: flight.workers[s].gradients() for s in due},
            flight.states(),
            self.norms.total(used, self.first) if self.norms and used else None,
        )

    def drain(
        self, states: Mapping[int, StageState]
    ) -> tuple[dict[int, tuple[Grads, ...]], dict[int, StageState]]:
        """Ends all that is under way.

        Returns:
          By stage the gradients of each batch that had none, the oldest first; the states after.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return {}, dict(states)
        flight.resume(states)
        self._run(self._due(flight, (0,) * len(self.devices)), flight)
        unused = list(flight.batches)[-max(self.delays) :]
        if self.norms:  # gradients that wait are counted when they are used; what was told is read
            for batch in unused:
                self.norms.total(batch, self.first)
        count = {s: min(self.delays[s], len(unused)) for s in self.stages}
        rows = {s: tuple(flight.workers[s].gradients() for _ in range(n)) for s, n in count.items()}
        return rows, flight.states()

    def predict(
        self, states: Mapping[int, StageState], x: Input, ctx: Ctx | None = None
    ) -> tuple[list[Array] | None, dict[int, StageState]]:
        """Forwards only; nothing is donated.

        Args:
          states: of the stages of this process.
          x: the whole batch, as in `step`.
          ctx: key and ids.

        Returns:
          The output of each micro-batch (None without the last stage), and the next states.

        Raises:
          ValueError: as `step`.
        """
        parts = self._cut((x, None, (Ctx() if ctx is None else ctx).reading(x)))
        readers = {s: Reader(p, states[s]) for s, p in self.stages.items()}
        for s, reader in readers.items():
            reader.waiting.update(enumerate(parts[s]))
        flight = Flight(readers, deque(), {}, {})
        self._post([m for m in self.sent if m.kind == 'F'], flight)
        self._run([a for a in self.actions if a.kind == 'F'], flight)
        last = readers.get(len(self.devices) - 1)
        return last.outputs if last else None, flight.states()

    def again(self) -> None:
        """Forgets what was under way, and what was sent once: a process may have begun again."""
        for lane in self.lanes.values():
            lane.drain()
        self._sending.clear()
        self.carried.clear()
        self.flight = None
        if self.norms:
            self.norms.again()
        if self.kept:
            self.kept.seen[:] = False

    def _empty(self, states: Mapping[int, StageState]) -> Flight:
        """A pipeline with nothing under way."""
        workers: dict[int, Worker] = {}
        for s, stage in self.stages.items():
            split = {a.microbatch for a in self.actions if a.stage == s and a.kind == 'W'}
            # Stages below all that is trained only read: nothing waits for a backward there.
            trains = s >= self.first
            workers[s] = Worker(stage, states[s], split) if trains else Reader(stage, states[s])
        return Flight(workers, deque(maxlen=max(self.delays) + 1), {}, {})

    def _cut(self, batch: tuple[Input, Target, Ctx]) -> dict[int, list[MicroBatch]]:
        """The micro-batches of the stages here."""
        count, stages = self.num_microbatches, self.stages.items()
        return {s: microbatches(p.program, self.devices[s], count, batch) for s, p in stages}

    def _run(self, actions: Iterable[Action], flight: Flight) -> None:
        """Runs actions in order; if they are measured, those of each device in a thread."""

        def run_all(actions: Iterable[Action]) -> None:
            try:
                for a in actions:
                    self._one(a, flight)
            except BaseException as error:  # told to whoever waits for a message
                for task in list(flight.leaving):
                    if (leaving := flight.leaving.pop(task, None)) is not None:
                        leaving.set_exception(error)
                raise

        if self.measured is None:
            return run_all(actions)
        by_device: dict[int, list[Action]] = {}
        for a in actions:
            by_device.setdefault(a.device, []).append(a)
        with ThreadPoolExecutor(len(by_device)) as threads:
            list(threads.map(run_all, by_device.values()))

    def _due(
        self, flight: Flight, late: Sequence[int], used: Batch | None = None
    ) -> Iterator[Action]:
        """What the stages here run to the end of a step, as messages come.

        Args:
          flight: what is under way.
          late: of each stage the most micro-batches that end in a later step.
          used: the batch whose gradients are due; the step ends with what others tell of it.
        """
        answers: list[Arrived] | None = None
        while True:
            tasks, missing = flight.next_tasks(late), list[Arrived]()
            if not tasks:
                if answers is None:  # to wait earlier would hide who hangs: `net.blame`
                    coming = self.norms.coming(used, self.first) if self.norms and used else {}
                    answers = list(coming.values())
                    wait_futures(answers, 1e-3)  # one that is there comes before a backward
                if not (missing := [f for f in answers if not usable(f)]):
                    return
                tasks = flight.next_tasks((0,) * len(late))  # of this batch, meanwhile
            if (task := first_usable(tasks, flight.arriving, missing)) is not None:
                kind, s, m = task
                yield Action(0.0, s, m, kind, s, 1.0)

    def _one(self, a: Action, flight: Flight) -> None:
        """Runs an action on the message that it waits for; whoever needs the result gets it."""
        (_, s, m, kind, *_), message = a, None
        worker, task = flight.workers[s], (kind, s, m)
        if (coming := flight.arriving.pop(task, None)) is not None:
            message = wait(coming)
        if self.kept and kind == 'F' and s == self.first and not isinstance(worker, Reader):
            ids = np.asarray(worker.waiting[m].ctx.ids)
            if coming is None:
                message = jax.device_put(self.kept.take(ids), self.devices[s])
            else:
                self.kept.put(ids, message)
        result = self._act(a, worker, message)
        if (waited := flight.leaving.pop(task, None)) is not None:
            waited.set_result(result)
        if worker.ended == self.num_microbatches:
            worker.end_batch()
            if self.norms:
                number = m // self.num_microbatches
                batch = flight.batches[number - flight.batches[-1].number - 1]
                self.norms.tell(s, squared(worker.means[-1].grads), batch)
        if max(self.delays) and len(self.stages) == 1:
            # What may run next is asked when the device is free.
            jax.block_until_ready((result, worker.total))

    def _act(self, a: Action, worker: Worker, message: Payload) -> Payload:
        """What an action makes; if actions are measured, once it is there."""
        if self.measured is None:
            return worker.act(a.kind, a.microbatch, message)
        worker.wait(message)
        start = time.monotonic()
        result = worker.act(a.kind, a.microbatch, message)
        worker.wait(result)
        self.measured.append(a._replace(start=start, end=time.monotonic()))
        return result

    def _post(self, sent: Sequence[Message], flight: Flight, begin: int = 0) -> None:
        """Asks the lanes for all messages of a batch, whose micro-batches begin at a number."""
        for done in [f for f in self._sending if f.done()]:
            self._sending.remove(done)
            done.result()  # raises what went wrong
        for m in sent:
            number, leaving = begin + m.microbatch, None
            if m.source in self.stages:
                leaving = flight.leaving[m.kind, m.source, number] = Future()
            arrived = self.lanes[m.source, m.target].carry(leaving)
            if m.target in self.stages:
                flight.arriving[m.kind, m.target, number] = arrived
            else:
                self._sending.append(arrived)
