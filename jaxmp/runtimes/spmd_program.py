"""`SpmdProgram`: all stages in one program, a stage per device of the mesh axis ``'stage'``.

The step is 1F1B as one scan. In tick t the device of stage s takes micro-batch ``t - s`` forward
and ``t - 2(S-1) + s`` backward, where there are such, and collective-permutes move the messages
that the next tick reads (`jaxmp.runtimes.wires`). Stages may differ: a device selects its own among
the stage programs by `jax.lax.switch` (equal stages share a branch; an idle tick has one of its
own), parameters and states travel through the scan as padded vectors (`jaxmp.runtimes.packing`),
and the rows of a micro-batch's feedback states are read before the switch and written back after it
(`jaxmp.runtimes.memory`). Batch, keys and ids are the same on all devices.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.exchange.collectives import Grads, Tree
from jaxmp.runtimes.memory import Crossing, FeedbackMemory, Rows
from jaxmp.runtimes.microbatch import context, cut
from jaxmp.runtimes.packing import Packing, Vectors
from jaxmp.runtimes.schedules import in_step
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import Accumulator, MicroBatch, StageState, in_dtypes
from jaxmp.runtimes.trained import part
from jaxmp.runtimes.wires import AXIS, Messages, Wires
from jaxmp.wire import Ctx, widened


class Packed(NamedTuple):
    """The state of all stages, a device's slice under leading axes of the mesh."""

    params: Vectors
    model_state: Vectors
    feedback: Rows


def _one_slot(b: Boundary | None) -> Boundary | None:
    if b is None:
        return None
    fwd, bwd = (c.slots.channel if c.slots else c for c in (b.fwd, b.bwd))
    return replace(b, fwd=fwd, bwd=bwd)


@dataclass(frozen=True)
class SpmdProgram:
    """The stages of a model over the devices of a mesh; see the module.

    Attributes:
      stages: programs whose channels keep a state per micro-batch or per example.
      num_microbatches: M.
    """

    stages: tuple[StageProgram, ...]
    num_microbatches: int

    # Layouts: what the stages have in common.

    @functools.cached_property
    def one_slot(self) -> tuple[StageProgram, ...]:
        """The same programs on the state of one crossing."""
        return tuple(
            replace(p, left=_one_slot(p.left), right=_one_slot(p.right)) for p in self.stages
        )

    @functools.cached_property
    def shapes(self) -> list[StageState]:
        """Shapes of each stage's state, the feedback's of one crossing."""
        return [jax.eval_shape(p.init, jax.random.key(0)) for p in self.one_slot]

    @functools.cached_property
    def packings(self) -> tuple[Packing, Packing]:
        """Layouts of the parameters and of the other collections."""
        packing = lambda name: Packing([getattr(s, name) for s in self.shapes])
        return packing('params'), packing('model_state')

    @functools.cached_property
    def gradients(self) -> Packing:
        """Layout of the gradients, and of sums of them."""
        pairs = zip(self.stages, self.shapes, strict=True)
        return Packing([part(stage.trained, s.params) for stage, s in pairs])

    @functools.cached_property
    def memory(self) -> FeedbackMemory:
        """Layout of the feedback states."""
        return FeedbackMemory(self.stages, [s.feedback for s in self.shapes])

    @functools.cached_property
    def wires(self) -> tuple[Wires, Wires]:
        """Forward and backward messages of the links."""
        pairs = [p.right.messages(p.y) for p in self.one_slot[:-1] if p.right]
        return Wires([f for f, _ in pairs], 1), Wires([b for _, b in pairs], -1)

    @functools.cached_property
    def branch(self) -> list[int]:
        """For each stage the first stage with an equal program."""
        keys = []
        for s, p in enumerate(self.one_slot):
            ends = [None if b is None else (b.fwd, b.bwd) for b in (p.left, p.right)]
            groups = [[w.group[l] for l in (s - 1, s) if 0 <= l < len(w.group)] for w in self.wires]
            keys.append((p.module, p.x, p.y, ends, groups, p.loss is None))
        return [keys.index(key) for key in keys]

    # Programs of a device, inside `jax.shard_map`.

    def value_and_grad(
        self, state: Packed, x: Array, y: Array, ctx: Ctx
    ) -> tuple[tuple[Array, Any], Vectors, Packed]:
        """Loss and aux (means over the micro-batches), gradients, next state; on one device.

        Args:
          state: this device's slice.
          x: input, ``(B, ...)``, the same along the axis; so are ``y`` and ``ctx``.
          y: targets, ``(B, ...)``.
          ctx: key and ids of this step.
        """
        device = _Device(self, state.params, (x, y, ctx))
        plan = in_step(len(self.stages), self.num_microbatches)
        carry = device.start(state, min(self.num_microbatches, 2 * len(self.stages) - 1))
        end, _ = lax.scan(device.tick, carry, jnp.asarray(plan))
        mean = lambda a: (a / self.num_microbatches).astype(a.dtype)
        means, grads = jax.tree.map(mean, (end.means, end.grads))
        grads = in_dtypes(grads, self.gradients.zeros())
        after = Packed(state.params, end.model_state, end.feedback)
        return lax.psum(means, AXIS), grads, after

    def predict(self, state: Packed, x: Array, ctx: Ctx) -> tuple[Array, Rows]:
        """Outputs ``(M, ...)``, zero but on the last device, and the feedback after; one device."""
        device = _Device(self, state.params, (x, None, ctx))
        plan = in_step(len(self.stages), self.num_microbatches)
        forwards = plan[: len(self.stages) + self.num_microbatches - 1, 0]
        tick = lambda c, row: (device.forward(c, row[device.s]), None)
        end, _ = lax.scan(tick, device.start(state, 0), jnp.asarray(forwards))
        return end.outputs, end.feedback


class _Carry(NamedTuple):
    """The values that a device takes from tick to tick."""

    arrived: tuple[Messages, Messages]
    model_state: Vectors
    feedback: Rows
    ring: Vectors
    means: Any
    grads: Vectors
    outputs: Array


@dataclass(frozen=True)
class _Device:
    """One device's part of a step."""

    spmd: SpmdProgram
    params: Vectors
    batch: tuple[Array, Any, Ctx]  # x, y (None to predict) and context of the whole step

    @functools.cached_property
    def s(self) -> Array:
        """Number of this device's stage."""
        return lax.axis_index(AXIS)

    @property
    def training(self) -> bool:
        """Whether the step has targets, and a backward."""
        return self.batch[1] is not None

    def microbatch(self, m: Any) -> MicroBatch:
        """Micro-batch ``m`` of the step."""
        (x, y, ctx), n = self.batch, self.spmd.num_microbatches
        rows = lambda a: None if a is None else cut(a, n)[m]
        return MicroBatch(rows(x), rows(y), context(ctx.reading(x), m, n))

    @functools.cached_property
    def residuals(self) -> Packing:
        """Layout of what a forward leaves for its backward, nothing in a prediction."""
        if not self.training:
            return Packing([()] * len(self.spmd.stages))
        wires, first = self.spmd.wires[0], self.microbatch(0)

        def forward(s: int, state: StageState) -> Any:
            message = wires.read(s - 1, wires.empty()) if s else None
            return self.spmd.one_slot[s].forward(state, first, message)[2:]

        made = enumerate(self.spmd.shapes)
        return Packing([jax.eval_shape(functools.partial(forward, s), state) for s, state in made])

    def start(self, state: Packed, saved: int) -> _Carry:
        """The carry before the first tick."""
        residuals = {n: jnp.zeros((saved, w), n) for n, w in self.residuals.widths.items()}
        grads = jax.tree.map(jnp.zeros_like, jax.eval_shape(widened, self.spmd.gradients.zeros()))
        y, means = self.spmd.stages[-1].y, ()
        outputs = jnp.zeros((0 if self.training else self.spmd.num_microbatches, *y.shape), y.dtype)
        arrived = self.spmd.wires[0].empty(), self.spmd.wires[1].empty()
        if self.training:
            last = self.spmd.one_slot[-1]
            total = jax.eval_shape(last.init_accumulator, {}, self.microbatch(0).y)
            means = _zeros((total.loss, total.aux))
        return _Carry(arrived, *state[1:], residuals, means, grads, outputs)

    def tick(self, c: _Carry, row: Array) -> tuple[_Carry, None]:
        """One forward and one backward, of the micro-batches that the schedule names."""
        forward, backward = row[:, self.s]
        return self.backward(self.forward(c, forward), backward), None

    def crossing(self, m: Array) -> Crossing:
        """Micro-batch ``m`` at this device's stage; none if ``m`` is -1."""
        number = jnp.maximum(m, 0)
        return Crossing(self.s, number, m >= 0, self.microbatch(number).ctx.ids)

    def choose(self, on: Array, branches: Any, idle: Any, *operands: Any) -> Any:
        """The branch of this device's stage, or ``idle``."""
        which = sorted(set(self.spmd.branch))
        number = jnp.asarray([1 + which.index(b) for b in self.spmd.branch])[self.s]
        chosen = [idle, *(functools.partial(branches, s) for s in which)]
        return lax.switch(jnp.where(on, number, 0), chosen, *operands)

    def program(self, s: int) -> StageProgram:
        """Stage ``s``'s program with this device's number, for any stage with an equal program."""
        return replace(self.spmd.one_slot[s], index=self.s)

    def forward(self, c: _Carry, m: Array) -> _Carry:
        """Reads the activation of micro-batch m, runs the stage, sends its output."""
        at, memory, predicting = self.crossing(m), self.spmd.memory, not self.training
        (params, statistics), wires = self.spmd.packings, self.spmd.wires[0]
        y = self.spmd.stages[-1].y

        def run(s: int, model_state: Vectors, rows: Rows, arrived: Messages) -> Any:
            own = params.unpack(s, self.params), statistics.unpack(s, model_state)
            state = StageState(*own, memory.read(s, rows))
            message = wires.read(s - 1, arrived) if s else None
            batch = self.microbatch(at.microbatch)
            step = self.program(s).predict if predicting else self.program(s).forward
            after, out, *residuals = step(state, batch, message)
            last = s == len(self.spmd.stages) - 1
            return (
                statistics.pack(s, after.model_state),
                memory.write(s, after.feedback, rows),
                wires.empty() if last else wires.write(s, out),
                self.residuals.pack(s, residuals),
                (out if last else _zeros(y)) if predicting else (),
            )

        def idle(model_state: Vectors, rows: Rows, arrived: Messages) -> Any:
            empty = {n: jnp.zeros(w, n) for n, w in self.residuals.widths.items()}
            return model_state, rows, wires.empty(), empty, _zeros(y) if predicting else ()

        rows = memory.take(c.feedback, ('left_rx', 'right_tx'), at)
        model_state, rows, sent, residuals, out = self.choose(
            at.active, run, idle, c.model_state, rows, c.arrived[0]
        )
        outputs, ring = c.outputs, c.ring
        if predicting:
            place = jnp.where(at.active, at.microbatch, len(outputs))
            outputs = outputs.at[place].set(out, mode='drop')
        else:
            slot = jnp.where(at.active, at.microbatch % _saved(ring), _saved(ring))
            ring = jax.tree.map(lambda a, b: a.at[slot].set(b, mode='drop'), ring, residuals)
        return c._replace(
            arrived=(wires.move(sent), c.arrived[1]), model_state=model_state,
            feedback=memory.put(c.feedback, rows, at), ring=ring, outputs=outputs,
        )  # fmt: skip

    def backward(self, c: _Carry, m: Array) -> _Carry:
        """Reads the gradient of micro-batch m, runs the stage back, sends its input's gradient."""
        at, memory, wires = self.crossing(m), self.spmd.memory, self.spmd.wires[1]
        params, last = self.spmd.packings[0], len(self.spmd.stages) - 1
        gradients = self.spmd.gradients

        def run(s: int, rows: Rows, arrived: Messages, saved: Vectors, sums: Grads) -> Any:
            state = StageState(params.unpack(s, self.params), {}, memory.read(s, rows))
            message = wires.read(s, arrived) if s < last else None
            (loss, aux), grads = sums
            after, total, out = self.program(s).backward(
                state,
                Accumulator(loss, aux, gradients.unpack(s, grads)),
                self.residuals.unpack(s, saved)[0],
                (self.microbatch(at.microbatch), message),
            )
            rows = memory.write(s, after.feedback, rows)
            sums = (total.loss, total.aux), gradients.pack(s, total.grads, wide=True)
            return rows, wires.write(s - 1, out) if s else wires.empty(), sums

        def idle(rows: Rows, arrived: Messages, saved: Vectors, sums: Grads) -> Any:
            return rows, wires.empty(), sums

        rows = memory.take(c.feedback, ('right_rx', 'left_tx'), at)
        saved = jax.tree.map(lambda a: a[at.microbatch % _saved(c.ring)], c.ring)
        sums = c.means, c.grads
        rows, sent, sums = self.choose(at.active, run, idle, rows, c.arrived[1], saved, sums)
        return c._replace(
            arrived=(c.arrived[0], wires.move(sent)), feedback=memory.put(c.feedback, rows, at),
            means=sums[0], grads=sums[1],
        )  # fmt: skip


def _saved(ring: Vectors) -> int:
    return len(next(iter(ring.values())))


def _zeros(tree: Tree) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
