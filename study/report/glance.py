"""The picture of the paper: nats lost by bits on a pretrained language model, few codecs named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxmp.pictures import labels, style
from study.report import lost

FILE = 'pretrained_codecs_glance.png'
TITLE = 'Nats lost by bits, some codecs'
LINES = {  # rows that differ in their bits, by what they have in common
    'heavy elements apart, learned components': (
        'klt0.7-middle-long', 'klt1.3-long', 'klt2.3-long', 'klt3-long', 'klt4.3-long',
    ),
    'heavy elements apart, each token by itself': (
        'causal-trellis1', 'causal-trellis2', 'causal-trellis3', 'causal-lloyd4',
    ),
}  # fmt: skip
POINTS = {
    'uniform8': 'int8, one scale for all',
    'token8': 'int8, a scale per token',
    'nvfp4': 'NVFP4',
    'block4': '4-bit blocks',
    'lloyd4-rotated': '4 bits, rotated',
    'top30': 'Top30 %, fp16',
}


def draw(table: lost.Table, out: Path) -> str:
    """Draws the picture if ``out`` lacks it; returns its file, or '' if the table lacks a row."""
    names = [*(n for rows in LINES.values() for n in rows), *POINTS]
    if not {*names} <= table.rows.keys():
        return ''
    keys = 'bits', 'nats_lost', 'standard_error'
    data = {n: [table.rows[n][k] for k in keys] for n in names}
    path, mark = out / FILE, style.digest(data, __file__)
    if not style.holds(path, mark):
        with style.style():
            figure = style.figure(7.6, 4.2)
            paint(figure, data)
            style.save(figure, path, mark)
    return FILE


def paint(figure: Any, data: dict[str, list[float]]) -> None:
    """Draws two lines and the points of others, with their names."""
    axes = figure.subplots()
    places = {}
    for (name, rows), colour in zip(LINES.items(), ('#D55E00', '#009E73'), strict=True):
        axes.errorbar(*zip(*(data[n] for n in rows), strict=True), fmt='o-', ms=5, color=colour,
                      label=name)  # fmt: skip
    for row, name in POINTS.items():
        bits, nats, error = data[row]
        places[name] = bits, nats
        axes.errorbar(bits, nats, error, fmt='s', ms=5, color='#555555')
    axes.set_xscale('log', base=2)
    axes.set_xticks([0.5, 1, 2, 4, 8], ['.5', '1', '2', '4', '8'])
    axes.set_xlim(0.6, 24)
    axes.set_yscale('log')
    axes.set_yticks((1e-4, *lost.TICKS), [f'{t:g}' for t in (1e-4, *lost.TICKS)])
    axes.minorticks_off()
    axes.set(xlabel='bits per element', ylabel='nats per token lost')
    axes.legend(loc='lower left', fontsize=8)
    bits, least, _ = data['klt3-long']
    figure.suptitle(
        f'SmolLM2, cut once, loses {least:.2g} nats at {bits:.0f} bits,\n'
        f'and {data["uniform8"][1]:.1f} in int8 with one scale for all',
        fontsize=10,
    )
    told = 'SmolLM2-135M-Instruct (Q4_1), one cut, forward alone, nothing trained; WikiText-2'
    style.caption(figure, f'{told}; bars: standard error')
    labels.label(figure, axes, places, size=8)
