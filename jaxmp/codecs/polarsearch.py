"""Successive cancellation: a codeword of a polar code close to given log-likelihood ratios.

A node of the code's tree covers n neighbouring inputs and maps n log-likelihood ratios
(LLR, ln P(x = 0) / P(x = 1)) to n bits of a codeword. From the halves a, b of its LLRs the left
child gets ``f(a, b)``, the LLR of a bit of ``x_L xor x_R``. Once the left child has found its bits
x_L, the right child gets ``g = b + (1 - 2 x_L) a``. The node's word is ``[x_L xor x_R, x_R]``. Bits
are represented by signs ``s = 1 - 2x``: xor is then a product, and ``g = b + s_L a``.

Three kinds of node need no children, without approximation: all inputs are frozen, no input is
frozen, or only the last input is sent (a repetition). Nothing is unrolled: the two children of a
level are two iterations of one loop, so the program for N inputs is log2 N nested loops. A table
gives the kind of each node. Arrays are ``(n, blocks)`` with the blocks contiguous. The index of a
node is never batched, so that a switch on the kind of a node runs one branch. Both searches are
jitted, because JAX would otherwise compile a loop again at every eager call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxmp.codecs.polarcode import Code

FROZEN, FREE, REPEATED, SPLIT = range(4)

Ratios = Float[Array, 'N blocks']


def kinds(code: Code) -> list[np.ndarray]:
    """The kinds of all nodes: entry l of the list holds those of the nodes with 2**l inputs."""
    sent = np.zeros(code.size, bool)
    sent[list(code.sent)] = True
    by_level = []
    for level in range(code.size.bit_length()):
        nodes = sent.reshape(-1, 2**level)
        some, last = nodes.sum(1), nodes[:, -1]
        kind = np.where((some == 1) & last, REPEATED, SPLIT)
        kind = np.where(some == 2**level, FREE, np.where(some == 0, FROZEN, kind))
        by_level.append(kind)
    return by_level


def f(a: Array, b: Array) -> Array:
    """The LLR of the xor of two bits, ``2 artanh(tanh(a / 2) tanh(b / 2))``."""
    total, apart = jnp.abs(a + b), jnp.abs(a - b)
    return (total - apart) / 2 + jnp.log((1 + jnp.exp(-total)) / (1 + jnp.exp(-apart)))


def _sign(llr: Array, noise: Array | float) -> Array:
    return jnp.where(llr < noise, -1, 1).astype(llr.dtype)


def _noise_of(noise: Array | None, start: Array, size: int) -> Array | float:
    return 0.0 if noise is None else lax.dynamic_slice_in_dim(noise, start, size)


@partial(jax.jit, static_argnums=0, inline=True)
def successive(code: Code, llr: Ratios, noise: Ratios | None = None) -> Ratios:
    """The codeword that successive cancellation finds, as signs.

    An input that is sent is 1 if its LLR is below its noise. Without noise this is the more likely
    value (argmax); with standard logistic noise it is randomised rounding,
    ``P(u = 1) = 1 / (1 + e^L)``.

    Args:
      code: says which inputs are sent.
      llr: log-likelihood ratios of the source bits.
      noise: one number per input.

    Returns:
      Signs ``1 - 2x`` of the codeword x.

    References:
      Polar Codes are Optimal for Lossy Source Coding, arXiv 0903.0307.
    """
    return _node(kinds(code), code.size.bit_length() - 1, jnp.int32(0), llr, noise)


def _node(tree: list[np.ndarray], level: int, j: Array, llr: Array, noise: Array | None) -> Array:
    """The word of node j of a level."""
    size = 2**level

    def frozen(llr: Array) -> Array:
        return jnp.ones_like(llr)

    def free(llr: Array) -> Array:
        return _sign(llr, _noise_of(noise, j * size, size))

    def repeated(llr: Array) -> Array:
        s = _sign(llr.sum(0, keepdims=True), _noise_of(noise, j * size + size - 1, 1))
        return jnp.broadcast_to(s, llr.shape)

    def split(llr: Array) -> Array:
        return _split(tree, level, j, llr, noise)

    return _switch(tree[level], j, (frozen, free, repeated, split), llr)


def _switch(kind: np.ndarray, j: Array, branches: tuple[Callable, ...], *args: Array):
    """The result of the branch for node j's kind; only the kinds at its level are compiled."""
    present = sorted(set(kind.tolist()))
    branch = jnp.asarray(np.searchsorted(present, kind), jnp.int32)[j]
    return lax.switch(branch, [branches[k] for k in present], *args)


def _split(tree: list[np.ndarray], level: int, j: Array, llr: Array, noise: Array | None) -> Array:
    half = 2 ** (level - 1)

    def child(right: Array, word: Array) -> Array:
        a, b = llr[:half], llr[half:]
        below = lax.cond(right == 0, lambda: f(a, b), lambda: b + word[:half] * a)
        s = _node(tree, level - 1, 2 * j + right, below, noise)
        return lax.dynamic_update_slice_in_dim(word, s, right * half, 0)

    word = lax.fori_loop(0, 2, child, jnp.zeros_like(llr))
    return word.at[:half].multiply(word[half:])


class _Paths(NamedTuple):
    """The result of a node of the list search: words, the path each continues, its penalty."""

    word: Float[Array, 'n paths blocks']
    parent: Array
    penalty: Float[Array, 'paths blocks']


@partial(jax.jit, static_argnums=(0, 2), inline=True)
def successive_list(code: Code, llr: Ratios, paths: int) -> Ratios:
    """The most likely codeword found by successive cancellation with several candidates (paths).

    Each input that is sent splits every path in two; the ``paths`` most likely ones are kept. The
    penalty of a path is ``-ln P(word | llr) = sum ln(1 + e^(-s L))`` over the inputs decided so
    far, including frozen ones. At the end it ranks words by their likelihood given the source.

    Args:
      code: says which inputs are sent.
      llr: log-likelihood ratios of the source bits.
      paths: number of candidates; the time is linear in it, except for sorting, which is quadratic.

    Returns:
      Signs of the codeword.

    References:
      List Decoding of Polar Codes, arXiv 1206.0050.
    """
    first = jnp.arange(paths)[:, None] == 0
    penalty = jnp.where(first, jnp.zeros_like(llr[:1]), jnp.inf)
    wide = jnp.broadcast_to(llr[:, None], (code.size, paths, llr.shape[1]))
    # Paths split at single inputs only: a split at every level would dominate the program.
    inputs, *above = kinds(code)
    tree = [inputs, *(np.where(kind == FROZEN, FROZEN, SPLIT) for kind in above)]
    survivors = _list_node(tree, len(above), jnp.int32(0), wide, penalty)
    best = jnp.argmin(survivors.penalty, 0)
    return _take(survivors.word, best[None])[:, 0]


def _take(x: Array, which: Array) -> Array:
    """``x[..., which[p, i], i]`` for x of shape ``(..., paths, blocks)``, by selects."""
    out = jnp.broadcast_to(x[..., :1, :], (*x.shape[:-2], *which.shape))
    for p in range(1, x.shape[-2]):
        out = jnp.where(which == p, x[..., p : p + 1, :], out)
    return out


def _cost(signed: Array) -> Array:
    """``ln(1 + e^-x)``."""
    return jnp.maximum(-signed, 0) + jnp.log1p(jnp.exp(-jnp.abs(signed)))


def _fork(llr: Array, penalty: Array) -> _Paths:
    """The best paths among all paths with either value of an input that is sent."""
    paths = penalty.shape[0]
    penalties = jnp.concatenate([penalty + _cost(llr)[0], penalty + _cost(-llr)[0]])
    order = jnp.arange(2 * paths)[:, None, None]
    before = (penalties < penalties[:, None]) | (
        (penalties == penalties[:, None]) & (order[:, 0] < order)
    )
    rank = before.sum(1, dtype=jnp.int32)  # the rank of each candidate; cheaper than sorting here
    candidate = jnp.zeros(penalty.shape, jnp.int32)
    for i in range(2 * paths):
        candidate = jnp.where(rank[i] == order[:paths, 0], i, candidate)
    s = jnp.where(candidate < paths, 1, -1).astype(llr.dtype)
    return _Paths(s[None], candidate % paths, _take(penalties, candidate))


def _same(penalty: Array) -> Array:
    """The parents where each path continues itself."""
    order = jnp.arange(penalty.shape[0], dtype=jnp.int32)[:, None]
    return order + jnp.zeros_like(penalty, jnp.int32)


def _list_node(tree: list[np.ndarray], level: int, j: Array, llr: Array, penalty: Array) -> _Paths:
    """The words of node j of a level, one per path that is kept."""

    def frozen(llr: Array, penalty: Array) -> _Paths:
        return _Paths(jnp.ones_like(llr), _same(penalty), penalty + _cost(llr).sum(0))

    def split(llr: Array, penalty: Array) -> _Paths:
        return _list_split(tree, level, j, llr, penalty)

    return _switch(tree[level], j, (frozen, _fork, _fork, split), llr, penalty)


def _list_split(tree: list[np.ndarray], level: int, j: Array, llr: Array, penalty: Array) -> _Paths:
    half = 2 ** (level - 1)

    def child(right: Array, so_far: _Paths) -> _Paths:
        word, parent, penalty = so_far
        a, b = llr[:half], llr[half:]
        below = lax.cond(
            right == 0,
            lambda: f(a, b),
            lambda: _take(b, parent) + word[:half] * _take(a, parent),
        )
        below = _list_node(tree, level - 1, 2 * j + right, below, penalty)
        s = below.word
        word = lax.cond(
            right == 0,
            lambda: word.at[:half].set(s),
            lambda: jnp.concatenate([_take(word[:half], below.parent) * s, s]),
        )
        return _Paths(word, _take(parent, below.parent), below.penalty)

    start = _Paths(jnp.zeros_like(llr), _same(penalty), penalty)
    return lax.fori_loop(0, 2, child, start)
