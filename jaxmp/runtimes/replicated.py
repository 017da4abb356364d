"""`Replicated`: the runtime of one program of all stages, compiled with the whole step.

With a mesh, each of its devices is a replica: it runs the program (`jaxmp.runtimes.local`) on its
cut of the batch, and what differs by replica has an axis 0. Without a mesh there is one replica and
no axis.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxmp.exchange import AXIS, Collectives, Exchange, bytes_of, over
from jaxmp.exchange.collectives import Grads, KeyWords, Params, Tree
from jaxmp.exchange.collectives import part as row
from jaxmp.exchange.collectives import whole as all_rows
from jaxmp.exchange.traffic import Bytes, compiled_operands
from jaxmp.runtimes.columns import on_all, on_one
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.state import Feedback, StageState
from jaxmp.runtimes.trained import everything, of_stage, part, whole
from jaxmp.runtimes.types import (
    Batch,
    BoundStep,
    FeedbackByStage,
    Memory,
    Model,
    ModelState,
    Step,
    StepState,
    Then,
    Values,
    output,
)
from jaxmp.wire import Index


class Replicated:
    """One program of all stages by each replica; see `jaxmp.runtimes.types.PlacedRuntime`."""

    together = True

    def __init__(
        self,
        model: Model,
        mesh: Mesh | None = None,
        train: bool = True,
        via: Collectives | None = None,
        here: bool = True,
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: stages and boundaries.
          mesh: a device per replica; None for a single replica.
          train: passed to the stages.
          via: without a mesh, how the replica counts itself among others that it does not reach.
          here: without a mesh, whether the replica is in this process.
        """
        self.local, self.mesh, self.via = Local(model, train, via), mesh, via
        self.stages, self.last = self.local.stages if here else (), self.local.last
        self.replicas = mesh.size if mesh else 1
        mine = enumerate(mesh.devices.flat) if mesh else ()
        self.devices = {r: d for r, d in mine if d.process_index == jax.process_index()}

    # States.

    def init(self, key: Array, draw: bool = True) -> ModelState:
        """See `Runtime`."""
        return self.put(0, self.local.init(key, draw))

    def put(self, stage: int, tree: Tree) -> Tree:
        """See `PlacedRuntime`."""
        return self.join(stage, None, dict.fromkeys(self.devices or (0,), tree))

    def pack(self, feedback: FeedbackByStage) -> Memory:
        """See `PlacedRuntime`."""
        return self.local.pack(feedback) if self.stages else ()

    def unpack(self, feedback: Memory) -> FeedbackByStage:
        """See `PlacedRuntime`."""
        return self.local.unpack(feedback)

    def rows(self, tree: Tree) -> dict[int, Tree]:
        """See `PlacedRuntime`."""
        if self.mesh is None:
            return {self.via.index if self.via else 0: tree}
        one = lambda device: jax.tree.map(lambda a: a[0], row(tree, device))
        return {r: one(device) for r, device in self.devices.items()}

    def join(self, stage: int, like: Tree, rows: Mapping[int, Tree]) -> Tree:
        """See `PlacedRuntime`."""
        if self.mesh is None:
            return jax.tree.map(jnp.asarray, next(iter(rows.values())))
        place = NamedSharding(self.mesh, P(AXIS))
        frame = lambda a, device: jax.device_put(np.asarray(a)[None], device)
        cell = lambda tree, device: jax.tree.map(lambda a: frame(a, device), tree)
        return all_rows(place, [cell(rows[r], device) for r, device in self.devices.items()])

    def numbered(self, step: Index, words: KeyWords) -> tuple[Array, Array]:
        """See `PlacedRuntime`."""
        run = lambda n, words: (jnp.asarray(n, jnp.int32), jax.random.wrap_key_data(words))
        if self.mesh is None:
            return run(step, jnp.asarray(words))
        where = NamedSharding(self.mesh, P())
        return jax.jit(run, out_shardings=where)(np.asarray(step), np.asarray(words))

    def shapes(self) -> list[StageState]:
        """See `PlacedRuntime`; without feedback."""
        model = jax.eval_shape(self.local.init, jax.random.key(0))
        return [StageState(model.params[s], model.model_state[s], Feedback()) for s in model.params]

    # Programs.

    def whole(self, step: Step, each: PyTree) -> BoundStep:
        """``step`` of all replicas as a function of state and batch, not yet compiled."""
        if self.mesh is None:
            return functools.partial(step, self.local)
        model = self.local.model

        def some(f: Callable[[Array], Array], tree: Tree) -> Tree:
            part = lambda one, part: jax.tree.map(f, part) if one else part
            return jax.tree.map(part, each, tree)

        def device(state: StepState, batch: Batch) -> tuple[StepState, Values]:
            row = some(lambda a: a[0], state)
            after, values = step(Local(model, via=over()), row, batch)
            return some(lambda a: a[None], after), jax.tree.map(lambda a: a[None], values)

        # Nothing is differentiated through a collective here, which is what check_vma guards; a
        # model's own scans, which start from plain zeros, would not pass it.
        specs = jax.tree.map(lambda one: P(AXIS) if one else P(), each), P(AXIS)
        return jax.shard_map(
            device, mesh=self.mesh, in_specs=specs, out_specs=specs, check_vma=False
        )

    def bind(self, step: Step, each: PyTree) -> BoundStep:
        """See `PlacedRuntime`."""
        return self._compiled(self.whole(step, each))

    def _compiled(
        self, run: Callable[..., tuple[StepState, Values]]
    ) -> Callable[..., tuple[StepState, Values]]:
        """``run(state, ...) -> (state, values)`` compiled; it takes the buffers of ``state``.

        Those of frozen parameters stay: of two stages they may be one array.
        """
        trained = self.local.model.trained
        if trained is everything:
            return jax.jit(run, donate_argnums=0)
        select = lambda keep, params: {s: part(of_stage(keep, s), p) for s, p in params.items()}
        moved = lambda state, params: state.replace(model=state.model._replace(params=params))
        together = lambda params, fixed: {s: whole(p, fixed[s]) for s, p in params.items()}

        @functools.partial(jax.jit, donate_argnums=0)
        def compiled(state: StepState, fixed: Params, *rest: PyTree) -> tuple[StepState, Values]:
            state, values = run(moved(state, together(state.model.params, fixed)), *rest)
            return moved(state, select(trained, state.model.params)), values

        def apart(state: StepState) -> tuple[StepState, Params]:
            fixed = select(lambda *path: not trained(*path), state.model.params)
            return moved(state, select(trained, state.model.params)), fixed

        def bound(state: StepState, *rest: PyTree) -> tuple[StepState, Values]:
            state, fixed = apart(state)
            state, values = compiled(state, fixed, *rest)
            return moved(state, together(state.model.params, fixed)), values

        lower = lambda state, *rest: compiled.lower(*apart(state), *rest)
        setattr(bound, 'lower', lower)  # noqa: B010 - as a function that `jax.jit` returns has it
        return bound

    def scan(
        self, step: Step, each: PyTree, arrays: Batch
    ) -> Callable[..., tuple[StepState, Values]]:
        """``(state, rows) -> (state, values)``: a compiled scan over steps, for accelerators.

        Args:
          step: as of `bind`.
          each: likewise.
          arrays: of all examples, which stay on the device; a step takes some rows of each.
        """
        run, arrays = self.whole(step, each), jax.tree.map(jnp.asarray, dict(arrays))

        def scan(state: StepState, arrays: Batch, rows: Array) -> tuple[StepState, Values]:
            batch = lambda ids: {k: a[ids] for k, a in arrays.items()} | {'id': ids}
            return jax.lax.scan(lambda state, ids: run(state, batch(ids)), state, rows)

        compiled = self._compiled(scan)
        return lambda state, rows: compiled(state, arrays, rows)

    def at(
        self, stage: int, f: Callable[..., Tree], *trees: Tree, spent: tuple[int, ...] = ()
    ) -> Tree:
        """See `Runtime`."""
        if self.mesh is None:
            return on_one(f, self.via)(*trees)
        return on_all(f, self.mesh)(*trees)

    def drain(self, state: ModelState) -> tuple[dict[int, tuple[Grads, ...]], ModelState]:
        """See `PlacedRuntime`; nothing is under way between two steps."""
        return {}, state

    def again(self) -> None:
        """See `PlacedRuntime`; nothing is under way between two steps."""

    @functools.cached_property
    def _predict(self) -> Any:
        def run(then: Callable[..., Any], state: ModelState, batch: Batch, key: Array) -> Any:
            outputs, feedback = self.local.predict(state, batch, key)
            return then(outputs, batch), feedback

        return jax.jit(run, static_argnums=0)

    def predict(
        self, state: ModelState, batch: Batch, key: Array, then: Then = output
    ) -> tuple[PyTree, Memory]:
        """See `PlacedRuntime`; without a mesh."""
        return self._predict(then, state, batch, key) if self.stages else (None, state.feedback)

    def predict_ahead(self, *shapes: PyTree) -> None:
        """Compiles `predict` before there is a state; ``then`` and the shapes of its arguments."""
        self._predict.lower(*shapes).compile()

    # Bytes.

    def bytes_of(self, exchange: Exchange, params: Params) -> Bytes:
        """See `PlacedRuntime`; with a mesh also the operands of the compiled collectives."""
        if self.mesh is None:
            return bytes_of(exchange, params, self.via.size if self.via else 1)
        compiled = compiled_operands(exchange, params, self.mesh)
        return {**bytes_of(exchange, params, self.replicas), 'compiled': compiled}
