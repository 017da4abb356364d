"""The README's picture: how much faster a step over a slow link is, against the loss it costs.

Rows of `slow_network.py` in, NAME.svg and NAME.png out:

python bench/slow_picture.py bench/results/epyc_2026-11-21_network.jsonl docs/slow_link
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from slow_report import LOSS, Results

from jaxmp.pictures import labels, style
from jaxmp.pictures.style import FAMILIES

LINK, LINK_NAME = '100m', '100 Mbit/s'
MODELS = {'mlp': 'Stack of residual MLP blocks', 'resnet': 'Narrow ResNet-18'}
LABELS = {  # of a codec: its name in the picture, forward / backward, and its colour
    'bf16': ('bf16', FAMILIES['other']),
    '8-bit': ('8 bits', FAMILIES['quantisation']),
    'fw4-bw8': ('4 / 8 bits', FAMILIES['quantisation']),
    'fw2-bw4': ('2 / 4 bits', FAMILIES['quantisation']),
    'block4-bw2': ('blocks, 4 / 2 bits', FAMILIES['block quantisation']),
    'ef21-top10': ('EF21, Top10 %', FAMILIES['error feedback']),
    'aqsgd3-bw3': ('AQ-SGD, 3 / 3 bits', FAMILIES['AQ-SGD, anchors']),
    'aqsgd3-bw2': ('AQ-SGD, 3 / 2 bits', FAMILIES['AQ-SGD, anchors']),
    'aqsgd2-bw2': ('AQ-SGD, 2 / 2 bits', FAMILIES['AQ-SGD, anchors']),
}
TICKS = (-1, 0, 1, 10, 100)


class Point(NamedTuple):
    """A codec: the loss above that of float32 in percent, and how many times faster a step is."""

    codec: str
    loss: float
    gain: float


def points(found: Results, model: str) -> list[Point]:
    """What was measured of a model over the link."""
    own = ((c, found.worse(model, c), found.gain(model, c, LINK)) for c in found.codecs(model))
    return [Point(c, 100 * w, g) for c, w, g in own if c != 'raw' and w is not None and g]


def headline(shown: Sequence[Point]) -> str:
    """The fastest codec whose loss is within the bar of `slow_report.py`."""
    best = max((p for p in shown if p.loss <= 100 * LOSS), key=lambda p: p.gain)
    return (
        f'Over {LINK_NAME} a training step is {best.gain:.1f} times faster, at a loss '
        f'{best.loss:.1f} % higher (one seed);\n'
        'a network that computes longer and sends half gains less'
    )


def paint(figure: Any, found: Results) -> None:
    """A panel for each model, with one axis of speed-ups."""
    panels = figure.subplots(1, len(MODELS), sharey=True)
    for axes, (model, name) in zip(panels, MODELS.items(), strict=True):
        shown, ms = points(found, model), 1e3 * found.compute[model]
        axes.axvspan(-3, 100 * LOSS, color='#009E73', alpha=0.08, lw=0)
        axes.axhline(1, color='black', lw=1)
        axes.annotate('float32', (5000, 1), (0, 3), textcoords='offset points', ha='right')
        for p in shown:
            axes.plot(p.loss, p.gain, 'o', color=LABELS[p.codec][1], ms=6, zorder=3)
        axes.set_xscale('symlog', linthresh=1, linscale=0.9)
        axes.set(xlim=(-1.6, 6000), ylim=(0, 8.2), title=f'{name}: {ms:.0f} ms of computing')
        axes.set_xticks(TICKS, [f'{t:+d} %' if t else '0' for t in TICKS])
        axes.minorticks_off()
        axes.set_xlabel("loss after 50 steps, compared with float32's")
    panels[0].set_ylabel('times faster than float32')
    panels[0].text(
        5000, 7.7, 'names: bits forward / backward', ha='right', fontsize=8, color='dimgray'
    )
    panels[0].text(-1.5, 0.15, f'within {100 * LOSS:.0f} %', color='#00704f', fontsize=8)
    figure.suptitle(headline(points(found, 'mlp')))
    for axes, model in zip(panels, MODELS, strict=True):
        at = {LABELS[p.codec][0]: (p.loss, p.gain) for p in points(found, model)}
        labels.label(figure, axes, at, size=9)


def digest(rows: str) -> str:
    """A digest of the rows and of the code that draws them, which both pictures hold."""
    return style.digest(rows, __file__)


def main(rows: str, name: str) -> None:
    """Draws the picture as NAME.svg and NAME.png."""
    text = Path(rows).read_text()
    found = Results([json.loads(line) for line in text.splitlines()])
    with style.style():
        figure = style.figure(10, 4.6)
        paint(figure, found)
        style.save(figure, Path(f'{name}.png'), digest(text))


if __name__ == '__main__':
    main(*sys.argv[1:])
