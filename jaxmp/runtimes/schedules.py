"""Named schedules: four values each, of which one rule (`run`) makes the schedule.

S stages on D devices, M micro-batches; F, B and W as in `jaxmp.runtimes.schedule`. Bubbles are
without message time; at D = 4, M = 8 bubble and stage inputs that devices keep are:

>>> from jaxmp.runtimes.schedule import bubble, saved_inputs
>>> for name, make in SCHEDULES.items():
...     actions = make(8 if name in ('interleaved', 'zb_v') else 4, 8)
...     print(f'{name:11} {bubble(actions):.3f}', *saved_inputs(actions))
1f1b        0.273 4 3 2 1
gpipe       0.273 8 8 8 8
eager_1f1b  0.273 7 5 3 1
interleaved 0.158 11 9 7 5
zb_h1       0.111 4 4 4 4
zb_h2       0.111 7 7 7 7
zb_v        0.059 8 8 8 8

References:
  GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism, arXiv 1811.06965.
  PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019: 1F1B, here flushed.
  Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM, arXiv
  2104.04473: interleaved 1F1B.
  On Optimizing the Communication of Model Parallelism, arXiv 2211.05322: eager 1F1B.
  Zero Bubble Pipeline Parallelism, arXiv 2401.10241: ZB-H1, ZB-H2, ZB-V.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product, zip_longest
from typing import Any, NamedTuple

import numpy as np

from jaxmp.runtimes.schedule import UNIT, Action, Costs, Task, earliest, timed

NUMBERED = r'(eager_1f1b|zb_h2)\([1-9]\d{0,3}\)|zb_h2\([1-9]\d{0,3}, ?[1-9]\d{0,3}\)'


class Plan(NamedTuple):
    """A schedule as four values.

    Attributes:
      place: device of each stage.
      split: of how many micro-batches, the last ones, W is apart from B.
      ahead: most stage inputs of each device between the start of their F and the end of their B.
      kept: most of each device between the start of their F and the end of their last B or W.
    """

    place: Sequence[int]
    split: int
    ahead: Sequence[int]
    kept: Sequence[int]


def gpipe(stages: int, microbatches: int, costs: Costs = UNIT) -> tuple[Action, ...]:
    """GPipe: all forwards, then all backwards; bubble ``(D - 1) / (M + D - 1)``; M kept."""
    return _line(stages, microbatches, costs, lambda d: microbatches)


def one_f_one_b(stages: int, microbatches: int, costs: Costs = UNIT) -> tuple[Action, ...]:
    """1F1B: the bubble of `gpipe`, and at most D - d micro-batches kept."""
    return _line(stages, microbatches, costs, lambda d: stages - d)


def eager_1f1b(
    stages: int, microbatches: int, costs: Costs = UNIT, n: int = 2
) -> tuple[Action, ...]:
    """Eager 1F1B: at most ``1 + n (D - 1 - d)`` micro-batches kept, with n = 1 those of 1F1B.

    Messages of up to ``(n - 1) (F + B + W) / 2`` delay the first and the last micro-batch only.
    """
    return _line(stages, microbatches, costs, lambda d: 1 + n * (stages - 1 - d))


def zb_h1(stages: int, microbatches: int, costs: Costs = UNIT) -> tuple[Action, ...]:
    """ZB-H1: `one_f_one_b`, but with W in its gaps.

    Bubble ``(D - 1)(F + B - W)`` of the time if F = B = W and M >= D; D micro-batches kept.
    """
    return _line(stages, microbatches, costs, lambda d: stages - d, microbatches, stages)


def zb_h2(
    stages: int, microbatches: int, costs: Costs = UNIT, n: int = 2, last: int | None = None
) -> tuple[Action, ...]:
    """ZB-H2: `eager_1f1b`, but with W in its gaps.

    If F = B = W, n = 2 and M >= D, a device waits for ``(D - 1) F`` in all, before its first action
    and after its last, and not between them; ``1 + n (D - 1)`` micro-batches kept.

    Two halves take longer than a whole backward, and where messages are hidden, devices wait after
    the last forwards alone. With ``last`` W is apart in so many of the last micro-batches, of which
    ``2 (D - 1)`` are enough, and a device keeps at most ``max(last, 1 + n (D - 1 - d))``.
    """
    kept, split = 1 + n * (stages - 1), microbatches if last is None else last
    return _line(stages, microbatches, costs, lambda d: 1 + n * (stages - 1 - d), split, kept)


def zb_v(stages: int, microbatches: int, costs: Costs = UNIT) -> tuple[Action, ...]:
    """ZB-V: two stages per device, d and 2 D - 1 - d, and W apart.

    Bubble ``(D - 1) F / 2`` of the time, and up to ``F / 2`` more, if F = B = W and M >= 2 D; D
    micro-batches kept.
    """
    n = _devices(stages, microbatches, 2)
    place, ahead = (*range(n), *range(n)[::-1]), [2 * n - (n - 1 - d) // 3 for d in range(n)]
    return run(Plan(place, microbatches, ahead, [2 * n] * n), microbatches, costs)


def interleaved(
    stages: int, microbatches: int, costs: Costs = UNIT, chunks: int = 2
) -> tuple[Action, ...]:
    """Interleaved 1F1B: stages d, d + D, ... on device d, V ``chunks`` in all.

    Bubble ``(D - 1) / (V M + D - 1)``; V times the messages.

    Raises:
      ValueError: if V does not divide S, or D not M.
    """
    n = _devices(stages, microbatches, chunks)
    if microbatches % n:
        raise ValueError(
            f'an interleaved schedule on {n} devices takes micro-batches in groups of {n}, and '
            f'there are {microbatches}; take a multiple of {n}'
        )

    def of(d: int, kind: str, sign: int) -> list[Task]:
        tasks = product(kind, range(d, stages, n), range(microbatches))
        return sorted(tasks, key=lambda t: (t[2] // n, sign * t[1], t[2]))

    orders = {}
    for d in range(n):
        lead = 2 * (n - d - 1) + (chunks - 1) * n
        pairs = zip_longest(of(d, 'F', 1)[lead:], of(d, 'B', -1))
        orders[d] = of(d, 'F', 1)[:lead] + [task for pair in pairs for task in pair if task]
    return timed(orders, costs)


SCHEDULES = {'1f1b': one_f_one_b} | {
    f.__name__: f for f in (gpipe, eager_1f1b, interleaved, zb_h1, zb_h2, zb_v)
}


def named(text: str) -> Callable[[int, int], tuple[Action, ...]] | None:
    """The schedule of a name in `SCHEDULES`, or of a text with numbers; None of others.

    ``'eager_1f1b(3)'`` and ``'zb_h2(3)'`` give ``n``, ``'zb_h2(3, 2)'`` gives ``last`` too.

    >>> named('eager_1f1b(1)')(4, 8) == one_f_one_b(4, 8)
    True
    >>> named('zb_h2(2, 8)')(4, 8) == zb_h2(4, 8)
    True
    """
    if not re.fullmatch(NUMBERED, text):
        return SCHEDULES.get(text)
    name, _, numbers = text.rstrip(')').partition('(')
    given = zip(('n', 'last'), map(int, numbers.split(',')), strict=False)
    return functools.partial(SCHEDULES[name], **dict(given))


def _line(
    n: int,
    microbatches: int,
    costs: Costs,
    ahead: Callable[[int], int],
    split: int = 0,
    kept: int | None = None,
) -> tuple[Action, ...]:
    """The schedule of one stage per device."""
    caps = [ahead(d) for d in range(_devices(n, microbatches, 1))]
    return run(Plan(range(n), split, caps, [kept or microbatches] * n), microbatches, costs)


def _devices(stages: int, microbatches: int, chunks: int) -> int:
    """The number of devices."""
    for name, n in (('stages', stages), ('microbatches', microbatches), ('chunks', chunks)):
        if type(n) is not int or n < 1:
            raise ValueError(f'a schedule needs a positive number of {name}, got {n!r}')
    if stages % chunks:
        raise ValueError(
            f'{stages} stages cannot be placed as {chunks} on each device; take a multiple of '
            f'{chunks}, or a schedule of one stage per device such as 1f1b'
        )
    return stages // chunks


def run(plan: Plan, microbatches: int, costs: Costs = UNIT) -> tuple[Action, ...]:
    """The schedule of a plan: an idle device runs F if its caps allow one, else B, else W.

    Of several F, B or W, the oldest micro-batch goes first, then the stage nearest to the loss. An
    F leaves room for one input of each later stage of its device, so that every plan ends.

    Raises:
      ValueError: if a device has no stage, or caps below the number of its stages.
    """
    n = len(plan.ahead)
    own = {d: [s for s, at in enumerate(plan.place) if at == d][::-1] for d in range(n)}
    caps = zip(own.values(), plan.ahead, plan.kept, strict=False)
    if len(plan.kept) != n or {*plan.place} != {*own} or any(len(v) > min(c) for v, *c in caps):
        raise ValueError(f'{plan}: devices 0, 1, ... need stages, and two caps of as many or more')
    whole = max(0, microbatches - plan.split)  # backwards in one piece

    def choices(d: int, done: Counter[Any]) -> Iterable[Task]:
        begun, back = (sum(done[kind, s] for s in own[d]) for kind in 'FB')
        ended = sum(min(done['B', s], whole) + done['W', s] for s in own[d])
        room = min(plan.ahead[d] - begun + back, plan.kept[d] - begun + ended)
        for kind in 'FBW':
            first = whole * (kind == 'W')
            for m, later in sorted((first + done[kind, s], i) for i, s in enumerate(own[d])):
                if m < microbatches and (kind != 'F' or later < room):
                    yield kind, own[d][later], m

    return earliest(dict(enumerate(plan.place)), choices, costs, lambda s, m: m >= whole)


def stream(
    home: Sequence[int],
    microbatches: int,
    delays: Sequence[int],
    steps: int,
    costs: Costs = UNIT,
) -> tuple[Action, ...]:
    """The actions of a pipeline that is filled and emptied once, at such costs.

    Args:
      home: device of each stage.
      microbatches: M.
      delays: N of each stage.
      steps: batches.
      costs: of actions and messages.

    >>> [(a.kind, a.microbatch) for a in stream((0, 1), 1, (1, 1), 3) if not a.stage]
    [('F', 0), ('F', 1), ('B', 0), ('F', 2), ('B', 1), ('B', 2)]
    """
    kept = most_kept(microbatches, delays)

    def choices(device: int, done: Counter[Any]) -> Iterator[Task]:
        for s in [s for s in reversed(range(len(home))) if home[s] == device]:
            begun, ended = done['F', s], done['B', s]
            if ended < begun:
                yield 'B', s, ended
            whole = begun - begun % microbatches  # those of the steps before
            if begun < steps * microbatches and whole - ended <= max(0, kept[s] - microbatches):
                yield 'F', s, begun

    return earliest(dict(enumerate(home)), choices, costs, lambda s, m: False)


def most_kept(microbatches: int, delays: Sequence[int]) -> tuple[int, ...]:
    """The most micro-batches that each stage keeps at once.

    >>> most_kept(8, (1, 1, 1, 1)), most_kept(8, (4, 3, 2, 0)), most_kept(2, (3,))
    ((16, 16, 16, 1), (40, 32, 24, 1), (1,))
    """
    return (*((n + 1) * microbatches for n in delays[:-1]), 1)


def in_step(stages: int, microbatches: int) -> np.ndarray:
    """1F1B of devices in lockstep: micro-batches ``(scan ticks, F or B, S)``, -1 for none.

    ``F(s, m)`` is in scan tick ``s + m``, ``B(s, m)`` in ``2 (S - 1) - s + m``: a device runs both
    in each tick, since with one action per tick all would wait for the longer of the two. Stage s
    keeps ``min(M, 2 (S - s) - 1)`` micro-batches.

    >>> in_step(2, 1).tolist()
    [[[0, -1], [-1, -1]], [[-1, 0], [-1, 0]], [[-1, -1], [0, -1]]]
    """
    end = 2 * (stages - 1)
    tick, s = np.ogrid[: end + microbatches, :stages]
    m = np.stack([tick - s, tick - end + s], 1)
    return np.where((m >= 0) & (m < microbatches), m, -1).astype(np.int32)
