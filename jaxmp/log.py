"""What a run tells: records in metrics.jsonl, progress on the terminal, the closing table."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from jaxmp.files import WorkdirError, write

KEYS = ('kind', 'step', 'epoch', 'loss', 'accuracy')  # of every record


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line cut off by a kill is dropped.

    Raises:
      WorkdirError: if it cannot be read, or another line is no record.
    """
    try:
        lines = path.read_text().splitlines() if path.exists() else []
    except (OSError, ValueError) as error:
        raise WorkdirError(f'cannot read {path}: {error}; give a new --workdir') from error
    if lines and not lines[-1].endswith('}'):
        lines.pop()
    return [_record(line, f'{path}, line {i}') for i, line in enumerate(lines, 1)]


def _record(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    missing = set(KEYS) - set(found) if isinstance(found, dict) else set(KEYS)
    if missing or not isinstance(found, dict):
        raise WorkdirError(
            f'{where} is no record of a run, it lacks {", ".join(sorted(missing))}: {line[:60]!r}; '
            'remove the line, or give a new --workdir'
        )
    return found


class Metrics:
    """Appends records to ``metrics.jsonl``, and to TensorBoard if asked."""

    def __init__(self, workdir: Path | None, step: int, tensorboard: bool = False) -> None:
        """Opens the file, dropping records after ``step``: they will be made again.

        Args:
          workdir: the run's folder; None keeps nothing.
          step: the step that the run goes on from.
          tensorboard: also write event files under ``workdir/tensorboard``.

        Raises:
          ImportError: if TensorBoard is asked for and its extra is not installed.
          WorkdirError: if the file cannot be read or written.
        """
        self.records: list[dict[str, Any]] = []
        self._file = self._board = None
        if workdir is None:
            return
        path = self._path = workdir / 'metrics.jsonl'
        self.records = [r for r in read(path) if r['step'] <= step]
        self._board = _board(workdir) if tensorboard else None
        text = ''.join(json.dumps(r) + '\n' for r in self.records)
        if not path.exists() or path.read_text() != text:
            write(path, text)
        self._file = path.open('ab', buffering=0)  # a failed write leaves nothing for the close

    def write(self, record: dict[str, Any]) -> None:
        """Appends one record; it must hold `KEYS`."""
        self.records.append(record)
        if self._file:
            self._append(self._file, (json.dumps(record) + '\n').encode())
        if self._board:
            for name, value in record.items():
                if isinstance(value, float):
                    self._board.add_scalar(f'{record["kind"]}/{name}', value, record['step'])

    def _append(self, file: RawIOBase, line: bytes) -> None:
        try:
            while line:
                line = line[file.write(line) :]
        except OSError as error:
            raise WorkdirError(
                f'cannot write {self._path}: {error}; make room there and give the same command '
                'again'
            ) from error

    def close(self) -> None:
        """Closes the files."""
        if self._file:
            self._file.close()
        if self._board:
            self._board.close()


def _board(workdir: Path) -> Any:
    try:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            '--tensorboard needs the extra: pip install "jaxmp[tensorboard]"'
        ) from error
    return SummaryWriter(str(workdir / 'tensorboard'))


class Display:
    """Progress with loss, accuracy, examples a second and time left.

    A bar on a terminal; elsewhere a line at most every ten seconds.
    """

    def __init__(self, total: int, done: int, examples: int, quiet: bool = False) -> None:
        """Starts the display.

        Args:
          total: steps of the whole run.
          done: steps already done.
          examples: examples a step.
          quiet: show nothing.
        """
        self._console = Console(stderr=True, quiet=quiet)
        columns = TextColumn('{task.description}'), BarColumn(), TextColumn('{task.fields[now]}')
        times = TimeElapsedColumn(), TextColumn('left'), TimeRemainingColumn()
        self._bar = Progress(*columns, *times, console=self._console, transient=True)
        self._task = self._bar.add_task('start', total=total, completed=done, now='compiling')
        self._total, self._examples = total, examples
        self._start: tuple[float, int] | None = None
        self._mark: tuple[float, int] | None = None
        self._last = time.time()
        if self._console.is_terminal:
            self._bar.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What runs inside, such as an evaluation, does not count in the examples a second."""
        start = time.time()
        yield
        if self._mark:
            self._mark = self._mark[0] + time.time() - start, self._mark[1]

    def update(self, epoch: str, step: int, loss: float, accuracy: float) -> None:
        """Shows the state after ``step`` steps."""
        here = time.time(), step
        self._start, self._mark = self._start or here, self._mark or here
        now = f'loss {loss:.3f}  acc {accuracy:6.2%}  {self._rate(self._mark, here)} ex/s'
        if self._console.is_terminal:
            self._bar.update(self._task, completed=step, description=epoch, now=now)
        elif here[0] - self._last > 10 and step > self._start[1]:
            self._last = here[0]
            left = (self._total - step) * (here[0] - self._start[0]) / (step - self._start[1])
            self.say(f'{epoch}  step {step}/{self._total}  {now}  {duration(left)} left')

    def _rate(self, a: tuple[float, int], b: tuple[float, int]) -> str:
        return f'{(b[1] - a[1]) * self._examples / (b[0] - a[0]):,.0f}' if b[1] > a[1] else '...'

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Removes the bar."""
        if self._console.is_terminal:
            self._bar.stop()


def duration(seconds: float) -> str:
    """``seconds`` as h:mm:ss or m:ss.

    >>> duration(75)
    '1:15'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f'{hours}:{m:02}:{s:02}' if hours else f'{m}:{s:02}'


def quality(measure: str, scores: dict[str, Any]) -> float:
    """What is to be large: the accuracy, or the perplexity's negative logarithm."""
    return -scores['loss'] if measure == 'perplexity' else scores['accuracy']


def headline(measure: str, scores: dict[str, Any]) -> str:
    """The number of ``measure``, as shown.

    >>> headline('perplexity', {'loss': 1.0}), headline('accuracy', {'accuracy': 0.5})
    ('2.718', '50.00%')
    """
    if measure == 'perplexity':
        return f'{math.exp(min(scores["loss"], 700.0)):.4g}'
    return f'{scores["accuracy"]:.2%}'


def provenance() -> dict[str, Any]:
    """Commit, hardware and versions, for results that can be traced."""
    import jaxmp

    device = jax.devices()[0]
    kind = _cpu() if device.platform == 'cpu' else device.device_kind
    versions = {'jaxmp': jaxmp.__version__, 'jax': jax.__version__}
    versions['python'] = platform.python_version()
    count = len(os.sched_getaffinity(0)) if device.platform == 'cpu' else len(jax.devices())
    return {'commit': _commit(), 'hardware': f'{count} x {kind}', 'versions': versions}


def _cpu() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(l.split(':', 1)[1].strip() for l in lines if l.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).parent.parent
    ask = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12']
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def tables(summary: dict[str, Any]) -> list[Table]:
    """The closing tables of a summary: quality off and on, and bytes at every boundary."""
    scores = Table(title=f'{summary["name"]}: fwd {summary["fwd"]}, bwd {summary["bwd"]}')
    measure = summary['measure']
    for head in ('compression', f'{measure} best', '(epoch)', f'{measure} last', 'loss last'):
        scores.add_column(head, justify='right')
    for mode in ('off', 'on'):
        best, last = summary['test'][mode]['best'], summary['test'][mode]['last']
        row = headline(measure, best), str(best['epoch']), headline(measure, last)
        scores.add_row(mode, *row, f'{last["loss"]:.4f}')
    size = Table(title='bytes a step')
    for head in ('boundary', 'uncompressed', 'forward', 'ratio', 'backward', 'ratio '):
        size.add_column(head, justify='right')
    tied = [{'boundary': 'token table', **summary['tied']}] if 'tied' in summary else []
    for row in (*summary['bytes'], *tied):
        full, f, b = row['uncompressed'], row['forward'], row['backward']
        cells = f'{full:,}', f'{f:,}', f'{full / f:.2f}', f'{b:,}', f'{full / b:.2f}'
        size.add_row(str(row['boundary']), *cells)
    if 'exchange' in summary:
        _add_exchange(size, summary['exchange'], summary['processes'])
    links = [_moved(summary)] if 'moved' in summary and summary['processes'] > 1 else []
    return [scores, size, *links]


def _add_exchange(size: Table, found: dict[str, Any], processes: int) -> None:
    """What one replica sends to share its gradient: over a ring, and over a parameter server."""
    n, full, server = found['replicas'], found['uncompressed'], found['server']
    ring = 2 * full * (n - 1) // n
    sent = f'{found["sent"]:,}', f'{ring / found["sent"]:.2f}'
    size.add_row('gradients, ring', f'{ring:,}', *sent, '', '')
    cells = (c for way in ('up', 'down') for c in (f'{server[way]:,}', f'{full / server[way]:.2f}'))
    size.add_row('gradients, server', f'{full:,}', *cells)
    where = f' in {processes} processes' if processes > 1 else ''
    size.caption = f'of each of {n} replicas{where}; gradients by {found["text"]}; server: up, down'


def _moved(summary: dict[str, Any]) -> Table:
    """What ran over each link: payload handed over, and operands of the compiled collectives."""
    sent = f'{summary["interface"]:,}' if summary['interface'] else 'not known'
    table = Table(
        title=f'bytes a step over {summary["processes"]} processes',
        caption=f'sent on the network interfaces of process 0: {sent}',
    )
    for head in ('link', 'payload forward', 'backward', 'collectives forward', 'backward '):
        table.add_column(head, justify='right')
    for row in summary['moved']:
        cells = [*row['payload'], *row['collectives']]
        table.add_row(str(row['boundary']), *(f'{n:,}' for n in cells))
    return table


def show(summary: dict[str, Any]) -> None:
    """Prints the closing tables to standard output."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    for table in tables(summary):
        console.print(table)
