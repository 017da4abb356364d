"""`Clock`, which ends a probe in time and tells its progress, and `timed`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

PASSES = 5  # of a timed function after the first, which compiles; the median counts


class Clock(NamedTuple):
    """The time of a probe: seconds in all, its start, and where progress is told."""

    seconds: float
    start: float
    tell: Callable[[str], None]

    def spent(self, share: float = 1.0) -> bool:
        """Whether this share of the time is over."""
        return time.monotonic() > self.start + share * self.seconds

    def say(self, text: str) -> None:
        """Tells progress."""
        self.tell(f'[{time.monotonic() - self.start:4.0f} s] {text}')


def timed(run: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds until the result is there, and the result."""
    jax.block_until_ready([a for a in args if isinstance(a, jax.Array)])
    start = time.monotonic()
    result = jax.block_until_ready(run(*args))
    return time.monotonic() - start, result
