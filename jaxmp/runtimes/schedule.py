"""A pipeline's schedule as plain data, one source for all runtimes: its rules and its costs.

S stages on D devices, M micro-batches. F is the forward of a micro-batch in a stage, B the gradient
of its input, W the gradient of its weights; a B without a W is both gradients. The named schedules
are in `jaxmp.runtimes.schedules`; `timed` makes a schedule from the order of each device alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Task = tuple[str, int, int]  # kind, stage, micro-batch


class Action(NamedTuple):
    """Kind 'F', 'B' or 'W' of a micro-batch in a stage, on a device from ``start`` to ``end``."""

    start: float
    stage: int
    microbatch: int
    kind: str
    device: int
    end: float


class Message(NamedTuple):
    """The output of an F or a B that ends at ``sent`` in stage ``source``, for stage ``target``."""

    sent: float
    source: int
    target: int
    microbatch: int
    kind: str


class Costs(NamedTuple):
    """Times of a device's F, B and W, of which each of its V stages takes 1/V, and of a message."""

    F: float = 1.0
    B: float = 1.0
    W: float = 1.0
    message: float = 0.0


UNIT = Costs()


def timed(orders: Mapping[int, Sequence[Task]], costs: Costs = UNIT) -> tuple[Action, ...]:
    """The schedule of devices that each run their tasks in a given order, as early as they can.

    Args:
      orders: tasks ``(kind, stage, microbatch)`` of each device.
      costs: of actions and messages.

    Raises:
      ValueError: if a task can never run; the message names the first.

    >>> timed({0: [('F', 0, 0), ('B', 0, 0)]})[1]
    Action(start=1.0, stage=0, microbatch=0, kind='B', device=0, end=3.0)
    """
    home = {s: d for d, tasks in orders.items() for _, s, _ in tasks}
    listed = {task for tasks in orders.values() for task in tasks}
    split = lambda s, m: ('W', s, m) in listed
    actions = earliest(home, lambda d, done: orders[d][done[d] :][:1], costs, split)
    ran = {(a.kind, a.stage, a.microbatch) for a in actions}
    heads = [next((t for t in tasks if t not in ran), None) for tasks in orders.values()]
    stuck = [(t, n) for t in heads if t for n in _needs(t, max(home)) if n not in ran]
    for t, n in sorted(stuck, key=lambda p: p[1] in listed and home[p[0][1]] != home[p[1][1]]):
        raise ValueError(f'{_text(t)} can never run: {_text(n)} does not come before it')
    return actions


def earliest(
    home: Mapping[int, int],
    choices: Callable[[int, Counter[Any]], Iterable[Task]],
    costs: Costs,
    split: Callable[[int, int], bool],
) -> tuple[Action, ...]:
    """The schedule in which the choice that can begin first runs next, until there is none.

    Args:
      home: device of each stage.
      choices: tasks that a device may run next, the preferred one first, from the device and the
        number of actions so far by device and by ``(kind, stage)``.
      costs: of actions and messages.
      split: whether W is apart from B, of a stage and a micro-batch.

    Raises:
      ValueError: if an action takes no time.
    """
    if min(costs[:3]) <= 0 or costs.message < 0:
        raise ValueError(f'{costs}: F, B and W take some time, and a message none or more')
    shares, done = Counter(home.values()), Counter[Any]()
    free = dict.fromkeys(sorted(shares), 0.0)
    end: dict[Task, float] = {}
    actions = []

    def start(task: Task, d: int) -> float:
        needed = _needs(task, max(home))
        hop = lambda s: costs.message if home.get(s) != d else 0.0
        return max([free[d], *(end.get(n, math.inf) + hop(n[1]) for n in needed)])

    def first(d: int) -> tuple[Any, ...]:
        starts = [
            (round(at / costs.F, 6), rank, d, at, task)  # so that rounding errors decide nothing
            for rank, task in enumerate(choices(d, done))
            if (at := start(task, d)) < math.inf
        ]
        return min(starts, default=(math.inf,))

    firsts = {d: first(d) for d in free}
    while len(chosen := min(firsts.values(), default=())) > 1:
        *_, d, at, (kind, s, m) = chosen
        whole = kind == 'B' and not split(s, m)
        seconds = getattr(costs, kind) + whole * costs.W
        end[kind, s, m] = free[d] = at + seconds / shares[d]
        actions.append(Action(at, s, m, kind, d, free[d]))
        done.update([d, (kind, s)])
        firsts |= {e: first(e) for e in {d, home.get(s - 1, d), home.get(s + 1, d)}}
    return tuple(sorted(actions))


def _needs(task: Task, last: int) -> list[Task]:
    """The inputs of a task in a pipeline whose last stage is ``last``."""
    kind, s, m = task
    before = {'F': [('F', s - 1)], 'B': [('F', s), ('B', s + 1)], 'W': [('B', s)]}[kind]
    return [(k, at, m) for k, at in before if 0 <= at <= last]


def _text(task: Task) -> str:
    return '{0} of micro-batch {2} in stage {1}'.format(*task)


def size(actions: Sequence[Action]) -> tuple[int, int, float]:
    """Number of stages and of micro-batches, and the end of the last action."""
    if not actions:
        raise ValueError('a schedule has at least one action, got none; make it with one_f_one_b')
    _, stages, microbatches, _, _, ends = zip(*actions, strict=True)
    return 1 + max(stages), 1 + max(microbatches), max(ends)


def check(actions: Sequence[Action]) -> None:
    """Raises unless every action has its inputs in time.

    A stage is on one device, which runs one action at a time. Each stage runs F and B of each
    micro-batch once, and W once or not at all. ``F(s)`` comes after ``F(s - 1)``, ``B(s)`` after
    ``B(s + 1)`` and ``F(s)``, ``W(s)`` after ``B(s)``.

    Raises:
      ValueError: naming the first action that breaks a rule.
    """
    stages, microbatches, _ = size(actions)
    if list(actions) != sorted(actions, key=lambda a: a[:2]):
        raise ValueError('actions are not in order; sort them by start, then stage')
    end: dict[Task, float] = {}
    free: dict[int, float] = {}
    home: dict[int, int] = {}
    # One pass is enough: what an action needs begins earlier, so it stands before it.
    for a in actions:
        task, wrong = (a.kind, a.stage, a.microbatch), ''
        if a.kind not in ('F', 'B', 'W') or min(*a[:3], a.device) < 0 or a.end <= a.start:
            wrong = 'kind is F, B or W, numbers start at 0, and the end is after the start'
        elif task in end:
            wrong = 'it is there twice; a stage runs F, B and W of a micro-batch once each'
        elif home.setdefault(a.stage, a.device) != a.device:
            wrong = f'its stage is on device {home[a.stage]} too; a stage is on one device'
        elif free.get(a.device, 0.0) > a.start:
            wrong = 'its device is busy; a device runs one action at a time'
        elif late := [n for n in _needs(task, stages - 1) if end.get(n, math.inf) > a.start]:
            wrong = f'it needs {_text(late[0])} before it'
        if wrong:
            raise ValueError(f'{a}: {wrong}')
        end[task] = free[a.device] = a.end
    found = sum(kind != 'W' for kind, _, _ in end)
    if found < (count := 2 * stages * microbatches):
        raise ValueError(
            f'{stages} stages and {microbatches} micro-batches have {count} forwards and '
            f'backwards, got {found}; every stage runs F and B of every micro-batch'
        )


def place(actions: Sequence[Action]) -> tuple[int, ...]:
    """The device of each stage."""
    return tuple(d for _, d in sorted({(a.stage, a.device) for a in actions}))


def order(actions: Sequence[Action], device: int) -> tuple[Action, ...]:
    """The actions of one device."""
    return tuple(a for a in actions if a.device == device)


def bubble(actions: Sequence[Action]) -> float:
    """The share of the devices' time, up to the end of the schedule, without an action."""
    busy = sum(a.end - a.start for a in actions)
    return 1 - busy / (len({*place(actions)}) * size(actions)[2])


def saved_inputs(actions: Sequence[Action]) -> tuple[int, ...]:
    """The most stage inputs that each device keeps at once, from their F to their last B or W.

    The n inputs of a device with V stages are as much as those of n / V micro-batches.
    """
    split = {(a.stage, a.microbatch) for a in actions if a.kind == 'W'}
    kept, most = Counter[int](), Counter[int]()
    for a in actions:
        last = 'W' if (a.stage, a.microbatch) in split else 'B'
        kept[a.device] += (a.kind == 'F') - (a.kind == last)
        most[a.device] = max(most[a.device], kept[a.device])
    return tuple(most[d] for d in sorted(most))


def most_kept(actions: Sequence[Action]) -> tuple[int, ...]:
    """The most micro-batches that each stage keeps at once, from their F to their last B or W."""
    return saved_inputs([a._replace(device=a.stage) for a in actions])


def messages(actions: Sequence[Action]) -> tuple[Message, ...]:
    """What stages send each other, on one device too, in the order in which the senders end.

    Both ends of a link derive the same list, so no end waits for ever if both follow its order.

    >>> messages(timed({0: [('F', 0, 0), ('B', 0, 0)], 1: [('F', 1, 0), ('B', 1, 0)]}))[1]
    Message(sent=4.0, source=1, target=0, microbatch=0, kind='B')
    """
    last = size(actions)[0] - 1
    target = lambda a: a.stage + {'F': 1, 'B': -1}.get(a.kind, last + 1)
    found = [Message(a.end, a.stage, target(a), a.microbatch, a.kind) for a in actions]
    return tuple(sorted(m for m in found if 0 <= m.target <= last))
