"""`draw`: predicted time over a link against bits per element, with the published records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.bench.protocol import DENSE, LINK, RECORDS, TOKENS, WIDTH, Way, best
from jaxmp.bench.rows import Row, record
from jaxmp.plan.predict import parse
from jaxmp.report import labels, style
from jaxmp.report.style import FAMILIES

BITS = 0.25, 0.5, 1, 2, 4, 8, 16
TICKS = tuple(n * 10**k for k in range(2, 8) for n in (1, 2, 5))


def paint(figure: Any, rows: Sequence[Row], link: str) -> None:
    """Points of the entries; open ones never reach the loss and stand at the dense steps."""
    axes, key = figure.subplots(1, 2, width_ratios=(2, 1))
    line = [(b, DENSE.steps * step_of(link, b)) for b in BITS]
    axes.plot(*zip(*line, strict=True), color='gray', lw=1, zorder=1)
    names, colours = {}, {}
    for row in rows:
        seconds = row.seconds(link)
        colour = FAMILIES[style.family(row.entry.fwd)]
        at = row.bits, seconds or DENSE.steps * row.steps[link][0]
        face = 'white' if seconds is None else colour
        axes.plot(*at, 'o', mec=colour, mfc=face, ms=6, zorder=3)
        name = style.human(row.entry.fwd, row.entry.bwd)
        names[name], colours[name] = at, colour
    for r in RECORDS if link == LINK else ():
        at = 8 * r.nbytes / WIDTH, r.steps * r.seconds
        axes.plot(*at, '*', color='black', ms=10, zorder=3)
        names[f'record: {r.name}'], colours[f'record: {r.name}'] = at, 'black'
    axes.set_xscale('log')
    axes.set_yscale('log')
    low, high = axes.get_ylim()
    axes.set_xticks(BITS, [f'{b:g}' for b in BITS])
    axes.set_yticks(TICKS, [f'{t:,}' for t in TICKS])
    axes.minorticks_off()
    axes.set_ylim(low, high)
    axes.set(xlabel='bits per element, mean of both directions', ylabel='seconds until the loss')
    figure.suptitle(f'Predicted time to the loss of ProtocolNanoGPT over {link}')
    style.caption(
        figure, 'line: the steps of the dense record; open: never reaches the loss; star: published'
    )
    labels.numbered(figure, axes, key, names, colours, [line])


def step_of(link: str, bits: float) -> float:
    """Predicted seconds of a step whose messages take ``bits`` per element and no time to code."""
    own = Way(TOKENS * WIDTH * bits / 8)
    return best(parse(link), (own, own))[0]


def draw(rows: Sequence[Row], link: str, path: Path) -> None:
    """Writes the picture as PNG and as SVG."""
    with style.style():
        figure = style.figure(11, 6)
        paint(figure, rows, link)
        style.save(figure, path, style.digest([record(row) for row in rows], __file__))
