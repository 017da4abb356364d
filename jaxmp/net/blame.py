"""`blamed`: who is to blame where nothing goes on; and words for who is lost or owes a message."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

LOST = 'has lost its connection: it was killed, ran out of memory, or the network failed'


class Work(NamedTuple):
    """What a process does, as of its last sign of life, and its wait of the earliest step.

    Attributes:
      idle: seconds since its work last went on.
      phase: the name of what it does.
      limit: seconds in which that has to go on.
      step: number of the step of the message that it waits for, -1 for what all decide together;
        None if it does not wait.
      source: number of the process that owes the message.
      tag: name of the message.
      seconds: for which it has waited.
    """

    idle: float
    phase: str
    limit: float
    step: int | None = None
    source: int = -1
    tag: str = ''
    seconds: float = 0.0


def blamed(work: Mapping[int, Work], names: tuple[str, ...]) -> tuple[set[int], str]:
    """The processes for which nothing goes on, and a line that says what they owe since when.

    Who does not work and does not wait is to blame; or else, of those who wait for the message of
    the earliest step, who owes one and does not wait there itself, or all of a circle. A thread
    that moves messages waits ahead of those that compute, so that a later wait is no excuse.

    >>> late = Work(61, 'working', 60)
    >>> waits = lambda *sources: {i: late._replace(step=7, source=j) for i, j in sources}
    >>> blame = lambda work: blamed(work, ('a', 'b', 'c'))[0]
    >>> blame({**waits((0, 1)), 1: late}), blame({**waits((0, 1)), 1: late._replace(idle=50)})
    ({1}, set())
    >>> blame(waits((2, 0), (0, 1), (1, 0)))
    {0, 1}
    """
    idle = {i: w for i, w in work.items() if w.idle > w.limit}
    guilty = {i for i, w in idle.items() if w.step is None}
    if idle and not guilty:
        first = min(w.step for w in idle.values() if w.step is not None)
        owes = {i: w.source for i, w in idle.items() if w.step == first}
        guilty = ({*owes.values()} - owes.keys() or {*owes.values()}) & idle.keys()
    lines = []
    for i in sorted(guilty):
        waits = [(names[j], w) for j, w in work.items() if w.step is not None and w.source == i]
        owed = (f'{n} {w.tag!r} of {stepped(w.step)} since {clock(w.seconds)}' for n, w in waits)
        since = f'since {clock(work[i].idle)} ({work[i].phase}, at most {work[i].limit:g} s)'
        lines.append(' and owes '.join([f'{names[i]} has done nothing {since}', *owed]))
    return guilty, '; '.join(lines)


def stepped(step: int | None) -> str:
    """A step in a message.

    >>> stepped(7), stepped(-1)
    ('step 7', 'what all decide')
    """
    return 'what all decide' if step == -1 else f'step {step}'


def nobody(back: float) -> str:
    """The end of a line on a process that is lost, for which others have waited ``back`` seconds.

    >>> nobody(60)
    '; nobody came in its place within 60 s; the same command goes on from the last checkpoint'
    """
    advice = 'the same command goes on from the last checkpoint'
    return f'; nobody came in its place within {back:g} s; {advice}' * (back > 0)


def clock(ago: float) -> str:
    """The time of day some seconds ago."""
    return time.strftime('%H:%M:%S', time.localtime(time.time() - ago))


def listed(names: Iterable[str]) -> str:
    """Names in a sentence.

    >>> listed(['a', 'b', 'c'])
    'a, b and c'
    """
    *some, last = names
    return f'{", ".join(some)} and {last}' if some else last
