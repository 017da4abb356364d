"""Who works when: a pipeline's schedule as plain data, one source for all runtimes.

S stages, M micro-batches. A tick is the time of one action: the forward (F) or the backward (B) of
one micro-batch in one stage. What an action makes is sent at the end of its tick and can be used
from the next tick on. GPipe runs all forwards, then all backwards in reverse, and saves M inputs a
stage. 1F1B starts the backward of a micro-batch as soon as its forward is through and so saves at
most S - s inputs in stage s, however many micro-batches there are. Both take 2 (M + S - 1) ticks,
of which a stage works 2 M. Link l joins stages l and l + 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Action(NamedTuple):
    """One tick of work of one stage: kind 'F' (forward) or 'B' (backward) of a micro-batch."""

    tick: int
    stage: int
    microbatch: int
    kind: str


class Transfer(NamedTuple):
    """What link ``link`` carries at the end of a tick: micro-batch numbers, None for nothing."""

    tick: int
    link: int
    forward: int | None
    backward: int | None


def gpipe(stages: int, microbatches: int) -> tuple[Action, ...]:
    """All forwards, then all backwards in reverse order.

    ``F(s, m)`` at tick ``s + m``, ``B(s, m)`` at ``2 (S + M - 1) - 1 - s - m``.

    Args:
      stages: S.
      microbatches: M.

    Raises:
      ValueError: if either is not a positive integer.

    >>> [saved_inputs(gpipe(2, m)) for m in (1, 4)]
    [(1, 1), (4, 4)]

    References:
      GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism,
      arXiv 1811.06965.
    """
    _positive(stages=stages, microbatches=microbatches)
    last = 2 * (stages + microbatches - 1) - 1
    return _actions(stages, microbatches, lambda s, m: s + m, lambda s, m: last - s - m)


def one_f_one_b(stages: int, microbatches: int) -> tuple[Action, ...]:
    """One forward, one backward in turn: a micro-batch goes back as soon as it came through.

    ``F(s, m)`` at tick ``s + 2 m``, ``B(s, m)`` at ``2 S - 1 - s + 2 m``. Every message is used in
    the tick after the one that made it, and a busy link carries both directions at once.

    Args:
      stages: S.
      microbatches: M.

    Raises:
      ValueError: if either is not a positive integer.

    >>> [saved_inputs(one_f_one_b(2, m)) for m in (1, 4)]
    [(1, 1), (2, 1)]

    References:
      PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019 (here flushed at
      every step, as in arXiv 2104.04473).
    """
    _positive(stages=stages, microbatches=microbatches)
    first = 2 * stages - 1
    return _actions(stages, microbatches, lambda s, m: s + 2 * m, lambda s, m: first - s + 2 * m)


def in_step(stages: int, microbatches: int) -> tuple[Action, ...]:
    """1F1B for devices that go in step: one forward and one backward in each scan tick.

    ``F(s, m)`` in scan tick ``s + m``, ``B(s, m)`` in ``2 (S - 1) - s + m``. `one_f_one_b` has one
    action per tick, which here would make every device wait for the longer of the two. The price is
    twice the saved inputs, ``2 (S - 1 - s) + 1``.

    Args:
      stages: S.
      microbatches: M.

    Returns:
      Tasks, the forward of scan tick t at tick ``2 t``, its backward at ``2 t + 1``.

    >>> saved_inputs(in_step(4, 100))
    (7, 5, 3, 1)
    """
    _positive(stages=stages, microbatches=microbatches)
    end = 2 * (stages - 1)
    return _actions(
        stages, microbatches, lambda s, m: 2 * (s + m), lambda s, m: 2 * (end - s + m) + 1
    )


def table(actions: Sequence[Action]) -> np.ndarray:
    """Micro-batches of `in_step` as ``(scan ticks, F or B, stages)``, -1 for none."""
    stages, _, ticks = size(actions)
    rows = np.full((-(-ticks // 2), 2, stages), -1, np.int32)
    for t in actions:
        rows[t.tick // 2, t.tick % 2, t.stage] = t.microbatch
    return rows


def _actions(
    stages: int,
    microbatches: int,
    forward: Callable[[int, int], int],
    backward: Callable[[int, int], int],
) -> tuple[Action, ...]:
    cells = [(s, m) for s in range(stages) for m in range(microbatches)]
    return tuple(
        sorted(
            Action(when(s, m), s, m, kind)
            for kind, when in (('F', forward), ('B', backward))
            for s, m in cells
        )
    )


def _positive(**numbers: int) -> None:
    for name, n in numbers.items():
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(f'a schedule needs a positive number of {name}, got {n!r}')


def size(actions: Sequence[Action]) -> tuple[int, int, int]:
    """Number of stages, micro-batches and ticks of a schedule.

    Raises:
      ValueError: if it is empty.
    """
    if not actions:
        raise ValueError('a schedule has at least one action, got none; make it with one_f_one_b')
    ticks, stages, microbatches = (
        1 + max(column) for column in list(zip(*actions, strict=True))[:3]
    )
    return stages, microbatches, ticks


def check(actions: Sequence[Action]) -> None:
    """Raises unless every stage can do its actions in time with what it has.

    Each stage runs F and B of each micro-batch once, one action a tick, sorted by tick and stage.
    ``F(s)`` comes after ``F(s - 1)``, ``B(s)`` after ``B(s + 1)`` and after ``F(s)``.

    Args:
      actions: a schedule.

    Raises:
      ValueError: naming the first action that breaks a rule.
    """
    stages, microbatches, _ = size(actions)
    if list(actions) != sorted(actions, key=lambda t: (t.tick, t.stage)):
        raise ValueError('actions are not in order; sort them by tick, then stage')
    when: dict[tuple[str, int, int], int] = {}
    busy: set[tuple[int, int]] = set()
    for t in actions:
        if t.kind not in ('F', 'B') or min(t.tick, t.stage, t.microbatch) < 0:
            raise ValueError(f'{t}: kind is F or B, and tick, stage and micro start at 0')
        if (t.tick, t.stage) in busy:
            raise ValueError(f'{t}: stage {t.stage} has two actions at tick {t.tick}; it does one')
        if (t.kind, t.stage, t.microbatch) in when:
            raise ValueError(f'{t} is there twice; a stage runs F and B of a micro-batch once each')
        busy.add((t.tick, t.stage))
        for needed in _needs(t, stages):
            if when.get(needed, t.tick) >= t.tick:
                kind, s, m = needed
                raise ValueError(f'{t} needs {kind} of micro-batch {m} in stage {s} before it')
        when[t.kind, t.stage, t.microbatch] = t.tick
    if len(when) < 2 * stages * microbatches:
        raise ValueError(
            f'{stages} stages and {microbatches} micro-batches have '
            f'{2 * stages * microbatches} actions, got {len(when)}; every stage runs F and '
            'B of every micro-batch'
        )


def _needs(t: Action, stages: int) -> list[tuple[str, int, int]]:
    if t.kind == 'F':
        return [('F', t.stage - 1, t.microbatch)] if t.stage else []
    after = [('B', t.stage + 1, t.microbatch)] if t.stage + 1 < stages else []
    return [('F', t.stage, t.microbatch), *after]


def bubble(actions: Sequence[Action]) -> float:
    """Share of the stages' ticks without work; ``(S - 1) / (M + S - 1)`` for both schedules.

    >>> bubble(gpipe(4, 1)), bubble(one_f_one_b(4, 9))
    (0.75, 0.25)
    """
    stages, _, ticks = size(actions)
    return 1 - len(actions) / (stages * ticks)


def saved_inputs(actions: Sequence[Action]) -> tuple[int, ...]:
    """Most micro-batch inputs that each stage keeps at once, from their F to their B.

    ``M`` in every stage for GPipe, ``min(M, S - s)`` for 1F1B.

    >>> saved_inputs(one_f_one_b(4, 100))
    (4, 3, 2, 1)
    """
    stages, _, _ = size(actions)
    kept, most = [0] * stages, [0] * stages
    for t in actions:
        kept[t.stage] += 1 if t.kind == 'F' else -1
        most[t.stage] = max(most[t.stage], kept[t.stage])
    return tuple(most)


def transfers(actions: Sequence[Action]) -> tuple[Transfer, ...]:
    """What travels: at each tick, links ascending, one exchange a link for both directions.

    Both ends of a link derive the same list, so if each goes through its exchanges in this order,
    none waits for ever.

    >>> transfers(one_f_one_b(2, 2))[2]
    Transfer(tick=4, link=0, forward=None, backward=1)
    """
    stages, _, _ = size(actions)
    found: dict[tuple[int, int], list[int | None]] = {}
    for t in actions:
        link = t.stage if t.kind == 'F' else t.stage - 1
        if 0 <= link < stages - 1:
            found.setdefault((t.tick, link), [None, None])[t.kind == 'B'] = t.microbatch
    return tuple(Transfer(*at, *microbatches) for at, microbatches in sorted(found.items()))


def draw(actions: Sequence[Action], path: str | os.PathLike[str]) -> None:
    """Writes a timeline as a picture: a row a stage, a box a action with its micro-batch's number.

    Args:
      actions: a schedule.
      path: the file; its ending names the format (.png, .svg, .pdf).
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    stages, microbatches, ticks = size(actions)
    colours = {'F': '#77aadd', 'B': '#ee8866'}
    figure = Figure(figsize=(max(5.0, 0.32 * ticks + 1.2), 0.42 * stages + 1.3))
    axes = figure.add_subplot()
    for t in actions:
        axes.add_patch(Rectangle((t.tick, t.stage - 0.45), 1, 0.9, fc=colours[t.kind], ec='white'))
        axes.text(t.tick + 0.5, t.stage, str(t.microbatch), ha='center', va='center', color='black')
    axes.set(xlim=(0, ticks), ylim=(stages - 0.5, -0.5), xlabel='tick', facecolor='#eeeeee')
    axes.set_xticks(range(0, ticks + 1, max(1, ticks // 11)))
    axes.set_yticks(range(stages), [f'stage {s}' for s in range(stages)])
    saved = ', '.join(map(str, saved_inputs(actions)))
    axes.set_title(
        f'{microbatches} micro-batches, bubble {bubble(actions):.0%}, saved inputs {saved}',
        fontsize=10,
    )
    axes.spines[:].set_visible(False)
    keys = [Rectangle((0, 0), 1, 1, fc=colours[k]) for k in 'FB']
    figure.legend(keys, ['forward', 'backward'], ncols=2, frameon=False, loc='lower right')
    figure.tight_layout()
    figure.savefig(path, dpi=150)
