"""How a payload moves: not at all (one process), or to the neighbouring device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from jaxmp.wire import Payload


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
