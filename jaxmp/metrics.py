"""`Metric`: a number of a test: how it is computed, which direction is better, how it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Scores = Mapping[str, float]  # means over a split, by name; 'loss' in nats among them
Summary = Mapping[str, Any]  # of a finished run, as summary.json holds it

PERCENT = 1.0  # of perplexity, that codecs may add to a pretrained model before somebody is told
SHOWN = '{:.4g}'  # a mean as a text, where a metric does not say how


class Metric(NamedTuple):
    """What a table says first of a run.

    Attributes:
      name: as a table heads it.
      score: the mean that it is made of, one of a task's scores.
      higher_is_better: whether more is better.
      show: the mean as a text.
      of: ``(output, y) -> values``, ``(B,)``, of a metric that is no score of the task yet.
    """

    name: str
    score: str
    higher_is_better: bool = True
    show: Callable[[float], str] = SHOWN.format
    of: Callable[[Any, Any], Any] | None = None

    def format(self, scores: Scores) -> str:
        """The metric's number, as shown.

        >>> ACCURACY.format({'accuracy': 0.5}), PERPLEXITY.format({'loss': 1.0})
        ('50.00%', '2.718')
        """
        return self.show(scores[self.score])

    def rank(self, scores: Scores) -> float:
        """A number that is the larger the better the scores are."""
        return scores[self.score] if self.higher_is_better else -scores[self.score]


ACCURACY = Metric('accuracy', 'accuracy', True, '{:.2%}'.format)
PERPLEXITY = Metric('perplexity', 'loss', False, lambda nats: f'{math.exp(min(nats, 700.0)):.4g}')
LOSS = Metric('loss', 'loss', False, '{:.4f}'.format)
METRICS = {m.name: m for m in (ACCURACY, PERPLEXITY, LOSS)}


def of_summary(summary: Summary) -> Metric:
    """The metric of a finished run, as `to_summary` has described it.

    >>> error = Metric('error', 'loss', False, '{:.1%}'.format)
    >>> of_summary(to_summary(error)) == error
    True
    >>> of_summary({'measure': 'top5'}).score, of_summary({}).name  # of an older version
    ('top5', 'accuracy')
    """
    name = summary.get('measure', 'accuracy')
    described = 'higher_is_better' in summary
    if not described and name in METRICS:
        return METRICS[name]
    show = summary.get('show', SHOWN).format
    return Metric(name, summary.get('score', name), summary.get('higher_is_better', True), show)


def to_summary(metric: Metric) -> dict[str, Any]:
    """The entries of a summary from which `of_summary` makes the metric again.

    Its numbers are then shown as by ``metric.show`` if that is the ``format`` of a text, and
    otherwise with four digits.

    >>> to_summary(ACCURACY), to_summary(Metric('top5', 'top5'))['score']
    ({'measure': 'accuracy'}, 'top5')
    """
    if METRICS.get(metric.name) == metric:
        return {'measure': metric.name}
    text = getattr(metric.show, '__self__', None)
    return {
        'measure': metric.name,
        'score': metric.score,
        'higher_is_better': metric.higher_is_better,
        'show': text if isinstance(text, str) else SHOWN,
    }


def warmup_of(config: Mapping[str, Any]) -> int:
    """The epochs at the start of a run that its phase ``raw@:N`` sends uncompressed.

    >>> warmup_of({'phases': 'lloyd(2)@3:; raw@:2'}), warmup_of({'phases': 'raw@2:'})
    (2, 0)
    """
    texts = config['phases'].split(';')
    matches = (re.fullmatch(r'raw\s*@0?:(\d+)', text.strip()) for text in texts)
    return next((int(match[1]) for match in matches if match), 0)


def by_phases(summary: Summary, epoch: float) -> float:
    """Bytes per step that the phases add at the boundaries, summed over the first epochs of a run.

    A summary without phases, of an older version, has the warm-up alone.

    >>> row = {'boundary': 1, 'uncompressed': 100, 'forward': 10, 'backward': 10}
    >>> by_phases({'bytes': [row], 'phases': [{'start': 2, 'stop': 5, 'bytes': 200}]}, epoch=3)
    180
    """
    rows = summary['bytes']
    full = sum(2 * r['uncompressed'] for r in rows)
    sent = sum(r['forward'] + r['backward'] for r in rows)
    if (phases := summary.get('phases')) is None:
        phases = [{'start': 0, 'stop': warmup_of(summary['config']), 'bytes': full}]
    epochs = lambda p: max(0, min(epoch, p['stop']) - p['start'])
    return sum(epochs(p) * (p['bytes'] - sent) for p in phases)


def epochs_of(summary: Summary) -> float:
    """The epochs of a finished run, perhaps a part of one.

    >>> epochs_of({'epochs': 1.5, 'config': {'epochs': 15}}), epochs_of({'config': {'epochs': 15}})
    (1.5, 15)
    """
    if 'epochs' in summary:
        return summary['epochs']
    return summary['config']['epochs']  # of an older run


def positions(run: Summary, part: str, unit: str) -> Sequence[float]:
    """Where in a run the scores of a part of its history are, in steps or epochs.

    Args:
      run: a summary; an older one has scores of every epoch, and does not say where.
      part: ``train``, ``off`` or ``on``.
      unit: ``step`` or ``epoch``.

    >>> run = {'steps': 30, 'epochs': 3, 'history': {'on': {'loss': [3.0, 2.0, 1.5]}}}
    >>> list(positions(run, 'on', 'epoch')), list(positions(run, 'on', 'step'))
    ([1, 2, 3], [10, 20, 30])
    """
    scores = run['history'][part]
    if unit in scores:
        return scores[unit]
    epochs = range(1, 1 + max(map(len, scores.values()), default=0))
    return epochs if unit == 'epoch' else [e * run['steps'] // epochs_of(run) for e in epochs]


def own(thing: object, name: str) -> Metric:
    """What an import path names, as a metric: a function of output and y, or a `Metric`.

    Raises:
      TypeError: if it is neither.
    """
    if isinstance(thing, Metric):
        return thing
    if not callable(thing):
        raise TypeError(
            f'{name} is {thing!r}; give a function (output, y) -> a value per example, or a '
            'jaxmp.Metric'
        )
    return Metric(name, name, of=thing)
