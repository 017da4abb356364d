"""The paper's claims, each as quantities that are tested on the results.

A quantity is a difference between two rows in the logarithm of the error, which is one minus the
accuracy, or in the loss in nats if the measure is the perplexity. It is computed seed by seed from
the last epoch; paper.json lists the rows and the claimed sides. A quantity supports a claim if its
mean is significantly on the claimed side of the bound, contradicts it if it is significantly on the
other side, and is otherwise undecided. The test is Student's t with the residual that rows share,
with Holm's correction over all quantities of the study. A claim is supported if all its quantities
support it, and contradicted if one quantity contradicts it.
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
LEAST = 0.005  # error in percent that an accuracy of 100 % counts as
QUANTITIES = {  # modes compared: that of the first row and of the second (or of the first again)
    'errors': ('judged', 'judged'),
    'errors off': ('off', 'off'),
    'switched off': ('off', 'on'),
}


class Evidence(NamedTuple):
    """One test of a claim; its numbers are logarithms of ratios of errors, or nats.

    Attributes:
      text: the quantity and its claimed side.
      nats: whether the numbers are nats.
      bound: the end of the claimed side.
      paper: the quantity in the paper's tables.
      ours: the quantity over our seeds; None if a row was not run.
      points: the difference in percentage points of accuracy, or in nats.
      p: two-sided p-value of the distance from the bound, with Holm's correction over all tests.
      verdict: supported, contradicted or undecided; or what is missing.
      detectable: the true value that this test alone would detect with a power of 80 %.
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
    """A claim, the verdict on it, and the evidence."""

    claim: str
    where: str
    verdict: str
    evidence: tuple[Evidence, ...]


def judge(study: Study) -> list[Verdict]:
    """The verdicts on the claims of paper.json from the results of ``study``."""
    tests = [(claim, test) for claim in PAPER['claims'] for test in claim['tests']]
    evidence = decided([weigh(test, study) for _, test in tests], [t['side'] for _, t in tests])
    verdicts = []
    for claim in PAPER['claims']:
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
    theirs, modes = [paper_row(n) for n in names], modes_of(test, names, study)
    nats = 'loss' in theirs[0]
    bound = math.log1p(PAPER['margin']['errors']) if test['of'] == 'margin' else 0.0
    first, second = (size(paper_score(*p), nats) for p in zip(theirs, modes, strict=True))
    e = Evidence(described(test, names, modes, nats), nats, bound, first - second)
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
        values = sizes(row, row.judged if first == 'judged' else first)
        if first != second:
            other = sizes(row, second)
            values = {s: v - other[s] for s, v in values.items()}
        column[row.name] = values
    return residuals.residual(column, seeds=first == second)


def sizes(row: Row, mode: str) -> dict[int, float]:
    """The compared number (`size`) of each seed."""
    nats = row.measure == 'perplexity'
    return {s: size(v, nats) for s, v in by_seed(row, mode).items()}


def size(score: float, nats: bool) -> float:
    """Logarithm of the error in percent for an accuracy in percent; a loss in nats unchanged."""
    return score if nats else math.log(max(100 - score, LEAST))


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


def described(test: Test, names: list[str], modes: list[str], nats: bool) -> str:
    """A test as a line of text."""
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
    """The paper's score of a row; for Table 5 its loss, which is with compression on."""
    return row['loss'] if 'loss' in row else row[mode]
