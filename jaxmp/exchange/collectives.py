"""How replicas reach each other: all-reduce, all-gather, all-to-all, and the bytes these move.

A rule is written against `Collectives`, four functions. `over` makes them real, inside
`jax.shard_map`; `metered` makes a twin that moves nothing and counts what it is handed, so that a
report comes from the same lines that run. What the compiler makes of it, `jaxmp.hlo.operands`
reads from the compiled program.

Messages travel in one piece, as bytes: a collective starts a round trip after the last one, and
XLA:CPU widens bf16. Numbers that are added travel in one piece a dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.transport import one_piece
from jaxmp.wire import Payload, nbytes

AXIS = 'replica'


class Collectives(NamedTuple):
    """What a replica can ask of the others; all must ask alike.

    Attributes:
      size: number of replicas n.
      index: number of this one, from 0.
      total: a tree of numbers, summed over the replicas (all-reduce).
      gather: a payload, every array under a leading axis n: row i is replica i's (all-gather).
      swap: a payload under a leading axis n; row j goes to replica j, and row i of the result
        came from replica i (all-to-all).
      own: raises unless gradients are this replica's own; every exchange asks first.
    """

    size: int
    index: Any
    total: Callable[[Any], Any]
    gather: Callable[[Payload], Payload]
    swap: Callable[[Payload], Payload]
    own: Callable[[Any], None] = lambda grads: None


def over(axis: str = AXIS) -> Collectives:
    """The replicas along a mesh axis; call it inside `jax.shard_map`.

    Under ``check_vma``, `jax.grad` by a replicated parameter gives the sum over all replicas, which
    JAX has made in full precision: too late to compress. An exchange refuses such a gradient.

    Args:
      axis: name of the axis.
    """

    def total(tree: Any) -> Any:
        leaves, form = jax.tree.flatten(tree)
        done: dict[int, Array] = {}
        for dtype in dict.fromkeys(a.dtype for a in leaves):
            at = [i for i, a in enumerate(leaves) if a.dtype == dtype]
            parts = [leaves[i] for i in at]
            joined = jnp.concatenate([a.reshape(-1) for a in parts])
            ends = [sum(a.size for a in parts[: k + 1]) for k in range(len(parts) - 1)]
            for i, part in zip(at, jnp.split(_sum(joined, axis), ends), strict=True):
                done[i] = part.reshape(leaves[i].shape)
        return form.unflatten([done[i] for i in range(len(leaves))])

    def gather(payload: Payload) -> Payload:
        if not jax.tree.leaves(payload):  # nothing is large
            return payload
        piece, back = one_piece(payload)
        return back(lax.all_gather(piece, axis))

    def swap(payload: Payload) -> Payload:
        if not jax.tree.leaves(payload):
            return payload
        piece, back = one_piece(payload, 1)
        return back(lax.all_to_all(piece, axis, 0, 0))

    def own(grads: Any) -> None:
        checked = _varies(lax.axis_index(axis), axis)  # nothing is known under check_vma=False
        if checked and not all(_varies(g, axis) for g in jax.tree.leaves(grads)):
            raise ValueError(
                f'these gradients are the same in all replicas along {axis!r}: jax.grad has summed '
                f'them, uncompressed, because the parameters are replicated; before jax.grad, take '
                f"params = jax.lax.pcast(params, {axis!r}, to='varying'), or give jax.shard_map "
                'check_vma=False'
            )

    return Collectives(lax.axis_size(axis), lax.axis_index(axis), total, gather, swap, own)


def _varies(x: Any, axis: str) -> bool:
    return axis in jax.typeof(x).manual_axis_type.varying


def _sum(a: Array, axis: str) -> Array:
    """All-reduce; the sum is the same everywhere, what it is mixed with is not, and JAX asks."""
    return lax.pcast(lax.psum(a, axis), axis, to='varying')


def metered(n: int, counts: dict[str, int]) -> Collectives:
    """A twin of `over` for `jax.eval_shape`: shapes as of n replicas, operand bytes counted.

    Args:
      n: number of replicas.
      counts: the bytes of every kind of collective are added here.
    """

    def add(kind: str, tree: Any) -> None:
        counts[kind] = counts.get(kind, 0) + nbytes(tree)

    def total(tree: Any) -> Any:
        add('all-reduce', tree)
        return tree

    def gather(payload: Payload) -> Payload:
        add('all-gather', payload)
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), payload)

    def swap(payload: Payload) -> Payload:
        add('all-to-all', payload)
        return payload

    return Collectives(n, 0, total, gather, swap)


def sent(counts: dict[str, int], n: int) -> int:
    """Bytes that a replica sends for such operands, by the best known algorithms (a ring).

    All-reduce ``2 (n-1)/n``, all-gather ``n-1``, all-to-all and reduce-scatter ``(n-1)/n`` of its
    operand.

    >>> sent({'all-reduce': 400}, 2), sent({'all-gather': 400}, 4)
    (400, 1200)
    """
    shares = {'all-reduce': 2 * (n - 1), 'all-gather': n * (n - 1)}
    return sum(size * shares.get(kind, n - 1) for kind, size in counts.items()) // n
