"""The progress of a run or of a loop, as a bar on a terminal or as lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

T = TypeVar('T')
BAR, WIDE = 20, 90  # columns of a bar, and of a terminal that has one


class Display:
    """A display of progress, time left, scores and speed.

    On a terminal it is a line with a bar, and a narrow one shows the first parts of it; elsewhere
    it prints a line at most every ten seconds.
    """

    def __init__(
        self, total: int, done: int, quiet: bool = False, examples: int = 0, tokens: int = 0
    ) -> None:
        """Starts the display.

        Args:
          total: number of steps of the whole run.
          done: number of steps already done.
          quiet: show nothing.
          examples: number of examples per step; 0 shows no speed.
          tokens: number of tokens per step; 0 where the input is of numbers.
        """
        self._console = Console(stderr=True, quiet=quiet)
        more = [BarColumn(BAR), TimeElapsedColumn()] * (self._console.width >= WIDE)
        columns = TextColumn('{task.description}'), *more
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task('start  compiling', total=total, completed=done)
        self._total, self._sizes = total, (examples, tokens)
        self._start: tuple[float, int] | None = None
        self._mark: tuple[float, int] | None = None
        self._last = time.time()
        if self._console.is_terminal:
            self._bar.start()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context, such as an evaluation, whose time does not count in the speed."""
        start = time.time()
        yield
        if self._mark:
            self._mark = self._mark[0] + time.time() - start, self._mark[1]

    def update(self, name: str, step: int, parts: Sequence[str]) -> None:
        """Shows where ``step`` is, the time left, and further parts, the most important first."""
        now = time.time()
        self._start, self._mark = self._start or (now, step), self._mark or (now, step)
        steps, timed = step - self._start[1], step - self._mark[1]
        if steps:  # the first one, which compiles, tells nothing of the time of others
            left = (self._total - step) * (now - self._start[0]) / steps
            parts = [f'{duration(left)} left', *parts]
        if timed and any(self._sizes):
            parts = [*parts, speed((now - self._mark[0]) / timed, *self._sizes)]
        if name != (count := f'step {step}/{self._total}'):
            parts = [*parts, count]
        if self._console.is_terminal:
            room = self._console.width - 1 - (BAR + 9) * (len(self._bar.columns) > 1)
            while sum(len(part) + 2 for part in parts) + len(name) > room:
                parts = parts[:-1]
            self._bar.update(self._task, completed=step, description='  '.join([name, *parts]))
        elif now - self._last > 10 and steps:
            self._last = now
            self.say('  '.join([name, *parts]))

    def say(self, text: str) -> None:
        """Prints a line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def close(self) -> None:
        """Removes the bar."""
        if self._console.is_terminal:
            self._bar.stop()


def speed(seconds: float, examples: int, tokens: int) -> str:
    """The speed of steps of some seconds: these if they are long, and tokens or examples.

    >>> speed(12.5, 4, 512), speed(12.5, 4, 0), speed(0.5, 64, 0)
    ('12.5 s/step  41 tokens/s', '12.5 s/step  0.32 ex/s', '128 ex/s')
    """
    count, unit = (tokens, 'tokens') if tokens else (examples, 'ex')
    rate = f'{count / seconds:,.{0 if count >= seconds else 2}f} {unit}/s'
    return f'{seconds:.3g} s/step  {rate}' if seconds > 1 else rate


def tracked(items: Sequence[T], name: str) -> Iterator[T]:
    """The items, while standard error shows how far a loop over them is and the time left."""
    with closing(Display(len(items), 0)) as display:
        for done, item in enumerate(items, 1):
            yield item
            display.update(name, done, [])


def duration(seconds: float) -> str:
    """``seconds`` as h:mm:ss or m:ss.

    >>> duration(75)
    '1:15'
    """
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f'{hours}:{m:02}:{s:02}' if hours else f'{m}:{s:02}'
