"""`Measured`: where the time of one step under mpmd went, stage by stage.

Of a run's steps after the warm-up the third is timed as a whole, the fourth is measured action by
action, and the fifth is recorded by JAX's own profiler; all others, and all numbers, are those of
a run without a profile (the first two steps compile). In the measured step each device has a thread
that waits for the end of every action, so that the time of an action is that of its compiled
program and of its call. All processes start the step together, which makes their clocks agree to
within one message of the process group. Encoders and decoders are timed alone, since the program of
a stage runs them fused with its module: these times are parts of F and B.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from jaxmp.boundary import Boundary
from jaxmp.exchange.collectives import Tree
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.placement import Device
from jaxmp.runtimes.schedule import Action
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.types import Batch, Step
from jaxmp.training import profile_page
from jaxmp.training.locks import write_json
from jaxmp.training.profile_page import Profile
from jaxmp.training.trainer import Trainer
from jaxmp.wire import Ctx, Like

Trip = list[float | str | None]  # of a message: source, target, microbatch, kind, left, arrived
Stepped = tuple[PyTree, PyTree]  # state and values after a step
OverRuntime = Callable[[Mpmd], Stepped]
TIMED = 3  # step that is timed as a whole; the next is measured, and the one after recorded
CALLS = 7  # of an encoder or decoder alone; the median counts


@contextmanager
def profiled(trainer: Trainer, folder: Path) -> Iterator[None]:
    """A context in which a trainer's steps are profiled, where the configuration asks for it.

    Args:
      trainer: its runtime is `Measured` meanwhile.
      folder: where process 0 writes `profile.json` and every process a trace.
    """
    runtime = trainer.training
    if trainer.exp.config.parallel.profile:
        trainer.use(Measured(runtime, trainer.group, folder))
    try:
        yield
    finally:
        trainer.use(runtime)


class Measured:
    """A runtime that profiles three of the steps over it; see the module."""

    def __init__(self, runtime: Mpmd, group: ProcessGroup, folder: Path) -> None:
        """Has run no step.

        Args:
          runtime: runs the steps.
          group: the processes, all of which run the same steps.
          folder: where process 0 writes `profile.json` and every process a trace.
        """
        self._runtime, self._group, self._folder = runtime, group, folder
        self._done, self._usual = 0, 0.0

    def __getattr__(self, name: str) -> Any:
        """What is not said here is the runtime's."""
        return getattr(self._runtime, name)

    def bind(self, step: Step, each: PyTree) -> Callable[[PyTree, Batch], Stepped]:
        """See `jaxmp.runtimes.types.PlacedRuntime`."""
        return lambda state, batch: self._run(lambda runtime: step(runtime, state, batch))

    def _run(self, step: OverRuntime) -> Stepped:
        """A step over a runtime, perhaps measured."""
        self._done += 1
        if self._done == TIMED:
            result, self._usual = self._timed(step)
            return result
        if self._done == TIMED + 1:
            return self._measure(step)
        if self._done == TIMED + 2:
            with jax.profiler.trace(self._folder / 'trace' / f'process-{self._group.index}'):
                return jax.block_until_ready(step(self._runtime))
        return step(self._runtime)

    def _timed(self, step: OverRuntime) -> tuple[Stepped, float]:
        self._group.share(None)  # a barrier
        start = time.monotonic()
        result = jax.block_until_ready(step(self._runtime))
        return result, time.monotonic() - start

    def _measure(self, step: OverRuntime) -> Stepped:
        actions: list[Action] = []
        driver = self._runtime.drivers.get(0)
        for lane in driver.lanes.values() if driver else ():
            lane.spans = {}
        self._group.share(None)  # a barrier
        start = time.monotonic()
        result = jax.block_until_ready(step(self._runtime.measuring(actions)))
        measured: Profile = {'step': time.monotonic() - start, 'usual': self._usual}
        if driver:
            measured['actions'] = [_since(start, a) for a in actions]
            measured['messages'] = _messages(driver, start)
            measured['codecs'] = {s: _codecs(driver, s) for s in driver.stages}
        shared = self._group.share(measured)
        if self._group.index == 0:
            plan = driver.actions if driver else ()
            write_json(self._folder / 'profile.json', together(shared, plan))
        return result


def _since(start: float, a: Action) -> Action:
    return a._replace(start=a.start - start, end=a.end - start)


def _messages(driver: Driver, start: float) -> list[Trip]:
    """Rows ``[source, target, microbatch, kind, left, arrived]``; None for what is not known."""
    for done in driver.sending:
        done.result()
    rows = []
    for (a, b), lane in driver.lanes.items():
        sent = [m for m in driver.order[1] if (m.source, m.target) == (a, b)]
        spans, lane.spans = lane.spans or {}, None
        for m, (_, (left, arrived)) in zip(sent, sorted(spans.items()), strict=True):
            left = left - start if a in driver.stages else None
            arrived = arrived - start if b in driver.stages else None
            rows.append([a, b, m.microbatch, m.kind, left, arrived])
    return rows


def together(shared: list[Profile], plan: Sequence[Action]) -> Profile:
    """The profile of all processes; seconds from the start of the step.

    Args:
      shared: what each process measured.
      plan: the schedule.
    """
    actions = sorted(a for process in shared for a in process.get('actions', ()))
    ends: dict[tuple[int | str, ...], list[float | None]] = {}
    for process in shared:
        for *task, left, arrived in process.get('messages', ()):
            times = ends.setdefault(tuple(task), [None, None])
            times[:] = times[0] if left is None else left, times[1] if arrived is None else arrived
    codecs = {int(s): c for process in shared for s, c in process.get('codecs', {}).items()}
    return {
        'step': max(process['step'] for process in shared),
        'usual': max(process['usual'] for process in shared),
        'actions': [list(a) for a in actions],
        'messages': [[*task, *times] for task, times in sorted(ends.items())],
        'codecs': {str(s): codecs[s] for s in sorted(codecs)},
        'plan': [list(a) for a in plan],
    }


def _codecs(driver: Driver, s: int) -> dict[str, float]:
    """Seconds per step that the encoders and decoders of a stage take alone."""
    program, device = driver.stages[s].program, driver.devices[s]
    n, times = driver.num_microbatches, {'encode': 0.0, 'decode': 0.0}
    for cut, x, way, back in _ends(program):
        times['encode'] += n * seconds(*_half(cut, x, way, True), device)
        times['decode'] += n * seconds(*_half(cut, x, back, False), device)
    return times


def _ends(program: StageProgram) -> list[tuple[Boundary, Like, str, str]]:
    """The boundaries beside a stage, with what it sends and receives there."""
    left = [(program.left, program.x, 'bwd', 'fwd')] if program.left else []
    right = [(program.right, program.y, 'fwd', 'bwd')] if program.right else []
    return left + right


def _half(
    cut: Boundary, x: Like, way: str, sends: bool
) -> tuple[Callable[..., tuple[Tree, ...]], Tree, list[Tree]]:
    """An encoder or a decoder ``(state, *given) -> (state, result)``, its state, what it is given.

    The tensor is normal noise, and the state is that before the first step.
    """

    @jax.jit
    def make() -> tuple[Tree, Tree, Ctx]:
        noise = jax.random.normal(jax.random.key(1), x.shape, x.dtype)
        ids = jnp.arange(x.shape[0], dtype=jnp.int32)
        ctx = Ctx.example(x)._replace(ids=ids, microbatch=jnp.int32(0))
        indices = cut.send('fwd', noise, cut.fwd.init(x)[0], ctx)[2]
        ctx, (tx, rx) = ctx._replace(indices=indices), getattr(cut, way).init(x)
        return (tx, noise, ctx) if sends else (rx, cut.send(way, noise, tx, ctx)[0], ctx)

    state, *inputs = make()
    if sends:
        return lambda tx, x, ctx: cut.send(way, x, tx, ctx)[1::-1], state, inputs
    return lambda rx, m, ctx: cut.recv(way, m, rx, (x, ctx))[1::-1], state, inputs


def seconds(
    run: Callable[..., tuple[Tree, ...]], state: Tree, inputs: list[Tree], device: Device
) -> float:
    """The median time of ``run(state, *given) -> (state, result)``, compiled; state is donated."""
    compiled = jax.jit(run, donate_argnums=0)
    state, inputs = jax.device_put((state, inputs), device)
    times = []
    for _ in range(1 + CALLS):
        start = time.monotonic()
        state, _ = jax.block_until_ready(compiled(state, *inputs))
        times.append(time.monotonic() - start)
    return statistics.median(times[1:])


def show(folder: Path) -> None:
    """Prints the table of a run's profile, and writes its page and pictures."""
    path = folder / 'profile.json'
    if not path.exists():
        print('no profile: it is that of the fourth step after the warm-up, and fewer were run')
        return
    profile: Profile = json.loads(path.read_text())
    profile_page.show(profile, folder)
