"""Unequal stages: a program each, driven by a schedule, over devices and over processes.

Python runs the schedule's tasks in order and, at the end of each tick, lets the links exchange what
the tasks made: the packed payloads and nothing else. Inside a process a payload is put on the
neighbour's device; between two processes it goes through a ppermute on a mesh of their two devices,
a program that only these two run. `jax.distributed` is started by the caller (see `jaxmp.team`).

Each end of a link keeps its own feedback state, one slot a micro-batch (see `jaxmp.micro`), so that
no schedule changes the result. Statistics (BatchNorm) move in the forward, in micro-batch order;
the recomputation starts from what the forward started from, and what it finds is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.feedback import Channel
from jaxmp.schedule import Exchange, Task, check, links, size
from jaxmp.stage import End, Feed, Loss, Saved, Stage, StageState, Total, likes, messages
from jaxmp.transport import Device, Wire, far, near
from jaxmp.wire import Ctx, Like, Payload, like, nbytes


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
    moved: dict[int, tuple[int, int]]


def owners(parts: int, processes: int, what: str = 'stage') -> list[int]:
    """The process of each part, a stage or a replica: equal runs.

    Raises:
      ValueError: if there are more processes than parts.

    >>> owners(4, 2)
    [0, 0, 1, 1]
    """
    if processes > parts:
        raise ValueError(
            f'{parts} {what}s run in at most {parts} processes, got {processes}; start fewer, or '
            'give --processes=1 for one alone'
        )
    return [i * processes // parts for i in range(parts)]


def place(stages: int) -> list[Device]:
    """A device a stage: stages in equal runs over the processes, and over a process's devices.

    Raises:
      ValueError: if there are more processes than stages.
    """
    owner, found = owners(stages, jax.process_count()), []
    for s, p in enumerate(owner):
        own = [d for d in jax.devices() if d.process_index == p]
        k, here = s - owner.index(p), owner.count(p)
        found.append(own[k * min(len(own), here) // here])
    return found


class _Desk:
    """A stage within a step: what it holds between its tasks."""

    def __init__(self, stage: Stage, state: StageState, feeds: Callable[[int], Feed]) -> None:
        self.stage, self.feeds = stage, feeds
        self.params = state.variables['params']
        self.rest = {k: v for k, v in state.variables.items() if k != 'params'}
        self.left, self.right = ([list(e.tx), list(e.rx)] for e in (state.left, state.right))
        self.total: Total | None = None
        self.saved: dict[int, tuple[Feed, Saved]] = {}
        self.inbox: dict[tuple[str, int | None], Payload] = {}
        self.outbox: dict[tuple[str, int | None], Payload] = {}

    def do(self, task: Task) -> None:
        """Runs a forward or a backward of a micro-batch."""
        kind, m = task.kind, task.micro
        source, target = (self.left, self.right) if kind == 'F' else (self.right, self.left)
        rx, tx = _slot(source[1], m), _slot(target[0], m)
        run = self.forward if kind == 'F' else self.backward
        self.outbox[kind, m], rx, tx = run(m, self.inbox.pop((kind, m), None), rx, tx)
        for slots, new in ((source[1], rx), (target[0], tx)):
            if slots:
                slots[m % len(slots)] = new

    def forward(self, m: int, message: Payload, rx: Any, tx: Any) -> tuple[Payload, Any, Any]:
        """Keeps what the backward needs; returns the message and the states."""
        feed, variables = self.feeds(m), {'params': self.params, **self.rest}
        saved, self.rest, *out = self.stage.forward(variables, feed, message, rx, tx)
        self.saved[m] = feed._replace(x=None), saved
        return tuple(out)

    def backward(self, m: int, message: Payload, rx: Any, tx: Any) -> tuple[Payload, Any, Any]:
        """Adds to the sums; returns the message and the states."""
        feed, saved = self.saved.pop(m)
        total = self.total or self.stage.zeros(self.params, feed.y)
        self.total, *out = self.stage.backward(total, self.params, feed, saved, message, rx, tx)
        return tuple(out)

    def state(self) -> StageState:
        """The stage's next state."""
        left, right = (End(*map(tuple, e)) for e in (self.left, self.right))
        return StageState({'params': self.params, **self.rest}, left, right)


class _Reader(_Desk):
    """A stage within a prediction: it saves nothing, and the last one keeps its outputs."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.outputs: list[Array] = []

    def forward(self, m: int, message: Payload, rx: Any, tx: Any) -> tuple[Payload, Any, Any]:
        """Returns the message and the states."""
        variables = {'params': self.params, **self.rest}
        y, *out = self.stage.predict(variables, self.feeds(m), message, rx, tx)
        self.outputs.append(y)
        return tuple(out)


def _slot(slots: Sequence[Any], m: int) -> Any:
    return slots[m % len(slots)] if slots else ()


@dataclass(frozen=True)
class Mpmd:
    """A pipeline of unequal stages as this process runs it; see `mpmd`.

    Attributes:
      stages: the stages of this process.
      devices: a device a stage, of any process.
      wires: the links that end in this process.
      tasks: the schedule.
      micros: number of micro-batches.
    """

    stages: Mapping[int, Stage]
    devices: Sequence[Device]
    wires: Mapping[int, Wire]
    tasks: Sequence[Task] = ()
    micros: int = 1

    def follow(self, tasks: Sequence[Task]) -> Mpmd:
        """The same compiled stages under another schedule, with as many micro-batches as it has.

        Raises:
          ValueError: if the schedule is broken or is for another number of stages.
        """
        check(tasks)
        n, micros, _ = size(tasks)
        if n != len(self.devices):
            raise ValueError(f'{len(self.devices)} stages need a schedule of as many, got {n}')
        return replace(self, tasks=tuple(tasks), micros=micros)

    @functools.cached_property
    def order(self) -> tuple[Task | Exchange, ...]:
        """Tasks and exchanges of this process, in the order in which they run."""
        return self._order(self.tasks)

    def _order(self, tasks: Sequence[Task]) -> tuple[Task | Exchange, ...]:
        mine = [t for t in tasks if t.stage in self.stages]
        items = [*mine, *(e for e in links(tasks) if e.link in self.wires)]
        # Tasks of a tick before its exchanges, those by ascending link.
        return tuple(sorted(items, key=lambda i: (i.tick, isinstance(i, Exchange), i[1])))

    def init(self, key: Array) -> dict[int, StageState]:
        """States of the stages of this process; all processes pass the same key."""
        states = {}
        for s, stage in self.stages.items():
            state = stage.init(jax.device_put(key, self.devices[s]))
            left = self._slots(stage.left, state.left, away=False)
            states[s] = state._replace(
                left=left, right=self._slots(stage.right, state.right, away=True)
            )
        return states

    def _slots(self, b: Boundary | None, end: End, away: bool) -> End:
        """A slot a micro-batch, with buffers of its own; one where the state is per example."""
        if b is None:
            return end
        sends, receives = (b.fwd, b.bwd) if away else (b.bwd, b.fwd)

        def fill(channel: Channel, slots: tuple[Any, ...]) -> tuple[Any, ...]:
            more = 0 if channel.per_example else self.micros - 1
            return slots + tuple(jax.tree.map(jnp.copy, slots[0]) for _ in range(more))

        return End(fill(sends, end.tx), fill(receives, end.rx))

    def step(
        self, states: Mapping[int, StageState], x: Any, y: Any, ctx: Ctx | None = None
    ) -> Result:
        """Runs the schedule once over a batch; the optimiser's step is the caller's.

        Args:
          states: of the stages of this process, from `init` or the last step, which must not be
            used again: the feedback states of the result take over their memory.
          x: the whole batch, axis 0 the sample; used where the first stage is.
          y: targets; used where the last stage is.
          ctx: key and ids of the step; see `jaxmp.micro`.

        Raises:
          ValueError: if the micro-batches are not of the size the pipeline was built for.
        """
        feeds = self._feeds(x, y, Ctx() if ctx is None else ctx)
        desks = {
            s: _Desk(p, states[s], functools.partial(feeds, s)) for s, p in self.stages.items()
        }
        moved: dict[int, tuple[int, int]] = dict.fromkeys(self.wires, (0, 0))
        for link, *sizes in self._run(self.order, desks):
            moved[link] = moved[link][0] + sizes[0], moved[link][1] + sizes[1]
        totals = {s: d.total for s, d in desks.items() if d.total}
        last = totals.get(len(self.devices) - 1)
        return Result(
            last.loss if last else None,
            last.aux if last else None,
            {s: t.grads for s, t in totals.items()},
            {s: d.state() for s, d in desks.items()},
            moved,
        )

    def predict(
        self, states: Mapping[int, StageState], x: Any, ctx: Ctx | None = None
    ) -> tuple[list[Array] | None, dict[int, StageState]]:
        """Forwards only.

        Args:
          states: of the stages of this process.
          x: the whole batch, as in `step`.
          ctx: key and ids.

        Returns:
          The output of each micro-batch, None where the last stage is not; the states after it.

        Raises:
          ValueError: as `step`.
        """
        feeds = self._feeds(x, None, Ctx() if ctx is None else ctx)
        desks = {
            s: _Reader(p, states[s], functools.partial(feeds, s)) for s, p in self.stages.items()
        }
        for _ in self._run(self._order([t for t in self.tasks if t.kind == 'F']), desks):
            pass
        last = desks.get(len(self.devices) - 1)
        return last.outputs if last else None, {s: d.state() for s, d in desks.items()}

    def _feeds(self, x: Any, y: Any, ctx: Ctx) -> Callable[[int, int], Feed]:
        size = next(iter(self.stages.values())).x.shape[0]
        for name, a in (('x', x), ('y', y), ('ids', ctx.ids)):
            if a is not None and len(a) != self.micros * size:
                raise ValueError(
                    f'{name} of a batch of {len(a)} came to a pipeline built for {self.micros} '
                    f'micro-batches of {size}; feedback states are per position, so give '
                    f'{self.micros * size}'
                )
        rows = lambda a, m: None if a is None else a[m * size : (m + 1) * size]

        def feed(s: int, m: int) -> Feed:
            part = rows(x, m) if s == 0 else None, rows(y, m) if self.stages[s].loss else None
            at = Ctx(ctx.key, rows(ctx.ids, m))
            made = Feed(*part, at, np.int32(m), np.float32(1 / self.micros))
            return jax.device_put(made, self.devices[s])

        return feed

    def _run(
        self, order: Sequence[Task | Exchange], desks: Mapping[int, _Desk]
    ) -> Iterator[tuple[int, int, int]]:
        """Does everything in order; yields link and bytes of each exchange."""
        for item in order:
            if isinstance(item, Task):
                desks[item.stage].do(item)
            else:
                yield item.link, *self._exchange(item, desks)

    def _exchange(self, e: Exchange, desks: Mapping[int, _Desk]) -> tuple[int, int]:
        ends = desks.get(e.link), desks.get(e.link + 1)
        ways = (('F', e.forward), ('B', e.backward))
        carries = [m is not None for _, m in ways]
        given = [
            d.outbox.pop(way) if d and c else None
            for d, way, c in zip(ends, ways, carries, strict=True)
        ]
        arrived = self.wires[e.link].exchange(given, carries)
        for desk, way, payload in zip(reversed(ends), ways, arrived, strict=True):
            if desk and way[1] is not None:
                desk.inbox[way] = payload
        return nbytes(arrived[0]), nbytes(arrived[1])


def mpmd(
    stages: Sequence[nn.Module],
    boundaries: Sequence[Boundary],
    loss: Loss,
    tasks: Sequence[Task],
    x: Array | Like,
    devices: Sequence[Device] | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Mpmd:
    """This process's part of a pipeline of unequal stages.

    Args:
      stages: Flax modules, each taking the last one's output.
      boundaries: one between each two; their channels are used, their transport is not.
      loss: ``(output, target) -> (mean over the micro-batch, further means)``.
      tasks: a schedule of that many stages; it says how many micro-batches there are.
      x: an input like one micro-batch.
      devices: one a stage; default `place`.
      compiler_options: those of `jax.jit`, for every program of a stage.
      **kwargs: passed to every stage's ``__call__``, for example ``train=True``.

    Raises:
      ValueError: if the numbers of stages, boundaries, devices and of the schedule do not fit.
    """
    n = len(stages)
    devices = place(n) if devices is None else list(devices)
    if not n == len(boundaries) + 1 == len(devices):
        raise ValueError(
            f'{n} stages need a boundary between each two and a device each; got '
            f'{len(boundaries)} boundaries and {len(devices)} devices'
        )
    shapes, edges = likes(stages, like(x), kwargs), [None, *boundaries, None]
    here = [s for s, d in enumerate(devices) if d.process_index == jax.process_index()]
    built = {
        s: Stage(
            s, stages[s], edges[s], edges[s + 1], shapes[s], shapes[s + 1],
            loss if s + 1 == n else None, kwargs, compiler_options,
        )
        for s in here
    }  # fmt: skip
    wires = {}
    for link in range(n - 1):
        ends = devices[link], devices[link + 1]
        if link in built and link + 1 in built:
            wires[link] = near(*ends)
        elif link in built or link + 1 in built:
            wires[link] = far(*ends, messages(boundaries[link], shapes[link + 1]))
    return Mpmd(built, devices, wires).follow(tasks)
