"""`together`: the steps of all processes, which exchange the values of their steps and decide."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from jaxmp.net.group import ProcessGroup

MOST = 64  # largest number of steps between two agreements


class Agreed(NamedTuple):
    """The values of some steps over all processes, whether to stop, and steps until the next."""

    totals: dict[str, np.ndarray]
    stop: bool
    gap: int


def together(
    group: ProcessGroup,
    steps: Iterable[tuple[PyTree, PyTree]],
    plan: tuple[int, Sequence[str]],
    stopped: Callable[[], bool],
    read: Callable[[PyTree], Mapping[str, float] | None] = lambda values: values,
    late: int = 0,
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
      late: an exchange is read this many steps later, or at the end, so that nobody waits for it.

    Yields:
      The state, the values of all steps that were exchanged since the last time, and whether to
      stop. At the end, or where it stops, those of all steps are.
    """
    (last, names), rows, done, gap = plan, iter(steps), 0, 1
    asked = deque[tuple[int, Callable[[], Agreed]]]()  # by the number of steps done
    while done < last:
        start, state, waiting = time.time(), None, []
        # The first steps may compile for long, which is no sign of a process that hangs; where
        # gradients are late, the first backward and the first update are in one of ``late``.
        compiles = done < max(1, late)
        with contextlib.nullcontext() if compiles else group.phase('training', 0):
            for step in itertools.islice(rows, min(gap, last - done)):
                state, values = step
                waiting.append(values)
            jax.block_until_ready(state)
            rate = len(waiting) / (time.time() - start)
            done += len(waiting)
            mine = [read(v) for v in waiting]
            asked.append((done, _asked(group, names, mine, (stopped(), rate))))
            agreed: list[Agreed] = []
            stop = False
            while asked and (asked[0][0] + late <= done or done == last or stop):
                agreed.append(asked.popleft()[1]())
                stop |= agreed[-1].stop
        if not agreed:
            continue
        gap = agreed[-1].gap
        yield state, {k: np.concatenate([a.totals[k] for a in agreed]) for k in names}, stop
        if stop:
            break


def _asked(
    group: ProcessGroup,
    names: Sequence[str],
    waiting: Sequence[Mapping[str, float] | None],
    report: tuple[bool, float],
) -> Callable[[], Agreed]:
    """What gives the exchanged values of the last steps; nothing waits.

    The rate in ``report``, in steps per second, is used from process 0 only.
    """
    mine, (stop, rate) = np.zeros((1 + len(names), MOST)), report
    for i, values in enumerate(waiting):
        if values is not None:
            mine[1:, i] = [values[name] for name in names]
    mine[0, :2] = stop, min(MOST, max(1, int(rate))) if group.index == 0 else 0
    total, count = group.totalled(mine), len(waiting)

    def agreed() -> Agreed:
        (first, *rows) = total()
        values = {name: row[:count] for name, row in zip(names, rows, strict=True)}
        return Agreed(values, bool(first[0]), int(first[1]))

    return agreed
