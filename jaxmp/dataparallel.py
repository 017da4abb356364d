"""Replicas of a whole run: the same parameters on several devices, gradients exchanged every step.

Replica i takes the i-th of n equal cuts of a step's batch, runs the whole model on it, stage
boundaries included, and shares its gradients by the exchange that ``config.exchange`` names. What a
replica holds, parameters too, stands under a leading axis n over the mesh axis ``'replica'``: they
are separate copies, equal by what is exchanged and by nothing else, and that is checked.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, UInt32

from jaxmp.devices import device_mesh
from jaxmp.engine import Engine
from jaxmp.evaluate import evaluator
from jaxmp.exchange import AXIS, Exchange, bytes_of, operands, over
from jaxmp.pipeline import Pipeline
from jaxmp.setting import Setting, model_at, shapes
from jaxmp.task import alone
from jaxmp.team import Team, together
from jaxmp.train import (
    Epoch,
    Step,
    Stopped,
    TrainState,
    Values,
    create,
    epoch_by_step,
    epoch_form,
    never,
    split,
    train_step,
)
from jaxmp.transport import open_links

EACH = ('variables', 'opt_state', 'links', 'exchange')  # of a train state, one a replica


class DriftError(RuntimeError):
    """Replicas that must be equal are not."""


def replicated(s: Setting, team: Team) -> Engine:
    """The engine of ``config.replicas > 1``.

    Args:
      s: the setting, the same in all processes.
      team: the processes, which hold equally many replicas.

    Raises:
      ValueError: if there are fewer devices than replicas, or they do not spread evenly.
    """
    mesh, score = device_mesh(**{AXIS: s.replicas}), evaluator(s)
    if team.count > 1:
        open_links(mesh)  # see `prepare` in jaxmp.run

    @functools.lru_cache(maxsize=1)
    def compiled(model: Pipeline, exchange: Exchange) -> Epoch:
        step = replica_step(s, model, exchange, mesh)
        if team.count == 1:
            return functools.partial(_averaged, epoch_form()(s, step))
        return functools.partial(_agreed, s, team, epoch_by_step(s, step))

    return Engine(
        create=lambda s: create_replicas(s, mesh),
        epoch=lambda n: compiled(model_at(s, n), s.exchange.phase(n)),
        evaluate=lambda state, compressed: score(one_of(state, mesh), compressed),
        moved=lambda: {'processes': team.count, 'exchange': traffic(s, mesh)},
        check=lambda state: check(s, state, mesh),
        weights=lambda state: one_of(state, mesh).variables,
    )


def create_replicas(s: Setting, mesh: Mesh) -> TrainState:
    """The state before the first step: n copies of one replica's."""
    state = create(s)
    held = s.exchange.init(alone(s.task, split(state.variables)[0]), s.replicas)
    return spread(state.replace(exchange=held), mesh)


def spread(state: TrainState, mesh: Mesh) -> TrainState:
    """A replica's state as that of all of a mesh, each process making its own part."""
    rows, shared = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    copy = jax.jit(
        lambda tree: jax.tree.map(lambda a: jnp.broadcast_to(a, (mesh.size, *a.shape)), tree),
        out_shardings=rows,
    )
    parts = {name: copy(jax.tree.map(np.asarray, getattr(state, name))) for name in EACH}
    step, words = (np.asarray(a) for a in (state.step, jax.random.key_data(state.key)))
    step, key = jax.jit(lambda n, w: (n, jax.random.wrap_key_data(w)), out_shardings=shared)(
        step, words
    )
    return TrainState(step=step, key=key, **parts)


def one_of(state: TrainState, mesh: Mesh) -> TrainState:
    """What is scored: the mean of the replicas' variables, and the first one's boundary states.

    Equal parameters are their own mean; statistics (BatchNorm) are each replica's own. All
    processes must call it; each gets the whole on its first device.
    """
    words = jax.random.key_data(state.key)
    parts = _joined((state.step, state.variables, state.links, words), mesh)
    step, variables, links, words = jax.tree.map(lambda a: a.addressable_data(0), parts)
    return TrainState(step, variables, (), links, jax.random.wrap_key_data(words))


@functools.partial(jax.jit, static_argnums=1)
def _joined(parts: Any, mesh: Mesh) -> Any:
    step, variables, links, words = parts
    variables = jax.tree.map(lambda a: jnp.mean(a, 0), variables)
    links = jax.tree.map(lambda a: a[0], links)
    return lax.with_sharding_constraint((step, variables, links, words), NamedSharding(mesh, P()))


def _specs() -> TrainState:
    return TrainState(step=P(), key=P(), **dict.fromkeys(EACH, P(AXIS)))  # pyright: ignore


def replica_step(s: Setting, model: Pipeline, exchange: Exchange, mesh: Mesh) -> Step:
    """A step of all replicas; loss and accuracy come one a replica.

    Args:
      s: the setting.
      model: in or after its warm-up.
      exchange: of this epoch.
      mesh: the replicas' devices.
    """

    def device(state: TrainState, batch: dict[str, Array]) -> Any:
        own = {name: jax.tree.map(lambda a: a[0], getattr(state, name)) for name in EACH}
        after, values = train_step(s, model, state.replace(**own), batch, (exchange, over()))
        kept = {name: jax.tree.map(lambda a: a[None], getattr(after, name)) for name in EACH}
        return after.replace(**kept), jax.tree.map(lambda a: a[None], values)

    # Nothing is differentiated through a collective here, which is what check_vma guards; a model's
    # own scans, which start from plain zeros, would not pass it.
    specs = (_specs(), P(AXIS))
    return jax.shard_map(device, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False)


def _averaged(steps: Epoch, state: Any, order: np.ndarray, stopped: Stopped = never) -> Iterator:
    """An epoch whose values are means over the replicas."""
    for after, values, stop in steps(state, order, stopped):
        yield after, {k: np.mean(v, -1) for k, v in values.items()}, stop


def _agreed(
    s: Setting, team: Team, steps: Epoch, state: Any, order: np.ndarray, stopped: Stopped = never
) -> Iterator:
    """An epoch over processes, each of which knows the values of its own replicas."""

    def share(values: Values) -> Values:
        own = {k: [float(x.data[0]) for x in v.addressable_shards] for k, v in values.items()}
        return {k: sum(x) / s.replicas for k, x in own.items()}

    made = ((after, values) for after, values, _ in steps(state, order))
    yield from together(team, made, len(order) // s.config.batch_size, stopped, share)


# That replicas are equal.


@functools.partial(jax.jit, static_argnums=1)
def checksums(tree: Any, mesh: Mesh) -> list[UInt32[Array, ' n']]:
    """Of every leaf ``(n, ...)`` a sum of its bits, one a replica; equal replicas have equal sums.

    Words are weighted by their position, so that exchanged ones are seen, too.
    """

    def one(a: Array) -> Array:
        rows = lax.bitcast_convert_type(a, jnp.uint8).reshape(len(a), -1).astype(jnp.uint32)
        weights = 2 * jnp.arange(rows.shape[1], dtype=jnp.uint32) + 1
        return jnp.sum(rows * weights, 1, dtype=jnp.uint32)

    sums = [one(a) for a in jax.tree.leaves(tree)]
    return lax.with_sharding_constraint(sums, NamedSharding(mesh, P()))


def check(s: Setting, state: TrainState, mesh: Mesh) -> None:
    """Compares the parameters of the replicas.

    Raises:
      DriftError: if they differ; the message names the replicas and the parameter.
    """
    if int(state.step) % s.exchange.every:
        return  # between two averages of local SGD
    params = split(state.variables)[0]
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    rows = np.stack([np.asarray(a) for a in checksums(params, mesh)], 1)
    alike = [tuple(r) for r in rows]
    usual = max(alike, key=alike.count)
    odd = [i for i, row in enumerate(alike) if row != usual]
    if odd:
        where = paths[int(np.argmax(rows[odd[0]] != usual))]
        who = f'replica {", ".join(map(str, odd))} differ from the others of {s.replicas}'
        if 2 * alike.count(usual) <= s.replicas:
            who = f'the {s.replicas} replicas differ, and none has a majority'
        raise DriftError(
            f'after step {int(state.step)} the parameters of {who}, first at {where}: a device or '
            'its memory has changed a number that was not exchanged; the last checkpoint is from '
            'before, give the same command to go on from it'
        )


# Bytes.


def traffic(s: Setting, mesh: Mesh | None = None) -> dict[str, Any]:
    """Bytes a step that one replica hands to the collectives, after any warm-up.

    Args:
      s: the setting.
      mesh: if given, also the operands of the compiled exchange's collectives.

    Returns:
      ``text``, ``replicas``, ``uncompressed`` (the gradient), ``handed`` and ``compiled`` (operand
      bytes by kind of collective), ``sent`` (what a replica sends for them on a ring) and
      ``server`` (the same exchange over a parameter server: a replica's bytes up and down).
    """
    params = alone(s.task, split(shapes(s)[0])[0])
    last = s.exchange.phases[-1] if s.exchange.phases else s.exchange
    report = bytes_of(last, params, s.replicas)
    if mesh is not None:
        compiled = operands(lower(last, params, mesh).compile().as_text())
        report['compiled'] = {k: v // last.every for k, v in compiled.items()}
    return {'text': str(s.config.exchange), 'replicas': s.replicas, **report}


def lower(exchange: Exchange, params: Any, mesh: Mesh) -> Any:
    """The exchange by itself over a mesh, lowered: its collectives and no others."""

    def device(grads: Any, state: Any, key: Array) -> Any:
        grads, state = jax.tree.map(lambda a: a[0], (grads, state))
        via = over()
        grads, state = exchange.apply(grads, state, key, via)
        return jax.tree.map(lambda a: a[None], exchange.settle(grads, state, via))

    state = jax.eval_shape(lambda: exchange.init(params, mesh.size))
    stack = lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype)
    run = jax.shard_map(device, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS))
    return jax.jit(run).lower(*jax.tree.map(stack, (params, state)), jax.random.key(0))
