"""Claims, each as quantities that are tested on the results.

A quantity is a difference between two rows in the logarithm of the error, which is one minus the
accuracy, or in the loss in nats if the measure is the perplexity, or in points of accuracy. It is
computed seed by seed from the last epoch; paper.json lists the rows and the claimed sides of the
paper's claims, registered.json those of the experiment at equal bytes. A quantity supports a claim
if its mean is significantly on the claimed side of the bound, contradicts it if it is significantly
on the other side, and is otherwise undecided. The test is Student's t with the residual that rows
share, with Holm's correction over all quantities of the study. A claim is supported if all its
quantities support it, and contradicted if one quantity contradicts it.
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

PAPER, REGISTERED = (
    json.loads((Path(__file__).parent / f'{name}.json').read_text())
    for name in ('paper', 'registered')
)
LEAST = 0.005  # error in percent that an accuracy of 100 % counts as
QUANTITIES = {  # modes compared: that of the first row and of the second (or of the first again)
    'errors': ('judged', 'judged'),
    'errors off': ('off', 'off'),
    'switched off': ('off', 'on'),
    'points': ('judged', 'judged'),
    'points off': ('off', 'off'),
}
RATIO, NATS, POINTS = 'ratio', 'nats', 'points'  # units


class Evidence(NamedTuple):
    """One test of a claim; its numbers are logarithms of ratios of errors, nats, or points.

    Attributes:
      text: the quantity and its claimed side.
      unit: of the numbers: ratio (its logarithm), nats or points.
      bound: the end of the claimed side.
      paper: the quantity in the paper's tables; NaN if they do not have it.
      ours: the quantity over our seeds; None if a row was not run.
      points: the difference in percentage points of accuracy, or in nats.
      p: two-sided p-value of the distance from the bound, with Holm's correction over all tests.
      verdict: supported, contradicted or undecided; or what is missing.
      detectable: the true value that this test alone would detect with a power of 80 %.
      enough: the seeds with which it would detect our value with that power; 0 if not known.
    """

    text: str
    unit: str
    bound: float
    paper: float
    ours: Estimate | None = None
    points: float = math.nan
    p: float = math.nan
    verdict: str = 'undecided'
    detectable: float = math.nan
    enough: int = 0


class Verdict(NamedTuple):
    """A claim, the verdict on it, and the evidence."""

    claim: str
    where: str
    verdict: str
    evidence: tuple[Evidence, ...]


def judge(study: Study, claims: list[Claim] = PAPER['claims']) -> list[Verdict]:
    """The verdicts on the paper's claims, or on others, from the results of ``study``."""
    tests = [(claim, test) for claim in claims for test in claim['tests']]
    evidence = decided([weigh(test, study) for _, test in tests], [t['side'] for _, t in tests])
    verdicts = []
    for claim in claims:
        own = tuple(e for e, (c, _) in zip(evidence, tests, strict=True) if c is claim)
        verdicts.append(Verdict(claim['claim'], claim['where'], whole(own), own))
    return verdicts


def whole(evidence: tuple[Evidence, ...]) -> str:
    """The verdict on a claim, given those of its tests."""
    kinds = {e.verdict for e in evidence}
    if 'contradicted' in kinds:
        return 'contradicted'
    return 'supported' if kinds == {'supported'} else 'undecided'


def decided(evidence: list[Evidence], sides: list[str]) -> list[Evidence]:
    """``evidence`` with verdicts and with p-values corrected for the number of tests."""
    at = [i for i, e in enumerate(evidence) if not math.isnan(e.p)]
    adjusted = dict(zip(at, residuals.holm([evidence[i].p for i in at]), strict=True))
    judged = []
    for i, (e, side) in enumerate(zip(evidence, sides, strict=True)):
        if e.ours and i in adjusted:
            right = (e.ours.mean > e.bound) == (side == 'above')
            sure = 'supported' if right else 'contradicted'
            verdict = sure if adjusted[i] < residuals.LEVEL else 'undecided'
            e = e._replace(p=adjusted[i], verdict=verdict)
        judged.append(e)
    return judged


def weigh(test: Test, study: Study) -> Evidence:
    """The quantity of a test in the paper and in our results, with its p-value."""
    names = [*test['rows'], test['rows'][0]][:2]
    modes, unit = modes_of(test, names, study), unit_of(test, names)
    scores = [paper_score(*pair) for pair in zip(names, modes, strict=True)]
    first, second = (size(v, unit) for v in scores)
    bound = bound_of(test)
    e = Evidence(described(test, names, modes, unit), unit, bound, first - second)
    text = {n: r.measure == 'perplexity' for n, r in study.rows.items()}
    if missing := [n for n in dict.fromkeys(names) if text.get(n) != (unit == NATS)]:
        return e._replace(verdict=f'not run: {", ".join(missing)}')
    a, b = (by_seed(study.rows[n], m) for n, m in zip(names, modes, strict=True))
    if not (seeds := sorted(a.keys() & b.keys())):
        return e._replace(verdict='no common seed')
    apart = [size(a[s], unit) - size(b[s], unit) for s in seeds]
    ours = residuals.estimate(apart, *shared(test, names, study))
    points = sum(a[s] - b[s] for s in seeds) / len(seeds)
    e = e._replace(ours=ours, points=points, p=residuals.p_value(ours, bound))
    if math.isnan(ours.error):
        return e._replace(verdict='one seed')
    sign = 1 if test['side'] == 'above' else -1
    needed = residuals.enough(ours, bound) if ours.error > 0 else 0
    return e._replace(detectable=bound + sign * residuals.detectable(ours), enough=needed)


def shared(test: Test, names: list[str], study: Study) -> tuple[float | None, int]:
    """Deviation and degrees of freedom of the difference in one seed, from a shared residual."""
    residual = spread(study, test['quantity'], study.rows[names[0]].measure)
    if residual is None or not {*names} <= {*residual.rows}:
        return None, 0
    rows = len({*names})  # the difference of two rows has two residuals
    return residual.deviation * rows**0.5, residual.freedom


def spread(study: Study, quantity: str, measure: str) -> Residual | None:
    """The residual of a quantity over the rows of a measure."""
    first, second = QUANTITIES[quantity]
    rows = [r for r in study.rows.values() if r.measure == measure and 'exchange' not in r.runs[0]]
    column: Column = {}
    for row in rows:
        unit = POINTS if quantity.startswith(POINTS) else unit_by_measure(row.measure)
        values = sizes(row, row.judged if first == 'judged' else first, unit)
        if first != second:
            other = sizes(row, second, unit)
            values = {s: v - other[s] for s, v in values.items()}
        column[row.name] = values
    return residuals.residual(column, seeds=first == second)


def sizes(row: Row, mode: str, unit: str = '') -> dict[int, float]:
    """The compared number (`size`) of each seed."""
    unit = unit or unit_by_measure(row.measure)
    return {s: size(v, unit) for s, v in by_seed(row, mode).items()}


def size(score: float, unit: str) -> float:
    """The number that is compared: the loss in nats, or from an accuracy in percent the error.

    The error is in percent with the unit ``points``, and otherwise its logarithm.
    """
    if unit == NATS:
        return score
    return 100 - score if unit == POINTS else math.log(max(100 - score, LEAST))


def unit_by_measure(measure: str) -> str:
    """The unit in which two scores are compared if a test names none."""
    return NATS if measure == 'perplexity' else RATIO


def unit_of(test: Test, names: list[str]) -> str:
    """The unit of a test's numbers."""
    if test['quantity'].startswith(POINTS):
        return POINTS
    return NATS if 'loss' in (paper_row(names[0]) or {}) else RATIO


def bound_of(test: Test) -> float:
    """The end of a test's claimed side: zero, the margin, or a number of points."""
    named = {'zero': 0.0, 'margin': math.log1p(PAPER['margin']['errors'])}
    return named[test['of']] if test['of'] in named else float(test['of'])


def modes_of(test: Test, names: list[str], study: Study) -> list[str]:
    """The mode, on or off, in which each of the two rows is scored."""
    modes = QUANTITIES[test['quantity']]
    rows = [study.rows.get(n) for n in names]
    return [
        (r.judged if r else judged_by_name(n)) if m == 'judged' else m
        for n, r, m in zip(names, rows, modes, strict=True)
    ]


def judged_by_name(name: str) -> str:
    """The mode of a row that was not run; the names of the paper's rows begin with their rule."""
    return 'off' if name.startswith(('ef', 'aqsgd')) else 'on'


def described(test: Test, names: list[str], modes: list[str], unit: str) -> str:
    """A test as a line of text."""
    a, b = (f'{n} ({m})' for n, m in zip(names, modes, strict=True))
    margin = f'{100 * PAPER["margin"]["errors"]:+g} %'
    bound = {'zero': '0', 'margin': margin}.get(test['of']) or f'{test["of"]:+g} points'
    return f'{"loss" if unit == NATS else "errors"} of {a} against {b}: {test["side"]} {bound}'


def table_rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of one of the paper's tables by name."""
    return {r['row']: r for r in table['rows']}


def paper_row(name: str) -> dict[str, Any] | None:
    """A row of the paper's tables."""
    found = (r for t in PAPER['tables'] for n, r in table_rows(t).items() if n == name)
    return next(found, None)


def paper_score(name: str, mode: str) -> float:
    """The paper's score of a row, for Table 5 its loss, which is with compression on; or NaN."""
    row = paper_row(name) or {}
    return row.get('loss', row.get(mode, math.nan))
