"""`Spmd`: the runtime of one `jax.shard_map` program over all stages, and replicas.

Between steps a stage's parameters and statistics are trees on its own devices, so that the
optimizer sees what it sees in every runtime; for a step each device packs its own, and no number
travels for it. The feedback memory stays packed (`jaxmp.runtimes.memory`). The mesh may span the
processes of `jax.distributed`: each runs the same program, and holds what its own devices hold.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import AXIS as REPLICA
from jaxmp.exchange.collectives import Grads, Tree, part, whole
from jaxmp.exchange.hlo import permuted
from jaxmp.runtimes.columns import Columns, OverColumns
from jaxmp.runtimes.memory import FeedbackMemory
from jaxmp.runtimes.packing import Packing, Vectors
from jaxmp.runtimes.placement import is_here
from jaxmp.runtimes.spmd_program import Packed, SpmdProgram
from jaxmp.runtimes.stage import StageProgram, programs, shapes
from jaxmp.runtimes.state import Means, StageState
from jaxmp.runtimes.types import (
    Batch,
    ByReplica,
    Memory,
    Model,
    ModelState,
    StepKeys,
    Then,
    output,
)
from jaxmp.runtimes.wires import AXIS
from jaxmp.wire import nbytes

SLICE = P(REPLICA, AXIS)


class Spmd(OverColumns):
    """One program for all stages; see `jaxmp.runtimes.types.PlacedRuntime`."""

    def __init__(
        self,
        model: Model,
        columns: Columns,
        train: bool = True,
        options: tuple[tuple[str, Any], ...] = (),
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: stages and boundaries.
          columns: the devices, of all processes of this JAX.
          train: passed to the stages.
          options: those of `jax.jit`'s compiler.

        Raises:
          ValueError: if a channel's state has no row per sample.
        """
        stages = programs(model, train)
        axes = (AxisType.Auto,) * 2
        self.mesh = Mesh(columns.devices, (REPLICA, AXIS), axis_types=axes)
        self.program = SpmdProgram(stages, model.num_microbatches)
        self.columns, self.model, self.options = columns, model, dict(options)
        self.stages, self.replicas = tuple(columns.here), columns.replicas
        self.last = len(stages) - 1
        self._steps, self._lowered = 0, None

    # State.

    def init(self, key: Array, draw: bool = True) -> ModelState:
        """See `Runtime`."""
        states = {s: _init(self.program.stages[s], key, draw) for s in self.stages}
        put = lambda name: {s: self.columns.put(s, getattr(states[s], name)) for s in self.stages}
        return ModelState(put('params'), put('model_state'), self.pack(put('feedback')))

    def pack(self, feedback: dict[int, ByReplica]) -> Memory:
        """The feedback memory of all stages as the step takes it; inverse of `unpack`."""
        return self._packed(self.program.memory, feedback) if self.stages else ()

    def unpack(self, feedback: Memory) -> dict[int, ByReplica]:
        """The feedback memory by stage and replica."""
        return self._trees(self.program.memory, feedback)

    def _packed(self, layout: Packing | FeedbackMemory, trees: dict[int, ByReplica]) -> Tree:
        """Trees by stage and replica as arrays ``(R, S, ...)``, moving none."""
        cells = [  # an array without an input, such as padding alone, is on the first device
            jax.device_put(_pack(layout, s, trees[s][r]), device)
            for (r, s), device in np.ndenumerate(self.columns.devices)
            if is_here(device)
        ]
        return whole(NamedSharding(self.mesh, SLICE), cells)

    def _trees(self, layout: Packing | FeedbackMemory, packed: Tree) -> dict[int, ByReplica]:
        """Inverse of `_packed`."""
        cell = lambda r, s: _unpack(layout, s, part(packed, self.columns.devices[r, s]))
        return {s: ByReplica({r: cell(r, s) for r in self.columns.here[s]}) for s in self.stages}

    def shapes(self) -> list[StageState]:
        """Shapes of all stages' states."""
        return shapes(self.program.stages)

    # Bytes.

    def collectives(self) -> dict[int, tuple[int, int]]:
        """Bytes a message that the step's collective-permutes move on every link of a replica."""
        if self._lowered is None:
            raise ValueError('bytes of the compiled step are known after its first call')
        moved = permuted(self._lowered.compile().as_text())
        return {l: (moved[l, l + 1], moved[l + 1, l]) for l in range(self.last)}

    def payload(self) -> np.ndarray:
        """Bytes of replica 0's messages so far, ``(links, 2)``, of the links that begin here."""
        pairs = [p.right.messages(p.y) for p in self.program.one_slot[:-1] if p.right]
        sizes = np.array([[nbytes(m) for m in pair] for pair in pairs], float)
        begins = [[0 in self.columns.here.get(l, ())] for l in range(self.last)]
        return sizes * begins * self._steps * self.model.num_microbatches

    # Programs.

    @functools.cached_property
    def step(self) -> Any:
        """Compiled: ``(packed, x, y, key, ids) -> (means, gradients, packed)`` of all devices."""

        def device(state: Packed, batch: Batch, key: Array) -> tuple[Means, Vectors, PyTree]:
            r = lax.axis_index(REPLICA) if self.replicas > 1 else None
            keys = StepKeys.of(key, batch['id'], r)
            x = self.model.prepare(batch['x'], keys.augment)
            part = jax.tree.map(lambda a: a[0, 0], state)
            means, grads, after = self.program.value_and_grad(part, x, batch['y'], keys.model)
            frame = lambda tree: jax.tree.map(lambda a: a[None, None], tree)
            return jax.tree.map(lambda a: a[None], means), frame(grads), frame(after[1:])

        run = jax.shard_map(
            device,
            mesh=self.mesh,
            in_specs=(SLICE, P(REPLICA), P()),
            out_specs=(P(REPLICA), SLICE, SLICE),
            check_vma=False,
        )
        return jax.jit(run, donate_argnums=0, compiler_options=self.options or None)

    @functools.cached_property
    def forwards(self) -> jax.stages.Wrapped:
        """Compiled: ``(packed, batch, key) -> (outputs, feedback)``."""

        def device(state: Packed, batch: Batch, key: Array) -> PyTree:
            x = self.model.prepare(batch['x'], None)
            part = jax.tree.map(lambda a: a[0, 0], state)
            out, feedback = self.program.predict(part, x, StepKeys.of(key, batch['id']).model)
            return jax.tree.map(lambda a: a[None, None], (out, feedback))

        run = jax.shard_map(
            device, mesh=self.mesh, in_specs=(SLICE, P(), P()), out_specs=SLICE, check_vma=False
        )
        return jax.jit(run, compiler_options=self.options or None)

    def _state(self, state: ModelState) -> Packed:
        params, statistics = self.program.packings
        return Packed(
            self._packed(params, state.params), self._packed(statistics, state.model_state),
            state.feedback,
        )  # fmt: skip

    def value_and_grad(
        self, state: ModelState, batch: Batch, key: Array
    ) -> tuple[Means, dict[int, Grads], ModelState]:
        """See `Runtime`."""
        _, statistics = self.program.packings
        args = self._state(state), self._spread(batch, P(REPLICA)), key
        if self._lowered is None:
            self._lowered = self.step.lower(*args)
        self._steps += 1
        means, grads, (model_state, feedback) = self.step(*args)
        row = lambda r: jax.tree.map(
            lambda a: a[0], part(means, self.columns.devices[r, self.last])
        )
        rows = ByReplica({r: row(r) for r in self.columns.here.get(self.last, ())})
        after = ModelState(state.params, self._trees(statistics, model_state), feedback)
        return rows, self._trees(self.program.gradients, grads), after

    def predict(
        self, state: ModelState, batch: Batch, key: Array, then: Then = output
    ) -> tuple[PyTree, Memory]:
        """See `PlacedRuntime`."""
        if not self.stages:
            return None, state.feedback
        inputs = self._spread({k: batch[k] for k in ('x', 'id')}, P())
        outputs, feedback = self.forwards(self._state(state), inputs, key)
        if not is_here(last := self.columns.devices[0, -1]):
            return None, feedback
        rows = part(outputs, last)
        return jax.jit(then)(rows.reshape(-1, *rows.shape[4:]), dict(batch)), feedback

    def _spread(self, batch: Batch, how: P) -> dict[str, Array]:
        """Arrays that every process has whole, as ones over the mesh; a device gets its cut."""
        place = NamedSharding(self.mesh, how)
        cut = lambda a: jax.make_array_from_callback(np.shape(a), place, lambda i: np.asarray(a)[i])
        return {name: cut(a) for name, a in batch.items()}


_init = jax.jit(StageProgram.init, static_argnums=(0, 2))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _pack(layout: Packing | FeedbackMemory, s: int, tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a[None, None], layout.pack(s, tree))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _unpack(layout: Packing | FeedbackMemory, s: int, packed: Tree) -> Tree:
    return layout.unpack(s, jax.tree.map(lambda a: a[0, 0], packed))
