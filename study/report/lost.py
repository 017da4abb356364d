"""Tables of nats lost by codec on a pretrained language model: the bars, all rows, a picture.

A row is a result file of `python -m study nats`. Its nats lost are paired, block by block, with
those without compression.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.pictures import labels, style
from study.report.tables import markdown

BARS: dict[int, dict[float, float]] = {  # nats by bits, by number of cuts
    1: {4.3: 0.001, 3: 0.003, 2.3: 0.01, 1.3: 0.07, 0.7: 0.25},
    3: {4.3: 0.005, 3: 0.01, 2.3: 0.04, 1.3: 0.25},
}
SLACK = 0.005  # bits by which a row may exceed those of a bar
COUNTS = {1: 'one cut', 2: 'two cuts', 3: 'three cuts', 7: 'seven cuts'}
LEAST = 3e-4  # nats; a row that loses less stands there as a triangle
TICKS = 0.001, 0.01, 0.1, 1, 10
DIRECT = 8  # names in a picture
TITLE = 'Nats lost against bits per element'
FAMILIES: dict[str, tuple[str, str]] = {  # colour and marker
    'heavy elements apart, components': ('#D55E00', 'o'),
    'heavy elements apart, rotated': ('#0072B2', 's'),
    'heavy elements apart, others': ('#56B4E9', 'D'),
    'a token by itself': ('#009E73', '^'),
    'components': ('#E69F00', 'p'),
    'rotated': ('#CC79A7', 'P'),
    'small floats': ('black', 'X'),
    'a range per block or token': ('#777777', 'h'),
    'few values': ('#999933', '>'),
    'one scale for a tensor': ('#882255', '*'),
}


class Table(NamedTuple):
    """The rows of a folder: results by name, the row without compression among them."""

    name: str
    rows: Mapping[str, dict[str, Any]]


def load(folder: Path) -> list[Table]:
    """The tables in ``folder``: those of it and its subfolders with rows of `jaxmp evaluate`."""
    found: dict[Path, dict[str, dict[str, Any]]] = {}
    for path in sorted(folder.rglob('*.json')):
        row = json.loads(path.read_text())
        if isinstance(row, dict) and 'nats_by_block' in row:
            found.setdefault(path.parent, {})[row['name']] = row
    named = lambda home: '_'.join(home.relative_to(folder).parts) or home.name
    return [Table(named(home), rows) for home, rows in found.items()]


def family(text: str) -> str:
    """The family of a row's channel.

    >>> family('outliers(klt(2, entropy=True), channels=2)'), family('rotate(lloyd(2))')
    ('heavy elements apart, components', 'rotated')
    """
    name, _, inner = text.partition('(')
    if name == 'outliers':
        kinds = {'causal=True': 'a token by itself'}
        kinds |= {'klt(': 'heavy elements apart, components'}
        kinds |= {'rotate(': 'heavy elements apart, rotated'}
        return next((v for k, v in kinds.items() if k in inner), 'heavy elements apart, others')
    if 'rotate(' in inner or name == 'rotate':
        return 'rotated'
    members = {'klt': 'components'}
    members |= dict.fromkeys(('mx', 'nvfp4', 'bf16', 'fp16', 'natural'), 'small floats')
    members |= dict.fromkeys(('block', 'per_token'), 'a range per block or token')
    members |= dict.fromkeys(('top_k', 'random_k', 'spikes'), 'few values')
    return members.get(name, 'one scale for a tensor')


def by_cuts(table: Table) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The rows with compression by number of cuts, those of the fewest bits first."""
    rows = [r for r in table.rows.values() if r['fwd'] != 'raw']
    order = lambda r: (len(r['cuts']), r['bits'], r['nats_lost'])
    for count, own in itertools.groupby(sorted(rows, key=order), key=lambda r: len(r['cuts'])):
        yield count, list(own)


def distinct(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, but of those that send the same only the one of the most tokens."""
    most = {r['fwd']: r for r in sorted(rows, key=lambda r: r['tokens'])}
    return [r for r in rows if most[r['fwd']] is r]


def best(rows: Sequence[dict[str, Any]], bits: float) -> dict[str, Any] | None:
    """The row that loses least among those with so many bits or less; None without any."""
    few = [r for r in rows if r['bits'] <= bits + SLACK]
    return min(few, key=lambda r: r['nats_lost'], default=None)


def lost(row: Mapping[str, Any]) -> str:
    """Nats lost with their standard error.

    >>> lost({'nats_lost': 0.00123, 'standard_error': 0.0004})
    '+0.0012 ± 0.0004'
    """
    return f'{row["nats_lost"]:+.4f} ± {row["standard_error"]:.4f}'


def verdict(row: Mapping[str, Any], bar: float) -> str:
    """Whether a row meets a bar, and by how many standard errors it does not.

    >>> verdict({'nats_lost': 0.02, 'standard_error': 0.004}, 0.01)
    'missed by 2.5 standard errors'
    """
    over = (row['nats_lost'] - bar) / row['standard_error']
    return 'met' if over <= 0 else f'missed by {over:.1f} standard errors'


def bars(table: Table) -> str:
    """The bars, and the row that loses least within the bits of each; '' without any."""
    lines = []
    for count, rows in by_cuts(table):
        for bits, bar in BARS.get(count, {}).items():
            if row := best(distinct(rows), bits):
                cells = [COUNTS[count], f'{bits:g}', f'{bar:g}', lost(row), verdict(row, bar)]
                lines.append([*cells, row['name'], f'{row["bits"]:.2f}', f'{row["tokens"]:,}'])
    heads = ['cuts', 'bits', 'bar, nats', 'nats lost', 'verdict', 'row', 'its bits', 'tokens']
    return markdown(heads, lines, words=1) if lines else ''


def whole(table: Table) -> str:
    """All rows: what they send, bits, nats lost, perplexity."""
    lines = []
    for count, rows in by_cuts(table):
        for row in rows:
            numbers = [f'{row["bits"]:.2f}', lost(row), f'{row["perplexity"]:,.2f}']
            cells = [COUNTS[count], row['name'], _text(row), *numbers]
            lines.append([*cells, f'{row["tokens"]:,}'])
    heads = ['cuts', 'row', 'codec', 'bits', 'nats lost', 'perplexity', 'tokens']
    return markdown(heads, lines, words=3)


def _text(row: Mapping[str, Any]) -> str:
    """The texts of a row's channels, each once if they are alike."""
    parts = row['fwd'].split(';')
    return '<br>'.join(f'`{part.strip()}`' for part in dict.fromkeys(parts))


def setting(table: Table) -> str:
    """What all rows have in common, in a line."""
    rows = list(table.rows.values())
    same = lambda key: ', '.join(sorted({str(r[key]) for r in rows}))
    none = table.rows['none']
    sent = [r for r in rows if r['fwd'] != 'raw'] or rows
    cuts = sorted({', '.join(map(str, r['cuts'])) for r in sent}, key=len)
    taught = sorted({r['learned_tokens'] for r in rows} - {0})
    texts = sorted({r['learned_from'] for r in rows} - {''})
    learned = (
        f'; rules learned from {" or ".join(f"{t:,}" for t in taught)} tokens of '
        f'{" or ".join(texts)} first, which no bits count'
        if taught else ''
    )  # fmt: skip
    return (
        f'{same("model")}, {same("text")} in blocks of {same("block")} tokens, a message of '
        f'{same("batch")} blocks; cuts after {" blocks; or ".join(cuts)} blocks{learned}. Without '
        f'compression the perplexity is {none["perplexity"]:.2f}. ±: standard error over blocks of '
        f'the difference to no compression. Commit {same("commit")}; {same("hardware")}; '
        f'{sum(r["seconds"] for r in rows) / 3600:.1f} hours.'
    )


def draw(table: Table, out: Path) -> str:
    """Draws the picture of a table if ``out`` lacks it; returns the name of its file."""
    path = out / f'{table.name}_nats.png'
    keys = 'name', 'fwd', 'cuts', 'bits', 'nats_lost', 'standard_error', 'learned_tokens'
    mark = style.digest([[row[k] for k in keys] for row in table.rows.values()], __file__)
    if not style.holds(path, mark):
        with style.style():
            figure = style.figure(12, 5.6)
            paint(figure, table)
            style.save(figure, path, mark)
    return path.name


def paint(figure: Any, table: Table) -> None:
    """Draws nats lost against bits, a panel per number of cuts, with the bars as steps."""
    groups = [(count, distinct(rows)) for count, rows in by_cuts(table)]
    judged = bool(bars(table))
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    seen: dict[str, None] = {}
    for axes, (count, rows) in zip(panels, groups, strict=True):
        for row in rows:
            seen[(kind := family(row['fwd']))] = None
            colour, mark = FAMILIES[kind]
            low = row['nats_lost'] <= LEAST
            y = LEAST if low else row['nats_lost']
            error = row['standard_error']
            ends = None if low else [[min(error, y - LEAST / 2)], [error]]
            axes.errorbar(row['bits'], y, yerr=ends, fmt='v' if low else mark, color=colour, ms=5,
                          alpha=0.85, lw=1)  # fmt: skip
        marks = BARS.get(count, {}) if judged else {}
        axes.plot([*marks], [*marks.values()], '_', color='black', ms=16, mew=2, zorder=5)
        _scales(axes, count)
        places = {_short(r): (r['bits'], max(r['nats_lost'], LEAST)) for r in _named(rows)}
        labels.label(figure, axes, places, size=7, leads=True)
    panels[0].set_ylabel('nats per token lost')
    handles = [
        panels[0].plot([], [], c, marker=m, ls='', ms=5, label=k)[0]
        for k, (c, m) in FAMILIES.items() if k in seen
    ]  # fmt: skip
    if judged:
        handles += panels[0].plot([], [], '_', color='black', ms=16, mew=2, label='bar')
    figure.legend(handles=handles, loc='outside right upper', fontsize=8)
    figure.suptitle('What a pretrained language model loses by few bits at its boundaries')
    none = table.rows['none']
    told = f'{none["model"]}, {none["text"]}; bars of points: standard error over blocks'
    style.caption(figure, f'{told}; triangle: {LEAST:g} nats or less')


def _scales(axes: Any, count: int) -> None:
    axes.set_xscale('log', base=2)
    axes.set_xlim(0.45, 48)
    axes.set_xticks([2.0**i for i in range(-1, 5)], ['.5', '1', '2', '4', '8', '16'])
    axes.set_yscale('log')
    axes.set_yticks(TICKS, [f'{t:g}' for t in TICKS])
    axes.set_ylim(bottom=LEAST / 1.5)
    axes.set(xlabel='bits per element', title=COUNTS[count])


def _named(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best rows at two bars and without a state, and the worst of many bits."""
    plain = [r for r in rows if not r['learned_tokens']]
    worst = max((r for r in rows if r['bits'] > 7), key=lambda r: r['nats_lost'], default=None)
    chosen = [best(rows, 3), best(rows, 1.3), best(plain, 4.5), worst]
    return [*{r['name']: r for r in chosen if r}.values()][: DIRECT // 2]


def _short(row: Mapping[str, Any]) -> str:
    return re.sub(r'^(three|\w+-\d+)-', '', row['name'])


def write_csv(path: Path, table: Table) -> None:
    """Writes the rows as a CSV."""
    keys = 'name', 'fwd', 'cuts', 'bits', 'nats_lost', 'standard_error', 'perplexity', 'tokens'
    rows = [[r[k] for k in keys] for r in table.rows.values()]
    with path.open('w', newline='') as file:
        csv.writer(file, lineterminator='\n').writerows([keys, *rows])
