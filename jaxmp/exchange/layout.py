"""What an exchange is, and how a gradient is laid out for it: by layers, or in one piece.

An exchange turns every replica's gradient into one that all share. It is two pure functions:
``init`` makes the state of one replica, which stands beside the optimiser's, and ``apply`` is
called between the gradient and the optimiser, inside `jax.shard_map`. The two moments are
kept apart because replicas may also meet after the optimiser (`settle`: local SGD).

A *rule* is an exchange for a list of arrays, every one compressed by itself. `per_layer` gives it
the large arrays of a gradient and averages the small ones as they are; `bucketed` joins everything.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives
from jaxmp.words import Origin, known, word

State = Any
SMALLEST = 200


def _stay(params: Any, state: State, via: Collectives) -> tuple[Any, State]:
    del via
    return params, state


@known
class Exchange(NamedTuple):
    """How replicas share their gradients.

    Attributes:
      init: ``(gradients or their shapes, n) -> state`` of one of n replicas.
      apply: ``(gradients, state, key, via) -> (gradients, state)``: what the optimiser gets, the
        same in all replicas. ``key`` must be the same in all replicas too.
      settle: ``(params, state, via) -> (params, state)``, called after the optimiser.
      phases: those of the first epochs, the last for all others; empty if nothing changes. States
        are alike.
      momentum: what the optimiser must leave out because the exchange does it; 0 for nothing.
      every: settles in every so many steps.
      origin: the call that made it, its text and identity (`jaxmp.words`).
    """

    init: Callable[[Any, int], State]
    apply: Callable[[Any, State, Any, Collectives], tuple[Any, State]]
    settle: Callable[[Any, State, Collectives], tuple[Any, State]] = _stay
    phases: tuple[Exchange, ...] = ()
    momentum: float = 0.0
    every: int = 1
    origin: Origin | None = None

    def phase(self, epoch: int) -> Exchange:
        """What is exchanged in an epoch, counted from 0."""
        return self.phases[min(epoch, len(self.phases) - 1)] if self.phases else self


@known
class Rule(NamedTuple):
    """An exchange for a list of arrays; see `Exchange` for the attributes."""

    init: Callable[[list[Any], int], State]
    apply: Callable[[list[Array], State, Any, Collectives], tuple[list[Array], State]]
    phases: tuple[Rule, ...] = ()
    momentum: float = 0.0
    origin: Origin | None = None


@word
def per_layer(rule: Rule, smallest: int = SMALLEST) -> Exchange:
    """Every array by itself; vectors (biases, norms) and small arrays are averaged as they are.

    Args:
      rule: for the other arrays.
      smallest: arrays with fewer elements are small; 0 gives the rule everything.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``smallest`` is not a number of elements.
    """
    check_rule('per_layer', rule)
    if isinstance(smallest, bool) or not isinstance(smallest, int) or smallest < 0:
        raise ValueError(f'per_layer smallest {smallest!r} is not a number of elements, 0 or more')

    def large(a: Any) -> bool:
        return smallest == 0 or (len(a.shape) > 1 and math.prod(a.shape) >= smallest)

    def init(grads: Any, n: int) -> State:
        leaves = jax.tree.leaves(grads)
        heavy = [jnp.zeros(a.shape, a.dtype) for a in leaves if not large(a) and rule.momentum]
        return rule.init([a for a in leaves if large(a)], n), heavy

    def apply(grads: Any, state: State, key: Any, via: Collectives) -> tuple[Any, State]:
        via.own(grads)
        leaves, form = jax.tree.flatten(grads)
        state, heavy = state
        big, state = rule.apply([a for a in leaves if large(a)], state, key, via)
        raw = [a for a in leaves if not large(a)]
        few = [a / via.size for a in via.total(raw)] if raw else []
        if rule.momentum:
            few = heavy = [rule.momentum * h + a for h, a in zip(heavy, few, strict=True)]
        rows = iter(big), iter(few)
        return form.unflatten([next(rows[not large(a)]) for a in leaves]), (state, heavy)

    phases = tuple(per_layer(r, smallest) for r in rule.phases)
    return Exchange(init, apply, phases=phases, momentum=rule.momentum)


@word
def bucketed(rule: Rule, elements: int = 0) -> Exchange:
    """All arrays joined to one vector, biases too, and that cut into buckets.

    Args:
      rule: for the buckets.
      elements: of a bucket; 0 makes one of all.

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``elements`` is negative.
    """
    check_rule('bucketed', rule)
    if isinstance(elements, bool) or not isinstance(elements, int) or elements < 0:
        raise ValueError(f'bucketed elements {elements!r} is not a number of elements, 0 for all')

    def cut(leaves: list[Any]) -> list[Array]:
        joined = jnp.concatenate([a.reshape(-1) for a in leaves])
        ends = list(range(elements, joined.size, elements)) if elements else []
        return jnp.split(joined, ends)

    def init(grads: Any, n: int) -> State:
        return rule.init(jax.eval_shape(cut, jax.tree.leaves(grads)), n)

    def apply(grads: Any, state: State, key: Any, via: Collectives) -> tuple[Any, State]:
        via.own(grads)
        leaves, form = jax.tree.flatten(grads)
        out, state = rule.apply(cut(leaves), state, key, via)
        joined, parts = jnp.concatenate(out), []
        for a in leaves:
            parts.append(joined[: a.size].reshape(a.shape).astype(a.dtype))
            joined = joined[a.size :]
        return form.unflatten(parts), state

    phases = tuple(bucketed(r, elements) for r in rule.phases)
    return Exchange(init, apply, phases=phases, momentum=rule.momentum)


def check_rule(name: str, rule: object) -> None:
    """Raises TypeError unless ``rule`` is a Rule."""
    if not isinstance(rule, Rule):
        raise TypeError(
            f'{name} takes a rule such as all_gather(ef(one_bit)), got '
            f'{getattr(type(rule), "__name__", rule)}'
        )
