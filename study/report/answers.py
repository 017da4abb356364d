"""What a reader asks first, from the rows that answers.json names: codecs by bits, nine claims."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from study.report import lost
from study.report.claims import OPEN, Evidence, Verdict, judge, telling
from study.report.page import number, with_unit
from study.report.residuals import Estimate
from study.report.results import Study, difference, wire
from study.report.tables import NONE, markdown

ANSWERS = json.loads((Path(__file__).parent / 'answers.json').read_text())
UNKNOWN = 'not measured'
UNDECIDED = 'undecided'
HEADS = ('claim', 'verdict; direction', 'our number', 'paper', 'would turn', 'scale; others')


class Cost(NamedTuple):
    """What a row loses against no compression: nats, or points of accuracy; more is worse.

    Attributes:
      row: its name.
      bits: per element, both directions.
      loss: that loss with its interval or standard error, and the seeds or tokens.
      codecs: texts of the forward and of the backward channel.
    """

    row: str
    bits: float
    loss: str
    codecs: tuple[str, str]


def costs(task: Mapping[str, Any], studies: Mapping[str, Study | lost.Table]) -> list[Cost | None]:
    """The rows of a task in the order of the columns, None where one was not run.

    Raises:
      ValueError: if a row has other bits than its column.
    """
    study, against = studies.get(task['study']), task.get('against', 'none')
    references = [against] * len(task['rows']) if isinstance(against, str) else against
    costs_of_rows = []
    for name, reference, (column, (least, most)) in zip(
        task['rows'], references, ANSWERS['columns'].items(), strict=True
    ):
        cost = None
        if study and {name, reference} <= study.rows.keys():
            cost = cost_of(study, name, reference)
        if cost and not least <= cost.bits <= most:
            raise ValueError(f'{name} of {task["study"]} has {cost.bits:.2f} bits, not {column}')
        costs_of_rows.append(cost)
    return costs_of_rows


def cost_of(study: Study | lost.Table, name: str, reference: str) -> Cost | None:
    """What a row of a study loses against another; None without a common seed."""
    if isinstance(study, lost.Table):
        row = study.rows[name]
        return Cost(name, row['bits'], lost.lost(row), (row['fwd'], 'raw'))
    ours = study.rows[name]
    apart = difference(ours, study.rows[reference])
    if apart is None:
        return None
    run = ours.runs[0]
    loses = apart if ours.measure == 'perplexity' else turned(apart)
    seeds = f'{apart.seeds} seed{"s" * (apart.seeds > 1)}'
    loss = f'{with_ends(loses, 3 if ours.measure == "perplexity" else 2)}, {seeds}'
    return Cost(name, wire(ours)['bits'], loss, (run['fwd'], run['bwd']))


def turned(e: Estimate) -> Estimate:
    """An estimate of the opposite of a number."""
    return e._replace(mean=-e.mean, low=-e.high, high=-e.low)


def with_ends(e: Estimate, digits: int) -> str:
    """Mean and interval; for one seed, only the value.

    >>> with_ends(Estimate(0.5, math.nan, math.nan, math.nan, 1, 0), 2)
    '+0.50'
    """
    ends = '' if e.seeds == 1 else f' [{e.low:+.{digits}f}, {e.high:+.{digits}f}]'
    return f'{e.mean:+.{digits}f}{ends}'


def by_bits(studies: Mapping[str, Study | lost.Table]) -> str:
    """A table of what so many bits cost in each task, and one of the codecs of its rows."""
    tasks = [(task['task'], costs(task, studies)) for task in ANSWERS['tasks']]
    shown = lambda c: f'**{c.loss}**<br>`{c.row}`, {c.bits:.2f} bits' if c else UNKNOWN
    cells = [[name, *map(shown, row)] for name, row in tasks]
    return markdown(['lost', *ANSWERS['columns']], cells, words=1 + len(ANSWERS['columns'])) + '\n'


def codecs(studies: Mapping[str, Study | lost.Table]) -> str:
    """The texts of the rows of `by_bits`, of several boundaries below each other; '' of none."""
    every = (cost for task in ANSWERS['tasks'] for cost in costs(task, studies) if cost)
    lines = dict.fromkeys((f'`{cost.row}`', *map(texts, cost.codecs)) for cost in every)
    heads = ['row', 'forward', 'backward']
    return markdown(heads, [[*line] for line in lines], words=3) if lines else ''


def texts(channels: str) -> str:
    """The distinct texts of a channel for each boundary.

    >>> texts('block(4);block(4);raw')
    '`block(4)`<br>`raw`'
    """
    return '<br>'.join(f'`{t}`' for t in dict.fromkeys(t.strip() for t in channels.split(';')))


def nine(*studies: Study) -> str:
    """A line for each of the paper's claims, by the first study that ran it, and a count."""
    judged = [[*zip(studies, row, strict=True)] for row in zip(*map(judge, studies), strict=True)]
    picked = [judged_by(row) for row in judged]
    kinds = Counter(v.verdict for _, v in picked)
    counted = ', '.join(
        f'{kinds[k]} {k}' for k in ('supported', 'contradicted', OPEN, UNDECIDED) if kinds[k]
    )
    torn = sum({'supported', 'contradicted'} <= {v.verdict for _, v in row} for row in judged)
    lines = [line(*pair, row) for pair, row in zip(picked, judged, strict=True)]
    return (
        f'Of {len(picked)} claims: {counted}. Our scales contradict each other on {torn}.\n\n'
        f'{markdown(HEADS, lines, words=len(HEADS))}\n'
    )


def judged_by(row: Sequence[tuple[Study, Verdict]]) -> tuple[Study, Verdict]:
    """The first study in which the primary quantity of a claim was run; the others confirm it."""
    run = [pair for pair in row if telling(pair[1]).ours]
    return (run or row)[0]


def line(study: Study, verdict: Verdict, row: Sequence[tuple[Study, Verdict]]) -> list[str]:
    """The cells of a claim."""
    e = telling(verdict)
    quantity, _, bound = e.text.rpartition(': ')
    ours = f'{quantity}: **{with_unit(e, e.ours)}**' if e.ours else UNKNOWN
    turns = e.margins or f'no margin: claimed {bound}'
    if ', ' not in turns and e.margins:
        turns = f'at none{turns.removeprefix(e.verdict)}'
    where = [f'**{scale(study, e)}**']
    for other, v in row:
        if other is not study and telling(v).ours:
            where.append(f'{scale(other, telling(v))}: {v.verdict}')
    answer = f'**{verdict.verdict}**<br>{side(e)}'
    claim = f'{verdict.claim} ({verdict.where})'
    return [claim, answer, ours, number(e, e.paper), turns, '<br>'.join(where)]


def scale(study: Study, e: Evidence) -> str:
    """What was trained in a study for a quantity, in words."""
    names = ANSWERS['scales'].get(study.name, {})
    return names.get('perplexity' if e.text.startswith('loss') else 'accuracy', study.name)


def side(e: Evidence) -> str:
    """Whether our value is on the claimed side of its bound."""
    if not e.ours or math.isnan(e.ours.mean):
        return NONE
    above = e.text.rpartition(': ')[2].startswith('above')
    return 'as claimed' if (e.ours.mean > e.bound) == above else 'opposite'
