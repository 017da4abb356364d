"""`Exchange` and `Rule`, and the layout of a gradient for a rule: by layer or in buckets.

An exchange maps the gradients of all replicas to one gradient that all replicas share. It consists
of pure functions: ``init`` returns the state of one replica, which is kept beside the optimizer's
state; ``reduce`` runs between the gradient and the optimizer, inside `jax.shard_map`;
``after_update`` runs after the optimizer, for exchanges of parameters (local SGD).

A *rule* is an exchange for a list of arrays, each of which is compressed separately. `per_layer`
gives it the large arrays of a gradient and averages the small ones uncompressed. `bucketed` joins
all arrays first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import Collectives, Grads, Params, Tree
from jaxmp.wire import Like, widened
from jaxmp.wire.words import Origin, check_whole, known, word

State = PyTree  # of arrays: what a replica remembers of an exchange
SMALLEST = 200


def _stay(params: Params, state: State, key: Array, via: Collectives) -> tuple[Params, State]:
    return params, state


@known
class Exchange(NamedTuple):
    """The rule by which replicas share their gradients.

    Attributes:
      init: ``(gradients or their shapes, n) -> state`` of one of n replicas; an exchange that
        shares parameters needs the parameters, from which the replicas start.
      reduce: ``(gradients, state, key, via) -> (gradients, state)``. It returns the gradients for
        the optimizer, the same in all replicas. ``key`` must be the same in all replicas too.
      after_update: ``(params, state, key, via) -> (params, state)``, called after the optimizer
        with the key of ``reduce``.
      by_epoch: the exchanges of the first epochs, the last one also for all later epochs; empty if
        the exchange does not depend on the epoch. Their states have the same structure.
      momentum: the momentum that the exchange applies, so that the optimizer must not; else 0.
      period: number of steps in which ``after_update`` makes each of its calls once.
      shared: ``state -> the part of it that is the same in all replicas`` after every step; None
        if instead the parameters are the same, after every ``period`` steps.
      rounds: the `jaxmp.exchange.rounds.Plan` of an exchange in rounds, whose steps replicas of
        separate JAX worlds take themselves; else None.
      origin: the call that built it, its text and identity (`jaxmp.wire.words`).
    """

    init: Callable[[Params, int], State]
    reduce: Callable[[Grads, State, Array, Collectives], tuple[Grads, State]]
    after_update: Callable[[Params, State, Array, Collectives], tuple[Params, State]] = _stay
    by_epoch: tuple[Exchange, ...] = ()
    momentum: float = 0.0
    period: int = 1
    shared: Callable[[State], Tree] | None = None
    rounds: Any = None
    origin: Origin | None = None

    @property
    def shares_params(self) -> bool:
        """Whether replicas share parameters after the optimizer's update."""
        return self.after_update is not _stay

    def phase(self, epoch: int) -> Exchange:
        """The exchange of an epoch, counted from 0."""
        return self.by_epoch[min(epoch, len(self.by_epoch) - 1)] if self.by_epoch else self


@known
class Rule(NamedTuple):
    """An exchange for a list of arrays; see `Exchange` for the attributes."""

    init: Callable[[Sequence[Array | Like], int], State]
    reduce: Callable[[list[Array], State, Array, Collectives], tuple[list[Array], State]]
    by_epoch: tuple[Rule, ...] = ()
    momentum: float = 0.0
    origin: Origin | None = None


@word
def per_layer(rule: Rule, smallest: int = SMALLEST) -> Exchange:
    """Each array separately; vectors (biases, norms) and small arrays are averaged uncompressed.

    Args:
      rule: the rule for the other arrays.
      smallest: arrays with fewer elements are small; with 0 the rule gets all arrays.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``smallest`` is not a number of elements.
    """
    check_rule('per_layer', rule)
    check_whole('per_layer smallest', smallest, 'a number of elements, 0 or more', 0)

    def large(a: Array | Like) -> bool:
        return smallest == 0 or (len(a.shape) > 1 and math.prod(a.shape) >= smallest)

    def init(grads: Grads, n: int) -> State:
        leaves = jax.tree.leaves(grads)
        small = [a for a in leaves if not large(a) and rule.momentum]
        heavy = [jnp.zeros_like(a) for a in jax.eval_shape(widened, small)]
        return rule.init([a for a in leaves if large(a)], n), heavy

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        via.own(grads)
        leaves, form = jax.tree.flatten(grads)
        state, heavy = state
        big, state = rule.reduce([a for a in leaves if large(a)], state, key, via)
        raw = [a for a in leaves if not large(a)]
        few = via.mean(widened(raw)) if raw else []
        if rule.momentum:
            few = heavy = [rule.momentum * h + a for h, a in zip(heavy, few, strict=True)]
        few = [y.astype(a.dtype) for y, a in zip(few, raw, strict=True)]
        rows = iter(big), iter(few)
        return form.unflatten([next(rows[not large(a)]) for a in leaves]), (state, heavy)

    phases = tuple(per_layer(r, smallest) for r in rule.by_epoch)
    return Exchange(init, reduce, by_epoch=phases, momentum=rule.momentum)


@word
def bucketed(rule: Rule, elements: int = 0) -> Exchange:
    """All arrays, including biases, joined to one vector that is cut into buckets.

    Args:
      rule: the rule for the buckets.
      elements: number of elements per bucket; 0 means one bucket.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``elements`` is negative.
    """
    check_rule('bucketed', rule)
    check_whole('bucketed elements', elements, 'a number of elements, 0 for all', 0)

    def cut(leaves: list[Array]) -> list[Array]:
        joined = jnp.concatenate([a.reshape(-1) for a in leaves])
        ends = list(range(elements, joined.size, elements)) if elements else []
        return jnp.split(joined, ends)

    def init(grads: Grads, n: int) -> State:
        return rule.init(jax.eval_shape(cut, jax.tree.leaves(grads)), n)

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        via.own(grads)
        leaves, form = jax.tree.flatten(grads)
        out, state = rule.reduce(cut(leaves), state, key, via)
        joined, parts = jnp.concatenate(out), []
        for a in leaves:
            parts.append(joined[: a.size].reshape(a.shape).astype(a.dtype))
            joined = joined[a.size :]
        return form.unflatten(parts), state

    phases = tuple(bucketed(r, elements) for r in rule.by_epoch)
    return Exchange(init, reduce, by_epoch=phases, momentum=rule.momentum)


def split(tree: Tree, owners: list[int], count: int) -> list[Tree]:
    """``count`` trees of the same form, with None for the arrays that another one owns."""
    leaves, form = jax.tree.flatten(tree)
    of_part = lambda p: [a if o == p else None for a, o in zip(leaves, owners, strict=True)]
    return [form.unflatten(of_part(p)) for p in range(count)]


def joined(parts: list[Tree], owners: list[int], like: Tree) -> Tree:
    """Inverse of `split`, in the form of ``like``."""
    rows = [iter(jax.tree.leaves(part)) for part in parts]
    return jax.tree.unflatten(jax.tree.structure(like), [next(rows[o]) for o in owners])


def exchange_of(name: str, thing: object) -> Exchange:
    """An exchange of gradients as it is; of a rule, `per_layer` of it.

    Raises:
      TypeError: if ``thing`` is neither.
      ValueError: if it shares parameters.
    """
    if not isinstance(thing, Exchange):
        check_rule(name, thing)
        return per_layer(thing)  # pyright: ignore
    if thing.shares_params:
        raise ValueError(f'{name} takes an exchange of gradients, and {thing} shares parameters')
    return thing


def check_rule(name: str, rule: object) -> None:
    """Raises TypeError unless ``rule`` is a Rule."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f'{name} takes a rule such as all_gather(ef(one_bit)), got '
            f'{getattr(type(rule), "__name__", rule)}'
        )
