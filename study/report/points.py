"""Scores of rows against bits per element, with the Pareto front."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmp.pictures import labels, style
from study.report.captions import names, note, reference, seeds, task, text_of, trained
from study.report.paper import PAPER
from study.report.residuals import intervals
from study.report.results import Row, by_seed, difference, last, wire

HIGH = 95  # accuracy of the best row, in percent, from which errors are shown instead
CROWD = 12  # rows, above which points have numbers and the names stand beside the axes
WIDE = 1.5  # times the least score, from which the axis is logarithmic
NEAR = {  # a title names the fewest bits with at most so many more of them
    'errors': PAPER['margin']['errors'],
    'perplexity': 0.05,
}


def front(points: Sequence[tuple[float, float]], low_is_good: bool) -> list[tuple[float, float]]:
    """The Pareto front: the points ``(bits, score)`` that no other point dominates.

    >>> front([(2, 50), (3, 45), (4, 60)], low_is_good=False)
    [(2, 50), (4, 60)]
    """
    best: list[tuple[float, float]] = []
    sign = -1 if low_is_good else 1
    for bits, score in sorted(points, key=lambda p: (p[0], -sign * p[1])):
        if not best or sign * score > sign * best[-1][1]:
            best.append((bits, score))
    return best


class Points(NamedTuple):
    """Rows as points: a score, or an error in percent, against bits per element."""

    ylabel: str
    title: str
    caption: str
    low_is_good: bool
    log: bool
    rows: dict[str, dict[str, Any]]


def points(rows: Sequence[Row]) -> Points:
    """Scores of the last epoch, in the mode in which rows are judged, against bits per element.

    Args:
      rows: rows of one measure. Where the best accuracy is high, the error is shown instead.
    """
    text = rows[0].measure == 'perplexity'
    errors = not text and max(last(r, r.judged).mean for r in rows) > HIGH
    word = 'validation loss (nats)' if text else f'test {"error" if errors else "accuracy"} (%)'
    said, none = dict(zip(names(rows), rows, strict=True)), reference(rows)
    shown = lambda score: 100 - score if errors else score
    scores = {n: {s: shown(y) for s, y in by_seed(r, r.judged).items()} for n, r in said.items()}
    data = {}
    for name, e in intervals(scores).items():
        row = said[name]
        ends = [e.mean, e.mean] if math.isnan(e.error) else [e.low, e.high]
        point = {'bits': wire(row)['bits'], 'y': e.mean, 'ends': ends, 'judged': row.judged}
        data[name] = point | {'family': style.family(text_of(row))}
    title = finding(data, said, none, text, errors) if none else f'{word}, {len(rows)} rows'
    counted = 'what a replica sends' if 'exchange' in rows[0].runs[0] else 'mean of both directions'
    caption = f'{task(rows)}; {seeds(rows)}; bits: {counted}, over all steps{note(rows)}'
    title = f'{title}, after {trained(rows)}'
    y = [r['y'] for r in data.values()]
    log = (text or errors) and max(y) > WIDE * min(y)
    return Points(f'{word}, last epoch', title, caption, text or errors, log, data)


def finding(
    data: dict[str, dict[str, Any]], said: dict[str, Row], none: Row, text: bool, errors: bool
) -> str:
    """The row with the fewest bits among those near no compression, and its distance to it.

    A row is compared with no compression of the same network: one with embeddings of the tokens at
    every stage is better without compression too.
    """
    worse = lambda y: math.exp(y) if text else y if errors else 100 - y
    by_row = {id(row): n for n, row in said.items()}
    rows = [*said.values()]
    own = {n: reference(rows, row) or none for n, row in said.items()}
    plain = {n: by_row[id(row)] for n, row in own.items()}
    kind = 'perplexity' if text else 'errors'
    limit = {n: (1 + NEAR[kind]) * worse(data[p]['y']) for n, p in plain.items()}
    near = [n for n, p in data.items() if n != plain[n] and worse(p['y']) <= limit[n]]
    near = [n for n in near if len(said[n].runs) > 1] or near  # a seed by itself is no news
    if not near:
        return f'No row is within {100 * NEAR[kind]:g} % of the {kind} of none'
    name = min(near, key=lambda n: (round(data[n]['bits'], 2), worse(data[n]['y'])))
    few = data[name]['bits']
    few = f'{few:.2g}' if few < 0.1 else f'{few:.1f}'
    bits = f'{few} bits per element instead of {data[plain[name]]["bits"]:.0f}'
    unit, e = 'nats' if text else 'points of accuracy', difference(said[name], own[name])
    if e is None:
        return f'{name}: {bits}'
    digits = 1 if not (text or errors) else 2
    known = f' [{e.low:+.{digits}f}, {e.high:+.{digits}f}]' if e.seeds > 1 else ''
    alone = ' (one seed)' if e.seeds == 1 else ''
    return (
        f'{name}: {bits},\n{e.mean:+.{digits}f}{known} {unit} compared with no compression{alone}'
    )


def paint(figure: Any, data: Points) -> None:
    """Draws points with their names, and the Pareto front."""
    rows = data.rows
    crowded = len(rows) > CROWD
    panels = figure.subplots(1, 2, width_ratios=(2, 1)) if crowded else [figure.subplots()]
    axes = panels[0]
    best = front([(r['bits'], r['y']) for r in rows.values()], data.low_is_good)
    axes.step(*zip(*best, strict=True), where='post', color='silver', lw=1.2, zorder=1)
    for r in rows.values():
        colour = style.FAMILIES[r['family']]
        axes.plot([r['bits']] * 2, r['ends'], color=colour, lw=1.2, alpha=0.6, zorder=2)
        fill = {'mfc': 'white'} if r['judged'] == 'off' else {}
        axes.plot(r['bits'], r['y'], 'o', color=colour, ms=5, zorder=5, **fill)
    for name in (f for f in style.FAMILIES if any(r['family'] == f for r in rows.values())):
        axes.plot([], [], 'o', color=style.FAMILIES[name], label=name)
    if any(r['judged'] == 'off' for r in rows.values()):
        axes.plot([], [], 'o', color='black', mfc='white', label='tested with compression off')
    axes.plot([], [], color='silver', label='Pareto front')
    if data.log:
        spread(axes)
    else:
        y = [r['y'] for r in rows.values()]
        room = 0.12 * (max(y) - min(y))
        axes.set_ylim(min(y) - room, max(y) + room)
    scale(axes, [r['bits'] for r in rows.values()])
    axes.set(xlabel='bits per element on the wire', ylabel=data.ylabel)
    letters = int(7 * figure.get_figwidth())
    lines = (textwrap.fill(line, letters) for line in data.title.splitlines())
    figure.suptitle('\n'.join(lines))
    style.caption(figure, textwrap.fill(data.caption, int(15 * figure.get_figwidth())))
    axes.legend(loc='best', fontsize=8)
    places = {n: (r['bits'], r['y']) for n, r in rows.items()}
    bars = [[(r['bits'], y) for y in r['ends']] for r in rows.values()]
    steps = [(c, a[1]) for a, b in itertools.pairwise(best) for c in (a[0], b[0])] + best[-1:]
    if crowded:
        colours = {n: style.FAMILIES[r['family']] for n, r in rows.items()}
        labels.numbered(figure, axes, panels[1], places, colours, bars)
    else:
        labels.label(figure, axes, places, size=8, lines=[*bars, steps])


def spread(axes: Any) -> None:
    """Sets a logarithmic axis with plain numbers as labels."""
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    axes.set_ylim(0.9 * low, high)
    ticks = [
        t for t in (0.5, 0.7, 1, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100) if low <= t <= high
    ]
    axes.set_yticks(ticks, [f'{t:g}' for t in ticks])
    axes.minorticks_off()


def scale(axes: Any, bits: Sequence[float]) -> None:
    """Sets a logarithmic axis of bits with powers of two as labels."""
    axes.set_xscale('log', base=2)
    low, high = min(bits), max(bits)
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axes.set_xticks(ticks, [f'{t:g}' for t in ticks])
    axes.set_xlim(low / 1.2, high * 1.6)
