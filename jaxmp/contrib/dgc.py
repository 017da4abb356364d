"""`dgc`: the largest elements of accumulated gradients, with momentum."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.indices import packed
from jaxmp.codecs.sparse import check_parts, top_k
from jaxmp.exchange.averages import all_gather
from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Rule, State
from jaxmp.wire import Codec, Ctx, Like, like, widened
from jaxmp.wire.words import word

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
