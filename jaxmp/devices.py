"""Which devices stand along which axis of a mesh, and how much memory they have."""

from __future__ import annotations

import contextlib
import math
import os
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


def memory() -> int:
    """Bytes that a device of this process can hold; a CPU those of the machine or container."""
    device = jax.local_devices()[0]
    if device.platform != 'cpu':
        return (device.memory_stats() or {}).get('bytes_limit', 2**63)
    found = [os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')]
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        found.append(int(Path('/sys/fs/cgroup/memory.max').read_text()))
    return min(found)
