"""`Columns`: the devices of replicas x stages, and functions that a stage's replicas run together.

A column is the devices of one stage, one per replica. What a stage holds is a dict by replica, with
the replicas of this process; `at` runs a function of one replica on all of a column, in which they
reach each other (`jaxmp.exchange`). A column may span processes. Where each has a JAX of its own,
they move the operands of the collectives themselves (`jaxmp.exchange.pieces`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxmp.exchange import Exchange
from jaxmp.exchange.collectives import (
    AXIS,
    Collectives,
    Grads,
    KeyWords,
    Params,
    Tree,
    over,
    part,
    whole,
)
from jaxmp.exchange.pieces import Pieces, in_pieces
from jaxmp.exchange.traffic import Bytes, bytes_of
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.placement import CompilerOptions, Device, Elsewhere, is_here
from jaxmp.runtimes.types import (
    BoundStep,
    ByReplica,
    ModelState,
    Step,
    by_replica,
    is_by_replica,
    of_replica,
)
from jaxmp.wire import Index


class Columns:
    """The places of a run: ``devices[r][s]`` holds stage s of replica r.

    Attributes:
      devices: as given, as an array ``(R, S)``.
      group: the processes.
      replicas: R.
      here: for each stage of this process its replicas here.
    """

    def __init__(
        self,
        devices: Sequence[Sequence[Device]] | np.ndarray,
        options: CompilerOptions = None,
        group: ProcessGroup | None = None,
    ) -> None:
        """Takes a device per replica and stage.

        Args:
          devices: those of other processes as `jaxmp.runtimes.placement.Elsewhere`.
          options: those of `jax.jit`'s compiler.
          group: the processes; default this one alone.
        """
        self.devices, self._options = np.array(devices, dtype=object), options
        self.replicas, count = self.devices.shape
        self.group = group or ProcessGroup()
        self._pieces: dict[tuple[Callable[..., Tree], tuple], Pieces] = {}
        rows = lambda s: [r for r, d in enumerate(self.devices[:, s]) if is_here(d)]
        self.here = {s: rows(s) for s in range(count) if rows(s)}

    def put(self, stage: int, tree: Tree) -> ByReplica:
        """The same tree at every replica of a stage that is here."""
        return ByReplica(
            {r: jax.device_put(tree, self.devices[r, stage]) for r in self.here[stage]}
        )

    def at(
        self, stage: int, f: Callable[..., Tree], *trees: Tree, spent: tuple[int, ...] = ()
    ) -> ByReplica:
        """``f(collectives, *trees)`` of one replica, by all of a column; see `Runtime.at`.

        A tree that is not by replica (a number, a key's words) is the same for all.
        """
        operands = [t if isinstance(t, ByReplica) else self.put(stage, t) for t in trees]
        if self.replicas == 1:
            return ByReplica({0: on_one(f, None, self._options, spent)(*(t[0] for t in operands))})
        if any(isinstance(d, Elsewhere) for d in self.devices[:, stage]):
            return self._apart(stage, f, operands)
        here, mesh = self.here[stage], self._mesh(stage)
        join = lambda t: whole(NamedSharding(mesh, P(AXIS)), [_row(t[r]) for r in here])
        out = on_all(f, mesh, self._options)(*map(join, operands))
        return ByReplica({r: _unrow(part(out, self.devices[r, stage])) for r in here})

    def _apart(self, stage: int, f: Callable[..., Tree], trees: Sequence[ByReplica]) -> ByReplica:
        """``f`` of the replicas here, which reach the others by messages."""
        rows = {r: tuple(t[r] for t in trees) for r in self.here[stage]}
        first = next(iter(rows.values()))
        like = jax.tree.structure(first), *((a.shape, str(a.dtype)) for a in jax.tree.leaves(first))
        if (f, like) not in self._pieces:
            self._pieces[f, like] = in_pieces(
                lambda via, _, *t: f(via, *t), self.replicas, 0, *first
            )
        mine = self.group.index
        members = [mine if is_here(d) else d.process_index for d in self.devices[:, stage]]
        order = list(dict.fromkeys(members))

        def gather(messages: Sequence[bytes]) -> list[np.ndarray]:
            came = self.group.swapped(order, f'exchange of stage {stage},', b''.join(messages))
            each = zip(order, came, strict=True)
            cut = lambda p, part: np.split(np.frombuffer(part, np.uint8), members.count(p))
            return [row for p, part in each for row in cut(p, part)]

        args = {r: (0, *row) for r, row in rows.items()}
        out = self._pieces[f, like].run(args, gather)
        put = lambda r, tree: jax.device_put(tree, self.devices[r, stage])
        return ByReplica({r: put(r, tree) for r, tree in out.items()})

    def _mesh(self, stage: int) -> Mesh:
        return Mesh(self.devices[:, stage], (AXIS,), axis_types=(AxisType.Auto,))


_row = jax.jit(lambda tree: jax.tree.map(lambda a: a[None], tree))
_unrow = jax.jit(lambda tree: jax.tree.map(lambda a: a[0], tree))


@functools.lru_cache(maxsize=256)
def on_one(
    f: Callable[..., Tree],
    via: Collectives | None = None,
    options: CompilerOptions = None,
    spent: tuple[int, ...] = (),
) -> jax.stages.Wrapped:
    """``f(via, *trees)``, compiled for one replica; it takes the buffers of the ``spent`` trees."""
    run = functools.partial(f, via)
    return jax.jit(run, donate_argnums=spent, compiler_options=options and dict(options))


@functools.lru_cache(maxsize=256)
def on_all(
    f: Callable[..., Tree], mesh: Mesh, options: CompilerOptions = None
) -> jax.stages.Wrapped:
    """``f(collectives, *trees)``, compiled for the replicas of a mesh, over the trees' axis 0."""

    def device(*trees: Tree) -> Tree:
        out = f(over(), *jax.tree.map(lambda a: a[0], trees))
        return jax.tree.map(lambda a: a[None], out)

    # Nothing is differentiated through a collective, which is what check_vma guards.
    run = jax.shard_map(device, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False)
    return jax.jit(run, compiler_options=options and dict(options))


class OverColumns:
    """What runtimes whose stages are apart have in common; see `PlacedRuntime`."""

    columns: Columns
    together = False
    square: Callable[[], Array] | None = None

    def bind(self, step: Step, each: PyTree) -> BoundStep:
        """See `PlacedRuntime`; the functions of a stage are compiled, and the step calls them."""
        return functools.partial(step, self)  # pyright: ignore[reportArgumentType]

    def at(
        self, stage: int, f: Callable[..., Tree], *trees: Tree, spent: tuple[int, ...] = ()
    ) -> Tree:
        """See `Runtime`."""
        return self.columns.at(stage, f, *trees, spent=spent)

    def rows(self, tree: Tree) -> dict[int, Tree]:
        """See `PlacedRuntime`."""
        parts = jax.tree.leaves(tree, is_leaf=is_by_replica)
        numbers = next((list(p) for p in parts if is_by_replica(p)), [])
        return {r: of_replica(tree, r) for r in numbers}

    def join(self, stage: int, like: Tree, rows: Mapping[int, Tree]) -> Tree:
        """See `PlacedRuntime`."""
        put = lambda r, tree: jax.device_put(tree, self.columns.devices[r, stage])
        return by_replica(like, {r: put(r, tree) for r, tree in rows.items()})

    def put(self, stage: int, tree: Tree) -> Tree:
        """See `PlacedRuntime`."""
        return self.columns.put(stage, tree)

    def numbered(self, step: Index, words: KeyWords) -> tuple[np.ndarray, Array]:
        """See `PlacedRuntime`; the number is one of numpy, which no device computes."""
        return np.asarray(step, np.int32), jax.random.wrap_key_data(jnp.asarray(words))

    def drain(self, state: ModelState) -> tuple[dict[int, tuple[Grads, ...]], ModelState]:
        """See `PlacedRuntime`; nothing is under way between two steps."""
        return {}, state

    def again(self) -> None:
        """See `PlacedRuntime`; nothing is under way between two steps."""

    def compared(self, model: ModelState, step: int, say: Callable[[str], object]) -> ModelState:
        """The state in which both ends of a boundary remember alike, as those of one program do."""
        return model

    def bytes_of(self, exchange: Exchange, params: Params) -> Bytes:
        """See `PlacedRuntime`."""
        return bytes_of(exchange, params, self.columns.replicas)
