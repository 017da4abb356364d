"""`draw`: predicted time over a link against bits per element, with the published records.

An entry that never reaches the loss has no time, so its mark stands above the axis of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.net.speed import parse
from jaxmp.pictures import labels, style
from jaxmp.pictures.style import FAMILIES
from study.bench.protocol import DENSE, LINK, RECORDS, TOKENS, WIDTH, Way, best
from study.bench.rows import Row, record

BITS = 0.25, 0.5, 1, 2, 4, 8, 16
ABOVE = 1.7  # times the longest time: where entries stand that never reach the loss
TICKS = tuple(n * 10**k for k in range(2, 8) for n in (1, 2, 5))


def paint(figure: Any, rows: Sequence[Row], link: str) -> None:
    """Points of the entries, in a strip above the axis for those that never reach the loss."""
    axes, key = figure.subplots(1, 2, width_ratios=(2, 1))
    line = [(b, DENSE.steps * step_of(link, b)) for b in BITS]
    axes.plot(*zip(*line, strict=True), color='gray', lw=1, zorder=1)
    places, colours = {}, {}
    times = [t for row in rows if (t := row.seconds(link)) is not None]
    top = ABOVE * max([*times, *(y for _, y in line)])
    labels_of_rows = [style.human(row.entry.fwd, row.entry.bwd) for row in rows]
    texts = ['; '.join(row.entry[:2]) for row in rows]
    for name, row in zip(style.apart(labels_of_rows, texts), rows, strict=True):
        seconds = row.seconds(link)
        colours[name] = colour = FAMILIES[style.family(row.entry.fwd)]
        places[name] = row.bits, top if seconds is None else seconds
        mark = {'marker': 'x'} if seconds is None else {'marker': 'o'}
        axes.plot(*places[name], **mark, color=colour, ms=6, zorder=3)
    # The published records have no twin: their steps and seconds are those that were measured.
    for r in RECORDS if link == LINK else ():
        name = f'record: {r.name}'
        places[name], colours[name] = (8 * r.nbytes / WIDTH, r.steps * r.seconds), 'black'
        axes.plot(*places[name], '*', color='black', ms=10, zorder=3)
    axes.axhline(top / ABOVE**0.5, color='gray', lw=0.8, ls=':')
    axes.set_xscale('log')
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    axes.set_xticks(BITS, [f'{b:g}' for b in BITS])
    shown = [t for t in TICKS if t < top / ABOVE]
    axes.set_yticks([*shown, top], [*(f'{t:,}' for t in shown), 'never'])
    axes.minorticks_off()
    axes.set_ylim(low, ABOVE**0.5 * high)
    axes.set(xlabel='bits per element, mean of both directions', ylabel='seconds until the loss')
    figure.suptitle(f'Predicted time to the loss of ProtocolNanoGPT over {link}')
    style.caption(
        figure,
        'line: the steps of the dense record; star: published; a time is a step of the event model '
        'times the ratio of steps of\na small twin at one loss, which no published run '
        'confirms; never: an entry whose twin does not reach that loss',
    )
    labels.numbered(figure, axes, key, places, colours, [line])


def step_of(link: str, bits: float) -> float:
    """Predicted seconds of a step whose messages take ``bits`` per element and no time to code."""
    way = Way(TOKENS * WIDTH * bits / 8)
    return best(parse(link), (way, way))[0]


def draw(rows: Sequence[Row], link: str, path: Path) -> None:
    """Writes the picture as PNG and as SVG."""
    with style.style():
        figure = style.figure(11, 6)
        paint(figure, rows, link)
        style.save(figure, path, style.digest([record(row) for row in rows], __file__))
