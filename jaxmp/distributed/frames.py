"""`FrameServer`: one thread that serves connections, over which frames are sent.

A frame is a JSON object and some bytes, preceded by both lengths.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

SIZES = struct.Struct('>IQ')  # lengths of the JSON object and of the bytes
FIRST = 2**16  # largest first frame in bytes
LONGEST = 2**20  # largest JSON object in bytes
PENDING = 100  # connections without a first frame; if there are more, the oldest is closed
PIECE = 2**20  # bytes per read
GRACE = 5.0  # seconds to wait for a message to arrive

Header = dict[str, Any]


def frame(header: Header, content: bytes = b'') -> bytes:
    """A frame, as bytes."""
    text = json.dumps(header).encode()
    return SIZES.pack(len(text), len(content)) + text + content


def frames(received: bytearray, first: bool = False) -> Iterator[tuple[Header, bytes]]:
    """The complete frames of what was received, which are removed from it.

    Args:
      received: bytes, to which the caller appends.
      first: whether the next frame is the first one of a stranger.

    Raises:
      ValueError: if they are no frames, or the first one is too large.

    >>> received = bytearray(frame({'kind': 'beat'}, b'abc') + b'...')
    >>> list(frames(received)), received
    ([({'kind': 'beat'}, b'abc')], bytearray(b'...'))
    """
    while len(received) >= SIZES.size:
        text, content = SIZES.unpack_from(received)
        end = SIZES.size + text + content
        if text > LONGEST or (first and end > FIRST):
            raise ValueError('no frame')
        if len(received) < end:
            return
        header = _object(bytes(received[SIZES.size : SIZES.size + text]))
        content = bytes(received[SIZES.size + text : end])
        del received[:end]
        yield header, content
        first = False


def read_frame(sock: socket.socket) -> tuple[Header, bytes]:
    """The next frame of a connection, for a reader with nothing else to do.

    The kernel collects its bytes: a reader that is woken by every packet takes the interpreter from
    the threads that compute, some thirty times per message over a slow link.

    Raises:
      OSError: if the connection has ended.
      ValueError: if it is no frame, or memory does not suffice for it.
    """
    text, content = SIZES.unpack(_exactly(sock, SIZES.size))
    if text > LONGEST:
        raise ValueError('no frame')
    header = _object(_exactly(sock, text))
    return header, _exactly(sock, content)


def _exactly(sock: socket.socket, count: int) -> bytes:
    """The next bytes of a connection."""
    try:
        whole = bytearray(count)
    except (MemoryError, OverflowError) as error:
        raise ValueError(f'a frame of {count} bytes') from error
    at = 0
    while at < count:
        if not (n := sock.recv_into(memoryview(whole)[at:], 0, socket.MSG_WAITALL)):
            raise ConnectionError('the connection has ended')
        at += n
    return bytes(whole)


def _object(text: bytes) -> Header:
    try:
        header = json.loads(text)
    except RecursionError:  # thousands of nested lists
        header = None
    if not isinstance(header, dict):
        raise ValueError('no JSON object')
    return header


class Line:
    """A connection: what was received and not read, what is to be sent, and who is there."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock, self.received, self.waiting = sock, bytearray(), bytearray()
        self.heard, self.hello = time.monotonic(), {}

    @property
    def replica(self) -> int | None:
        """The number of the replica, once it is known."""
        return self.hello.get('replica')


class FrameServer:
    """The connections of a server; `serve` runs until `stop` is called from another thread.

    A subclass says what a frame does (`take`), what the loss of a connection does (`lost`), and
    what happens with time (`look`).
    """

    def __init__(self, server: socket.socket) -> None:
        """Takes a socket that listens."""
        self.server, self.running = server, True
        self.lines: dict[socket.socket, Line] = {}
        self.ready = selectors.DefaultSelector()
        server.setblocking(False)
        self.ready.register(server, selectors.EVENT_READ)

    def take(self, line: Line, header: Header, content: bytes) -> None:
        """Acts on a frame; KeyError, TypeError, ValueError or AttributeError refuse it."""
        raise NotImplementedError

    def lost(self, line: Line, why: str) -> None:
        """Acts on the loss of a connection, which must be closed."""
        raise NotImplementedError

    def look(self, now: float) -> None:
        """Acts on time, several times per second."""
        raise NotImplementedError

    def stop(self) -> None:
        """Ends `serve` within a fraction of a second."""
        self.running = False

    def serve(self) -> None:
        """Serves all connections."""
        while self.running:
            for key, events in self.ready.select(0.1):
                sock: Any = key.fileobj
                if sock is self.server:
                    self._accept()
                elif line := self.lines.get(sock):
                    if events & selectors.EVENT_WRITE:
                        self._flush(line)
                    if events & selectors.EVENT_READ and sock in self.lines:
                        self._read(line)
            self.look(time.monotonic())
        for line in list(self.lines.values()):
            self.close(line)
        self.ready.close()
        self.server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the other end may have closed it already
            sock, _ = self.server.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.lines[sock] = Line(sock)
            self.ready.register(sock, selectors.EVENT_READ)
        strangers = [line for line in self.lines.values() if line.replica is None]
        if len(strangers) > PENDING:
            self.close(strangers[0])

    def _read(self, line: Line) -> None:
        try:
            part = line.sock.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            part = b''
        line.received += part
        line.heard = time.monotonic()
        try:
            for header, content in frames(line.received, line.replica is None):
                self.take(line, header, content)
                if line.sock not in self.lines:
                    return
        except (ValueError, KeyError, TypeError, AttributeError):
            return self.lost(line, 'it sent no valid message')
        if not part:
            self.lost(line, 'the connection is lost')
        return None

    def send(self, line: Line, header: Header, content: bytes = b'') -> None:
        """Sends a frame as soon as the connection takes it."""
        line.waiting += frame(header, content)
        self._flush(line)

    def _flush(self, line: Line) -> None:
        try:
            while line.waiting:
                del line.waiting[: line.sock.send(memoryview(line.waiting)[:PIECE].tobytes())]
        except BlockingIOError:
            pass
        except OSError:  # reading notices it
            line.waiting.clear()
        if line.sock in self.lines:
            write = selectors.EVENT_WRITE if line.waiting else 0
            self.ready.modify(line.sock, selectors.EVENT_READ | write)

    def close(self, line: Line) -> None:
        """Closes a connection."""
        if self.lines.pop(line.sock, None):
            self.ready.unregister(line.sock)
            line.sock.close()
