"""How a payload moves: not at all (one program), to the next device of a mesh, over a link.

A transport is traced into a program with both ends. A wire joins two programs and is driven from
Python: between two devices of a process it copies, between two processes it is a ppermute on a mesh
of their two devices, which only these two processes run.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
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


Device = Any  # a jax.Device


class Wire(NamedTuple):
    """A link between two stages, as one of its ends drives it.

    Attributes:
      exchange: ``((forward, backward), carries) -> (forward, backward)`` as they arrive; a
        direction that does not carry is None, one that this end only sends comes back as zeros.
      permuted: bytes that the compiled program's collectives move ``(forward, backward)``; zero
        where there is none.
    """

    exchange: Callable[[Sequence[Payload], Sequence[bool]], tuple[Payload, Payload]]
    permuted: Callable[[], tuple[int, int]]


def near(left: Device, right: Device) -> Wire:
    """A link inside this process: each payload is put on the other end's device."""

    def exchange(payloads: Sequence[Payload], carries: Sequence[bool]) -> tuple[Payload, Payload]:
        del carries
        return jax.device_put(payloads[0], right), jax.device_put(payloads[1], left)

    return Wire(exchange, lambda: (0, 0))


def far(left: Device, right: Device, like: Sequence[Payload]) -> Wire:
    """A link to another process: a ppermute that only the processes of the two devices run.

    Both ends must call it in the same order with the same ``carries``, which `schedule.links` says.
    The connection is made here, by `open_links`.

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
            f'far links this process ({jax.process_index()}) to another, got {left} and {right}; '
            'use near inside a process, and nothing where neither end is here'
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
        return permuted(swap.lower(*both).compile().as_text())

    return Wire(exchange, moves)


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


def permuted(text: str) -> tuple[int, int]:
    """Operand bytes of a compiled program's collective-permutes: to the next device, and back.

    The check on `jaxmp.bits` that no formula can pass: what the compiler moves. A permute over a
    chain of devices counts once, as what one device sends.

    Args:
      text: ``compiled.as_text()``.
    """
    moved = {'0,1': 0, '1,0': 0}
    pattern = r'= (.*) collective-permute(-start)?\(.*source_target_pairs={{(.,.)}'
    for shapes, started, way in re.findall(pattern, text):
        sizes = [
            math.prod(int(n) for n in shape.split(',') if n) * int(re.sub(r'\D', '', dtype)) // 8
            for dtype, shape in re.findall(r'([a-z]+\d+)\[([\d,]*)\]', shapes)
        ]
        moved[way] += sizes[0] if started else sum(sizes)  # a start's shape: operand, result, ...
    return moved['0,1'], moved['1,0']


def interface_bytes() -> int:
    """Bytes sent so far on this machine's network interfaces, or 0 where Linux does not tell."""
    try:
        lines = Path('/proc/net/dev').read_text().splitlines()[2:]
    except OSError:
        return 0
    return sum(int(line.split(':', 1)[1].split()[8]) for line in lines)
