"""`Measured`: where the time of one step under mpmd went, stage by stage.

Of a run's steps after the warm-up the third is timed as a whole, the fourth is measured action by
action, and the three after are recorded by JAX's own profiler; all others, and all numbers, are
those of a run without a profile (the first two steps compile). In the measured step each device has
a thread that waits for the end of every action, so that the time of an action is that of its
compiled program and of its call. All processes start the step together, which makes their clocks
agree to within one message of the process group. Encoders and decoders are timed alone, since the
program of a stage runs them fused with its module: these times are parts of F and B.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree
from rich.table import Table

from jaxmp import terminal
from jaxmp.boundary import Boundary
from jaxmp.exchange.collectives import Tree
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.placement import Device
from jaxmp.runtimes.schedule import Action
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.types import Batch, Step
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir.locks import write_json
from jaxmp.wire import Ctx, Like

Stepped = tuple[PyTree, PyTree]  # state and values after a step
OverRuntime = Callable[[Mpmd], Stepped]
TIMED = 3  # step that is timed as a whole; the next is measured, and those after recorded
RECORDED = 3  # steps in the trace
CALLS = 7  # of an encoder or decoder alone; the median counts
HEADS = ('stage', 'F', 'B', 'W', 'waiting', 'sum', 'encode', 'decode')


class Told(NamedTuple):
    """What a process measured of a step.

    Attributes:
      step: seconds of the measured one.
      usual: of the one before, whose actions were not measured.
      actions: of its devices, from the start of the step.
      codecs: rows ``(stage, seconds of encoders, of decoders)``.
    """

    step: float
    usual: float
    actions: Sequence[Action]
    codecs: Sequence[tuple[int, float, float]]


class Seconds(NamedTuple):
    """The seconds of one stage; F, B, W and waiting are the whole step of a device.

    Attributes:
      F: forwards.
      B: backwards; where W is apart, gradients of the input.
      W: gradients of the weights.
      waiting: what the device did not compute before the actions of this stage, and after the last.
      encode: part of F and B, timed alone.
      decode: likewise.
    """

    F: float
    B: float
    W: float
    waiting: float
    encode: float
    decode: float


@contextmanager
def profiled(trainer: Trainer, folder: Path) -> Iterator[None]:
    """A context in which a trainer's steps are profiled, where the configuration asks for it.

    Args:
      trainer: its runtime is `Measured` meanwhile.
      folder: where process 0 writes `profile.json`, and every process a trace into ``profile``.
    """
    runtime = trainer.training
    if not trainer.exp.config.parallel.profile:
        yield
        return
    measured = Measured(runtime, trainer.group, folder)
    trainer.use(measured)
    try:
        yield
    finally:
        measured.stop()
        trainer.use(runtime)


class Measured:
    """A runtime that profiles some of the steps over it; see the module."""

    def __init__(self, runtime: Mpmd, group: ProcessGroup, folder: Path) -> None:
        """Has run no step.

        Args:
          runtime: runs the steps.
          group: the processes, all of which run the same steps.
          folder: as of `profiled`.
        """
        self._runtime, self._group, self._folder = runtime, group, folder
        self._done, self._usual, self._traces = 0, 0.0, False

    def __getattr__(self, name: str) -> Any:
        """What is not said here is the runtime's."""
        return getattr(self._runtime, name)

    def bind(self, step: Step, each: PyTree) -> Callable[[PyTree, Batch], Stepped]:
        """See `jaxmp.runtimes.types.PlacedRuntime`."""
        return lambda state, batch: self._run(lambda runtime: step(runtime, state, batch))

    def stop(self) -> None:
        """Writes the trace, if one is being recorded."""
        if self._traces:
            jax.profiler.stop_trace()
            self._traces = False

    def _run(self, step: OverRuntime) -> Stepped:
        """A step over a runtime, perhaps measured."""
        self._done += 1
        if self._done == TIMED:
            result, _, self._usual = self._timed(step, self._runtime)
            return result
        if self._done == TIMED + 1:
            return self._measure(step)
        if self._done == TIMED + 2:
            where = self._folder / 'profile' / f'process-{self._group.index}'
            jax.profiler.start_trace(where, create_perfetto_trace=True)
            self._traces = True
        result = step(self._runtime)
        if self._done == TIMED + 1 + RECORDED:
            jax.block_until_ready(result)
            self.stop()
        return result

    def _timed(self, step: OverRuntime, runtime: Mpmd) -> tuple[Stepped, float, float]:
        """The result of a step, when it began, and its seconds."""
        self._group.share(None)  # a barrier
        start = time.monotonic()
        result = jax.block_until_ready(step(runtime))
        return result, start, time.monotonic() - start

    def _measure(self, step: OverRuntime) -> Stepped:
        actions: list[Action] = []
        driver = self._runtime.drivers.get(0)
        result, start, spent = self._timed(step, self._runtime.measuring(actions))
        since = [a._replace(start=a.start - start, end=a.end - start) for a in actions]
        codecs = [(s, *_codecs(driver, s)) for s in driver.stages] if driver else []
        shared = self._group.share(Told(spent, self._usual, since, codecs))
        if self._group.index == 0:
            rows, about = together([Told(*told) for told in shared])
            stages = {str(s + 1): row._asdict() for s, row in rows.items()}
            write_json(self._folder / 'profile.json', {'stages': stages, 'about': about})
        return result


def together(shared: Sequence[Told]) -> tuple[dict[int, Seconds], str]:
    """The row of each stage, and what the table says of the whole step."""
    actions = sorted(Action(*a) for told in shared for a in told.actions)
    end, spent = max(a.end for a in actions), dict[int, dict[str, float]]()
    for told in shared:
        for s, encode, decode in told.codecs:
            spent[s] = dict.fromkeys((*'FBW', 'waiting'), 0.0) | {
                'encode': encode, 'decode': decode,
            }  # fmt: skip
    for device in {a.device for a in actions}:
        now, of_device = 0.0, [a for a in actions if a.device == device]
        for a in of_device:
            spent[a.stage]['waiting'] += a.start - now
            spent[a.stage][a.kind] += a.end - a.start
            now = a.end
        spent[of_device[-1].stage]['waiting'] += end - now
    step, usual = max(told.step for told in shared), max(told.usual for told in shared)
    return {s: Seconds(**spent[s]) for s in sorted(spent)}, (
        f'ms of one step. F + B + W + waiting = sum, the {1e3 * end:.1f} ms from the start of the '
        'step to the end of its last action; encode and decode are parts of F and B, timed alone. '
        f'With the exchange and the optimizer the step took {1e3 * step:.1f} ms; the step before, '
        f'whose actions were not measured, took {1e3 * usual:.1f} ms.'
    )


def _codecs(driver: Driver, s: int) -> tuple[float, float]:
    """Seconds per step that the encoders and decoders of a stage take alone."""
    program, device = driver.stages[s].program, driver.devices[s]
    ends, n = _ends(program), driver.num_microbatches
    return (
        n * sum(seconds(*_half(cut, x, way, True), device) for cut, x, way, _ in ends),
        n * sum(seconds(*_half(cut, x, back, False), device) for cut, x, _, back in ends),
    )


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
    """Prints the table of a run's profile, in milliseconds."""
    path = folder / 'profile.json'
    profile = json.loads(path.read_text()) if path.exists() else {}
    if 'stages' not in profile:  # that of an older jaxmp has none
        print('no profile: it is that of the fourth step after the warm-up, and fewer were run')
        return
    rows = {name: Seconds(**row) for name, row in profile['stages'].items()}
    rows['all'] = Seconds(*map(sum, zip(*rows.values(), strict=True)))
    table = Table(title='where the time of a step went', caption=profile['about'])
    for head in HEADS:
        table.add_column(head, justify='right')
    for name, row in rows.items():
        table.add_row(name, *(f'{1e3 * v:.2f}' for v in (*row[:4], sum(row[:4]), *row[4:])))
    terminal.show(table)
