"""Figures 2 to 6 in the paper's form, and accuracy against bits an element."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.report.claims import PAPER, table_rows
from jaxmp.report.results import Row, Study, last, wire

STYLE: Any = {
    'font.size': 9,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.grid': True,
    'grid.alpha': 0.25,
    'legend.frameon': False,
}


def column(row: Row, part: str, text: bool) -> np.ndarray:
    """Curves of a part (train, off, on) as ``(seeds, epochs)``."""
    if part == 'train' or text:
        return np.array([r['history'][part]['loss'] for r in row.runs])
    return 100 * np.array([r['history'][part]['accuracy'] for r in row.runs])


def curves(table: dict[str, Any], study: Study, path: Path) -> bool:
    """Training loss and the test's scores, off and on, by epoch: mean and standard error.

    Args:
      table: one of the paper's.
      study: our results.
      path: the picture to be.

    Returns:
      Whether there was anything to draw.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = [(p['label'], study.rows.get(name)) for name, p in table_rows(table).items()]
    rows = [(k, r if r and all('history' in s for s in r.runs) else None) for k, r in rows]
    if not any(r for _, r in rows):
        return False
    text = table['measure'] == 'perplexity'
    titles = {
        'train': 'training loss',
        'off': 'validation loss, off' if text else 'test accuracy, compression off (%)',
        'on': 'validation loss, on' if text else 'test accuracy, with compression (%)',
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.6), layout='constrained')
        panels = figure.subplots(1, 3)
        panels[2].sharey(panels[1])
        colours = ['black', *mpl.colormaps['turbo'](np.linspace(0.08, 0.92, len(rows) - 1))]
        for axes, (part, title) in zip(panels, titles.items(), strict=True):
            for (label, row), colour in zip(rows, colours, strict=True):
                if row:
                    band(axes, column(row, part, text), label, colour)
            axes.set(title=title, xlabel='epoch')
            axes.xaxis.get_major_locator().set_params(integer=True)
        lines, labels = panels[0].get_legend_handles_labels()
        figure.legend(lines, labels, loc='outside right center')
        figure.savefig(path, dpi=110)
    return True


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


COLOURS = {
    'uniform': 'tab:blue',
    'ef': 'tab:green',
    'aqsgd': 'tab:purple',
    'top_k': 'tab:orange',
    'raw': 'black',
    'other': 'gray',
}


def family(row: Row) -> str:
    """What kind of channel the activations go through, for its colour."""
    text = row.runs[0]['fwd']
    return next((f for f in COLOURS if text.startswith(f)), 'other')


def frontier(rows: Sequence[Row], path: Path) -> None:
    """Score of the last epoch, compression on, against bits an element, with the Pareto front.

    Args:
      rows: of one measure.
      path: the picture to be.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    text = rows[0].measure == 'perplexity'
    points = {r.name: (wire(r)['bits'], last(r, 'on')) for r in rows}
    best = front([(x, e.mean) for x, e in points.values()], text)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5.4), layout='constrained')
        axes = figure.subplots()
        axes.step(*zip(*best, strict=True), where='post', color='silver', lw=1.2, zorder=1)
        for row in rows:
            x, e = points[row.name]
            error = 0 if math.isnan(e.error) else e.error
            kind = {'color': COLOURS[family(row)], 'ms': 5, 'lw': 1.2}
            axes.errorbar(x, e.mean, error, fmt='o', capsize=2, zorder=3, **kind)
        for name in sorted({family(r) for r in rows}):
            axes.plot([], [], 'o', color=COLOURS[name], label=name)
        axes.plot([], [], color='silver', label='Pareto front')
        scale(axes, [x for x, _ in points.values()])
        axes.set(xlabel='bits an element on the wire, mean of both directions')
        word = 'validation loss (nats)' if text else 'test accuracy (%)'
        axes.set(ylabel=f'{word}, compression on, last epoch')
        axes.legend(loc='upper left' if text else 'lower right')
        name_points(figure, axes, {n: (x, e.mean) for n, (x, e) in points.items()})
        figure.savefig(path, dpi=110)


def scale(axes: Any, bits: Sequence[float]) -> None:
    """A logarithmic axis of bits with powers of two written out."""
    axes.set_xscale('log', base=2)
    low, high = min(bits), max(bits)
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axes.set_xticks(ticks, [f'{t:g}' for t in ticks])
    axes.set_xlim(low / 1.2, high * 1.9)


def name_points(figure: Any, axes: Any, points: dict[str, tuple[float, float]]) -> None:
    """Writes names beside points, each pushed up until it covers no other name."""
    figure.draw_without_rendering()
    step, taken = 9.5, []
    for name, (x, y) in sorted(points.items(), key=lambda p: p[1][1]):
        px, py = axes.transData.transform((x, y)) * 72 / figure.dpi
        width, to = 4.6 * len(name), py
        while any(abs(to - b) < step and px < a + w and a < px + width for a, b, w in taken):
            to += 1
        taken.append((px, to, width))
        far = {'arrowstyle': '-', 'color': 'lightgray', 'lw': 0.6} if to - py > step else None
        axes.annotate(
            name, (x, y), xytext=(6, to - py - 3), textcoords='offset points', fontsize=7.5,
            arrowprops=far, bbox={'fc': 'white', 'ec': 'none', 'alpha': 0.7, 'pad': 0.3}, zorder=2,
        )  # fmt: skip


def draw(study: Study, out: Path) -> dict[str, str]:
    """Draws what ``study`` has results for; returns titles and file names."""
    made = {}
    for table in PAPER['tables']:
        path = out / f'{study.name}_figure{table["table"] + 1}.png'
        if curves(table, study, path):
            made[table['figure']] = path.name
    for measure in ('accuracy', 'perplexity'):
        rows = [r for r in study.rows.values() if r.measure == measure]
        if len(rows) > 1:
            path = out / f'{study.name}_{measure}_bits.png'
            frontier(rows, path)
            made[f'{measure.capitalize()} against bits an element'] = path.name
    return made
