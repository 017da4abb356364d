"""Who works when: a pipeline's schedule as plain data, one source for all runtimes.

S stages, M micro-batches. A tick is the time of one task: the forward (F) or the backward (B) of
one micro-batch in one stage. What a task makes is sent at the end of its tick and can be used from
the next tick on. GPipe runs all forwards, then all backwards in reverse, and saves M inputs a
stage. 1F1B starts the backward of a micro-batch as soon as its forward is through and so saves at
most S - s inputs in stage s, however many micro-batches there are. Both take 2 (M + S - 1) ticks,
of which a stage works 2 M. Link l joins stages l and l + 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Task(NamedTuple):
    """One tick of work of one stage: kind 'F' (forward) or 'B' (backward) of a micro-batch."""

    tick: int
    stage: int
    micro: int
    kind: str


class Exchange(NamedTuple):
    """What link ``link`` carries at the end of a tick: micro-batch numbers, None for nothing."""

    tick: int
    link: int
    forward: int | None
    backward: int | None


def gpipe(stages: int, micros: int) -> tuple[Task, ...]:
    """All forwards, then all backwards in reverse order.

    ``F(s, m)`` at tick ``s + m``, ``B(s, m)`` at ``2 (S + M - 1) - 1 - s - m``.

    Args:
      stages: S.
      micros: M.

    Raises:
      ValueError: if either is not a positive integer.

    >>> [saved_inputs(gpipe(2, m)) for m in (1, 4)]
    [(1, 1), (4, 4)]

    References:
      GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
      arXiv 1811.06965.
    """
    _positive(stages=stages, micros=micros)
    last = 2 * (stages + micros - 1) - 1
    return _tasks(stages, micros, lambda s, m: s + m, lambda s, m: last - s - m)


def one_f_one_b(stages: int, micros: int) -> tuple[Task, ...]:
    """One forward, one backward in turn: a micro-batch goes back as soon as it came through.

    ``F(s, m)`` at tick ``s + 2 m``, ``B(s, m)`` at ``2 S - 1 - s + 2 m``. Every message is used in
    the tick after the one that made it, and a busy link carries both directions at once.

    Args:
      stages: S.
      micros: M.

    Raises:
      ValueError: if either is not a positive integer.

    >>> [saved_inputs(one_f_one_b(2, m)) for m in (1, 4)]
    [(1, 1), (2, 1)]

    References:
      PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019 (here flushed at
      every step, as in arXiv 2104.04473).
    """
    _positive(stages=stages, micros=micros)
    first = 2 * stages - 1
    return _tasks(stages, micros, lambda s, m: s + 2 * m, lambda s, m: first - s + 2 * m)


def in_step(stages: int, micros: int) -> tuple[Task, ...]:
    """1F1B for devices that go in step: one forward and one backward in each scan tick.

    ``F(s, m)`` in scan tick ``s + m``, ``B(s, m)`` in ``2 (S - 1) - s + m``. `one_f_one_b` has one
    task per tick, which here would make every device wait for the longer of the two. The price is
    twice the saved inputs, ``2 (S - 1 - s) + 1``.

    Args:
      stages: S.
      micros: M.

    Returns:
      Tasks, the forward of scan tick t at tick ``2 t``, its backward at ``2 t + 1``.

    >>> saved_inputs(in_step(4, 100))
    (7, 5, 3, 1)
    """
    _positive(stages=stages, micros=micros)
    end = 2 * (stages - 1)
    return _tasks(stages, micros, lambda s, m: 2 * (s + m), lambda s, m: 2 * (end - s + m) + 1)


def table(tasks: Sequence[Task]) -> np.ndarray:
    """Micro-batches of `in_step` as ``(scan ticks, F or B, stages)``, -1 for none."""
    stages, _, ticks = size(tasks)
    rows = np.full((-(-ticks // 2), 2, stages), -1, np.int32)
    for t in tasks:
        rows[t.tick // 2, t.tick % 2, t.stage] = t.micro
    return rows


def _tasks(
    stages: int,
    micros: int,
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> tuple[Task, ...]:
    cells = [(s, m) for s in range(stages) for m in range(micros)]
    return tuple(
        sorted(
            Task(when(s, m), s, m, kind)
            for kind, when in (('F', forward), ('B', backward))
            for s, m in cells
        )
    )


def _positive(**numbers: int) -> None:
    for name, n in numbers.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f'a schedule needs a positive number of {name}, got {n!r}')


def size(tasks: Sequence[Task]) -> tuple[int, int, int]:
    """Number of stages, micro-batches and ticks of a schedule.

    Raises:
      ValueError: if it is empty.
    """
    if not tasks:
        raise ValueError('a schedule has at least one task, got none; make it with one_f_one_b')
    ticks, stages, micros = (1 + max(column) for column in list(zip(*tasks, strict=True))[:3])
    return stages, micros, ticks


def check(tasks: Sequence[Task]) -> None:
    """Raises unless every stage can do its tasks in time with what it has.

    Each stage runs F and B of each micro-batch once, one task a tick, sorted by tick and stage.
    ``F(s)`` comes after ``F(s - 1)``, ``B(s)`` after ``B(s + 1)`` and after ``F(s)``.

    Args:
      tasks: a schedule.

    Raises:
      ValueError: naming the first task that breaks a rule.
    """
    stages, micros, _ = size(tasks)
    if list(tasks) != sorted(tasks, key=lambda t: (t.tick, t.stage)):
        raise ValueError('tasks are not in order; sort them by tick, then stage')
    when: dict[tuple[str, int, int], int] = {}
    busy: set[tuple[int, int]] = set()
    for t in tasks:
        if t.kind not in ('F', 'B') or min(t.tick, t.stage, t.micro) < 0:
            raise ValueError(f'{t}: kind is F or B, and tick, stage and micro start at 0')
        if (t.tick, t.stage) in busy:
            raise ValueError(f'{t}: stage {t.stage} has two tasks at tick {t.tick}; it does one')
        if (t.kind, t.stage, t.micro) in when:
            raise ValueError(f'{t} is there twice; a stage runs F and B of a micro-batch once each')
        busy.add((t.tick, t.stage))
        for needed in _needs(t, stages):
            if when.get(needed, t.tick) >= t.tick:
                kind, s, m = needed
                raise ValueError(f'{t} needs {kind} of micro-batch {m} in stage {s} before it')
        when[t.kind, t.stage, t.micro] = t.tick
    if len(when) < 2 * stages * micros:
        raise ValueError(
            f'{stages} stages and {micros} micro-batches have {2 * stages * micros} tasks, got '
            f'{len(when)}; every stage runs F and B of every micro-batch'
        )


def _needs(t: Task, stages: int) -> list[tuple[str, int, int]]:
    if t.kind == 'F':
        return [('F', t.stage - 1, t.micro)] if t.stage else []
    after = [('B', t.stage + 1, t.micro)] if t.stage + 1 < stages else []
    return [('F', t.stage, t.micro), *after]


def bubble(tasks: Sequence[Task]) -> float:
    """Share of the stages' ticks without work; ``(S - 1) / (M + S - 1)`` for both schedules.

    >>> bubble(gpipe(4, 1)), bubble(one_f_one_b(4, 9))
    (0.75, 0.25)
    """
    stages, _, ticks = size(tasks)
    return 1 - len(tasks) / (stages * ticks)


def saved_inputs(tasks: Sequence[Task]) -> tuple[int, ...]:
    """Most micro-batch inputs that each stage keeps at once, from their F to their B.

    ``M`` in every stage for GPipe, ``min(M, S - s)`` for 1F1B.

    >>> saved_inputs(one_f_one_b(4, 100))
    (4, 3, 2, 1)
    """
    stages, _, _ = size(tasks)
    kept, most = [0] * stages, [0] * stages
    for t in tasks:
        kept[t.stage] += 1 if t.kind == 'F' else -1
        most[t.stage] = max(most[t.stage], kept[t.stage])
    return tuple(most)


def links(tasks: Sequence[Task]) -> tuple[Exchange, ...]:
    """What travels: at each tick, links ascending, one exchange a link for both directions.

    Both ends of a link derive the same list, so if each goes through its exchanges in this order,
    none waits for ever.

    >>> links(one_f_one_b(2, 2))[2]
    Exchange(tick=4, link=0, forward=None, backward=1)
    """
    stages, _, _ = size(tasks)
    found: dict[tuple[int, int], list[int | None]] = {}
    for t in tasks:
        link = t.stage if t.kind == 'F' else t.stage - 1
        if 0 <= link < stages - 1:
            found.setdefault((t.tick, link), [None, None])[t.kind == 'B'] = t.micro
    return tuple(Exchange(*at, *micros) for at, micros in sorted(found.items()))


def draw(tasks: Sequence[Task], path: str | os.PathLike[str]) -> None:
    """Writes a timeline as a picture: a row a stage, a box a task with its micro-batch's number.

    Args:
      tasks: a schedule.
      path: the file; its ending names the format (.png, .svg, .pdf).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    stages, micros, ticks = size(tasks)
    colours = {'F': '#77aadd', 'B': '#ee8866'}
    figure = Figure(figsize=(max(5.0, 0.32 * ticks + 1.2), 0.42 * stages + 1.3))
    axes = figure.add_subplot()
    for t in tasks:
        axes.add_patch(Rectangle((t.tick, t.stage - 0.45), 1, 0.9, fc=colours[t.kind], ec='white'))
        axes.text(t.tick + 0.5, t.stage, str(t.micro), ha='center', va='center', color='black')
    axes.set(xlim=(0, ticks), ylim=(stages - 0.5, -0.5), xlabel='tick', facecolor='#eeeeee')
    axes.set_xticks(range(0, ticks + 1, max(1, ticks // 11)))
    axes.set_yticks(range(stages), [f'stage {s}' for s in range(stages)])
    saved = ', '.join(map(str, saved_inputs(tasks)))
    axes.set_title(
        f'{micros} micro-batches, bubble {bubble(tasks):.0%}, saved inputs {saved}', fontsize=10
    )
    axes.spines[:].set_visible(False)
    keys = [Rectangle((0, 0), 1, 1, fc=colours[k]) for k in 'FB']
    figure.legend(keys, ['forward', 'backward'], ncols=2, frameon=False, loc='lower right')
    figure.tight_layout()
    figure.savefig(path, dpi=150)
