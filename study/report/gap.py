"""What switching compression off costs as training goes on: Top10 % in all studies of a report.

The errors with compression off over those with compression on, by step, a line per study; the
paper's row is a point, and so is the end of a study with BatchNorm's statistics estimated again. If
the line of a study without BatchNorm rises as well, its statistics are not the only cause; if lines
of one width rise with the steps, width is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxmp.config import settings
from jaxmp.pictures import labels, style
from study.report.claims import LEAST
from study.report.paper import PAPER, paper_score
from study.report.results import Study

ROW = 'top10'
TITLE = 'What Top10 % costs when it is switched off'
NORMS = {'batch': '', 'group': ' with GroupNorm', 'none': ' without a normaliser'}
NAMES = {'resnet18': 'ResNet-18', 'lenet': 'LeNet', 'cifar10': 'CIFAR-10', 'mnist': 'MNIST'}


class Gap(NamedTuple):
    """The errors off over the errors on by step, one list per seed, of each study; the paper's."""

    steps: dict[str, list[float]]
    ratios: dict[str, list[list[float]]]
    paper: tuple[float, float]
    again: dict[
        str, list[float]
    ]  # at the end, by seed, with BatchNorm's statistics estimated again


def gap(studies: Sequence[Study]) -> Gap | None:
    """The ratios of the row `ROW` in all studies that have it; None if none has."""
    steps, ratios, again = {}, {}, {}
    for study in studies:
        if ROW not in study.rows:
            continue
        runs = study.rows[ROW].runs
        curves = [r['history'] for r in runs if 'accuracy' in r.get('history', {}).get('on', ())]
        if not curves:
            continue
        shares = [[*map(ratio, c['off']['accuracy'], c['on']['accuracy'])] for c in curves]
        if shares in ratios.values():  # the same runs in another study
            continue
        name = f'{described(settings(runs[0]["config"]))} ({study.name})'
        epochs = len(curves[0]['on']['accuracy'])
        steps[name] = [runs[0]['steps'] * (e + 1) / epochs for e in range(epochs)]
        ratios[name] = shares
        if pairs := study.again.get(ROW):
            again[name] = [ratio(*pair) for pair in pairs]
    off, on = (paper_score(ROW, mode) / 100 for mode in ('off', 'on'))
    paper = PAPER['steps'], ratio(off, on)
    return Gap(steps, ratios, paper, again) if steps else None


def ratio(off: float, on: float) -> float:
    """The errors off over the errors on, for accuracies as shares."""
    return max(1 - off, LEAST / 100) / max(1 - on, LEAST / 100)


def described(config: dict[str, Any]) -> str:
    """Model, width, normaliser if it is not the published one, and data of a run."""
    named = lambda key: NAMES.get(config[key], config[key])
    pool = config['data.pool']
    pooled = f' averaged {pool} x {pool}' if pool > 1 else ''
    model = f'{named("model.name")} of width {config["model.width"]}{NORMS[config["model.norm"]]}'
    return f'{model}, {named("data.name")}{pooled}'


def paint(figure: Any, data: Gap) -> None:
    """Draws a thick line per study, its geometric mean over seeds, and thin lines of the seeds."""
    axes = figure.subplots()
    ends, paths, last = {'the paper': data.paper}, [], []
    colours = {'the paper': 'black'}
    for colour, (name, rows) in zip(style.PALETTE[1:] * 2, data.ratios.items(), strict=False):
        x, mean = data.steps[name], np.exp(np.mean(np.log(rows), 0))
        for row in rows if len(rows) > 1 else ():
            axes.plot(x, row, color=colour, lw=0.5, alpha=0.6)
        axes.plot(x, mean, color=colour, lw=2, marker='.' if len(x) < 5 else '')
        paths.append(list(zip(x, mean, strict=True)))
        beside = f'{name}, n = {len(rows)}'
        ends[beside], colours[beside] = (x[-1], float(mean[-1])), colour
        last.append(float(mean[-1]))
        if again := data.again.get(name):
            y = float(np.exp(np.mean(np.log(again))))
            below = f'BatchNorm estimated again: {y:.2f}, n = {len(again)}'
            axes.plot(x[-1], y, 'o', color=colour, mfc='white')
            ends[below], colours[below] = (x[-1], y), colour
    axes.plot(*data.paper, 'o', color='black')
    axes.axhline(1, color='gray', lw=0.8)
    axes.set_xscale('log')
    style.logarithmic(axes)
    axes.set(xlabel='steps', ylabel='errors off over errors on')
    told = f'from {min(last):.2f} to {max(last):.2f} times the errors in these trainings'
    figure.suptitle(f'Switching Top10 % off at the test: {told},\n{data.paper[1]:.2f} in the paper')
    style.caption(
        figure,
        'n: seeds; thick, their geometric mean; thin, each seed; '
        'the same codec forward and backward; a name has the colour of its line',
    )
    paths.append([(x, 1) for x in axes.get_xlim()])
    labels.label(figure, axes, ends, size=8, colours=colours, lines=paths)
