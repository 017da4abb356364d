"""What a message needs on its way: a layout that codecs can reshape, and one array of bytes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmp.wire import Like, Payload, explicit_mesh


def laid_out(
    move: Callable[..., tuple[Array, PyTree, PyTree]], x: Array, state: PyTree, rest: PyTree
) -> tuple[Array, PyTree, PyTree]:
    """``move(x, state, rest)`` where the compiler decides how arrays lie on the devices of a mesh.

    Codecs reshape, which a mesh of Explicit axes, the default of `jax.make_mesh`, refuses.

    Args:
      move: ``-> (y, state, positions)``; y and the state lie as ``x`` and ``state`` do.
      x: a tensor.
      state: arrays.
      rest: what else ``move`` needs.
    """
    mesh = explicit_mesh(x)
    if mesh is None:
        return move(x, state, rest)
    lies = lambda a: NamedSharding(mesh, jax.typeof(a).sharding.spec)
    out = lies(x), jax.tree.map(lies, state), NamedSharding(mesh, PartitionSpec())
    with jax.sharding.use_abstract_mesh(mesh):
        automatic: Callable = jax.sharding.auto_axes(move, out_sharding=out)
        return automatic(x, state, rest)


def one_piece(payload: Payload, axes: int = 0) -> tuple[Array, Callable[[Array], Payload]]:
    """A payload joined to one array of bytes, and the inverse.

    A single array stays as it is, except bfloat16, which XLA:CPU would send as float32.

    Args:
      payload: arrays with equal first ``axes`` axes.
      axes: number of first axes that are kept; the inverse also takes other sizes of them.
    """
    leaves, tree = jax.tree.flatten(payload)
    if len(leaves) == 1 and leaves[0].dtype != jnp.bfloat16:
        return leaves[0], lambda moved: tree.unflatten([moved])
    flat = [_bytes(a).reshape(*a.shape[:axes], -1) for a in leaves]
    ends = np.cumsum([f.shape[-1] for f in flat])[:-1]

    def back(moved: Array) -> Payload:
        parts = jnp.split(moved, ends, -1)
        likes = [jax.ShapeDtypeStruct(a.shape[axes:], a.dtype) for a in leaves]
        return tree.unflatten(map(_array, parts, likes))

    return jnp.concatenate(flat, -1), back


def moved(move: Callable[[Array], Array], payload: Payload, axes: int = 0) -> Payload:
    """A payload after ``move``, a collective of `one_piece` of it; none is made if it is empty."""
    if not jax.tree.leaves(payload):
        return payload
    piece, back = one_piece(payload, axes)
    return back(move(piece))


def _bytes(a: Array) -> Array:
    return a if a.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(a, jnp.uint8)


def _array(part: Array, like: Like) -> Array:
    part = part.reshape(*part.shape[:-1], *jax.eval_shape(_bytes, like).shape)
    return part if like.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(part, like.dtype)
