"""The processes of a run: how they find each other, agree, and end together.

`jax.distributed` carries the stages' messages (gloo on CPU, NCCL on GPU) and finds its processes
under Slurm, Open MPI and Kubernetes; elsewhere the three numbers are given. What it lacks, naming
who did not come or has gone and why, `jaxmp.rendezvous` and `jaxmp.watch` add, on the port after
the coordinator's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp.devices import owners
from jaxmp.rendezvous import (
    TOKEN,
    Meeting,
    hub,
    is_loopback,
    join,
    listen,
    names_of,
    own_address,
    secret,
)
from jaxmp.watch import TeamError, Watch

MOST = 64  # steps between two agreements


class Address(NamedTuple):
    """Where a process belongs.

    Attributes:
      coordinator: ``host:port`` of process 0; the port after it is used too.
      processes: how many there are.
      process: the number of this one.
      token_file: holds the secret that all share; default the environment's `TOKEN`.
      heartbeat_timeout: seconds of silence after which a process counts as gone.
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    token_file: str | None = None
    heartbeat_timeout: float = 60.0


@dataclass(frozen=True)
class Team:
    """The processes of a run, seen from one of them.

    Attributes:
      index: number of this process.
      count: how many there are.
      watch: the line to the others; None alone.
    """

    index: int = 0
    count: int = 1
    watch: Watch | None = None

    def gather(self, values: np.ndarray) -> np.ndarray:
        """Every process's ``values``, ``(n, ...)``, the same everywhere; all must call it.

        Args:
          values: of equal shape everywhere, of items of 4 or 8 bytes.
        """
        if self.count == 1:
            return values[None]
        from jax.experimental import multihost_utils

        words = np.ascontiguousarray(values).reshape(-1).view(np.uint32)  # JAX would round float64
        rows = np.asarray(multihost_utils.process_allgather(words))
        return np.ascontiguousarray(rows).view(values.dtype).reshape(self.count, *values.shape)

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum of every process's ``values``; all must call it."""
        return np.sum(self.gather(values), 0)

    def share(self, value: Any) -> list[Any]:
        """Every process's ``value`` (JSON), by its number; all must call it, and it waits for all.

        It needs no device and no compilation.
        """
        return self.watch.share(value) if self.watch else [value]

    def fail(self, cause: str) -> None:
        """Ends this process, and all others with ``cause``; alone, does nothing."""
        if self.watch:
            self.watch.fail(cause)

    def close(self) -> None:
        """Ends together with the others."""
        if self.watch:
            self.gather(np.zeros(1))
            self.watch.close()
            jax.distributed.shutdown()


def together(
    team: Team,
    steps: Iterable[tuple[Any, Any]],
    last: int,
    stopped: Callable[[], bool],
    read: Callable[[Any], dict[str, Any] | None] = lambda values: values,
) -> Iterator[tuple[Any, dict[str, np.ndarray], bool]]:
    """Runs steps; about once a second all processes agree on what happened since.

    So they take every decision alike: what is shown, when to stop, that a loss is not finite.

    Args:
      team: the processes; all must call this alike.
      steps: state and values after each step of this process.
      last: number of steps.
      stopped: whether this process was asked to stop.
      read: this process's share of a step's loss and accuracy, as numbers that add up over the
        processes; None for nothing.

    Yields:
      The state, the values of all steps since the last agreement, and whether to stop.
    """
    waiting, gap, start = [], 1, time.time()
    for i, (state, values) in enumerate(steps, 1):
        waiting.append(values)
        if i % gap and i < last:
            continue
        jax.block_until_ready(state)
        rate = len(waiting) / (time.time() - start)
        values, stop, gap = _agree(team, [read(v) for v in waiting], stopped(), rate)
        waiting, start = [], time.time()
        yield state, values, stop
        if stop:
            break


def _agree(
    team: Team, waiting: list[Any], stop: bool, rate: float
) -> tuple[dict[str, np.ndarray], bool, int]:
    """The last steps as all see them; whether to stop; steps until the next agreement.

    The rate, steps a second, is process 0's.
    """
    mine, names = np.zeros((2, MOST + 1)), ('loss', 'accuracy')
    for i, values in enumerate(waiting):
        if values is not None:
            mine[:, i] = [values[name] for name in names]
    mine[:, MOST] = stop, min(MOST, max(1, int(rate))) if team.index == 0 else 0
    total = team.total(mine)
    values = {name: total[i, : len(waiting)] for i, name in enumerate(names)}
    return values, bool(total[0, MOST]), int(total[1, MOST])


def found() -> tuple[str, int, int] | None:
    """Where a cluster that JAX knows (Slurm, Open MPI, Kubernetes, ...) puts this process."""
    from jax._src.clusters import ClusterEnv  # the detection of jax.distributed; not public

    detect = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, processes, process, _ = detect(None, None, None, None, None, 60)
    if coordinator is None or processes is None or process is None:
        return None
    return coordinator, processes, process


def connect(
    address: Address, parts: int, about: dict[str, Any], timeout: float = 50, what: str = 'stage'
) -> Team:
    """Finds the other processes; must come before JAX is used otherwise.

    Args:
      address: of this process; without coordinator, count and number asks the cluster, and
        without one the run is a single process.
      parts: what the processes share out, at least one each.
      about: what must be the same in all processes.
      timeout: seconds to wait for all.
      what: the parts are, ``'stage'`` or ``'replica'``.

    Raises:
      TeamError: if a process does not come or is about something else, the port is in use, or
        processes on several hosts share no secret.
      ValueError: if there are more processes than parts, or the address makes no sense.
    """
    if all(a is None for a in address[:3]):
        address = Address(*(found() or (None, 1, None)), *address[3:])
    if address.processes == 1:
        return Team()
    host, port = _check(address)
    names = names_of(owners(parts, int(address.processes or 0), what), what)
    token = secret(address.token_file)
    if not token and not is_loopback(host):
        raise TeamError(
            f'whoever reaches {host} could join this run: give all processes the same secret text, '
            f'by the environment variable {TOKEN} or by --token_file'
        )
    about = json.loads(json.dumps({**about, 'heartbeat_timeout': address.heartbeat_timeout}))
    meeting = Meeting(host, _beside(port), names, about, token, timeout, address.heartbeat_timeout)
    if address.process == 0:
        listen(own_address(host), port).close()  # JAX's
        watch = hub(meeting)
    else:
        watch = join(meeting, int(address.process or 0))
    watch.end_without_memory()
    _start_jax(address, watch.address, timeout)
    return Team(watch.index, len(names), watch)


def _check(address: Address) -> tuple[str, int]:
    """Host and port of process 0; raises ValueError if the address makes no sense."""
    coordinator, processes, process = address[:3]
    if coordinator is None or processes is None or process is None:
        raise ValueError(f'{address} is incomplete: give --coordinator, --processes and --process')
    if not 0 <= process < processes:
        raise ValueError(f'process {process} is not one of {processes}; they count from 0')
    if not address.heartbeat_timeout >= 1:
        raise ValueError(
            f'--heartbeat_timeout={address.heartbeat_timeout} is too short; give 1 second or more'
        )
    return _split(coordinator)


def _start_jax(address: Address, own: str, timeout: float) -> None:
    """Starts `jax.distributed`, so that it listens where others reach this process, only."""
    host, port = _check(address)
    bound = own_address(host) if address.process == 0 else ''
    _use_gloo(own)
    jax.distributed.initialize(
        *address[:3],
        initialization_timeout=round(timeout),
        # Longer than the watch's, which names who is silent.
        heartbeat_timeout_seconds=round(2 * address.heartbeat_timeout) + 60,
        coordinator_bind_address=_join(bound, port) if bound else None,
    )


def _use_gloo(own: str) -> None:
    """Collectives of CPUs by gloo, at this machine's address ``own``.

    By itself JAX has gloo listen where the host's name leads, and has no public way to say more.
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


def _split(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit():
        raise ValueError(f'coordinator {coordinator!r} is not host:port, such as 10.0.0.1:9876')
    return host.strip('[]'), int(port)


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _join(host: str, port: int) -> str:
    return f'[{host}]:{port}' if ':' in host else f'{host}:{port}'
