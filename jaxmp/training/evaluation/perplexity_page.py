"""The scores of `jaxmp.training.evaluation.perplexity` as a table, a picture and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxmp import terminal
from jaxmp.pictures import labels, style
from jaxmp.training.evaluation.perplexity import Mean, Record, Score

Scores = Mapping[str, Mapping[str, Score]]  # by codec, by model
BITS = 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32  # ticks
LEAST = 1e-3  # nats; a codec that loses less stands there as a triangle


def show(results: Scores, title: str) -> None:
    """Prints a row per model and codec; what nobody measured or predicted has no column."""
    from rich.table import Table

    columns = {
        'bits': lambda s: f'{s.bits:.2f}',
        'perplexity': lambda s: f'{s.perplexity:.6g}' if len(s.nats) else '',
        'nats lost': lambda s: _with_error(s.lost, '+'),
        'kl': lambda s: _with_error(s.kl),
        'kl predicted': lambda s: _with_error(s.predicted),
        '% of perplexity': lambda s: f'{s.added.percent:.3g}',
    }
    table = Table(title=title)
    for name in ('model', 'codec'):
        table.add_column(name, overflow='fold')
    rows = [(m, c, s) for m, scores in results.items() for c, s in scores.items()]
    told = {k: text for k, text in columns.items() if any(text(s) for _, _, s in rows)}
    for name in told:
        table.add_column(name, justify='right')
    for model, codec, s in rows:
        table.add_row(model, codec, *(text(s) for text in told.values()))
    terminal.show(table)


def fewest(scores: Mapping[str, Score], percent: float) -> str:
    """Which codec of the fewest bits adds at most so much of perplexity, as a sentence."""
    fits = [(s.bits, s.added.percent, c) for c, s in scores.items() if c != 'raw']
    fits = [row for row in fits if row[1] <= percent]
    if not fits:
        return f'No codec here adds less than {percent:g} % of perplexity.'
    bits, added, codec = min(fits)
    adds = 'is predicted to add' if np.isnan(scores[codec].kl.value) else 'adds'
    return f'Within {percent:g} % of perplexity: {codec}, {bits:.2f} bits, {adds} {added:.2g} %.'


def _with_error(mean: Mean, sign: str = '') -> str:
    """A mean and its standard error, or nothing."""
    if np.isnan(mean.value):
        return ''
    return f'{mean.value:{sign}.4f}' + ('' if np.isnan(mean.error) else f' ± {mean.error:.4f}')


def record(results: Scores) -> dict[str, dict[str, Record]]:
    """The scores as JSON has them."""
    return {m: {c: s.record() for c, s in scores.items()} for m, scores in results.items()}


def draw(path: Path, results: Scores, title: str) -> None:
    """Divergence against bits, with standard errors; both axes logarithmic."""
    with style.style():
        figure = style.figure(9, 4.5)
        axes, key = figure.subplots(1, 2, width_ratios=(2, 1))
        places, colours = {}, {}
        for model, scores in results.items():
            for codec, s in scores.items():
                if codec == 'raw':
                    continue
                name = codec if len(results) == 1 else f'{model}: {codec}'
                colours[name] = colour = style.FAMILIES[style.family(codec)]
                places[name] = s.bits, max(s.added.value, LEAST)
                mark = 'o' if s.added.value > LEAST else 'v'
                inside = 'white' if s.added is s.predicted else colour
                axes.errorbar(
                    *places[name], yerr=_bar(s.added), fmt=mark, color=colour, mfc=inside, ms=5
                )
        axes.set_xscale('log')
        low, high = axes.get_xlim()
        axes.set_xticks([b for b in BITS if low <= b <= high], minor=False)
        axes.xaxis.set_major_formatter('{x:g}')
        axes.minorticks_off()
        style.logarithmic(axes)
        axes.set(xlabel='bits per element', ylabel='divergence of the next token, nats')
        axes.set_ylim(bottom=LEAST / 1.5)
        figure.suptitle(title)
        style.caption(
            figure,
            f'bars: standard error over blocks; triangle: {LEAST:g} nats or less; white: predicted',
        )
        labels.numbered(figure, axes, key, places, colours)
        style.save(figure, path, style.digest(record(results), __file__))


def _bar(mean: Mean) -> list[list[float]] | None:
    """The standard error below and above a point, cut at the axis's end."""
    if not mean.error > 0 or mean.value <= LEAST:
        return None
    return [[min(mean.error, mean.value - LEAST / 2)], [mean.error]]
