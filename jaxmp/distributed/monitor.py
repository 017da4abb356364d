"""`Monitor`: detection of failed processes, by a connection from each process to process 0.

A process that fails sends the cause. A process that is killed is detected by its closed connection.
A process that is suspended, hangs, or loses its network is detected by missing heartbeats. Process
0 sends the cause to all other processes, and each of them exits with it instead of waiting for a
message that will never arrive. The connections also carry the values that processes compare before
they start to compute; see `jaxmp.training.agreement`.

A message is a JSON object on one line. `jaxmp.distributed.rendezvous` opens the connections, which
are separate from the links between stages.
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

GRACE = 5.0  # seconds to wait for a message to arrive
LONGEST = 2**24  # largest size of a message in bytes
BEATS = 10  # heartbeats per deadline


class ProcessGroupError(RuntimeError):
    """An error of the group: processes with different settings, or a process that has failed."""


class Connection:
    """A connection that sends and receives JSON objects."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._sock, self._file, self._lock = sock, sock.makefile('rb'), threading.Lock()

    @property
    def address(self) -> str:
        """The address of this machine on the interface that the connection uses."""
        return self._sock.getsockname()[0].removeprefix('::ffff:')  # IPv4 on an IPv6 socket

    def send(self, **message: Any) -> None:
        """Sends an object; does nothing if the connection is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(line_of(message))

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next object; None if the connection is closed, or after ``timeout`` seconds."""
        try:
            self._sock.settimeout(timeout)
            return object_of(self._file.readline(LONGEST))
        except OSError:  # includes ETIMEDOUT, which Python raises as TimeoutError
            return None

    def close(self) -> None:
        """Closes the connection, also for a thread that is reading from it."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()
        self._sock.close()


def line_of(message: dict[str, Any]) -> bytes:
    r"""The line that encodes an object.

    >>> line_of({'go': True})
    b'{"go": true}\n'
    """
    return (json.dumps(message) + '\n').encode()


def object_of(line: bytes) -> dict[str, Any] | None:
    r"""The JSON object that a complete line encodes; None for anything else.

    >>> object_of(b'{"beat": true}\n'), object_of(b'[1]\n'), object_of(b'{"cut')
    ({'beat': True}, None, None)
    """
    try:
        value = json.loads(line) if line.endswith(b'\n') else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


class Monitor:
    """The monitor of one process, connected to all other processes through process 0.

    Attributes:
      names: name of each process in messages.
      index: number of this process.
    """

    def __init__(
        self, names: Sequence[str], index: int, lines: Mapping[int, Connection], deadline: float
    ) -> None:
        """Starts threads that read messages and send heartbeats.

        Args:
          names: name of each process in messages.
          index: number of this process.
          lines: connections by the number of the other process: to process 0, or, in process 0, to
            all others.
          deadline: seconds without a heartbeat after which another process counts as failed.
        """
        self.names, self.index = names, index
        self._lines, self._deadline = dict(lines), deadline
        self._open, self._heard = set(lines), dict.fromkeys(lines, time.monotonic())
        self._shared = {other: queue.SimpleQueue() for other in lines}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._fault, self._gone = threading.Event(), threading.Event()
        self._closed = threading.Event()
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
        """Makes a MemoryError in any thread end the process; by default only the thread ends."""
        text = f'train.py: {self.names[self.index]}: MemoryError, out of memory\n'.encode()

        def ending(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def hook(args: Any) -> None:
                if args.exc_type is MemoryError:  # allocate nothing; the others detect the exit
                    os.write(2, text)
                    os._exit(1)
                plain(args)

            return hook

        sys.unraisablehook = ending(sys.unraisablehook)
        threading.excepthook = ending(threading.excepthook)

    def share(self, value: Any) -> list[Any]:
        """The values of all processes, by number; all must call it, and each call waits for all.

        Args:
          value: a JSON value.
        """
        value = json.loads(json.dumps(value))  # in the form in which the others receive it
        if self.index:
            self._lines[0].send(share=value)
            return self._shared[0].get()
        values = [value, *(self._shared[other].get() for other in sorted(self._lines))]
        for line in self._lines.values():
            line.send(share=values)
        return values

    def _listen(self, other: int, line: Connection) -> None:
        """Reads messages of process ``other`` until it has finished or failed."""
        while (message := line.read()) is not None and not message.keys() & {'bye', 'fault'}:
            self._heard[other] = time.monotonic()
            if 'share' in message:
                self._shared[other].put(message['share'])
        with self._lock:
            self._open.discard(other)
            if not self._open:
                self._gone.set()
        if message is None and not self._closed.is_set():  # not the close of this process
            self._stop(
                f'lost connection to {self.names[other]}: it was killed, ran out of memory, or the '
                'network failed'
            )
        elif message and 'fault' in message:
            self._stop(message['fault'])

    def _beat(self) -> None:
        """Sends heartbeats; ends the run if another process has sent none until the deadline."""
        every, before = self._deadline / BEATS, time.monotonic()
        while not self._closing.wait(every):
            for line in self._lines.values():
                line.send(beat=True)
            now = time.monotonic()
            if now - before > 3 * every:  # this process was suspended, so it restarts all deadlines
                self._heard.update(dict.fromkeys(self._heard, now))
            before = now
            for other in [o for o in self._lines if o in self._open]:
                if now - self._heard[other] > self._deadline:
                    self._stop(
                        f'no heartbeat from {self.names[other]} for {self._deadline:g} s: it is '
                        'suspended, hangs or swaps, or the network failed'
                    )

    def _stop(self, cause: str) -> None:
        self._end(cause, f'{self.names[self.index]}: stopped: {cause}')

    def _end(self, cause: str, text: str) -> None:
        """Sends ``cause`` to the others, prints ``text`` and exits; only the first call counts."""
        with self._lock:
            if self._fault.is_set():
                return
            self._fault.set()
        for line in self._lines.values():
            line.send(fault=cause)
        sys.stdout.flush()
        os.write(2, f'train.py: {text}\n'.encode())
        if self.index == 0:  # JAX aborts processes that lose process 0; let them read this first
            self._gone.wait(GRACE)
        self._exit()

    def _exit(self) -> None:
        """Ends this process from any of its threads."""
        os._exit(1)

    def fail(self, cause: str) -> None:
        """Ends this process and all others with ``cause``.

        If the error follows from the failure of another process, that cause is reported instead.
        """
        self._fault.wait(1.0)
        cause = f'{self.names[self.index]}: {cause}'
        self._end(cause, cause)
        time.sleep(2 * GRACE)  # another thread is ending this process

    def close(self) -> None:
        """Reports that this process has finished, and waits for the others to report it."""
        self._closing.set()
        for line in self._lines.values():
            line.send(bye=True)
        for thread in self._listeners:
            thread.join(GRACE)
        self._closed.set()
        for line in self._lines.values():
            line.close()
