"""`SpmdProgram`: all stages in one program, a stage per device of the mesh axis ``'stage'``.

The step is 1F1B as one scan. In tick t the device of stage s takes micro-batch ``t - s`` forward
and ``t - 2(S-1) + s`` backward, where there are such, and collective-permutes move the messages
that the next tick reads. Stages may differ: a device chooses its own among the stage programs by
`jax.lax.switch` (equal stages share a branch; a tick without work has one of its own), parameters
and states travel through the scan as padded vectors (`jaxmp.runtimes.packing`), and a message is
never padded: links whose messages have the same size share a collective-permute, other links have
their own.

A feedback state is read from its memory before the switch and written back after it, row by row, so
that no table of AQ-SGD is copied. Batch, keys and ids are the same on all devices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.microbatch import cut
from jaxmp.runtimes.packing import Packing, Vectors
from jaxmp.runtimes.schedule import in_step, saved_inputs, table
from jaxmp.runtimes.stage import Feedback, MicroBatch, StageProgram, StageState, Total
from jaxmp.transport import one_piece
from jaxmp.wire import Ctx, Payload

AXIS = 'stage'
Rows = dict[str, Vectors]  # per end of a stage: a vector per row of the memory


class Packed(NamedTuple):
    """The state of all stages, a device's slice under leading axes of the mesh."""

    params: Vectors
    model_state: Vectors
    feedback: Rows


class Wires:
    """Messages of all links of one direction; those of one size share a collective-permute."""

    def __init__(self, messages: Sequence[Payload], step: int) -> None:
        """Groups the links of ``messages`` (shapes, by link); ``step`` is 1 forward, -1 back."""
        self._step, self._messages = step, messages
        pieces = [jax.eval_shape(_flat, m) for m in messages]
        keys = [(str(p.dtype), p.size) for p in pieces]
        self._sizes = list(dict.fromkeys(keys))
        self.group = [self._sizes.index(k) for k in keys]

    def empty(self) -> tuple[Array, ...]:
        """No message."""
        return tuple(jnp.zeros(size, dtype) for dtype, size in self._sizes)

    def write(self, link: int, message: Payload) -> tuple[Array, ...]:
        """``message`` of ``link`` in its group's place."""
        own = self.group[link]
        return tuple(_flat(message) if i == own else a for i, a in enumerate(self.empty()))

    def read(self, link: int, arrived: tuple[Array, ...]) -> Payload:
        """The message of ``link``; inverse of `write`."""
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._messages[link])
        piece, back = one_piece(empty)
        return back(arrived[self.group[link]].reshape(piece.shape))

    def move(self, sent: tuple[Array, ...]) -> tuple[Array, ...]:
        """What arrives at each device: a collective-permute per group."""
        return tuple(lax.ppermute(a, AXIS, self.pairs(i)) for i, a in enumerate(sent))

    def pairs(self, group: int) -> list[tuple[int, int]]:
        """Source and target stage of a group's links."""
        ends = [(l, l + 1) for l, g in enumerate(self.group) if g == group]
        return ends if self._step > 0 else [(b, a) for a, b in ends]


def _flat(message: Payload) -> Array:
    return one_piece(message)[0].reshape(-1)


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
      mesh: with an axis ``'stage'`` of as many devices, and perhaps others (``'replica'``).
      num_microbatches: M.
    """

    stages: tuple[StageProgram, ...]
    mesh: Mesh
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
    def packings(self) -> tuple[Packing, Packing, dict[str, Packing]]:
        """Layouts of parameters, other collections, and feedback by end."""
        shapes = self.shapes
        ends = {
            name: Packing([getattr(s.feedback, name) for s in shapes], lead=1)
            for name in Feedback._fields
        }
        params, model_state = ([getattr(s, k) for s in shapes] for k in ('params', 'model_state'))
        return Packing(params), Packing(model_state), ends

    @functools.cached_property
    def wires(self) -> tuple[Wires, Wires]:
        """Forward and backward messages of the links."""
        made = [p.right.messages(p.y) for p in self.one_slot[:-1] if p.right]
        return Wires([f for f, _ in made], 1), Wires([b for _, b in made], -1)

    @functools.cached_property
    def branch(self) -> list[int]:
        """For each stage the first one that its program is equal to."""
        first: list[tuple[Any, int]] = []
        found = []
        for s, p in enumerate(self.one_slot):
            ends = [None if b is None else (b.fwd, b.bwd) for b in (p.left, p.right)]
            groups = [[w.group[l] for l in (s - 1, s) if 0 <= l < len(w.group)] for w in self.wires]
            key = (p.module, p.x, p.y, ends, groups, p.loss is None)
            same = [i for k, i in first if k == key]
            found.append(same[0] if same else s)
            first += [] if same else [(key, s)]
        return found

    @property
    def rows_per_microbatch(self) -> int:
        """Samples of a micro-batch, B."""
        return self.stages[0].x.shape[0]

    # State.

    def pack(self, states: Sequence[StageState]) -> Packed:
        """States of the stages as vectors, each under a leading axis of the stages."""
        params, model_state, _ = self.packings
        stack = lambda rows: jax.tree.map(lambda *a: jnp.stack(a), *rows)
        return Packed(
            stack([params.pack(s, st.params) for s, st in enumerate(states)]),
            stack([model_state.pack(s, st.model_state) for s, st in enumerate(states)]),
            stack([self.pack_feedback(s, st.feedback) for s, st in enumerate(states)]),
        )

    def pack_feedback(self, s: int, feedback: Feedback) -> Rows:
        """Stage ``s``'s feedback memory by rows, padded to the most rows of all stages."""
        packed = {}
        for name, packing in self.packings[2].items():
            flat = jax.tree.map(
                lambda a, like: a.reshape(-1, *like.shape[1:]),
                getattr(feedback, name), getattr(self.shapes[s].feedback, name),
            )  # fmt: skip
            count = len(jax.tree.leaves(flat)[0]) if jax.tree.leaves(flat) else 0
            short = self.memory_rows[name] - count
            rows = packing.pack(s, flat, (count,))
            packed[name] = jax.tree.map(lambda a: jnp.pad(a, ((0, short), (0, 0))), rows)  # noqa: B023
        return packed

    def unpack_feedback(self, s: int, rows: Rows) -> Feedback:
        """Inverse of `pack_feedback`."""
        memory, found = jax.eval_shape(self.stages[s].init_feedback), {}
        for name, packing in self.packings[2].items():
            count = self.rows_of[name][s]
            tree = packing.unpack(s, jax.tree.map(lambda a: a[:count], rows[name]))  # noqa: B023
            shaped = lambda a, like: a.reshape(like.shape)
            found[name] = jax.tree.map(shaped, tree, getattr(memory, name))
        return Feedback(**found)

    @functools.cached_property
    def memory_rows(self) -> dict[str, int]:
        """Rows of each end's memory: the most of any stage."""
        return {name: max(rows) for name, rows in self.rows_of.items()}

    @functools.cached_property
    def rows_of(self) -> dict[str, list[int]]:
        """Rows of each end's memory, of every stage."""
        found = {name: [0] * len(self.stages) for name in Feedback._fields}
        for s, (p, slot) in enumerate(zip(self.stages, self.shapes, strict=True)):
            memory = jax.eval_shape(p.init_feedback)
            for name in Feedback._fields:
                whole, one = (jax.tree.leaves(getattr(f, name)) for f in (memory, slot.feedback))
                for a, row in zip(whole, one, strict=True):
                    if row.ndim == 0 or len(row) != self.rows_per_microbatch:
                        raise ValueError(
                            f'a feedback state of shape {row.shape} has not a row per sample '
                            f'({self.rows_per_microbatch}), which runtime spmd needs; use mpmd or '
                            'local'
                        )
                    found[name][s] = a.size // (row.size // len(row))
        return found

    @functools.cached_property
    def by_id(self) -> dict[str, np.ndarray]:
        """Whether a stage's end keeps its state per example."""
        kinds = np.zeros((len(Feedback._fields), len(self.stages)), bool)
        for s, p in enumerate(self.stages):
            left = [c is not None and c.per_example for c in _channels(p.left)]
            right = [c is not None and c.per_example for c in _channels(p.right)]
            kinds[:, s] = [*left, *right]
        return dict(zip(Feedback._fields, kinds, strict=True))

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
        device = _Device(self, state.params, _Batch.of(x, y, ctx, self.num_microbatches))
        plan = in_step(len(self.stages), self.num_microbatches)
        carry = device.start(state, max(saved_inputs(plan)))
        end, _ = lax.scan(device.tick, carry, jnp.asarray(table(plan)))
        mean = lambda a: (a / self.num_microbatches).astype(a.dtype)
        means, grads = jax.tree.map(mean, (end.means, end.grads))
        after = Packed(state.params, end.model_state, end.feedback)
        return lax.psum(means, AXIS), grads, after

    def predict(self, state: Packed, x: Array, ctx: Ctx) -> tuple[Array, Rows]:
        """Outputs ``(M, ...)``, zero but on the last device, and the feedback after; one device."""
        device = _Device(self, state.params, _Batch.of(x, None, ctx, self.num_microbatches))
        ticks = len(self.stages) + self.num_microbatches - 1
        end, _ = lax.scan(device.read, device.start(state, 1), jnp.arange(ticks))
        return end.outputs, end.feedback


def _channels(b: Boundary | None) -> tuple[Any, Any]:
    return (None, None) if b is None else (b.fwd, b.bwd)


class _Batch(NamedTuple):
    """A step's batch, cut into micro-batches."""

    x: Array
    y: Any
    ctx: Ctx

    @classmethod
    def of(cls, x: Array, y: Any, ctx: Ctx, n: int) -> _Batch:
        ids = None if ctx.ids is None else cut(ctx.ids, n)
        return cls(cut(x, n), None if y is None else cut(y, n), ctx._replace(ids=ids))

    def at(self, m: Any) -> MicroBatch:
        """Micro-batch ``m``."""
        ids = None if self.ctx.ids is None else self.ctx.ids[m]
        ctx = self.ctx.fold(m)._replace(ids=ids, microbatch=m)
        return MicroBatch(self.x[m], None if self.y is None else self.y[m], ctx)


class _Carry(NamedTuple):
    """What a device takes from tick to tick."""

    arrived: tuple[tuple[Array, ...], tuple[Array, ...]]
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
    batch: _Batch

    @functools.cached_property
    def s(self) -> Array:
        """Number of this device's stage."""
        return lax.axis_index(AXIS)

    @functools.cached_property
    def residuals(self) -> Packing:
        """Layout of what a forward leaves for its backward."""
        wires, first = self.spmd.wires[0], self.batch.at(0)

        def forward(s: int) -> Any:
            message = wires.read(s - 1, wires.empty()) if s else None
            return self.spmd.one_slot[s].forward(_zeros(self.spmd.shapes[s]), first, message)[2]

        count = range(len(self.spmd.stages))
        return Packing([jax.eval_shape(functools.partial(forward, s)) for s in count])

    @functools.cached_property
    def means(self) -> Any:
        """Loss and aux, zero."""
        total = jax.eval_shape(self.spmd.one_slot[-1].init_total, (), self.batch.at(0).y)
        return _zeros((total.loss, total.aux))

    def start(self, state: Packed, saved: int) -> _Carry:
        """The carry before the first tick."""
        residuals = {n: jnp.zeros((saved, w), n) for n, w in self.residuals.widths.items()}
        grads = {n: jnp.zeros(w, n) for n, w in self.spmd.packings[0].widths.items()}
        y, training = self.spmd.stages[-1].y, self.batch.y is not None
        outputs = jnp.zeros((0 if training else self.spmd.num_microbatches, *y.shape), y.dtype)
        arrived = self.spmd.wires[0].empty(), self.spmd.wires[1].empty()
        means = self.means if training else ()
        return _Carry(
            arrived, state.model_state, state.feedback, residuals, means, grads, outputs
        )  # fmt: skip

    def tick(self, c: _Carry, row: Array) -> tuple[_Carry, None]:
        """One forward and one backward, of the micro-batches that the schedule names."""
        forward, backward = row[:, self.s]
        return self.backward(self.forward(c, forward), backward), None

    def read(self, c: _Carry, tick: Array) -> tuple[_Carry, None]:
        """The forward of a tick without backwards."""
        m = tick - self.s
        return self.forward(c, jnp.where(m < self.spmd.num_microbatches, m, -1)), None

    # Feedback rows.

    def index(self, name: str, m: Array, on: Array) -> Array:
        """Rows of a micro-batch in the memory of an end; beyond its last one in an idle tick."""
        size = self.spmd.rows_per_microbatch
        rows = m * size + jnp.arange(size)
        if self.spmd.by_id[name].any():
            ids = self.batch.at(m).ctx.ids
            if ids is None:
                raise ValueError("aqsgd needs ctx.ids; the data pipeline must yield 'id'")
            known = (ids >= 0) & (ids < jnp.asarray(self.spmd.rows_of[name])[self.s])
            ids = jnp.where(known, ids, self.spmd.memory_rows[name])
            rows = jnp.where(jnp.asarray(self.spmd.by_id[name])[self.s], ids, rows)
        return jnp.where(on, rows, self.spmd.memory_rows[name])

    def take(self, c: _Carry, names: tuple[str, str], at: tuple[Array, Array]) -> Rows:
        """The rows of a micro-batch at two ends."""
        fill = {'mode': 'fill', 'fill_value': jnp.nan}
        row = lambda n: lambda a: a.at[self.index(n, *at)].get(**fill)
        get = lambda n: jax.tree.map(row(n), c.feedback[n])
        return {n: get(n) if self.spmd.memory_rows[n] else c.feedback[n] for n in names}

    def put(self, c: _Carry, rows: Rows, at: tuple[Array, Array]) -> Rows:
        """All feedback with the rows of a micro-batch replaced."""
        done = dict(c.feedback)
        for n, new in rows.items():
            if self.spmd.memory_rows[n]:
                i = self.index(n, *at)
                done[n] = jax.tree.map(lambda a, b: a.at[i].set(b, mode='drop'), done[n], new)  # noqa: B023
        return done

    # The two halves of a tick.

    def choose(self, on: Array, branches: Any, idle: Any, *operands: Any) -> Any:
        """The branch of this device's stage, or ``idle``."""
        which = sorted(set(self.spmd.branch))
        number = jnp.asarray([1 + which.index(b) for b in self.spmd.branch])[self.s]
        chosen = [idle, *(functools.partial(branches, s) for s in which)]
        return lax.switch(jnp.where(on, number, 0), chosen, *operands)

    def program(self, s: int) -> StageProgram:
        """Stage ``s``'s, for any stage that is equal to it."""
        return replace(self.spmd.one_slot[s], index=self.s)

    def forward(self, c: _Carry, m: Array) -> _Carry:
        """Reads the activation of micro-batch m, runs the stage, sends its output."""
        on, m = m >= 0, jnp.maximum(m, 0)
        names, predicting = ('left_rx', 'right_tx'), self.batch.y is None
        params, statistics, ends = self.spmd.packings
        wires, y = self.spmd.wires[0], self.spmd.stages[-1].y

        def run(s: int, model_state: Vectors, rows: Rows, arrived: Any) -> Any:
            feedback = Feedback(**{n: ends[n].unpack(s, rows[n]) for n in names})
            state = StageState(
                params.unpack(s, self.params), statistics.unpack(s, model_state), feedback
            )
            message = wires.read(s - 1, arrived) if s else None
            after, out, residuals = self.program(s).forward(state, self.batch.at(m), message)
            last = s == len(self.spmd.stages) - 1
            after_rows = {
                n: ends[n].pack(s, getattr(after.feedback, n), (self.spmd.rows_per_microbatch,))
                if self.spmd.memory_rows[n] else rows[n]
                for n in names
            }  # fmt: skip
            return (
                statistics.pack(s, after.model_state),
                after_rows,
                wires.empty() if last else wires.write(s, out),
                () if predicting else self.residuals.pack(s, residuals),
                (out if last else _zeros(y)) if predicting else (),
            )

        def idle(model_state: Vectors, rows: Rows, arrived: Any) -> Any:
            del arrived
            empty = {n: jnp.zeros(w, n) for n, w in self.residuals.widths.items()}
            return (
                model_state, rows, wires.empty(),
                () if predicting else empty, _zeros(y) if predicting else (),
            )  # fmt: skip

        rows = self.take(c, names, (m, on))
        done = self.choose(on, run, idle, c.model_state, rows, c.arrived[0])
        model_state, rows, sent, residuals, out = done
        feedback, outputs, ring = self.put(c, rows, (m, on)), c.outputs, c.ring
        if predicting:
            outputs = outputs.at[jnp.where(on, m, len(outputs))].set(out, mode='drop')
        else:
            slot = jnp.where(on, m % _saved(ring), _saved(ring))
            ring = jax.tree.map(lambda a, b: a.at[slot].set(b, mode='drop'), ring, residuals)
        return c._replace(
            arrived=(wires.move(sent), c.arrived[1]), model_state=model_state, feedback=feedback,
            ring=ring, outputs=outputs,
        )  # fmt: skip

    def backward(self, c: _Carry, m: Array) -> _Carry:
        """Reads the gradient of micro-batch m, runs the stage back, sends its input's gradient."""
        on, m = m >= 0, jnp.maximum(m, 0)
        names = ('right_rx', 'left_tx')
        params, _, ends = self.spmd.packings
        wires, last = self.spmd.wires[1], len(self.spmd.stages) - 1

        def run(s: int, rows: Rows, arrived: Any, saved: Vectors, sums: Any) -> Any:
            feedback = Feedback(**{n: ends[n].unpack(s, rows[n]) for n in names})
            state = StageState(params.unpack(s, self.params), {}, feedback)
            message = wires.read(s, arrived) if s < last else None
            (loss, aux), grads = sums
            total = Total(loss, aux, params.unpack(s, grads))
            after, total, out = self.program(s).backward(
                state, total, self.residuals.unpack(s, saved), (self.batch.at(m), message)
            )
            after_rows = {
                n: ends[n].pack(s, getattr(after.feedback, n), (self.spmd.rows_per_microbatch,))
                if self.spmd.memory_rows[n] else rows[n]
                for n in names
            }  # fmt: skip
            sums = (total.loss, total.aux), params.pack(s, total.grads)
            return after_rows, wires.write(s - 1, out) if s else wires.empty(), sums

        def idle(rows: Rows, arrived: Any, saved: Vectors, sums: Any) -> Any:
            del arrived, saved
            return rows, wires.empty(), sums

        rows = self.take(c, names, (m, on))
        saved = jax.tree.map(lambda a: a[m % _saved(c.ring)], c.ring)
        sums = c.means, c.grads
        rows, sent, sums = self.choose(on, run, idle, rows, c.arrived[1], saved, sums)
        return c._replace(
            arrived=(c.arrived[0], wires.move(sent)), feedback=self.put(c, rows, (m, on)),
            means=sums[0], grads=sums[1],
        )  # fmt: skip


def _saved(ring: Vectors) -> int:
    return len(next(iter(ring.values())))


def _zeros(tree: Any) -> Any:
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
