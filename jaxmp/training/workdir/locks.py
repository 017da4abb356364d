"""Files of a run's folder: a lock that admits one run at a time, and atomic writes.

The lock is `fcntl.flock` on the file ``lock``. The kernel releases it when the process ends for any
reason, and it also works between hosts on NFS and Lustre. On a file system without locks the host
and process number in the file decide: the lock of a process of this host that has ended is ignored;
a lock of another host must be removed by hand.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TextIO

from jaxmp.config import FREE, KEYS, current, flat

MAY_CHANGE = FREE | {'processes'}  # keys that may change on resume, as no result depends on them
_MINE: ContextVar[frozenset[Path]] = ContextVar('mine', default=frozenset())


class WorkdirError(RuntimeError):
    """A workdir that cannot be used; the message says what to do."""


@contextmanager
def owned(workdir: Path) -> Iterator[None]:
    """A context in which ``workdir``, created if necessary, is locked against other runs.

    A thread that already has the lock can enter again, such as a sweep that locks before it runs.

    Raises:
      WorkdirError: if the folder cannot be written, or another run uses it.
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
    """A context with the lock of ``folder``, which is created; its value is whether it was free."""
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
    """A description of the process that has the lock of ``folder``."""
    path = folder / 'lock'
    host, _, process = path.read_text().partition(' ')
    elsewhere = f' (if it has ended, remove {path})' if host != socket.gethostname() else ''
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
        pass  # a process of another user
    return True


def claim(workdir: Path, config: dict[str, Any]) -> None:
    """Checks that ``workdir`` is empty or has a run with the same configuration.

    Keys in `MAY_CHANGE` may differ. ``config.json`` is written with the first checkpoint, so that a
    run that ended before its first checkpoint does not restrict the next one.

    Args:
      workdir: folder of the run.
      config: the resolved configuration, and other values that must not change.

    Raises:
      WorkdirError: if the folder cannot be read, or has a run with another configuration.
    """
    path, config = workdir / 'config.json', json.loads(json.dumps(config))  # tuples are lists there
    try:
        old = json.loads(path.read_text()) if path.exists() else config
    except (OSError, ValueError) as error:
        raise WorkdirError(f'cannot read {path}: {error}; give a new --workdir') from error
    if not isinstance(old, dict):
        raise WorkdirError(
            f'{path} contains {json.dumps(old)[:40]}, not the settings of a run; give a new '
            '--workdir'
        )
    defaults = {name: key.default for name, key in KEYS.items()}  # for keys that old runs lack
    try:
        old, now = defaults | current(flat(old)), defaults | flat(config)
    except ValueError as error:
        raise WorkdirError(
            f'{path}: {error}; convert it with python results/migrate.py {path}, or give a new '
            '--workdir'
        ) from None
    clash = [k for k in {**old, **now} if k not in MAY_CHANGE and old.get(k) != now.get(k)]
    if clash:
        raise WorkdirError(
            f'{workdir} has a run with other settings: '
            + ', '.join(f'{k}={old.get(k)!r} (now {now.get(k)!r})' for k in clash)
            + '; give the same settings to resume it, or a new --workdir'
        )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A context with a temporary path for a file or folder that replaces ``path`` at the end.

    If writing fails for any reason, the old content of ``path`` remains.

    Raises:
      WorkdirError: if writing fails.
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
            f'cannot write {path}: {error}; free space or make its folder writable, and run the '
            'same command again'
        ) from error
    finally:
        with contextlib.suppress(OSError):
            _remove(part)


def check_writable(folder: Path, flag: str) -> None:
    """Raises ValueError unless files can be written into a folder, which is made if missing."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f'{flag}: cannot write into {folder.absolute()} ({error}); give another folder'
        ) from error


def write(path: Path, text: str) -> None:
    """Replaces the file ``path`` by ``text``; see `replacing`."""
    with replacing(path) as part:
        part.write_text(text)


def write_json(path: Path, value: object) -> None:
    """Replaces the file ``path`` by ``value`` as JSON; see `replacing`."""
    write(path, json.dumps(value, indent=1) + '\n')


def _sync(path: Path) -> None:
    """Waits until a file is on the disk; a full disk may be reported only here."""
    if path.is_file():
        with path.open('rb') as file:
            os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
