"""`ProcessGroup`: the processes of a run, which start, decide and end together.

`jax.distributed` moves what collectives move (gloo on CPU, NCCL on GPU). Coordinator, number of
processes and process are the launcher's (`launchers`) or the user's. Which process did not connect,
or failed, and why, is said by the modules `rendezvous` and `monitor`, on the port after the
coordinator's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp.distributed.address import host_and_port, listen, own_address, token_of
from jaxmp.distributed.launchers import check_alone, place_of
from jaxmp.distributed.monitor import Monitor
from jaxmp.distributed.placement import owners
from jaxmp.distributed.rendezvous import Meeting, join_rendezvous, names_of, serve_rendezvous
from jaxmp.distributed.service import start_jax

MOST = 64  # largest number of steps between two agreements


class Address(NamedTuple):
    """The place of a process in its group.

    Attributes:
      coordinator: ``host:port`` of process 0; the next port is used too.
      processes: number of processes.
      process: number of this process.
      token_file: file with the secret that all processes share; default the environment variable
        `JAXMP_TOKEN`.
      heartbeat_timeout: seconds without a heartbeat after which a process counts as failed.
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    token_file: str | None = None
    heartbeat_timeout: float = 60.0


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run, seen from one of them.

    Attributes:
      index: number of this process.
      count: number of processes.
      monitor: connection to the other processes; None for a single process.
    """

    index: int = 0
    count: int = 1
    monitor: Monitor | None = None

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The values of all processes, ``(n, ...)``, the same in all; all must call it.

        Args:
          values: a small array of the same shape in all processes.
        """
        rows = self.share(values.tolist())  # JSON keeps every bit of a number
        return np.array(rows, values.dtype).reshape(self.count, *values.shape)

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values of all processes; all must call it."""
        return np.sum(self.gather(values), 0)

    def share(self, value: Any) -> list[Any]:
        """The JSON values of all processes, by number; all must call it, and each waits for all.

        It uses the monitor's connection, so it needs no device and no compilation.
        """
        return self.monitor.share(value) if self.monitor else [value]

    def fail(self, cause: str) -> None:
        """Ends this process and all others with ``cause``; does nothing in a single process."""
        if self.monitor:
            self.monitor.fail(cause)

    def close(self) -> None:
        """Waits for the other processes and closes the group."""
        if self.monitor:
            self.share(None)
            self.monitor.close()
            jax.distributed.shutdown()


def together(
    group: ProcessGroup,
    steps: Iterable[tuple[Any, Any]],
    plan: tuple[int, Sequence[str]],
    stopped: Callable[[], bool],
    read: Callable[[Any], dict[str, Any] | None] = lambda values: values,
) -> Iterator[tuple[Any, dict[str, np.ndarray], bool]]:
    """Runs steps; about once per second all processes exchange the values of their last steps.

    They then make the same decisions: what to show, when to stop, whether a loss is not finite.

    Args:
      group: the processes; all must make the same call.
      steps: state and values after each step of this process.
      plan: number of steps, and the names of the values.
      stopped: whether this process was asked to stop.
      read: returns this process's part of the values of a step, as numbers that are summed over the
        processes; None if it has none.

    Yields:
      The state, the values of all steps since the last agreement, and whether to stop.
    """
    (last, names), waiting, gap, start = plan, [], 1, time.time()
    for i, (state, values) in enumerate(steps, 1):
        waiting.append(values)
        if i % gap and i < last:
            continue
        jax.block_until_ready(state)
        rate = len(waiting) / (time.time() - start)
        values, stop, gap = _agree(group, names, [read(v) for v in waiting], (stopped(), rate))
        waiting, start = [], time.time()
        yield state, values, stop
        if stop:
            break


def _agree(
    group: ProcessGroup, names: Sequence[str], waiting: list[Any], own: tuple[bool, float]
) -> tuple[dict[str, np.ndarray], bool, int]:
    """The values of the last steps over all processes; whether to stop; steps until the next call.

    The rate in ``own``, in steps per second, is used from process 0 only.
    """
    mine, (stop, rate) = np.zeros((1 + len(names), MOST)), own
    for i, values in enumerate(waiting):
        if values is not None:
            mine[1:, i] = [values[name] for name in names]
    mine[0, :2] = stop, min(MOST, max(1, int(rate))) if group.index == 0 else 0
    total = group.total(mine)
    values = {name: total[i, : len(waiting)] for i, name in enumerate(names, 1)}
    return values, bool(total[0, 0]), int(total[0, 1])


def connect(
    address: Address,
    parts: Sequence[int],
    about: dict[str, Any],
    what: str = 'stage',
) -> ProcessGroup:
    """Connects to the other processes; call it before any other use of JAX.

    Args:
      address: address of this process. Without coordinator, count and number those of the
        launcher's variables are taken; without them the run is a single process.
      parts: the place of each stage or replica; the places are divided among the processes.
      about: settings that must be the same in all processes.
      what: kind of the parts, ``'stage'`` or ``'replica'``.

    Raises:
      ProcessGroupError: if a process does not connect or has other settings, the port is in use,
        or processes on several hosts have no secret.
      ValueError: if there are more processes than parts, the address is invalid, or a launcher
        says that there are several processes and not where.
    """
    if all(a is None for a in address[:3]):
        if (place := place_of()) is None:
            check_alone('no variable says where process 0 is: start it by srun or jaxmp launch')
        address = Address(*(place or (None, 1, None)), *address[3:])
    if address.processes == 1:
        return ProcessGroup()
    host, port = endpoint(address)
    owner = owners(1 + max(parts), int(address.processes or 0), what)
    names = names_of([owner[part] for part in parts], what)
    token = token_of(address.token_file, host)
    about = json.loads(json.dumps({**about, 'heartbeat_timeout': address.heartbeat_timeout}))
    deadline = address.heartbeat_timeout
    meeting = Meeting(host, _beside(port), names, about, token, deadline=deadline)
    if address.process == 0:
        listen(own_address(host), port).close()  # checks that JAX's port is free
        monitor = serve_rendezvous(meeting)
    else:
        monitor = join_rendezvous(meeting, int(address.process or 0))
    monitor.end_without_memory()
    # It is longer than the monitor's, because only the monitor reports the failed process.
    patience = round(2 * address.heartbeat_timeout) + 60
    start_jax(address[:3], (host, port), monitor.address, (meeting.timeout, patience))
    return ProcessGroup(monitor.index, len(names), monitor)


def endpoint(address: Address) -> tuple[str, int]:
    """Host and port of process 0; raises ValueError if the address is invalid."""
    coordinator, processes, process = address[:3]
    if coordinator is None or processes is None or process is None:
        raise ValueError(f'{address} is incomplete: give --coordinator, --processes and --process')
    if not 0 <= process < processes:
        raise ValueError(f'process {process} is not one of {processes}; give 0 to {processes - 1}')
    if not address.heartbeat_timeout >= 1:
        raise ValueError(
            f'--heartbeat_timeout={address.heartbeat_timeout} is too short; give 1 second or more'
        )
    return host_and_port(coordinator)


def _beside(port: int) -> int:
    return port + 1 if port < 65535 else port - 1
