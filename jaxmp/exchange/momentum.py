"""`momentum`: a rule that shares a momentum of the gradients instead of the gradients."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Rule, State, check_rule
from jaxmp.wire import Like, widened
from jaxmp.wire.words import word


@word
def momentum(rule: Rule, m: float = 0.9) -> Rule:
    """Momentum before compression: replicas share ``u <- m u + g`` instead of ``g``.

    A rule that tracks its input (``ef21``) then tracks an average over many steps instead of a
    single noisy gradient. With a lossless rule this is momentum SGD. The optimizer must have no
    momentum of its own; it applies weight decay and clipping after the momentum.

    Args:
      rule: the rule that shares u.
      m: the momentum, in [0, 1).

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``m`` is out of range, or the rule has momentum already.

    References:
      Momentum Provably Improves Error Feedback!, arXiv 2305.15155.
    """
    check_rule('momentum', rule)
    if not 0 <= m < 1 or rule.momentum:
        raise ValueError(f'momentum m={m} is not in [0, 1), or its rule has momentum already')

    def init(xs: Sequence[Array | Like], n: int) -> State:
        return rule.init(xs, n), [jnp.zeros_like(x) for x in jax.eval_shape(widened, xs)]

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        inner, u = state
        u = [m * a + x for a, x in zip(u, xs, strict=True)]
        inputs = [a.astype(x.dtype) for a, x in zip(u, xs, strict=True)]
        out, inner = rule.reduce(inputs, inner, key, via)
        return out, (inner, u)

    return Rule(init, reduce, tuple(momentum(r, m) for r in rule.by_epoch), m)
