"""Studies: folders of result files with common settings, grouped into rows with several seeds.

This module computes all numbers of a report: scores off and on by the paper's protocol (best epoch
after the warm-up, best seed) and by an unbiased one (last epoch, mean and standard error over
seeds), differences seed by seed, bits per element.

A row is judged by its score with compression off if at any of its boundaries the forward channel
remembers positions of a batch or examples (`jaxmp.feedback.Channel.state_of`). With compression on,
these states would belong to other images than those of the test, or there would be none for them. A
basis of the channels and the means of tokens are as true of a test, so they are judged on.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxmp.config import Summary, settings
from jaxmp.metrics import by_phases, epochs_of, of_summary, positions, warmup_of
from jaxmp.spec import SpecError, parse
from study.report.residuals import Estimate, estimate

# What may vary between rows.
VARIES = (
    'name',
    'fwd',
    'bwd',
    'exchange',
    'seed',
    'phases',
    'model.bottleneck',
    'model.embed_every_stage',
    'optimizer.delay',
    'optimizer.delay_by_stage',
    'optimizer.correction',
)
TUNED = (
    'optimizer.name',
    'optimizer.lr',
    'optimizer.momentum',
    'optimizer.adamw_scale',
    'optimizer.clip_norm',
)  # may also vary between rows with exchanges, some of which have their own momentum
NARROW = 'study.bottleneck:build'  # model.name of a GPT-2 with learned projections
NOT_OF_A_TEST = {'position', 'example'}  # what states belong to that a test does not have


class Row(NamedTuple):
    """The runs of one row, one per seed, in ascending order.

    Attributes:
      name: of the row.
      runs: their results.
      mended: what was mended in the code of its codec after its runs; empty if nothing was.
    """

    name: str
    runs: tuple[Summary, ...]
    mended: str = ''

    @property
    def measure(self) -> str:
        """``'accuracy'`` (shown in percent) or ``'perplexity'`` (its logarithm, in nats)."""
        return self.runs[0].get('measure', 'accuracy')

    @property
    def judged(self) -> str:
        """``'off'`` if a forward channel remembers what a test does not have, else ``'on'``."""
        return 'off' if NOT_OF_A_TEST & {*states_of(self.runs[0])} else 'on'


class Study(NamedTuple):
    """The rows of one folder.

    Attributes:
      name: of the folder.
      rows: by name.
      again: accuracies by row, one pair per seed: off with BatchNorm's statistics estimated again,
        and on, from the files of `jaxmp evaluate --batchnorm` in its folder ``statistics``.
      untrained: the test loss in nats of the pretrained model before it is trained, from the file
        ``untrained.json`` of `jaxmp evaluate --text` in the same folder.
    """

    name: str
    rows: dict[str, Row]
    again: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({})
    untrained: float | None = None


def load(folder: Path) -> list[Study]:
    """The studies in ``folder``: those of it and its subfolders with results of finished runs.

    The name of a study is its folder below ``folder``, such as ``few_bits_cpu``.

    A result is a ``*.json`` of a sweep or the ``summary.json`` of a workdir.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if a study mixes settings, or has two results of one row and seed.
    """
    runs_in: dict[Path, list[Summary]] = {}
    for path in sorted(folder.rglob('*.json')):
        summary = json.loads(path.read_text())
        if isinstance(summary, dict) and {'test', 'bytes', 'config'} <= summary.keys():
            home = path.parent.parent if path.name == 'summary.json' else path.parent
            runs_in.setdefault(home, []).append(summary)
    if not runs_in:
        raise FileNotFoundError(
            f'{folder} has no result of a finished run; give the --out of a sweep, the --workdir '
            'of runs, or a folder that contains them'
        )
    named = lambda home: '_'.join(home.relative_to(folder).parts) or home.name
    studies = [study(home, named(home), runs) for home, runs in runs_in.items()]
    return sorted(studies, key=lambda s: -len(s.rows))


def study(home: Path, name: str, runs: list[Summary]) -> Study:
    """The runs of a folder grouped by name; raises ValueError as described in `load`."""
    rows: dict[str, Row] = {}
    for run in sorted(runs, key=lambda r: (r['name'], r['seed'])):
        # A run with replicas is not a row of the paper, whatever its name.
        name_of_row = f'{run["name"]}, replicas' if 'exchange' in run else run['name']
        row = rows.get(name_of_row, Row(name_of_row, ()))
        if any(run['seed'] == r['seed'] for r in row.runs):
            raise ValueError(
                f'{home} has two results of {run["name"]} with seed {run["seed"]}; move one away'
            )
        rows[row.name] = row._replace(runs=(*row.runs, run), mended=row.mended or mended(home, run))
    with_settings = [(r, settings_of(r)) for row in rows.values() for r in row.runs]
    for row in rows.values():
        check_same(home, with_settings, row)
    return Study(name, rows, estimated_again(home), untrained(home))


def settings_of(run: Summary) -> dict[str, Any]:
    """The settings of a run, but that rows say a warm-up and learned channels themselves."""
    values = settings(run['config'])
    texts = (text.strip() for text in values['phases'].split(';'))
    values['phases'] = '; '.join(t for t in texts if not warmup_of({'phases': t}))
    return values | {'model.name': model_of(run)}


def model_of(run: Summary) -> str:
    """The model of a run; one with learned projections is a GPT-2."""
    name = run['config']['model']['name']
    return 'gpt2' if name == NARROW else name


def states_of(run: Summary) -> Sequence[str]:
    """What the states of the forward channels belong to, by boundary; of old results, by text."""
    if 'state_of' in run:
        return run['state_of']
    return [_state_of(text) for text in run['fwd'].split(';')]


@functools.cache
def _state_of(text: str) -> str:
    """What the state of a channel belongs to; of one that the package does not know, nothing."""
    try:
        return parse(text, {'examples': 1, 'vocabulary': 1}).state_of
    except SpecError:
        return ''


def mended(home: Path, run: Summary) -> str:
    """What was mended in the codec of a run since, from the file ``mended.json`` of its study."""
    path = home / 'mended.json'
    if not path.is_file():
        return ''
    mend = json.loads(path.read_text())
    sent = [run['fwd'], run['bwd'], *(p['codec'] for p in run.get('phases') or ())]
    older = run['commit'] in mend['commits'] and any(mend['codec'] in text for text in sent)
    return f'sent by `{mend["codec"]}`, {mend["what"]}' if older else ''


def estimated_again(home: Path) -> dict[str, list[tuple[float, float]]]:
    """What `Study` has as ``again``."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((home / 'statistics').glob('*-s*.json')):
        rows = json.loads(path.read_text())['test']
        for name in (n for n in rows if f'{n}, statistics again' in rows):
            *_, on = rows[name].values()
            pair = rows[f'{name}, statistics again']['raw']['accuracy'], on['accuracy']
            pairs.setdefault(path.stem.rpartition('-s')[0], []).append(pair)
    return pairs


def untrained(home: Path) -> float | None:
    """What `Study` has as ``untrained``."""
    path = home / 'statistics' / 'untrained.json'
    if not path.is_file():
        return None
    [scores] = json.loads(path.read_text())['scores'].values()
    return scores['raw']['nats']


def check_same(home: Path, runs: list[tuple[Summary, dict[str, Any]]], row: Row) -> None:
    """Raises ValueError if a run differs from ``row`` in a setting that a study has in common.

    Args:
      home: the study's folder.
      runs: all of the study, with their settings.
      row: one of its rows.
    """
    first, a = row.runs[0], settings_of(row.runs[0])
    for run, b in runs:
        if run.get('measure') != first.get('measure'):
            continue
        tuned = TUNED if 'exchange' in first and 'exchange' in run else ()
        late = 'optimizer.delay', 'optimizer.delay_by_stage'
        if any(a.get(k) != b.get(k) for k in late):  # each has rates of its own
            tuned = (*tuned, 'optimizer.lr', 'optimizer.warmup', 'optimizer.adamw_scale')
        free = ('seed',) if run['name'] == first['name'] else (*VARIES, *tuned)
        if clash := [k for k in a if k in b and k not in free and a[k] != b[k]]:
            raise ValueError(
                f'{home}: {row.name} and {run["name"]} have different settings: '
                + ', '.join(f'{k}={a[k]!r} and {b[k]!r}' for k in clash)
                + '; use one folder per setting'
            )


def best_epoch(run: Summary, mode: str) -> Summary:
    """Scores of the best epoch after the warm-up, during which nothing is compressed.

    If the best epoch is in the warm-up and the run has no history, the last epoch is used.
    """
    scores, warm = run['test'][mode], warmup_of(run['config'])
    if scores['best']['epoch'] > warm or scores['last']['epoch'] <= warm:
        return scores['best']
    if 'history' not in run:
        return scores['last']
    curve = run['history'][mode]
    columns = positions(run, mode, 'epoch'), curve['loss'], curve['accuracy']
    rows = [{'epoch': e, 'loss': l, 'accuracy': a} for e, l, a in zip(*columns, strict=True)]
    return max((r for r in rows if r['epoch'] > warm), key=of_summary(run).rank)


def score(run: Summary, mode: str, which: str) -> float:
    """Accuracy in percent, or loss in nats if the measure is the perplexity."""
    scores = best_epoch(run, mode) if which == 'best' else run['test'][mode][which]
    text = run.get('measure') == 'perplexity'
    return scores['loss'] if text else 100 * scores['accuracy']


def best(row: Row, mode: str) -> float:
    """The score by the paper's protocol: the best epoch of the best seed, separately off and on."""
    choose = min if row.measure == 'perplexity' else max
    return choose(score(r, mode, 'best') for r in row.runs)


def last(row: Row, mode: str) -> Estimate:
    """The score of the last epoch, over the seeds."""
    return estimate([score(r, mode, 'last') for r in row.runs])


def by_seed(row: Row, mode: str) -> dict[int, float]:
    """Scores of the last epoch of each seed."""
    return {r['seed']: score(r, mode, 'last') for r in row.runs}


def difference(row: Row, to: Row) -> Estimate | None:
    """``row`` minus ``to`` seed by seed, each in its mode; None without a common seed."""
    a, b = by_seed(row, row.judged), by_seed(to, to.judged)
    common = [s for s in a if s in b]
    return estimate([a[s] - b[s] for s in common]) if common else None


def wire(row: Row) -> dict[str, float]:
    """Bytes per step outside the phases; ratio to uncompressed and bits per element over the run.

    For boundaries these count both directions of all boundaries; for replicas what one sends. A
    GPT-2 with a learned bottleneck is compared with the same one without.
    """
    run = row.runs[0]
    if 'exchange' in run:
        full, sent = run['exchange']['uncompressed'], run['exchange']['sent']
        return {'bytes': sent, 'ratio': full / sent, 'bits': 32 * sent / full}
    full = 2 * sum(s['uncompressed'] for s in run['bytes'])
    model = run['config']['model']
    if model['name'] == NARROW and model['bottleneck']:
        full *= max(1, model['width'] / model['bottleneck'])
    sent = sum(s['forward'] + s['backward'] for s in run['bytes'])
    epochs = epochs_of(run)
    mean = sent + by_phases(run, epochs) / epochs
    return {'bytes': sent, 'ratio': full / mean, 'bits': 32 * mean / full}
