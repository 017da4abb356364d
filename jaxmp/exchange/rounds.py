"""Exchanges in rounds: replicas train alone for H steps and then share their parameters.

In a round of `diloco` each fragment of the parameters takes two steps, which are two functions.
``_send`` passes the pseudo-gradient (shared parameters minus a replica's own) through an exchange
of gradients. ``applied`` makes the outer optimizer's step and moves the replica's parameters to the
result. With a delay of t steps, ``applied`` follows t steps after ``_send``, and the result is a
part of the state meanwhile. In one program the collective still ends within the step that sends:
the delay has its effect on training, and hides no time. Overlap in time needs a collective that
runs while the program continues, started in ``_send`` and awaited in ``applied``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives, Grads, Params, Tree, known_after
from jaxmp.exchange.layout import Exchange, Rule, State, exchange_of, joined, split
from jaxmp.exchange.outer import Outer, nesterov
from jaxmp.exchange.settled import reduced
from jaxmp.feedback.settled import finite, kept_if
from jaxmp.wire import Like
from jaxmp.wire.words import check_whole, word

Fragment = Tree  # some of the parameters, with None for the arrays of other fragments
Turn = tuple[Fragment, State]  # a fragment and its state

PUBLISHED = nesterov(0.7, 0.9)


def _alone(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
    """A replica's own gradients."""
    via.own(grads)
    return grads, state


@word
def local_sgd(steps: int) -> Exchange:
    """Local SGD: replicas train independently and average their parameters every ``steps`` steps.

    The state of the optimizer is not averaged. With ``steps=1`` and an optimizer that is linear in
    the gradient, plain or momentum SGD, this is synchronous SGD. It is ``diloco(steps, mean,
    outer=sgd(1.0))`` up to rounding, without that rule's copy of the shared parameters.

    Args:
      steps: the number H of steps between two averages, 1 or more.

    Raises:
      ValueError: if ``steps`` is not a positive integer.

    References:
      Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    check_whole('local_sgd steps', steps, 'a positive integer')

    def after_update(
        params: Params, state: State, key: Array, via: Collectives
    ) -> tuple[Params, State]:
        count = (state + 1) % steps
        return lax.cond(count == 0, via.mean, lambda p: p, params), count

    first = lambda params, n: jnp.zeros((), jnp.int32)
    return Exchange(first, _alone, after_update, period=steps)


@word
def diloco(
    steps: int,
    rule: Rule | Exchange,
    outer: Outer = PUBLISHED,
    fragments: int = 1,
    delay: int = 0,
    mix: float = 0.0,
) -> Exchange:
    r"""DiLoCo: H steps alone, then an outer optimizer's step with the compressed change.

    .. math:: \Delta_i = \theta - \theta_i,\quad
              \theta \leftarrow \mathrm{outer}(\theta, \mathrm{rule}(\Delta_1, \dots, \Delta_n)),
              \quad \theta_i \leftarrow a\, \theta_i + (1 - a)\, \theta

    The shared parameters :math:`\theta` have the same bits in all replicas after every step; a
    replica's own :math:`\theta_i` are equal to them after a round if a = 0 and there is one
    fragment. The state of ``rule``, such as error feedback, spans rounds. The inner optimizer, with
    its own state, is the trainer's.

    Streaming DiLoCo has several fragments of consecutive arrays with about equally many elements.
    Fragment p of P, from 0, sends in step ``(p + 1) H / P`` and then every H steps, and the result
    is applied t steps later.

    Args:
      steps: the number H of steps per round, 1 or more.
      rule: the rule, or exchange of gradients, that the pseudo-gradient passes through.
      outer: the outer optimizer, `nesterov` or `sgd`.
      fragments: the number P of fragments, from 1 to H.
      delay: the number t of steps between sending and applying, from 0 to H - 1.
      mix: the weight a of a replica's own parameters when a result is applied, in [0, 1).

    Raises:
      TypeError: if ``rule`` is no rule or exchange, or ``outer`` no outer optimizer.
      ValueError: if a number is out of range, or ``rule`` shares parameters itself.

    >>> from jaxmp import exchange
    >>> exchange.parse('diloco(30, all_gather(ef(one_bit)))').period
    30

    References:
      DiLoCo: Distributed Low-Communication Training of Language Models, arXiv 2311.08105;
      Streaming DiLoCo with overlapping communication, arXiv 2501.18512; Communication Efficient
      LLM Pre-training with SparseLoCo, arXiv 2508.15706.
    """
    check_whole('diloco steps', steps, 'a positive integer')
    check_whole('diloco fragments', fragments, f'an integer from 1 to the {steps} steps', 1, steps)
    hint = f'an integer from 0 to {steps - 1}, below steps'
    check_whole('diloco delay', delay, hint, 0, steps - 1)
    if isinstance(mix, bool) or not isinstance(mix, int | float) or not 0 <= mix < 1:
        raise ValueError(f'diloco mix {mix!r} is not in [0, 1); 0 takes the shared parameters')
    if not isinstance(outer, Outer):
        raise TypeError(f'diloco outer must be nesterov(0.7, 0.9) or sgd(1.0), got {outer}')
    exchange = exchange_of('diloco', rule)
    sends = tuple((p + 1) * steps // fragments for p in range(fragments))
    plan = Plan(exchange, outer, steps, sends, delay, mix)
    phases = tuple(diloco(steps, e, outer, fragments, delay, mix) for e in exchange.by_epoch)
    init, after = (functools.partial(f, plan) for f in (_first, _turn))
    shared = lambda state: [part['start'] for part in state['parts']]
    return Exchange(init, _alone, after, phases, period=steps, shared=shared, rounds=plan)


class Plan(NamedTuple):
    """What the rounds of `diloco` do not change: its arguments, and when each fragment sends.

    Attributes:
      exchange: what the pseudo-gradients pass through.
      outer: the outer optimizer.
      steps: H, the steps per round.
      sends: the first step after which each fragment sends.
      delay: steps between sending and applying.
      mix: weight of a replica's own parameters when a result is applied.
    """

    exchange: Exchange
    outer: Outer
    steps: int
    sends: tuple[int, ...]
    delay: int
    mix: float

    def cut(self, params: Params) -> list[Fragment]:
        """The fragments of parameters; the arrays of other fragments are None."""
        count = len(self.sends)
        return split(params, _owners(params, count), count)

    def join(self, parts: list[Fragment], like: Params) -> Params:
        """Inverse of `cut`, in the form of ``like``."""
        return joined(parts, _owners(like, len(self.sends)), like)


def _first(plan: Plan, params: Params, n: int) -> State:
    """The state before the first step, of replicas that start from ``params``."""

    def one(part: Fragment) -> State:
        start = [_array(a) for a in jax.tree.leaves(part)]
        flying = [jnp.zeros_like(a) for a in start] if plan.delay else []
        memory, inner = plan.outer.init(start), plan.exchange.init(part, n) if start else ()
        return {'start': start, 'memory': memory, 'held': inner, 'flying': flying}

    return {'step': jnp.zeros((), jnp.int32), 'parts': [one(part) for part in plan.cut(params)]}


def _turn(
    plan: Plan, params: Params, state: State, key: Array, via: Collectives
) -> tuple[Params, State]:
    """Parameters and state after a step, in which some fragments are sent or applied."""
    step, fragments, states = state['step'] + 1, [], []
    rows = zip(plan.cut(params), state['parts'], plan.sends, strict=True)
    for p, (part, before, first) in enumerate(rows):
        send = functools.partial(_send, plan, jax.random.fold_in(key, p), via)
        apply = functools.partial(applied, plan)
        moved, since = (known_after(part, (fragments, states)), before), step - first
        if plan.delay:
            moved = _if(since % plan.steps == 0, send, moved)
            late = (since % plan.steps == plan.delay) & (since >= 0)
            moved = _if(late, apply, moved)
        else:
            send_and_apply = lambda fragment, s=send, a=apply: a(s(fragment))
            moved = _if(since % plan.steps == 0, send_and_apply, moved)
        fragments.append(moved[0])
        states.append(moved[1])
    return plan.join(fragments, params), {'step': step, 'parts': states}


def _send(plan: Plan, key: Array, via: Collectives, fragment: Turn) -> Turn:
    """The state with the shared pseudo-gradient on its way."""
    params, state = fragment
    shared, inner = reduced(plan.exchange, change(params, state), state['held'], key, via)
    return params, {**state, 'held': inner, 'flying': jax.tree.leaves(shared)}


def change(params: Fragment, state: State) -> Fragment:
    """The pseudo-gradient of a fragment: its shared parameters minus a replica's own."""
    start = jax.tree.unflatten(jax.tree.structure(params), state['start'])
    return jax.tree.map(jnp.subtract, start, params)


def applied(plan: Plan, fragment: Turn) -> Turn:
    """Parameters and state after the outer step with what was sent.

    If that is not finite, there is no step: the shared parameters and the outer optimizer stay as
    they were, and only a replica whose own parameters are not finite takes the shared ones.
    """
    params, state = fragment
    flying, shared = state['flying'], (state['start'], state['memory'])
    updates, memory = plan.outer.update(flying, state['memory'], state['start'])
    sound = finite(flying)
    start, memory = kept_if(sound, (optax.apply_updates(state['start'], updates), memory), shared)
    blend = lambda a, b: plan.mix * a + (1 - plan.mix) * b if plan.mix else b
    leaves, form = jax.tree.flatten(params)
    after = [blend(a, b) for a, b in zip(leaves, start, strict=True)]
    after = kept_if(sound, after, kept_if(finite(params), leaves, start))
    flying = kept_if(sound, flying, jax.tree.map(jnp.zeros_like, flying)) if plan.delay else []
    return form.unflatten(after), {**state, 'start': start, 'memory': memory, 'flying': flying}


def _if(now: Array, f: Callable[[Turn], Turn], fragment: Turn) -> Turn:
    """``f(fragment)`` if ``now``; of a fragment without arrays there is nothing to send."""
    if not jax.tree.leaves(fragment[0]):
        return fragment
    return lax.cond(now, f, lambda same: same, fragment)


def _array(a: Array | Like) -> Array:
    """A copy of ``a``, or zeros if it is only a shape."""
    return jnp.zeros(a.shape, a.dtype) if isinstance(a, jax.ShapeDtypeStruct) else jnp.array(a)


def _owners(params: Params, count: int) -> list[int]:
    """The fragment of each array: consecutive ones, with about equally many elements."""
    sizes = [a.size for a in jax.tree.leaves(params)]
    middle = lambda i: 2 * sum(sizes[:i]) + sizes[i]
    return [count * middle(i) // (2 * sum(sizes)) for i in range(len(sizes))]
