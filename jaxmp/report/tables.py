"""The paper's tables beside ours, as columns and cells; Markdown and CSV of them."""

from __future__ import annotations

import csv
import math
import re
from pathlib import Path
from typing import Any

from jaxmp.report.claims import PAPER, table_rows
from jaxmp.report.residuals import Estimate
from jaxmp.report.results import TUNED, Row, Study, best, best_epoch, difference, last, wire

Cells = list[str]
NONE = '\N{EN DASH}'


def plain(value: float | None, digits: int = 2) -> str:
    r"""A number, or a dash.

    >>> plain(3.14159), plain(None)
    ('3.14', '\u2013')
    """
    return NONE if value is None or math.isnan(value) else f'{value:,.{digits}f}'


def with_error(e: Estimate, digits: int = 2) -> str:
    """Mean and standard error; of one seed, the value alone.

    >>> with_error(Estimate(3.0, 0.25, 2.0, 4.0, 3, 2))
    '3.00 ± 0.25'
    """
    return plain(e.mean, digits) + ('' if e.seeds == 1 else f' ± {plain(e.error, digits)}')


def with_interval(e: Estimate | None, digits: int = 2) -> str:
    """Mean and interval; of one seed, the value alone."""
    if e is None:
        return NONE
    mean = f'{e.mean:+.{digits}f}'
    return mean if e.seeds == 1 else f'{mean} [{e.low:+.{digits}f}, {e.high:+.{digits}f}]'


HEADS = {
    'accuracy': (
        'row', 'paper off', 'paper on', 'best off', 'best on', 'last off', 'last on',
        'less none', 'bytes a step', 'ratio', 'bits an element', 'seeds',
    ),
    'perplexity': (
        'row', 'paper loss', 'paper perplexity', 'best loss', 'best perplexity', 'last loss off',
        'last loss on', 'less none', 'bytes a step', 'ratio', 'bits an element', 'seeds',
    ),
}  # fmt: skip


def cells(label: str, paper: dict[str, Any], row: Row | None, none: Row | None) -> Cells:
    """One line of a table.

    Args:
      label: how the line is called.
      paper: the paper's row, or an empty one.
      row: our runs of it, if any.
      none: our runs without compression, if any.
    """
    theirs = [plain(paper.get(k)) for k in ('off', 'on', 'loss', 'perplexity') if k in paper]
    theirs = theirs or [NONE, NONE]
    if row is None:
        return [label, *theirs, *[NONE] * 9]
    digits = 3 if row.measure == 'perplexity' else 2
    if row.measure == 'perplexity':
        ours = [plain(best(row, 'on'), 3), plain(math.exp(best(row, 'on')))]
    else:
        ours = [plain(best(row, m)) for m in ('off', 'on')]
    ours += [with_error(last(row, m), digits) for m in ('off', 'on')]
    apart = NONE if none in (None, row) else with_interval(difference(row, none), digits)
    apart += ' (off)' * (row.judged == 'off' and apart != NONE)
    size = wire(row)
    sent = f'{size["bytes"]:,}', plain(size['ratio']), plain(size['bits'])
    return [label, *theirs, *ours, apart, *sent, str(len(row.runs))]


def shown(table: dict[str, Any], study: Study) -> list[tuple[str, dict[str, Any], Row | None]]:
    """Label, the paper's row and ours, of each row of a table; of several readings each has one."""
    made = []
    for name, paper in table_rows(table).items():
        found, row = readings(name, study), study.rows.get(name)
        made += [(paper['label'], paper, row)] * (row is not None or not found)
        made += [(f'{paper["label"]}, {w}', paper, study.rows[n]) for n, w in found.items()]
    return made


def lines(table: dict[str, Any], study: Study) -> list[Cells]:
    """One of the paper's tables."""
    none = study.rows.get(table['none'])
    return [cells(label, paper, row, none) for label, paper, row in shown(table, study)]


def readings(name: str, study: Study) -> dict[str, str]:
    """Rows that are another reading of the paper's row ``name``, and the words they add to it.

    >>> study = Study('', {'ef_mixed-top10-warm20': None, 'ef_mixed_formula-top10-warm20': None})
    >>> readings('ef_mixed-top10-warm20', study), readings('ef-top10-warm20', study)
    ({'ef_mixed_formula-top10-warm20': 'formula'}, {})
    """
    own = words_of(name)
    return {
        row: ' '.join(w for w in words_of(row) if w not in own)
        for row in study.rows
        if row not in KNOWN and read_as(row) == name
    }


def read_as(row: str) -> str | None:
    """The longest of the paper's rows whose words are all among those of ``row``, or None."""
    words = words_of(row)
    fit = [n for n in KNOWN if words_of(n)[0] == words[0] and {*words_of(n)} <= {*words}]
    return max(fit, key=lambda n: (len(words_of(n)), n), default=None)


def words_of(name: str) -> list[str]:
    """The words of a row's name."""
    return re.split('[-_]', name)


KNOWN = {n for t in PAPER['tables'] for n in table_rows(t)}


def others(study: Study, measure: str) -> list[Cells]:
    """The rows of ``study`` of a measure that the paper has not."""
    shown = KNOWN | {r for n in KNOWN for r in readings(n, study)}
    rest = [r for n, r in study.rows.items() if n not in shown and r.measure == measure]
    none = next(t['none'] for t in PAPER['tables'] if t['measure'] == measure)
    return [cells(label(r, study), {}, r, study.rows.get(none)) for r in rest]


def label(row: Row, study: Study) -> str:
    """A row's name; of one that exchanges gradients the exchange, and what was tuned for it."""
    if 'exchange' not in row.runs[0]:
        return row.name
    config = row.runs[0]['config']
    differs = [
        k for k in TUNED if len({r.runs[0]['config'].get(k) for r in study.rows.values()}) > 1
    ]
    return ', '.join([f'`{config["exchange"]}`', *(f'{k} {config[k]}' for k in differs)])


def markdown(heads: Cells | tuple[str, ...], rows: list[Cells], words: int = 1) -> str:
    """A Markdown table, its first ``words`` columns to the left and the others to the right.

    >>> print(markdown(['row', 'on'], [['none', '1.0']]))
    | row | on |
    |---|--:|
    | none | 1.0 |
    """
    rule = '|' + '---|' * words + '--:|' * (len(heads) - words)
    body = ['| ' + ' | '.join(c) + ' |' for c in (heads, *rows)]
    return '\n'.join([body[0], rule, *body[1:]])


def write_csv(path: Path, study: Study) -> None:
    """Every run, a line each: all that tables are computed from, in full precision."""
    heads = ['row', 'seed', 'fwd', 'bwd', 'warmup_epochs', 'bits_an_element', 'bytes_a_step']
    heads += [f'{w}_{m}_{k}' for w in ('best', 'last') for m in ('off', 'on') for k in SCORES]
    with path.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow([*heads, 'commit', 'hardware', 'seconds'])
        for row in study.rows.values():
            for r in row.runs:
                size, tests = wire(row), r['test']
                line = [r[k] for k in ('name', 'seed', 'fwd', 'bwd')]
                line += [r['config'].get('warmup_epochs', 0), size['bits'], size['bytes']]
                line += [best_epoch(r, m)[k] for m in ('off', 'on') for k in SCORES]
                line += [tests[m]['last'][k] for m in ('off', 'on') for k in SCORES]
                writer.writerow([*line, r['commit'], r['hardware'], r['seconds']])


SCORES = ('loss', 'accuracy')
