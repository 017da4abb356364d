"""Result files as studies: a folder of runs of one setting, each row with its seeds.

Everything a report says is computed from here: scores off and on by the paper's protocol (best
epoch after the warm-up, best seed) or by the honest one (last epoch, mean and standard error over
seeds), differences seed by seed, bits an element.

A row whose forward channel remembers something is judged by its score off: on, its states belong to
other images than those of the test, and AQ-SGD's test images have none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from jaxmp.defaults import Summary, settings
from jaxmp.report.residuals import Estimate, estimate

VARIES = ('name', 'fwd', 'bwd', 'exchange', 'seed', 'warmup_epochs')  # between the rows of a study
TUNED = ('lr', 'momentum')  # between exchanges, too: some have a momentum of their own
REMEMBERS = re.compile(r'(ef\w*|aqsgd)\(')


class Row(NamedTuple):
    """The runs of one row, a seed each, in their order."""

    name: str
    runs: tuple[Summary, ...]

    @property
    def measure(self) -> str:
        """``'accuracy'`` (shown in percent) or ``'perplexity'`` (its logarithm, in nats)."""
        return self.runs[0].get('measure', 'accuracy')

    @property
    def judged(self) -> str:
        """``'off'`` where the forward channel remembers something, else ``'on'``."""
        return 'off' if REMEMBERS.match(self.runs[0]['fwd']) else 'on'


class Study(NamedTuple):
    """The rows of one folder."""

    name: str
    rows: dict[str, Row]


def load(folder: Path) -> list[Study]:
    """The studies in ``folder``: itself, and folders below it, that hold results of finished runs.

    A result is a ``*.json`` of a sweep or the ``summary.json`` of a workdir.

    Raises:
      FileNotFoundError: if there is none.
      ValueError: if a study mixes settings, or holds a row's seed twice.
    """
    found: dict[Path, list[Summary]] = {}
    for path in sorted(folder.rglob('*.json')):
        summary = json.loads(path.read_text())
        if isinstance(summary, dict) and {'test', 'bytes', 'config'} <= summary.keys():
            home = path.parent.parent if path.name == 'summary.json' else path.parent
            found.setdefault(home, []).append(summary)
    if not found:
        raise FileNotFoundError(
            f'{folder} holds no result of a finished run; give the --out of a sweep, the --workdir '
            'of runs, or the folder that holds them'
        )
    studies = [study(home, runs) for home, runs in found.items()]
    return sorted(studies, key=lambda s: -len(s.rows))


def study(home: Path, runs: list[Summary]) -> Study:
    """``runs`` grouped by their names; raises ValueError as `load`."""
    rows: dict[str, Row] = {}
    for run in sorted(runs, key=lambda r: (r['name'], r['seed'])):
        # What replicas send each other is no row of the paper, whatever it is called.
        name = f'{run["name"]}, replicas' if 'exchange' in run else run['name']
        row = rows.get(name, Row(name, ()))
        if any(run['seed'] == r['seed'] for r in row.runs):
            raise ValueError(
                f'{home} holds two results of {run["name"]} with seed {run["seed"]}; move one away'
            )
        rows[row.name] = row._replace(runs=(*row.runs, run))
    for row in rows.values():
        check_same(home, [r for other in rows.values() for r in other.runs], row)
    return Study(home.name, rows)


def check_same(home: Path, runs: list[Summary], row: Row) -> None:
    """Raises ValueError if a run differs from ``row`` in what a study keeps the same."""
    first = row.runs[0]
    for run in runs:
        if run.get('measure') != first.get('measure'):
            continue
        tuned = TUNED if 'exchange' in first and 'exchange' in run else ()
        free = ('seed',) if run['name'] == first['name'] else (*VARIES, *tuned)
        a, b = settings(first['config']), settings(run['config'])
        if clash := [k for k in a if k in b and k not in free and a[k] != b[k]]:
            raise ValueError(
                f'{home}: {row.name} and {run["name"]} have different settings: '
                + ', '.join(f'{k}={a[k]!r} and {b[k]!r}' for k in clash)
                + '; keep one folder a setting'
            )


def best_epoch(run: Summary, mode: str) -> Summary:
    """Scores of the best epoch after the warm-up, in which nothing is compressed.

    A run without a history whose best epoch lies in its warm-up is taken at its last.
    """
    scores, warm = run['test'][mode], run['config'].get('warmup_epochs', 0)
    if scores['best']['epoch'] > warm or scores['last']['epoch'] <= warm:
        return scores['best']
    if 'history' not in run:
        return scores['last']
    curve = run['history'][mode]
    rows = [
        {'epoch': i, 'loss': l, 'accuracy': a}
        for i, (l, a) in enumerate(zip(curve['loss'], curve['accuracy'], strict=True), 1)
    ]
    text = run.get('measure') == 'perplexity'
    return max(rows[warm:], key=lambda r: -r['loss'] if text else r['accuracy'])


def score(run: Summary, mode: str, which: str) -> float:
    """Accuracy in percent, or loss in nats where the measure is the perplexity."""
    scores = best_epoch(run, mode) if which == 'best' else run['test'][mode][which]
    text = run.get('measure') == 'perplexity'
    return scores['loss'] if text else 100 * scores['accuracy']


def best(row: Row, mode: str) -> float:
    """The paper's protocol: the best epoch of the best seed, off and on each their own."""
    choose = min if row.measure == 'perplexity' else max
    return choose(score(r, mode, 'best') for r in row.runs)


def last(row: Row, mode: str) -> Estimate:
    """The last epoch, over the seeds."""
    return estimate([score(r, mode, 'last') for r in row.runs])


def by_seed(row: Row, mode: str) -> dict[int, float]:
    """Scores of the last epoch of each seed."""
    return {r['seed']: score(r, mode, 'last') for r in row.runs}


def difference(row: Row, to: Row) -> Estimate | None:
    """``row`` less ``to``, each as it is judged, seed by seed; None without a common seed."""
    a, b = by_seed(row, row.judged), by_seed(to, to.judged)
    common = [s for s in a if s in b]
    return estimate([a[s] - b[s] for s in common]) if common else None


def wire(row: Row) -> dict[str, float]:
    """Bytes a step after the warm-up; ratio to uncompressed and bits an element over the whole run.

    Of boundaries, both ways over all of them; of replicas, what one of them sends.
    """
    run = row.runs[0]
    if 'exchange' in run:
        full, sent = run['exchange']['uncompressed'], run['exchange']['sent']
        return {'bytes': sent, 'ratio': full / sent, 'bits': 32 * sent / full}
    full = 2 * sum(s['uncompressed'] for s in run['bytes'])
    sent = sum(s['forward'] + s['backward'] for s in run['bytes'])
    warm = run['config'].get('warmup_epochs', 0) / run['config']['epochs']
    mean = warm * full + (1 - warm) * sent
    return {'bytes': sent, 'ratio': full / mean, 'bits': 32 * mean / full}
