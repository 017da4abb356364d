"""`together`: the steps of all processes, which exchange the values of their steps and decide."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp.net.group import ProcessGroup

MOST = 64  # largest number of steps between two agreements


def together(
    group: ProcessGroup,
    steps: Iterable[tuple[PyTree, PyTree]],
    plan: tuple[int, Sequence[str]],
    stopped: Callable[[], bool],
    read: Callable[[PyTree], Mapping[str, float] | None] = lambda values: values,
    least: int = 1,
) -> Iterator[tuple[PyTree, dict[str, np.ndarray], bool]]:
    """Runs steps; about once per second all processes exchange the values of their last steps.

    They then make the same decisions: what to show, when to stop, whether a loss is not finite.

    Args:
      group: the processes; all must make the same call.
      steps: state and values after each step of this process.
      plan: number of steps, and the names of the values.
      stopped: whether this process was asked to stop.
      read: returns this process's part of the values of a step, as numbers that are summed over the
        processes; None if it has none.
      least: steps between two agreements at least, where one costs time.

    Yields:
      The state, the values of all steps since the last agreement, and whether to stop.
    """
    (last, names), rows, done, gap = plan, iter(steps), 0, 1
    while done < last:
        start, state, waiting = time.time(), None, []
        # The first step may compile for long, which is no sign of a process that hangs.
        with group.phase('training', 0) if done else contextlib.nullcontext():
            for step in itertools.islice(rows, min(gap, last - done)):
                state, values = step
                waiting.append(values)
            jax.block_until_ready(state)
            rate = len(waiting) / (time.time() - start)
            report = stopped(), max(rate, least)
            totals, stop, gap = _agree(group, names, [read(v) for v in waiting], report)
        done += len(waiting)
        yield state, totals, stop
        if stop:
            break


def _agree(
    group: ProcessGroup,
    names: Sequence[str],
    waiting: Sequence[Mapping[str, float] | None],
    report: tuple[bool, float],
) -> tuple[dict[str, np.ndarray], bool, int]:
    """The values of the last steps over all processes; whether to stop; steps until the next call.

    The rate in ``report``, in steps per second, is used from process 0 only.
    """
    mine, (stop, rate) = np.zeros((1 + len(names), MOST)), report
    for i, values in enumerate(waiting):
        if values is not None:
            mine[1:, i] = [values[name] for name in names]
    mine[0, :2] = stop, min(MOST, max(1, int(rate))) if group.index == 0 else 0
    total = group.total(mine)
    values = {name: total[i, : len(waiting)] for i, name in enumerate(names, 1)}
    return values, bool(total[0, 0]), int(total[0, 1])
