"""`opener`: the lanes of a pipeline, inside a process and between processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from jaxmp.runtimes.links import Lane, local_move, pair, remote_move, streamed_move
from jaxmp.wire import Payload, nbytes

STREAMED = ('cpu',)  # platforms whose messages are in the memory of the host


def opener(
    devices: np.ndarray, emulated: tuple[float, float] = (0.0, 0.0)
) -> Callable[[int, int, int, Payload], Lane]:
    """Makes lanes: ``(replica, stage that sends, stage that receives, shapes of a message)``.

    All processes make the lanes between processes in the same order.

    Args:
      devices: those that compute, ``[r, s]``.
      emulated: rate and delay of the lanes; see `Lane`.
    """
    turn = ThreadPoolExecutor(1, 'lanes')

    def opened(r: int, a: int, b: int, like: Payload) -> Lane:
        source, target = devices[r, a], devices[r, b]
        if source.process_index == target.process_index:
            return Lane(local_move(target), None, emulated)
        mesh = pair(source, target)
        if target.platform in STREAMED:
            move, own = streamed_move(mesh, (a, b), like)
            return Lane(move, own, emulated, lambda: nbytes(like))
        move, permuted = remote_move(mesh, like, target)
        return Lane(move, turn, emulated, permuted)

    return opened
