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
import optax
from jaxtyping import Array

from jaxmp.exchange import Collectives, Exchange
from jaxmp.runtimes.types import Batch, ModelState, Runtime


class TrainState(flax.struct.PyTreeNode):
    """Everything a step changes: one pytree, and what a checkpoint saves.

    Attributes:
      step: steps done.
      model: parameters, statistics and feedback states.
      opt_state: of each stage's optimizer.
      exchange: of each stage's exchange between replicas.
      key: of the whole run.
    """

    step: Any
    model: ModelState
    opt_state: Any
    exchange: Any
    key: Array


class Rules(NamedTuple):
    """What a step does with the gradients.

    Attributes:
      optimizer: of a stage's parameters; elementwise, or it sees the stage alone.
      exchange: how replicas share a stage's gradients.
      clip_norm: largest global norm over all stages; 0 does not clip.
      total: sums numbers by stage over all processes.
    """

    optimizer: optax.GradientTransformation
    exchange: Exchange
    clip_norm: float = 0.0
    total: Callable[[dict[int, Any]], Any] = lambda squares: sum(squares.values())


def create(rules: Rules, runtime: Runtime, key: Array) -> TrainState:
    """The state before the first step."""
    model = runtime.init(jax.random.fold_in(key, 0))
    opt_state, held = {}, {}
    for s in runtime.stages:
        opt_state[s] = runtime.at(s, _initialize(rules.optimizer), model.params[s])
        held[s] = runtime.at(s, _first(rules.exchange), model.params[s])
    return TrainState(jnp.zeros((), jnp.int32), model, opt_state, held, key)


def train_step(
    rules: Rules, runtime: Runtime, state: TrainState, batch: Batch
) -> tuple[TrainState, Any]:
    """The next state, and the means of the batch (None where the last stage is not).

    Args:
      rules: what is done with the gradients.
      runtime: how the stages run.
      state: before.
      batch: of all replicas of the runtime.
    """
    key = jax.random.fold_in(state.key, state.step + 1)
    means, grads, model = runtime.value_and_grad(state.model, batch, key)
    words = jax.random.key_data(jax.random.fold_in(key, 2))
    params, opt_state, held, squares = {}, {}, {}, {}
    for s in runtime.stages:
        share = _exchanged(rules.exchange, bool(rules.clip_norm))
        grads[s], held[s], squares[s] = _parts(
            runtime.at(s, share, grads[s], state.exchange[s], words, s)
        )
    scale = clip_scale(rules.clip_norm, rules.total(squares)) if rules.clip_norm else 1.0
    for s in runtime.stages:
        params[s], opt_state[s], held[s] = _parts(
            runtime.at(
                s, _updated(rules.optimizer, rules.exchange), state.model.params[s],
                state.opt_state[s], grads[s], held[s], scale,
            )
        )  # fmt: skip
    model = model._replace(params=params)
    return TrainState(state.step + 1, model, opt_state, held, state.key), means


def clip_scale(limit: float, square: Any) -> Array:
    """What gradients of the given squared global norm are multiplied with."""
    return jnp.minimum(1, limit / (jnp.sqrt(square) + 1e-12))


def _parts(found: Any) -> tuple[Any, Any, Any]:
    """A triple, or the triple of a dict by replica as three such dicts."""
    if isinstance(found, tuple):
        return found
    return tuple({r: t[i] for r, t in found.items()} for i in range(3))  # pyright: ignore


# Functions of one replica of a stage; cached, so that each is compiled once.


@functools.lru_cache(maxsize=16)
def _initialize(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    return lambda via, params: optimizer.init(params)


@functools.lru_cache(maxsize=16)
def _first(exchange: Exchange) -> Callable[..., Any]:
    return lambda via, params: exchange.init(params, via.size) if via else ()


@functools.lru_cache(maxsize=16)
def _exchanged(exchange: Exchange, norm: bool) -> Callable[..., Any]:
    """The shared gradients, the next state, and the squared norm where it is asked for."""

    def run(via: Collectives | None, grads: Any, held: Any, words: Array, stage: Any) -> Any:
        if via:
            key = jax.random.fold_in(jax.random.wrap_key_data(words), stage)
            grads, held = exchange.apply(grads, held, key, via)
        leaves = jax.tree.leaves(grads) if norm else []
        return grads, held, sum((jnp.vdot(g, g) for g in leaves), jnp.zeros(()))

    return run


@functools.lru_cache(maxsize=16)
def _updated(optimizer: optax.GradientTransformation, exchange: Exchange) -> Callable[..., Any]:
    """The next parameters, optimizer state and exchange state."""

    def run(via: Collectives | None, *given: Any) -> Any:
        params, opt_state, grads, held, scale = given
        grads = jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        if via:
            params, held = exchange.settle(params, held, via)
        return params, opt_state, held

    return run
