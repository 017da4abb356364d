"""The progress of a run or of a loop, as a bar on a terminal or as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxmp.metrics import Metric, Scores

T = TypeVar('T')


class Display:
    """A display of progress, loss, metric, examples per second and remaining time.

    On a terminal it is a bar; elsewhere it prints a line at most every ten seconds.
    """

    def __init__(
        self, metric: Metric, total: int, done: int, examples: int, quiet: bool = False
    ) -> None:
        """Starts the display.

        Args:
          metric: the metric that is shown beside the loss.
          total: number of steps of the whole run.
          done: number of steps already done.
          examples: number of examples per step.
          quiet: show nothing.
        """
        self._console = Console(stderr=True, quiet=quiet)
        columns = TextColumn('{task.description}'), BarColumn(), TextColumn('{task.fields[now]}')
        times = TimeElapsedColumn(), TextColumn('left'), TimeRemainingColumn()
        self._bar = Progress(*columns, *times, console=self._console, transient=True)
        self._task = self._bar.add_task('start', total=total, completed=done, now='compiling')
        self._metric, self._total, self._examples = metric, total, examples
        self._start: tuple[float, int] | None = None
        self._mark: tuple[float, int] | None = None
        self._last = time.time()
        if self._console.is_terminal:
            self._bar.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context, such as an evaluation, whose time does not count in examples per second."""
        start = time.time()
        yield
        if self._mark:
            self._mark = self._mark[0] + time.time() - start, self._mark[1]

    def update(self, epoch: str, step: int, scores: Scores) -> None:
        """Shows the mean scores of the epoch after ``step`` steps."""
        here = time.time(), step
        self._start, self._mark = self._start or here, self._mark or here
        value = f'{self._metric.name} {self._metric.format(scores)}'
        now = f'loss {scores["loss"]:.3f}  {value}  {self._rate(self._mark, here)} ex/s'
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


def tracked(items: Sequence[T], name: str) -> Iterator[T]:
    """The items, while standard error shows how far a loop over them is and the time left.

    On a terminal it is a bar; elsewhere a line at most every ten seconds. The first item, which
    compiles, tells nothing of the time that others take.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        columns = TextColumn('{task.description}'), BarColumn(), TimeElapsedColumn()
        left = TextColumn('left'), TimeRemainingColumn()
        with Progress(*columns, *left, console=console, transient=True,
                      speed_estimate_period=1e9) as bar:  # fmt: skip
            yield from bar.track(items, description=name)
        return
    start = last = time.time()
    for done, item in enumerate(items):
        now = time.time()
        start = now if done == 1 else start
        if done > 1 and now - last > 10:
            last, left = now, (len(items) - done) * (now - start) / (done - 1)
            line = f'{name}: {done} of {len(items)}, {duration(left)} left'
            console.print(line, highlight=False, soft_wrap=True)
        yield item


def duration(seconds: float) -> str:
    """``seconds`` as h:mm:ss or m:ss.

    >>> duration(75)
    '1:15'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f'{hours}:{m:02}:{s:02}' if hours else f'{m}:{s:02}'
