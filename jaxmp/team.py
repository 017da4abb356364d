"""The processes of a run: how they find each other, agree, and end together.

`jax.distributed` carries the stages' messages (gloo on CPU, NCCL on GPU) and finds its processes
under Slurm, Open MPI and Kubernetes; elsewhere the three numbers are given. What it lacks, naming
who did not come or has gone and why, `jaxmp.watch` adds, on the port after the coordinator's.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp.devices import owners
from jaxmp.watch import TeamError, Watch, hub, join, names_of

MOST = 64  # steps between two agreements


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


def found() -> Address | None:
    """Where a cluster that JAX knows (Slurm, Open MPI, Kubernetes, ...) puts this process."""
    from jax._src.clusters import ClusterEnv  # the detection of jax.distributed; not public

    detect = ClusterEnv.auto_detect_unset_distributed_params
    coordinator, processes, process, _ = detect(None, None, None, None, None, 60)
    if coordinator is None or processes is None or process is None:
        return None
    return Address(coordinator, processes, process)


def connect(
    address: Address, parts: int, about: dict[str, Any], timeout: float = 50, what: str = 'stage'
) -> Team:
    """Finds the other processes; must come before JAX is used otherwise.

    Args:
      address: of this process; of Nones asks the cluster, and without one the run is a single
        process.
      parts: what the processes share out, at least one each.
      about: what must be the same in all processes.
      timeout: seconds to wait for all.
      what: the parts are, ``'stage'`` or ``'replica'``.

    Raises:
      TeamError: if a process does not come or is about something else, or the port is in use.
      ValueError: if there are more processes than parts, or the address makes no sense.
    """
    given = found() if address == Address(None, None, None) else address
    if given is None or given.processes == 1:
        return Team()
    coordinator, processes, process = given
    if coordinator is None or processes is None or process is None:
        raise ValueError(f'{given} is incomplete: give --coordinator, --processes and --process')
    if not 0 <= process < processes:
        raise ValueError(f'process {process} is not one of {processes}; they count from 0')
    names = names_of(owners(parts, processes, what), what)
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
