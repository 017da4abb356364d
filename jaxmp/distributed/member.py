"""`Member`: a replica's connection to the hub of an elastic run; see `jaxmp.distributed.hub`."""

from __future__ import annotations

import contextlib
import itertools
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from jaxmp.distributed.frames import GRACE, Header, frame, read_frame
from jaxmp.net.address import ProcessGroupError, reach

BEAT = 1.0  # seconds between two heartbeats
T = TypeVar('T')
Gather = Callable[[bytes], list[bytes]]


class BehindError(Exception):
    """The others go on without this replica, which has to join again."""


class _ViewError(Exception):
    """The view is not the one in which a message was sent."""


class View(NamedTuple):
    """The members present.

    Attributes:
      number: increases with every change.
      members: numbers of the replicas, in the order of their messages.
    """

    number: int
    members: tuple[int, ...]


class Welcome(NamedTuple):
    """What a member is told when it joins.

    Attributes:
      step: the step at which it joins.
      state: the shared state; empty if it has that state already.
      provide: whether it has to call `Member.provide` now, for others that lack the state.
    """

    step: int
    state: bytes
    provide: bool


class Member:
    """The connection of one replica.

    Attributes:
      replica: number of the replica.
      asked: set when the hub asks for the shared state, for a newcomer.
      views: the views so far with the step of the last gathering before, newest last.
    """

    def __init__(self, address: tuple[str, int], replica: int, token: str, patience: float) -> None:
        """Connects to nothing yet.

        Args:
          address: host and port of the hub.
          replica: number of the replica, from 0.
          token: the secret of the run.
          patience: seconds in which the hub must answer.
        """
        self.replica, self.asked, self.views = replica, threading.Event(), []
        self._address, self._patience = address, patience
        self._hello = {'replica': replica, 'token': token}
        self._sock: Any = None
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._door, self._inbox = queue.SimpleQueue(), queue.SimpleQueue()
        self._view = View(-1, ())

    def join(self, step: int, digest: Any, about: Header) -> Welcome:
        """Joins the run; returns when a member has sent the shared state, which can take a round.

        Args:
          step: number of steps of this replica's own state.
          digest: of the shared part of that state.
          about: settings that must be the same at all replicas; JSON.

        Raises:
          BehindError: if the connection is lost meanwhile.
          ProcessGroupError: if the hub does not answer, or refuses this replica.
        """
        advice = 'start it by `jaxmp launch --elastic`, or `jaxmp hub`'
        self._sock = reach(self._address, self._patience, 'the hub does not answer', advice)
        self._sock.settimeout(None)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send({'kind': 'join', **self._hello, 'step': step, 'digest': digest, 'about': about})
        for target in (self._listen, self._beat):
            threading.Thread(target=target, daemon=True).start()
        header, content = self._door.get()
        if header['kind'] == 'refused':
            self.leave()
            raise ProcessGroupError(f'replica {self.replica}: {header["why"]}')
        if header['kind'] != 'welcome':
            raise BehindError(header['why'])
        self._see(header, header['step'])
        return Welcome(header['step'], content, header['provide'])

    def provide(self, step: int, digest: Any, state: bytes) -> None:
        """Sends the shared state for newcomers, which join at ``step``."""
        self.asked.clear()
        self._send({'kind': 'state', 'step': step, 'digest': digest}, state)

    def gathering(self, step: int, digest: Any, run: Callable[[View, Gather], T]) -> T:
        """The result of ``run`` in a view that does not change while it runs.

        Args:
          step: number of the step after which all members gather.
          digest: of the shared part of what they gather, which must be the same at all members.
          run: ``(view, gather) -> result``, without side effects; it is called again whenever the
            view changes. ``gather`` sends a message and returns those of the view, in its order.

        Raises:
          BehindError: if the hub has closed the connection.
        """
        with contextlib.suppress(queue.Empty):
            while True:
                self._read(self._inbox.get_nowait(), step)
        while True:
            view, calls = self._view, itertools.count()
            try:
                return run(
                    view, lambda m, v=view, c=calls: self._gather(v, (step, next(c)), m, digest)
                )
            except _ViewError:
                continue

    def _gather(self, view: View, at: tuple[int, int], message: bytes, digest: Any) -> list[bytes]:
        place = {'view': view.number, 'step': at[0], 'call': at[1]}
        self._send({'kind': 'send', **place, 'digest': digest}, message)
        while True:
            header, content = self._inbox.get()
            self._read((header, content), at[0])
            if self._view != view:
                raise _ViewError
            if header['kind'] == 'all' and (header['step'], header['call']) == at:
                break
        size, rows = len(message), iter(range(len(view.members)))
        if len(content) != size * (len(view.members) - 1):
            raise ProcessGroupError(
                f'replicas of other sizes: {len(content)} bytes for {size} each'
            )
        part = lambda i: content[i * size : (i + 1) * size]
        return [message if r == self.replica else part(next(rows)) for r in view.members]

    def _read(self, at: tuple[Header, bytes], step: int) -> None:
        """Acts on what the hub says besides messages."""
        header = at[0]
        if header['kind'] == 'behind':
            self._inbox.put(at)  # for the rounds that are queued
            raise BehindError(header['why'])
        if header['kind'] == 'view' and header['view'] > self._view.number:
            self._see(header, step)

    def _see(self, header: Header, step: int) -> None:
        self._view = View(header['view'], tuple(header['members']))
        self.views.append((step, self._view.members))

    def _send(self, header: Header, content: bytes = b'') -> None:
        with self._lock, contextlib.suppress(OSError):  # the reader notices a lost connection
            self._sock.sendall(frame(header, content))

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            self._send({'kind': 'beat'})

    def _listen(self) -> None:
        last = {'kind': 'behind', 'why': 'lost the connection'}, b''
        with contextlib.suppress(OSError, ValueError):
            while True:
                header, content = read_frame(self._sock)
                if header['kind'] == 'ask':
                    self.asked.set()
                    continue
                away = header['kind'] in ('welcome', 'refused', 'bye')
                (self._door if away else self._inbox).put((header, content))
        self.leave()
        for inbox in (self._door, self._inbox):
            inbox.put(last)

    def close(self, step: int, finished: bool, state: Callable[[], bytes]) -> None:
        """Leaves the run.

        Args:
          step: number of the last step.
          finished: whether the run has ended there.
          state: the shared state, for replicas that come after all others have finished.
        """
        self._send({'kind': 'end', 'finished': finished})
        with contextlib.suppress(queue.Empty):
            header, _ = self._door.get(timeout=GRACE)
            if header.get('state'):
                self._send({'kind': 'final', 'step': step}, state())
                self._door.get(timeout=GRACE)  # the hub has read it and closes
        self.leave()

    def leave(self) -> None:
        """Closes the connection, if there is one."""
        self._closed.set()
        if self._sock is None:
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
