"""Rules that span several steps: momentum, accumulated gradients, averaged parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.codecs.indices import packed
from jaxmp.codecs.sparse import check_parts, top_k
from jaxmp.exchange.averages import all_gather
from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Exchange, Rule, State, check_rule
from jaxmp.wire import Codec, Ctx, like
from jaxmp.words import word

LEAST_SPARSE = 0.25  # fraction sent in epoch 0 of a sparsity warm-up; in epoch t its power t + 1


@word
def dgc(
    fraction: float, momentum: float = 0.9, clip: float = 0.0, warmup: int = 0, masking: bool = True
) -> Rule:
    """Deep Gradient Compression: elements that are not sent accumulate, with momentum.

    With ``g`` clipped, ``u <- m u + g`` and ``v <- v + u``. The largest elements of v are sent; at
    their positions u and v are set to zero (factor masking). The elements sent so far plus v equal
    the sum of all u. The optimizer must have no momentum of its own. In epoch t of the warm-up,
    from 0, the fraction ``4^-(t+1)`` of a gradient is sent: 25 %, 6.25 %, 1.5625 %, ...

    Args:
      fraction: fraction that is sent after the warm-up, in (0, 1]; 0.001 in the paper.
      momentum: the number m, in [0, 1).
      clip: the gradients that the rule gets (under `per_layer` the large arrays) are clipped to a
        norm of ``clip / sqrt(n)``; 0 does not clip.
      warmup: epochs of the sparsity warm-up; 4 in the paper.
      masking: whether u is also set to zero where v was sent. If everything is sent, the rule is
        momentum SGD without masking and plain SGD with it.

    Raises:
      ValueError: if an argument is out of range.

    References:
      Deep Gradient Compression, arXiv 1712.01887.
    """
    check_parts('dgc', fraction, top_k(1.0))
    if not 0 <= momentum < 1 or clip < 0 or warmup < 0:
        raise ValueError(
            f'dgc momentum={momentum}, clip={clip}, warmup={warmup}: the momentum is in [0, 1), '
            'clip and warmup are not negative'
        )
    codec = top_k(fraction, indices=packed)
    gather = all_gather(codec)

    def init(xs: list[Any], n: int) -> State:
        del n
        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in xs]
        return {'u': zeros, 'v': zeros}

    def reduce(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        xs = _clipped(xs, clip / via.size**0.5)
        u = [momentum * a + x for a, x in zip(state['u'], xs, strict=True)]
        v = [a + b for a, b in zip(state['v'], u, strict=True)]
        given = [a.astype(x.dtype) for a, x in zip(v, xs, strict=True)]
        out, _ = gather.reduce(given, gather.init(given, via.size), key, via)
        sent = [_kept(codec, a) for a in given]
        v = [jnp.where(s, 0, a) for a, s in zip(v, sent, strict=True)]
        u = [jnp.where(s, 0, a) for a, s in zip(u, sent, strict=True)] if masking else u
        return out, {'u': u, 'v': v}

    shares = [max(fraction, LEAST_SPARSE ** (t + 1)) for t in range(warmup)]
    phases = [dgc(f, momentum, clip, 0, masking) for f in [*shares, fraction]] if warmup else []
    return Rule(init, reduce, tuple(phases), momentum)


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

    def init(xs: list[Any], n: int) -> State:
        return rule.init(xs, n), [jnp.zeros(x.shape, x.dtype) for x in xs]

    def reduce(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        held, u = state
        u = [m * a + x for a, x in zip(u, xs, strict=True)]
        out, held = rule.reduce(u, held, key, via)
        return out, (held, u)

    return Rule(init, reduce, tuple(momentum(r, m) for r in rule.by_epoch), m)


def _kept(codec: Codec, x: Array) -> Array:
    """A mask of the elements of ``x`` that are sent; zeros may be missing, which has no effect."""
    row = x.reshape(1, -1)
    return (codec.decode(codec.encode(row, Ctx()), like(row), Ctx()) != 0).reshape(x.shape)


def _clipped(xs: list[Array], norm: float) -> list[Array]:
    if not norm:
        return xs
    square = sum((jnp.vdot(x, x) for x in xs), jnp.zeros(()))
    scale = jnp.minimum(1, norm / (jnp.sqrt(square) + 1e-12))
    return [(x * scale).astype(x.dtype) for x in xs]


@word
def local_sgd(steps: int) -> Exchange:
    """Local SGD: replicas train independently and average their parameters every ``steps`` steps.

    The state of the optimizer is not averaged. With ``steps=1`` and an optimizer that is linear in
    the gradient, plain or momentum SGD, this is synchronous SGD.

    Args:
      steps: the number H of steps between two averages, 1 or more.

    Raises:
      ValueError: if ``steps`` is not a positive integer.

    References:
      Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f'local_sgd steps {steps!r} is not a positive integer')

    def reduce(grads: Any, state: State, key: Any, via: Collectives) -> tuple[Any, State]:
        del key
        via.own(grads)
        return grads, state

    def after_update(params: Any, state: State, via: Collectives) -> tuple[Any, State]:
        meet = lambda p: jax.tree.map(lambda a: a / via.size, via.all_reduce(p))
        count = (state + 1) % steps
        return lax.cond(count == 0, meet, lambda p: p, params), count

    return Exchange(lambda grads, n: jnp.zeros((), jnp.int32), reduce, after_update, period=steps)
