"""Who is still there: a line between every process and the first, beside the stages' own links.

A process that fails says why; one whose connection ends without a word was killed; one whose
heartbeat fails for the deadline is stopped, hung, or cut off from the network. Process 0 tells all
others, and each ends with that cause instead of waiting for a message that will not come. The line
also carries what processes compare before they compute; see `jaxmp.alike`.

Messages are JSON objects, one a line. How the lines are made: `jaxmp.rendezvous`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

GRACE = 5.0  # seconds that a message is given to arrive
LONGEST = 2**24  # bytes of a message
BEATS = 10  # heartbeats in a deadline


class TeamError(RuntimeError):
    """The processes of a run do not fit together, or one of them has ended."""


class Line:
    """A connection that carries JSON objects."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock, self._file, self._lock = sock, sock.makefile('rb'), threading.Lock()

    @property
    def address(self) -> str:
        """This machine's address on the way to the other end."""
        return self._sock.getsockname()[0].removeprefix('::ffff:')  # IPv4's, at an IPv6 socket

    def send(self, **message: Any) -> None:
        """Sends an object; to a line that has ended, nothing."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(line_of(message))

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next object; None when the line has ended, or none comes in ``timeout`` seconds."""
        try:
            self._sock.settimeout(timeout)
            return object_of(self._file.readline(LONGEST))
        except OSError:  # ETIMEDOUT, which is a TimeoutError too, among them
            return None

    def close(self) -> None:
        """Ends the line, for a thread that reads from it, too."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._sock.close()


def line_of(message: dict[str, Any]) -> bytes:
    r"""An object as the line that carries it.

    >>> line_of({'go': True})
    b'{"go": true}\n'
    """
    return (json.dumps(message) + '\n').encode()


def object_of(line: bytes) -> dict[str, Any] | None:
    r"""The JSON object of a whole line, None of anything else.

    >>> object_of(b'{"beat": true}\n'), object_of(b'[1]\n'), object_of(b'{"cut')
    ({'beat': True}, None, None)
    """
    try:
        found = json.loads(line) if line.endswith(b'\n') else None
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


class Watch:
    """This process's line to all others; see `jaxmp.rendezvous`.

    Attributes:
      names: what each process is called.
      index: this process's number.
    """

    def __init__(
        self, names: Sequence[str], index: int, lines: Mapping[int, Line], deadline: float
    ) -> None:
        """Starts listening and sending heartbeats.

        Args:
          names: what each process is called.
          index: this process's number.
          lines: to process 0, or from it to all others.
          deadline: seconds without a heartbeat after which another process counts as gone.
        """
        self.names, self.index = names, index
        self._lines, self._deadline = dict(lines), deadline
        self._open, self._heard = set(lines), dict.fromkeys(lines, time.monotonic())
        self._shared = {other: queue.SimpleQueue() for other in lines}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._fault, self._gone = threading.Event(), threading.Event()
        self._listeners = [
            threading.Thread(target=self._listen, args=item, daemon=True) for item in lines.items()
        ]
        for thread in (*self._listeners, threading.Thread(target=self._beat, daemon=True)):
            thread.start()

    @property
    def address(self) -> str:
        """The address at which the other processes reach this one."""
        return self._lines[min(self._lines)].address

    def end_without_memory(self) -> None:
        """From now on a thread that finds no memory ends the process, instead of being missed."""
        text = f'train.py: {self.names[self.index]}: MemoryError, out of memory\n'.encode()

        def ending(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def hook(args: Any) -> None:
                if args.exc_type is MemoryError:  # allocate nothing; the others see the line end
                    os.write(2, text)
                    os._exit(1)
                plain(args)

            return hook

        sys.unraisablehook = ending(sys.unraisablehook)
        threading.excepthook = ending(threading.excepthook)

    def share(self, value: Any) -> list[Any]:
        """Every process's ``value``, by its number; all must call it, and it waits for all.

        Args:
          value: JSON.
        """
        value = json.loads(json.dumps(value))  # as the others' arrive
        if self.index:
            self._lines[0].send(share=value)
            return self._shared[0].get()
        values = [value, *(self._shared[other].get() for other in sorted(self._lines))]
        for line in self._lines.values():
            line.send(share=values)
        return values

    def _listen(self, other: int, line: Line) -> None:
        """Reads what ``other`` sends until it has done its work, has failed or is gone."""
        while (message := line.read()) is not None and not message.keys() & {'bye', 'fault'}:
            self._heard[other] = time.monotonic()
            if 'share' in message:
                self._shared[other].put(message['share'])
        with self._lock:
            self._open.discard(other)
            if not self._open:
                self._gone.set()
        if message is None:
            self._lost(other, 'has gone without a word: killed, out of memory, or cut off')
        elif 'fault' in message:
            self._stop(message['fault'])

    def _beat(self) -> None:
        """Sends heartbeats, and ends the run when another process has sent none for too long."""
        every, before = self._deadline / BEATS, time.monotonic()
        while not self._closing.wait(every):
            for line in self._lines.values():
                line.send(beat=True)
            now = time.monotonic()
            if now - before > 3 * every:  # who stood still itself cannot judge the others
                self._heard.update(dict.fromkeys(self._heard, now))
            before = now
            for other in [o for o in self._lines if o in self._open]:
                if now - self._heard[other] > self._deadline:
                    self._lost(
                        other,
                        f'has been silent for {self._deadline:g} s: stopped, hung, swapping, or '
                        'cut off',
                    )

    def _lost(self, other: int, how: str) -> None:
        self._stop(f'{self.names[other]} {how} from the network')

    def _stop(self, cause: str) -> None:
        self._end(cause, f'{self.names[self.index]}: stopped, because {cause}')

    def _end(self, cause: str, text: str) -> None:
        """Tells the others ``cause``, prints ``text`` and ends; the first fault counts."""
        with self._lock:
            if self._fault.is_set():
                return
            self._fault.set()
        for line in self._lines.values():
            line.send(fault=cause)
        sys.stdout.flush()
        os.write(2, f'train.py: {text}\n'.encode())
        if self.index == 0:  # JAX aborts who loses process 0: let the others read it first
            self._gone.wait(GRACE)
        os._exit(1)

    def fail(self, cause: str) -> None:
        """Ends this process and, with ``cause``, all others.

        An error that another process's end brought about is not told as a cause of its own.
        """
        self._fault.wait(1.0)
        cause = f'{self.names[self.index]}: {cause}'
        self._end(cause, cause)
        time.sleep(2 * GRACE)  # another thread is ending this process

    def close(self) -> None:
        """Says that this process has done its work, and hears it of the others."""
        self._closing.set()
        for line in self._lines.values():
            line.send(bye=True)
        for thread in self._listeners:
            thread.join(GRACE)
        for line in self._lines.values():
            line.close()
