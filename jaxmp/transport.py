"""`Transport`: how a payload moves in a program: not at all, or to a mesh's next device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.wire import Like, Payload


class Transport(NamedTuple):
    """Where a payload goes.

    Attributes:
      forward: the payload of the next stage's side, given that of this stage.
      backward: the payload of the previous stage's side.
      one_place: both ends are here, so mirrored states need one copy.
    """

    forward: Callable[[Payload], Payload]
    backward: Callable[[Payload], Payload]
    one_place: bool = False


def local() -> Transport:
    """Both ends in one program: the payload is made and read, but stays where it is.

    The barrier keeps the compiler from cancelling encode against decode, so that what trains is
    what would have been sent.
    """
    return Transport(jax.lax.optimization_barrier, jax.lax.optimization_barrier, one_place=True)


def ppermute(axis: str, n: int) -> Transport:
    """Device i of mesh axis ``axis`` sends to i + 1, and gradients return to i - 1.

    Use inside `jax.shard_map`. Devices at the open ends receive zeros.

    Args:
      axis: name of the mesh axis that holds the stages.
      n: its size.

    Raises:
      ValueError: if ``n`` is not positive.
    """
    if n < 1:
        raise ValueError(f'ppermute needs a positive number of devices on {axis!r}, got {n}')
    right = [(i, i + 1) for i in range(n - 1)]
    left = [(i + 1, i) for i in range(n - 1)]

    def send(pairs: list[tuple[int, int]]) -> Callable[[Payload], Payload]:
        return lambda m: jax.tree.map(lambda a: jax.lax.ppermute(a, axis, pairs), m)

    return Transport(send(right), send(left))


def one_piece(payload: Payload, axes: int = 0) -> tuple[Array, Callable[[Array], Payload]]:
    """A payload as one array of bytes (a single array as it is), and the way back.

    Args:
      payload: arrays with equal first ``axes`` axes.
      axes: how many first axes are kept; the array that goes back may have any others.
    """
    leaves, tree = jax.tree.flatten(payload)
    if len(leaves) == 1:
        return leaves[0], lambda moved: tree.unflatten([moved])
    flat = [_bytes(a).reshape(*a.shape[:axes], -1) for a in leaves]
    ends = np.cumsum([f.shape[-1] for f in flat])[:-1]

    def back(moved: Array) -> Payload:
        parts = jnp.split(moved, ends, -1)
        kept = [jax.ShapeDtypeStruct(a.shape[axes:], a.dtype) for a in leaves]
        return tree.unflatten(map(_array, parts, kept))

    return jnp.concatenate(flat, -1), back


def _bytes(a: Array) -> Array:
    return a if a.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(a, jnp.uint8)


def _array(part: Array, like: Like) -> Array:
    part = part.reshape(*part.shape[:-1], *jax.eval_shape(_bytes, like).shape)
    return part if like.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(part, like.dtype)
