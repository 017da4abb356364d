"""`Lane`: one direction between two stages, which carries its messages in order, beside compute.

Between two devices of a process a message is copied. Between two processes on CPUs each lane has a
TCP connection and a thread of its own, so messages overlap compute, and both directions of a link
each other. On GPUs a message is a ppermute on a mesh of two devices, which only these two processes
run; all lanes of a process take turns, in one order for all processes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp.distributed.placement import Device, open_links
from jaxmp.distributed.streams import stream
from jaxmp.exchange.collectives import part, whole
from jaxmp.hlo import permuted
from jaxmp.transport import one_piece
from jaxmp.wire import Payload, nbytes

Move = Callable[[Payload | None], Payload]


class Lane:
    """One direction of a link, as one of its ends (or both) uses it; see the module.

    Attributes:
      permuted: see `__init__`.
      spans: when each message left and when it arrived, by its number and `time.monotonic`; None
        notes nothing. A process that only receives does not know the former.
    """

    def __init__(
        self,
        move: Move,
        turn: ThreadPoolExecutor | None = None,
        emulated: tuple[float, float] = (0.0, 0.0),
        permuted: Callable[[], int] = lambda: 0,
    ) -> None:
        """Carries nothing yet.

        Args:
          move: called with a message where it is sent, with None where it is only received; it
            gives the message on the receiver's device.
          turn: the thread that moves messages; None for copies, which JAX runs by itself.
          emulated: rate in Mbit/s (0 for any) and delay in ms of a slow link: a message of n bytes
            occupies the lane for ``8 n / (1e6 rate)`` s, and arrives ``delay / 1e3`` s later. No
            protocol adds bytes.
          permuted: bytes per message that a connection or a compiled collective moves.
        """
        rate, self._delay = emulated
        self._seconds = lambda n: 8 * n / (1e6 * rate) if rate else 0.0
        self._move, self.permuted, self._number = move, permuted, 0
        self._turn = turn or (ThreadPoolExecutor(1, 'lane') if any(emulated) else None)
        self.spans: dict[int, tuple[float, float]] | None = None

    def carry(self, sent: Future[Payload] | None) -> Future[tuple[Payload, float]]:
        """The next message, once it is there, and the time from which it may be used.

        Args:
          sent: the message, where it is sent; None in a process that only receives it.
        """
        n, self._number = self._number, self._number + 1
        if self._turn:
            return self._turn.submit(self._carry, n, sent)
        assert sent is not None
        arrived: Future[tuple[Payload, float]] = Future()
        sent.add_done_callback(lambda done: self._follow(n, done, arrived))
        return arrived

    def _carry(self, n: int, sent: Future[Payload] | None) -> tuple[Payload, float]:
        message = None if sent is None else jax.block_until_ready(sent.result())
        start = time.monotonic()
        arrived = jax.block_until_ready(self._move(message))
        time.sleep(self._seconds(nbytes(arrived if message is None else message)))
        end = time.monotonic() + self._delay / 1e3
        self._note(n, start, end)
        return arrived, end

    def _follow(self, n: int, done: Future[Payload], arrived: Future[Any]) -> None:
        """Gives ``arrived`` the copy of the result of ``done``, or its exception."""
        try:
            start, moved = time.monotonic(), self._move(done.result())
            if self.spans is not None:
                jax.block_until_ready(moved)
            self._note(n, start, time.monotonic())
            arrived.set_result((moved, 0.0))
        except BaseException as error:  # whoever waits for the message gets it
            arrived.set_exception(error)

    def _note(self, n: int, start: float, end: float) -> None:
        if self.spans is not None:
            self.spans[n] = start, end


def wait(arrived: Future[tuple[Payload, float]]) -> Payload:
    """The message of a lane, when it may be used."""
    message, at = arrived.result()
    if (left := at - time.monotonic()) > 0:
        time.sleep(left)
    return message


def local_move(target: Device) -> Move:
    """Puts messages on another device of this process."""
    return lambda message: jax.device_put(message, target)


def streamed_move(
    mesh: Mesh, lane: tuple[int, int], like: Payload
) -> tuple[Move, ThreadPoolExecutor]:
    """Moves messages from one process to another through a TCP connection, without collectives.

    Args:
      mesh: the devices of both ends, under the axis ``'end'``.
      lane: the stages that send and receive.
      like: shapes of a message.

    Returns:
      The move, and the thread in which it must be called.
    """
    line, target = stream(mesh, lane), mesh.devices[1]

    def move(message: Payload | None) -> Payload:
        if message is None:
            return jax.device_put(line.receive(like), target)
        line.send(message)
        return message

    return move, line.thread


def remote_move(mesh: Mesh, like: Payload, target: Device) -> tuple[Move, Callable[[], int]]:
    """Moves messages from the first device of a mesh to the second, which is of another process.

    Both processes must call it as often, in the same order. The connection is made here, by
    `jaxmp.distributed.placement.open_links`.

    Args:
      mesh: the two devices, under the axis ``'end'``.
      like: shapes of a message, leading axis 1.
      target: where the message is put after it has arrived.

    Returns:
      The move, and the bytes that its compiled program's collectives move.

    Raises:
      ValueError: if both devices, or none, are of this process.
    """
    here = [d for d in mesh.devices if d.process_index == jax.process_index()]
    if len(here) != 1:
        raise ValueError(
            f'remote_move links this process ({jax.process_index()}) to another, got '
            f'{mesh.devices.tolist()}; use local_move inside a process, and nothing where neither '
            'end is here'
        )
    open_links(mesh)
    place, shift = NamedSharding(mesh, P('end')), _shift(mesh)
    empty = jax.tree.map(lambda a: jax.device_put(np.zeros(a.shape, a.dtype), here[0]), like)

    def move(message: Payload | None) -> Payload:
        given = empty if message is None else jax.device_put(message, here[0])
        moved = part(shift(whole(place, [given])), here[0])
        return jax.device_put(moved, target) if message is None else moved

    def moves() -> int:
        both = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype, sharding=place), like
        )
        return permuted(shift.lower(both).compile().as_text()).get((0, 1), 0)

    return move, moves


def pair(source: Device, target: Device) -> Mesh:
    """The mesh of the two ends of a lane."""
    return Mesh(np.array([source, target]), ('end',), axis_types=(AxisType.Auto,))


@functools.cache
def _shift(mesh: Mesh) -> Any:
    """Compiled: a message in one piece, as a second one starts a round trip after the first."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P('end'), out_specs=P('end'))
    def shift(message: Payload) -> Payload:
        piece, back = one_piece(message)
        return back(jax.lax.ppermute(piece, 'end', [(0, 1)]))

    return shift
