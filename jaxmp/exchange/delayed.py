"""Rules that span several steps: momentum and accumulated gradients."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.dct import dct
from jaxmp.codecs.dense import bf16
from jaxmp.codecs.indices import elias_fano, packed
from jaxmp.codecs.sparse import check_parts, top_k
from jaxmp.codecs.view import per_chunk
from jaxmp.exchange.averages import all_gather
from jaxmp.exchange.collectives import Collectives, Grads
from jaxmp.exchange.layout import Exchange, Rule, State, bucketed, check_rule
from jaxmp.feedback import ef
from jaxmp.wire import Codec, Ctx, Like, like, widened
from jaxmp.wire.words import check_bools, word

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

    def init(xs: Sequence[Array | Like], n: int) -> State:
        wide = jax.eval_shape(widened, xs)
        return {name: [jnp.zeros_like(x) for x in wide] for name in 'uv'}

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        xs = _clipped(xs, clip / via.size**0.5)
        u = [momentum * a + x for a, x in zip(state['u'], xs, strict=True)]
        v = [a + b for a, b in zip(state['v'], u, strict=True)]
        # `gather` has no memory: what is not sent stays in v.
        inputs = [a.astype(x.dtype) for a, x in zip(v, xs, strict=True)]
        out, _ = gather.reduce(inputs, gather.init(inputs, via.size), key, via)
        sent = [_kept(codec, a) for a in inputs]
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

    def init(xs: Sequence[Array | Like], n: int) -> State:
        return rule.init(xs, n), [jnp.zeros_like(x) for x in jax.eval_shape(widened, xs)]

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        inner, u = state
        u = [m * a + x for a, x in zip(u, xs, strict=True)]
        inputs = [a.astype(x.dtype) for a, x in zip(u, xs, strict=True)]
        out, inner = rule.reduce(inputs, inner, key, via)
        return out, (inner, u)

    return Rule(init, reduce, tuple(momentum(r, m) for r in rule.by_epoch), m)


def _kept(codec: Codec, x: Array) -> Array:
    """A mask of the elements of ``x`` that are sent; zeros may be missing, which has no effect."""
    row = x.reshape(1, -1)
    return (codec.decode(codec.encode(row, Ctx()), like(row), Ctx()) != 0).reshape(x.shape)


def _clipped(xs: list[Array], norm: float) -> list[Array]:
    if not norm:
        return xs
    square = sum((jnp.vdot(x, x) for x in widened(xs)), jnp.zeros(()))
    scale = jnp.minimum(1, norm / (jnp.sqrt(square) + 1e-12))
    return [(x * scale).astype(x.dtype) for x in xs]


@word
def demo(
    fraction: float, decay: float = 0.999, size: int = 64, chunk: int = 4096, sign: bool = True
) -> Exchange:
    r"""DeMo: the largest cosine coefficients of each replica's momentum are shared and taken out.

    .. math:: u_i \leftarrow d\, u_i + g_i,\quad q_i = C(u_i),\quad u_i \leftarrow u_i - q_i,\quad
              y = \mathrm{sign}(\mathrm{mean}\, q_i)

    C keeps the largest of the cosine coefficients of each chunk, as bfloat16. Without the sign it
    is error feedback with a decay: ``bucketed(all_gather(ef(dct(per_chunk(top_k(fraction,
    values=bf16, indices=elias_fano), chunk), size), decay)))``. DeMo transforms matrices in squares
    of 64 x 64, each array by itself; here runs of ``size`` neighbours of all arrays, joined, are
    transformed. The optimizer must have no momentum, and clipping would clip the signs.

    Args:
      fraction: fraction of the coefficients that is sent, in (0, 1].
      decay: d in (0, 1].
      size: elements per transform, a power of two.
      chunk: coefficients per chunk.
      sign: whether the optimizer gets signs, as in the paper, or the mean itself.

    Raises:
      TypeError: if ``sign`` is not a truth value.
      ValueError: if an argument is out of range.

    References:
      DeMo: Decoupled Momentum Optimization, arXiv 2411.19870.
    """
    check_bools('demo', sign=sign)
    check_parts('demo', fraction, top_k(1.0))
    cosines = per_chunk(top_k(fraction, values=bf16, indices=elias_fano), chunk)
    shared = bucketed(all_gather(ef(dct(cosines, size), decay)))

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        y, state = shared.reduce(grads, state, key, via)
        return jax.tree.map(jnp.sign, y) if sign else y, state

    return Exchange(shared.init, reduce, momentum=decay)
