"""Faults that no test makes, in four processes, and what the processes say.

python bench/faults.py [process-0] [memory] [returns] [stopped] [paused] [cut] [gap]

Linux; `cut` and `gap` need root, for network namespaces. Each fault starts the README's four
processes, waits for the first epoch, makes the fault, and prints after how many seconds the
processes that were not hit had ended, and what was said. Exit status 1 if one is left two minutes
later, or, after `returns`, `paused` and `gap`, if the run does not go on. docs/faults.md is its
output.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, NamedTuple

import emulated_network

from jaxmp.training.summary import provenance

ROOT = Path(__file__).resolve().parent.parent
COUNT, LIMIT, PAUSE = 4, 120.0, 40.0


def kill(pid: int) -> None:
    """Ends the process at once."""
    os.kill(pid, signal.SIGKILL)


def starve(pid: int) -> None:
    """Leaves the process a megabyte of address space more than it has."""
    held = int(Path(f'/proc/{pid}/statm').read_text().split()[0]) * resource.getpagesize()
    limit = held + 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


def stop(pid: int) -> None:
    """Stops the process, which stays there."""
    os.kill(pid, signal.SIGSTOP)


def pause(pid: int) -> None:
    """Stops the process for less than the deadline."""
    stop(pid)
    time.sleep(PAUSE)
    os.kill(pid, signal.SIGCONT)


def cut(pid: int) -> None:
    """Loses every packet between the last namespace and the one before, without a word."""
    del pid
    last = COUNT - 1
    for s, device, other in ((last - 1, 'right', last), (last, 'left', last - 1)):
        nobody = (
            f'neigh replace {emulated_network.address(other)} lladdr 02:00:00:00:00:01 dev {device}'
        )
        words = ['ip', '-n', f'{emulated_network.PREFIX}{s}', *nobody.split(), 'nud', 'permanent']
        subprocess.run(words, check=True)


def gap(pid: int) -> None:
    """The same for less than the deadline."""
    cut(pid)
    time.sleep(PAUSE)
    last = COUNT - 1
    for s, device, other in ((last - 1, 'right', last), (last, 'left', last - 1)):
        words = f'-n {emulated_network.PREFIX}{s} neigh del {emulated_network.address(other)}'
        subprocess.run(['ip', *words.split(), 'dev', device], check=True)


class Fault(NamedTuple):
    """A fault: the process it hits, what it does, whether the run goes on, where, further flags."""

    process: int
    make: Callable[[int], None]
    goes_on: bool = False
    hosts: bool = False
    flags: tuple[str, ...] = ()


FAULTS = {
    'process-0': Fault(0, kill),
    'memory': Fault(2, starve),
    'returns': Fault(2, kill, goes_on=True, flags=('--back=60',)),
    'stopped': Fault(2, stop),
    'paused': Fault(2, pause, goes_on=True),
    'cut': Fault(COUNT - 1, cut, hosts=True),
    'gap': Fault(COUNT - 1, gap, goes_on=True, hosts=True),
}


@contextlib.contextmanager
def started(workdir: str, fault: Fault, log: IO[str]) -> Iterator[list[subprocess.Popen]]:
    """The run: a launcher's processes on this machine, or a process in each namespace of a lab."""
    run = [sys.executable, str(ROOT / 'train.py'), f'--workdir={workdir}']
    run += ['--config.parallel.runtime=mpmd', '--config.epochs=100', *fault.flags]
    with contextlib.ExitStack() as stack:
        if fault.hosts:
            made = stack.enter_context(emulated_network.lab(COUNT))
            place = [f'--coordinator={emulated_network.address(0)}:9876', f'--processes={COUNT}']
            commands = [made.inside(i, *run, *place, f'--process={i}') for i in range(COUNT)]
        else:
            launch = [sys.executable, '-m', 'jaxmp.launch', '--processes', str(COUNT), '--']
            commands = [[*launch, *run]]
        env = {**os.environ, 'JAXMP_TOKEN': os.urandom(16).hex()}
        running = [subprocess.Popen(c, stdout=log, stderr=log, cwd=ROOT, env=env) for c in commands]
        try:
            yield running
        finally:
            for pid in pids(workdir):
                kill(pid)
            for process in running:
                process.wait()


def pids(workdir: str, process: str = '[0-9]') -> list[int]:
    """The processes of the run, or one of them; not what starts them."""
    pattern = rf'^\S*python\S* \S*train.py .*{workdir}.*--process={process}$'
    found = subprocess.run(['pgrep', '-f', pattern], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def step(workdir: str) -> int:
    """The last checkpoint's."""
    names = [p.name for p in Path(workdir).glob('checkpoints/*')]
    return max((int(n) for n in names if n.isdigit()), default=0)


def until(condition: Callable[[], bool], limit: float) -> float:
    """Waits for ``condition``; seconds that it took, at most ``limit``."""
    began = time.monotonic()
    while not condition() and time.monotonic() - began < limit:
        time.sleep(0.1)
    return time.monotonic() - began


def check(name: str) -> bool:
    """Makes the fault and prints what came of it; whether that is what should."""
    fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as workdir, tempfile.TemporaryFile('w+') as log:
        with started(workdir, fault, log) as running:
            until(lambda: bool(step(workdir)), 300)
            [victim], before = pids(workdir, str(fault.process)), step(workdir)
            fault.make(victim)
            spared = set() if fault.hosts else {victim}
            left = lambda: set(pids(workdir)) - spared
            if fault.goes_on:
                seconds = until(lambda: step(workdir) > before or not left(), LIMIT)
                fine = step(workdir) > before
                running[0].terminate()
                until(lambda: not left(), LIMIT)
            else:
                seconds = until(lambda: not left(), LIMIT)
                fine = not left()
                until(lambda: all(p.poll() is not None for p in running), LIMIT)
        status = ', '.join(sorted({str(p.returncode) for p in running}))
        log.seek(0)
        said = [
            line
            for line in log.read().splitlines()
            if re.match(r'train\.py: |jaxmp launch: |resuming |.* waits ', line)
        ]
        came = f'The next checkpoint {seconds:.1f} s after it' if fault.goes_on else (
            f'{"All" if fault.hosts else "The others"} ended after {seconds:.1f} s'
        )  # fmt: skip
        print(f'## {name}: process {fault.process}\n\n{came}, status {status}.\n')
        print('\n'.join(f'    {line}' for line in said), '\n', flush=True)
        return fine


if __name__ == '__main__':
    print('# What the remaining processes print after a fault\n')
    print('The output of `python bench/faults.py`, four processes, on')
    print('{hardware}, commit {commit}.\n'.format(**provenance()))
    ended = [check(name) for name in sys.argv[1:] or FAULTS]
    sys.exit(0 if all(ended) else 1)
