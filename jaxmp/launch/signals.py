"""How a process ends: signals, a terminal that is gone, no memory left."""

from __future__ import annotations

import errno
import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxmp.terminal import command

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


def end_without_memory(name: str) -> None:
    """Makes a MemoryError in any thread end the process; by default only the thread ends."""
    text = f'{command()}: {name}: MemoryError, out of memory\n'.encode()

    def ending(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def hook(args: Any) -> None:
            if args.exc_type is MemoryError:  # allocate nothing; the others detect the exit
                os.write(2, text)
                os._exit(1)
            plain(args)

        return hook

    sys.unraisablehook = ending(sys.unraisablehook)
    threading.excepthook = ending(threading.excepthook)
