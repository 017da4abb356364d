"""Unequal stages: a program each, driven by a schedule, over devices and over processes.

Every stage has one compiled forward and one compiled backward; the backward recomputes the stage
from its saved input. Python runs the schedule's tasks in order and, at the end of each tick, lets
the links exchange what the tasks made: the packed payloads and nothing else. Inside a process a
payload is put on the neighbour's device; between two processes it goes through a ppermute on a mesh
of their two devices, a program that only these two run. `jax.distributed` is started by the caller,
on CPU with ``jax_cpu_collectives_implementation='gloo'``.

Each end of a link keeps its own feedback state, one slot a micro-batch, so that no schedule changes
the result; one micro-batch is the paper's global buffer. A channel with a state per example has one
table for all micro-batches. Gradients and loss are means over micro-batches. Statistics (BatchNorm)
move in the forward, in micro-batch order, and are normalised per micro-batch; the recomputation
starts from what the forward started from, and what it finds is dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.feedback import Channel
from jaxmp.schedule import Exchange, Task, check, links, size
from jaxmp.wire import Ctx, Like, Payload, like, nbytes

Device = Any  # a jax.Device
Loss = Callable[[Array, Array], Array]


class End(NamedTuple):
    """What a stage remembers at one of its links: slots of its sending and receiving channel."""

    tx: tuple[Any, ...] = ()
    rx: tuple[Any, ...] = ()


class StageState(NamedTuple):
    """What a stage keeps between steps; the first has no left end, the last no right one."""

    variables: Mapping[str, Any]
    left: End
    right: End


class Feed(NamedTuple):
    """A micro-batch as one stage needs it; ``share`` is its weight in loss and gradients, 1 / M."""

    x: Any
    y: Any
    ctx: Ctx
    share: float


class Saved(NamedTuple):
    """What the forward of a micro-batch leaves for its backward."""

    x: Array
    rest: Any
    received: Array | None
    sent: Array | None


class Result(NamedTuple):
    """What a step gives for the stages of this process.

    Attributes:
      loss: mean over micro-batches; None where the last stage is not.
      grads: gradients of the parameters of each stage here.
      states: the next state of each stage here, its parameters unchanged.
      moved: payload bytes ``(forward, backward)`` of each link that ends here.
    """

    loss: Array | None
    grads: dict[int, Any]
    states: dict[int, StageState]
    moved: dict[int, tuple[int, int]]


def micro(ctx: Ctx, m: int, micros: int) -> Ctx:
    """The context of micro-batch ``m``: its part of ``ids``, sub-stream m of the key.

    A single micro-batch has the step's own key, so that it equals a step of `jaxmp.pipeline`.

    Args:
      ctx: the step's context, ids of shape ``(B,)``.
      m: the micro-batch.
      micros: M.

    >>> micro(Ctx(ids=jnp.arange(6)), 1, 3).ids.tolist()
    [2, 3]
    """
    at = ctx if micros == 1 else ctx.fold(m)
    return at if ctx.ids is None else at._replace(ids=_part(ctx.ids, m, micros))


def _part(a: Array, m: int, micros: int) -> Array:
    size = len(a) // micros
    return a[m * size : (m + 1) * size]


@dataclass(frozen=True)
class Program:
    """One stage: its module, the boundaries beside it and its compiled tasks.

    Attributes:
      index: its number.
      module: Flax module.
      left: boundary to the stage before, or None.
      right: boundary to the stage after, or None.
      x: a micro-batch of its input.
      y: a micro-batch of its output.
      loss: ``(y, target) -> scalar`` in the last stage.
      kwargs: passed to the module.
      options: compiler options of `jax.jit`.
    """

    index: int
    module: nn.Module
    left: Boundary | None
    right: Boundary | None
    x: Like
    y: Like
    loss: Loss | None
    kwargs: Mapping[str, Any]
    options: Any = None

    @functools.cached_property
    def init(self) -> Callable[[Array], StageState]:
        """``key -> state``: variables as `Pipeline.init` makes them, one slot at each end."""
        return jax.jit(self._init, compiler_options=self.options)

    @functools.cached_property
    def forward(self) -> Callable:
        """``(variables, feed, message, rx, tx) -> (saved, rest, message, rx, tx)``."""
        return jax.jit(self._forward, compiler_options=self.options)

    @functools.cached_property
    def backward(self) -> Callable:
        """``(total, params, feed, saved, message, rx, tx) -> (total, message, rx, tx)``."""
        return jax.jit(self._backward, donate_argnums=0, compiler_options=self.options)

    @functools.cached_property
    def zeros(self) -> Callable:
        """``params -> (loss, gradients)``, all zero."""
        wide = jnp.promote_types(self.y.dtype, jnp.float32)
        zeros = lambda params: (jnp.zeros((), wide), jax.tree.map(jnp.zeros_like, params))
        return jax.jit(zeros, keep_unused=True, compiler_options=self.options)

    def _init(self, key: Array) -> StageState:
        keys = {'params': jax.random.fold_in(key, self.index), 'dropout': key}
        made = self.module.init(keys, jnp.zeros(self.x.shape, self.x.dtype), **self.kwargs)
        left, right = End(), End()
        if self.left:
            left = End((self.left.bwd.init(self.x)[0],), (self.left.fwd.init(self.x)[1],))
        if self.right:
            right = End((self.right.fwd.init(self.y)[0],), (self.right.bwd.init(self.y)[1],))
        return StageState(dict(made), left, right)

    def _at(self, ctx: Ctx) -> tuple[Ctx, Ctx, Ctx]:
        """Contexts of the left boundary, of the stage and of the right one; see Pipeline.apply."""
        i = 2 * self.index
        return ctx.fold(i), ctx.fold(i + 1), ctx.fold(i + 2)

    def _run(self, variables: Any, x: Array, ctx: Ctx) -> tuple[Array, dict]:
        mutable = [name for name in variables if name != 'params']
        rngs = {} if ctx.key is None else {'dropout': ctx.key}
        y, changed = self.module.apply(variables, x, mutable=mutable, rngs=rngs, **self.kwargs)
        return y, {name: changed.get(name, variables[name]) for name in mutable}

    def _forward(
        self, variables: Any, feed: Feed, message: Payload, rx: Any, tx: Any
    ) -> tuple[Saved, Any, Payload, Any, Any]:
        left, own, right = self._at(feed.ctx)
        if self.left:
            x, rx, received = _read(self.left.fwd, message, rx, self.x, left.fold(0))
        else:
            x, received = feed.x, None
        y, rest = self._run(variables, x, own)
        sent, out = None, None
        if self.right:
            out, tx, sent = _write(self.right.fwd, y, tx, right.fold(0))
        before = {name: variables[name] for name in rest}
        return Saved(x, before, received, sent), rest, out, rx, tx

    def _backward(
        self, total: Any, params: Any, feed: Feed, saved: Saved, message: Payload, rx: Any, tx: Any
    ) -> tuple[Any, Payload, Any, Any]:
        left, own, right = self._at(feed.ctx)

        def run(params: Any, x: Array) -> Array:
            y, _ = self._run({'params': params, **saved.rest}, x, own)
            return y if self.loss is None else self.loss(y, feed.y)

        y, pull = jax.vjp(run, params, saved.x)
        loss, g = total[0], jnp.ones_like(y)
        if self.right:
            at = right.fold(1)._replace(support=saved.sent)
            g, rx, _ = _read(self.right.bwd, message, rx, like(y), at)
        else:
            loss = loss + (y * feed.share).astype(loss.dtype)
        grads, gx = pull(g)
        total = loss, jax.tree.map(lambda t, g: t + g * feed.share, total[1], grads)
        out = None
        if self.left:
            at = left.fold(1)._replace(support=saved.received)
            out, tx, _ = _write(self.left.bwd, gx, tx, at)
        return total, out, rx, tx


def _write(channel: Channel, x: Array, tx: Any, ctx: Ctx) -> tuple[Payload, Any, Any]:
    """The message (each array under a leading axis of 1, its end of a wire), state, support."""
    message, tx = channel.send(x, tx, ctx)
    known = channel.codec.support(message, like(x), ctx)
    return jax.tree.map(lambda a: a[None], message), tx, known


def _read(channel: Channel, message: Payload, rx: Any, x: Like, ctx: Ctx) -> tuple[Array, Any, Any]:
    message = jax.tree.map(lambda a: a[0], message)
    y, rx = channel.recv(message, rx, x, ctx)
    return y, rx, channel.codec.support(message, x, ctx)


Wire = Callable[[Sequence[Payload], Sequence[bool]], tuple[Payload, Payload]]


def near(left: Device, right: Device) -> Wire:
    """A link inside this process: each payload is put on the other end's device.

    Returns:
      ``((forward, backward), carries) -> (forward, backward)`` as they arrive; None for nothing.
    """

    def exchange(payloads: Sequence[Payload], carries: Sequence[bool]) -> tuple[Payload, Payload]:
        del carries
        return jax.device_put(payloads[0], right), jax.device_put(payloads[1], left)

    return exchange


def far(left: Device, right: Device, like: Sequence[Payload]) -> Wire:
    """A link to another process: a ppermute that only the processes of the two devices run.

    Both ends must call it in the same order with the same ``carries``, which `schedule.links` says.

    Args:
      left: device of the earlier stage.
      right: device of the later one; exactly one of the two is of this process.
      like: shapes of the forward and of the backward payload, leading axis 1.

    Returns:
      ``((forward, backward), carries) -> (forward, backward)``; a direction that this end only
      sends comes back as zeros, one that does not carry as None.

    Raises:
      ValueError: if both devices, or none, are of this process.
    """
    mine = [d.process_index == jax.process_index() for d in (left, right)]
    if sum(mine) != 1:
        raise ValueError(
            f'far links this process ({jax.process_index()}) to another, got {left} and {right}; '
            'use near inside a process, and nothing where neither end is here'
        )
    mesh = Mesh(np.array([left, right]), ('end',), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P('end'))
    empty = [
        jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), mesh.local_devices[0]), p)
        for p in like
    ]

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P('end'), out_specs=P('end'))
    def swap(forward: Payload, backward: Payload) -> tuple[Payload, Payload]:
        right = jax.tree.map(lambda a: jax.lax.ppermute(a, 'end', [(0, 1)]), forward)
        return right, jax.tree.map(lambda a: jax.lax.ppermute(a, 'end', [(1, 0)]), backward)

    def spread(a: Array) -> Array:
        return jax.make_array_from_single_device_arrays((2, *a.shape[1:]), sharding, [a])

    def exchange(payloads: Sequence[Payload], carries: Sequence[bool]) -> tuple[Payload, Payload]:
        given = [
            None if not c else p if own else zeros
            for c, own, p, zeros in zip(carries, mine, payloads, empty, strict=True)
        ]
        moved = swap(*jax.tree.map(spread, given))
        return jax.tree.map(lambda a: a.addressable_data(0), moved)

    return exchange


def messages(b: Boundary, x: Like) -> tuple[Payload, Payload]:
    """Shapes of the forward and the backward message of a tensor like ``x``, leading axis 1."""

    def make(x: Array) -> tuple[Payload, Payload]:
        ctx = Ctx(jax.random.key(0), jnp.zeros(x.shape[:1], jnp.int32))
        forward, _, known = _write(b.fwd, x, b.fwd.init(like(x))[0], ctx)
        backward = b.bwd.init(like(x))[0]
        return forward, _write(b.bwd, x, backward, ctx._replace(support=known))[0]

    return jax.eval_shape(make, x)


def place(stages: int) -> list[Device]:
    """A device a stage: stages in equal runs over the processes, and over a process's devices.

    Raises:
      ValueError: if there are more processes than stages.
    """
    n = jax.process_count()
    if n > stages:
        raise ValueError(f'{stages} stages run in at most {stages} processes, got {n}; start fewer')
    owner = [s * n // stages for s in range(stages)]
    found = []
    for s, p in enumerate(owner):
        own = [d for d in jax.devices() if d.process_index == p]
        k, here = s - owner.index(p), owner.count(p)
        found.append(own[k * min(len(own), here) // here])
    return found


class _Desk:
    """A stage within a step: what it holds between its tasks."""

    def __init__(self, program: Program, state: StageState, feeds: Callable[[int], Feed]) -> None:
        self.program, self.feeds = program, feeds
        self.params = state.variables['params']
        self.rest = {k: v for k, v in state.variables.items() if k != 'params'}
        self.left, self.right = ([list(e.tx), list(e.rx)] for e in (state.left, state.right))
        self.total = program.zeros(self.params)
        self.saved: dict[int, tuple[Feed, Saved]] = {}
        self.inbox: dict[tuple[str, int | None], Payload] = {}
        self.outbox: dict[tuple[str, int | None], Payload] = {}

    def do(self, task: Task) -> None:
        """Runs a forward or a backward of a micro-batch."""
        kind, m = task.kind, task.micro
        source, target = (self.left, self.right) if kind == 'F' else (self.right, self.left)
        rx, tx = _slot(source[1], m), _slot(target[0], m)
        run = self._forward if kind == 'F' else self._backward
        self.outbox[kind, m], rx, tx = run(m, self.inbox.pop((kind, m), None), rx, tx)
        for slots, new in ((source[1], rx), (target[0], tx)):
            if slots:
                slots[m % len(slots)] = new

    def _forward(self, m: int, message: Payload, rx: Any, tx: Any) -> tuple[Payload, Any, Any]:
        feed, variables = self.feeds(m), {'params': self.params, **self.rest}
        saved, self.rest, *out = self.program.forward(variables, feed, message, rx, tx)
        self.saved[m] = feed._replace(x=None), saved
        return tuple(out)

    def _backward(self, m: int, message: Payload, rx: Any, tx: Any) -> tuple[Payload, Any, Any]:
        given = (self.params, *self.saved.pop(m), message, rx, tx)
        self.total, *out = self.program.backward(self.total, *given)
        return tuple(out)

    def state(self) -> StageState:
        """The stage's next state."""
        left, right = (End(*map(tuple, e)) for e in (self.left, self.right))
        return StageState({'params': self.params, **self.rest}, left, right)


def _slot(slots: Sequence[Any], m: int) -> Any:
    return slots[m % len(slots)] if slots else ()


@dataclass(frozen=True)
class Mpmd:
    """A pipeline of unequal stages as this process runs it; see `mpmd`.

    Attributes:
      programs: the stages of this process.
      devices: a device a stage, of any process.
      wires: the links that end in this process.
      order: tasks and exchanges of this process, in the order in which they run.
      micros: number of micro-batches.
    """

    programs: Mapping[int, Program]
    devices: Sequence[Device]
    wires: Mapping[int, Wire]
    order: Sequence[Task | Exchange] = ()
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
        mine = [t for t in tasks if t.stage in self.programs]
        items = [*mine, *(e for e in links(tasks) if e.link in self.wires)]
        # Tasks of a tick before its exchanges, those by ascending link.
        order = sorted(items, key=lambda i: (i.tick, isinstance(i, Exchange), i[1]))
        return replace(self, order=tuple(order), micros=micros)

    def init(self, key: Array) -> dict[int, StageState]:
        """States of the stages of this process; all processes pass the same key."""
        states = {}
        for s, p in self.programs.items():
            state = p.init(jax.device_put(key, self.devices[s]))
            left, right = (p.left, state.left), (p.right, state.right)
            left, right = self._slots(*left, away=False), self._slots(*right, away=True)
            states[s] = StageState(state.variables, left, right)
        return states

    def _slots(self, b: Boundary | None, end: End, away: bool) -> End:
        """A slot a micro-batch; one where the state is per example."""
        if b is None:
            return end
        sends, receives = (b.fwd, b.bwd) if away else (b.bwd, b.fwd)
        tx, rx = (1 if c.per_example else self.micros for c in (sends, receives))
        return End(end.tx * tx, end.rx * rx)

    def step(
        self, states: Mapping[int, StageState], x: Array, y: Array, ctx: Ctx | None = None
    ) -> Result:
        """Runs the schedule once over a batch; the optimiser's step is the caller's.

        Args:
          states: of the stages of this process, from `init` or the last step.
          x: the whole batch, axis 0 the sample; used by the first stage.
          y: targets; used by the last stage.
          ctx: key and ids of the step; see `micro`.

        Raises:
          ValueError: if the micro-batches are not of the size the pipeline was built for.
        """
        ctx = Ctx() if ctx is None else ctx
        self._check(x)

        def feed(s: int, m: int) -> Feed:
            part = lambda a, used: _part(a, m, self.micros) if used else None
            own = part(x, s == 0), part(y, self.programs[s].loss)
            made = Feed(own[0], own[1], micro(ctx, m, self.micros), 1 / self.micros)
            return jax.device_put(made, self.devices[s])

        desks = {
            s: _Desk(p, states[s], functools.partial(feed, s)) for s, p in self.programs.items()
        }
        moved: dict[int, tuple[int, int]] = dict.fromkeys(self.wires, (0, 0))
        for item in self.order:
            if isinstance(item, Task):
                desks[item.stage].do(item)
            else:
                sizes = self._exchange(item, desks)
                before = moved[item.link]
                moved[item.link] = before[0] + sizes[0], before[1] + sizes[1]
        last = desks.get(len(self.devices) - 1)
        return Result(
            last.total[0] if last else None,
            {s: d.total[1] for s, d in desks.items()},
            {s: d.state() for s, d in desks.items()},
            moved,
        )

    def _check(self, x: Array) -> None:
        size = next(iter(self.programs.values())).x.shape[0]
        if len(x) != self.micros * size:
            raise ValueError(
                f'a batch of {len(x)} came to a pipeline built for {self.micros} micro-batches of '
                f'{size}; feedback states are per position, so give {self.micros * size}'
            )

    def _exchange(self, e: Exchange, desks: Mapping[int, _Desk]) -> tuple[int, int]:
        ends = desks.get(e.link), desks.get(e.link + 1)
        ways = (('F', e.forward), ('B', e.backward))
        carries = [m is not None for _, m in ways]
        given = [
            d.outbox.pop(way) if d and c else None
            for d, way, c in zip(ends, ways, carries, strict=True)
        ]
        arrived = self.wires[e.link](given, carries)
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
      loss: ``(output, target) -> mean over the micro-batch``.
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
    likes, edges = _likes(stages, like(x), kwargs), [None, *boundaries, None]
    here = [s for s, d in enumerate(devices) if d.process_index == jax.process_index()]
    programs = {
        s: Program(
            s, stages[s], edges[s], edges[s + 1], likes[s], likes[s + 1],
            loss if s + 1 == n else None, kwargs, compiler_options,
        )
        for s in here
    }  # fmt: skip
    wires = {}
    for link in range(n - 1):
        ends = devices[link], devices[link + 1]
        if link in programs and link + 1 in programs:
            wires[link] = near(*ends)
        elif link in programs or link + 1 in programs:
            wires[link] = far(*ends, messages(boundaries[link], likes[link + 1]))
    return Mpmd(programs, devices, wires).follow(tasks)


def _likes(stages: Sequence[nn.Module], x: Like, kwargs: Mapping[str, Any]) -> list[Like]:
    """What goes into each stage, and the output of the last."""
    found = [x]
    for stage in stages:

        def run(x: Array, stage: nn.Module = stage) -> Array:
            keys = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
            return stage.init_with_output(keys, x, **kwargs)[0]

        found.append(like(jax.eval_shape(run, found[-1])))
    return found
