"""Starts the processes of a run on this machine, and sees that none outlives the others.

    python -m jaxmp.launch --processes 4 -- python train.py --config.runtime=mpmd

Each process gets ``--coordinator``, ``--processes`` and ``--process`` behind its command, and all
get one random secret in the environment, by which they know each other. Process 0 has the terminal;
Ctrl-C and SIGTERM ask all of them to save and stop.
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
import time
from collections.abc import Sequence
from pathlib import Path

from jaxmp.rendezvous import TOKEN

PATIENCE = 60.0  # seconds for the others to end after the first has failed


def free_port() -> int:
    """A port that is free and whose next one is free too."""
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
    """This machine's NVIDIA GPUs, or those of them that ``CUDA_VISIBLE_DEVICES`` leaves."""
    if (left := os.environ.get('CUDA_VISIBLE_DEVICES')) is not None:
        return [name for name in left.split(',') if name]
    return [str(i) for i, _ in enumerate(Path('/proc/driver/nvidia/gpus').glob('*'))]


def own_gpus(found: Sequence[str], processes: int, process: int) -> dict[str, str]:
    """What a process's environment gets so that no two use one GPU; nothing if there are too few.

    >>> own_gpus(['0', '1', '2', '3'], 2, 1)
    {'CUDA_VISIBLE_DEVICES': '2,3'}
    >>> own_gpus(['0'], 2, 1)
    {}
    """
    each = len(found) // processes
    own = ','.join(found[process * each : (process + 1) * each])
    return {'CUDA_VISIBLE_DEVICES': own} if own else {}


def start(command: Sequence[str], processes: int, port: int) -> list[subprocess.Popen]:
    """Starts ``processes`` copies of ``command``, each with its place behind it."""
    found, token = gpus(), {TOKEN: os.environ.get(TOKEN) or secrets.token_hex(16)}
    team = [*command, f'--coordinator=127.0.0.1:{port}', f'--processes={processes}']
    return [
        subprocess.Popen(
            [*team, f'--process={i}'],
            env={**os.environ, **token, **own_gpus(found, processes, i)},
            start_new_session=True,
            preexec_fn=_die_with_parent,
            stdin=None if i == 0 else subprocess.DEVNULL,
            stdout=None if i == 0 else subprocess.DEVNULL,
        )
        for i in range(processes)
    ]


def watch(running: Sequence[subprocess.Popen], asked: Sequence[int]) -> int:
    """Waits for all to end; the first failure gives the others a minute.

    Args:
      running: the processes.
      asked: signals that came; the first is passed on, and starts the minute too.

    Returns:
      The exit status: 0, that of the first failure, or 128 + its signal.
    """
    first, deadline, told = 0, None, False
    while True:
        alive = any(p.poll() is None for p in running)
        if asked and not told:
            told, deadline = True, time.monotonic() + PATIENCE
            _signal(running, signal.SIGTERM)
        failed = [(p.returncode, i) for i, p in enumerate(running) if p.poll()]
        if failed and not first:
            deadline = time.monotonic() + PATIENCE
            first, i = min(failed)  # who was killed (a negative status) did not follow another
            if not told:
                print(f'launch: process {i} {ending(first)}', file=sys.stderr)
        if not alive:
            return 128 - first if first < 0 else first
        if deadline and time.monotonic() > deadline:
            left = [i for i, p in enumerate(running) if p.poll() is None]
            print(f'launch: killed processes {left}, still there after a minute', file=sys.stderr)
            _signal(running, signal.SIGKILL)
            deadline = None
        time.sleep(0.1)


def ending(code: int) -> str:
    """How a process ended, in words.

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
        prog='python -m jaxmp.launch', description='Starts the processes of a run.'
    )
    parser.add_argument('--processes', type=int, required=True, help='how many')
    parser.add_argument('--port', type=int, help="the coordinator's; the next one is used too")
    parser.add_argument('command', nargs='+', help='-- python train.py ...')
    given = parser.parse_args(argv)
    if given.processes < 1:
        parser.error(f'--processes {given.processes}: give 1 or more')
    asked: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: asked.append(n))
    try:
        running = start(given.command, given.processes, given.port or free_port())
    except OSError as error:
        print(
            f'launch: cannot start {given.command[0]}: {error.strerror or error}; give a program '
            'behind --, such as: -- python train.py --config.runtime=mpmd',
            file=sys.stderr,
        )
        return 127
    try:
        return watch(running, asked)
    finally:
        _signal([p for p in running if p.poll() is None], signal.SIGKILL)


if __name__ == '__main__':
    sys.exit(main())
