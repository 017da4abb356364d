"""`Mpmd`: the runtime of a program per stage, over devices and over processes.

Each replica of this process is a `jaxmp.runtimes.driver.Driver`; the replicas of a stage meet in
its column (`jaxmp.runtimes.columns`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import Grads
from jaxmp.runtimes import mirrors
from jaxmp.runtimes.columns import Columns, OverColumns
from jaxmp.runtimes.driver import Driver
from jaxmp.runtimes.links import opener
from jaxmp.runtimes.norms import Norms
from jaxmp.runtimes.schedule import Action
from jaxmp.runtimes.schedules import one_f_one_b
from jaxmp.runtimes.stage import programs, shapes
from jaxmp.runtimes.state import Input, Means, StageState
from jaxmp.runtimes.types import (
    Batch,
    ByReplica,
    Memory,
    Model,
    ModelState,
    StepKeys,
    Then,
    one_replica,
    output,
)


class Mpmd(OverColumns):
    """A program per stage; see `jaxmp.runtimes.types.PlacedRuntime`."""

    def __init__(
        self,
        model: Model,
        columns: Columns,
        actions: Sequence[Action] | None = None,
        train: bool = True,
        options: tuple[tuple[str, Any], ...] = (),
        emulated: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: stages and boundaries.
          columns: the devices.
          actions: a schedule; default 1F1B.
          train: passed to the stages.
          options: those of `jax.jit`'s compiler.
          emulated: rate and delay of the links; see `jaxmp.runtimes.links.Lane`.

        Raises:
          ValueError: if the schedule is not one of as many stages and micro-batches.
        """
        self.columns, self.model = columns, model
        self.stages, self.replicas = tuple(columns.here), columns.replicas
        self.programs = programs(model, train)
        plan = actions or one_f_one_b(len(self.programs), model.num_microbatches)
        lane = opener(columns.devices, columns.group, emulated)
        self.drivers: dict[int, Driver] = {}
        for r in sorted({r for here in columns.here.values() for r in here}):
            devices, lane_of = list(columns.devices[r]), functools.partial(lane, r)
            normed = model.normed and self.replicas == 1
            self.drivers[r] = Driver(
                self.programs,
                devices,
                plan,
                lane_of,
                dict(options),
                model.first,
                model.kept if train else 0,
                model.delays if train else (),
                Norms(devices, columns.group) if normed else None,
            )
        self.prepare = jax.jit(model.prepare)
        self.last = len(self.programs) - 1

    def init(self, key: Array, draw: bool = True) -> ModelState:
        """See `Runtime`."""
        return self._gathered({r: d.init(key, draw) for r, d in self.drivers.items()})

    def value_and_grad(
        self, state: ModelState, batch: Batch, key: Array
    ) -> tuple[Means, dict[int, Grads], ModelState]:
        """See `Runtime`."""
        states, grads, means = {}, dict[int, ByReplica](), ByReplica()
        for r, driver in self.drivers.items():
            part = one_replica(batch, r, self.replicas)
            keys = StepKeys.of(key, part['id'], r if self.replicas > 1 else None)
            x = self._input(r, part['x'], keys.augment)
            result = driver.step(self._of(state, r), x, part['y'], keys.model)
            states[r] = result.states
            self.square = result.square
            for s, g in result.grads.items():
                grads.setdefault(s, ByReplica())[r] = g
            if result.loss is not None:
                means[r] = result.loss, result.aux
        return means, grads, self._gathered(states)

    def drain(self, state: ModelState) -> tuple[dict[int, tuple[Grads, ...]], ModelState]:
        """See `PlacedRuntime`."""
        rows: dict[int, tuple[ByReplica, ...]] = {}
        states = {}
        for r, driver in self.drivers.items():
            batches, states[r] = driver.drain(self._of(state, r))
            for s, row in batches.items():
                rows.setdefault(s, tuple(ByReplica() for _ in row))
                for of_batch, gradients in zip(rows[s], row, strict=True):
                    of_batch[r] = gradients
        return rows, self._gathered(states)

    def predict(
        self, state: ModelState, batch: Batch, key: Array, then: Then = output
    ) -> tuple[PyTree, Memory]:
        """See `PlacedRuntime`."""
        outputs, feedback = None, {s: ByReplica() for s in self.stages}
        for r, driver in self.drivers.items():
            keys = StepKeys.of(key, batch['id'])
            x = self._input(r, batch['x'], None)
            rows, after = driver.predict(self._of(state, r), x, keys.model)
            outputs = jnp.concatenate(rows) if rows and outputs is None else outputs
            for s, st in after.items():
                feedback[s][r] = st.feedback
        return None if outputs is None else jax.jit(then)(outputs, dict(batch)), feedback

    def again(self) -> None:
        """Begins anew with the compiled programs, after another process was lost."""
        for driver in self.drivers.values():
            driver.again()

    def compared(self, model: ModelState, step: int, say: Callable[[str], object]) -> ModelState:
        """The state in which both ends of a boundary remember alike; see `mirrors.compared`."""
        if self.columns.group.count == 1 or step % mirrors.EVERY:
            return model
        cuts = self.model.boundaries
        feedback = mirrors.compared(cuts, self.columns, model.feedback, step, say)
        return model._replace(feedback=feedback)

    def measuring(self, measured: list[Action]) -> Mpmd:
        """The same runtime, which adds the actions of replica 0 to ``measured``; see `Driver`."""
        other = copy.copy(self)
        other.drivers = dict(self.drivers)
        if 0 in other.drivers:
            other.drivers[0] = copy.copy(self.drivers[0])
            other.drivers[0].measured = measured
        return other

    def collectives(self) -> dict[int, tuple[int, int]]:
        """Bytes a message of the links of this process's first replica.

        Empty in a single process, whose links copy from device to device.
        """
        if self.columns.group.count == 1:
            return {}
        driver = next(iter(self.drivers.values()))
        size = lambda *edge: driver.sizes.get(edge, 0)
        return {i: (size(i, i + 1), size(i + 1, i)) for i in {min(e) for e in driver.lanes}}

    def payload(self) -> np.ndarray:
        """Bytes of replica 0's messages so far, ``(links, 2)``, of the links that begin here."""
        payload = np.zeros((self.last, 2))
        if driver := self.drivers.get(0):
            for (a, b), size in driver.sizes.items():
                if min(a, b) in self.stages:
                    payload[min(a, b), int(a > b)] = size * driver.carried[a, b]
        return payload

    # Feedback, and shapes.

    def pack(self, feedback: dict[int, ByReplica]) -> dict[int, ByReplica]:
        """The feedback of this runtime, given that by stage and replica; inverse of `unpack`."""
        return feedback

    def unpack(self, feedback: dict[int, ByReplica]) -> dict[int, ByReplica]:
        """The feedback by stage and replica."""
        return feedback

    def shapes(self) -> list[StageState]:
        """Shapes of all stages' states."""
        return shapes(self.programs)

    def _input(self, r: int, x: Input, key: Array | None) -> Input:
        if 0 not in self.stages:
            return x
        return self.prepare(*jax.device_put((x, key), self.columns.devices[r, 0]))

    def _of(self, state: ModelState, r: int) -> dict[int, StageState]:
        return {s: StageState(*(part[s][r] for part in state)) for s in self.stages}

    def _gathered(self, states: dict[int, dict[int, StageState]]) -> ModelState:
        by = lambda name: {
            s: ByReplica({r: getattr(states[r][s], name) for r in states}) for s in self.stages
        }
        return ModelState(*(by(name) for name in StageState._fields))
