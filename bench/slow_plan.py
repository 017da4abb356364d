"""What a step of `slow_network.py` would take if nothing cost but its arithmetic and its bytes.

Each stage runs its actions in the order of its schedule, each as soon as its message is there.
Actions share the measured CPU-seconds of a step, a backward twice those of a forward; where more of
them run than there are cores, all slow down alike. Messages leave over a direction of a link one
after another.

>>> from jaxmp.runtimes.schedules import gpipe
>>> step(gpipe(2, 2), cpu=12.0, cores=2, wires={(0, 1): 5.0, (1, 0): 1.0})
19.0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from jaxmp.runtimes.schedule import Action, Task, order, size


def step(
    actions: Sequence[Action],
    cpu: float,
    cores: int,
    wires: Mapping[tuple[int, int], float],
    delay: float = 0.0,
) -> float:
    """Time of a step, in the unit of ``cpu``.

    Args:
      actions: the schedule, with a device per stage.
      cpu: of all actions together.
      cores: that the stages share.
      wires: time for which a message occupies the link from a stage to another.
      delay: from its leaving a link to its arrival.
    """
    stages, m, _ = size(actions)
    third, split = cpu / stages / m / 3, {a[1:3] for a in actions if a.kind == 'W'}
    cost = lambda kind, *at: third * (2 if kind == 'B' and at not in split else 1)
    waiting = [[(a.kind, s, a.microbatch) for a in order(actions, s)] for s in range(stages)]
    first = {('F', 0), ('B', stages - 1)}
    ready = {t for tasks in waiting for t in tasks if t[:2] in first or t[0] == 'W'}
    queues: dict[tuple[int, int], list[Task]] = defaultdict(list)
    # What goes on, with the time that is left: actions by stage, messages by link and by name.
    tables: list[dict[Any, tuple[Task, float]]] = [{}, {}, {}]
    running, moving, flying = tables
    now = 0.0
    while True:
        for s, tasks in enumerate(waiting):
            if s not in running and tasks and tasks[0] in ready:
                running[s] = (task := tasks.pop(0)), cost(*task)
        for link, sent in queues.items():
            if sent and link not in moving:
                moving[link] = sent.pop(0), wires[link]
        if not any(tables):
            return now
        speeds = min(1.0, cores / max(1, len(running))), 1.0, 1.0
        spent = min(t / v for v, on in zip(speeds, tables, strict=True) for _, t in on.values())
        now += spent
        for v, on in zip(speeds, tables, strict=True):
            on |= {key: (task, t - spent * v) for key, (task, t) in on.items()}
        for kind, s, i in _ended(running, cpu):
            target = {'F': s + 1, 'B': s - 1, 'W': stages}[kind]
            if 0 <= target < stages:
                queues[s, target].append((kind, target, i))
        for task in _ended(moving, cpu):
            flying[task] = task, delay
        ready |= {*_ended(flying, cpu)}


def _ended(on: dict[Any, tuple[Task, float]], unit: float) -> list[Task]:
    """Takes out of the table what has no time left."""
    return [on.pop(key)[0] for key in [k for k, (_, t) in on.items() if t <= 1e-9 * unit]]
