"""PowerSGD: a gradient matrix as the product of two thin matrices, which can be all-reduced."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Rule, State
from jaxmp.wire import Like, widened
from jaxmp.wire.words import check_whole, word


def _sides(x: Array | Like) -> tuple[int, int]:
    """The sizes n and m of a kernel ``(..., in, out)`` as an n x m matrix, with m its last axis."""
    return math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1


def _thin(x: Array | Like, rank: int) -> bool:
    """Whether the two factors have fewer elements than the matrix."""
    rows, columns = _sides(x)
    return rank * (rows + columns) < rows * columns


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision='highest')


def _orthogonal(P: Float[Array, 'n r']) -> Float[Array, 'n r']:
    """Orthonormal columns with the same span."""
    return jnp.linalg.qr(P)[0]


@word
def power_sgd(rank: int) -> Rule:
    """PowerSGD: one step of subspace iteration by all-reduce, with warm start and error feedback.

    ``M_i = g_i + e_i`` as an n x m matrix, with m the last axis: ``P = mean_i M_i Q``,
    orthonormalised; ``Q = mean_i M_i^T P``; ``y = P Q^T``; ``e_i = M_i - y``. Q is kept for the
    next step (warm start). The factors are linear in M_i, so that the result is that of one replica
    with the mean gradient. r (n + m) numbers are sent per matrix. A matrix of rank r or less is
    exact. An array whose factors would not be smaller is averaged uncompressed.

    Args:
      rank: the rank r, 1 or more.

    Raises:
      ValueError: if ``rank`` is not a positive integer.

    References:
      PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, arXiv
      1905.13727.
    """
    check_whole('power_sgd rank', rank, 'a positive integer; 1 to 4 are usual')

    def init(xs: Sequence[Array | Like], n: int) -> State:
        states = []
        for i, x in enumerate(xs):
            if _thin(x, rank):
                key, wide = jax.random.key(i), jnp.promote_types(x.dtype, jnp.float32)
                Q = jax.random.normal(key, (_sides(x)[1], rank), wide)
                states.append({'Q': Q, 'e': jnp.zeros(_sides(x), wide)})
            else:
                states.append({})
        return states

    def reduce(xs: list[Array], state: State, key: Array, via: Collectives) -> tuple[list, State]:
        n, thin = via.size, [bool(s) for s in state]
        M = [x.reshape(_sides(x)) + s['e'] if s else x for x, s in zip(xs, state, strict=True)]
        first = [
            _dot(m, s['Q']) / n if s else widened(m) / n for m, s in zip(M, state, strict=True)
        ]
        P = [_orthogonal(p) if t else p for p, t in zip(via.all_reduce(first), thin, strict=True)]
        # Two rounds, each of all matrices: P has to be there before Q. An array that is not thin
        # is the first round's mean.
        second = [_dot(m.T, p) / n for m, p, t in zip(M, P, thin, strict=True) if t]
        rows = iter(via.all_reduce(second) if second else [])
        out, after = [], []
        for x, m, p, t in zip(xs, M, P, thin, strict=True):
            Q = next(rows) if t else None
            y = p if Q is None else _dot(p, Q.T)
            out.append(y.reshape(x.shape).astype(x.dtype))
            after.append({} if Q is None else {'Q': Q, 'e': m - y})
        return out, after

    return Rule(init, reduce)
