"""The paper's findings, each as quantities of which the results decide.

A quantity is computed seed by seed from scores off and on of the last epoch (points of accuracy, or
nats); the rules stand in paper.json. A test is supported if the whole interval of Student's t over
the seeds lies on the claimed side of its bound, contradicted if it lies on the other, and undecided
else. A claim is supported if all its tests are, contradicted if one is.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.report.results import Estimate, Study, by_seed, estimate

Pair = tuple[float, float]  # off, on
Claim = dict[str, Any]

PAPER: dict[str, Any] = json.loads((Path(__file__).parent / 'paper.json').read_text())
QUANTITIES: dict[str, tuple[str, Callable[..., float]]] = {
    'gain': ('{a} less {b}, on', lambda none, a, b: a[1] - b[1]),
    'loss': ('none less {a}, on', lambda none, a: none[1] - a[1]),
    'gap': ('{a}, on less off', lambda none, a: a[1] - a[0]),
    'closed': (
        'half the gap of {b} less the size of that of {a}',
        lambda none, a, b: (b[1] - b[0]) / 2 - abs(a[1] - a[0]),
    ),
    'nats': ('{a} less {b}, on, nats', lambda none, a, b: a[1] - b[1]),
}


class Evidence(NamedTuple):
    """One test of a claim.

    Attributes:
      text: the quantity and where it is claimed to lie.
      paper: its value in the paper's tables.
      ours: over the seeds; None if a row was not run.
      verdict: supported, contradicted or undecided; or what is missing.
    """

    text: str
    paper: float
    ours: Estimate | None
    verdict: str


class Verdict(NamedTuple):
    """A claim, whether it holds, and by what."""

    claim: str
    where: str
    verdict: str
    evidence: tuple[Evidence, ...]


def judge(claim: Claim, study: Study) -> Verdict:
    """Decides a claim of paper.json by the results of ``study``."""
    found = tuple(weigh(test, study) for test in claim['tests'])
    kinds = [e.verdict for e in found]
    if 'contradicted' in kinds:
        verdict = 'contradicted'
    else:
        verdict = 'supported' if all(k == 'supported' for k in kinds) else 'undecided'
    return Verdict(claim['claim'], claim['where'], verdict, found)


def weigh(test: dict[str, Any], study: Study) -> Evidence:
    """Computes the quantity of a test, of the paper and of ours, and compares it to its bound."""
    text, quantity = QUANTITIES[test['quantity']]
    bound = PAPER['margin']['points'] if test['of'] == 'margin' else 0.0
    names = dict(zip('ab', test['rows'], strict=False))
    paper = quantity(*(paper_pair(n) for n in (none_of(test), *test['rows'])))
    text = f'{text.format(**names)}: {test["side"]} {bound:g}'
    # Only a loss is against the uncompressed row; other quantities do without it.
    needed = [none_of(test), *test['rows']] if test['quantity'] == 'loss' else test['rows']
    if missing := [n for n in needed if n not in study.rows]:
        return Evidence(text, paper, None, f'not run: {", ".join(missing)}')
    rows = {n: by_seed(study.rows[n]) for n in needed}
    seeds = sorted(set.intersection(*(set(r) for r in rows.values())))
    if not seeds:
        return Evidence(text, paper, None, 'no common seed')
    none = rows.get(none_of(test), {})
    ours = estimate(
        [quantity(none.get(s, (0.0, 0.0)), *(rows[n][s] for n in test['rows'])) for s in seeds]
    )
    return Evidence(text, paper, ours, side(ours, test['side'], bound))


def side(ours: Estimate, claimed: str, bound: float) -> str:
    """The verdict of an interval on 'above bound' or 'below bound'.

    >>> side(Estimate(3.0, 0.5, 1.0, 5.0, 3), 'above', 2.0)
    'undecided'
    >>> side(Estimate(3.0, 0.1, 2.6, 3.4, 3), 'above', 2.0)
    'supported'
    """
    if ours.low > bound:
        return 'supported' if claimed == 'above' else 'contradicted'
    if ours.high < bound:
        return 'supported' if claimed == 'below' else 'contradicted'
    return 'undecided'


def none_of(test: dict[str, Any]) -> str:
    """The uncompressed row of the table that the test is about."""
    return next(t['none'] for t in PAPER['tables'] if test['rows'][0] in table_rows(t))


def table_rows(table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of one of the paper's tables by name."""
    return {r['row']: r for r in table['rows']}


def paper_pair(name: str) -> Pair:
    """The paper's scores of a row, off and on; of Table 5 its loss, compression on, twice."""
    row = next(r for t in PAPER['tables'] for n, r in table_rows(t).items() if n == name)
    return (row['loss'], row['loss']) if 'loss' in row else (row['off'], row['on'])
