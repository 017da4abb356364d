"""`Sockets`: the encrypted sockets of one thread, and the door at which strangers are refused.

Each socket has a name, by which the other end of a connection addresses it: a message begins with
the name of who gets it, and arrives with the name of who has sent it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq
from zmq.utils import z85

from jaxmp.net.address import ProcessGroupError, listen, tell
from jaxmp.net.keys import Keys
from jaxmp.net.views import BEAT, GRACE

HANDSHAKE = 4000  # ms after which one without the key is closed; a satellite needs some 3,000
PIECE = 1 << 17  # bytes of a frame
LARGEST = 1 << 18  # of any frame: libzmq has room for one before it asks for the key
LINGER = 1000  # ms for which what was sent last may still leave
SWITCH = 'switch'  # the name of the switch
# Begins what libzmq calls a connection whose name a later one has taken over. What it left is
# dropped, as with a connection that is lost: it goes again.
UNNAMED = b'\0'
COMMON = {'linger': LINGER, 'sndhwm': 0, 'rcvhwm': 0, 'ipv6': 1, 'immediate': 1}
COMMON |= {'maxmsgsize': LARGEST + 33}  # which CURVE adds
KEEP = {'tcp_keepalive': 1, 'tcp_keepalive_idle': 30, 'tcp_keepalive_intvl': 10}
CONNECT = {'handshake_ivl': HANDSHAKE, 'connect_timeout': HANDSHAKE, 'reconnect_ivl': 200}
BY_NAME = {'router_mandatory': 1, 'router_handover': 1}

Buffer = bytes | memoryview
Take = Callable[[zmq.Socket, str, list[zmq.Frame]], object]


def url(host: str, port: int | str) -> str:
    """The address of a socket.

    >>> url('::1', 80)
    'tcp://[::1]:80'
    """
    return f'tcp://[{host}]:{port}' if ':' in host else f'tcp://{host}:{port}'


def address_of(socket: zmq.Socket) -> str:
    """The address at which a socket listens."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Sockets:
    """Sockets in a context of their own, since a context has one door (RFC 27, ZAP).

    All are for one thread, but for `ring`, with which another one ends the wait of `serve`.
    """

    def __init__(self, keys: Keys) -> None:
        """Opens the door, which `serve` answers, and hangs up the bell."""
        open_many_files()
        self.keys, self.context, self.poller = keys, zmq.Context(), zmq.Poller()
        self.door, self.bell, self.rope = map(self._new, (zmq.REP, zmq.PULL, zmq.PUSH))
        self.door.bind('inproc://zeromq.zap.01')
        self.bell.bind('inproc://bell')
        self.rope.connect('inproc://bell')
        self._told = False

    def _new(self, kind: int, **options: int | bytes) -> zmq.Socket:
        socket = self.context.socket(kind)
        for option, value in {**COMMON, **KEEP, **options}.items():
            setattr(socket, option, value)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def _named(self, name: str, patience: float, **curve: int | bytes) -> zmq.Socket:
        ms = round(1e3 * patience)
        beats = {'heartbeat_ivl': ms and max(100, ms // 10), 'heartbeat_timeout': ms}
        options = {'identity': name.encode(), **CONNECT, **BY_NAME, **beats, **curve}
        return self._new(zmq.ROUTER, **options)

    def listening(self, name: str, host: str, port: int = 0, patience: float = 0.0) -> zmq.Socket:
        """A socket to which those connect who have the key of a client.

        Args:
          name: see the module.
          host: '' for all addresses.
          port: 0 for one that the system chooses.
          patience: seconds without a sign of life after which a connection is closed; 0: for ever.

        Raises:
          ProcessGroupError: if the port is in use.
        """
        try:
            server = listen(host, port)
        except ProcessGroupError:
            self.close()
            raise
        options = {'curve_server': 1, 'curve_secretkey': self.keys.server.private}
        options |= {'zap_domain': b'jaxmp', 'zap_enforce_domain': 1}
        port = server.getsockname()[1]
        socket = self._named(name, patience, **options, use_fd=server.detach())
        socket.bind(url(host or '*', port))
        return socket

    def calling(self, name: str, patience: float) -> zmq.Socket:
        """A socket that connects, again and again, to those who have the key of a server.

        Args:
          name: see the module.
          patience: seconds without a sign of life after which it connects anew.
        """
        public, private = self.keys.client
        curve = {'curve_publickey': public, 'curve_secretkey': private}
        return self._named(name, patience, curve_serverkey=self.keys.server.public, **curve)

    def ring(self) -> None:
        """Ends the wait of `serve`; one thread at a time may do so."""
        if not self.rope.closed:
            put(self.rope, b'')

    def _answer(self) -> None:
        """Answers the door: the key of a client is let in, every other one is refused."""
        version, request, _, _, _, *credentials = self.door.recv_multipart()
        friend = credentials == [b'CURVE', z85.decode(self.keys.client.public)]
        status = (b'200', b'OK') if friend else (b'400', b'no key of this run')
        self.door.send_multipart([version, request, *status, b'', b''])

    def serve(self, seconds: float, take: Take) -> None:
        """Gives ``take`` what comes within some seconds: socket, name of the sender, and frames.

        Messages of a connection that has lost its name to a later one are dropped, and so are those
        that ``take`` cannot read, where it raises ValueError. The first time says so.
        """
        for socket, _ in self.poller.poll(round(1e3 * seconds)):
            if socket is self.door:
                self._answer()
            elif socket is self.bell:
                socket.recv()
            else:
                with contextlib.suppress(zmq.Again):  # an earlier message may have led to its end
                    name, *frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
                    self._hand(take, socket, name.bytes, frames)

    def _hand(self, take: Take, socket: zmq.Socket, name: bytes, frames: list[zmq.Frame]) -> None:
        if name[:1] == UNNAMED or not len(frames[0]):  # an empty one looks for a connection
            return
        try:
            take(socket, name.decode(), frames)
        except (ValueError, RecursionError) as error:
            if not self._told:
                tell(f'dropped a message of {name[:40]!r}, and will drop others: {error}')
            self._told = True

    def close(self) -> None:
        """Closes all sockets, after what was sent has left or `LINGER` is over."""
        self.context.destroy(LINGER)


class Line:
    """A connection to the socket of some name, made anew where nothing can be sent.

    libzmq gives one up for ever on which bytes came that are not of its protocol: those of a
    stranger who had the port meanwhile, or of which a bit was changed under way.
    """

    def __init__(self, socket: zmq.Socket, name: str, address: str, patience: float) -> None:
        """Connects; ``patience`` as in `Sockets.calling`. A later ``address`` is the next one's."""
        self.address, self._socket, self._name = address, socket, name
        self._beats, self._asked = round(1e3 * patience), 0.0
        self._connect()

    def _connect(self) -> None:
        self._last, self._since = self.address, time.monotonic()
        self._socket.heartbeat_timeout = self._beats
        with contextlib.suppress(zmq.ZMQError):  # another process may have said nonsense
            self._socket.connect(self._last)

    def cut(self) -> None:
        """Ends the connection."""
        with contextlib.suppress(zmq.ZMQError):  # as libzmq may have done
            self._socket.disconnect(self._last)

    def look(self, now: float) -> None:
        """Sends an empty message each second; connects anew if that fails, each 3 s at most."""
        if now - self._asked < BEAT:
            return
        self._asked = now
        if put(self._socket, self._name, b''):
            self._since = 0.0
        elif now - self._since > GRACE:
            self.cut()
            self._connect()


def open_many_files() -> None:
    """Raises the limit of open files as far as it goes: a stranger has one for `HANDSHAKE`."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # as on Windows and macOS
        import resource

        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def pieces(buffer: Buffer) -> list[memoryview]:
    """A buffer in frames: one is encrypted while the one before it travels.

    >>> [len(piece) for piece in pieces(bytes(300_000))], len(pieces(b''))
    ([131072, 131072, 37856], 1)
    """
    whole = memoryview(buffer).cast('B')
    return [whole[i : i + PIECE] for i in range(0, max(1, len(whole)), PIECE)]


def joined(cut: list[zmq.Frame]) -> memoryview:
    """The buffer of some `pieces`, each of which is let go when it is copied; one alone is not."""
    if len(cut) == 1:
        return memoryview(cut[0].buffer)
    whole, start = np.empty(sum(map(len, cut)), np.uint8).data, 0
    cut.reverse()
    while cut:
        frame = cut.pop()
        whole[start : start + len(frame)] = frame.buffer
        start += len(frame)
    return whole


def put(socket: zmq.Socket, *frames: Any) -> bool:
    """Sends a message without waiting; False if nobody is connected who would get it.

    Args:
      socket: where it leaves.
      *frames: the name of who gets it, a head as JSON, and buffers. Those of 64 KiB and more are
        not copied: they must not change until they have arrived.
    """
    text = lambda frame: json.dumps(frame) if isinstance(frame, dict) else frame
    parts = [text(f).encode() if isinstance(f, dict | str) else f for f in frames]
    if (most := max(map(len, parts))) > LARGEST:
        advice = 'only buffers are cut into frames: say less beside them'
        raise ValueError(f'a frame of {most} bytes, and others take {LARGEST} at most; {advice}')
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True
