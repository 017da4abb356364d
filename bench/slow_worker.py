"""One stage of `slow_network.py` as a process: reads orders from standard input, answers on output.

Orders and answers are lines of JSON. All stages get the same orders, except ``local`` and
``alone``, which one stage carries out while the others are idle. The process ends with its input.

slow_worker.py coordinator_address stages stage
"""

from __future__ import annotations

import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from slow_models import TASKS, Task, loss, positions
from workers import interfaces, serve

import jaxmp
from jaxmp import Ctx
from jaxmp.feedback import per_microbatch
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver
from jaxmp.runtimes.links import opener
from jaxmp.runtimes.placement import place
from jaxmp.runtimes.schedules import named
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.types import Model
from jaxmp.training.late import delays_of

SEED = 0

# Micro-batches, schedule, steps that gradients come late, and whether each stage has its own.
Plan = tuple[int, str, int, bool]


class Trainer:
    """The stages of this process, their optimizer states and the number of steps done."""

    def __init__(
        self,
        task: Task,
        fwd: str,
        bwd: str,
        devices: Any = None,
        plan: Plan = (1, '1f1b', 0, False),
        group: ProcessGroup | None = None,
    ) -> None:
        self.task, self.count = task, 0
        self.machine = machine(task, fwd, bwd, devices, plan, group or ProcessGroup())
        bytes_of = lambda *link: plan[0] * self.machine.sizes.get(link, 0)
        links = {min(link) for link in self.machine.lanes}
        self.moved = {i: (bytes_of(i, i + 1), bytes_of(i + 1, i)) for i in links}
        self.states = self.machine.init(jax.random.key(SEED))
        params = {s: state.params for s, state in self.states.items()}
        self.memory = {s: task.optimizer.init(p) for s, p in params.items()}

        def descend(params: Any, memory: Any, grads: Any) -> Any:
            updates, memory = task.optimizer.update(grads, memory, params)
            return optax.apply_updates(params, updates), memory

        self.descend = jax.jit(descend)
        self.batch = self._batch()

    def _batch(self) -> tuple[Any, Any, Ctx]:
        """The batch of the next step."""
        task, ids = self.task, positions(self.task, self.count)
        x: Any = task.x[ids] if 0 in self.states else ids  # others look at its length only
        key = jax.random.fold_in(jax.random.key(SEED + 1), self.count)
        return x, task.y[ids], Ctx(key, ids)

    def step(self) -> tuple[float | None, dict[int, tuple[int, int]]]:
        """One training step, waited for: the loss where it is known, and the bytes moved."""
        result = self.machine.step(self.states, *self.batch)
        self.states = dict(result.states)
        for s, grads in result.grads.items():
            state = self.states[s]
            params, self.memory[s] = self.descend(state.params, self.memory[s], grads)
            self.states[s] = state._replace(params=params)
        self.count += 1
        self.batch = self._batch()  # while the last backward and the update run
        jax.block_until_ready((self.states, self.memory))
        return None if result.loss is None else float(result.loss), self.moved


def machine(
    task: Task, fwd: str, bwd: str, devices: Any, plan: Plan, group: ProcessGroup
) -> Driver:
    """The pipeline with such channels."""
    m, name, delay, by_stage = plan
    names = {'examples': len(task.x)}
    cut = jaxmp.boundary(*(per_microbatch(jaxmp.parse(t, names), m) for t in (fwd, bwd)))
    n = len(task.stages)
    x = jax.ShapeDtypeStruct((task.batch // m, *task.x.shape[1:]), task.x.dtype)
    model = Model(tuple(task.stages), (cut,) * (n - 1), lambda x, key: x, loss, x)
    made = programs(model, kwargs={})
    if not (make := named(name)):
        raise ValueError(f'{name!r} is no schedule')
    at = devices or place(1, n, group=group)[0]
    lane = functools.partial(opener(np.array([at]), group), 0)
    delays = delays_of(delay, by_stage, n, copied=False)
    return Driver(made, at, make(n, m), lane, delays=delays)


def median_seconds(f: Callable[[], Any], repeats: int) -> float:
    """Median time of a call, after two that do not count."""
    taken = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(f())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def cuts(task: Task) -> list[jax.ShapeDtypeStruct]:
    """What crosses each boundary."""
    x, found = jax.ShapeDtypeStruct((task.batch, *task.x.shape[1:]), task.x.dtype), []
    for stage in task.stages[:-1]:
        x = jax.eval_shape(lambda x, s=stage: s.init_with_output(jax.random.key(0), x)[0], x)
        found.append(x)
    return found


def codec_seconds(task: Task, texts: tuple[str, str], repeats: int) -> float:
    """Sending and receiving at every cut, both ways, each function by itself."""
    total = 0.0
    ctx = Ctx(jax.random.key(2), jnp.asarray(positions(task, 0)))
    for like in cuts(task):
        x = jax.random.normal(jax.random.key(3), like.shape, like.dtype)
        for text in texts:
            channel = jaxmp.parse(text, {'examples': len(task.x)})
            tx, rx = channel.init(like)
            send = jax.jit(channel.send)
            recv = jax.jit(lambda m, rx, ctx, c=channel, like=like: c.recv(m, rx, like, ctx))
            message = send(x, tx, ctx)[0]
            total += median_seconds(lambda s=send, x=x, tx=tx: s(x, tx, ctx), repeats)
            total += median_seconds(lambda r=recv, m=message, rx=rx: r(m, rx, ctx), repeats)
    return total


class Worker:
    """Answers the orders."""

    def __init__(self, stages: int, group: ProcessGroup) -> None:
        self.stages, self.group = stages, group
        self.tasks: dict[str, Task] = {}
        self.trainer: Any = None
        self.plain: dict[str, Trainer] = {}  # raw, all stages here; kept, for it compiles long

    def _task(self, model: str) -> Task:
        if model not in self.tasks:
            self.tasks[model] = TASKS[model](self.stages)
        return self.tasks[model]

    def build(self, model: str, fwd: str, bwd: str, plan: Plan) -> dict[str, Any]:
        """Makes the network from its seed and does nothing else."""
        self.trainer = None
        self.trainer = Trainer(self._task(model), fwd, bwd, plan=plan, group=self.group)
        return {}

    def steps(self, n: int) -> dict[str, Any]:
        """Trains ``n`` steps: seconds of each, losses, bytes in payloads; CPU-seconds of all."""
        seconds, losses, moved = [], [], {}
        busy = time.process_time()
        for _ in range(n):
            start = time.perf_counter()
            value, moved = self.trainer.step()
            seconds.append(time.perf_counter() - start)
            losses.append(value if value is None or math.isfinite(value) else None)
        busy = time.process_time() - busy
        return {'seconds': seconds, 'losses': losses, 'moved': moved, 'cpu_s': busy}

    def sent(self) -> dict[str, int]:
        """Bytes that left this namespace so far."""
        return interfaces()

    def local(self, model: str, fwd: str, bwd: str, n: int, plan: Plan) -> dict[str, Any]:
        """Steps with all stages in this process, no wire: raw and with a codec, taken in turn."""
        task, taken, busy = self._task(model), ([], []), ([], [])
        here = [jax.local_devices()[0]] * len(task.stages)
        if model not in self.plain:
            self.plain[model] = Trainer(task, 'raw', 'raw', here, plan)
        trainers = self.plain[model], Trainer(task, fwd, bwd, here, plan)
        for _ in range(n + 2):
            for trainer, seconds, cpu in zip(trainers, taken, busy, strict=True):
                start = time.perf_counter(), time.process_time()
                trainer.step()
                seconds.append(time.perf_counter() - start[0])
                cpu.append(time.process_time() - start[1])
        raw, coded = (statistics.median(seconds[2:]) for seconds in taken)
        return {'raw_s': raw, 'coded_s': coded, 'coded_cpu_s': statistics.median(busy[1][2:])}

    def alone(self, model: str, fwd: str, bwd: str, n: int) -> dict[str, Any]:
        """See `codec_seconds`."""
        return {'seconds': codec_seconds(self._task(model), (fwd, bwd), n)}


if __name__ == '__main__':
    serve(Worker, *sys.argv[1:], apart=True)
