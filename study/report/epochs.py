"""Curves by epoch or step of the rows of one of the paper's tables, as in its figures 2 to 6."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.metrics import warmup_of
from jaxmp.pictures import labels, style
from study.report.captions import apart, names, note, reference, seeds, trained
from study.report.residuals import intervals
from study.report.results import Row, difference

GAP = 0.012  # between intervals at the end, as a share of all epochs
TALL = 1.5  # times the median loss of the first epoch: the top of a panel at most
NEXT = ';\n'  # between the rows of a title
PARTS = {'train': 'training', 'off': 'test, compression off', 'on': 'test, compression on'}


class Curves(NamedTuple):
    """Scores at each test of the rows of a table: one list per row, part and seed."""

    title: str
    caption: str
    score: str
    warmup: dict[str, int]
    rows: dict[str, dict[str, list[list[float]]]]
    ends: dict[str, dict[str, tuple[float, float]]]  # intervals of the last test by part and row
    every: int  # steps between tests; 0 where a test ends each epoch


def number(row: Row) -> int:
    """The number of epochs with a curve in all runs of a row."""
    histories = [r.get('history', {}).get('train', {}).get('loss', ()) for r in row.runs]
    return min(len(h) for h in histories)


def curves(rows: Sequence[Row]) -> Curves:
    """Curves of ``rows``, and the row that ends nearest to no compression as a title."""
    text, said, none = rows[0].measure == 'perplexity', names(rows), reference(rows)
    data = {
        n: {part: [curve(r, part, text) for r in row.runs] for part in PARTS}
        for n, row in zip(said, rows, strict=True)
    }
    ends = {}
    for part in PARTS:
        last = {n: dict(enumerate(c[-1] for c in parts[part])) for n, parts in data.items()}
        ends[part] = {n: (e.low, e.high) for n, e in intervals(last).items() if e.seeds > 1}
    title, others = (
        f'After {trained(rows)}',
        [n for n, r in zip(said, rows, strict=True) if r is not none],
    )
    if none and others:
        by_name = dict(zip(said, rows, strict=True))
        far = lambda n: abs(e.mean) if (e := difference(by_name[n], none)) else math.inf
        order = sorted(others, key=far)
        told = [apart(by_name[n], none, n) for n in dict.fromkeys((order[0], order[-1]))]
        which = '; the nearest and the farthest' if len(told) > 1 else ''
        title += f', compared with no compression{which}:\n{NEXT.join(told)}'
    warmup = {n: warmup_of(r.runs[0]['config']) for n, r in zip(said, rows, strict=True)}
    caption = seeds(rows) + note(rows)
    if any(warmup.values()):
        caption += '; dotted, to a circle: warm-up, not compressed'
    losses = [c for parts in data.values() for p, c in parts.items() if text or p == 'train']
    if any(v > TALL * np.median([c[0][0] for c in losses]) for c in losses for v in np.mean(c, 0)):
        caption += f'; losses above {TALL:g} times those of the first epoch leave their panel'
    if any(r.judged == 'off' for r in rows):
        caption += '; title: with feedback, tested with compression off'
    score = 'test loss (nats)' if text else 'test accuracy (%)'
    return Curves(title, caption, score, warmup, data, ends, every(rows[0].runs[0]))


def every(run: dict[str, Any]) -> int:
    """Steps between the tests of a run; 0 where a test ends each epoch."""
    steps = run['history']['off'].get('step', [0])
    return steps[0] if len(steps) > run['config']['epochs'] else 0


def curve(run: dict[str, Any], part: str, text: bool) -> list[float]:
    """The losses of a run, or its accuracies in percent, by epoch."""
    if part == 'train' or text:
        return run['history'][part]['loss']
    return [100 * a for a in run['history'][part]['accuracy']]


def paint(figure: Any, data: Curves) -> None:
    """Draws means by epoch: training loss, test scores off and on; intervals at the end."""
    *panels, margin = figure.subplots(2, 2).flat
    margin.axis('off')
    colours = dict(zip(data.rows, itertools.cycle(style.PALETTE)))
    means = {p: {n: np.mean(rows[p], 0) for n, rows in data.rows.items()} for p in PARTS}
    tests = [*means['off'].values(), *means['on'].values()]
    unit = max(data.every, 1)
    end = unit * len(tests[0])
    for axes, (part, title) in zip(panels, PARTS.items(), strict=True):
        for i, (name, y) in enumerate(means[part].items()):
            kind = {'color': colours[name], 'ls': '-' if i < len(style.PALETTE) else '--'}
            line(axes, y, data.warmup[name], kind, unit)
            if name in data.ends[part]:
                at = end * (1 + GAP * (i + 2))
                axes.vlines(at, *data.ends[part][name], color=colours[name])
        own = [*means[part].values()] if part == 'train' else tests  # off and on have one axis
        axes.set_ylim(*limits(own, part == 'train' or 'loss' in data.score))
        axes.set(title=title, xlabel='step' if data.every else 'epoch')
        axes.set_ylabel('training loss (nats)' if part == 'train' else data.score)
        axes.xaxis.get_major_locator().set_params(integer=True)
    last = {n: (end * (1 + GAP * (len(colours) + 2)), float(y[-1])) for n, y in means['on'].items()}
    figure.suptitle(data.title, fontsize=11)
    style.caption(figure, textwrap.fill(data.caption, 110))
    labels.label(figure, panels[2], last, figure.bbox.x1 * 72 / figure.dpi, 8, colours)


def limits(curves: Sequence[np.ndarray], losses: bool) -> np.ndarray:
    """The ends of an axis; a loss far above those of the first epoch leaves the panel."""
    y = np.concatenate(curves)
    if losses:
        y = np.minimum(y, TALL * np.median([c[0] for c in curves]))
    return np.quantile(y, (0, 1)) + 0.1 * np.ptp(y) * np.array((-1, 1))


def line(axes: Any, y: np.ndarray, warmup: int, kind: dict[str, Any], unit: int) -> None:
    """Draws a row's mean, with its warm-up dotted."""
    x, start = unit * np.arange(1, len(y) + 1), max(warmup - 1, 0)
    kind = {**kind, 'lw': 1.3, 'marker': '.' if len(x) < 5 else ''}
    axes.plot(x[:warmup], y[:warmup], **{**kind, 'ls': ':'})
    last = {'color': kind['color'], 'mfc': 'white', 'ms': 4, 'zorder': 3}
    axes.plot(x[:warmup][-1:], y[:warmup][-1:], 'o', **last)
    axes.plot(x[start:], y[start:], **kind)
