"""Devices: which of them has which stage and replica, their memory, first contact, compilation."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.net.connect import owners
from jaxmp.net.group import ProcessGroup

Device = Any  # a jax.Device, or `Elsewhere`
CompilerOptions = Any  # those of `jax.jit`, as pairs of name and value; or None


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
    by_process = [[d for d in devices if d.process_index == p] for p in range(processes)]
    each, least = n // processes, min(map(len, by_process))
    if each > least:
        where = 'there are' if processes == 1 else 'a process has'
        raise ValueError(
            f'{names} need {each} devices, {where} {least}; on a CPU start with '
            f'XLA_FLAGS=--xla_force_host_platform_device_count={each}'
        )
    taken = [d for row in by_process for d in row[:each]]
    return Mesh(
        np.array(taken).reshape(*axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
    )


@dataclass(frozen=True)
class Elsewhere:
    """The place of a device in another process, of which this process's JAX knows nothing."""

    process_index: int


def is_here(device: Device) -> bool:
    """Whether a device is one of this process."""
    return not isinstance(device, Elsewhere) and device.process_index == jax.process_index()


def place(
    replicas: int,
    stages: int,
    apart: bool = False,
    group: ProcessGroup | None = None,
    parts: Sequence[int] | None = None,
) -> list[list[Device]]:
    """The device of each replica and stage, as ``[r][s]``; of other processes `Elsewhere`.

    The stages of replica 0, then those of replica 1, and so on, are divided into runs of equal
    length among the processes, and among the devices of each process. Stages may share a device,
    but replicas of one stage may not.

    Args:
      replicas: number of replicas R.
      stages: number of stages S.
      apart: whether each stage needs a separate device.
      group: the processes, each with a JAX of its own; default this one alone.
      parts: for each stage of all replicas a number; those of a number stay together, and the
        processes divide the numbers. Default: a number for each.

    Raises:
      ValueError: if there are more processes than stages of all replicas, or too few devices.
    """
    group, local = group or ProcessGroup(), jax.local_devices()
    parts = range(replicas * stages) if parts is None else parts
    by_part = owners(1 + max(parts), group.count)
    owner = [by_part[part] for part in parts]
    mine = [i for i, p in enumerate(owner) if p == group.index]
    rows = {i // stages for i in mine}
    need = len(mine) if apart else len(rows)
    if len(local) < need:
        raise ValueError(
            f'{len(mine)} stages of {len(rows)} replicas need {need} devices in a process, there '
            f'are {len(local)}; on a CPU start with '
            f'XLA_FLAGS=--xla_force_host_platform_device_count={need}'
        )
    here = {i: local[k * min(len(local), len(mine)) // len(mine)] for k, i in enumerate(mine)}
    devices = [here.get(i, Elsewhere(p)) for i, p in enumerate(owner)]
    return [devices[r * stages : (r + 1) * stages] for r in range(replicas)]


@functools.cache
def open_links(mesh: Mesh) -> None:
    """Connects the processes of a mesh, which must all call it at about the same time.

    gloo connects the processes of a set of devices when they first run a program over it, keeps the
    connections for every later one, and gives up if one comes half a minute after the others. So
    this is done before anything is compiled whose time can differ that much. Collectives run over
    all devices, and over those along an axis.
    """
    lines = [np.moveaxis(mesh.devices, i, -1) for i in range(mesh.devices.ndim)]
    rows = [tuple(row) for line in lines for row in line.reshape(-1, line.shape[-1])]
    for devices in dict.fromkeys([tuple(mesh.devices.flat), *rows]):
        places = {d.process_index for d in devices}
        if len(places) > 1 and jax.process_index() in places:
            _open(Mesh(np.array(devices), ('all',)))


def _open(mesh: Mesh) -> None:
    spread, row = NamedSharding(mesh, P('all')), np.zeros((1, 1), np.uint8)
    rows = jax.make_array_from_callback((mesh.size, 1), spread, lambda _: row)

    def open_links(rows: Array) -> Array:  # so is it called in JAX's log of compilations
        return rows

    np.asarray(jax.jit(open_links, out_shardings=NamedSharding(mesh, P()))(rows))


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
