"""Training of replicas, each the whole model in one program, over the mesh axis ``'replica'``.

Replica i takes the i-th of n equal cuts of a step's batch, runs the whole model on it, and shares
its gradients. The states of the replicas are arrays with a leading axis n: only the exchange keeps
them equal, and checksums verify it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.distributed.placement import device_mesh, open_links
from jaxmp.distributed.process_group import ProcessGroup, together
from jaxmp.exchange import AXIS, over
from jaxmp.exchange.collectives import part
from jaxmp.exchange.traffic import bytes_of, compiled_operands
from jaxmp.runtimes.types import ModelState
from jaxmp.training import groups, one_program, portable, replicas
from jaxmp.training.engine import Engine, Epoch, Stopped, Values, rules_of
from jaxmp.training.experiment import Experiment
from jaxmp.training.one_program import Step, never, step_of
from jaxmp.training.portable import Portable
from jaxmp.training.step import Rules, TrainState

EACH = ('model', 'opt_state', 'exchange', 'copies')  # of a train state, one per replica


def replicated(exp: Experiment, group: ProcessGroup) -> Engine:
    """The engine of ``config.parallel.runtime = 'local'`` with several replicas.

    Args:
      exp: the experiment, the same in all processes.
      group: the processes, which hold equally many replicas.

    Raises:
      ValueError: if there are fewer devices than replicas, or they do not spread evenly.
    """
    mesh = device_mesh(**{AXIS: exp.replicas})
    if group.count > 1:
        open_links(mesh)
    score = one_program.evaluator(exp)

    @functools.lru_cache(maxsize=1)
    def compiled(cuts: tuple[Boundary, ...], rules: Rules) -> Epoch:
        step = replica_step(step_of(exp, cuts, rules), mesh)
        if group.count == 1:
            return functools.partial(_averaged, one_program.epoch_form()(exp, step))
        return functools.partial(_agreed, exp, group, one_program.epoch_by_step(exp, step))

    return Engine(
        create=lambda seeded: spread(one_program.create(seeded, exp.replicas), mesh),
        epoch=lambda n: compiled(exp.boundaries(n), rules_of(exp, n)),
        evaluate=lambda state, compressed: score(one_of(state, mesh), compressed),
        export=lambda state: export(exp, state, mesh),
        load=lambda state, saved: load(exp, state, saved, mesh),
        moved=lambda: {'processes': group.count, 'exchange': traffic(exp, mesh)},
        check=lambda state: check(exp, state, mesh),
        weights=lambda state: one_program.variables_of(one_of(state, mesh)),
    )


# States.


def spread(state: TrainState, mesh: Mesh) -> TrainState:
    """The state of all replicas of a mesh, given that of one; each process makes its own part."""
    rows = NamedSharding(mesh, P(AXIS))
    copy = jax.jit(
        lambda tree: jax.tree.map(lambda a: jnp.broadcast_to(a, (mesh.size, *a.shape)), tree),
        out_shardings=rows,
    )
    parts = {name: copy(jax.tree.map(np.asarray, getattr(state, name))) for name in EACH}
    return TrainState(**_shared(state.step, jax.random.key_data(state.key), mesh), **parts)


def _shared(step: Any, words: Any, mesh: Mesh) -> dict[str, Array]:
    """Step and key, the same at all replicas."""
    both = jax.jit(
        lambda n, w: {'step': n, 'key': jax.random.wrap_key_data(w)},
        out_shardings=NamedSharding(mesh, P()),
    )
    return both(np.asarray(step), np.asarray(words))


def one_of(state: TrainState, mesh: Mesh) -> TrainState:
    """The state to score: the mean of the replicas' variables, the first one's feedback states.

    Equal parameters are their own mean; statistics (BatchNorm) differ between replicas. All
    processes must call it; each gets the whole on its first device.
    """
    words = jax.random.key_data(state.key)
    parts = _joined((state.step, state.model, words), mesh)
    step, model, words = jax.tree.map(lambda a: a.addressable_data(0), parts)
    return TrainState(step, model, (), (), jax.random.wrap_key_data(words))


@functools.partial(jax.jit, static_argnums=1)
def _joined(parts: Any, mesh: Mesh) -> Any:
    step, model, words = parts
    params, rest = (jax.tree.map(lambda a: jnp.mean(a, 0), t) for t in model[:2])
    model = ModelState(params, rest, jax.tree.map(lambda a: a[0], model.feedback))
    return lax.with_sharding_constraint((step, model, words), NamedSharding(mesh, P()))


def rows_of(exp: Experiment, state: TrainState, mesh: Mesh) -> dict[int, dict[int, Any]]:
    """The state of each stage of each replica of this process, on the replica's device."""

    def row(device: Any) -> TrainState:
        own = lambda tree: jax.tree.map(lambda a: a[0], part(tree, device))
        return state.replace(**{n: own(getattr(state, n)) for n in EACH})

    here = {r: d for r, d in enumerate(mesh.devices) if d.process_index == jax.process_index()}
    return {r: one_program.stages_of(exp, row(device)) for r, device in here.items()}


def export(exp: Experiment, state: TrainState, mesh: Mesh) -> Portable:
    """See `Engine`."""
    return portable.export(exp, rows_of(exp, state, mesh), state)


def load(exp: Experiment, state: TrainState, saved: Portable, mesh: Mesh) -> TrainState:
    """See `Engine`."""
    rows = portable.load(exp, rows_of(exp, state, mesh), saved)
    states = [one_program.state_of(exp, stages, saved) for stages in rows.values()]
    place = NamedSharding(mesh, P(AXIS))

    def whole(*leaves: Any) -> Array:
        stacked = np.stack([np.asarray(a) for a in leaves])
        shape = mesh.size, *stacked.shape[1:]
        return jax.make_array_from_process_local_data(place, stacked, shape)

    parts = {n: jax.tree.map(whole, *(getattr(t, n) for t in states)) for n in EACH}
    return TrainState(**_shared(states[0].step, saved.key, mesh), **parts)


def check(exp: Experiment, state: TrainState, mesh: Mesh) -> None:
    """Raises DriftError if replicas differ."""
    if trees := replicas.alike(exp.exchange, state):
        rows = np.asarray(_checksums(trees, mesh))
        replicas.compare(rows, trees, int(state.step))


@functools.partial(jax.jit, static_argnums=1)
def _checksums(trees: Any, mesh: Mesh) -> Array:
    rows = jax.vmap(replicas.checksums)(trees)
    return lax.with_sharding_constraint(rows, NamedSharding(mesh, P()))


# Steps.


def replica_step(step: Callable[..., Any], mesh: Mesh) -> Step:
    """The step of all replicas, with scores ``(n,)``, one per replica.

    Args:
      step: of one replica, from `jaxmp.training.one_program.step_of`.
      mesh: the replicas' devices.
    """

    def device(state: TrainState, batch: dict[str, Array]) -> Any:
        row = {name: jax.tree.map(lambda a: a[0], getattr(state, name)) for name in EACH}
        after, values = step(over(), state.replace(**row), batch)
        rows = {name: jax.tree.map(lambda a: a[None], getattr(after, name)) for name in EACH}
        return after.replace(**rows), jax.tree.map(lambda a: a[None], values)

    # Nothing is differentiated through a collective here, which is what check_vma guards; a model's
    # own scans, which start from plain zeros, would not pass it.
    state: Any = TrainState(step=P(), key=P(), **dict.fromkeys(EACH, P(AXIS)))  # pyright: ignore
    specs = state, P(AXIS)
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)


def _averaged(steps: Epoch, state: Any, order: np.ndarray, stopped: Stopped = never) -> Iterator:
    """An epoch whose values are means over the replicas."""
    for after, values, stop in steps(state, order, stopped):
        yield after, {k: np.mean(v, -1) for k, v in values.items()}, stop


def _agreed(
    exp: Experiment,
    group: ProcessGroup,
    steps: Epoch,
    state: Any,
    order: np.ndarray,
    stopped: Stopped = never,
) -> Iterator:
    """An epoch over processes, each of which has the values of its own replicas."""

    def share(values: Values) -> Values:
        here = {k: [float(x.data[0]) for x in v.addressable_shards] for k, v in values.items()}
        return {k: sum(x) / exp.replicas for k, x in here.items()}

    pairs = ((after, values) for after, values, _ in steps(state, order))
    plan = len(order) // exp.config.batch_size, exp.task.scores
    yield from together(group, pairs, plan, stopped, share)


# Bytes.


def traffic(exp: Experiment, mesh: Mesh) -> dict[str, Any]:
    """Bytes per step of a replica, and the operands of the compiled exchange's collectives."""

    def report(exchange: Any, params: Any, n: int) -> dict[str, Any]:
        compiled = compiled_operands(exchange, params, mesh)
        return {**bytes_of(exchange, params, n), 'compiled': compiled}

    return replicas.traffic(exp, exchanged_shapes(exp), report)


def exchanged_shapes(exp: Experiment) -> list[Any]:
    """Shapes of what a replica exchanges: the parameters of each group, copies once."""
    model = jax.eval_shape(one_program.local_of(exp).init, jax.random.key(0))
    return groups.exchanged(exp.groups, model.params, together=True)
