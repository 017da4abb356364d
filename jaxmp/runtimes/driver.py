"""`Driver`: a program per stage, driven by a schedule over devices and processes.

Python runs the actions of this process's stages in the order of a schedule. An action waits for the
message that it reads and hands over the one that it makes; between two actions messages travel in
the lanes of `jaxmp.runtimes.links`, packed, while stages compute.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.runtimes.kept import Kept
from jaxmp.runtimes.links import Lane, wait
from jaxmp.runtimes.microbatches import microbatches
from jaxmp.runtimes.norms import Norms
from jaxmp.runtimes.placement import Device, is_here
from jaxmp.runtimes.schedule import Action, Message, Task, check, messages, size
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import MicroBatch, StageState, squared_norm
from jaxmp.runtimes.worker import CompiledStage, Reader, Worker
from jaxmp.wire import Ctx, Payload, nbytes

Traffic = dict[int, tuple[int, int]]  # payload bytes of each link, forward and backward
Lanes = Mapping[tuple[int, int], Lane]  # by the stages that send and receive


class Result(NamedTuple):
    """The results of a step for the stages of this process.

    Attributes:
      loss: mean over micro-batches; None in a process without the last stage.
      aux: means of what comes with the loss; None in a process without the last stage.
      grads: gradients of the parameters of each stage here, without stages where those of a batch
        come steps later, and none has come.
      states: the next state of each stage here, its parameters unchanged.
      moved: payload bytes ``(forward, backward)`` of each link that ends here.
      square: gives the squared norm of the gradients of all stages, if stages tell each other.
    """

    loss: Array | None
    aux: Any
    grads: dict[int, Any]
    states: dict[int, StageState]
    moved: Traffic
    square: Callable[[], Any] | None = None


squared = jax.jit(squared_norm)


class Under(NamedTuple):
    """What actions work with.

    Attributes:
      workers: of the stages here.
      parts: of each stage the micro-batches that it runs forwards.
      known: micro-batches whose messages are kept here; None keeps and reads none.
      out: what actions fill with the messages that they make.
      arriving: the messages that they wait for.
    """

    workers: Mapping[int, Worker]
    parts: Mapping[int, Mapping[int, MicroBatch]]
    known: Collection[int] | None
    out: dict[Task, Future[Any]]
    arriving: dict[Task, Future[Any]]


@contextlib.contextmanager
def told(out: dict[Task, Future[Any]]) -> Iterator[None]:
    """Within it an error is also told to whoever waits for a message that will not come."""
    try:
        yield
    except BaseException as error:
        for task in list(out):
            if (waited := out.pop(task, None)) is not None:  # another stage's thread may fail too
                waited.set_exception(error)
        raise


@dataclass(frozen=True)
class Driver:
    """This process's part of a pipeline of unequal stages; see `drive`.

    Attributes:
      stages: the stages of this process.
      devices: a device per stage, of any process.
      lanes: the lanes that end in this process.
      sizes: payload bytes of a message of each.
      actions: the schedule.
      num_microbatches: M.
      first: number of the first stage that runs backwards.
      sending: messages of the last step that may still be on their way.
      kept: messages to the stage ``first`` that need not be sent again, or None.
      norms: of the gradients, by stage, where all need them.
      measured: a list to which every action is added as it ran, with the times of
        `time.monotonic`. Each device then has a thread, which waits for the end of every action;
        no number changes. None measures nothing.
    """

    stages: Mapping[int, CompiledStage]
    devices: Sequence[Device]
    lanes: Lanes
    sizes: Mapping[tuple[int, int], int]
    actions: Sequence[Action] = ()
    num_microbatches: int = 1
    first: int = 0
    sending: list[Future[Any]] = field(default_factory=list)
    kept: Kept | None = None
    norms: Norms | None = None
    measured: list[Action] | None = None

    @functools.cached_property
    def order(self) -> tuple[list[Action], list[Message]]:
        """Actions of this process, and messages that it sends or receives, in their order."""
        here = self.stages.keys()
        sent = [m for m in sent_by(self.actions, self.first) if here & {m.source, m.target}]
        return [a for a in self.actions if a.stage in here], sent

    def left(self, known: Collection[int]) -> tuple[list[Action], list[Message]]:
        """`order` without what leads to messages to the stage ``first`` that are kept."""
        actions, sent = self.order
        idle = lambda stage, m: stage < self.first and m in known
        return (
            [a for a in actions if not idle(a.stage, a.microbatch)],
            [m for m in sent if not idle(m.source, m.microbatch)],
        )

    def moved(self, sent: Sequence[Message]) -> Traffic:
        """Payload bytes of a step, forward and backward, of each link that ends here."""
        count = Counter((m.source, m.target) for m in sent)
        carried = lambda *edge: count[edge] * self.sizes.get(edge, 0)
        return {i: (carried(i, i + 1), carried(i + 1, i)) for i in {min(e) for e in self.lanes}}

    def init(self, key: Array, draw: bool = True) -> dict[int, StageState]:
        """States of the stages of this process; see `jaxmp.runtimes.types.Runtime`."""
        put = lambda s: jax.device_put(key, self.devices[s])
        return {s: p.init(put(s), draw) for s, p in self.stages.items()}

    def step(
        self, states: Mapping[int, StageState], x: Any, y: Any, ctx: Ctx | None = None
    ) -> Result:
        """Runs the schedule once over a batch; the optimizer's step is the caller's.

        Args:
          states: of the stages of this process, from `init` or the last step; their feedback and
            statistics are donated.
          x: the whole batch, axis 0 the sample; used where the first stage is, and of tokens
            wherever a boundary has `anchored` or a stage reads them.
          y: targets; used where the last stage is.
          ctx: key and ids of the step.

        Raises:
          ValueError: if the micro-batches are not of the size the pipeline was built for.
        """
        batch = x, y, (Ctx() if ctx is None else ctx).reading(x)
        ids = np.asarray(batch[2].ids)
        known = self.kept.known(ids) if self.kept else frozenset()
        actions, sent = self.left(known)
        split = lambda s: {a.microbatch for a in actions if a.stage == s and a.kind == 'W'}
        # Stages below all that is trained only read: nothing waits for a backward there.
        frozen = {s: Reader(p, states[s]) for s, p in self.stages.items() if s < self.first}
        workers = frozen | {
            s: Worker(p, states[s], split(s)) for s, p in self.stages.items() if s >= self.first
        }
        self._run(actions, sent, workers, self._cut_all(workers, batch), known)
        if self.kept:
            self.kept.seen[ids] = True
        means = {s: w.mean(self.num_microbatches) for s, w in workers.items() if s >= self.first}
        grads, square = {s: mean.grads for s, mean in means.items()}, None
        if self.norms:
            for s, g in grads.items():
                self.norms.tell(s, squared(g), self.norms.now)
            coming = self.norms.coming(self.norms.now, self.first)
            square = self.norms.total(self.norms.now, coming)
        grads |= {s: {} for s in frozen}
        last = means.get(len(self.devices) - 1)
        return Result(
            last.loss if last else None,
            last.aux if last else None,
            grads,
            {s: w.state() for s, w in workers.items()},
            self.moved(sent),
            square,
        )

    def predict(
        self, states: Mapping[int, StageState], x: Any, ctx: Ctx | None = None
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
        batch = x, None, (Ctx() if ctx is None else ctx).reading(x)
        workers = {s: Reader(p, states[s]) for s, p in self.stages.items()}
        actions, sent = self.order
        forwards = [a for a in actions if a.kind == 'F'], [m for m in sent if m.kind == 'F']
        self._run(forwards[0], forwards[1], workers, self._cut_all(workers, batch))
        last = workers.get(len(self.devices) - 1)
        return last.outputs if last else None, {s: w.state() for s, w in workers.items()}

    def again(self) -> None:
        """Forgets what was under way, and what was sent once: a process may have begun again."""
        for lane in self.lanes.values():
            lane.drain()
        self.sending.clear()
        if self.norms:
            self.norms.again()
        if self.kept:
            self.kept.seen[:] = False

    def _cut_all(
        self, stages: Iterable[int], batch: tuple[Any, Any, Ctx], first: int = 0
    ) -> dict[int, dict[int, MicroBatch]]:
        """The micro-batches of stages, by their numbers, which begin at ``first``."""
        rows = lambda s: microbatches(
            self.stages[s].program, self.devices[s], self.num_microbatches, batch
        )
        return {s: dict(enumerate(rows(s), first)) for s in stages}

    def _run(
        self,
        actions: Sequence[Action],
        sent: Sequence[Message],
        workers: Mapping[int, Worker],
        parts: Mapping[int, Mapping[int, MicroBatch]],
        known: Collection[int] | None = None,
    ) -> None:
        """Runs actions in order.

        Args:
          actions: of this process.
          sent: messages, likewise.
          workers: of the stages here.
          parts: of each stage the micro-batches that it runs forwards.
          known: micro-batches whose messages are kept here; None keeps and reads none.
        """
        out, arriving = self._post(sent)
        run = Under(workers, parts, known, out, arriving)

        def run_all(actions: Iterable[Action]) -> None:
            with told(out):
                for a in actions:
                    self._one(a, run)

        if self.measured is None:
            return run_all(actions)
        rows = [[a for a in actions if a.device == d] for d in {a.device for a in actions}]
        with ThreadPoolExecutor(len(rows)) as threads:
            list(threads.map(run_all, rows))

    def _one(self, a: Action, run: Under) -> Payload:
        """What an action makes of the message that it waits for; whoever needs it gets it."""
        (_, s, m, kind, *_), message = a, None
        if (coming := run.arriving.pop((kind, s, m), None)) is not None:
            message = wait(coming)
        if self.kept and run.known is not None and kind == 'F' and s == self.first:
            ids = np.asarray(run.parts[s][m].ctx.ids)
            if m in run.known:
                message = jax.device_put(self.kept.take(ids), self.devices[s])
            else:
                self.kept.put(ids, message)
        own = run.parts[s][m] if kind == 'F' else None
        made = self._act(a, run.workers[s], own, message)
        if (to := run.out.pop((kind, s, m), None)) is not None:
            to.set_result(made)
        return made

    def _act(self, a: Action, worker: Worker, own: MicroBatch | None, message: Payload) -> Payload:
        """What an action makes; if actions are measured, once it is there."""
        if self.measured is None:
            return worker.act(a.kind, a.microbatch, own, message)
        jax.block_until_ready((own, message))
        start = time.monotonic()
        made = worker.act(a.kind, a.microbatch, own, message)
        worker.wait(made)
        self.measured.append(a._replace(start=start, end=time.monotonic()))
        return made

    def _post(self, sent: Sequence[Message]) -> tuple[dict[Task, Any], dict[Task, Any]]:
        """Asks the lanes for all messages of a step: what actions fill, and what they wait for."""
        for done in [f for f in self.sending if f.done()]:
            self.sending.remove(done)
            done.result()  # raises what went wrong
        out: dict[Task, Any] = {}
        arriving: dict[Task, Any] = {}
        for m in sent:
            own = out[m.kind, m.source, m.microbatch] = (
                Future() if m.source in self.stages else None
            )
            arrived = self.lanes[m.source, m.target].carry(own)
            if m.target in self.stages:
                arriving[m.kind, m.target, m.microbatch] = arrived
            else:
                self.sending.append(arrived)
        return {task: own for task, own in out.items() if own is not None}, arriving


def sent_by(actions: Sequence[Action], first: int) -> list[Message]:
    """The messages of a schedule whose stages before ``first`` run no backwards."""
    return [m for m in messages(actions) if m.kind == 'F' or m.target >= first]


def drive(
    programs: Sequence[StageProgram],
    devices: Sequence[Device],
    actions: Sequence[Action],
    lane: Callable[[int, int, Payload], Lane | None],
    compiler_options: Mapping[str, Any] | None = None,
    first: int = 0,
    kept: int = 0,
) -> Driver:
    """The `Driver` of this process for a pipeline of unequal stages.

    Args:
      programs: of all stages, from `jaxmp.runtimes.stage.programs`; channels keep a state per
        micro-batch of the schedule.
      devices: one per stage.
      actions: a schedule of that many stages; it says how many micro-batches there are.
      lane: ``(stage that sends, stage that receives, shapes of a message)`` -> the lane.
      compiler_options: those of `jax.jit`, for every program of a stage.
      first: number of the first stage that runs backwards.
      kept: number of examples whose messages to it are kept.

    Raises:
      ValueError: if the schedule is broken, or stages, devices and schedule differ in number.
    """
    n = len(programs)
    if n != len(devices):
        raise ValueError(f'{n} stages need a device each, got {len(devices)} devices')
    check(actions)
    scheduled, count, _ = size(actions)
    if scheduled != n:
        raise ValueError(
            f'{n} stages and {count} micro-batches need a schedule of as many, got '
            f'{scheduled} and {count}'
        )
    actions = [a for a in actions if a.kind == 'F' or a.stage >= first]
    here = [s for s, d in enumerate(devices) if is_here(d)]
    stages = {s: CompiledStage(programs[s], compiler_options) for s in here}
    # A lane is at both ends, though the sender alone has messages: their shapes are known.
    lanes, sizes = {}, {}
    for a, b in sorted({(m.source, m.target) for m in sent_by(actions, first)}):
        boundary = programs[min(a, b)].right if max(a, b) < n else None
        if boundary and (a in stages or b in stages):
            like = boundary.messages(programs[min(a, b)].y)[a > b]
            framed = lambda t: jax.ShapeDtypeStruct((1, *t.shape), t.dtype)
            lanes[a, b] = lane(a, b, jax.tree.map(framed, like))
            sizes[a, b] = nbytes(like)
    store = None
    if kept:
        cut, x = programs[first].left, programs[first].x
        assert cut, 'the first stage receives nothing'
        framed = jax.tree.map(
            lambda t: jax.ShapeDtypeStruct((1, *t.shape), t.dtype), cut.messages(x)[0]
        )
        store = Kept(kept, x.shape[0], framed if first in stages else None)
    return Driver(stages, devices, lanes, sizes, tuple(actions), count, first, kept=store)
