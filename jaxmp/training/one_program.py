"""Training in one program, alone or as replicas over the mesh axis ``'replica'``.

An epoch is a Python loop over a compiled step on CPU, where convolutions inside a scan are slow
(see `jaxmp.microbatch.loop`), and one compiled scan on an accelerator. Data order is a pure
function of (seed, epoch) and every key one of (seed, step), so a resumed run repeats to the bit.

Replica i takes the i-th of n equal cuts of a step's batch, runs the whole model on it, and shares
its gradients. What a replica holds stands under a leading axis n: only the exchange keeps the
copies equal, and checksums verify it.
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

from jaxmp import data
from jaxmp.boundary import Links
from jaxmp.devices import device_mesh
from jaxmp.exchange import AXIS, Collectives, bytes_of, operands, over
from jaxmp.models.tied import share, tie
from jaxmp.runtimes.links import open_links
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.types import ModelState
from jaxmp.setting import Setting
from jaxmp.team import Team, together
from jaxmp.training import portable, replicas
from jaxmp.training.engine import (
    Engine,
    Epoch,
    Stopped,
    Values,
    cuts_to_score,
    evaluation_key,
    keeps,
    means,
    model_of,
    rules_of,
    sums,
)
from jaxmp.training.portable import Portable
from jaxmp.training.step import Across, Rules, TrainState, begin, train_step

Step = Callable[[TrainState, dict[str, Array]], tuple[TrainState, Values]]
EACH = ('model', 'opt_state', 'exchange', 'tied')  # of a train state, one per replica


def one_program(s: Setting, team: Team) -> Engine:
    """The engine of ``config.runtime = 'local'``.

    Args:
      s: the setting, the same in all processes.
      team: the processes, which hold equally many replicas.

    Raises:
      ValueError: if there are fewer devices than replicas, or they do not spread evenly.
    """
    if s.replicas == 1:
        return _alone(s)
    mesh = device_mesh(**{AXIS: s.replicas})
    if team.count > 1:
        open_links(mesh)
    score = evaluator(s)

    @functools.lru_cache(maxsize=1)
    def compiled(warming: bool, rules: Rules) -> Epoch:
        step = replica_step(s, step_of(s, warming, rules), mesh)
        if team.count == 1:
            return functools.partial(_averaged, epoch_form()(s, step))
        return functools.partial(_agreed, s, team, epoch_by_step(s, step))

    return Engine(
        create=lambda seeded: spread(create(seeded, s.replicas), mesh),
        epoch=lambda n: compiled(n < s.config.warmup_epochs, rules_of(s, n)),
        evaluate=lambda state, compressed: score(one_of(state, mesh), compressed),
        export=lambda state: export(s, state, mesh),
        load=lambda state, found: load(s, state, found, mesh),
        moved=lambda: {'processes': team.count, 'exchange': traffic(s, mesh)},
        check=lambda state: check(s, state, mesh),
        weights=lambda state: variables_of(one_of(state, mesh)),
    )


def _alone(s: Setting) -> Engine:
    @functools.lru_cache(maxsize=2)  # in the warm-up and after it, for run after run
    def compiled(warming: bool) -> Epoch:
        return epoch_form()(s, functools.partial(step_of(s, warming, rules_of(s, 0)), None))

    return Engine(
        create=create,
        epoch=lambda n: compiled(n < s.config.warmup_epochs),
        evaluate=evaluator(s),
        export=lambda state: export(s, state),
        load=lambda state, found: load(s, state, found),
        moved=dict,
        weights=variables_of,
    )


# State and step of a replica.


def _across() -> Across:
    def both(grads: dict[int, Any], held: Any, key: Array) -> tuple[dict[int, Any], Any]:
        del key
        return dict(enumerate(tie(list(grads.values())))), held

    def total(squares: dict[int, list[Any]]) -> Array:
        return sum((x for row in squares.values() for x in row), jnp.zeros(()))

    shared = lambda params: dict(enumerate(share(list(params.values()))))
    return Across(total, both, shared, once=True)


def create(s: Setting, n: int = 1) -> TrainState:
    """The state before the first step, of one of n replicas."""
    key = jax.random.key(s.config.seed)
    first = jax.random.fold_in(key, 0)
    local = Local(model_of(s, s.model.boundaries))
    model = local.init(first)
    start = lambda i, p: s.task.start(i, {'params': p}, first)['params']
    model = model._replace(params={i: start(i, p) for i, p in model.params.items()})
    via = Collectives(n, 0, *(lambda tree: tree,) * 3) if n > 1 else None
    return begin(rules_of(s, 0), _Placed(local, via), _across(), (model, key))


class _Placed(Local):
    """A local runtime whose functions of a stage are compiled by themselves."""

    def __init__(self, local: Local, via: Collectives | None) -> None:
        """Takes over ``local``; ``via`` has no others behind it, it tells their number."""
        super().__init__(local.model, local.train, via)

    def at(self, stage: int, f: Callable[..., Any], *trees: Any) -> Any:
        """See `Runtime`."""
        return jax.jit(lambda *t: super(_Placed, self).at(stage, f, *t))(*trees)


def step_of(s: Setting, warming: bool, rules: Rules) -> Callable[..., tuple[TrainState, Values]]:
    """``(collectives or None, state, batch) -> (state, loss and accuracy)`` of a replica."""
    model = model_of(s, (s.warm_model if warming else s.model).boundaries)

    def step(via: Collectives | None, state: TrainState, batch: dict[str, Array]) -> Any:
        state, found = train_step(rules, Local(model, via=via), _across(), (state, batch))
        return state, found[1]

    return step


def variables_of(state: TrainState) -> tuple[Any, ...]:
    """Flax variables of all stages."""
    params, rest = state.model[:2]
    return tuple({'params': params[i], **rest[i]} for i in sorted(params))


def evaluator(s: Setting) -> Callable[[TrainState, bool], dict[str, float]]:
    """A function of (state, compressed): mean loss and accuracy on the whole test split."""
    runtimes = {c: Local(model_of(s, cuts_to_score(s, c)), train=False) for c in (False, True)}
    size = s.config.batch_size // s.replicas  # buffers are per position in a replica's batch

    @functools.partial(jax.jit, static_argnums=0)
    def step(compressed: bool, state: ModelState, batch: dict[str, Array], key: Array) -> Any:
        output, links = runtimes[compressed].predict(state, batch, key)
        frozen = s.config.eval_feedback == 'frozen'
        return sums(s, output, batch), state.feedback if frozen else links

    def run(state: TrainState, compressed: bool) -> dict[str, float]:
        links, total = state.model.feedback, np.zeros(2)
        kept = zip(keeps(s, compressed), links.fwd, links.bwd, strict=True)
        ends = [(f, b) if k else (((), ()), b if compressed else ((), ())) for k, f, b in kept]
        scored = state.model._replace(feedback=Links(*map(tuple, zip(*ends, strict=True))))
        for i, batch in enumerate(data.batches(s.data.test, size, pad=True)):
            new, after = step(compressed, scored, batch, evaluation_key(state.key, i))
            scored = scored._replace(feedback=after)
            total += np.asarray(new)
        return means(s, total)

    return run


# Epochs.


def never() -> bool:
    """Nobody asked to stop."""
    return False


def epoch_by_step(s: Setting, step: Step) -> Epoch:
    """An epoch as a loop over a compiled step: the form for CPU."""
    step = jax.jit(step, donate_argnums=0)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        for batch in data.batches(s.data.train, s.config.batch_size, order):
            state, values = step(state, batch)
            yield state, values, stopped()

    return run


def epoch_by_scan(s: Setting, step: Step) -> Epoch:
    """An epoch inside one compiled scan, the data on the device: the form for accelerators."""
    held = tuple(jnp.asarray(a) for a in s.data.train)

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(state: TrainState, x: Array, y: Array, rows: Array) -> Any:
        def one(state: TrainState, at: Array) -> tuple[TrainState, dict[str, Array]]:
            return step(state, {'x': x[at], 'y': y[at], 'id': at})

        return jax.lax.scan(one, state, rows)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        steps = len(order) // s.config.batch_size
        rows = order[: steps * s.config.batch_size].reshape(steps, -1)
        state, values = scan(state, *held, rows)
        yield state, values, stopped()

    return run


def epoch_form() -> Callable[[Setting, Step], Epoch]:
    """How an epoch runs on this backend."""
    return epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan


# Replicas.


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
    parts = _joined((state.step, state.model, words), mesh)
    step, model, words = jax.tree.map(lambda a: a.addressable_data(0), parts)
    return TrainState(step, model, (), (), jax.random.wrap_key_data(words))


@functools.partial(jax.jit, static_argnums=1)
def _joined(parts: Any, mesh: Mesh) -> Any:
    step, model, words = parts
    params, rest = (jax.tree.map(lambda a: jnp.mean(a, 0), t) for t in model[:2])
    model = ModelState(params, rest, jax.tree.map(lambda a: a[0], model.feedback))
    return lax.with_sharding_constraint((step, model, words), NamedSharding(mesh, P()))


def replica_step(s: Setting, step: Callable[..., Any], mesh: Mesh) -> Step:
    """A step of all replicas; loss and accuracy come one per replica.

    Args:
      s: the setting.
      step: of one replica, from `step_of`.
      mesh: the replicas' devices.
    """
    del s

    def device(state: TrainState, batch: dict[str, Array]) -> Any:
        own = {name: jax.tree.map(lambda a: a[0], getattr(state, name)) for name in EACH}
        after, values = step(over(), state.replace(**own), batch)
        kept = {name: jax.tree.map(lambda a: a[None], getattr(after, name)) for name in EACH}
        return after.replace(**kept), jax.tree.map(lambda a: a[None], values)

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
    s: Setting, team: Team, steps: Epoch, state: Any, order: np.ndarray, stopped: Stopped = never
) -> Iterator:
    """An epoch over processes, each of which knows the values of its own replicas."""

    def share(values: Values) -> Values:
        own = {k: [float(x.data[0]) for x in v.addressable_shards] for k, v in values.items()}
        return {k: sum(x) / s.replicas for k, x in own.items()}

    made = ((after, values) for after, values, _ in steps(state, order))
    yield from together(team, made, len(order) // s.config.batch_size, stopped, share)


# Checkpoints.


def parts(state: TrainState) -> dict[int, dict[str, Any]]:
    """What each stage of a replica holds."""
    model = state.model
    return {
        i: {
            'params': model.params[i],
            'model_state': model.model_state[i],
            'opt_state': state.opt_state[i],
            'exchange': state.exchange[i],
            'feedback': portable.feedback_of(model.feedback, i),
            'tied': (),
        }
        for i in model.params
    }


def rows_of(state: TrainState, mesh: Mesh) -> dict[int, TrainState]:
    """The replicas of this process, each on its device."""
    here = {r: d for r, d in enumerate(mesh.devices) if d.process_index == jax.process_index()}
    own = lambda a, d: next(x.data for x in a.addressable_shards if x.device == d)[0]
    take = lambda d: {n: jax.tree.map(lambda a: own(a, d), getattr(state, n)) for n in EACH}
    return {r: state.replace(**take(d)) for r, d in here.items()}


def export(s: Setting, state: TrainState, mesh: Mesh | None = None) -> Portable:
    """See `Engine`."""
    rows = {0: state} if mesh is None else rows_of(state, mesh)
    cuts, last = s.model.boundaries, len(s.task.stages) - 1
    found = {
        portable.name(i, r): portable.part(i, last, tree, cuts)
        for r, row in rows.items()
        for i, tree in parts(row).items()
    }
    words = jax.random.key_data(state.key)
    return Portable(np.asarray(state.step), np.asarray(words.addressable_data(0)), found)


def load(s: Setting, state: TrainState, found: Portable, mesh: Mesh | None = None) -> TrainState:
    """See `Engine`."""
    rows = {0: state} if mesh is None else rows_of(state, mesh)
    loaded = {r: _taken(s, row, r, found) for r, row in rows.items()}
    if mesh is None:
        return jax.tree.map(jnp.asarray, loaded[0])
    place = NamedSharding(mesh, P(AXIS))

    def whole(*own: Any) -> Array:
        rows = np.stack([np.asarray(a) for a in own])
        return jax.make_array_from_process_local_data(place, rows, (mesh.size, *rows.shape[1:]))

    each = {n: jax.tree.map(whole, *(getattr(t, n) for t in loaded.values())) for n in EACH}
    first, shared = next(iter(loaded.values())), NamedSharding(mesh, P())
    step, words = np.asarray(first.step), np.asarray(found.key)
    step, key = jax.jit(lambda n, w: (n, jax.random.wrap_key_data(w)), out_shardings=shared)(
        step, words
    )
    return TrainState(step=step, key=key, **each)


def _taken(s: Setting, state: TrainState, r: int, found: Portable) -> TrainState:
    """A replica's state with what was found of its stages."""
    cuts = s.model.boundaries
    own = {i: portable.whole((i, r), tree, found, cuts) for i, tree in parts(state).items()}
    by = lambda name: {i: tree[name] for i, tree in own.items()}
    links = portable.links_of(list(by('feedback').values()))
    model = ModelState(by('params'), by('model_state'), links)
    key = jax.random.wrap_key_data(jnp.asarray(found.key))
    return TrainState(np.asarray(found.step, np.int32), model, by('opt_state'), by('exchange'), key)


def check(s: Setting, state: TrainState, mesh: Mesh) -> None:
    """Raises DriftError if replicas differ."""
    if int(state.step) % s.exchange.every == 0:  # not between two averages of local SGD
        sums = np.asarray(_checksums(state.model.params, mesh))
        replicas.compare(sums, state.model.params, int(state.step))


@functools.partial(jax.jit, static_argnums=1)
def _checksums(params: Any, mesh: Mesh) -> Array:
    rows = jax.vmap(replicas.checksums)(params)
    return lax.with_sharding_constraint(rows, NamedSharding(mesh, P()))


# Bytes.


def traffic(s: Setting, mesh: Mesh) -> dict[str, Any]:
    """Bytes a step of a replica, and the operands of the compiled exchange's collectives."""

    def report(exchange: Any, params: Any, n: int) -> dict[str, Any]:
        compiled = operands(lower(exchange, params, mesh).compile().as_text())
        compiled = {k: v // exchange.every for k, v in compiled.items()}
        return {**bytes_of(exchange, params, n), 'compiled': compiled}

    return replicas.traffic(s, exchanged_shapes(s), report)


def exchanged_shapes(s: Setting) -> list[Any]:
    """Shapes of what a replica's stages exchange, a tied table once."""
    model = jax.eval_shape(Local(model_of(s, s.model.boundaries)).init, jax.random.key(0))
    params = list(model.params.values())
    if not s.task.tied:
        return params
    rest = lambda p: {k: v for k, v in p.items() if k != 'wte'}
    return [{'wte': params[0]['wte']}, *map(rest, params)]


def lower(exchange: Any, params: Any, mesh: Mesh) -> Any:
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
