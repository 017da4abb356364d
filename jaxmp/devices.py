"""Which devices stand along which axis of a mesh; their memory; where their programs are kept."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


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
