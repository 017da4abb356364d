"""Figures 2 to 6 in the paper's form, and accuracy against bits an element.

A picture holds a digest of what it shows and of this file, and is drawn again if either changed: so
a report made twice is the same to the byte, and a picture that is out of date is found.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp.report.claims import PAPER
from jaxmp.report.results import Row, Study, last, wire
from jaxmp.report.tables import shown

STYLE: Any = {
    'font.size': 9,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.alpha': 0.25,
    'legend.frameon': False,
}
PALETTE = (  # Okabe and Ito's, gray for their yellow
    'black', '#0072B2', '#D55E00', '#009E73', '#E69F00', '#CC79A7', '#56B4E9', '#777777',
)  # fmt: skip
FAMILIES = {  # what a channel's or an exchange's text begins with
    **dict.fromkeys(('raw', 'mean'), PALETTE[0]),
    **dict.fromkeys(('uniform', 'all_reduce'), PALETTE[1]),
    **dict.fromkeys(('top_k', 'all_gather'), PALETTE[2]),
    **dict.fromkeys(('ef', 'power_sgd'), PALETTE[3]),
    **dict.fromkeys(('block', 'double_squeeze'), PALETTE[4]),
    **dict.fromkeys(('aqsgd', 'momentum'), PALETTE[5]),
    'local_sgd': PALETTE[6],
    **dict.fromkeys(('dgc', 'other'), PALETTE[7]),
}


class Picture(NamedTuple):
    """A picture to be.

    Attributes:
      title: in the report.
      file: its name.
      data: what it shows.
      paint: ``figure -> None``.
      size: in inches.
    """

    title: str
    file: str
    data: Any
    paint: Callable[[Any], None]
    size: tuple[float, float]


def draw(study: Study, out: Path) -> dict[str, str]:
    """Draws what ``study`` has results for and ``out`` not yet; returns titles and file names."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    made = {}
    for picture in pictures(study):
        path, mark = out / picture.file, digest(picture)
        if mark != made_from(path):
            with mpl.rc_context(STYLE):
                figure = Figure(figsize=picture.size, layout='constrained')
                picture.paint(figure)
                figure.savefig(path, dpi=110, metadata={'Software': None, 'Data': mark})
        made[picture.title] = picture.file
    return made


def digest(picture: Picture) -> str:
    """A checksum of what a picture shows, and of how this file draws it."""
    shows = json.dumps([picture.data, picture.size])
    return hashlib.sha256(Path(__file__).read_bytes() + shows.encode()).hexdigest()[:16]


def made_from(path: Path) -> str:
    """The checksum in a picture; empty if there is none."""
    from PIL import Image

    if not path.exists():
        return ''
    with Image.open(path) as image:
        return str(image.info.get('Data', ''))


def pictures(study: Study) -> Iterator[Picture]:
    """All that can be drawn of a study."""
    for table in PAPER['tables']:
        if data := curves(table, study):
            file = f'{study.name}_figure{table["table"] + 1}.png'
            text = table['measure'] == 'perplexity'
            paint = lambda figure, d=data, t=text: paint_curves(figure, d, t)
            yield Picture(table['figure'], file, data, paint, (11, 3.6))
    for measure in ('accuracy', 'perplexity'):
        rows = [r for r in study.rows.values() if r.measure == measure]
        if len(rows) > 1:
            data = points(rows)
            title = f'{measure.capitalize()} against bits an element'
            paint = lambda figure, d=data: paint_points(figure, d)
            yield Picture(title, f'{study.name}_{measure}_bits.png', data, paint, (10, 5.4))


PARTS = {'train': 'training', 'off': 'test, compression off', 'on': 'test, compression on'}


def curves(table: dict[str, Any], study: Study) -> dict[str, dict[str, list[list[float]]]]:
    """Curves of the rows of a table, by label and part, a list a seed; none of a single epoch."""
    text, found = table['measure'] == 'perplexity', {}
    for label, _, row in shown(table, study):
        if row and all(
            len(r.get('history', {}).get('train', {}).get('loss', ())) > 1 for r in row.runs
        ):
            found[label] = {part: [curve(r, part, text) for r in row.runs] for part in PARTS}
    return found


def curve(run: dict[str, Any], part: str, text: bool) -> list[float]:
    """A run's losses, or its accuracies in percent, by epoch."""
    if part == 'train' or text:
        return run['history'][part]['loss']
    return [100 * a for a in run['history'][part]['accuracy']]


def paint_curves(figure: Any, data: dict[str, dict[str, list[list[float]]]], text: bool) -> None:
    """Training loss and the test's scores, off and on, by epoch: mean and standard error."""
    panels = figure.subplots(1, 3)
    panels[2].sharey(panels[1])
    for axes, (part, title) in zip(panels, PARTS.items(), strict=True):
        for colour, (label, rows) in zip(PALETTE, data.items(), strict=False):
            band(axes, np.array(rows[part]), label, colour)
        axes.set(title=title, xlabel='epoch')
        axes.xaxis.get_major_locator().set_params(integer=True)
    panels[0].set(ylabel='loss (nats)')
    panels[1].set(ylabel='loss (nats)' if text else 'accuracy (%)')
    found, labels = panels[0].get_legend_handles_labels()
    seeds = sorted({len(rows['train']) for rows in data.values()})
    title = f'mean ± standard error\n{" or ".join(map(str, seeds))} seeds'
    figure.legend(found, labels, loc='outside right center', title=title)


def band(axes: Any, y: np.ndarray, label: str, colour: Any) -> None:
    """The mean over the seeds as a line, with its standard error around."""
    x, mean = np.arange(1, y.shape[1] + 1), y.mean(0)
    axes.plot(x, mean, label=label, color=colour, lw=1.3, marker='.' if len(x) < 5 else '')
    if len(y) > 1:
        error = y.std(0, ddof=1) / len(y) ** 0.5
        axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.18, lw=0)


def front(points: Sequence[tuple[float, float]], low_is_good: bool) -> list[tuple[float, float]]:
    """Those of ``(bits, score)`` that no other beats in one and equals in the other.

    >>> front([(2, 50), (3, 45), (4, 60)], low_is_good=False)
    [(2, 50), (4, 60)]
    """
    kept: list[tuple[float, float]] = []
    sign = -1 if low_is_good else 1
    for bits, score in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not kept or sign * score > sign * kept[-1][1]:
            kept.append((bits, score))
    return kept


class Points(NamedTuple):
    """Rows as points: a score, or an error in percent, against bits an element."""

    ylabel: str
    title: str
    low_is_good: bool
    log: bool
    rows: dict[str, dict[str, Any]]


def points(rows: Sequence[Row]) -> Points:
    """Scores of the last epoch, as rows are judged, against bits an element.

    Args:
      rows: of one measure. Of exchanges of gradients errors are shown, which differ by magnitudes.
    """
    text, exchanges = rows[0].measure == 'perplexity', 'exchange' in rows[0].runs[0]
    word = 'validation loss (nats)' if text else f'test {"error" if exchanges else "accuracy"} (%)'
    steps = sorted({r['steps'] for row in rows for r in row.runs})
    seeds = sorted({len(row.runs) for row in rows})
    title = f'{" or ".join(f"{s:,}" for s in steps)} steps, {" or ".join(map(str, seeds))} '
    title += 'seeds; bars: standard error' if seeds != [1] else 'seed'
    found = {}
    for row in rows:
        e = last(row, row.judged)
        y = 100 - e.mean if exchanges else e.mean
        error = 0.0 if math.isnan(e.error) else e.error
        own = {'bits': wire(row)['bits'], 'y': y, 'error': error, 'judged': row.judged}
        found[row.runs[0]['name']] = own | {'family': family(row)}
    wide = max(r['y'] for r in found.values()) > 10 * min(r['y'] for r in found.values())
    return Points(f'{word}, last epoch', title, text or exchanges, exchanges and wide, found)


def family(row: Row) -> str:
    """What kind of channel or exchange a row has, for its colour."""
    run = row.runs[0]
    text = run['exchange']['text'] if 'exchange' in run else run['fwd']
    return next((f for f in FAMILIES if text.startswith(f)), 'other')


def paint_points(figure: Any, data: Points) -> None:
    """Points with their names, and the Pareto front."""
    axes, rows = figure.subplots(), data.rows
    best = front([(r['bits'], r['y']) for r in rows.values()], data.low_is_good)
    axes.step(*zip(*best, strict=True), where='post', color='silver', lw=1.2, zorder=1)
    for r in rows.values():
        fill = {'mfc': 'white'} if r['judged'] == 'off' else {}
        kind = {'color': FAMILIES[r['family']], 'ms': 5, 'lw': 1.2, **fill}
        axes.errorbar(r['bits'], r['y'], r['error'], fmt='o', capsize=2, zorder=3, **kind)
    for name in sorted({r['family'] for r in rows.values()}):
        axes.plot([], [], 'o', color=FAMILIES[name], label=name)
    if any(r['judged'] == 'off' for r in rows.values()):
        axes.plot([], [], 'o', color='black', mfc='white', label='compression off')
    axes.plot([], [], color='silver', label='Pareto front')
    if data.log:
        spread(axes)
    scale(axes, [r['bits'] for r in rows.values()])
    axes.set(xlabel='bits an element on the wire, mean of both directions and of all steps')
    axes.set(ylabel=data.ylabel, title=data.title)
    figure.legend(loc='outside right center')
    name_points(figure, axes, {n: (r['bits'], r['y']) for n, r in rows.items()})


def spread(axes: Any) -> None:
    """A logarithmic axis of percents with its numbers written out."""
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if low <= t <= high]
    axes.set_yticks(ticks, [f'{t:g}' for t in ticks])
    axes.minorticks_off()


def scale(axes: Any, bits: Sequence[float]) -> None:
    """A logarithmic axis of bits with powers of two written out."""
    axes.set_xscale('log', base=2)
    low, high = min(bits), max(bits)
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axes.set_xticks(ticks, [f'{t:g}' for t in ticks])
    axes.set_xlim(low / 1.2, high * 1.9)


def name_points(figure: Any, axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Writes names beside points, each pushed up until it covers no other name and no point."""
    figure.draw_without_rendering()
    at = {n: axes.transData.transform(p) * 72 / figure.dpi for n, p in points.items()}
    step, taken = 9.5, [(px - 9, py, 6.0) for px, py in at.values()]
    for name, (x, y) in sorted(points.items(), key=lambda p: p[1][1]):
        (px, py), width = at[name], 4.6 * len(name)
        to = py
        while any(abs(to - b) < step and px < a + w and a < px + width for a, b, w in taken):
            to += 1
        taken.append((px, to, width))
        far = {'arrowstyle': '-', 'color': 'lightgray', 'lw': 0.6} if to - py > step else None
        axes.annotate(
            name, (x, y), xytext=(6, to - py - 3), textcoords='offset points', fontsize=7.5,
            arrowprops=far, bbox={'fc': 'white', 'ec': 'none', 'alpha': 0.7, 'pad': 0.3}, zorder=2,
        )  # fmt: skip
