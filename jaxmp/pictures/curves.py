"""Curves of one run: training loss, and the test metric by epoch, or step, and by bytes sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxmp.config import Summary, reads_text
from jaxmp.metrics import (
    ACCURACY,
    PERPLEXITY,
    Metric,
    Scores,
    by_phases,
    epochs_of,
    of_summary,
    warmup_of,
)
from jaxmp.pictures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Records = Sequence[Mapping[str, Any]]  # lines of ``metrics.jsonl``


def draw(records: Records, summary: Summary) -> Figure:
    """The curves of a run as a figure.

    Args:
      records: records of ``metrics.jsonl``.
      summary: content of ``summary.json``.
    """
    metric = of_summary(summary)
    train = [r for r in records if r['kind'] == 'train']
    moved, x = sent(summary), unit(summary)
    with style.style():
        figure = style.figure(12 if moved[0] else 8, 3.8)
        loss, *tests = figure.subplots(1, 3 if moved[0] else 2)
        loss.plot([r[x] for r in train], [r['loss'] for r in train], color='black')
        loss.set(title='training', ylabel='cross-entropy (nats), logarithmic')
        style.logarithmic(loss)
        for axes in tests:
            paint_tests(axes, metric, records, summary, by_bytes=axes is not tests[0])
        warmup = warmup_of(summary['config']) * (moved[0] < moved[1])
        # Nothing is compressed in the warm-up, whose epochs are `each` wide on the axis.
        each = summary['steps'] / epochs_of(summary) if x == 'step' else 1
        for axes in (loss, *tests[:1]):
            axes.set_xlabel(x)
            axes.xaxis.get_major_locator().set_params(integer=True)
            if warmup:
                axes.axvspan(0, warmup * each, color='gray', alpha=0.15, lw=0)
        if warmup and tests[1:]:
            tests[1].axvspan(0, gigabytes(summary, warmup), color='gray', alpha=0.15, lw=0)
        warm = (
            f'; gray: warm-up of {warmup} of {epochs_of(summary):.4g} epochs, not compressed'
            * bool(warmup)
        )
        figure.suptitle(title(summary), fontsize=11)
        style.caption(figure, f'n = 1 run (seed {summary["seed"]}), so no intervals{warm}')
    return figure


def unit(run: Summary) -> str:
    """What the axis of a run's training counts: ``step`` of a text, else ``epoch``."""
    return 'step' if reads_text(run['config']) else 'epoch'


def title(summary: Summary) -> str:
    """The channels in words, and what they send compared with float32."""
    config = summary['config']
    words = style.human(summary['fwd'], summary['bwd'], warmup_of(config))
    if 'exchange' in summary:
        words += f'; gradients: {style.exchange(summary["exchange"]["text"])}'
    moved, full = sent(summary)
    ratio = f', {full / moved:.1f} times fewer bytes per step' if 0 < moved < full else ''
    return f'{summary["name"]}: {words}{ratio}'


def paint_tests(
    axes: Axes, metric: Metric, records: Records, summary: Summary, by_bytes: bool
) -> None:
    """Draws the test metric with compression on and off; one line for a run without compression."""
    moved, full = sent(summary)
    same = moved == full or not moved
    colour = style.FAMILIES['no compression' if same else 'quantisation']
    for mode, kind in (('on', '-'), ('off', '--'))[: 1 if same else 2]:
        rows = [r for r in records if r['kind'] == 'test' and r['compression'] == mode]
        x = [gigabytes(summary, r['epoch']) if by_bytes else r[unit(summary)] for r in rows]
        label = 'no compression' if same else f'compression {mode}'
        y = [value(metric, r) for r in rows]
        axes.plot(x, y, kind, marker='.', label=label, color=colour if mode == 'on' else 'black')
    axes.set(ylabel=f'test {metric.name}{" (%)" if metric is ACCURACY else ""}')
    axes.set(title='test, by bytes sent' if by_bytes else 'test')
    if by_bytes:
        axes.set(xlabel='GB sent since the start of training')
    axes.legend()


def sent(run: Summary) -> tuple[int, int]:
    """Bytes per step over boundaries (both ways) and from one replica, sent and uncompressed."""
    rows = run['bytes']
    moved = sum(r['forward'] + r['backward'] for r in rows)
    full = sum(2 * r['uncompressed'] for r in rows)
    if exchange := run.get('exchange'):
        n = exchange['replicas']
        moved, full = moved + exchange['sent'], full + 2 * exchange['uncompressed'] * (n - 1) // n
    return moved, full


def gigabytes(summary: Summary, epoch: float) -> float:
    r"""Bytes sent until the end of an epoch, in 1e9, with the phases' bytes in their epochs.

    >>> row = {'boundary': 1, 'uncompressed': 100, 'forward': 10, 'backward': 10}
    >>> config = {'epochs': 4, 'phases': 'raw@:1'}
    >>> run = {'bytes': [row], 'steps': 40, 'config': config}
    >>> round(1e9 * gigabytes(run, 1)), round(1e9 * gigabytes(run, 3))
    (2000, 2400)
    """
    each, (moved, _) = summary['steps'] / epochs_of(summary), sent(summary)
    return (epoch * moved + by_phases(summary, epoch)) * each / 1e9


def value(metric: Metric, scores: Scores) -> float:
    """The metric in the unit of its axis."""
    number = scores[metric.score]
    return (
        100 * number if metric is ACCURACY else math.exp(number) if metric is PERPLEXITY else number
    )
