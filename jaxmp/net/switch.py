"""`Switch`: the one open port of a run, where its processes meet and send what has no other way.

It needs no accelerator and keeps nothing: killed and started again, it learns from the processes
where they are, and they go on. What is forwarded is encrypted between each process and the switch.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable

from jaxmp.net.address import own_address
from jaxmp.net.keys import Keys
from jaxmp.net.register import Register
from jaxmp.net.sockets import DATA, Frames, Sockets, address_of, put

TICK = 0.25  # seconds between two looks at the time
LEAVING = 5.0  # seconds to wait for the processes at the end


def said_aside(say: Callable[[str], object]) -> Callable[[str], None]:
    """``say`` in a thread of its own: a log that takes no more lines does not stop the switch."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run() -> None:
        while True:
            with contextlib.suppress(OSError, ValueError):
                say(lines.get())

    threading.Thread(target=run, daemon=True).start()
    return lines.put


class Switch:
    """The switch of one run after another; `serve` runs until `stop`."""

    def __init__(
        self, keys: Keys, host: str, port: int, say: Callable[[str], object] = print
    ) -> None:
        """Listens.

        Args:
          keys: of the run.
          host: the address by which all reach this machine, at which it listens; see `own_address`.
          port: the port; 0 for a free one.
          say: called with a line for every view that begins or ends.

        Raises:
          ProcessGroupError: if the port is in use.
        """
        self._sockets, self._register = Sockets(keys), Register(said_aside(say))
        self._port = self._sockets.listening(keys.switch, own_address(host), port or '*')
        self.port = int(address_of(self._port).rpartition(':')[2])
        self._running = True

    def serve(self) -> None:
        """Serves all processes."""
        while self._running:
            for _, frames in self._sockets.arrived(TICK):
                self._take(frames)
            self._register.look(time.monotonic())
            self._speak()
        self._sockets.close()

    def stop(self) -> None:
        """Ends `serve` within a fraction of a second."""
        self._running = False

    def _take(self, frames: Frames) -> None:
        """Forwards a message, or acts on one that is for the switch."""
        identity = frames[0].bytes
        if identity.endswith(DATA):
            put(self._port, frames[1], identity, *frames[2:])
        else:
            self._register.take(identity, json.loads(frames[1].bytes), time.monotonic())
            self._speak()

    def _speak(self) -> None:
        """Sends what the register has to say."""
        while self._register.out:
            identity, message = self._register.out.popleft()
            if not put(self._port, identity, message):
                self._register.unreachable(identity, time.monotonic())


class Hosted(Switch):
    """A switch in a thread of this process."""

    def __init__(
        self, keys: Keys, host: str, port: int, say: Callable[[str], object] = lambda line: None
    ) -> None:
        """Serves; see `Switch`."""
        super().__init__(keys, host, port, say)
        self._thread = threading.Thread(target=self.serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends once all processes have left, or after some seconds."""
        end = time.monotonic() + LEAVING
        while self._register.seats and time.monotonic() < end:
            time.sleep(0.02)
        self.stop()
        self._thread.join(LEAVING)
