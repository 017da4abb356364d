"""`stream`: a TCP connection that carries messages from one process to another, in order.

A receiver of gloo tells the sender that it waits, and only then the message comes: a connection
carries one message per round trip at most, and on a busy link the notice waits behind what travels
the other way. A stream has no notices, so a message leaves as soon as it is made.

The receiver of a stream listens, and tells the sender address, port and a secret by a collective
of two devices. A connection without the secret is closed. What follows is neither signed nor
encrypted.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import math
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmp.distributed.placement import gathered

PATIENCE = 60.0  # seconds in which the sender has to connect
ROOM = 128  # bytes of an introduction
SECRET = 32  # characters
ALIGNMENT = 64  # bytes; of the arrays that XLA on a CPU takes as they are
_home: list[str] = []


def listen_at(address: str) -> None:
    """Sets the address of this machine at which the others reach it; default that of its name."""
    _home[:] = [address]


class Stream(NamedTuple):
    """An end of a connection.

    Attributes:
      socket: the connection.
      thread: the one thread that sends, or receives, in the order of all who use the connection.
    """

    socket: socket.socket
    thread: ThreadPoolExecutor

    def send(self, message: Any) -> None:
        """Sends the arrays of a pytree; returns when the system has taken their bytes."""
        leaves = map(np.ascontiguousarray, jax.tree.leaves(message))
        self.socket.sendall(b''.join(a.reshape(-1).view(np.uint8).data for a in leaves))

    def receive(self, like: Any) -> Any:
        """The next pytree of such shapes, as NumPy arrays.

        Raises:
          ConnectionError: if the other process has ended.
        """
        return jax.tree.map(self._received, like)

    def _received(self, like: Any) -> np.ndarray:
        """The next array."""
        whole, at = aligned(math.prod(like.shape) * np.dtype(like.dtype).itemsize), 0
        while at < whole.size:
            if not (count := self.socket.recv_into(whole.data[at:])):
                raise ConnectionError('the process at the other end of a link has ended')
            at += count
        return whole.view(like.dtype).reshape(like.shape)


def aligned(size: int) -> np.ndarray:
    """Bytes of which `jax.device_put` on a CPU makes an array without a copy.

    The copy of an array above 100 KiB would wait for a thread of XLA's pool, hence where stages
    compute on all of them until one has ended.

    >>> aligned(5).ctypes.data % ALIGNMENT
    0
    """
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


@functools.cache
def stream(mesh: Mesh, lane: tuple[int, int]) -> Stream:
    """This process's end of the stream from the first device of a mesh to the second.

    Both processes must call it at about the same time, before anything is compiled. A later call
    for the same lane, the stages that send and receive, gives the same stream.

    Raises:
      ConnectionError: if the other process does not connect.
    """
    if mesh.devices.flat[0].process_index == jax.process_index():
        words = bytes(gathered(mesh, np.zeros(ROOM, np.uint8))[1]).rstrip(b'\0').decode()
        address, port, secret = words.split()
        line = socket.create_connection((address, int(port)), PATIENCE)
        line.sendall(secret.encode())
    else:
        line = _accepted(mesh)
    line.settimeout(None)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Stream(line, ThreadPoolExecutor(1, 'stream'))


def _accepted(mesh: Mesh) -> socket.socket:
    """The connection of the sender that a mesh names."""
    address = _home[0] if _home else socket.gethostbyname(socket.gethostname())
    family = socket.AF_INET6 if ':' in address else socket.AF_INET
    secret = secrets.token_hex(SECRET // 2)
    with socket.create_server((address, 0), family=family) as server:
        words = f'{address} {server.getsockname()[1]} {secret}'.encode()
        gathered(mesh, np.frombuffer(words.ljust(ROOM, b'\0'), np.uint8))
        end = time.monotonic() + PATIENCE
        while (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError):
                line, _ = server.accept()
                if _knows(line, secret.encode()):
                    return line
    raise ConnectionError(f'no process has connected to {address} within {PATIENCE:g} s')


def _knows(line: socket.socket, secret: bytes) -> bool:
    """Whether who has connected sends the secret within seconds; else the connection is closed."""
    with contextlib.suppress(OSError):
        line.settimeout(5.0)
        if hmac.compare_digest(line.recv(SECRET, socket.MSG_WAITALL), secret):
            return True
    line.close()
    return False
