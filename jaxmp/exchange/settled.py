"""`reduced`: gradients that are not finite leave the states of all replicas as they were.

A step of an exchange is a transaction of all arrays and all replicas. If the training skips the
step, then no replica remembers that a part of it was sent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives, Grads
from jaxmp.exchange.layout import Exchange, State
from jaxmp.feedback.settled import finite, kept_if


def reduced(
    exchange: Exchange, grads: Grads, state: State, key: Array, via: Collectives
) -> tuple[Grads, State]:
    r"""What ``exchange.reduce`` returns, and its next state if all gradients were finite.

    .. math:: y = \mathrm{reduce}(\dots, g_i \text{ if it is finite, else NaN}, \dots),\quad
              s_i \leftarrow s_i' \text{ if y is finite, else } s_i

    The flag by which the replicas decide alike is the result itself, which all of them have: a
    replica whose gradients are not finite sends NaN only, in every array. No further message is
    needed. Own gradients that are not shared in this call (`local_sgd`, `diloco`) pass as they are.

    Args:
      exchange: the exchange, whose state may be of any rule.
      grads: the gradients of this replica.
      state: its state.
      key: the same in all replicas.
      via: the collectives.
    """
    if exchange.shares_params or not jax.tree.leaves(state):
        return exchange.reduce(grads, state, key, via)
    nothing = jax.tree.map(lambda g: jnp.full_like(g, jnp.nan), grads)
    shared, after = exchange.reduce(kept_if(finite(grads), grads, nothing), state, key, via)
    return shared, kept_if(finite(shared), after, state)
