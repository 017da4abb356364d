"""Rendezvous of the processes of a run: they connect to process 0, which checks their settings.

Before `jax.distributed` starts, each process connects to process 0 and sends its settings. If a
process does not connect, connects twice, or has other settings, all processes exit with an error
that names it. A connection has no effect until its first line contains the secret of the run:
without it, it can neither end nor delay the start.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp.distributed.address import listen, matches, own_address, reach
from jaxmp.distributed.monitor import (
    GRACE,
    Connection,
    Monitor,
    ProcessGroupError,
    line_of,
    object_of,
)

HELLO = 2**16  # largest size of a first line in bytes
PENDING = 100  # connections without a first line; if there are more, the oldest is closed


class Meeting(NamedTuple):
    """The parameters of a rendezvous, the same in all processes.

    Attributes:
      host: host of process 0.
      port: port on which process 0 listens.
      names: name of each process in messages.
      about: settings that must be the same in all processes; JSON.
      token: the secret that all processes share.
      timeout: seconds to wait for all processes.
      deadline: seconds without a heartbeat after which the monitor counts a process as failed.
    """

    host: str
    port: int
    names: Sequence[str]
    about: dict[str, Any]
    token: str = ''
    timeout: float = 50.0
    deadline: float = 60.0


def names_of(owners: Sequence[int], what: str = 'stage') -> list[str]:
    """The name of each process in messages, given the process of each stage or replica.

    >>> names_of([0, 0, 1])
    ['process 0 (stages 0, 1)', 'process 1 (stage 2)']
    """
    rows = [[str(s) for s, o in enumerate(owners) if o == p] for p in range(max(owners) + 1)]
    return [f'process {p} ({what}{"s" * (len(r) > 1)} {", ".join(r)})' for p, r in enumerate(rows)]


def serve_rendezvous(m: Meeting) -> Monitor:
    """The part of process 0: waits for all other processes.

    Raises:
      ProcessGroupError: if the port is in use, or a process does not connect, connects twice, or
        has other settings. The error is also sent to all processes that are connected.
    """
    with listen(own_address(m.host), m.port) as server, _Door(m, server) as door:
        lines = door.wait()
    for line in lines.values():
        line.send(go=True)
    return Monitor(m.names, 0, lines, m.deadline)


class _Door:
    """The connections of process 0 while it waits for the others."""

    def __init__(self, m: Meeting, server: socket.socket) -> None:
        self.m, self.server, self.ready = m, server, selectors.DefaultSelector()
        self.unknown: dict[socket.socket, bytes] = {}  # bytes received so far, oldest first
        self.came: dict[socket.socket, int] = {}  # number of the process
        self.away = ''  # the last connection that was rejected, and why
        server.setblocking(False)
        self.ready.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.ready.close()
        if isinstance(error, ProcessGroupError):
            for sock in self.came:
                _refuse(sock, str(error))
        for sock in (*self.unknown, *(self.came if error else ())):
            sock.close()

    def wait(self) -> dict[int, Connection]:
        """The connections to all other processes, by number."""
        end, others = time.monotonic() + self.m.timeout, range(1, len(self.m.names))
        while len(self.came) < len(others):
            if (left := end - time.monotonic()) <= 0:
                missing = [self.m.names[i] for i in others if i not in self.came.values()]
                problem = f'{" and ".join(missing)} did not connect within {self.m.timeout:.0f} s'
                raise ProcessGroupError(f'{problem}{self.away}')
            for key, _ in self.ready.select(left):
                sock: Any = key.fileobj
                if sock is self.server:
                    self.accept()
                elif sock in self.unknown or sock in self.came:  # not closed in this iteration
                    self.hear(sock)
        return {index: Connection(sock) for sock, index in self.came.items()}

    def accept(self) -> None:
        """Accepts a connection, whose process is not known yet."""
        try:
            sock, _ = self.server.accept()
        except OSError:  # the other end has closed it already
            return
        sock.setblocking(False)
        self.unknown[sock] = b''
        self.ready.register(sock, selectors.EVENT_READ)
        if len(self.unknown) > PENDING:
            self.drop(next(iter(self.unknown)), 'sent no data')

    def drop(self, sock: socket.socket, why: str) -> None:
        """Closes a connection and notes the reason."""
        with contextlib.suppress(OSError):
            self.away = f'; rejected {sock.getpeername()[0]}, which {why}'
        self.ready.unregister(sock)
        self.unknown.pop(sock, None)
        self.came.pop(sock, None)
        sock.close()

    def hear(self, sock: socket.socket) -> None:
        """Reads from a connection; a complete first line decides whether it is accepted."""
        try:
            part = sock.recv(HELLO)
        except OSError:
            part = b''
        if sock in self.came and part:
            return
        received = self.unknown.get(sock, b'') + part
        if not part or len(received) > HELLO:
            self.drop(sock, 'disconnected' if sock in self.came else 'sent no valid first line')
        elif b'\n' in part:
            self.greet(sock, object_of(received.partition(b'\n')[0] + b'\n') or {})
        else:
            self.unknown[sock] = received

    def greet(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Accepts or rejects a process by its first line."""
        index, about, token = (hello.get(k) for k in ('process', 'about', 'token'))
        if type(index) is not int or not isinstance(about, dict) or not isinstance(token, str):
            return self.drop(sock, 'sent no valid first line')
        if not matches(token, self.m.token):
            _refuse(sock, f'{self.m.names[0]} has another token; give all processes the same token')
            return self.drop(sock, 'has another token')
        try:
            problem = self.problem(index, about)
        except RecursionError:  # a value of a thousand nested lists
            return self.drop(sock, 'sent no valid first line')
        self.unknown.pop(sock)
        self.came[sock] = index
        if problem:
            raise ProcessGroupError(problem)
        return None

    def problem(self, index: int, about: dict[str, Any]) -> str | None:
        """The reason why a process cannot join, or None."""
        names, own = self.m.names, self.m.about
        if not 0 < index < len(names):
            last = len(names) - 1
            return f'a process has --process={index}; give 0 to {last} for {len(names)} processes'
        if index in self.came.values():
            return f'two processes connected as {names[index]}; give each its own --process'
        keys = sorted(k for k in {**own, **about} if own.get(k) != about.get(k))
        if not keys:
            return None
        differ = ', '.join(f'{k}={about.get(k)!r} (process 0: {own.get(k)!r})' for k in keys)
        return f'{names[index]} was started with {differ}; start all with the same settings'


def _refuse(sock: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        sock.send(line_of({'refused': problem}))


def join_rendezvous(m: Meeting, index: int) -> Monitor:
    """The part of process ``index``: connects to process 0 and waits until all have connected.

    Raises:
      ProcessGroupError: if process 0 does not answer in time, or rejects this process.
    """
    wrong = f'{m.names[0]} did not answer within {m.timeout:.0f} s'
    advice = 'check that it runs, and that its port and the one before are open'
    line = Connection(reach((m.host, m.port), m.timeout, wrong, advice))
    line.send(process=index, about=m.about, token=m.token)
    answer = line.read(m.timeout + GRACE)
    if answer and 'go' in answer:
        return Monitor(m.names, index, {0: line}, m.deadline)
    line.close()
    ended = f'{m.names[0]} ended before all processes had connected'
    raise ProcessGroupError(str(answer['refused']) if answer and 'refused' in answer else ended)
