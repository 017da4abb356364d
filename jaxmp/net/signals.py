"""The signals after which a run saves its state and ends, and a terminal that is gone."""

from __future__ import annotations

import errno
import os
import signal
import termios
from collections.abc import Sequence

# SIGHUP: the terminal is closed. SIGUSR1: Slurm's --signal, ahead of the time limit.
STOP = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1


def stopping() -> list[signal.Signals]:
    """Those of `STOP` that this process listens to: `nohup` makes it ignore SIGHUP, which stays."""
    return [n for n in STOP if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def leave_closed_terminal(outputs: Sequence[int] = (1, 2)) -> None:
    """Sends what goes to a closed terminal to nowhere; to write there would end the process.

    Args:
      outputs: file descriptors.
    """
    for output in outputs:
        try:
            termios.tcgetattr(output)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # of a file or a pipe it is ENOTTY
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, output)
                os.close(nowhere)
