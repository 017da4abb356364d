"""`Verdict`: whether further machines pay, in sentences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxmp.net.speed import Link

if TYPE_CHECKING:
    from jaxmp.plan.choose import Choice

MARGIN = 0.05  # of a step: machines vary by as much
ALIKE = 0.1  # of a step alone: so far a prediction may be from what is measured (bench/pays.py)
UNSTEADY = 1.25  # from the fastest step to the slowest: other work takes the machine


class Row(NamedTuple):
    """Seconds of a step over a link.

    Attributes:
      link: between neighbouring stages.
      raw: seconds with raw messages.
      choice: the plan.
    """

    link: Link
    raw: float
    choice: Choice

    @property
    def best(self) -> float:
        """Seconds of the plan."""
        return self.choice.seconds


class Verdict(NamedTuple):
    """What a link does for a model.

    Attributes:
      machines: their number.
      alone: seconds of a step on one machine, the fastest.
      needs: bytes of memory that the whole model needs at least.
      has: bytes of the machine that has most.
      row: over the link that was asked about.
      still: the same without its delay.
      rows: over other rates with the same delay.
      split: of two unlike machines, what each has and how fast it is.
      steps: seconds of some steps alone, whose median is ``alone``.
      late: of late gradients, see `jaxmp.plan.late.proposal`.
    """

    machines: int
    alone: float
    needs: int
    has: int
    row: Row
    still: Row
    rows: Sequence[Row]
    split: str = ''
    steps: Sequence[float] = ()
    late: str = ''


def crossing(rates: Sequence[float], ratios: Sequence[float], level: float) -> float | None:
    """The rate above which a ratio that falls with the rate stays below ``level``; None if never.

    Between two rates the ratio is a line over the logarithm of the rate; 0 if it is always below.

    >>> crossing([1, 100], [3, 1], 2.0), crossing([1, 100], [1, 0.5], 2.0)
    (10.0, 0)
    >>> crossing([1, 100], [3, 2.5], 2.0)
    """
    above = [i for i, ratio in enumerate(ratios) if ratio > level]
    if not above:
        return 0
    if (i := above[-1]) == len(rates) - 1:
        return None
    share = (ratios[i] - level) / (ratios[i] - ratios[i + 1])
    return rates[i] * (rates[i + 1] / rates[i]) ** share


def said(v: Verdict) -> str:
    """The verdict in a few short sentences, what it rests on, and what costs."""
    link, codecs = spelled(v.row.link), named(v.row.choice)
    needs, has = (f'{n / 2**30:.1f} GiB' for n in (v.needs, v.has))
    one = f'alone a step takes {duration(v.alone)}'
    if v.needs > v.has:
        begin = f'The model does not fit alone: it needs at least {needs}, this machine has {has}. '
        one = f'If it did, {one}'
    else:
        begin, one = f'{paying(v.row.best / v.alone)}: ', one
    steps = f'{v.row.raw / v.alone:.2f} times as long with raw messages'
    if codecs != 'raw':
        steps += f' and {v.row.best / v.alone:.2f} times with {codecs}'
    text = f'{begin}{one}, on {v.machines} machines over {link} {steps}. '
    return f'{text}{advice(v)}{delay(v)}{v.split}'


def advice(v: Verdict) -> str:
    """Above which rate it pays, and above which no codec is needed."""
    pays, free = paying_rate(v), crossing(*rates(v, lambda r: r.raw / r.best), 1 + MARGIN)
    if pays is None:
        limit = '' if v.row.link.delay else ': the link is not what limits it'
        return f'It pays at no rate up to {spelled_rate(v.rows[-1].link.rate)}{limit}.'
    least = v.rows[0].link.rate
    text = f'It pays above {spelled_rate(max(pays, least))}'
    return text + (
        f', raw above {spelled_rate(max(free, least, pays))}.' if free is not None else '.'
    )


def paying_rate(v: Verdict) -> float | None:
    """The rate above which a step is faster than alone for sure; None if at none that was asked."""
    return crossing(*rates(v, lambda r: r.best / v.alone), 1 - ALIKE)


def rates(v: Verdict, ratio: Callable[[Row], float]) -> tuple[list[float], list[float]]:
    """All rates, and a ratio at each."""
    return [r.link.rate for r in v.rows], [ratio(r) for r in v.rows]


def following(v: Verdict) -> str:
    """What to do next."""
    pays, plan = paying_rate(v), '`jaxmp plan` with the same flags writes the run'
    if v.needs > v.has or v.row.best / v.alone < 1 - ALIKE:
        return f'Next: {plan}.'
    if pays is not None:
        rate = spelled_rate(max(pays, v.rows[0].link.rate))
        return f'Next: train on one machine, or join them by a link of more than {rate}; {plan}.'
    if v.still.best / v.alone < 1 - ALIKE:
        return (
            'Next: train on one machine, or hide the latency by replicas that average rarely '
            '(`exchange=diloco(...)`).'
        )
    rounds = 'replicas that average rarely (`exchange=diloco(...)`) send less'
    return f'Next: train on one machine; {rounds}.'


def unsteady(v: Verdict) -> str:
    """What the spread of the steps alone says about the machine; empty where it is small."""
    least, most = min(v.steps, default=1.0), max(v.steps, default=1.0)
    if most <= UNSTEADY * least:
        return ''
    return (
        f'Steps alone took {duration(least)} to {duration(most)}: other work seems to run here, '
        'and predictions may be off as much. Ask again on a quiet machine.'
    )


def paying(ratio: float) -> str:
    """A ratio to a step alone in words.

    >>> paying(0.8), paying(0.95), paying(2.0)
    ('It pays', 'It hardly makes a difference', 'It does not pay')
    """
    if ratio < 1 - ALIKE:
        return 'It pays'
    return 'It does not pay' if ratio > 1 + ALIKE else 'It hardly makes a difference'


def delay(v: Verdict) -> str:
    """What the delay costs."""
    share = 100 * (1 - v.still.best / v.row.best)
    return (
        f' Without the delay it would be {v.still.best / v.alone:.2f} times.' if share >= 1 else ''
    )


def running(v: Verdict) -> str:
    """What a command that runs the plan is, before a colon."""
    slower = v.needs <= v.has and v.row.best / v.alone > 1 + ALIKE
    return 'One machine alone is faster; to run it all the same' if slower else 'Next'


def named(choice: Choice) -> str:
    """The codecs of a plan: one, one each way, or "the plan's codecs" where they differ more."""
    ways = [
        list(dict.fromkeys(c.text for (a, b), c in choice.codecs.items() if (a < b) == forward))
        for forward in (True, False)
    ]
    if any(len(way) > 1 for way in ways):
        return "the plan's codecs"
    [fwd], [bwd] = ways
    return fwd if fwd == bwd else f'{fwd} forward and {bwd} backward'


def spelled(link: Link) -> str:
    """A link in words.

    >>> spelled(Link(50, 40)), spelled(Link(1000))
    ('50 Mbit/s with 40 ms one way', '1 Gbit/s')
    >>> spelled(Link(93.21, 0.1234, 9.5))
    '93 Mbit/s and 9.5 Mbit/s back with 0.12 ms one way'
    """
    back = f' and {spelled_rate(link.back)} back' if link.back else ''
    return (
        spelled_rate(link.rate)
        + back
        + (f' with {link.delay:.2g} ms one way' if link.delay else '')
    )


def spelled_rate(rate: float) -> str:
    """A rate with two digits.

    >>> spelled_rate(8.764), spelled_rate(1234)
    ('8.8 Mbit/s', '1.2 Gbit/s')
    """
    number = float(f'{rate:.2g}')
    return f'{number:g} Mbit/s' if number < 1000 else f'{number / 1000:g} Gbit/s'


def duration(seconds: float) -> str:
    """Seconds with three digits.

    >>> duration(0.0123), duration(4.567)
    ('12.3 ms', '4.57 s')
    """
    return f'{seconds:.3g} s' if seconds >= 1 else f'{1e3 * seconds:.3g} ms'
