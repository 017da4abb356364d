"""Rules that share more than one step: momentum, what has gathered, parameters trained alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.codecs.sparse import check_parts, packed, top_k
from jaxmp.exchange.averages import all_gather
from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Exchange, Rule, State, check_rule
from jaxmp.wire import Codec, Ctx, like
from jaxmp.words import word

LEAST_SPARSE = 0.25  # share that is sent in the first epoch of a sparsity warm-up; then its powers


@word
def dgc(
    fraction: float, momentum: float = 0.9, clip: float = 0.0, warmup: int = 0, masking: bool = True
) -> Rule:
    """Deep Gradient Compression: what is not sent gathers, with its momentum.

    ``g`` clipped; ``u <- m u + g``; ``v <- v + u``; the largest of v are sent, and there u and v
    become zero (factor masking). What is sent and v add up to the sum of all u. The optimiser must
    have no momentum of its own. In epoch t of the warm-up ``4^-(t+1)`` of a gradient is sent: 25 %,
    6.25 %, 1.5625 %, ...

    Args:
      fraction: share that is sent after the warm-up, in (0, 1]; the paper's is 0.001.
      momentum: m, in [0, 1).
      clip: the arrays that it is given (under `per_layer` the large ones) are clipped to a norm of
        ``clip / sqrt(n)``; 0 does not clip.
      warmup: epochs of the sparsity warm-up; the paper's is 4.
      masking: whether u, too, becomes zero where v was sent. With all sent, momentum SGD without
        and plain SGD with masking.

    Raises:
      ValueError: if an argument is out of range.

    References:
      Deep Gradient Compression, arXiv 1712.01887.
    """
    check_parts('dgc', fraction, top_k(1.0))
    if not 0 <= momentum < 1 or clip < 0 or warmup < 0:
        raise ValueError(
            f'dgc momentum={momentum}, clip={clip}, warmup={warmup}: the momentum is in [0, 1), a '
            'norm and a number of epochs are not negative'
        )
    codec = top_k(fraction, indices=packed)
    gather = all_gather(codec)

    def init(xs: list[Any], n: int) -> State:
        del n
        zeros = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in xs]
        return {'u': zeros, 'v': zeros}

    def apply(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        xs = _clipped(xs, clip / via.size**0.5)
        u = [momentum * a + x for a, x in zip(state['u'], xs, strict=True)]
        v = [a + b for a, b in zip(state['v'], u, strict=True)]
        given = [a.astype(x.dtype) for a, x in zip(v, xs, strict=True)]
        out, _ = gather.apply(given, gather.init(given, via.size), key, via)
        sent = [_kept(codec, a) for a in given]
        v = [jnp.where(s, 0, a) for a, s in zip(v, sent, strict=True)]
        u = [jnp.where(s, 0, a) for a, s in zip(u, sent, strict=True)] if masking else u
        return out, {'u': u, 'v': v}

    shares = [max(fraction, LEAST_SPARSE ** (t + 1)) for t in range(warmup)]
    phases = [dgc(f, momentum, clip, 0, masking) for f in [*shares, fraction]] if warmup else []
    return Rule(init, apply, tuple(phases), momentum)


@word
def momentum(rule: Rule, m: float = 0.9) -> Rule:
    """Momentum before compression: replicas share ``u <- m u + g`` in place of ``g``.

    A rule that follows its input (``ef21``) follows a mean of many steps in place of the noise of
    one. Where nothing is lost this is momentum SGD; the optimiser must have no momentum of its own,
    and what it does to its input, weight decay and clipping, comes after.

    Args:
      rule: what shares u.
      m: in [0, 1).

    Raises:
      TypeError: if ``rule`` is not a rule.
      ValueError: if ``m`` is out of range, or the rule has a momentum already.

    References:
      Momentum Provably Improves Error Feedback!, arXiv 2305.15155.
    """
    check_rule('momentum', rule)
    if not 0 <= m < 1 or rule.momentum:
        raise ValueError(f'momentum m={m} is not in [0, 1), or its rule has a momentum already')

    def init(xs: list[Any], n: int) -> State:
        return rule.init(xs, n), [jnp.zeros(x.shape, x.dtype) for x in xs]

    def apply(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        held, u = state
        u = [m * a + x for a, x in zip(u, xs, strict=True)]
        out, held = rule.apply(u, held, key, via)
        return out, (held, u)

    return Rule(init, apply, tuple(momentum(r, m) for r in rule.phases), m)


def _kept(codec: Codec, x: Array) -> Array:
    """Where ``x`` is sent; what is sent as a zero stays, which changes nothing."""
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
    """Local SGD: every replica takes ``steps`` steps alone, then parameters are averaged.

    The optimiser's state stays each replica's own. With ``steps=1`` and an optimiser that is linear
    in the gradient, plain or momentum SGD, this is synchronous SGD.

    Args:
      steps: H, 1 or more.

    Raises:
      ValueError: if ``steps`` is not a positive integer.

    References:
      Local SGD Converges Fast and Communicates Little, arXiv 1805.09767.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f'local_sgd steps {steps!r} is not a positive integer')

    def apply(grads: Any, state: State, key: Any, via: Collectives) -> tuple[Any, State]:
        del key
        via.own(grads)
        return grads, state

    def settle(params: Any, state: State, via: Collectives) -> tuple[Any, State]:
        meet = lambda p: jax.tree.map(lambda a: a / via.size, via.total(p))
        count = (state + 1) % steps
        return lax.cond(count == 0, meet, lambda p: p, params), count

    return Exchange(lambda grads, n: jnp.zeros((), jnp.int32), apply, settle, every=steps)
