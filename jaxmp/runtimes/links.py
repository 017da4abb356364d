"""`Lane`: one direction between two stages, which carries its messages in order, beside compute.

Between two devices of a process a message is copied. Between two processes it goes from host to
host (`jaxmp.net`), on every platform. Each lane between processes has a thread of its own, so
messages overlap compute, and both directions of a link each other.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_futures
from typing import Any, TypeVar

import jax
import numpy as np

from jaxmp.net.arrays import buffers, filled
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.placement import Device, is_here
from jaxmp.wire import Payload, nbytes

Address = Any  # of a message, as the group of processes counts it
Place = tuple[int, int] | None  # step and number of a message; None of the next one
Arrived = Future[tuple[Payload, float]]  # a message, and the time from which it may be used
T = TypeVar('T')
Move = Callable[[Payload | None, Address], Payload]


class Lane:
    """One direction of a link, as one of its ends (or both) uses it; see the module."""

    def __init__(
        self,
        move: Move,
        emulated: tuple[float, float] = (0.0, 0.0),
        address: Callable[[Place], Address] | None = None,
    ) -> None:
        """Carries nothing yet.

        Args:
          move: called with a message where it is sent, with None where it is only received, and
            with its address; it gives the message on the receiver's device.
          emulated: rate in Mbit/s (0 for any) and delay in ms of a slow link: a message of n bytes
            occupies the lane for ``8 n / (1e6 rate)`` s, and arrives ``delay / 1e3`` s later. No
            protocol adds bytes.
          address: of a message, between processes, given its place; None for copies, which JAX
            runs by itself.
        """
        rate, self._delay = emulated
        self._seconds = lambda n: 8 * n / (1e6 * rate) if rate else 0.0
        self._move, self._address = move, address or (lambda place: None)
        self._turn = ThreadPoolExecutor(1, 'lane') if address or any(emulated) else None

    def carry(self, sent: Future[Payload] | None, place: Place = None) -> Arrived:
        """The next message, once it is there, and the time from which it may be used.

        Args:
          sent: the message, where it is sent; None in a process that only receives it.
          place: its step and number, where it may arrive in a later step than it is sent in.
        """
        arrived: Arrived = Future()
        if (turn := self._turn) is None:
            assert sent is not None
            sent.add_done_callback(lambda done: self._follow(done, arrived))
            return arrived
        address = self._address(place)
        go = lambda *_: turn.submit(self._carry, address, sent, arrived)
        go() if sent is None else sent.add_done_callback(go)  # no thread waits for what is not made
        return arrived

    def _carry(self, address: Address, sent: Future[Payload] | None, arrived: Future[Any]) -> None:
        """Gives ``arrived`` a message that is sent or received, or its exception."""
        try:
            message = None if sent is None else jax.block_until_ready(sent.result())
            moved = jax.block_until_ready(self._move(message, address))
            time.sleep(self._seconds(nbytes(moved if message is None else message)))
            arrived.set_result((moved, time.monotonic() + self._delay / 1e3))
        except BaseException as error:  # whoever waits for the message gets it
            arrived.set_exception(error)

    def drain(self) -> None:
        """Waits until nothing is under way, as soon after a view has ended."""
        if self._turn:
            self._turn.submit(int).result()

    def _follow(self, done: Future[Payload], arrived: Arrived) -> None:
        """Gives ``arrived`` the copy of the result of ``done``, or its exception."""
        try:
            arrived.set_result((self._move(done.result(), None), 0.0))
        except BaseException as error:  # whoever waits for the message gets it
            arrived.set_exception(error)


def wait(arrived: Arrived) -> Payload:
    """The message of a lane, when it may be used."""
    message, usable = arrived.result()
    if (left := usable - time.monotonic()) > 0:
        time.sleep(left)
    return message


def usable(arrived: Arrived) -> bool:
    """Whether the message of a lane may be used; raises what went wrong."""
    return arrived.done() and arrived.result()[1] <= time.monotonic()


def first_usable(
    tasks: Iterable[T], arriving: Mapping[T, Arrived], others: Sequence[Arrived]
) -> T | None:
    """Waits for the first of some tasks whose message may be used, or that waits for none.

    It is None once no task's message may be used, but one of ``others``.
    """
    messages = {task: arriving.get(task) for task in tasks}
    while True:
        for task, message in messages.items():
            if message is None or usable(message):
                return task
        if any(map(usable, others)):
            return None
        futures = [*others, *filter(None, messages.values())]
        coming = [f for f in futures if not f.done()]
        left = [f.result()[1] - time.monotonic() for f in futures if f.done()]
        if coming:
            wait_futures(coming, min(left, default=None), FIRST_COMPLETED)
        else:
            time.sleep(max(0.0, min(left)))


def local_move(target: Device) -> Move:
    """Puts messages on another device of this process."""
    return lambda message, _: jax.device_put(message, target)


def remote_move(group: ProcessGroup, ends: tuple[Device, Device], like: Payload) -> Move:
    """Sends messages from one process to another, or receives them; through the host's memory.

    Args:
      group: the processes.
      ends: where messages are made, and where they are needed; one of them is elsewhere.
      like: shapes of a message.
    """
    source, target = ends

    def send(message: Payload | None, address: Address) -> Payload:
        group.send(target.process_index, address, *buffers(jax.tree.leaves(message)))
        return message

    def receive(message: Payload | None, address: Address) -> Payload:
        arrays = filled(group.receive(source.process_index, address), jax.tree.leaves(like))
        return jax.device_put(jax.tree.unflatten(jax.tree.structure(like), arrays), target)

    return send if is_here(source) else receive


def opener(
    devices: np.ndarray, group: ProcessGroup, emulated: tuple[float, float] = (0.0, 0.0)
) -> Callable[[int, int, int, Payload], Lane]:
    """Makes lanes: ``(replica, stage that sends, stage that receives, shapes of a message)``.

    Args:
      devices: those that compute, ``[r, s]``.
      group: the processes.
      emulated: rate and delay of the lanes; see `Lane`.
    """

    def opened(r: int, a: int, b: int, like: Payload) -> Lane:
        ends = devices[r, a], devices[r, b]
        if all(map(is_here, ends)):
            return Lane(local_move(ends[1]), emulated)
        tag = f'{"activation" if a < b else "gradient"} {a}->{b} of replica {r},'
        return Lane(remote_move(group, ends, like), emulated, functools.partial(group.address, tag))

    return opened
