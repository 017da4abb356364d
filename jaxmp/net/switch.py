"""`Switch`: the one open port of a run, where its processes meet and send what has no other way.

It needs no accelerator and keeps nothing: killed and started again, it learns from the processes
where they are, and they go on. What is forwarded is encrypted between each process and the switch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable

import zmq

from jaxmp.net.address import own_address
from jaxmp.net.keys import Keys
from jaxmp.net.messages import TO_SWITCH, read
from jaxmp.net.register import Register
from jaxmp.net.sockets import SWITCH, Sockets, address_of, put
from jaxmp.net.views import LEAVING

DATA = '/d'  # ends the name of the socket of a process that carries messages to other processes
TICK = 0.25  # seconds between two looks at the time


def aside(say: Callable[[str], object]) -> Callable[[str], None]:
    """``say`` in a thread of its own: a log that takes no more lines does not stop the switch."""
    lines = queue.SimpleQueue[str]()

    def run() -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                say(lines.get())

    threading.Thread(target=run, daemon=True).start()
    return lines.put


class Switch:
    """The switch of one run after another.

    Attributes:
      port: at which it listens.
      thread: in which it serves all processes, until `stop`.
    """

    def __init__(
        self, keys: Keys, host: str, port: int, say: Callable[[str], object] = lambda line: None
    ) -> None:
        """Serves.

        Args:
          keys: of the run.
          host: the address by which all reach this machine, at which it listens; see `own_address`.
          port: the port; 0 for a free one.
          say: called with a line for every view that begins or ends.

        Raises:
          ProcessGroupError: if the port is in use.
        """
        self._sockets, self._register = Sockets(keys), Register(aside(say))
        self._socket = self._sockets.listening(SWITCH, own_address(host), port)
        self.port, self._running = int(address_of(self._socket).rpartition(':')[2]), True
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        while self._running:
            self._sockets.serve(TICK, lambda _, name, frames: self._take(name, frames))
            self._register.look(time.monotonic())
            while self._register.out:
                name, message = self._register.out.popleft()
                try:
                    if not put(self._socket, name, message):
                        self._register.unreachable(name, time.monotonic())
                except ValueError as error:  # what all have said is too long together
                    self._register.fail(str(error))
        self._sockets.close()

    def _take(self, name: str, frames: list[zmq.Frame]) -> None:
        """Forwards a message, or acts on one that is for the switch."""
        if name.endswith(DATA):
            put(self._socket, frames[0], name, *frames[1:])
        else:
            self._register.take(name, read(frames, TO_SWITCH), time.monotonic())

    def stop(self) -> None:
        """Ends within a fraction of a second."""
        self._running = False
        self.thread.join(LEAVING)

    def close(self) -> None:
        """Ends once all processes have left, or after some seconds."""
        end = time.monotonic() + LEAVING
        while self._register.seats and time.monotonic() < end:
            time.sleep(0.02)
        self.stop()
