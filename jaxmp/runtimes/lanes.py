"""`opener`: the lanes of a pipeline, and which devices carry messages between processes.

A process computes on its first devices. Where it has `count` more, each lane has connections of its
own; on a CPU devices cost nothing, and `jaxmp.training.command` asks for as many.

A receiver of gloo tells the sender that it waits, and only then the message comes: a connection
carries one message per round trip at most. So a lane has up to `CONNECTIONS` of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import Mesh

from jaxmp.runtimes.links import Lane, local_move, pair, remote_move
from jaxmp.runtimes.schedule import Action, messages, size
from jaxmp.wire import Payload

CONNECTIONS = 8  # of a lane, where there are devices for them

Edge = tuple[int, int, int]  # replica, stage that sends, stage that receives


def edges(actions: Sequence[Action], replicas: int) -> list[Edge]:
    """The lanes of a schedule in the order in which all processes open them."""
    ways = sorted({(m.source, m.target) for m in messages(actions)})
    return [(r, *way) for r in range(replicas) for way in ways]


def remote(found: Sequence[Edge], processes: np.ndarray) -> Iterator[tuple[Edge, int, int]]:
    """The lanes between processes, and both processes; ``processes[r, s]`` is that of a stage."""
    for r, a, b in found:
        if processes[r, a] != processes[r, b]:
            yield (r, a, b), processes[r, a], processes[r, b]


def count(actions: Sequence[Action], processes: np.ndarray) -> int:
    """The most devices that carry messages in one process: one per connection of its lanes.

    Args:
      actions: the schedule.
      processes: that of each stage, ``[r, s]``.
    """
    ends = _ends(edges(actions, len(processes)), processes)
    return connections(actions) * max(ends.values(), default=0)


def connections(actions: Sequence[Action]) -> int:
    """The most connections that a lane makes use of: one per micro-batch, up to `CONNECTIONS`.

    None for a single micro-batch, whose messages have no compute beside them: XLA:CPU rounds by the
    number of its threads, which follows that of devices, and so no run in processes differs.
    """
    microbatches = size(actions)[1]
    return min(CONNECTIONS, microbatches) if microbatches > 1 else 0


def _ends(found: Sequence[Edge], processes: np.ndarray) -> Counter[int]:
    """How many lanes between processes end in each process."""
    return Counter(p for _, *both in remote(found, processes) for p in both)


def meshes(
    found: Sequence[Edge], devices: np.ndarray, most: int = CONNECTIONS
) -> tuple[dict[Edge, list[Mesh]], bool]:
    """The devices of the connections of lanes between processes, and whether each has its own.

    Args:
      found: from `edges`.
      devices: those that compute, ``[r, s]``.
      most: connections of a lane.
    """
    processes = np.vectorize(lambda d: d.process_index, otypes=[int])(devices)
    computing = set(devices.flat)
    spare = [d for d in jax.devices() if d not in computing]
    free = {p: [d for d in spare if d.process_index == p] for p in set(processes.flat)}
    lanes = list(remote(found, processes))
    needed = _ends(found, processes)
    each = min([most, *(len(free[p]) // n for p, n in needed.items())])
    if each == 0:
        return {e: [pair(devices[e[0], e[1]], devices[e[0], e[2]])] for e, *_ in lanes}, False
    taken = lambda p, q: [pair(free[p].pop(0), free[q].pop(0)) for _ in range(each)]
    return {e: taken(p, q) for e, p, q in lanes}, True


def opener(
    actions: Sequence[Action], devices: np.ndarray, emulated: tuple[float, float] = (0.0, 0.0)
) -> Callable[[int, int, int, Payload], Lane]:
    """Makes lanes: ``(replica, stage that sends, stage that receives, shapes of a message)``.

    Args:
      actions: the schedule.
      devices: those that compute, ``[r, s]``.
      emulated: rate and delay of the lanes; see `Lane`.
    """
    most = min(connections(actions), 1 if any(emulated) else CONNECTIONS)  # slow ones keep order
    between, apart = meshes(edges(actions, len(devices)), devices, most)
    turns = None if apart else ThreadPoolExecutor(1, 'lanes')

    def opened(r: int, a: int, b: int, like: Payload) -> Lane:
        target = devices[r, b]
        if (ways := between.get((r, a, b))) is None:
            return Lane([local_move(target)], (), emulated)
        own = [turns or ThreadPoolExecutor(1, 'lane') for _ in ways]
        with ThreadPoolExecutor(len(ways)) as pool:  # each takes several round trips to connect
            made = list(pool.map(lambda mesh: remote_move(mesh, like, target), ways))
        return Lane([move for move, _ in made], own, emulated, made[0][1])

    return opened
