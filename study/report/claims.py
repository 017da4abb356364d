"""Claims, each as quantities that are tested on the results.

A quantity is a difference between two rows in the logarithm of the error, which is one minus the
accuracy, or in the loss in nats if the measure is the perplexity, or in the training loss in nats,
or in points of accuracy. It is computed seed by seed from the last epoch; paper.json lists the rows
and the claimed sides of the paper's claims, registered.json those of the experiment at equal bytes.
A quantity supports a claim if its mean is significantly on the claimed side of the bound,
contradicts it if it is significantly on the other side, and is otherwise undecided. The test is
Student's t with the residual that rows share, with Holm's correction over all quantities of the
study. The first quantity of a claim is its primary one and decides it alone. The others stand
beside it.

A margin is a choice, so all quantities are judged at many margins, and each says at which of them
it would be judged otherwise. One that is supported and contradicted within the margins that the
paper's text allows has a number and no verdict.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from study.report import residuals
from study.report.paper import PAPER, TRAINING, measure_of, paper_judged, paper_score
from study.report.residuals import Column, Estimate, Residual
from study.report.results import Row, Study, by_seed

Claim = dict[str, Any]
Test = dict[str, Any]

LEAST = 0.005  # error in percent that an accuracy of 100 % counts as
QUANTITIES = {  # modes compared: that of the first row and of the second (or of the first again)
    'errors': ('judged', 'judged'),
    'errors on': ('on', 'on'),
    'errors off': ('off', 'off'),
    'training loss': (TRAINING, TRAINING),
    'switched off': ('off', 'on'),
    'points': ('judged', 'judged'),
    'points off': ('off', 'off'),
}
RATIO, NATS, POINTS = 'ratio', 'nats', 'points'  # units
OTHER_MARGINS = tuple(n / 200 for n in range(1, 101))  # in errors, by half a percent to 50 %
OTHER_POINTS = tuple(n / 10 for n in range(1, 51))  # in points of accuracy
OPEN = 'depends on the margin'


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
      verdict: supported, contradicted or undecided, or `OPEN`; or what is missing.
      margins: the verdicts at other margins; empty if the bound is none.
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
    margins: str = ''
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
    evidence = at_all_margins([weigh(test, study) for _, test in tests], [t for _, t in tests])
    verdicts = []
    for claim in claims:
        of_claim = tuple(e for e, (c, _) in zip(evidence, tests, strict=True) if c is claim)
        verdicts.append(Verdict(claim['claim'], claim['where'], of_claim[0].verdict, of_claim))
    return verdicts


def telling(verdict: Verdict) -> Evidence:
    """The primary quantity, on which a verdict rests."""
    return verdict.evidence[0]


def at_all_margins(evidence: list[Evidence], tests: list[Test]) -> list[Evidence]:
    """``evidence`` with verdicts at the margin, and what they are at others."""
    sides, judged = [t['side'] for t in tests], []
    margins = OTHER_POINTS if any(is_points(t) for t in tests) else OTHER_MARGINS
    others = [
        decided([at(m, *pair) for pair in zip(evidence, tests, strict=True)], sides)
        for m in margins
    ]
    low, high = PAPER['margin']['allowed']
    for i, (e, test) in enumerate(zip(decided(evidence, sides), tests, strict=True)):
        if test['of'] != 'zero' and e.ours and not math.isnan(e.p):
            by_margin = [(m, other[i].verdict) for m, other in zip(margins, others, strict=True)]
            e = e._replace(margins=said(by_margin, e.unit))
            allowed = {v for m, v in by_margin if low <= m <= high and e.unit == RATIO}
            if {'supported', 'contradicted'} <= allowed:
                e = e._replace(verdict=OPEN)
        judged.append(e)
    return judged


def at(margin: float, e: Evidence, test: Test) -> Evidence:
    """A quantity with its p-value at another margin."""
    if not e.ours or math.isnan(e.p):
        return e
    bound = bound_of(test, margin)
    return e._replace(bound=bound, p=residuals.p_value(e.ours, bound))


def said(verdicts: list[tuple[float, str]], unit: str) -> str:
    """Verdicts by margin, in ascending order, as a text.

    >>> said([(0.2, 'contradicted'), (0.205, 'undecided'), (0.21, 'supported')], RATIO)
    'contradicted to 20 %, undecided from 20.5 %, supported from 21 %'
    >>> said([(1, 'supported'), (2, 'supported')], POINTS)
    'supported from 1 to 2 points'
    """
    shown = lambda m: f'{100 * m:g} %' if unit == RATIO else f'{m:g} points'
    groups = [
        (v, [m for m, _ in margins_of])
        for v, margins_of in itertools.groupby(verdicts, lambda p: p[1])
    ]
    (first, margins), *rest = groups
    if not rest:
        return f'{first} from {shown(margins[0]).partition(" ")[0]} to {shown(margins[-1])}'
    return ', '.join(
        [
            f'{first} to {shown(margins[-1])}',
            *(f'{v} from {shown(margins_of[0])}' for v, margins_of in rest),
        ]
    )


def decided(evidence: list[Evidence], sides: list[str]) -> list[Evidence]:
    """``evidence`` with verdicts and with p-values corrected for the number of tests."""
    tested = [i for i, e in enumerate(evidence) if not math.isnan(e.p)]
    adjusted = dict(zip(tested, residuals.holm([evidence[i].p for i in tested]), strict=True))
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
    modes, unit = modes_of(test, names, study), unit_in(test['quantity'], measure_of(names[0]))
    scores = [paper_score(*pair) for pair in zip(names, modes, strict=True)]
    first, second = (size(v, unit) for v in scores)
    bound = bound_of(test)
    e = Evidence(described(test, names, modes, unit), unit, bound, first - second)
    measure = {n: r.measure for n, r in study.rows.items()}
    if missing := [n for n in dict.fromkeys(names) if measure.get(n) != measure_of(names[0])]:
        return e._replace(verdict=f'not run: {", ".join(missing)}')
    a, b = (scores_of(study.rows[n], m) for n, m in zip(names, modes, strict=True))
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
        unit = unit_in(quantity, row.measure)
        values = sizes(row, row.judged if first == 'judged' else first, unit)
        if first != second:
            other = sizes(row, second, unit)
            values = {s: v - other[s] for s, v in values.items()}
        column[row.name] = values
    return residuals.residual(column, seeds=first == second)


def sizes(row: Row, mode: str, unit: str = '') -> dict[int, float]:
    """The compared number (`size`) of each seed."""
    unit = unit or unit_in('', row.measure)
    return {s: size(v, unit) for s, v in scores_of(row, mode).items()}


def scores_of(row: Row, mode: str) -> dict[int, float]:
    """The score of each seed in the last epoch, or its training loss where it is known."""
    if mode != TRAINING:
        return by_seed(row, mode)
    return {r['seed']: r['history']['train']['loss'][-1] for r in row.runs if 'history' in r}


def size(score: float, unit: str) -> float:
    """The number that is compared: the loss in nats, or from an accuracy in percent the error.

    The error is in percent with the unit ``points``, and otherwise its logarithm.
    """
    if unit == NATS:
        return score
    return 100 - score if unit == POINTS else math.log(max(100 - score, LEAST))


def unit_in(quantity: str, measure: str) -> str:
    """The unit of a quantity over rows of a measure."""
    if quantity.startswith(POINTS):
        return POINTS
    return NATS if measure == 'perplexity' or quantity == 'training loss' else RATIO


def is_points(test: Test) -> bool:
    """Whether the bound of a test is a number of points."""
    return test['of'] not in ('zero', 'margin')


def bound_of(test: Test, margin: float | None = None) -> float:
    """The end of a test's claimed side: zero, or the margin, its own or another one."""
    if test['of'] == 'zero':
        return 0.0
    if is_points(test):
        return float(test['of'] if margin is None else margin)
    return math.log1p(PAPER['margin']['errors'] if margin is None else margin)


def modes_of(test: Test, names: list[str], study: Study) -> list[str]:
    """The mode, on or off, in which each of the two rows is scored."""
    modes = QUANTITIES[test['quantity']]
    rows = [study.rows.get(n) for n in names]
    return [
        (r.judged if r else paper_judged(n)) if m == 'judged' else m
        for n, r, m in zip(names, rows, modes, strict=True)
    ]


def described(test: Test, names: list[str], modes: list[str], unit: str) -> str:
    """A test as a line of text."""
    shown = lambda n, m: n if m == TRAINING else f'{n} ({m})'
    a, b = (shown(n, m) for n, m in zip(names, modes, strict=True))
    margin = f'{100 * PAPER["margin"]["errors"]:+g} %'
    bound = {'zero': '0', 'margin': margin}.get(test['of']) or f'{test["of"]:+g} points'
    score = 'errors' if unit != NATS else 'training loss' if modes[0] == TRAINING else 'loss'
    return f'{score} of {a} against {b}: {test["side"]} {bound}'
