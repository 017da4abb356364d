"""Devices: which of them has which stage and replica, their memory, first contact, compilation."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Device = Any  # a jax.Device


def device_mesh(**axes: int) -> Mesh:
    """A mesh with equally many consecutive devices of each process; the last axis varies fastest.

    Args:
      **axes: size by name: ``replica=2``, ``stage=4``, or both.

    Raises:
      ValueError: if there are too few devices, or the processes do not divide them evenly.

    >>> device_mesh(stage=1).axis_names
    ('stage',)
    """
    n, processes, devices = math.prod(axes.values()), jax.process_count(), jax.devices()
    names = ' x '.join(f'{size} {name}s' for name, size in axes.items())
    if n % processes:
        raise ValueError(
            f'{names} cannot be divided evenly among {processes} processes; start a number of '
            f'processes that divides {n}'
        )
    own = [[d for d in devices if d.process_index == p] for p in range(processes)]
    each, least = n // processes, min(map(len, own))
    if each > least:
        where = 'there are' if processes == 1 else 'a process has'
        raise ValueError(
            f'{names} need {each} devices, {where} {least}; on a CPU start with '
            f'XLA_FLAGS=--xla_force_host_platform_device_count={each}'
        )
    taken = [d for row in own for d in row[:each]]
    return Mesh(
        np.array(taken).reshape(*axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


def owners(parts: int, processes: int, what: str = 'stage') -> list[int]:
    """The number of the process of each part (stage or replica), in runs of equal length.

    Raises:
      ValueError: if there are more processes than parts.

    >>> owners(4, 2)
    [0, 0, 1, 1]
    """
    if processes > parts:
        raise ValueError(
            f'{parts} {what}s run in at most {parts} processes, got {processes}; start fewer, or '
            'give --processes=1 for a single process'
        )
    return [i * processes // parts for i in range(parts)]


def place(replicas: int, stages: int, apart: bool = False) -> list[list[Device]]:
    """The device of each replica and stage, as ``[r][s]``.

    The stages of replica 0, then those of replica 1, and so on, are divided into runs of equal
    length among the processes, and among the devices of each process. Stages may share a device,
    but replicas of one stage may not.

    Args:
      replicas: number of replicas R.
      stages: number of stages S.
      apart: whether each stage needs a separate device.

    Raises:
      ValueError: if there are more processes than stages of all replicas, or too few devices.
    """
    owner, devices = owners(replicas * stages, jax.process_count()), []
    for i, p in enumerate(owner):
        own = [d for d in jax.devices() if d.process_index == p]
        k, n = i - owner.index(p), owner.count(p)
        here = {j // stages for j, q in enumerate(owner) if q == p}
        need = n if apart else len(here)
        if len(own) < need:
            raise ValueError(
                f'{n} stages of {len(here)} replicas need {need} devices in a process, there are '
                f'{len(own)}; on a CPU start with '
                f'XLA_FLAGS=--xla_force_host_platform_device_count={need}'
            )
        devices.append(own[k * min(len(own), n) // n])
    return [devices[r * stages : (r + 1) * stages] for r in range(replicas)]


@functools.cache
def open_links(mesh: Mesh) -> None:
    """Connects the processes of a mesh, which must all call it at about the same time.

    gloo connects the processes of a set of devices when they first run a program over it, keeps the
    connections for every later one, and gives up if one comes half a minute after the others. So
    this is done before anything is compiled whose time can differ that much.
    """
    gathered(mesh, np.zeros(1, np.uint8))


def gathered(mesh: Mesh, row: np.ndarray) -> np.ndarray:
    """The row of each device of a mesh; every process gives that of its own devices."""
    spread = NamedSharding(mesh, P(mesh.axis_names))
    rows = jax.make_array_from_callback((mesh.size, row.size), spread, lambda _: row[None])

    def open_links(rows: Any) -> Any:  # so is it called in JAX's log of compilations
        return rows

    return np.asarray(jax.jit(open_links, out_shardings=NamedSharding(mesh, P()))(rows))


def cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1


def keep_compiled() -> None:
    """Enables JAX's persistent compilation cache, with one folder per number of cores.

    XLA:CPU output depends on the core count, but JAX's cache key does not. A folder that the
    environment names (``JAX_COMPILATION_CACHE_DIR``) is used as it is.
    """
    if os.environ.get('JAX_COMPILATION_CACHE_DIR'):
        return
    folder = Path('~/.cache/jaxmp').expanduser() / f'{cores()}_cores'
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)


def memory() -> int:
    """Memory of a device of this process in bytes; for a CPU that of the machine or container."""
    device = jax.local_devices()[0]
    if device.platform != 'cpu':
        return (device.memory_stats() or {}).get('bytes_limit', 2**63)
    limits = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limits.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    return min(limits)
