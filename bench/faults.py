"""Faults that no test makes: process 0 killed, a stage without memory; what the others say.

python bench/faults.py [process-0] [memory]

Linux. Each starts the README's four processes, waits for the first epoch, makes the fault, and
prints seconds until the last process has ended and what was said. Exit status 1 if one is left
after a minute. docs/faults.md is its output.
"""

import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxmp.log import provenance

ROOT = Path(__file__).resolve().parent.parent


def kill(pid: int) -> None:
    """Ends the process at once."""
    os.kill(pid, signal.SIGKILL)


def starve(pid: int) -> None:
    """Leaves the process a megabyte of address space more than it has."""
    held = int(Path(f'/proc/{pid}/statm').read_text().split()[0]) * resource.getpagesize()
    limit = held + 2**20
    resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))


FAULTS = {'process-0': (0, kill), 'memory': (2, starve)}


def pids(workdir: str, process: str = '[0-9]') -> list[int]:
    """The processes of the run, or one of them."""
    pattern = f'train.py .*{workdir}.*--process={process}$'
    found = subprocess.run(['pgrep', '-f', pattern], capture_output=True, text=True, check=False)
    return [int(p) for p in found.stdout.split()]


def check(name: str) -> bool:
    """Makes the fault and prints what came of it; whether all ended within a minute."""
    process, fault = FAULTS[name]
    with tempfile.TemporaryDirectory() as workdir, tempfile.TemporaryFile('w+') as log:
        run = [sys.executable, str(ROOT / 'train.py'), f'--workdir={workdir}']
        more = ['--config.runtime=mpmd', '--config.epochs=100']
        launch = [sys.executable, '-m', 'jaxmp.launch', '--processes', '4', '--']
        launcher = subprocess.Popen([*launch, *run, *more], stdout=log, stderr=log, cwd=ROOT)
        while not list(Path(workdir).glob('checkpoints/[0-9]*')) and launcher.poll() is None:
            time.sleep(0.2)
        [victim] = pids(workdir, str(process))
        began = time.monotonic()
        fault(victim)
        while pids(workdir) and time.monotonic() - began < 60:
            time.sleep(0.1)
        left, seconds = pids(workdir), time.monotonic() - began
        for pid in left:
            kill(pid)
        status = launcher.wait()
        log.seek(0)
        said = [line for line in log.read().splitlines() if re.match(r'(train\.py|launch): ', line)]
        print(
            f'## {name}: process {process}\n\nAll ended after {seconds:.1f} s, status {status}.\n'
        )
        print('\n'.join(f'    {line}' for line in said), '\n')
        return not left


if __name__ == '__main__':
    print('# What the others say\n\n`python bench/faults.py`, four processes on one machine,')
    print('{hardware}, commit {commit}.\n'.format(**provenance()))
    ended = [check(name) for name in sys.argv[1:] or FAULTS]
    sys.exit(0 if all(ended) else 1)
