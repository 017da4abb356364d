"""Which devices stand along which axis of a mesh."""

from __future__ import annotations

import math

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
