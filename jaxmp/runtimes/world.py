"""`start_jax`: JAX's own group of processes, where one program runs over the devices of several."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxmp.net.address import ProcessGroupError, listen, own_address, reach
from jaxmp.net.connect import Address, endpoint
from jaxmp.net.group import ProcessGroup

LOOPBACK = '127.0.0.1'


def beside(address: Address) -> Address:
    """The place where the processes of `jax.distributed` meet before: at the next port.

    >>> beside(Address('[::1]:80', 2, 0)).coordinator
    '[::1]:81'
    """
    host, port = endpoint(address)
    return address._replace(coordinator=_join(host, port + 1 if port < 65535 else port - 1))


def start_jax(address: Address, group: ProcessGroup) -> None:
    """Starts `jax.distributed` between the processes of a group.

    Process 0 listens only on the address by which the others reach it.

    Args:
      address: where process 0 listens.
      group: the processes.

    Raises:
      ProcessGroupError: if the port is in use.
    """
    assert group.peer
    host, port = endpoint(address)
    bound = own_address(host) if group.index == 0 else ''
    if group.index == 0:
        listen(bound, port).close()
    # It is longer than the group's, because only the group names the process that has failed.
    terms, patience = group.peer.terms, round(2 * group.peer.terms.silent) + 60
    _use_gloo(group.peer.host)
    _go_without_proxy(host, LOOPBACK)
    if group.index == 0:
        coordinator = _join(host, port)
    else:
        coordinator = _join(LOOPBACK, _held_open((host, port), terms.start))
    jax.distributed.initialize(
        coordinator,
        group.count,
        group.index,
        initialization_timeout=round(terms.start),
        heartbeat_timeout_seconds=patience,
        coordinator_bind_address=_join(bound, port) if bound else None,
    )
    _outlast(port, patience)
    group.after.insert(0, jax.distributed.shutdown)


def _held_open(address: tuple[str, int], patience: float) -> int:
    """A port of this machine that leads to ``address``, and stays open when that has closed.

    A process aborts, with 60 lines of stacks, when JAX's client sees the coordinator's process end.
    So it does not see it: the group ends the process, with one line that names the other one.
    """
    server = socket.create_server((LOOPBACK, 0))

    def away(near: socket.socket, far: socket.socket) -> None:
        with far:
            _pump(near, far)

    def lead(near: socket.socket) -> None:
        with contextlib.suppress(ProcessGroupError), near:  # JAX's client tries again
            far = reach(address, patience, "no coordinator of JAX's", 'start process 0')
            far.settimeout(None)
            _start(away, near, far)
            _pump(far, near)
            threading.Event().wait()  # for ever

    def serve() -> None:
        while True:
            _start(lead, server.accept()[0])

    _start(serve)
    return server.getsockname()[1]


def _start(f: Callable[..., None], *args: object) -> None:
    threading.Thread(target=f, args=args, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Passes bytes on until either end has closed."""
    with contextlib.suppress(OSError):
        while content := source.recv(2**16):
            target.sendall(content)


def _go_without_proxy(*hosts: str) -> None:
    """Makes gRPC reach some hosts without the proxy that ``http_proxy`` names.

    A proxy is for the web. gRPC would send it even what goes to loopback, and JAX then aborts.
    """
    names = 'no_grpc_proxy', 'no_proxy'  # gRPC reads the second where there is no first
    others = next((os.environ[name] for name in names if os.environ.get(name)), '')
    os.environ[names[0]] = ','.join(filter(None, (others, *hosts)))
    jax.config.update('jax_check_proxy_envs', False)  # it warns of what is mended here


def _outlast(port: int, seconds: float) -> None:
    """Makes connections to and from ``port`` outlast a network without packets for ``seconds``.

    gRPC gives connections up after 20 seconds without an acknowledgement, whereupon JAX aborts its
    processes, and there is no option for it. Linux only.
    """
    for path in filter(Path.is_socket, Path('/proc/self/fd').glob('*')):
        with (
            contextlib.suppress(OSError, IndexError),
            socket.socket(fileno=os.dup(int(path.name))) as link,
        ):
            if port in (link.getsockname()[1], link.getpeername()[1]):
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1e3 * seconds))


def _use_gloo(host: str) -> None:
    """Makes CPU collectives use gloo on this machine's address ``host``.

    By default gloo listens on the address of the host name, and JAX has no public option for it.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax
    from jax.extend.backend import register_backend_factory

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=host
        )
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory('cpu', client, priority=0, fail_quietly=False)


def _join(host: str, port: int) -> str:
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
