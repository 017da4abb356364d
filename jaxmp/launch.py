"""`jaxmp launch`: start of all processes of a run on this machine, which also end together.

    jaxmp launch --processes 4 -- python train.py --config.parallel.runtime=mpmd

The command of each process is extended by ``--coordinator``, ``--processes`` and ``--process``. All
processes get the same random secret in the environment, by which they authenticate each other.
Process 0 has the terminal. After Ctrl-C or SIGTERM all processes save their state and stop; a
second Ctrl-C ends them at once.

With ``--elastic`` the processes are the replicas of an elastic run. The launcher is their hub, and
starts a process again that was killed; the others go on meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmp.distributed.address import TOKEN, listen
from jaxmp.distributed.hub import Hub
from jaxmp.distributed.monitor import ProcessGroupError

PATIENCE = 60.0  # seconds in which the others must end after the first has failed


def free_port() -> int:
    """A free port of which the next port is free too."""
    for _ in range(100):
        with socket.socket() as a, socket.socket() as b:
            a.bind(('127.0.0.1', 0))
            port = a.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                b.bind(('127.0.0.1', port + 1))
                return port
    raise OSError('no two free ports in a row on this machine')


def _die_with_parent() -> None:
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def gpus() -> list[str]:
    """The NVIDIA GPUs of this machine, or those in ``CUDA_VISIBLE_DEVICES`` if it is set."""
    if (left := os.environ.get('CUDA_VISIBLE_DEVICES')) is not None:
        return [name for name in left.split(',') if name]
    return [str(i) for i, _ in enumerate(Path('/proc/driver/nvidia/gpus').glob('*'))]


def own_gpus(devices: Sequence[str], processes: int, process: int) -> dict[str, str]:
    """Environment variables that give each process separate GPUs; empty if there are too few.

    >>> own_gpus(['0', '1', '2', '3'], 2, 1)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    >>> own_gpus(['0'], 2, 1)
    {}
    """
    each = len(devices) // processes
    own = ','.join(devices[process * each : (process + 1) * each])
    return {'CUDA_VISIBLE_DEVICES': own} if own else {}


class Group(NamedTuple):
    """What all processes of a run have in common.

    Attributes:
      command: the command that they run.
      processes: their number.
      port: of process 0, or of the hub.
      token: their secret.
    """

    command: Sequence[str]
    processes: int
    port: int
    token: str


def group_of(command: Sequence[str], processes: int, port: int) -> Group:
    """A group with the secret in the environment, or else a new one."""
    return Group(command, processes, port, os.environ.get(TOKEN) or secrets.token_hex(16))


def start(group: Group, i: int) -> subprocess.Popen:
    """Starts process i of a group, with the flags of its place in it."""
    flags = f'--coordinator=127.0.0.1:{group.port}', f'--processes={group.processes}'
    return subprocess.Popen(
        [*group.command, *flags, f'--process={i}'],
        env={**os.environ, TOKEN: group.token, **own_gpus(gpus(), group.processes, i)},
        start_new_session=True,
        preexec_fn=_die_with_parent,
        stdin=None if i == 0 else subprocess.DEVNULL,
        stdout=None if i == 0 else subprocess.DEVNULL,
    )


def impatient(asked: Sequence[int]) -> bool:
    """Whether Ctrl-C came a second time.

    >>> impatient([signal.SIGTERM, signal.SIGINT]), impatient([signal.SIGINT] * 2)
    (False, True)
    """
    return asked.count(signal.SIGINT) > 1


def _say(text: str) -> None:
    print(f'jaxmp launch: {text}', file=sys.stderr, flush=True)


def watch(
    running: list[subprocess.Popen],
    asked: Sequence[int],
    again: Callable[[int], subprocess.Popen] | None = None,
    restarts: int = 0,
) -> int:
    """Waits for all processes to end; after a failure or a signal the others have one minute.

    A second Ctrl-C ends them at once. In an elastic run the others go on after a failure, and
    processes that were killed are started again.

    Args:
      running: the processes.
      asked: signals received so far; the first one is passed on as SIGTERM.
      again: starts a process of an elastic run with a number; None in other runs.
      restarts: how often each process is started again.

    Returns:
      The exit status: 0, that of the first process that failed and was not started again, or 128 +
      its signal.
    """
    left, failed, first, deadline, stopping = [restarts] * len(running), set(), 0, None, False
    while True:
        # Before the failures are read, so that one that comes meanwhile is read in the next round.
        alive = any(p.poll() is None for p in running)
        if asked and not stopping:
            stopping, deadline = True, time.monotonic() + PATIENCE
            _signal(running, signal.SIGTERM)
        # A killed process (negative status) comes first: it is a cause, not an effect.
        for code, i in sorted((p.returncode, i) for i, p in enumerate(running) if p.poll()):
            if i in failed or (failed and not again):
                continue
            restart = again if code < 0 and left[i] > 0 and not asked else None
            then = f'; started again, {left[i] - 1} times more at most' if restart else '; left out'
            if not asked:
                _say(f'process {i} {ending(code)}{then if again else ""}')
            if restart:
                left[i] -= 1
                running[i], alive = restart(i), True
                continue
            failed.add(i)
            first = first or code
            deadline = deadline if again else time.monotonic() + PATIENCE
        if not alive:
            return 128 - first if first < 0 else first
        if deadline and (time.monotonic() > deadline or impatient(asked)):
            late = [i for i, p in enumerate(running) if p.poll() is None]
            after = 'the second Ctrl-C' if impatient(asked) else f'{PATIENCE:g} s'
            _say(f'killed processes {late}, which were still running after {after}')
            _signal(running, signal.SIGKILL)
            deadline = None
        time.sleep(0.1)


def ending(code: int) -> str:
    """The way in which a process ended, as text.

    >>> ending(-9), ending(1)
    ('was killed by SIGKILL', 'ended with status 1')
    """
    if code < 0:
        return f'was killed by {signal.Signals(-code).name}'
    return f'ended with status {code}'


def _signal(running: Sequence[subprocess.Popen], number: int) -> None:
    for p in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, number)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='jaxmp launch', description='Start the processes of a run on this machine.'
    )
    parser.add_argument('--processes', type=int, required=True, help='number of processes')
    parser.add_argument('--port', type=int, help='port of process 0; the next one is used too')
    parser.add_argument('--elastic', action='store_true', help='replicas that may come and go')
    parser.add_argument('--restarts', type=int, default=3, help='of each process, with --elastic')
    parser.add_argument('command', nargs='+', help='-- python train.py ...')
    args = parser.parse_args(argv)
    if args.processes < 1:
        parser.error(f'--processes {args.processes}: give 1 or more')
    if args.port is not None and not 0 < args.port < 65535:
        parser.error(f'--port {args.port}: give a port from 1 to 65534')
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: asked.append(n))
    group = group_of(args.command, args.processes, args.port or free_port())
    again = lambda i: start(group, i)
    hub = None
    if args.elastic:
        try:
            server = listen('127.0.0.1', group.port)
        except ProcessGroupError as error:
            parser.error(str(error))
        hub = Hub(server, group.processes, group.token, say=_say)
        threading.Thread(target=hub.serve, daemon=True).start()
    try:
        running = [again(i) for i in range(args.processes)]
    except OSError as error:
        print(
            f'jaxmp launch: cannot start {args.command[0]}: {error.strerror or error}; give a '
            'program after --, such as: -- python train.py --config.parallel.runtime=mpmd',
            file=sys.stderr,
        )
        return 127
    try:
        return watch(running, asked, again if hub else None, args.restarts)
    finally:
        _signal([p for p in running if p.poll() is None], signal.SIGKILL)


if __name__ == '__main__':
    sys.exit(main())
