"""`Sockets`: the encrypted sockets of one thread, and the door at which strangers are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.utils import z85

from jaxmp.net.address import ProcessGroupError
from jaxmp.net.keys import Keys, Pair

HANDSHAKE = 5000  # ms after which a connection without the key is closed
RETRY = 200  # ms between two attempts to connect
LINGER = 1000  # ms for which what was sent last may still leave
WAITING = 1024  # connections that the system holds until they are accepted
DATA = b'/d'  # ends the identity of the connection that carries messages between processes

Frames = list[zmq.Frame]
Head = dict[str, Any]


def endpoint(host: str, port: int | str) -> str:
    """The address of a socket.

    >>> endpoint('::1', 80)
    'tcp://[::1]:80'
    """
    return f'tcp://[{host}]:{port}' if ':' in host else f'tcp://{host}:{port}'


def address_of(socket: zmq.Socket) -> str:
    """The address at which a socket listens."""
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


class Sockets:
    """Sockets in a context of their own, since a context has one door (RFC 27, ZAP).

    All are for one thread, but for `ring`, with which another one ends the wait of `arrived`.
    """

    def __init__(self, keys: Keys) -> None:
        """Opens the door, which `answer` serves, and hangs up the bell."""
        self.keys, self.context = keys, zmq.Context()
        self.poller = zmq.Poller()
        self.door = self._new(zmq.REP)
        self.door.bind('inproc://zeromq.zap.01')
        self.bell, self.rope = self._new(zmq.PULL), self._new(zmq.PUSH)
        self.bell.bind('inproc://bell')
        self.rope.connect('inproc://bell')

    def _new(self, kind: int, **options: int | bytes) -> zmq.Socket:
        socket = self.context.socket(kind)
        common = {'linger': LINGER, 'sndhwm': 0, 'rcvhwm': 0, 'ipv6': 1, 'immediate': 1}
        keep = {'tcp_keepalive': 1, 'tcp_keepalive_idle': 30, 'tcp_keepalive_intvl': 10}
        for name, value in {**common, **keep, **options}.items():
            setattr(socket, name, value)
        self.poller.register(socket, zmq.POLLIN)
        return socket

    def listening(self, pair: Pair, host: str, port: int | str = '*') -> zmq.Socket:
        """A socket to which those connect who have the key of a caller; '' for all addresses.

        Raises:
          ProcessGroupError: if the port is in use.
        """
        curve = {'curve_server': 1, 'curve_secretkey': pair.private, 'zap_domain': b'jaxmp'}
        doors = {'zap_enforce_domain': 1, 'handshake_ivl': HANDSHAKE, 'backlog': WAITING}
        socket = self._new(zmq.ROUTER, **curve, **doors, router_mandatory=1, router_handover=1)
        try:
            socket.bind(endpoint(host or '*', port))
        except zmq.ZMQError as error:
            self.close()
            why = f'{error.strerror}; give another port'
            raise ProcessGroupError(f'port {port} cannot be used: {why}') from error
        return socket

    def calling(self, address: str, server: bytes, identity: bytes, patience: float) -> zmq.Socket:
        """A socket that connects, again and again, to who has the private key of ``server``.

        Args:
          address: see `endpoint`.
          server: public key.
          identity: by which the listening socket tells its callers apart.
          patience: seconds without a sign of life after which it connects anew.
        """
        pair, ms = self.keys.caller, round(1e3 * patience)
        curve = {'curve_publickey': pair.public, 'curve_secretkey': pair.private}
        beats = {'heartbeat_ivl': max(100, ms // 10), 'heartbeat_timeout': ms}
        again = {'reconnect_ivl': RETRY, 'connect_timeout': HANDSHAKE}
        options = {**curve, **beats, **again, 'handshake_ivl': HANDSHAKE}
        socket = self._new(zmq.DEALER, curve_serverkey=server, identity=identity, **options)
        socket.connect(address)
        return socket

    def ring(self) -> None:
        """Ends the wait of `arrived`; one thread at a time may do so."""
        if not self.rope.closed:
            put(self.rope, b'')

    def answer(self) -> None:
        """Answers the door: the key of a caller is let in, every other one is refused."""
        version, request, _, _, _, *credentials = self.door.recv_multipart()
        known = credentials == [b'CURVE', z85.decode(self.keys.caller.public)]
        status = (b'200', b'OK') if known else (b'400', b'no key of this run')
        self.door.send_multipart([version, request, *status, b'', b''])

    def arrived(self, seconds: float) -> Iterator[tuple[zmq.Socket, Frames]]:
        """The messages that come within some seconds, except those of door and bell."""
        for socket, _ in self.poller.poll(round(1e3 * seconds)):
            if socket is self.door:
                self.answer()
            elif not socket.closed:  # as what an earlier message led to may have done
                frames = socket.recv_multipart(copy=False)
                if socket is not self.bell:
                    yield socket, frames

    def drop(self, socket: zmq.Socket) -> None:
        """Closes a socket."""
        self.poller.unregister(socket)
        socket.close()

    def close(self) -> None:
        """Closes all sockets, after what was sent has left or `LINGER` is over."""
        self.context.destroy(LINGER)


def put(socket: zmq.Socket, *frames: Any) -> bool:
    """Sends a message without waiting; False if nobody is connected who would get it.

    Args:
      socket: where it leaves.
      *frames: a head as JSON, and buffers. Those of 64 KiB and more are not copied: they must not
        change until they have arrived.
    """
    parts = [json.dumps(f).encode() if isinstance(f, dict) else f for f in frames]
    try:
        socket.send_multipart(parts, zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            return False
        raise
    return True
