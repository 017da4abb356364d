"""`Link`: how two stage programs exchange messages, driven from Python.

Between two devices of a process a message is copied; between two processes it is a ppermute on a
mesh of their two devices, which only these two processes run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.devices import Device
from jaxmp.hlo import permuted
from jaxmp.transport import one_piece
from jaxmp.wire import Payload


class Link(NamedTuple):
    """A link between two stages, as one of its ends drives it.

    Attributes:
      exchange: ``((forward, backward), carries) -> (forward, backward)`` as they arrive; a
        direction that does not carry is None, one that this end only sends comes back as zeros.
      permuted: bytes that the compiled program's collectives move ``(forward, backward)``; zero
        where there is none.
    """

    exchange: Callable[[Sequence[Payload], Sequence[bool]], tuple[Payload, Payload]]
    permuted: Callable[[], tuple[int, int]]


def local_link(left: Device, right: Device) -> Link:
    """A link inside this process: each payload is put on the other end's device."""

    def exchange(payloads: Sequence[Payload], carries: Sequence[bool]) -> tuple[Payload, Payload]:
        del carries
        return jax.device_put(payloads[0], right), jax.device_put(payloads[1], left)

    return Link(exchange, lambda: (0, 0))


def remote_link(left: Device, right: Device, like: Sequence[Payload]) -> Link:
    """A link to another process: a ppermute that only the processes of the two devices run.

    Both ends must call it in the same order with the same ``carries``, which
    `jaxmp.runtimes.schedule.transfers` says. The connection is made here, by `open_links`.

    Args:
      left: device of the earlier stage.
      right: device of the later one; exactly one of the two is of this process.
      like: shapes of the forward and of the backward payload, leading axis 1.

    Raises:
      ValueError: if both devices, or none, are of this process.
    """
    mine = [d.process_index == jax.process_index() for d in (left, right)]
    if sum(mine) != 1:
        raise ValueError(
            f'remote_link links this process ({jax.process_index()}) to another, got {left} and '
            f'{right}; use local_link inside a process, and nothing where neither end is here'
        )
    mesh = Mesh(np.array([left, right]), ('end',), axis_types=(AxisType.Auto,))
    open_links(mesh)
    sharding = NamedSharding(mesh, P('end'))
    swap = _swap(mesh)
    empty = [
        jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), mesh.local_devices[0]), p)
        for p in like
    ]

    def spread(a: Array) -> Array:
        return jax.make_array_from_single_device_arrays((2, *a.shape[1:]), sharding, [a])

    def exchange(payloads: Sequence[Payload], carries: Sequence[bool]) -> tuple[Payload, Payload]:
        given = [
            None if not c else p if own else zeros
            for c, own, p, zeros in zip(carries, mine, payloads, empty, strict=True)
        ]
        moved = swap(*jax.tree.map(spread, given))
        return jax.tree.map(lambda a: a.addressable_data(0), moved)

    def moves() -> tuple[int, int]:
        both = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype, sharding=sharding), like
        )
        found = permuted(swap.lower(*both).compile().as_text())
        return found.get((0, 1), 0), found.get((1, 0), 0)

    return Link(exchange, moves)


@functools.cache
def open_links(mesh: Mesh) -> None:
    """Connects the processes of a mesh, which must all call it at about the same time.

    gloo connects the processes of a set of devices when they first run a program over it, keeps the
    connections for every later one, and gives up if one comes half a minute after the others. So
    this is done before anything is compiled whose time can differ that much.
    """
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    ones = jax.make_array_from_callback((mesh.size,), sharding, lambda _: np.ones(1, np.float32))

    def open_links(a: Array) -> Array:  # so is it called in JAX's log of compilations
        return jnp.sum(a)

    jax.block_until_ready(jax.jit(open_links, out_shardings=NamedSharding(mesh, P()))(ones))


def _swap(mesh: Mesh) -> Any:
    """Compiled: the forward payload moves from the first device to the second, the other back."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P('end'), out_specs=P('end'))
    def swap(forward: Payload, backward: Payload) -> tuple[Payload, Payload]:
        return _shift(forward, (0, 1)), _shift(backward, (1, 0))

    return swap


def _shift(payload: Payload, way: tuple[int, int]) -> Payload:
    """Moves a payload in one piece: gloo starts a second one a round trip after the first."""
    if not jax.tree.leaves(payload):  # this exchange carries nothing this way
        return payload
    piece, back = one_piece(payload)
    return back(jax.lax.ppermute(piece, 'end', [way]))
