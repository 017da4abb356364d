"""PowerSGD: a gradient matrix as the product of two thin ones, which add."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.exchange.collectives import Collectives
from jaxmp.exchange.layout import Rule, State
from jaxmp.words import word


def _sides(x: Any) -> tuple[int, int]:
    """A kernel ``(..., in, out)`` as a matrix: all axes but the last, and the last."""
    return math.prod(x.shape[:-1]), x.shape[-1] if x.shape else 1


def _thin(x: Any, rank: int) -> bool:
    """Whether two factors are less than the matrix."""
    rows, columns = _sides(x)
    return rank * (rows + columns) < rows * columns


def _dot(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision='highest')


def _orthogonal(P: Float[Array, 'n r']) -> Float[Array, 'n r']:
    """Orthonormal columns with the same span."""
    return jnp.linalg.qr(P)[0]


@word
def power_sgd(rank: int) -> Rule:
    """PowerSGD with warm start and error feedback: a step of subspace iteration, all-reduced.

    With ``M_i = g_i + e_i`` as a matrix, all axes but the last its rows: ``P = mean_i M_i Q``, made
    orthonormal; ``Q = mean_i M_i^T P``; ``y = P Q^T``; ``e_i = M_i - y``. Q stays for the next step
    (warm start). The factors add, so that n replicas are one replica on the mean; r (n + m) numbers
    travel for an n x m matrix. A matrix of rank r or less is exact. Arrays that this would not
    make smaller are averaged as they are.

    Args:
      rank: r, 1 or more.

    Raises:
      ValueError: if ``rank`` is not a positive integer.

    References:
      PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization, arXiv
      1905.13727.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ValueError(f'power_sgd rank {rank!r} is not a positive integer; 1 to 4 are usual')

    def init(xs: list[Any], n: int) -> State:
        del n
        made = []
        for i, x in enumerate(xs):
            if _thin(x, rank):
                key, wide = jax.random.key(i), jnp.promote_types(x.dtype, jnp.float32)
                Q = jax.random.normal(key, (_sides(x)[1], rank), wide)
                made.append({'Q': Q, 'e': jnp.zeros(_sides(x), wide)})
            else:
                made.append({})
        return made

    def apply(xs: list[Array], state: State, key: Any, via: Collectives) -> tuple[list, State]:
        del key
        n, thin = via.size, [bool(s) for s in state]
        M = [x.reshape(_sides(x)) + s['e'] if s else x for x, s in zip(xs, state, strict=True)]
        first = [_dot(m, s['Q']) / n if s else m / n for m, s in zip(M, state, strict=True)]
        P = [_orthogonal(p) if t else p for p, t in zip(via.total(first), thin, strict=True)]
        second = [_dot(m.T, p) / n for m, p, t in zip(M, P, thin, strict=True) if t]
        rows = iter(via.total(second) if second else [])
        out, after = [], []
        for x, m, p, t in zip(xs, M, P, thin, strict=True):
            Q = next(rows) if t else None
            y = p if Q is None else _dot(p, Q.T)
            out.append(y.reshape(x.shape).astype(x.dtype))
            after.append({} if Q is None else {'Q': Q, 'e': m - y})
        return out, after

    return Rule(init, apply)
