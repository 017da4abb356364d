"""How a setting is trained: its state, a step, an epoch.

An epoch is a Python loop over a compiled step on CPU, where convolutions inside a scan are slow
(see `jaxmp.microbatch.loop`), and one compiled scan on an accelerator. Data order is a pure function of
(seed, epoch) and every key one of (seed, step), so a resumed run repeats to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxmp import data, micro
from jaxmp.boundary import Links, value_and_grad
from jaxmp.exchange import Collectives, Exchange
from jaxmp.models.tied import share, tie
from jaxmp.pipeline import Pipeline
from jaxmp.setting import Setting, micro_like
from jaxmp.task import alone, copied, once
from jaxmp.wire import Ctx


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what the checkpoint saves."""

    step: Any
    variables: Any
    opt_state: Any
    links: Any
    key: Array
    exchange: Any = ()


def create(s: Setting) -> TrainState:
    """The state before the first step."""
    key = jax.random.key(s.config.seed)
    like, init = micro_like(s), jax.random.fold_in(key, 0)
    variables, links = s.model.init(init, jnp.zeros(like.shape, like.dtype), train=True)
    variables = tuple(s.task.start(i, v, init) for i, v in enumerate(variables))
    links = micro.link_slots(s.model.boundaries, links, s.config.micro_batches)
    opt_state = jax.jit(s.optimiser.init)(split(variables)[0])
    return TrainState(jnp.zeros((), jnp.int32), variables, opt_state, links, key)


def split(variables: Any) -> tuple[Any, Any]:
    """Parameters, and the other collections, of every stage."""
    params = tuple(v['params'] for v in variables)
    return params, tuple({k: v[k] for k in v if k != 'params'} for v in variables)


def join(params: Any, rest: Any) -> Any:
    """Inverse of `split`."""
    return tuple({'params': p, **r} for p, r in zip(params, rest, strict=True))


Others = tuple[Exchange, Collectives]  # how a replica shares its gradients, and with whom


def train_step(
    s: Setting,
    model: Pipeline,
    state: TrainState,
    batch: dict[str, Array],
    others: Others | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One optimiser step; returns the next state, mean loss and accuracy of the batch.

    Args:
      s: the setting.
      model: in or after its warm-up.
      state: of this replica.
      batch: this replica's.
      others: the other replicas, if there are any.
    """
    key, ctx = step_keys(state.key, state.step, batch['id'])
    if others:
        key, ctx = jax.random.fold_in(key, others[1].index), ctx.fold(others[1].index)
    rest, links, means, grads = gradients(s, model, state, batch, (key, ctx))
    grads = tie(grads) if s.task.tied else grads
    held, params = state.exchange, split(state.variables)[0]
    if others:
        at = jax.random.fold_in(jax.random.fold_in(state.key, state.step + 1), 2)
        grads, held = others[0].apply(alone(s.task, grads), held, at, others[1])
        grads = copied(s.task, grads)
    squares = (square_norm(once(s.task, i, g)) for i, g in enumerate(grads))
    scale = clip_scale(s, sum(squares, jnp.zeros(())))
    params, opt_state = update(s, params, state.opt_state, grads, scale)
    if others:
        params, held = others[0].settle(alone(s.task, params), held, others[1])
        params = copied(s.task, params)
    params = share(params) if s.task.tied else params  # two equal updates may be fused in two ways
    variables = join(params, rest)
    return TrainState(state.step + 1, variables, opt_state, links, state.key, held), means


def gradients(
    s: Setting,
    model: Pipeline,
    state: TrainState,
    batch: dict[str, Array],
    at: tuple[Array, Ctx],
) -> tuple[Any, Links, dict[str, Array], Any]:
    """Both passes: statistics, feedback states, mean loss and accuracy, and the gradients.

    Args:
      s: the setting.
      model: in or after its warm-up.
      state: before the step.
      batch: of the step.
      at: key of the augmentation, and context of the model.
    """
    key, ctx = at
    x = s.task.prepare(batch['x'], key)
    params, rest = split(state.variables)
    cuts, micros = model.boundaries, s.config.micro_batches

    def one(rest: Any, links: Links, m: Array, x: Array, y: Array) -> Any:
        def loss(params: Any, links: Links) -> tuple[Array, tuple[Links, Any]]:
            at = micro.context(ctx, m, micros)
            logits, after, links = model.apply(join(params, rest), links, x, at, train=True)
            value, means = mean_score(s, logits, y)
            return value, (links, (means, split(after)[1]))

        (_, (means, rest)), grads, links = value_and_grad(loss)(params, links)
        return rest, links, (means, grads)

    def add(carry: Any, at: Any) -> Any:
        rest, kept, total = carry
        rest, links, new = one(rest, micro.take_links(cuts, kept, at[0]), *at)
        total = jax.tree.map(lambda t, a: t + a / micros, total, new)
        return rest, micro.put_links(cuts, kept, at[0], links), total

    parts = jnp.arange(micros), *(micro.cut(a, micros) for a in (x, batch['y']))
    first = jax.tree.map(lambda a: a[0], parts)
    shapes = jax.eval_shape(one, rest, micro.take_links(cuts, state.links, 0), *first)[2]
    start = rest, state.links, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)
    rest, links, (means, grads) = micro.loop(add, start, parts)
    return rest, links, means, grads


def step_keys(key: Array, step: Any, ids: Any) -> tuple[Array, Ctx]:
    """Randomness of the augmentation and of the model in the step after ``step``."""
    key = jax.random.fold_in(key, step + 1)
    return jax.random.fold_in(key, 0), Ctx(jax.random.fold_in(key, 1), ids)


def mean_score(s: Setting, logits: Array, y: Array) -> tuple[Array, dict[str, Array]]:
    """The loss of a micro-batch, and the means that are reported."""
    nll, right = s.task.score(logits, y)
    loss = jnp.mean(nll)
    return loss, {'loss': loss, 'accuracy': jnp.mean(right)}


def square_norm(tree: Any) -> Array:
    """Sum of squares of all leaves; summed over the stages, the square of the global norm."""
    return sum((jnp.vdot(a, a) for a in jax.tree.leaves(tree)), jnp.zeros(()))


def clip_scale(s: Setting, square: Any) -> Array:
    """What gradients of the given squared global norm are multiplied with."""
    if not s.config.clip_norm:
        return jnp.ones(())
    return jnp.minimum(1, s.config.clip_norm / (jnp.sqrt(square) + 1e-12))


def update(s: Setting, params: Any, opt_state: Any, grads: Any, scale: Any) -> tuple[Any, Any]:
    """The optimiser's step; the same for a stage alone and for all."""
    grads = jax.tree.map(lambda g: g * scale, grads)
    updates, opt_state = s.optimiser.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


Values = dict[str, Any]  # loss and accuracy of one step, or of each of several
Stopped = Callable[[], bool]
Epoch = Callable[..., Iterator[tuple[TrainState, Values, bool]]]


def never() -> bool:
    """Nobody asked to stop."""
    return False


Step = Callable[[TrainState, dict[str, Array]], tuple[TrainState, dict[str, Array]]]


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
