"""`Collectives`: all-reduce, all-gather and all-to-all between replicas, and the bytes they move.

An exchange calls the functions of `Collectives`. `over` implements them inside `jax.shard_map`.
`metered` implements them without communication and counts the bytes of their operands, so that the
reported bytes come from the same code that runs. `jaxmp.exchange.hlo.operands` reads the bytes of
the compiled program. `whole` and `part` lead into such programs and out of them.

All messages of a call are joined to one array of bytes, because each collective costs a round trip,
and because XLA:CPU widens bf16. Numbers that are added are joined to one array per dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from jaxmp.boundary.transport import moved
from jaxmp.wire import Payload, nbytes, varies, vary, widened

Device = Any  # a `jax.Device`, which is no static type
KeyWords = Any  # the data of a random key, on the host or traced
Tree = PyTree  # of arrays
Params = Tree  # of a stage, or of all
Grads = Tree  # of the form of the parameters
AXIS = 'replica'


class Collectives(NamedTuple):
    """The collectives of one replica; all replicas must make the same calls in the same order.

    Attributes:
      size: number of replicas n.
      index: number of this replica, from 0.
      all_reduce: sums the arrays of a tree over the replicas.
      all_gather: returns a payload of all replicas with a leading axis n; row i is from replica i.
      all_to_all: takes a payload with a leading axis n; row j is sent to replica j, and row i of
        the result is from replica i.
      own: raises ValueError if gradients have been summed over the replicas already; each exchange
        calls it first.
    """

    size: int
    index: Any
    all_reduce: Callable[[Tree], Tree]
    all_gather: Callable[[Payload], Payload]
    all_to_all: Callable[[Payload], Payload]
    own: Callable[[Grads], None] = lambda grads: None

    def mean(self, tree: Tree) -> Tree:
        """The mean over the replicas, in the dtypes of ``tree``; the sum is sent in float32.

        Numbers of 16 bits are sent in 32, which the bytes of an exchange say;
        ``scatter_gather(raw, raw)`` sends them in 16 and adds in 32.
        """
        total = self.all_reduce(widened(tree))
        return jax.tree.map(lambda a, t: (t / self.size).astype(a.dtype), tree, total)


def over(axis: str = AXIS) -> Collectives:
    """The collectives along a mesh axis, for use inside `jax.shard_map`.

    Under ``check_vma``, `jax.grad` with respect to a replicated parameter returns the sum over all
    replicas, which JAX has computed without compression. An exchange refuses such a gradient.

    Args:
      axis: name of the mesh axis.
    """

    def all_reduce(tree: Tree) -> Tree:
        leaves, form = jax.tree.flatten(tree)
        done: dict[int, Array] = {}
        for dtype in dict.fromkeys(a.dtype for a in leaves):
            alike = [i for i, a in enumerate(leaves) if a.dtype == dtype]
            parts = [leaves[i] for i in alike]
            joined = jnp.concatenate([a.reshape(-1) for a in parts])
            ends = [sum(a.size for a in parts[: k + 1]) for k in range(len(parts) - 1)]
            total = vary(lax.psum(joined, axis), [axis])  # as operands that are mixed must be
            for i, part in zip(alike, jnp.split(total, ends), strict=True):
                done[i] = part.reshape(leaves[i].shape)
        return form.unflatten([done[i] for i in range(len(leaves))])

    def own(grads: Grads) -> None:
        checked = axis in varies(lax.axis_index(axis))  # False under check_vma=False
        if checked and not all(axis in varies(g) for g in jax.tree.leaves(grads)):
            raise ValueError(
                f'these gradients are the same in all replicas along {axis!r}: jax.grad has summed '
                f'them, uncompressed, because the parameters are replicated; before jax.grad, set '
                f"params = jax.lax.pcast(params, {axis!r}, to='varying'), or give jax.shard_map "
                'check_vma=False'
            )

    gather = partial(moved, lambda piece: lax.all_gather(piece, axis))
    swap = partial(moved, lambda piece: lax.all_to_all(piece, axis, 0, 0), axes=1)
    return Collectives(lax.axis_size(axis), lax.axis_index(axis), all_reduce, gather, swap, own)


def known_after(tree: Tree, earlier: Tree) -> Tree:
    """``tree``, known only when all of ``earlier`` is, for collectives in branches of one program.

    JAX gives all collectives one channel. XLA runs independent `jax.lax.cond` at once in threads of
    a CPU, and in programs that JAX's compilation cache had kept one replica's message met another
    branch's, of another length, which wrote over foreign memory. `jax.lax.optimization_barrier`
    does not outlast XLA's passes; a dependence on numbers does.

    >>> known_after({'w': jnp.ones(2)}, [jnp.full(3, jnp.nan)])['w']
    Array([1., 1.], dtype=float32)
    """
    arrays = [a for a in jax.tree.leaves(earlier) if jnp.issubdtype(a.dtype, jnp.inexact)]
    heads = [jnp.sum(a.ravel()[:1]).astype(jnp.float32) for a in arrays]
    bits = [lax.bitcast_convert_type(x, jnp.int32) for x in heads]
    true = (sum(bits) | 1) != 0  # which XLA does not find out
    return jax.tree.map(lambda a: jnp.where(true, a, jnp.zeros_like(a)), tree)


def whole(place: NamedSharding, parts: Sequence[Tree]) -> Tree:
    """The trees of this process's devices as one over a mesh, joined as ``place`` says."""
    sizes = [place.mesh.shape[axis] for axis in place.spec]

    def join(*arrays: Array) -> Array:
        part, n = arrays[0].shape, len(sizes)
        shape = *(a * size for a, size in zip(part[:n], sizes, strict=True)), *part[n:]
        return jax.make_array_from_single_device_arrays(shape, place, arrays)

    return jax.tree.map(join, *parts)


def part(tree: Tree, device: Device) -> Tree:
    """What one device has of a tree over a mesh; inverse of `whole`."""
    data = lambda a: next(s.data for s in a.addressable_shards if s.device == device)
    return jax.tree.map(data, tree)


def metered(n: int, counts: dict[str, int]) -> Collectives:
    """Collectives for `jax.eval_shape`, with the shapes of `over`; they count operand bytes.

    Args:
      n: number of replicas.
      counts: operand bytes by kind of collective, to which each call adds.
    """

    def add(kind: str, tree: Tree) -> None:
        counts[kind] = counts.get(kind, 0) + nbytes(tree)

    def all_reduce(tree: Tree) -> Tree:
        add('all-reduce', tree)
        return tree

    def all_gather(payload: Payload) -> Payload:
        add('all-gather', payload)
        return jax.tree.map(lambda a: jnp.broadcast_to(a, (n, *a.shape)), payload)

    def all_to_all(payload: Payload) -> Payload:
        add('all-to-all', payload)
        return payload

    return Collectives(n, 0, all_reduce, all_gather, all_to_all)


def sent(counts: dict[str, int], n: int) -> int:
    """Bytes that a replica sends for operands of so many bytes, by ring algorithms.

    They are ``2 (n-1)/n`` times the operand for all-reduce, ``n-1`` times for all-gather, and
    ``(n-1)/n`` times for all-to-all and reduce-scatter.

    >>> sent({'all-reduce': 400}, 2), sent({'all-gather': 400}, 4)
    (400, 1200)
    """
    shares = {'all-reduce': 2 * (n - 1), 'all-gather': n * (n - 1)}
    return sum(size * shares.get(kind, n - 1) for kind, size in counts.items()) // n
