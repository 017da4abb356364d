"""The files of a run's folder: a lock for one run at a time, and writes that are whole or nothing.

The lock is `fcntl.flock` on the file ``lock``, which ends with the process, however it ends, and
holds on NFS and Lustre between hosts, too. On a file system without it the host and process in the
file decide: a dead process of this host counts for nothing, another host's must be removed by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from jaxmp.defaults import DEFAULTS

# Keys that may differ between a run and its continuation: none changes a number already computed.
FREE = (
    'runtime',
    'processes',
    'name',
    'epochs',
    'data_dir',
    'download',
    'checkpoint_every',
    'tensorboard',
)
_MINE: ContextVar[frozenset[Path]] = ContextVar('mine', default=frozenset())


class WorkdirError(RuntimeError):
    """A workdir that cannot be used; the message says what to do."""


@contextmanager
def owned(workdir: Path) -> Iterator[None]:
    """Makes ``workdir`` and keeps every other run out of it.

    A thread that holds the lock already may have it, as a sweep that locks before it runs.

    Raises:
      WorkdirError: if the folder cannot be written, or another run works in it.
    """
    with ExitStack() as stack:
        try:
            mine = workdir.resolve() in _MINE.get() or stack.enter_context(locked(workdir))
        except OSError as error:
            raise WorkdirError(
                f'cannot use the workdir {workdir}: {error}; give a --workdir that is a writable '
                'folder'
            ) from error
        if not mine:
            raise WorkdirError(
                f'{workdir} is in use by {holder(workdir)}; wait until that run has ended, or give '
                'another --workdir'
            )
        yield


@contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Whether nobody else works in ``folder``, which is made; the lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / 'lock').open('a+') as file:
        if not _take(file):
            yield False
            return
        file.truncate(0)
        file.write(f'{socket.gethostname()} {os.getpid()}')
        file.flush()
        token = _MINE.set(_MINE.get() | {folder.resolve()})
        try:
            yield True
        finally:
            _MINE.reset(token)
            file.truncate(0)


def holder(folder: Path) -> str:
    """The process that the lock of ``folder`` names."""
    path = folder / 'lock'
    host, _, process = path.read_text().partition(' ')
    elsewhere = f' (if that is dead, remove {path})' if host != socket.gethostname() else ''
    return f'process {process} on {host}{elsewhere}' if process else 'another process'


def _take(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:  # a file system without locks
        file.seek(0)
        host, _, process = file.read().partition(' ')
        return not process.isdigit() or (host == socket.gethostname() and not _alive(int(process)))
    return True


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def claim(workdir: Path, config: dict[str, Any]) -> None:
    """Checks that what ``workdir`` holds, if anything, is a run of the same configuration.

    Keys in `FREE` may change. ``config.json`` is written with the first checkpoint: a start that
    left nothing to go on with does not bind the next one.

    Args:
      workdir: the run's folder.
      config: the resolved configuration, and what else must not change.

    Raises:
      WorkdirError: if the folder cannot be read or holds a run of another configuration.
    """
    path = workdir / 'config.json'
    try:
        old = json.loads(path.read_text()) if path.exists() else config
    except (OSError, ValueError) as error:
        raise WorkdirError(f'cannot read {path}: {error}; give a new --workdir') from error
    if not isinstance(old, dict):
        raise WorkdirError(
            f'{path} holds {json.dumps(old)[:40]}, not the settings of a run; give a new --workdir'
        )
    old, now = {**DEFAULTS, **old}, {**DEFAULTS, **config}  # of keys that an older run lacks
    clash = [k for k in {**old, **now} if k not in FREE and old.get(k) != now.get(k)]
    if clash:
        raise WorkdirError(
            f'{workdir} holds a run with other settings: '
            + ', '.join(f'{k}={old.get(k)!r} (now {now.get(k)!r})' for k in clash)
            + '; repeat those settings to go on with it, or give a new --workdir'
        )


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write a file or folder to, which takes its place at the end.

    What stood there stays if the writing fails, whatever the reason.

    Raises:
      WorkdirError: if the file system refuses.
    """
    part = path.with_name(f'{path.name}.part')
    try:
        _remove(part)
        yield part
        _sync(part)
        if part.is_dir() and path.is_dir():
            _remove(path)
        part.replace(path)
    except OSError as error:
        raise WorkdirError(
            f'cannot write {path}: {error}; make room or mend its folder, and give the same '
            'command again'
        ) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(part)


def write(path: Path, text: str) -> None:
    """Replaces the file ``path`` by ``text``; see `whole`."""
    with whole(path) as part:
        part.write_text(text)


def write_json(path: Path, value: Any) -> None:
    """Replaces the file ``path`` by ``value`` as JSON; see `whole`."""
    write(path, json.dumps(value, indent=1) + '\n')


def _sync(path: Path) -> None:
    """Waits until a file is on the disk, which may find only now that it is full."""
    if path.is_file():
        with path.open('rb') as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
