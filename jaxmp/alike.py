"""Checks before anything is computed: all processes of a run have the same data and workdir."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.data import Dataset
from jaxmp.team import Team
from jaxmp.watch import TeamError

PATIENCE = 10.0  # seconds that a network file system is given to show a new file


def check_data(team: Team, found: Dataset) -> None:
    """Compares the processes' arrays, by a digest of all their bytes; all must call it.

    Raises:
      TeamError: if they differ; the message names the processes and the arrays.
    """
    if not team.watch:
        return
    rows, names = team.share(digests(found)), team.watch.names
    for i, row in enumerate(rows):
        if differ := [k for k in row if row[k] != rows[0].get(k)]:
            first = differ[0]
            raise TeamError(
                f'{names[i]} has other data than {names[0]}, in {", ".join(differ)} ({first}: '
                f'{row[first]}, process 0: {rows[0].get(first)}); give all processes the same '
                'files, by config.data_dir'
            )


def digests(found: Dataset) -> dict[str, str]:
    """What must be equal of a data set, as text: its constants, and a `digest` of each array."""
    parts = {'train': found.train, 'test': found.test}
    arrays = {f'{k}.{n}': digest(getattr(v, n)) for k, v in parts.items() for n in ('x', 'y')}
    return {**arrays, **{n: str(getattr(found, n)) for n in ('classes', 'mean', 'std')}}


def digest(a: Any) -> str:
    """Dtype, shape and 16 digits of BLAKE2b of an array.

    >>> digest(np.zeros((2, 3), np.uint8)) == digest(np.zeros((3, 2), np.uint8))
    False
    """
    a = np.ascontiguousarray(a)
    found = hashlib.blake2b(a.reshape(-1).view(np.uint8), digest_size=8).hexdigest()
    return f'{a.dtype}{list(a.shape)} {found}'


def check_workdir(team: Team, workdir: Path) -> None:
    """Has process 0 leave a file in its workdir, for all to see; all must call it.

    Raises:
      TeamError: if one does not see the file or may not write beside it; the message names it.
    """
    if not team.watch:
        return
    names, mark = team.watch.names, workdir / f'.seen-by-all-{secrets.token_hex(8)}'
    if team.index == 0:
        mark.touch()
    own = mark.name, str(workdir.absolute()), socket.gethostname()
    name, folder, host = team.share(own)[0]
    problems = team.share(_problem(workdir / name))
    if team.index == 0:
        mark.unlink(missing_ok=True)
    for i, problem in enumerate(problems):
        if problem:
            raise TeamError(
                f'{names[i]} {problem} the workdir of {names[0]}, {folder} on {host}; '
                'give all processes the same --workdir, on a file system that all of them share'
            )


def _problem(mark: Path) -> str:
    """What this process cannot do where process 0 has left ``mark``; empty if nothing."""
    end = time.monotonic() + PATIENCE
    while not mark.exists():
        if time.monotonic() > end:
            return 'does not see'
        time.sleep(0.1)
    return '' if os.access(mark.parent, os.W_OK) else 'cannot write to'
