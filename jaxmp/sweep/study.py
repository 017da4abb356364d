"""`Job`: one run of a study, with its configuration, result file and workdir.

A study is a Python file with ``get_study(scale, tables)``, such as configs/paper_tables.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from jaxmp.config import Config, Summary, settings
from jaxmp.config.files import find
from jaxmp.models.checkpoint import digest
from jaxmp.plugins import module

WEIGHTS = 'SHA-256 of the weights in model.path'


class Job(NamedTuple):
    """One run of a study: its configuration, its result file, its workdir."""

    config: Config
    result: Path
    workdir: Path

    @property
    def row(self) -> str:
        """The configuration without the seed, as text; runs of one row share compiled programs."""
        return json.dumps({**self.config.to_dict(), 'seed': None}, sort_keys=True)


def jobs(study: list[tuple[int, Config]], out: Path, work: Path) -> list[Job]:
    """The runs of a study, with the seeds of a row one after another.

    Args:
      study: seeds and configurations, as returned by ``get_study``.
      out: folder of the results.
      work: folder of the workdirs.
    """
    plan = []
    for seed, config in study:
        name = f'{config.name}-s{seed}'
        plan.append(Job(config, out / f'{name}.json', work / name))
    rows = list(dict.fromkeys(job.row for job in plan))
    return sorted(plan, key=lambda job: rows.index(job.row))


def finished(job: Job) -> Summary | None:
    """The result of ``job``, or None if it is not finished.

    Raises:
      ValueError: if the result was made with another configuration, or from other weights.
    """
    if not job.result.exists():
        return None
    summary = json.loads(job.result.read_text())
    as_saved = json.loads(json.dumps(job.config.to_dict()))  # tuples are lists there
    want, has = settings(as_saved), settings(summary['config'])
    if (now := digest(job.config.model.path)) and 'weights' in summary:
        want[WEIGHTS], has[WEIGHTS] = now, summary['weights']
    if clash := sorted(k for k in {**want, **has} if want.get(k) != has.get(k)):
        raise ValueError(
            f'{job.result} was made with other settings: '
            + ', '.join(f'{k}={has.get(k)!r} (now {want.get(k)!r})' for k in clash)
            + '; move it away or give another --out'
        )
    return summary


def study_of(name: str) -> ModuleType:
    """The module of a study, given its file, or its name if the package contains it.

    Raises:
      ValueError: if there is no such file, or it has no ``get_study``.
    """
    path = find(name)
    if not path.endswith('.py') or not Path(path).is_file():
        raise ValueError(f'{name} is not a Python file; give one with get_study(scale, tables)')
    study = module(path)
    if not hasattr(study, 'get_study'):
        raise ValueError(f'{name} has no get_study(scale, tables); see configs/paper_tables.py')
    return study
