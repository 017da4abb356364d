r"""`late`: an optimizer whose gradients come N steps late, as in a pipeline that is never emptied.

Step t computes the gradient :math:`g_t` at the parameters :math:`p_t`, and moves them by
:math:`g_{t-N}`, so that N + 1 batches are under way at once and no stage waits for a message. The
first N steps move nothing, and the gradients of the last N are not used. N = 1 is PipeDream-2BW.

A correction makes up for it. With :math:`u_t`, the optimizer's update by :math:`g_{t-N}`:

* ``none``: :math:`p_{t+1} = p_t + u_t`
* ``predict(c)``: :math:`p_{t+1} = p_t + u_t + c\,(u_t - u_{t-1})`. The sum of all steps is
  :math:`p_t = w_t + c\,u_{t-1}`: the gradient is taken where the parameters :math:`w` will be, if
  each of the N updates under way is as the last one (c = N, the default). With momentum this is
  SpecTrain's and XPipe's prediction; as error feedback, the error of a late update is added to the
  next one; c < 1 looks ahead as Nesterov's momentum does.
* ``scale(c)``: :math:`p_{t+1} = p_t + c\,u_t`, with c = 1 / (N + 1).
* ``compensate(c)``: the optimizer gets :math:`g + c\,g \odot g \odot (p_t - p_{t-N})`, a guess of
  the gradient at :math:`p_t`, with c = 0.04.

References:
  PipeDream-2BW, arXiv 2006.09503. Gradients one step late, and error feedback: arXiv 2606.30634, of
  which the abstract alone was at hand, so that the equation is ours. SpecTrain, arXiv 1809.02839.
  XPipe, arXiv 1911.04610. Nesterov's method for pipelines, arXiv 2505.01099. Delay-compensated
  ASGD, arXiv 1609.08326. Rates by delay: PipeMare, arXiv 1910.05124.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Int


class Late(NamedTuple):
    """The state of an optimizer whose gradients are late.

    Attributes:
      steps: how many are done.
      waiting: the gradients of the last N steps, that of step t at t modulo N.
      places: likewise the parameters, where a correction needs them.
      last: the last update, likewise.
      state: of the optimizer.
    """

    steps: Int[Array, '']
    waiting: Any
    places: Any
    last: Any
    state: Any


def late(
    optimizer: optax.GradientTransformation, delay: int, correction: str = 'none'
) -> optax.GradientTransformation:
    """``optimizer`` with gradients that come ``delay`` steps late.

    Args:
      optimizer: what moves the parameters.
      delay: N.
      correction: 'none', or a word of the module's table, perhaps with its number.

    >>> optimizer = late(optax.sgd(1.0), 1)
    >>> params, state = 8.0, optimizer.init(8.0)
    >>> for _ in range(3):  # of p * p / 4
    ...     update, state = optimizer.update(params / 2, state, params)
    ...     params = float(params + update)
    ...     print(params)
    8.0
    4.0
    0.0
    """
    if not delay:
        return optimizer
    word, strength = strength_of(correction, delay)
    zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
    rows = lambda tree: jax.tree.map(lambda a: jnp.zeros((delay, *jnp.shape(a)), a.dtype), tree)

    def init(params: Any) -> Late:
        params = jax.tree.map(jnp.asarray, params)
        places = rows(params) if word == 'compensate' else ()
        last = zeros(params) if word == 'predict' else ()
        start = jnp.zeros((), jnp.int32)
        return Late(start, rows(params), places, last, optimizer.init(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Late]:
        gradients, slot = updates, state.steps % delay
        row = lambda tree: jax.tree.map(lambda a: a[slot], tree)
        put = lambda tree, new: jax.tree.map(lambda a, n: a.at[slot].set(n), tree, new)
        due, places = row(state.waiting), state.places
        if word == 'compensate':
            due = jax.tree.map(
                lambda g, p, then: g + strength * g * g * (p - then), due, params, row(places)
            )
            places = put(places, params)

        def moved() -> tuple[Any, Any]:
            return optimizer.update(due, state.state, params)

        # The optimizer does not see the gradients before the first one.
        still = lambda: (zeros(gradients), state.state)
        updates, inner = jax.lax.cond(state.steps < delay, still, moved)
        last = updates if word == 'predict' else ()
        if word == 'predict':
            ahead = lambda u, before: u + strength * (u - before)
            updates = jax.tree.map(ahead, updates, state.last)
        elif word == 'scale':
            updates = jax.tree.map(lambda u: strength * u, updates)
        waiting = put(state.waiting, gradients)
        return updates, Late(state.steps + 1, waiting, places, last, inner)

    return optax.GradientTransformation(init, update)


def strength_of(correction: str, delay: int) -> tuple[str, float]:
    """The word of a correction, and its number.

    >>> strength_of('predict', 4), strength_of('predict(0.5)', 4), strength_of('none', 4)
    (('predict', 4.0), ('predict', 0.5), ('none', 0.0))
    """
    usual: dict[str, Callable[[int], float]] = {
        'none': lambda n: 0,
        'predict': lambda n: n,
        'scale': lambda n: 1 / (n + 1),
        'compensate': lambda n: 0.04,
    }
    word, number = re.fullmatch(r'(\w+)(?:\((.*)\))?', correction).groups()  # pyright: ignore
    return word, float(number) if number else float(usual[word](delay))
