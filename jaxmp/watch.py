"""Who is still there: a line between every process and the first, beside the stages' own links.

Before JAX's own start every process reports to process 0 with what it is about to do: who does not
come, comes twice or has another configuration is named, and nobody begins. Afterwards a process
that fails says why, and one whose connection ends without a word has been killed; process 0 tells
all others, and each ends with that cause instead of waiting for a message that will not come.

Messages are JSON objects, one a line. A machine that vanishes is noticed by TCP's keep-alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

GRACE = 5.0  # seconds that a message is given to arrive


class TeamError(RuntimeError):
    """The processes of a run do not fit together, or one of them has ended."""


class Line:
    """A connection that carries JSON objects."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (('TCP_KEEPIDLE', 10), ('TCP_KEEPINTVL', 5), ('TCP_KEEPCNT', 4)):
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._sock, self._file = sock, sock.makefile('r')

    def send(self, **message: Any) -> None:
        """Sends an object; to a line that has ended, nothing."""
        with contextlib.suppress(OSError):
            self._sock.sendall((json.dumps(message) + '\n').encode())

    def read(self, timeout: float | None = None) -> dict[str, Any] | None:
        """The next object; None when the line has ended.

        Raises:
          TimeoutError: if none comes in ``timeout`` seconds.
        """
        self._sock.settimeout(timeout)
        try:
            text = self._file.readline()
            return json.loads(text) if text.endswith('\n') else None
        except TimeoutError:
            raise
        except (OSError, ValueError):
            return None

    def close(self) -> None:
        """Ends the line."""
        self._file.close()
        self._sock.close()


class Watch:
    """This process's line to all others; see `hub` and `join`."""

    def __init__(self, names: Sequence[str], index: int, lines: dict[int, Line]) -> None:
        self._names, self._index, self._lines = names, index, lines
        self._open, self._lock = set(lines), threading.Lock()
        self._fault, self._gone = threading.Event(), threading.Event()
        self._listeners = [
            threading.Thread(target=self._listen, args=item, daemon=True) for item in lines.items()
        ]
        for thread in self._listeners:
            thread.start()

    def end_without_memory(self) -> None:
        """From now on a thread that finds no memory ends the process, instead of being missed."""
        text = f'train.py: {self._names[self._index]}: MemoryError, out of memory\n'.encode()

        def ending(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
            def hook(args: Any) -> None:
                if args.exc_type is MemoryError:  # allocate nothing; the others see the line end
                    os.write(2, text)
                    os._exit(1)
                plain(args)

            return hook

        sys.unraisablehook = ending(sys.unraisablehook)
        threading.excepthook = ending(threading.excepthook)

    def _listen(self, other: int, line: Line) -> None:
        message = line.read()
        with self._lock:
            self._open.discard(other)
            if not self._open:
                self._gone.set()
        if message is None:
            message = {
                'fault': f'{self._names[other]} has gone without a word: killed, out of memory, or '
                'cut off from the network'
            }
        if 'fault' in message:
            mine = f'{self._names[self._index]}: stopped, because {message["fault"]}'
            self._end(message['fault'], mine)

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
        if self._index == 0:  # JAX aborts who loses process 0: let the others read it first
            self._gone.wait(GRACE)
        os._exit(1)

    def fail(self, cause: str) -> None:
        """Ends this process and, with ``cause``, all others.

        An error that another process's end brought about is not told as a cause of its own.
        """
        self._fault.wait(1.0)
        cause = f'{self._names[self._index]}: {cause}'
        self._end(cause, cause)
        time.sleep(2 * GRACE)  # another thread is ending this process

    def close(self) -> None:
        """Says that this process has done its work, and hears it of the others."""
        for line in self._lines.values():
            line.send(bye=True)
        for thread in self._listeners:
            thread.join(GRACE)
        for line in self._lines.values():
            line.close()


def names_of(owners: Sequence[int], what: str = 'stage') -> list[str]:
    """What a process is called in messages, given the process of each stage or replica.

    >>> names_of([0, 0, 1])
    ['process 0 (stages 0, 1)', 'process 1 (stage 2)']
    """
    rows = [[str(s) for s, o in enumerate(owners) if o == p] for p in range(max(owners) + 1)]
    return [f'process {p} ({what}{"s" * (len(r) > 1)} {", ".join(r)})' for p, r in enumerate(rows)]


def hub(port: int, names: Sequence[str], about: dict[str, Any], timeout: float) -> Watch:
    """Process 0's end: waits for the others.

    Args:
      port: where to listen.
      names: a name a process.
      about: what must be the same everywhere.
      timeout: seconds to wait for all.

    Raises:
      TeamError: if the port is in use, a process does not come, comes twice, or is about something
        else; those who came are told.
    """
    lines: dict[int, Line] = {}
    try:
        server = socket.create_server(('', port), backlog=len(names))
    except OSError as error:
        raise TeamError(
            f'port {port} cannot be used: {error}; give another coordinator port'
        ) from error
    end = time.monotonic() + timeout
    try:
        with server:
            while len(lines) < len(names) - 1:
                server.settimeout(max(0.01, end - time.monotonic()))
                line = Line(server.accept()[0])
                hello = line.read(GRACE) or {}
                index = hello.get('process')
                if not isinstance(index, int):
                    line.close()  # a stranger
                    continue
                problem = _problem(index, hello, lines, names, about)
                if problem:
                    _refuse([line], problem)
                    raise TeamError(problem)
                lines[index] = line
    except TimeoutError:
        missing = [n for i, n in enumerate(names) if i and i not in lines]
        problem = f'{" and ".join(missing)} did not come within {timeout:.0f} s'
        _refuse(lines.values(), problem)
        raise TeamError(problem) from None
    except TeamError as error:
        _refuse(lines.values(), str(error))
        raise
    for line in lines.values():
        line.send(go=True)
    return Watch(names, 0, lines)


def _refuse(lines: Iterable[Line], problem: str) -> None:
    for line in lines:
        line.send(refused=problem)
        line.close()


def _problem(
    index: int,
    hello: dict[str, Any],
    lines: dict[int, Line],
    names: Sequence[str],
    about: dict[str, Any],
) -> str | None:
    if not 0 < index < len(names):
        return f'a process came as number {index}; {len(names)} processes are 0..{len(names) - 1}'
    if index in lines:
        return f'two processes came as {names[index]}; give each its own number'
    other = hello['about']
    if other == about:
        return None
    keys = sorted(k for k in {**about, **other} if about.get(k) != other.get(k))
    differ = ', '.join(f'{k}={other.get(k)!r} (process 0: {about.get(k)!r})' for k in keys)
    return f'{names[index]} was started with {differ}; start all processes alike'


def join(
    host: str, port: int, index: int, names: Sequence[str], about: dict[str, Any], timeout: float
) -> Watch:
    """Another process's end: reports to process 0 and waits until all are there.

    Raises:
      TeamError: if process 0 does not answer in time, or refuses.
    """
    end = time.monotonic() + timeout
    while True:
        try:
            line = Line(socket.create_connection((host, port), GRACE))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise TeamError(
                    f'{names[0]} did not come within {timeout:.0f} s: no answer at {host}:{port} '
                    f'({error}); its port and the next one must be open'
                ) from error
            time.sleep(0.2)
    line.send(process=index, about=about)
    try:
        answer = line.read(timeout + GRACE)
    except TimeoutError:
        answer = None
    if answer and 'go' in answer:
        return Watch(names, index, {0: line})
    line.close()
    gone = f'{names[0]} ended before all processes were there'
    raise TeamError(answer['refused'] if answer else gone)
