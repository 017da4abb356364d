"""Checks, before a run starts, that its processes compute alike and share data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

import jaxmp
from jaxmp import config as schema
from jaxmp.config import Config
from jaxmp.data import Dataset, parts
from jaxmp.net.address import ProcessGroupError
from jaxmp.net.group import ProcessGroup
from jaxmp.training.experiment import Experiment
from jaxmp.training.fingerprint import components, fingerprint, switches, weights

Settings = dict[str, Any]  # of a configuration, by their keys with dots
HERE = ('data.dir', 'data.download')  # keys that may differ between hosts


def settings_of(config: Config) -> Settings:
    """Versions and keys that must be the same in all processes, as JSON has them."""
    keys = schema.flat(config.to_dict())
    shared = {k: v for k, v in keys.items() if k not in HERE}
    versions = {'jaxmp': jaxmp.__version__, 'jax': jax.__version__}
    return json.loads(json.dumps({**versions, **switches(), **shared}))


def check_alike(group: ProcessGroup, exp: Experiment) -> None:
    """Compares what computes the numbers of all processes, and their data; all must call it.

    Raises:
      ProcessGroupError: if they differ; the message names the process, what differs, and the cure.
    """
    if group.count == 1:
        return
    compare(group, fingerprint(exp), 'computes other numbers than', cure_of)
    check_data(group, exp.data)


def check_data(group: ProcessGroup, dataset: Dataset) -> None:
    """Compares the data of all processes by digests of the arrays; all must call it.

    Raises:
      ProcessGroupError: if the data differ; the message names the processes and the arrays.
    """
    cure = 'give all processes the same files, by config.data.dir'
    compare(group, digests(dataset), 'has other data than', lambda _: cure)


def compare(
    group: ProcessGroup, texts: dict[str, str], wrong: str, cure: Callable[[str], str]
) -> None:
    """Compares texts by name over all processes; all must call it.

    Args:
      group: the processes.
      texts: of this process.
      wrong: what is said of a process with other texts than process 0.
      cure: what to do, by the name of the first text that differs.

    Raises:
      ProcessGroupError: if a process has other texts than process 0, or than those before it.
    """
    if group.count == 1:
        return
    rows, names = group.share(texts), group.names
    again = [i for i, value in sorted(group.view.values.items()) if value]  # were there before
    old = again[0] if again else 0
    for i, row in enumerate(rows):
        if differ := [k for k in {**rows[old], **row} if row.get(k) != rows[old].get(k)]:
            first = differ[0]
            why = (
                f'{names[i]} {wrong} {names[old]}, in {", ".join(differ)} ({first}: '
                f'{row.get(first)}, process {old}: {rows[old].get(first)}); {cure(first)}'
            )
            if again and i not in again:
                if i == group.index and group.peer:
                    group.peer.fail(why, alone=True)
                group.barrier()  # that process does not reach it, and the view ends
            raise ProcessGroupError(why)


def cure_of(name: str) -> str:
    """What to do where a text of `fingerprint` differs."""
    if name.startswith('JAX_'):
        return f'set the environment variable {name} alike for all processes, or nowhere'
    if name.startswith('config.'):
        return f'give all processes the same file for {name}'
    return 'give all processes the same packages, XLA_FLAGS and kind of device'


def digests(dataset: Dataset) -> dict[str, str]:
    """The constants of a data set and a `digest` of each array, as text by name."""
    arrays = {}
    for name, (x, y) in (('train', dataset.train), ('test', dataset.test)):
        arrays[f'{name}.x'] = digest(x)
        arrays[f'{name}.y'] = arrays[f'{name}.x'] if y is x else digest(y)
    return {**arrays, **{n: str(getattr(dataset, n)) for n in ('classes', 'mean', 'std')}}


def inputs(exp: Experiment) -> dict[str, str]:
    """Digests of what a run reads, by name: its data, and the checkpoint that it starts from."""
    return {**digests(exp.data), **weights(exp.config.model.path), **components(exp.config)}


def digest(a: ArrayLike) -> str:
    """Dtype, shape and 16 hexadecimal digits of BLAKE2b of an array, as text.

    >>> digest(np.zeros((2, 3), np.uint8)) == digest(np.zeros((3, 2), np.uint8))
    False
    """
    a, hashed = np.asarray(a), hashlib.blake2b(digest_size=8)
    for rows in parts(a):
        hashed.update(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data)
    return f'{a.dtype}{list(a.shape)} {hashed.hexdigest()}'
