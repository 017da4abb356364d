"""The first meeting of a run's processes: who comes, what with, and who is turned away.

Every process reports to process 0 with what it is about to do, before JAX's own start: who does not
come, comes twice or has another configuration is named, and nobody begins. A connection is nobody's
until its first line proves that it knows the processes' secret; until then it can neither end the
start nor hold it up.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.watch import GRACE, Line, TeamError, Watch, line_of, object_of

TOKEN = 'JAXMP_TOKEN'  # the environment variable that holds the secret
HELLO = 2**16  # bytes of a first line
PENDING = 100  # connections that have not said who they are; of more, the oldest is dropped


class Meeting(NamedTuple):
    """What all processes know of their meeting.

    Attributes:
      host: of process 0.
      port: where it listens.
      names: what each process is called.
      about: what must be the same everywhere; JSON.
      token: the secret that all share.
      timeout: seconds to wait for all.
      deadline: seconds of silence after which a process counts as gone, later.
    """

    host: str
    port: int
    names: Sequence[str]
    about: dict[str, Any]
    token: str = ''
    timeout: float = 50.0
    deadline: float = 60.0


def names_of(owners: Sequence[int], what: str = 'stage') -> list[str]:
    """What a process is called in messages, given the process of each stage or replica.

    >>> names_of([0, 0, 1])
    ['process 0 (stages 0, 1)', 'process 1 (stage 2)']
    """
    rows = [[str(s) for s, o in enumerate(owners) if o == p] for p in range(max(owners) + 1)]
    return [f'process {p} ({what}{"s" * (len(r) > 1)} {", ".join(r)})' for p, r in enumerate(rows)]


def secret(file: str | None) -> str:
    """The processes' secret: the text of ``file``, else of the environment's, else empty.

    Raises:
      TeamError: if the file cannot be read or is empty.
    """
    if file is None:
        return os.environ.get(TOKEN, '')
    try:
        text = Path(file).read_text().strip()
    except (OSError, ValueError) as error:
        raise TeamError(f'cannot read the token file: {error}; give one that is text') from error
    if not text:
        raise TeamError(f'the token file {file} is empty; write a random text into it')
    return text


def is_loopback(host: str) -> bool:
    """Whether ``host`` means this machine on every machine.

    >>> is_loopback('localhost'), is_loopback('127.0.0.1'), is_loopback('10.0.0.1')
    (True, True, False)
    """
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(host: str) -> str:
    """The address at which process 0 listens: ``host``'s, or '' for all of this machine's.

    All where the host is another one's (behind a translation of addresses), is not known yet, or
    is a name of this machine that only here means loopback, as Debian's /etc/hosts has it.
    """
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # the second of what cannot be a name
        return ''
    for family, *_, address in found:
        if ipaddress.ip_address(address[0]).is_loopback and not is_loopback(host):
            return ''
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind(address)
            return str(address[0])
    return ''


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens at ``address``, or at all for ''.

    Raises:
      TeamError: if the port is in use.
    """
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ':' in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise TeamError(
            f'port {port} cannot be used: {error}; give another coordinator port'
        ) from error


def hub(m: Meeting) -> Watch:
    """Process 0's end: waits for the others.

    Raises:
      TeamError: if the port is in use, a process does not come, comes twice, or is about something
        else; those who came are told.
    """
    with listen(own_address(m.host), m.port) as server, _Door(m, server) as door:
        lines = door.wait()
    for line in lines.values():
        line.send(go=True)
    return Watch(m.names, 0, lines, m.deadline)


class _Door:
    """The connections to process 0 while it waits for the others."""

    def __init__(self, m: Meeting, server: socket.socket) -> None:
        self.m, self.server, self.ready = m, server, selectors.DefaultSelector()
        self.unknown: dict[socket.socket, bytes] = {}  # what each has said, the oldest first
        self.came: dict[socket.socket, int] = {}
        self.away = ''  # who was turned away last, and why
        server.setblocking(False)
        self.ready.register(server, selectors.EVENT_READ)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.ready.close()
        if isinstance(error, TeamError):
            for sock in self.came:
                _refuse(sock, str(error))
        for sock in (*self.unknown, *(self.came if error else ())):
            sock.close()

    def wait(self) -> dict[int, Line]:
        """The lines to all others, by their number."""
        end, others = time.monotonic() + self.m.timeout, range(1, len(self.m.names))
        while len(self.came) < len(others):
            if (left := end - time.monotonic()) <= 0:
                missing = [self.m.names[i] for i in others if i not in self.came.values()]
                came = f'{" and ".join(missing)} did not come within {self.m.timeout:.0f} s'
                raise TeamError(f'{came}{self.away}')
            for key, _ in self.ready.select(left):
                sock: Any = key.fileobj
                if sock is self.server:
                    self.accept()
                elif sock in self.unknown or sock in self.came:  # not dropped just before
                    self.hear(sock)
        return {index: Line(sock) for sock, index in self.came.items()}

    def accept(self) -> None:
        """Lets a connection in, as unknown."""
        try:
            sock, _ = self.server.accept()
        except OSError:  # it has gone again
            return
        sock.setblocking(False)
        self.unknown[sock] = b''
        self.ready.register(sock, selectors.EVENT_READ)
        if len(self.unknown) > PENDING:
            self.drop(next(iter(self.unknown)), 'said nothing')

    def drop(self, sock: socket.socket, why: str) -> None:
        """Forgets a connection, whoever it was."""
        with contextlib.suppress(OSError):
            self.away = f'; turned away: {sock.getpeername()[0]}, which {why}'
        self.ready.unregister(sock)
        self.unknown.pop(sock, None)
        self.came.pop(sock, None)
        sock.close()

    def hear(self, sock: socket.socket) -> None:
        """Reads from a connection; a whole first line decides what becomes of it."""
        try:
            part = sock.recv(HELLO)
        except OSError:
            part = b''
        if sock in self.came and part:
            return
        said = self.unknown.get(sock, b'') + part
        if not part or len(said) > HELLO:
            self.drop(sock, 'has gone again' if sock in self.came else 'sent no hello')
        elif b'\n' in part:
            self.greet(sock, object_of(said.partition(b'\n')[0] + b'\n') or {})
        else:
            self.unknown[sock] = said

    def greet(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        """Decides on a hello."""
        index, about, token = (hello.get(k) for k in ('process', 'about', 'token'))
        if type(index) is not int or not isinstance(about, dict) or not isinstance(token, str):
            return self.drop(sock, 'sent no hello')
        if not hmac.compare_digest(_bytes(token), _bytes(self.m.token)):
            _refuse(sock, f'{self.m.names[0]} has another token; give all processes the same')
            return self.drop(sock, 'has another token')
        try:
            problem = self.problem(index, about)
        except RecursionError:  # of the text of a value a thousand lists deep
            return self.drop(sock, 'sent no hello')
        self.unknown.pop(sock)
        self.came[sock] = index
        if problem:
            raise TeamError(problem)
        return None

    def problem(self, index: int, about: dict[str, Any]) -> str | None:
        """Why a process does not fit, or None."""
        names, own = self.m.names, self.m.about
        if not 0 < index < len(names):
            count = f'{len(names)} processes are 0..{len(names) - 1}'
            return f'a process came as number {index}; {count}'
        if index in self.came.values():
            return f'two processes came as {names[index]}; give each its own number'
        keys = sorted(k for k in {**own, **about} if own.get(k) != about.get(k))
        if not keys:
            return None
        differ = ', '.join(f'{k}={about.get(k)!r} (process 0: {own.get(k)!r})' for k in keys)
        return f'{names[index]} was started with {differ}; start all processes alike'


def _bytes(text: str) -> bytes:
    return text.encode(errors='backslashreplace')  # JSON can write half a character


def _refuse(sock: socket.socket, problem: str) -> None:
    with contextlib.suppress(OSError):
        sock.send(line_of({'refused': problem}))


def join(m: Meeting, index: int) -> Watch:
    """The end of process ``index``: reports to process 0 and waits until all are there.

    Raises:
      TeamError: if process 0 does not answer in time, or refuses.
    """
    end = time.monotonic() + m.timeout
    while True:
        try:
            line = Line(socket.create_connection((m.host, m.port), GRACE))
            break
        except OSError as error:
            if time.monotonic() > end:
                raise TeamError(
                    f'{m.names[0]} did not come within {m.timeout:.0f} s: no answer at '
                    f'{m.host}:{m.port} ({error}); its port and the next one must be open'
                ) from error
            time.sleep(0.2)
    line.send(process=index, about=m.about, token=m.token)
    answer = line.read(m.timeout + GRACE)
    if answer and 'go' in answer:
        return Watch(m.names, index, {0: line}, m.deadline)
    line.close()
    gone = f'{m.names[0]} ended before all processes were there'
    raise TeamError(str(answer['refused']) if answer and 'refused' in answer else gone)
