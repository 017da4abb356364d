"""Callbacks of `jaxmp.train_and_evaluate` that pass its records on: TensorBoard, Weights & Biases.

A callback is a function of one record, a line of ``metrics.jsonl`` as a dict.
"""

from __future__ import annotations

import functools
import importlib
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

Record = dict[str, Any]  # a line of ``metrics.jsonl``: kind, step, epoch and numbers
Callback = Callable[[Record], None]
WHICH = ('kind', 'compression', 'boundary', 'direction')  # of a record: what its numbers are of


def scalars(record: Record) -> dict[str, float]:
    """The measured numbers of a record, each under a name of its own.

    >>> scalars({'kind': 'test', 'step': 9, 'epoch': 1, 'compression': 'on', 'loss': 0.5})
    {'test/on/loss': 0.5}
    """
    path = '/'.join(str(record[k]) for k in WHICH if k in record)
    return {f'{path}/{k}': v for k, v in record.items() if isinstance(v, float)}


@contextmanager
def tensorboard(workdir: Path) -> Iterator[Callback]:
    """A callback that writes event files under ``workdir/tensorboard``.

    Raises:
      ImportError: if the extra is not installed.
    """
    writer = _package('tensorboardX', 'tensorboard').SummaryWriter
    opened = functools.cache(lambda: writer(str(workdir / 'tensorboard')))

    def note(record: Record) -> None:
        for name, value in scalars(record).items():
            opened().add_scalar(name, value, record['step'])

    try:
        yield note
    finally:
        if opened.cache_info().currsize:
            opened().close()


@contextmanager
def wandb(workdir: Path, config: Mapping[str, Any]) -> Iterator[Callback]:
    """A callback that logs to Weights & Biases, in the project that its environment names.

    A run that goes on from a checkpoint goes on there too, by the id in ``workdir/wandb_id``.

    Args:
      workdir: the run's folder.
      config: of the run, nested.

    Raises:
      ImportError: if the extra is not installed.
    """
    package = _package('wandb', 'wandb')

    @functools.cache
    def opened() -> Any:
        path = workdir / 'wandb_id'
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        run = package.init(
            name=config['name'], config=dict(config), dir=str(workdir), id=path.read_text(),
            resume='allow',
        )  # fmt: skip
        run.define_metric('*', step_metric='step')  # a step may be logged again after a kill
        return run

    def note(record: Record) -> None:
        opened().log({'step': record['step'], **scalars(record)})

    try:
        yield note
    finally:
        if opened.cache_info().currsize:
            opened().finish()


def _package(name: str, extra: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'--{extra} needs the extra: pip install "jaxmp[{extra}]"') from error
