"""`train_step`: one optimizer step, the same over every runtime.

Both passes are the runtime's; what follows is per stage: replicas exchange gradients, the norm of
all stages decides how they are clipped, the optimizer changes the parameters, and replicas may meet
once more. A function of one stage runs where the stage is (`Runtime.at`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxmp.exchange import Collectives, Exchange
from jaxmp.exchange.settled import reduced
from jaxmp.models.tied import TiedParameter, merged
from jaxmp.runtimes.types import Batch, ByReplica, ModelState, Runtime, each
from jaxmp.training.optimizer import Optimizer, WholeNorm
from jaxmp.wire import widened


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what a checkpoint saves.

    Attributes:
      step: steps done.
      model: parameters, statistics and feedback states.
      opt_state: of each stage's optimizer.
      exchange: of each stage's exchange between replicas.
      key: of the whole run.
      tied: of the sum of a tied parameter's gradients.
    """

    step: Any
    model: ModelState
    opt_state: Any
    exchange: Any
    key: Array
    tied: Any = ()


class Rules(NamedTuple):
    """What a step does with the gradients.

    Attributes:
      optimizer: of a stage's parameters; it sees the stage alone, or is a `WholeNorm`.
      exchange: how replicas share a stage's gradients.
      clip_norm: largest global norm over all stages; 0 does not clip.
      tied: the parameter that the first and the last of several stages share, or None.
    """

    optimizer: Optimizer
    exchange: Exchange
    clip_norm: float = 0.0
    tied: TiedParameter | None = None


class Across(NamedTuple):
    """What a step needs across stages, wherever they are.

    Attributes:
      total: sums numbers by stage; of several replicas, an array of their sums.
      tie: ``(gradients, state, key) -> (gradients, state)`` with the sum of both tied gradients in
        both stages.
      share: ``parameters -> parameters`` with equal copies, where two programs may round apart.
      init: the state of ``tie``.
      once: whether one exchange between replicas serves both copies of a tied parameter.
    """

    total: Callable[[dict[int, Any]], Any]
    tie: Callable[[dict[int, Any], Any, Array], tuple[dict[int, Any], Any]]
    share: Callable[[dict[int, Any]], dict[int, Any]] = lambda params: params
    init: Callable[[], Any] = tuple
    once: bool = False


def create(
    rules: Rules,
    runtime: Runtime,
    across: Across,
    key: Array,
    start: Callable[[int, Any, Array], Any] = lambda stage, params, key: params,
) -> TrainState:
    """The state before the first step.

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      across: what is needed over all stages.
      key: of the run.
      start: ``(stage, parameters, key) -> parameters``, which may be read from a file.
    """
    first = jax.random.fold_in(key, 0)
    model = runtime.init(first)
    model = model._replace(params={s: start(s, p, first) for s, p in model.params.items()})
    opt_state, exchange = {}, {}
    for s in runtime.stages:
        parts = halves(rules, runtime, s, model.params[s])
        opt_state[s] = [runtime.at(s, _initialize(rules.optimizer), p) for p in parts]
        exchange[s] = [runtime.at(s, _first(rules.exchange), p) for p in parts]
        if across.once and s and len(parts) > 1:
            exchange[s][0] = ()
    return TrainState(jnp.zeros((), jnp.int32), model, opt_state, exchange, key, across.init())


def halves(rules: Rules, runtime: Runtime, stage: int, tree: Any) -> list[Any]:
    """What is exchanged and updated apart: a tied parameter, and the rest."""
    if not (rules.tied and stage in (0, runtime.last)):
        return [tree]
    return [each(rules.tied.alone, tree), each(rules.tied.without, tree)]


def whole(parts: list[Any]) -> Any:
    """Inverse of `halves`."""
    if len(parts) == 1:
        return parts[0]
    alone, rest = parts
    if isinstance(alone, ByReplica):
        return ByReplica({r: merged(t, rest[r]) for r, t in alone.items()})
    return merged(alone, rest)


def train_step(
    rules: Rules, runtime: Runtime, across: Across, at: tuple[TrainState, Batch]
) -> tuple[TrainState, Any]:
    """The next state, and the means of the batch (None where the last stage is not).

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      across: what is needed over all stages.
      at: the state before, and the batch of all replicas of the runtime.
    """
    state, batch = at
    key = jax.random.fold_in(state.key, state.step + 1)
    means, grads, model = runtime.value_and_grad(state.model, batch, key)
    tied = state.tied
    if rules.tied:  # streams 0 and 1 of a step are the model's, 2 the replicas'
        grads, tied = across.tie(grads, tied, jax.random.fold_in(key, 3))
    words = jax.random.key_data(jax.random.fold_in(key, 2))
    shared, held, squares = {}, {}, {}
    normed = bool(rules.clip_norm) or isinstance(rules.optimizer, WholeNorm)
    both = jnp.uint32(runtime.last + 1)  # one stream for both tables
    streams = lambda halves, s: [*[both] * (halves - 1), jnp.uint32(s)]
    once = lambda halves, s, stream: across.once and bool(s) and halves > 1 and stream is both
    for s in runtime.stages:
        rows, own = [], halves(rules, runtime, s, grads[s])
        for half, kept, stream in zip(own, state.exchange[s], streams(len(own), s), strict=True):
            if once(len(own), s, stream):
                rows.append((shared[0][0], (), ()))
                continue
            share = _exchanged(rules.exchange, normed)
            rows.append(parts(runtime.at(s, share, half, kept, words, stream)))
        shared[s], held[s] = [r[0] for r in rows], [r[1] for r in rows]
        counted = rows[1:] if len(rows) > 1 and s == runtime.last else rows
        squares[s] = [r[2] for r in counted]
    scale, square = np.float32(1), across.total(squares) if normed else np.float32(0)
    if rules.clip_norm:
        scale = clip_scale(rules.clip_norm, square)
    params, opt_state = {}, {}
    for s in runtime.stages:
        own, rows = halves(rules, runtime, s, state.model.params[s]), []
        given = zip(own, state.opt_state[s], shared[s], held[s], strict=True)
        for row, stream in zip(given, streams(len(own), s), strict=True):
            exchange = None if once(len(own), s, stream) else rules.exchange
            update = _updated(rules.optimizer, exchange)
            rows.append(parts(runtime.at(s, update, *row, (scale, square), words, stream)))
        params[s] = whole([r[0] for r in rows])
        opt_state[s], held[s] = [r[1] for r in rows], [r[2] for r in rows]
    model = model._replace(params=across.share(params) if rules.tied else params)
    return TrainState(state.step + 1, model, opt_state, held, state.key, tied), means


def clip_scale(limit: float, square: Any) -> Array:
    """What gradients of the given squared global norm are multiplied with."""
    return jnp.minimum(1, limit / (jnp.sqrt(square) + 1e-12))


def parts(found: Any) -> tuple[Any, Any, Any]:
    """A triple; of triples by replica, the three by replica."""
    if not isinstance(found, ByReplica):
        return found
    return tuple(each(lambda t, i=i: t[i], found) for i in range(3))  # pyright: ignore


# Functions of one replica of a stage; cached, so that each is compiled once.


@functools.lru_cache(maxsize=16)
def _initialize(optimizer: Optimizer) -> Callable[..., Any]:
    return lambda via, params: optimizer.init(params)


@functools.lru_cache(maxsize=16)
def _first(exchange: Exchange) -> Callable[..., Any]:
    return lambda via, params: exchange.init(params, via.size) if via else ()


@functools.lru_cache(maxsize=16)
def _exchanged(exchange: Exchange, norm: bool) -> Callable[..., Any]:
    """The shared gradients, the next state, and the squared norm where it is asked for."""

    def run(via: Collectives | None, grads: Any, held: Any, words: Array, stream: Any) -> Any:
        if via:
            grads, held = reduced(exchange, grads, held, _key(words, stream), via)
        return grads, held, squared_norm(grads if norm else ())

    return run


def squared_norm(tree: Any) -> Array:
    """The sum of all squares, in float32 or wider."""
    return sum((jnp.vdot(g, g) for g in jax.tree.leaves(widened(tree))), jnp.zeros(()))


@functools.lru_cache(maxsize=16)
def _updated(optimizer: Optimizer, exchange: Exchange | None) -> Callable[..., Any]:
    """The next parameters, optimizer state and exchange state; None leaves the exchange out."""

    def run(via: Collectives | None, *given: Any) -> Any:
        params, opt_state, grads, held, norm, words, stream = given
        scale, square = (a[via.index] if via and a.ndim else a for a in norm)
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        if isinstance(optimizer, WholeNorm):
            others = jnp.sqrt(jnp.maximum(0, square * scale**2 - squared_norm(grads)))
            updates, opt_state = optimizer.update(grads, others, opt_state, params)
        else:
            updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if via and exchange:
            params, held = exchange.after_update(params, held, _key(words, stream), via)
        return params, opt_state, held

    return run


def _key(words: Array, stream: Any) -> Array:
    """The key of a step for a stage or, with a stream of its own, the tied parameter."""
    return jax.random.fold_in(jax.random.wrap_key_data(words), stream)
