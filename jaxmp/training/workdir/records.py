"""`Records`: the file ``metrics.jsonl`` of a run, one line per epoch and test, and callbacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from jaxmp.training.workdir.locks import WorkdirError, write
from jaxmp.training.workdir.trackers import Callback, Record

KEYS = ('kind', 'step', 'epoch', 'loss')  # keys that each record must have


def read(path: Path) -> list[Record]:
    """The records of a metrics file; an incomplete last line is dropped.

    Raises:
      WorkdirError: if the file cannot be read, or another line is not a record.
    """
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise WorkdirError(f'cannot read {path}: {error}; give a new --workdir') from error
    if lines and not lines[-1].endswith('}'):
        lines.pop()
    return [_record(line, f'{path}, line {i}') for i, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> Record:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    missing = set(KEYS) - set(record) if isinstance(record, dict) else set(KEYS)
    if missing or not isinstance(record, dict):
        raise WorkdirError(
            f'{where} is not a record of a run, it has no {", ".join(sorted(missing))}: '
            f'{line[:60]!r}; remove the line, or give a new --workdir'
        )
    return record


class Records:
    """A writer of records to ``metrics.jsonl``, which calls the callbacks with each record."""

    def __init__(self, workdir: Path | None, step: int, callbacks: Sequence[Callback] = ()) -> None:
        """Opens the file and drops records after ``step``, which the run will write again.

        Args:
          workdir: folder of the run; None writes nothing and calls no callback.
          step: the step from which the run resumes.
          callbacks: called with each new record after it is written.

        Raises:
          WorkdirError: if the file cannot be read or written.
        """
        self.records: list[Record] = []
        self._file = None
        if workdir is None:
            return
        path = self._path = workdir / 'metrics.jsonl'
        self.records = [r for r in read(path) if r['step'] <= step]
        self._callbacks = callbacks
        text = ''.join(json.dumps(r) + '\n' for r in self.records)
        if not path.exists() or path.read_text() != text:
            write(path, text)
        self._file = path.open('ab', buffering=0)  # a failed write must not be repeated by close

    def write(self, record: Record) -> None:
        """Appends one record, which must have `KEYS`."""
        self.records.append(record)
        if self._file:
            self._append(self._file, (json.dumps(record) + '\n').encode())
            for callback in self._callbacks:
                callback(dict(record))

    def _append(self, file: RawIOBase, line: bytes) -> None:
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            raise WorkdirError(
                f'cannot write {self._path}: {error}; free space there and run the same command '
                'again'
            ) from error

    def close(self) -> None:
        """Closes the file."""
        if self._file:
            self._file.close()
