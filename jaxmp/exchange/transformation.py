"""`transform`: an exchange as an optax gradient transformation, for use under `jax.shard_map`.

Each replica has its own state. All arrays of the state have a leading axis of replicas, with n rows
outside `jax.shard_map` and one row inside, so that ``PartitionSpec(axis)`` is the spec of the whole
state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Int, PyTree, UInt32

from jaxmp.exchange.collectives import AXIS, Collectives, Grads, Params, Tree, over
from jaxmp.exchange.layout import Exchange, State
from jaxmp.exchange.settled import reduced
from jaxmp.exchange.text import parse
from jaxmp.wire import vary


class ExchangeState(NamedTuple):
    """The state of `transform`, with one row per replica in each array.

    Attributes:
      step: number of updates so far, the same in all rows.
      key: data of the random key, the same in all rows.
      held: the state of the exchange.
      inner: the state of the optimizer.
    """

    step: Int[Array, ' n']
    key: UInt32[Array, 'n words']
    held: State
    inner: optax.OptState


def transform(
    exchange: Exchange | str,
    optimizer: optax.GradientTransformation | None = None,
    *,
    axis: str = AXIS,
    key: Array | int = 0,
    replicas: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """The exchange of gradients between replicas as an optax gradient transformation.

    ``optax.chain(transform('all_gather(ef(one_bit))'), optax.sgd(0.1))`` and
    ``transform('all_gather(ef(one_bit))', optax.sgd(0.1))`` give the same updates. The second form
    also takes an exchange of parameters (`local_sgd`, `diloco`). With parameters p and the
    optimizer's update u it returns the shared parameters minus p in a step that shares (of local
    SGD ``mean_i(p_i + u_i) - p``), which added to p are the shared ones up to the rounding of that
    sum, and u in all other steps.

    ``update`` runs inside `jax.shard_map`, ``init`` inside or outside. Stochastic codecs draw from
    the key and the number of the step. A rule with momentum (`momentum`, `dgc`) needs an optimizer
    without momentum.

    Args:
      exchange: an exchange or its text.
      optimizer: computes updates from the shared gradients; with None the updates are the
        gradients.
      axis: name of the mesh axis of the replicas.
      key: a random key or a seed, the same in all replicas.
      replicas: number of replicas n; needed only for ``init`` outside `jax.shard_map`.

    Raises:
      SpecError: if the text names no exchange.
      ValueError: if the exchange needs the optimizer, or changes with the epoch.

    >>> import jax, optax
    >>> state = transform('all_gather(ef(one_bit))', replicas=4).init({'w': jnp.zeros((20, 10))})
    >>> {a.shape[0] for a in jax.tree.leaves(state)}
    {4}
    """
    e = parse(exchange) if isinstance(exchange, str) else exchange
    _check(e, optimizer)
    inner = optax.with_extra_args_support(optimizer or optax.identity())
    root = lambda: jax.random.key(key) if isinstance(key, int) else key

    def init(params: Params) -> ExchangeState:
        inside = _size(axis)
        n = _replicas(axis, inside, replicas)
        step, words = jnp.zeros((), jnp.int32), jax.random.key_data(root())
        state = ExchangeState(step, words, e.init(params, n), inner.init(params))
        return _row(state, axis) if inside else _rows(state, n)

    def update(
        updates: Grads, state: PyTree, params: Params = None, **extra: Any
    ) -> tuple[Grads, ExchangeState]:
        _check_inside(axis, state, e.shares_params and params is None)
        via, before = over(axis), jax.tree.map(lambda a: a[0], state)
        run = jax.random.wrap_key_data(before.key, impl=jax.random.key_impl(root()))
        # Replicas draw from one key; where theirs must differ, the rule folds their numbers in.
        step_key = jax.random.fold_in(run, before.step)
        updates, memory = reduced(e, updates, before.held, step_key, via)
        updates, after = inner.update(updates, before.inner, params, **extra)
        if e.shares_params:
            updates, memory = _to_shared(e, (params, updates), memory, (step_key, via))
        return updates, _row(ExchangeState(before.step + 1, before.key, memory, after), axis)

    return optax.GradientTransformationExtraArgs(init, update)


def _to_shared(
    e: Exchange, proposed: tuple[Params, Grads], memory: State, step: tuple[Array, Collectives]
) -> tuple[Grads, State]:
    """Updates that lead from a replica's parameters to the shared ones; unchanged where equal."""
    params, updates = proposed
    alone = optax.apply_updates(params, updates)
    shared, memory = e.after_update(alone, memory, *step)

    def change(p: Array, u: Array, a: Array, s: Array) -> Array:
        return jnp.where(s == a, u, (s - p).astype(u.dtype))

    return jax.tree.map(change, params, updates, alone, shared), memory


def _row(tree: Tree, axis: str) -> Tree:
    """The state of this replica as one row."""
    return jax.tree.map(lambda a: vary(jnp.asarray(a), [axis])[None], tree)


def _rows(tree: Tree, n: int) -> Tree:
    """The same state in n rows."""
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *jnp.shape(a))), tree)


def _size(axis: str) -> int | None:
    """The number of replicas inside `jax.shard_map`, None outside."""
    try:
        return lax.axis_size(axis)
    except NameError:
        return None


def _replicas(axis: str, inside: int | None, stated: int | None) -> int:
    n = inside or stated
    if not n:
        raise ValueError(
            f'init is called outside jax.shard_map, where the number of replicas along {axis!r} '
            'is not known; give transform(..., replicas=n), or call init inside'
        )
    if stated not in (None, n):
        raise ValueError(
            f'transform(replicas={stated}), and the mesh axis {axis!r} has {n} replicas; give '
            f'replicas={n} or none'
        )
    return n


def _check(e: Exchange, optimizer: object) -> None:
    if e.shares_params and optimizer is None:
        raise ValueError(
            f'{e} shares parameters after the update, so it needs the optimizer that makes the '
            f"update; write transform('{e}', optax.sgd(0.1)) in place of optax.chain"
        )
    if e.by_epoch:
        raise ValueError(
            f'{e} changes with the epoch, which a gradient transformation does not know; in epoch '
            f"t use transform(parse('{e}').phase(t)); its states have the same structure"
        )


def _check_inside(axis: str, state: ExchangeState, params_missing: bool) -> None:
    if not (n := _size(axis)):
        raise ValueError(
            f'update is called where there is no mesh axis {axis!r}; call it inside jax.shard_map '
            "over a mesh that has this axis, or name the mesh's axis in transform(..., axis=...)"
        )
    if (shape := jnp.shape(state.step)) != (1,):
        raise ValueError(
            f'the state of transform has one row per replica, got a step of shape {shape}; '
            f"give the state PartitionSpec('{axis}') in in_specs and out_specs of jax.shard_map, "
            f'and outside call init with transform(..., replicas={n})'
        )
    if params_missing:
        raise ValueError(
            'an exchange of parameters needs the parameters; call update(grads, state, params)'
        )
