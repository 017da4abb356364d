"""JAX's own service between the processes of a run: its addresses, its transport, its patience."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import jax

from jaxmp.distributed.address import own_address
from jaxmp.distributed.streams import listen_at


def start_jax(
    place: tuple[str | None, int | None, int | None],
    end: tuple[str, int],
    own: str,
    seconds: tuple[float, float],
) -> None:
    """Starts `jax.distributed`, listening only on the address by which others reach process 0.

    Args:
      place: coordinator, number of processes and number of this process.
      end: host and port of process 0.
      own: address of this process, on which gloo and `streams` listen.
      seconds: for which it waits for all processes, and without a heartbeat or a packet until it
        gives a process up.
    """
    host, port = end
    bound = own_address(host) if place[2] == 0 else ''
    _use_gloo(own)
    listen_at(own)
    _go_without_proxy(host)
    jax.distributed.initialize(
        *place,
        initialization_timeout=round(seconds[0]),
        heartbeat_timeout_seconds=round(seconds[1]),
        coordinator_bind_address=_join(bound, port) if bound else None,
    )
    _outlast(port, seconds[1])


def _go_without_proxy(host: str) -> None:
    """Makes gRPC reach ``host`` without the proxy that ``http_proxy`` names.

    A proxy is for the web. gRPC would send it even what goes to loopback, and JAX then aborts.
    """
    names = 'no_grpc_proxy', 'no_proxy'  # gRPC reads the second where there is no first
    others = next((os.environ[name] for name in names if os.environ.get(name)), '')
    os.environ[names[0]] = ','.join(filter(None, (others, host)))
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


def _use_gloo(own: str) -> None:
    """Makes CPU collectives use gloo on this machine's address ``own``.

    By default gloo listens on the address of the host name, and JAX has no public option for it.
    """
    from jax._src import distributed, xla_bridge
    from jax._src.lib import _jax
    from jax.extend.backend import register_backend_factory

    def client() -> Any:
        gloo = _jax.make_gloo_tcp_collectives(
            distributed_client=distributed.global_state.client, hostname=own
        )
        return xla_bridge.make_cpu_client(gloo)

    register_backend_factory('cpu', client, priority=0, fail_quietly=False)


def _join(host: str, port: int) -> str:
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
