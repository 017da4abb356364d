"""Result files as studies: a folder of runs of one setting, each row with its seeds.

Everything a report says is computed from here: scores off and on by the paper's protocol (best
epoch, best seed) or by the honest one (last epoch, mean and standard error over seeds), differences
seed by seed, bits an element.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Summary = dict[str, Any]
CONFIDENCE = 0.95
VARIES = ('name', 'fwd', 'bwd', 'exchange', 'seed', 'warmup_epochs')  # between the rows of a study
IDLE = ('checkpoint_every', 'tensorboard', 'download', 'init_from', 'tokenizer')


class Row(NamedTuple):
    """The runs of one row, a seed each, in their order."""

    name: str
    runs: tuple[Summary, ...]

    @property
    def measure(self) -> str:
        """``'accuracy'`` (shown in percent) or ``'perplexity'`` (its logarithm, in nats)."""
        return self.runs[0].get('measure', 'accuracy')


class Study(NamedTuple):
    """The rows of one folder."""

    name: str
    rows: dict[str, Row]


class Estimate(NamedTuple):
    """Mean over seeds, its standard error, and the interval of Student's t; NaN for one seed."""

    mean: float
    error: float
    low: float
    high: float
    seeds: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of ``values`` with its standard error and its interval of 95 % confidence.

    >>> [round(v, 2) for v in estimate([1.0, 2.0, 3.0])]
    [2.0, 0.58, -0.48, 4.48, 3]
    """
    from scipy.special import stdtrit

    n, mean = len(values), float(np.mean(values))
    if n == 1:
        return Estimate(mean, np.nan, np.nan, np.nan, 1)
    error = float(np.std(values, ddof=1)) / n**0.5
    half = float(stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * error
    return Estimate(mean, error, mean - half, mean + half, n)


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
        free = (*IDLE, 'seed') if run['name'] == first['name'] else (*IDLE, *VARIES)
        a, b = first['config'], run['config']
        if clash := [k for k in a if k in b and k not in free and a[k] != b[k]]:
            raise ValueError(
                f'{home}: {row.name} and {run["name"]} have different settings: '
                + ', '.join(f'{k}={a[k]!r} and {b[k]!r}' for k in clash)
                + '; keep one folder a setting'
            )


def score(run: Summary, mode: str, which: str) -> float:
    """Accuracy in percent, or loss in nats where the measure is the perplexity."""
    scores = run['test'][mode][which]
    text = run.get('measure') == 'perplexity'
    return scores['loss'] if text else 100 * scores['accuracy']


def best(row: Row, mode: str) -> float:
    """The paper's protocol: the best epoch of the best seed, off and on each their own."""
    choose = min if row.measure == 'perplexity' else max
    return choose(score(r, mode, 'best') for r in row.runs)


def last(row: Row, mode: str) -> Estimate:
    """The last epoch, over the seeds."""
    return estimate([score(r, mode, 'last') for r in row.runs])


def by_seed(row: Row) -> dict[int, tuple[float, float]]:
    """Scores of the last epoch, off and on, of each seed."""
    return {r['seed']: (score(r, 'off', 'last'), score(r, 'on', 'last')) for r in row.runs}


def difference(row: Row, to: Row) -> Estimate | None:
    """``row`` less ``to``, compression on, seed by seed; None without a common seed."""
    a, b = by_seed(row), by_seed(to)
    common = [s for s in a if s in b]
    return estimate([a[s][1] - b[s][1] for s in common]) if common else None


def wire(row: Row) -> dict[str, float]:
    """Bytes a step, their ratio to uncompressed, bits an element.

    Of boundaries, both ways over all of them; of replicas, what one of them sends.
    """
    run = row.runs[0]
    if 'exchange' in run:
        full, sent = run['exchange']['uncompressed'], run['exchange']['sent']
    else:
        full = 2 * sum(s['uncompressed'] for s in run['bytes'])
        sent = sum(s['forward'] + s['backward'] for s in run['bytes'])
    return {'bytes': sent, 'ratio': full / sent, 'bits': 32 * sent / full}
