"""The scores of `jaxmp.training.perplexity` as a table, a picture and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jaxmp import terminal
from jaxmp.report import labels, style
from jaxmp.training.perplexity import Score

Scores = Mapping[str, Mapping[str, Score]]  # by codec, by model
BITS = 0.25, 0.5, 1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32  # ticks
LEAST = 1e-3  # nats; a codec that loses less stands there as a triangle


def show(results: Scores, title: str) -> None:
    """Prints a row per model and codec."""
    from rich.table import Table

    table = Table(title=title)
    for name in ('model', 'codec'):
        table.add_column(name, overflow='fold')
    for name in ('bits', 'perplexity', 'nats lost', '+-'):
        table.add_column(name, justify='right')
    for model, scores in results.items():
        for codec, s in scores.items():
            numbers = f'{s.bits:.2f}', f'{s.perplexity:.6g}', f'{s.lost:+.4f}', f'{s.error:.4f}'
            table.add_row(model, codec, *numbers)
    terminal.show(table)


def record(results: Scores) -> dict[str, dict[str, dict[str, float | None]]]:
    """The scores as JSON has them."""
    return {m: {c: s.record() for c, s in scores.items()} for m, scores in results.items()}


def draw(path: Path, results: Scores, title: str) -> None:
    """Nats lost against bits, with standard errors; both axes logarithmic."""
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
                # A codec that loses nothing, or gains, has no place on a logarithmic axis.
                places[name] = s.bits, max(s.lost, LEAST)
                mark = 'o' if s.lost > LEAST else 'v'
                axes.errorbar(*places[name], yerr=_bar(s), fmt=mark, color=colour, ms=5)
        axes.set_xscale('log')
        low, high = axes.get_xlim()
        axes.set_xticks([b for b in BITS if low <= b <= high], minor=False)
        axes.xaxis.set_major_formatter('{x:g}')
        axes.minorticks_off()
        style.logarithmic(axes)
        axes.set(xlabel='bits per element', ylabel='nats per token lost')
        axes.set_ylim(bottom=LEAST / 1.5)
        figure.suptitle(title)
        style.caption(figure, f'bars: standard error over blocks; triangle: {LEAST:g} nats or less')
        labels.numbered(figure, axes, key, places, colours)
        style.save(figure, path, style.digest(record(results), __file__))


def _bar(score: Score) -> list[list[float]] | None:
    """The standard error below and above a point, cut at the axis's end."""
    if not score.error > 0 or score.lost <= LEAST:
        return None
    return [[min(score.error, score.lost - LEAST / 2)], [score.error]]
