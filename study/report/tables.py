"""Tables with the paper's numbers and ours, as cells, in Markdown and CSV."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable
from pathlib import Path

from jaxmp.config import settings
from jaxmp.metrics import warmup_of
from study.report.captions import MARK, reference
from study.report.paper import PAPER, PaperRow, PaperTable, table_rows
from study.report.residuals import Estimate
from study.report.results import TUNED, Row, Study, best, best_epoch, difference, last, wire

Cells = list[str]
NONE = '\N{EN DASH}'
CHANNELS = 'forward', 'backward'


def plain(value: float | None, digits: int = 2) -> str:
    r"""A number with ``digits`` digits, or a dash if there is none.

    >>> plain(3.14159), plain(None)
    ('3.14', '\u2013')
    """
    return NONE if value is None or math.isnan(value) else f'{value:,.{digits}f}'


def with_error(e: Estimate, digits: int = 2) -> str:
    """Mean and standard error; for one seed, only the value.

    >>> with_error(Estimate(3.0, 0.25, 2.0, 4.0, 3, 2))
    '3.00 ± 0.25'
    """
    return plain(e.mean, digits) + ('' if e.seeds == 1 else f' ± {plain(e.error, digits)}')


def with_interval(e: Estimate | None, digits: int = 2) -> str:
    """Mean and interval; for one seed, only the value."""
    if e is None:
        return NONE
    mean = f'{e.mean:+.{digits}f}'
    return mean if e.seeds == 1 else f'{mean} [{e.low:+.{digits}f}, {e.high:+.{digits}f}]'


HEADS = {
    'accuracy': (
        'row', 'paper off, %', 'paper on, %', 'best off, %', 'best on, %', 'last off, %',
        'last on, %', 'less none, points', 'bytes per step', 'ratio', 'bits per element', 'seeds',
    ),
    'perplexity': (
        'row', 'paper loss, nats', 'paper perplexity', 'best loss, nats', 'best perplexity',
        'last loss off, nats', 'last loss on, nats', 'less none, nats', 'bytes per step', 'ratio',
        'bits per element', 'seeds',
    ),
}  # fmt: skip


def cells(label: str, paper: PaperRow, row: Row | None, none: Row | None) -> Cells:
    """The cells of one line of a table.

    Args:
      label: first cell of the line.
      paper: the paper's row, or an empty one.
      row: our runs of the row, if any.
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
    return [label, *theirs, *ours, apart, *sent, count(row)]


def count(row: Row) -> str:
    """The number of a row's seeds, and of those that diverged."""
    lost = sum('diverged' in r for r in row.runs)
    return f'{len(row.runs)}, {lost} diverged' if lost else f'{len(row.runs)}'


def shown(table: PaperTable, study: Study) -> list[tuple[str, PaperRow, Row | None]]:
    """Label, the paper's row and ours for each row of a table, then our variants of the row.

    A variant is not what the paper ran, so it has no row of the paper. A table has rows of its own
    measure only, and is empty if no row besides the one without compression was run.
    """
    of_measure = {n: r for n, r in study.rows.items() if r.measure == table['measure']}
    rows, study = [], study._replace(rows=of_measure)
    for name, paper in table_rows(table).items():
        rows.append((paper['label'], paper, study.rows.get(name)))
        variants = readings(name, study).items()
        rows += [(f'{paper["label"]}, {words}', {}, study.rows[n]) for n, words in variants]
    plain = study.rows.get(table['none'])
    return rows if any(row not in (None, plain) for _, _, row in rows) else []


def lines(table: PaperTable, study: Study) -> list[Cells]:
    """The lines of one of the paper's tables."""
    none = study.rows.get(table['none'])
    rows = [cells(label, paper, row, none) for label, paper, row in shown(table, study)]
    return [*rows[:1], *not_trained(study, table['measure']), *rows[1:]] if rows else []


def tokens(table: PaperTable, study: Study) -> str:
    """How many tokens the paper trained on, and this study; empty for a table of images."""
    if 'tokens' not in table:
        return ''
    run = study.rows[table['none']].runs[0]
    config, theirs = settings(run['config']), table['tokens']
    ours = run['steps'] * config['batch_size'] * config['data.sequence_length']
    return (
        f'\n\nThe paper trained on about {theirs / 1e6:.1f} million tokens, these runs on '
        f'{ours:,}, which are {theirs / ours:.0f} times fewer.'
    )


def not_trained(study: Study, measure: str) -> list[Cells]:
    """The line of the pretrained model before its training, if the study has its score."""
    if study.untrained is None or measure != 'perplexity':
        return []
    loss = plain(study.untrained, 3)
    scores = loss, plain(math.exp(study.untrained)), loss, loss
    return [['not trained', NONE, NONE, *scores, *[NONE] * 5]]


def readings(name: str, study: Study) -> dict[str, str]:
    """Our variants of the paper's row ``name``, with the words that their names have beside its.

    >>> study = Study('', {'ef_mixed-top10-warm20': None, 'ef_mixed_formula-top10-warm20': None})
    >>> readings('ef_mixed-top10-warm20', study), readings('ef-top10-warm20', study)
    ({'ef_mixed_formula-top10-warm20': 'formula'}, {})
    """
    theirs = words_of(name)
    return {
        row: ' '.join(w for w in words_of(row) if w not in theirs)
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
    """Lines of the rows of ``study`` with a given measure that no table of the paper shows.

    After the name of a row stand its channels, or dashes where the name is an exchange.
    """
    tabled = [row for table in PAPER['tables'] for _, _, row in shown(table, study) if row]
    of_measure = [r for r in study.rows.values() if r.measure == measure]
    return [
        with_channels(cells(label(r, study), {}, r, reference(of_measure)), r)
        for r in of_measure if r not in tabled
    ]  # fmt: skip


def with_heads(heads: Iterable[str]) -> Cells:
    """The heads of a table with those of `with_channels`."""
    first, *rest = heads
    return [first, *CHANNELS, *rest]


def with_channels(line: Cells, row: Row) -> Cells:
    """The cells of a line with the texts of the row's channels after its name."""
    run = row.runs[0]
    texts = [NONE] * 2 if 'exchange' in run else [f'`{run["fwd"]}`', f'`{run["bwd"]}`']
    return [line[0], *texts, *line[1:]]


def filled(heads: Cells | tuple[str, ...], rows: list[Cells]) -> tuple[Cells, list[Cells]]:
    """A table without the columns in which nothing is known.

    >>> filled(['row', 'paper', 'ours'], [['none', NONE, '1.0']])
    (['row', 'ours'], [['none', '1.0']])
    """
    keep = [i for i in range(len(heads)) if any(line[i] != NONE for line in rows)]
    return [heads[i] for i in keep], [[line[i] for i in keep] for line in rows]


def marked(row: Row) -> str:
    """The name of a row, with a mark if its codec was mended after its runs."""
    return f'{row.name} {MARK}' if row.mended else row.name


def notes(rows: Iterable[Row]) -> str:
    """The lines below a table that say what the mark of a row means."""
    texts = dict.fromkeys(row.mended for row in rows if row.mended)
    return ''.join(f'\n\n{MARK} {text}.' for text in texts)


def label(row: Row, study: Study) -> str:
    """The name of a row; for a row with an exchange, the exchange and the settings tuned for it."""
    if 'exchange' not in row.runs[0]:
        return marked(row)
    config = settings(row.runs[0]['config'])
    differs = [
        k for k in TUNED if len({settings(r.runs[0]['config'])[k] for r in study.rows.values()}) > 1
    ]
    return ', '.join([f'`{config["exchange"]}`', *(f'{k} {config[k]}' for k in differs)])


def markdown(heads: Cells | tuple[str, ...], rows: list[Cells], words: int = 1) -> str:
    """A Markdown table; its first ``words`` columns are aligned left, the others right.

    >>> print(markdown(['row', 'on'], [['none', '1.0']]))
    | row | on |
    |---|--:|
    | none | 1.0 |
    """
    rule = '|' + '---|' * words + '--:|' * (len(heads) - words)
    body = ['| ' + ' | '.join(c) + ' |' for c in (heads, *rows)]
    return '\n'.join([body[0], rule, *body[1:]])


def write_csv(path: Path, study: Study) -> None:
    """Writes one line per run with all numbers of the tables, in full precision."""
    heads = ['row', 'seed', 'fwd', 'bwd', 'warmup_epochs', 'bits_an_element', 'bytes_a_step']
    heads += [f'{w}_{m}_{k}' for w in ('best', 'last') for m in ('off', 'on') for k in SCORES]
    with path.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow([*heads, 'commit', 'hardware', 'seconds'])
        for row in study.rows.values():
            for r in row.runs:
                size, tests = wire(row), r['test']
                line = [r[k] for k in ('name', 'seed', 'fwd', 'bwd')]
                line += [warmup_of(r['config']), size['bits'], size['bytes']]
                line += [best_epoch(r, m)[k] for m in ('off', 'on') for k in SCORES]
                line += [tests[m]['last'][k] for m in ('off', 'on') for k in SCORES]
                writer.writerow([*line, r['commit'], r['hardware'], r['seconds']])


SCORES = ('loss', 'accuracy')
