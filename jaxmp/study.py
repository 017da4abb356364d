"""What a study is made of: its runs, the results they leave, and who works on which.

A study is a Python file with ``get_study(scale, tables)``, such as configs/paper_tables.py.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.defaults import Summary, settings


class Job(NamedTuple):
    """One run of a study: its configuration, the result it leaves, where it works."""

    config: Any
    result: Path
    workdir: Path

    @property
    def row(self) -> str:
        """The configuration without its seed: what is compiled."""
        return json.dumps({**self.config.to_dict(), 'seed': None}, sort_keys=True)


def jobs(study: list[tuple[int, Any]], out: Path, work: Path) -> list[Job]:
    """The study's runs, the seeds of a row one after another.

    Args:
      study: seeds and configurations, as a study's ``get_study`` gives them.
      out: folder of the results.
      work: folder of the runs' workdirs.
    """
    made = []
    for seed, config in study:
        name = f'{config.name}-s{seed}'
        made.append(Job(config, out / f'{name}.json', work / name))
    rows = list(dict.fromkeys(job.row for job in made))
    return sorted(made, key=lambda job: rows.index(job.row))


def finished(job: Job) -> Summary | None:
    """The result of ``job``, or None.

    Raises:
      ValueError: if the result was made with another configuration.
    """
    if not job.result.exists():
        return None
    found = json.loads(job.result.read_text())
    want, has = settings(job.config.to_dict()), settings(found['config'])
    if clash := sorted(k for k in {**want, **has} if want.get(k) != has.get(k)):
        raise ValueError(
            f'{job.result} was made with other settings: '
            + ', '.join(f'{k}={has.get(k)!r} (now {want.get(k)!r})' for k in clash)
            + '; move it away or give another --out'
        )
    return found


def study_of(path: Path) -> Any:
    """The module in the file ``path``, which must have a ``get_study``.

    Raises:
      ValueError: if it has none.
    """
    sys.path.insert(0, str(path.resolve().parent.parent))  # for `from configs import ...`
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise ValueError(f'{path} is no Python file; give one with get_study(scale, tables)')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, 'get_study'):
        raise ValueError(f'{path} has no get_study(scale, tables); see configs/paper_tables.py')
    return module


def put(config: Any, text: str) -> None:
    """Writes ``key=value`` into ``config``, the value as what it replaces.

    Raises:
      ValueError: if there is no such key, or the value is of another kind.

    >>> import ml_collections
    >>> c = ml_collections.ConfigDict({'lr': 0.1, 'download': False})
    >>> put(c, 'lr=0.5'), put(c, 'download=True'), c.lr, c.download
    (None, None, 0.5, True)
    """
    key, _, value = text.partition('=')
    if key not in config:
        raise ValueError(f'--set {text}: no key {key!r}; there are {", ".join(config)}')
    kind = type(config[key])
    if kind is bool and value not in ('True', 'False'):
        raise ValueError(f'--set {text}: {key} is True or False')
    config[key] = value == 'True' if kind is bool else kind(value)
