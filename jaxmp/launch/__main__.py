"""`jaxmp launch`: start of all processes of a run on this machine, which also end together.

    jaxmp launch --processes 4 -- python train.py --config.parallel.runtime=mpmd

The command of each process is extended by ``--coordinator``, ``--processes`` and ``--process``. All
processes get the same random secret in the environment, by which they authenticate each other.
Process 0 has the terminal. After Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 all processes save their state
and stop; a second Ctrl-C ends them at once. If one fails, the others are ended within 10 seconds.
Each process has a group of its own with all that it starts, such as the program behind a shell; no
group outlives the launcher.

If the command has ``--back=SECONDS``, a process that was killed is started again, up to
``--restarts`` times, and the others wait for it.

With ``--elastic`` the processes are the replicas of an elastic run. The launcher has their switch,
and starts a process again that was killed; the others go on meanwhile.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import math
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxmp.launch import guard
from jaxmp.launch.signals import leave_closed_terminal, stopping
from jaxmp.net.address import TOKEN, ProcessGroupError, secret
from jaxmp.net.keys import keys_of
from jaxmp.net.switch import Switch
from jaxmp.terminal import SAID

PATIENCE = 60.0  # seconds in which all processes must save and end after a signal
NOTICE = 6.0  # seconds after a failure in which the others say why they end, before SIGTERM


def free_port() -> int:
    """A free port of which the next port is free too.

    It is below 32768, from where on the system takes ports for connections, so that none of these
    has taken it until a process listens there.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_000, 2), 100):
        with socket.socket() as a, socket.socket() as b, contextlib.suppress(OSError):
            a.bind(('127.0.0.1', port))
            b.bind(('127.0.0.1', port + 1))
            return port
    raise OSError('no two free ports in a row on this machine')


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
    visible = ','.join(devices[process * each : (process + 1) * each])
    return {'CUDA_VISIBLE_DEVICES': visible} if visible else {}


class Group(NamedTuple):
    """What all processes of a run have in common.

    Attributes:
      command: the command that they run.
      processes: their number.
      port: of process 0, or of the launcher's switch.
      token: their secret.
    """

    command: Sequence[str]
    processes: int
    port: int
    token: str


def group_of(command: Sequence[str], processes: int, port: int) -> Group:
    """A group with the secret in the environment, or else a new one."""
    return Group(command, processes, port, secret(None) or secrets.token_hex(16))


def start(group: Group, i: int) -> subprocess.Popen:
    """Starts process i of a group, with the flags of its place in it."""
    flags = f'--coordinator=127.0.0.1:{group.port}', f'--processes={group.processes}'
    return subprocess.Popen(
        [*group.command, *flags, f'--process={i}'],
        env={**os.environ, TOKEN: group.token, **own_gpus(gpus(), group.processes, i)},
        start_new_session=True,
        stdin=None if i == 0 else subprocess.DEVNULL,
        stdout=None if i == 0 else subprocess.DEVNULL,
    )


def waits(command: Sequence[str]) -> bool:
    """Whether the processes of a command wait for one that was killed.

    >>> waits(['train.py', '--back=60']), waits(['train.py', '--back', '0']), waits(['train.py'])
    (True, False, False)
    """
    back = re.search(r' --?back[= ](\S*)', ' '.join(command))
    return bool(back) and back[1].strip('0.') != ''


def _say(text: str) -> None:
    print(f'jaxmp launch: {text}', file=sys.stderr, flush=True)


def watch(
    running: list[subprocess.Popen],
    asked: Sequence[int],
    again: Callable[[int], subprocess.Popen] | None = None,
    restarts: int = 0,
    elastic: bool = False,
) -> int:
    """Waits for all processes to end, and for what they have started.

    After a signal they have one minute to save; a second Ctrl-C ends them at once. After a failure
    the others get SIGTERM, and are killed if that does not end them; in an elastic run they go on.

    Args:
      running: the processes.
      asked: signals received so far; the first one is passed on as SIGTERM.
      again: starts a process with a number, where one that was killed may come back.
      restarts: how often each process is started again.
      elastic: whether the others go on without a process.

    Returns:
      The exit status: 0, that of the first process that failed and was not started again, or 128 +
      its signal.
    """
    left, failed, first, stop = [restarts] * len(running), set(), 0, False
    term = kill = math.inf  # when all get SIGTERM, and SIGKILL
    while True:
        # Before the failures are read, so that one that comes meanwhile is read in the next round.
        alive, now = any(p.poll() is None for p in running), time.monotonic()
        if asked and not stop:
            stop, term, kill = True, now, min(kill, now + PATIENCE)
        # A killed process (negative status) comes first: it is a cause, not an effect.
        for code, i in sorted((p.returncode, i) for i, p in enumerate(running) if p.poll()):
            if i in failed or (failed and not elastic):
                continue
            restart = again if code < 0 and left[i] > 0 and not asked else None
            then = f'; started again, {left[i] - 1} times more at most' if restart else ''
            if not asked:
                _say(f'process {i} {ending(code)}{then or "; left out" * elastic}')
            if again and not asked:
                _signal([running[i]], signal.SIGKILL)  # what it has started
            if restart:
                left[i] -= 1
                running[i], alive = restart(i), True
                continue
            failed.add(i)
            first = first or code
            if not (elastic or stop):
                term, kill = now + NOTICE, now + guard.GRACE
        if not alive:
            if kill == -math.inf or not any(map(has_members, running)):
                return 128 - first if first < 0 else first
            if kill == math.inf:  # the command has ended, and not what it has started
                term, kill = now, now + guard.GRACE
        if now >= term:
            _signal(running, signal.SIGTERM)
            term = math.inf
        twice = asked.count(signal.SIGINT) > 1
        if kill > -math.inf and (now >= kill or twice):
            _kill(running, 'the second Ctrl-C' if twice else 'the time to save and end')
            kill = -math.inf
        time.sleep(0.1)


def has_members(process: subprocess.Popen) -> bool:
    """Whether a process runs, or something that it has started."""
    if process.poll() is None:
        return True
    with contextlib.suppress(ChildProcessError):  # as process 1 of a container, it has orphans
        while os.waitpid(-process.pid, os.WNOHANG)[0]:
            pass
    return guard.sent(process.pid, 0)


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
        guard.sent(p.pid, number)


def _kill(running: Sequence[subprocess.Popen], after: str) -> None:
    late = [i for i, p in enumerate(running) if has_members(p)]
    _say(f'killed processes {late}, which were still running after {after}')
    _signal(running, signal.SIGKILL)


def _guard() -> subprocess.Popen:
    """Starts `jaxmp.launch.guard`, without the modules of this package, which take seconds."""
    return subprocess.Popen(
        [sys.executable, '-IS', guard.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        bufsize=1,
    )


def _signals() -> list[int]:
    """A list to which signals that end the run are appended."""
    asked: list[int] = []

    def note(number: int, _: object) -> None:
        leave_closed_terminal()
        asked.append(number)

    for number in stopping():
        signal.signal(number, note)
    return asked


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='jaxmp launch', description='Start the processes of a run on this machine.'
    )
    parser.add_argument('--processes', type=int, required=True, help='number of processes')
    parser.add_argument('--port', type=int, help='port of process 0; the next one is used too')
    parser.add_argument('--elastic', action='store_true', help='replicas that may come and go')
    parser.add_argument(
        '--restarts', type=int, default=3, help='of a killed process, with --elastic or --back'
    )
    parser.add_argument('--start-timeout', help='seconds in which all processes have to come')
    parser.add_argument('command', nargs='+', help='-- python train.py ...')
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f'{unknown[0]} is no option of launch; those of the command stand behind --')
    if args.processes < 1:
        parser.error(f'--processes {args.processes}: give 1 or more')
    if args.port is not None and not 0 < args.port < 65535:
        parser.error(f'--port {args.port}: give a port from 1 to 65534')
    asked = _signals()
    started = [f'--start-timeout={args.start_timeout}'] if args.start_timeout else []
    group = group_of([*args.command, *started], args.processes, args.port or free_port())
    if args.elastic:
        try:
            Switch(keys_of(group.token), '127.0.0.1', group.port, _say)
        except ProcessGroupError as error:
            parser.error(str(error))
    watcher, running = _guard(), []
    os.environ[SAID] = tempfile.mkdtemp(prefix='jaxmp-')  # so also of those that it starts
    atexit.register(shutil.rmtree, os.environ[SAID], ignore_errors=True)

    def again(i: int) -> subprocess.Popen:
        process = start(group, i)
        with contextlib.suppress(OSError):  # somebody has killed it
            print(process.pid, file=watcher.stdin)
        return process

    try:
        for i in range(args.processes):
            running.append(again(i))
    except OSError as error:
        watcher.kill()
        print(
            f'jaxmp launch: cannot start {args.command[0]}: {error.strerror or error}; give a '
            'program after --, such as: -- python train.py --config.parallel.runtime=mpmd',
            file=sys.stderr,
        )
        return 127
    try:
        returns = args.elastic or waits(args.command)
        return watch(running, asked, again if returns else None, args.restarts, args.elastic)
    finally:
        _signal([p for p in running if has_members(p)], signal.SIGKILL)
        watcher.kill()
        watcher.wait()


if __name__ == '__main__':
    sys.exit(main())
