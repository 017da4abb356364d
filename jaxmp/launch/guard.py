"""A script, beside a launcher: ends what the launcher has started if the launcher is killed.

Its input has a line with a process group for each process; it ends when the launcher does.
"""

import contextlib
import os
import signal
import sys
import time

GRACE = 9.0  # seconds from SIGTERM to SIGKILL


def end(groups: list[int], grace: float = GRACE) -> None:
    """Sends SIGTERM to process groups, and SIGKILL to what is left of them after ``grace``."""
    deadline = time.monotonic() + grace
    groups = [g for g in groups if sent(g, signal.SIGTERM)]
    while groups and time.monotonic() < deadline:
        time.sleep(0.1)
        groups = [g for g in groups if sent(g, 0)]
    for group in groups:
        sent(group, signal.SIGKILL)


def sent(group: int, number: int) -> bool:
    """Whether there is a process in ``group``, which then gets signal ``number`` (0: nothing)."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        return True
    return False


if __name__ == '__main__':
    end([int(line) for line in sys.stdin])
