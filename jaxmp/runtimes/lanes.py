"""`opener`: the lanes of a pipeline, inside a process and between processes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.links import Lane, local_move, remote_move
from jaxmp.runtimes.placement import is_here
from jaxmp.wire import Payload


def opener(
    devices: np.ndarray, group: ProcessGroup, emulated: tuple[float, float] = (0.0, 0.0)
) -> Callable[[int, int, int, Payload], Lane]:
    """Makes lanes: ``(replica, stage that sends, stage that receives, shapes of a message)``.

    Args:
      devices: those that compute, ``[r, s]``.
      group: the processes.
      emulated: rate and delay of the lanes; see `Lane`.
    """

    def opened(r: int, a: int, b: int, like: Payload) -> Lane:
        ends = devices[r, a], devices[r, b]
        if all(map(is_here, ends)):
            return Lane(local_move(ends[1]), emulated)
        tag = f'{"activation" if a < b else "gradient"} {a}->{b} of replica {r},'
        return Lane(remote_move(group, ends, like), emulated, functools.partial(group.address, tag))

    return opened
