"""`Driver`: a program per stage, driven by a schedule over devices and processes.

Python runs the schedule's tasks in order and, at the end of each tick, lets the links carry what
the tasks made: the packed messages and nothing else. Inside a process a message is put on the
neighbour's device; between two processes it goes through a ppermute on a mesh of their two devices,
a program that only these two run. `jax.distributed` is started by the caller (see
`jaxmp.distributed`).

Each end of a link keeps its own feedback state, with a slot per micro-batch, so that no schedule
changes the result. Statistics (BatchNorm) move in the forward, in micro-batch order; the
recomputation starts from what the forward started from, and what it finds is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.devices import Device
from jaxmp.runtimes.links import Link, local_link, remote_link
from jaxmp.runtimes.schedule import Action, Transfer, check, size, transfers
from jaxmp.runtimes.stage import MicroBatch, StageProgram, StageState, Total
from jaxmp.wire import Ctx, Payload, nbytes

Traffic = dict[int, tuple[int, int]]  # payload bytes of each link, forward and backward


class Result(NamedTuple):
    """What a step gives for the stages of this process.

    Attributes:
      loss: mean over micro-batches; None where the last stage is not.
      aux: means of what comes with the loss; None where the last stage is not.
      grads: gradients of the parameters of each stage here.
      states: the next state of each stage here, its parameters unchanged.
      moved: payload bytes ``(forward, backward)`` of each link that ends here.
    """

    loss: Array | None
    aux: Any
    grads: dict[int, Any]
    states: dict[int, StageState]
    moved: Traffic


class CompiledStage:
    """The compiled functions of a stage.

    The feedback states and statistics that a training function takes are donated: a table of AQ-SGD
    is updated in place. A prediction donates nothing.
    """

    def __init__(self, program: StageProgram, options: Mapping[str, Any] | None) -> None:
        """Compiles nothing yet; ``options`` are those of `jax.jit`'s compiler."""
        self.program = program
        jit = functools.partial(jax.jit, compiler_options=dict(options or {}) or None)
        self.init = jit(program.init)
        self.forward = jit(self._forward, donate_argnums=1)
        self.predict = jit(self._predict)
        self.backward = jit(self._backward, donate_argnums=(1, 2))
        self.init_total = jit(program.init_total, keep_unused=True)
        self.mean = jit(
            lambda total, n: jax.tree.map(lambda a: (a / n).astype(a.dtype), total),
            donate_argnums=0,
        )

    def _forward(self, params: Any, moving: Any, batch: MicroBatch, message: Payload) -> tuple:
        state, out, residuals = self.program.forward(
            StageState(params, *moving), _folded(batch), _rows(message)
        )
        return state[1:], _framed(out) if self.program.right else None, residuals

    def _predict(self, params: Any, moving: Any, batch: MicroBatch, message: Payload) -> tuple:
        state, out, _ = self.program.forward(
            StageState(params, *moving), _folded(batch), _rows(message)
        )
        return state[1:], _framed(out) if self.program.right else out

    def _backward(
        self, params: Any, feedback: Any, total: Total, residuals: Any, arrived: Any
    ) -> tuple:
        batch, message = arrived
        state = StageState(params, {}, feedback)
        state, total, out = self.program.backward(
            state, total, residuals, (_folded(batch), _rows(message))
        )
        return state.feedback, total, _framed(out)


def _folded(batch: MicroBatch) -> MicroBatch:
    """With the key of the micro-batch; `jaxmp.microbatch.context` folds likewise."""
    return batch._replace(ctx=batch.ctx.fold(batch.ctx.microbatch))


def _rows(message: Payload) -> Payload:
    return jax.tree.map(lambda a: a[0], message)


def _framed(message: Payload) -> Payload:
    """Each array under a leading axis of 1: its end of a link."""
    return jax.tree.map(lambda a: a[None], message)


class _Worker:
    """A stage within a step: what it holds between its actions."""

    def __init__(self, stage: CompiledStage, state: StageState, device: Device) -> None:
        self.stage, self.device = stage, device
        self.params, self.model_state, self.feedback = state
        self.total: Total | None = None
        self.saved: dict[int, tuple[MicroBatch, Any]] = {}
        self.inbox: dict[tuple[str, int | None], Payload] = {}
        self.outbox: dict[tuple[str, int | None], Payload] = {}

    def act(self, action: Action, batch: MicroBatch | None) -> None:
        """Runs a forward (which takes its micro-batch) or a backward."""
        m, message = action.microbatch, self.inbox.pop((action.kind, action.microbatch), None)
        run = self.backward if batch is None else functools.partial(self.forward, batch)
        self.outbox[action.kind, m] = run(m, message)

    def forward(self, batch: MicroBatch, m: int, message: Payload) -> Payload:
        """Keeps what the backward needs; returns the message."""
        moving = self.model_state, self.feedback
        moving, out, residuals = self.stage.forward(self.params, moving, batch, message)
        self.model_state, self.feedback = moving
        self.saved[m] = batch._replace(x=None), residuals
        return out

    def backward(self, m: int, message: Payload) -> Payload:
        """Adds to the sums; returns the message."""
        batch, residuals = self.saved.pop(m)
        total = self.total or self.stage.init_total(self.params, batch.y)
        self.feedback, self.total, out = self.stage.backward(
            self.params, self.feedback, total, residuals, (batch, message)
        )
        return out

    def state(self) -> StageState:
        """The stage's next state."""
        return StageState(self.params, self.model_state, self.feedback)


class _Reader(_Worker):
    """A stage within a prediction: it saves nothing, and the last one keeps its outputs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.outputs: list[Array] = []

    def forward(self, batch: MicroBatch, m: int, message: Payload) -> Payload:
        """Returns the message."""
        del m
        moving = self.model_state, self.feedback
        moving, out = self.stage.predict(self.params, moving, batch, message)
        self.model_state, self.feedback = moving
        if self.stage.program.right:
            return out
        self.outputs.append(out)
        return None


@dataclass(frozen=True)
class Driver:
    """A pipeline of unequal stages as this process runs it; see `drive`.

    Attributes:
      stages: the stages of this process.
      devices: a device per stage, of any process.
      links: the links that end in this process.
      actions: the schedule.
      num_microbatches: M.
    """

    stages: Mapping[int, CompiledStage]
    devices: Sequence[Device]
    links: Mapping[int, Link]
    actions: Sequence[Action] = ()
    num_microbatches: int = 1

    def follow(self, actions: Sequence[Action]) -> Driver:
        """The same compiled stages under another schedule of as many micro-batches.

        Raises:
          ValueError: if the schedule is broken or is for another number of stages or micro-batches.
        """
        check(actions)
        stages, microbatches, _ = size(actions)
        if (stages, microbatches) != (len(self.devices), self.num_microbatches):
            raise ValueError(
                f'{len(self.devices)} stages and {self.num_microbatches} micro-batches need a '
                f'schedule of as many, got {stages} and {microbatches}'
            )
        return replace(self, actions=tuple(actions))

    @functools.cached_property
    def order(self) -> tuple[Action | Transfer, ...]:
        """Actions and transfers of this process, in the order in which they run."""
        return self._order(self.actions)

    def _order(self, actions: Sequence[Action]) -> tuple[Action | Transfer, ...]:
        mine = [a for a in actions if a.stage in self.stages]
        items = [*mine, *(t for t in transfers(actions) if t.link in self.links)]
        # Actions of a tick before its transfers, those by ascending link.
        return tuple(sorted(items, key=lambda i: (i.tick, isinstance(i, Transfer), i[1])))

    def init(self, key: Array) -> dict[int, StageState]:
        """States of the stages of this process; all processes pass the same key."""
        return {s: p.init(jax.device_put(key, self.devices[s])) for s, p in self.stages.items()}

    def step(
        self, states: Mapping[int, StageState], x: Any, y: Any, ctx: Ctx | None = None
    ) -> Result:
        """Runs the schedule once over a batch; the optimizer's step is the caller's.

        Args:
          states: of the stages of this process, from `init` or the last step; their feedback and
            statistics are donated.
          x: the whole batch, axis 0 the sample; used where the first stage is.
          y: targets; used where the last stage is.
          ctx: key and ids of the step.

        Raises:
          ValueError: if the micro-batches are not of the size the pipeline was built for.
        """
        given = x, y, Ctx() if ctx is None else ctx
        workers = {s: _Worker(p, states[s], self.devices[s]) for s, p in self.stages.items()}
        moved: Traffic = dict.fromkeys(self.links, (0, 0))
        for link, *sizes in self._run(self.order, workers, given):
            moved[link] = moved[link][0] + sizes[0], moved[link][1] + sizes[1]
        n = np.float32(self.num_microbatches)
        totals = {s: w.stage.mean(w.total, n) for s, w in workers.items()}
        last = totals.get(len(self.devices) - 1)
        return Result(
            last.loss if last else None,
            last.aux if last else None,
            {s: t.grads for s, t in totals.items()},
            {s: w.state() for s, w in workers.items()},
            moved,
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
          The output of each micro-batch, None where the last stage is not; the states after it.

        Raises:
          ValueError: as `step`.
        """
        given = x, None, Ctx() if ctx is None else ctx
        workers = {s: _Reader(p, states[s], self.devices[s]) for s, p in self.stages.items()}
        for _ in self._run(self._order([a for a in self.actions if a.kind == 'F']), workers, given):
            pass
        last = workers.get(len(self.devices) - 1)
        return last.outputs if last else None, {s: w.state() for s, w in workers.items()}

    def _microbatch(self, s: int, m: int, given: tuple[Any, Any, Ctx]) -> MicroBatch:
        x, y, ctx = given
        size = self.stages[s].program.x.shape[0]
        for name, a in (('x', x), ('y', y), ('ids', ctx.ids)):
            if a is not None and len(a) != self.num_microbatches * size:
                raise ValueError(
                    f'{name} of a batch of {len(a)} came to a pipeline built for '
                    f'{self.num_microbatches} micro-batches of {size}; feedback states are per '
                    f'position, so give {self.num_microbatches * size}'
                )
        rows = lambda a: None if a is None else a[m * size : (m + 1) * size]
        at = Ctx(ctx.key, rows(ctx.ids), microbatch=np.int32(m))
        needs_y = self.stages[s].program.loss is not None
        made = MicroBatch(rows(x) if s == 0 else None, rows(y) if needs_y else None, at)
        return jax.device_put(made, self.devices[s])

    def _run(
        self,
        order: Sequence[Action | Transfer],
        workers: Mapping[int, _Worker],
        given: tuple[Any, Any, Ctx],
    ) -> Iterator[tuple[int, int, int]]:
        """Does everything in order; yields link and bytes of each transfer."""
        for item in order:
            if isinstance(item, Transfer):
                yield item.link, *self._transfer(item, workers)
            else:
                s, m, forward = item.stage, item.microbatch, item.kind == 'F'
                workers[s].act(item, self._microbatch(s, m, given) if forward else None)

    def _transfer(self, t: Transfer, workers: Mapping[int, _Worker]) -> tuple[int, int]:
        ends = workers.get(t.link), workers.get(t.link + 1)
        ways = (('F', t.forward), ('B', t.backward))
        carries = [m is not None for _, m in ways]
        sent = [
            w.outbox.pop(way) if w and c else None
            for w, way, c in zip(ends, ways, carries, strict=True)
        ]
        arrived = self.links[t.link].exchange(sent, carries)
        for worker, way, payload in zip(reversed(ends), ways, arrived, strict=True):
            if worker and way[1] is not None:
                worker.inbox[way] = payload
        return nbytes(arrived[0]), nbytes(arrived[1])


def drive(
    programs: Sequence[StageProgram],
    devices: Sequence[Device],
    actions: Sequence[Action],
    compiler_options: Mapping[str, Any] | None = None,
) -> Driver:
    """This process's part of a pipeline of unequal stages.

    Args:
      programs: of all stages, from `jaxmp.runtimes.stage.programs`; channels keep a state per
        micro-batch of the schedule.
      devices: one per stage.
      actions: a schedule of that many stages; it says how many micro-batches there are.
      compiler_options: those of `jax.jit`, for every program of a stage.

    Raises:
      ValueError: if the numbers of stages, devices and of the schedule do not fit.
    """
    n = len(programs)
    if n != len(devices):
        raise ValueError(f'{n} stages need a device each, got {len(devices)} devices')
    here = [s for s, d in enumerate(devices) if d.process_index == jax.process_index()]
    built = {s: CompiledStage(programs[s], compiler_options) for s in here}
    links = {}
    for link, program in enumerate(programs[:-1]):
        ends, boundary = (devices[link], devices[link + 1]), program.right
        if link in built and link + 1 in built:
            links[link] = local_link(*ends)
        elif boundary and (link in built or link + 1 in built):
            shapes = jax.tree.map(
                lambda a: jax.ShapeDtypeStruct((1, *a.shape), a.dtype),
                boundary.messages(program.y),
            )
            links[link] = remote_link(*ends, shapes)
    return Driver(built, devices, links, (), size(actions)[1]).follow(actions)
