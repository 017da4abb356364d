"""Which devices stand along which axis of a mesh; their memory; where their programs are kept."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

Device = Any  # a jax.Device


def device_mesh(**axes: int) -> Mesh:
    """A mesh of all processes' devices, an equal run of each, the last axis moving fastest.

    Args:
      **axes: size by name: ``replica=2``, ``stage=4``, or both.

    Raises:
      ValueError: if there are fewer devices, or they do not spread evenly over the processes.

    >>> device_mesh(stage=1).axis_names
    ('stage',)
    """
    n, processes, found = math.prod(axes.values()), jax.process_count(), jax.devices()
    names = ' x '.join(f'{size} {name}s' for name, size in axes.items())
    if n % processes:
        raise ValueError(
            f'{names} do not spread evenly over {processes} processes; start a number that '
            f'divides {n}'
        )
    own = [[d for d in found if d.process_index == p] for p in range(processes)]
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
    """The process of each part, a stage or a replica: equal runs.

    Raises:
      ValueError: if there are more processes than parts.

    >>> owners(4, 2)
    [0, 0, 1, 1]
    """
    if processes > parts:
        raise ValueError(
            f'{parts} {what}s run in at most {parts} processes, got {processes}; start fewer, or '
            'give --processes=1 for one alone'
        )
    return [i * processes // parts for i in range(parts)]


def place(replicas: int, stages: int, apart: bool = False) -> list[list[Device]]:
    """A device per replica and stage, ``[r][s]``.

    The stages of replica 0, then those of replica 1, ..., go in equal runs to the processes, and to
    a process's devices, which stages may share, but not replicas of a stage.

    Args:
      replicas: R.
      stages: S.
      apart: whether each stage needs a device of its own.

    Raises:
      ValueError: if there are more processes than stages of all replicas, or too few devices.
    """
    owner, found = owners(replicas * stages, jax.process_count()), []
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
        found.append(own[k * min(len(own), n) // n])
    return [found[r * stages : (r + 1) * stages] for r in range(replicas)]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count() or 1


def keep_compiled() -> None:
    """Lets JAX keep what it compiles for later processes, a folder for each number of cores.

    A program for one core rounds in another way than one for two, and JAX takes them as one.
    """
    folder = Path('~/.cache/jaxmp').expanduser() / f'{cores()}_cores'
    jax.config.update('jax_compilation_cache_dir', str(folder))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)


def memory() -> int:
    """Bytes that a device of this process can hold; a CPU those of the machine or container."""
    device = jax.local_devices()[0]
    if device.platform != 'cpu':
        return (device.memory_stats() or {}).get('bytes_limit', 2**63)
    found = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    return min(found)
