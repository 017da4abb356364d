"""The paper's findings, each as quantities of which the results decide.

A quantity compares errors: one less the accuracy, their logarithm, or the loss in nats where the
measure is the perplexity. It is computed seed by seed from the last epoch, of rows as they are
judged; the rules stand in paper.json. A quantity supports a claim if its mean lies on the claimed
side of the bound further than chance explains, contradicts it if it lies so on the other, and is
undecided else: Student's t with the residual that rows share, Holm's correction over all quantities
of the study. A claim is supported if all its quantities support it, contradicted if one does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.report import residuals
from jaxmp.report.residuals import Column, Estimate, Residual
from jaxmp.report.results import Row, Study, by_seed

Claim = dict[str, Any]
Test = dict[str, Any]

PAPER: dict[str, Any] = json.loads((Path(__file__).parent / 'paper.json').read_text())
LEAST = 0.005  # percent of errors that an accuracy of 100 % counts as
QUANTITIES = {  # what is compared: of the first row, of the second or of the first again
    'errors': ('judged', 'judged'),
    'errors off': ('off', 'off'),
    'switched off': ('off', 'on'),
}


class Evidence(NamedTuple):
    """One test of a claim; its numbers are logarithms of ratios of errors, or nats.

    Attributes:
      text: the quantity and where it is claimed to lie.
      nats: whether the numbers are nats.
      bound: where the claimed side begins.
      paper: the quantity in the paper's tables.
      ours: over the seeds; None if a row was not run.
      points: the difference in points of accuracy, or nats.
      p: probability of lying so far from the bound if that were the truth, by Holm among all tests.
      verdict: supported, contradicted or undecided; or what is missing.
      detectable: where the truth must lie for this test alone to find it with a power of 80 %.
    """

    text: str
    nats: bool
    bound: float
    paper: float
    ours: Estimate | None = None
    points: float = math.nan
    p: float = math.nan
    verdict: str = 'undecided'
    detectable: float = math.nan


class Verdict(NamedTuple):
    """A claim, whether it holds, and by what."""

    claim: str
    where: str
    verdict: str
    evidence: tuple[Evidence, ...]


def judge(study: Study) -> list[Verdict]:
    """Decides the claims of paper.json by the results of ``study``."""
    tests = [(claim, test) for claim in PAPER['claims'] for test in claim['tests']]
    found = decided([weigh(test, study) for _, test in tests], [t['side'] for _, t in tests])
    verdicts = []
    for claim in PAPER['claims']:
        own = tuple(e for e, (c, _) in zip(found, tests, strict=True) if c is claim)
        verdicts.append(Verdict(claim['claim'], claim['where'], whole(own), own))
    return verdicts


def whole(evidence: tuple[Evidence, ...]) -> str:
    """The verdict of a claim by those of its tests."""
    kinds = {e.verdict for e in evidence}
    if 'contradicted' in kinds:
        return 'contradicted'
    return 'supported' if kinds == {'supported'} else 'undecided'


def decided(found: list[Evidence], sides: list[str]) -> list[Evidence]:
    """``found`` with its verdicts, the p-values corrected for how many there are."""
    at = [i for i, e in enumerate(found) if not math.isnan(e.p)]
    adjusted = dict(zip(at, residuals.holm([found[i].p for i in at]), strict=True))
    made = []
    for i, (e, side) in enumerate(zip(found, sides, strict=True)):
        if e.ours and i in adjusted:
            right = (e.ours.mean > e.bound) == (side == 'above')
            sure = 'supported' if right else 'contradicted'
            verdict = sure if adjusted[i] < residuals.LEVEL else 'undecided'
            e = e._replace(p=adjusted[i], verdict=verdict)
        made.append(e)
    return made


def weigh(test: Test, study: Study) -> Evidence:
    """Computes the quantity of a test, the paper's and ours, and how far chance explains it."""
    names = [*test['rows'], test['rows'][0]][:2]
    theirs, modes = [paper_row(n) for n in names], modes_of(test, names, study)
    nats = 'loss' in theirs[0]
    bound = math.log1p(PAPER['margin']['errors']) if test['of'] == 'margin' else 0.0
    first, second = (size(paper_score(*p), nats) for p in zip(theirs, modes, strict=True))
    e = Evidence(said(test, names, modes, nats), nats, bound, first - second)
    if missing := [n for n in dict.fromkeys(names) if n not in study.rows]:
        return e._replace(verdict=f'not run: {", ".join(missing)}')
    a, b = (by_seed(study.rows[n], m) for n, m in zip(names, modes, strict=True))
    if not (seeds := sorted(a.keys() & b.keys())):
        return e._replace(verdict='no common seed')
    apart = [size(a[s], nats) - size(b[s], nats) for s in seeds]
    ours = residuals.estimate(apart, *shared(test, names, study))
    points = sum(a[s] - b[s] for s in seeds) / len(seeds)
    e = e._replace(ours=ours, points=points, p=residuals.p_value(ours, bound))
    if math.isnan(ours.error):
        return e._replace(verdict='one seed')
    sign = 1 if test['side'] == 'above' else -1
    return e._replace(detectable=bound + sign * residuals.detectable(ours))


def shared(test: Test, names: list[str], study: Study) -> tuple[float | None, int]:
    """Deviation of a seed's difference and its degrees of freedom, if its rows share a residual."""
    found = spread(study, test['quantity'], study.rows[names[0]].measure)
    if found is None or not {*names} <= {*found.rows}:
        return None, 0
    rows = len({*names})  # two rows differ by two residuals
    return found.deviation * rows**0.5, found.freedom


def spread(study: Study, quantity: str, measure: str) -> Residual | None:
    """The residual of what a quantity compares, over the rows of a measure."""
    first, second = QUANTITIES[quantity]
    rows = [r for r in study.rows.values() if r.measure == measure and 'exchange' not in r.runs[0]]
    column: Column = {}
    for row in rows:
        values = sizes(row, row.judged if first == 'judged' else first)
        if first != second:
            other = sizes(row, second)
            values = {s: v - other[s] for s, v in values.items()}
        column[row.name] = values
    return residuals.residual(column, seeds=first == second)


def sizes(row: Row, mode: str) -> dict[int, float]:
    """What is compared, by seed."""
    nats = row.measure == 'perplexity'
    return {s: size(v, nats) for s, v in by_seed(row, mode).items()}


def size(score: float, nats: bool) -> float:
    """Logarithm of the errors of an accuracy in percent; a loss in nats as it is."""
    return score if nats else math.log(max(100 - score, LEAST))


def modes_of(test: Test, names: list[str], study: Study) -> list[str]:
    """How each of the two rows is scored."""
    modes = QUANTITIES[test['quantity']]
    rows = [study.rows.get(n) for n in names]
    return [
        (r.judged if r else judged_by_name(n)) if m == 'judged' else m
        for n, r, m in zip(names, rows, modes, strict=True)
    ]


def judged_by_name(name: str) -> str:
    """How a row that was not run would be judged: the paper's rows are named for their rule."""
    return 'off' if name.startswith(('ef', 'aqsgd')) else 'on'


def said(test: Test, names: list[str], modes: list[str], nats: bool) -> str:
    """A test in words."""
    a, b = (f'{n} ({m})' for n, m in zip(names, modes, strict=True))
    bound = f'{100 * PAPER["margin"]["errors"]:+g} %' if test['of'] == 'margin' else '0'
    return f'{"loss" if nats else "errors"} of {a} against {b}: {test["side"]} {bound}'


def table_rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of one of the paper's tables by name."""
    return {r['row']: r for r in table['rows']}


def paper_row(name: str) -> dict[str, Any]:
    """A row of the paper's tables."""
    return next(r for t in PAPER['tables'] for n, r in table_rows(t).items() if n == name)


def paper_score(row: dict[str, Any], mode: str) -> float:
    """The paper's score of a row; of Table 5 its loss, which is with compression."""
    return row['loss'] if 'loss' in row else row[mode]
