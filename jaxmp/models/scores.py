"""`next_token_scores`: the loss of a language model without an array of all logits.

Shapes: N rows, one for each position of each sequence; C width, V vocabulary.

References:
  Cut Your Losses in Large-Vocabulary Language Models, arXiv 2411.09009.
  Liger Kernel: Efficient Triton Kernels for LLM Training, arXiv 2410.10989.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from jaxmp.models.blocks import Blocks

ROWS = 128  # whose logits are computed together
Residuals = tuple[Array, Array, Array, Array]  # rows, output layer, targets, gradient by the rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def next_token_scores(
    x_NC: Float[Array, 'N C'], w_VC: Float[Array, 'V C'], targets_N: Int[Array, ' N'], cap: float
) -> Float[Array, 'N 2']:
    r"""Of each row the nats of its target, and 1 where the target is the likeliest token.

    .. math:: -\log softmax(c \tanh(x w' / c))_{target}

    With a cap of 0 there is no tanh. Logits are computed for 128 rows at a time, and not kept. The
    gradient of ``x`` is found in the forward pass. That of ``w`` needs the logits once more; where
    ``w`` is not trained, the compiler leaves that out.

    >>> x, w = jnp.zeros((1, 2)), jnp.zeros((4, 2))
    >>> nats, right = next_token_scores(x, w, jnp.array([3]), 0.0)[0]
    >>> round(float(nats), 4), float(right)
    (1.3863, 0.0)
    """
    return _by_runs(lambda x, target: _scored(x, target, w_VC, cap)[0], x_NC, targets_N)


def _forward(x: Array, w: Array, targets: Array, cap: float) -> tuple[Array, Residuals]:
    def run(x: Array, target: Array) -> tuple[Array, Array]:
        scores, g = _scored(x, target, w, cap)
        return scores, _product('nv,vc->nc', g, w).astype(x.dtype)

    scores, gx = _by_runs(run, x, targets)
    return scores, (x, w, targets, gx)


def _backward(cap: float, saved: Residuals, g: Array) -> tuple[Array, Array, None]:
    x, w, targets, gx = saved
    scale = g[:, :1].astype(x.dtype)  # whether a target is the likeliest has no gradient

    def add(total: Array, rows: tuple[Array, ...]) -> tuple[Array, None]:
        x, target, scale = rows  # of a padded row the scale is 0
        return total + _product('nv,nc->vc', scale * _scored(x, target, w, cap)[1], x), None

    start = jnp.zeros(w.shape, jnp.promote_types(w.dtype, jnp.float32))
    gw, _ = jax.lax.scan(add, start, _runs(x, targets, scale))
    return scale * gx, gw.astype(w.dtype), None


next_token_scores.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def scores_of_blocks(
    x_NC: Float[Array, 'N C'], w_VC: Blocks, targets_N: Int[Array, ' N'], cap: float
) -> Float[Array, 'N 2']:
    """`next_token_scores` of a frozen output layer, a piece of which is widened at a time.

    A piece has 256 rows of ``w``, or as many as give 2^20 logits. Sums over the vocabulary, of
    which the gradient of ``x`` is one, are rescaled when a piece has a larger logit.
    """
    return _by_pieces(x_NC, w_VC, targets_N, cap)[0]


def _by_pieces(
    x: Array, w: Blocks, targets: Array, cap: float
) -> tuple[Float[Array, 'N 2'], Float[Array, 'N C']]:
    """The scores, and the gradient of the nats by ``x``."""
    N, V = len(x), w.shape[0]
    n = min(V, max(256, 2**20 // N))

    def add(sums: tuple[Array, ...], start: Array) -> tuple[tuple[Array, ...], None]:
        top, total, best, pulled = sums
        begin = jnp.minimum(start, V - n)  # the last piece sees some rows again
        part = w.cut(begin, n).widened(x.dtype)
        y, slope = _capped(_product('nc,vc->nv', x, part), cap)
        new = jnp.arange(n) + begin >= start
        y = jnp.where(new, y, -jnp.inf)
        highest = jnp.maximum(top, y.max(-1))
        best = jnp.where(y.max(-1) > top, y.argmax(-1) + begin, best)
        e, less = jnp.exp(y - highest[:, None]), jnp.exp(top - highest)
        pull = _product('nv,vc->nc', (e * slope).astype(x.dtype), part)
        sums = highest, total * less + e.sum(-1), best, pulled * less[:, None] + pull
        return sums, None

    wide = jnp.promote_types(x.dtype, jnp.float32)
    zeros = jnp.zeros(N, wide)
    sums = zeros - jnp.inf, zeros, jnp.zeros(N, jnp.int32), jnp.zeros(x.shape, wide)
    (top, total, best, pulled), _ = jax.lax.scan(add, sums, jnp.arange(0, V, n))
    rows = w[targets].widened(x.dtype)
    y, slope = _capped((x.astype(wide) * rows.astype(wide)).sum(-1), cap)
    scores = jnp.stack([top + jnp.log(total) - y, (best == targets).astype(wide)], -1)
    return scores, (pulled / total[:, None] - (slope * rows.T).T).astype(x.dtype)


def _capped(y: Array, cap: float) -> tuple[Array, Array | float]:
    """``c tanh(y / c)`` and its slope."""
    if not cap:
        return y, 1.0
    y = cap * jnp.tanh(y / cap)
    return y, 1 - (y / cap) ** 2


def _scaled(cap: float, gx: Array, g: Array) -> tuple[Array, None, None]:
    return g[:, :1].astype(gx.dtype) * gx, None, None


scores_of_blocks.defvjp(_by_pieces, _scaled)


def _scored(x: Array, target: Array, w: Array, cap: float) -> tuple[Array, Array]:
    """The scores of some rows, and the gradient of their nats by ``x w'``."""
    y = _product('nc,vc->nv', x, w)
    y = cap * jnp.tanh(y / cap) if cap else y
    here = jnp.arange(w.shape[0], dtype=target.dtype) == target[:, None]
    total = jax.nn.logsumexp(y, axis=-1)
    right = jnp.argmax(y, -1) == target
    scores = jnp.stack([total - jnp.where(here, y, 0).sum(-1), right.astype(y.dtype)], -1)
    g = jnp.exp(y - total[:, None]) - here
    return scores, (g * (1 - (y / cap) ** 2) if cap else g).astype(x.dtype)


def _product(axes: str, a: Array, b: Array) -> Array:
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(axes, a, b, preferred_element_type=wide)


def _runs(*arrays: Array) -> tuple[Array, ...]:
    """Arrays of N rows as runs of them; the last is filled with zeros."""
    count = len(arrays[0])
    size = min(ROWS, count)
    fill = lambda a: jnp.pad(a, ((0, -count % size), *((0, 0),) * (a.ndim - 1)))
    return tuple(fill(a).reshape(-1, size, *a.shape[1:]) for a in arrays)


def _by_runs(run: Callable[..., PyTree], *arrays: Array) -> PyTree:
    """``run`` of each run of rows, its results joined."""
    parts = jax.lax.map(lambda rows: run(*rows), _runs(*arrays))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[: len(arrays[0])], parts)
