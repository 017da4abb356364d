"""The processes of a run: how they find each other, agree, and end together.

`jax.distributed` carries the stages' messages (gloo on CPU, NCCL on GPU) and finds its processes
under Slurm, Open MPI and Kubernetes; elsewhere the three numbers are given. What it lacks, naming
who did not come or has gone and why, `jaxmp.watch` adds, on the port after the coordinator's.
"""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp.mpmd import owners
from jaxmp.watch import TeamError, Watch, hub, join, names_of


class Address(NamedTuple):
    """Where a process belongs.

    Attributes:
      coordinator: ``host:port`` of process 0; the port after it is used too.
      processes: how many there are.
      process: the number of this one.
    """

    coordinator: str | None
    processes: int | None
    process: int | None


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


def found() -> Address | None:
    """Where a cluster that JAX knows (Slurm, Open MPI, Kubernetes, ...) puts this process."""
    from jax._src.clusters import ClusterEnv  # the detection of jax.distributed; not public

    detect = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, processes, process, _ = detect(None, None, None, None, None, 60)
    if coordinator is None or processes is None or process is None:
        return None
    return Address(coordinator, processes, process)


def connect(address: Address, stages: int, about: dict[str, Any], timeout: float = 50) -> Team:
    """Finds the other processes; must come before JAX is used otherwise.

    Args:
      address: of this process; of Nones asks the cluster, and without one the run is a single
        process.
      stages: of the model, at least one a process.
      about: what must be the same in all processes.
      timeout: seconds to wait for all.

    Raises:
      TeamError: if a process does not come or is about something else, or the port is in use.
      ValueError: if there are more processes than stages, or the address makes no sense.
    """
    given = found() if address == Address(None, None, None) else address
    if given is None or given.processes == 1:
        return Team()
    coordinator, processes, process = given
    if coordinator is None or processes is None or process is None:
        raise ValueError(f'{given} is incomplete: give --coordinator, --processes and --process')
    if not 0 <= process < processes:
        raise ValueError(f'process {process} is not one of {processes}; they count from 0')
    names = names_of(owners(stages, processes))
    host, port = _split(coordinator)
    about = json.loads(json.dumps(about))  # as the others' arrive
    if process == 0:
        _check_free(port)
        watch = hub(_beside(port), names, about, timeout)
    else:
        watch = join(host, _beside(port), process, names, about, timeout)
    watch.end_without_memory()
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(*address, initialization_timeout=round(timeout))
    return Team(process, processes, watch)


def _split(coordinator: str) -> tuple[str, int]:
    host, _, port = coordinator.rpartition(':')
    if not host or not port.isdigit():
        raise ValueError(f'coordinator {coordinator!r} is not host:port, such as 10.0.0.1:9876')
    return host.strip('[]'), int(port)


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _check_free(port: int) -> None:
    try:
        socket.create_server(('', port)).close()
    except OSError as error:
        raise TeamError(
            f'port {port} cannot be used: {error}; give another coordinator port'
        ) from error
