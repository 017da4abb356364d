"""Processes and their switch are killed, stopped and hang: the same bits follow, or a sentence."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from jaxmp.launch.__main__ import free_port
from tests.base import ROOT

WORKER = str(ROOT / 'tests' / 'net_worker.py')
COUNT = 3


class Processes:
    """A switch, and processes that train, each with a file of what it says."""

    def __init__(self, folder, inside=lambda name: [], port=None, **options):
        self.folder, self.options = folder, [f'{k}={v}' for k, v in options.items()]
        self.inside, self.host = inside, options.get('host', '127.0.0.1')
        self.snapshots = folder / 'snapshots'
        self.snapshots.mkdir()
        self.port = str(port or free_port())
        self.running = {}
        for name in ('switch', *range(COUNT)):
            self.start(name)

    def start(self, name, *options):
        """Starts the switch or a process, perhaps again."""
        env = {**os.environ, 'JAXMP_TOKEN': 'secret'}
        if name == 'switch':
            command = ['switch', '--address', f'{self.host}:{self.port}']
        else:
            command = [str(name), str(COUNT), self.port, str(self.snapshots)]
            command += [*self.options, *options]
        with open(self.folder / str(name), 'a') as out:
            self.running[name] = subprocess.Popen(
                [*self.inside(name), sys.executable, WORKER, *command],
                stdout=out,
                stderr=out,
                env=env,
            )

    def signal(self, name, number):
        """Sends a signal; a killed process is waited for."""
        self.running[name].send_signal(number)
        if number == signal.SIGKILL:
            self.running[name].wait(10)

    def text(self, name):
        """What a process has said."""
        return (self.folder / str(name)).read_text()

    def step(self, name):
        """The last step of a process."""
        return max([0, *map(int, re.findall(r'^step (\d+)$', self.text(name), re.MULTILINE))])

    def reach(self, step, names=range(COUNT)):
        """Waits for a step of some processes."""
        self.until(lambda: all(self.step(name) >= step for name in names))

    def until(self, condition, limit=40):
        """Waits for a condition."""
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, {n: self.text(n)[-600:] for n in self.running}
            time.sleep(0.02)

    def digests(self, names=range(COUNT), limit=60):
        """The states at the end, when all have ended without an error."""
        self.until(lambda: all(self.running[n].poll() is not None for n in names), limit)
        assert [self.running[n].returncode for n in names] == [0] * len(names), self.texts()
        return [re.findall(r'^digest (\w+)$', self.text(n), re.MULTILINE)[-1] for n in names]

    def endings(self, names, limit):
        """The errors of processes that end within a limit, and after how long."""
        start = time.monotonic()
        self.until(lambda: all(self.running[n].poll() is not None for n in names), limit)
        assert not any('Traceback' in self.text(n) for n in names), self.texts()
        said = [re.findall('^ended: (.*)$', self.text(n), re.MULTILINE)[-1] for n in names]
        return said, time.monotonic() - start

    def texts(self):
        """What all have said, at the end of it."""
        return {name: self.text(name)[-800:] for name in self.running}

    def close(self):
        """Ends all."""
        for process in self.running.values():
            process.kill()
            process.wait()


@pytest.fixture
def begin(tmp_path):
    made = []
    yield lambda **options: made.append(Processes(tmp_path, **options)) or made[-1]
    for processes in made:
        processes.close()


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The states at the end of a run in which nothing happens."""
    processes = Processes(tmp_path_factory.mktemp('undisturbed'))
    try:
        return processes.digests()
    finally:
        processes.close()


def killed(p, *names, at=12, again=True):
    """Kills some at a step; those that are started again take their place."""
    p.reach(at)
    for name in names:
        p.signal(name, signal.SIGKILL)
    for name in names if again else ():
        p.start(name)


def stopped(p, name, seconds, at=12):
    """Stops a process for some seconds."""
    p.reach(at)
    p.signal(name, signal.SIGSTOP)
    time.sleep(seconds)
    p.signal(name, signal.SIGCONT)


def killed_thrice(p):
    for at in (8, 25, 40):
        killed(p, 'switch', at=at)


def killed_at_the_start(p):
    p.until(lambda: 'view' in p.text('switch'))
    killed(p, 1, at=0)


def killed_before_the_view(p):
    p.signal(2, signal.SIGKILL)
    p.signal('switch', signal.SIGKILL)
    time.sleep(1)
    p.start('switch')
    p.start(2)


def killed_while_it_saves(p):
    p.until(lambda: (p.snapshots / '10.1').exists())
    killed(p, 1, at=0)


def killed_one_by_one(p):
    for name in range(COUNT):
        killed(p, name, at=12 + 15 * name)


def hung(p):
    """Its heartbeats go on; it is given up, ends, and is started again."""
    p.signal(1, signal.SIGKILL)
    p.start(1, 'hang=17')
    p.until(lambda: p.running[1].poll() is not None)
    p.start(1)


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)
FAULTS = {
    'a process killed': lambda p: killed(p, 1),
    'the switch killed': lambda p: killed(p, 'switch'),
    'the first process killed': lambda p: killed(p, 0),
    'two processes killed': lambda p: killed(p, 0, 2),
    'all processes killed': lambda p: killed(p, 0, 1, 2),
    'a process and the switch killed': lambda p: killed(p, 1, 'switch'),
    'the switch killed thrice': killed_thrice,
    'one after another killed': killed_one_by_one,
    'killed at the start': killed_at_the_start,
    'killed before the first view': killed_before_the_view,
    'killed while it saves': killed_while_it_saves,
    'a process stopped for a while': lambda p: stopped(p, 1, 2.5),
    'a process stopped for too long': lambda p: stopped(p, 1, 9),
    'the switch stopped for a while': lambda p: stopped(p, 'switch', 2.5),
    'a process hangs': hung,
}


@pytest.mark.parametrize('fault', [k if i < 2 else slow(k) for i, k in enumerate(FAULTS)])
def test_the_run_goes_on_to_the_same_bits(begin, undisturbed, fault):
    processes = begin(direct='no' if 'switch' in fault else 'yes')
    FAULTS[fault](processes)
    assert processes.digests() == undisturbed
    if fault == 'the switch killed':  # messages that it lost go again, and nobody repeats a step
        assert 'goes on at a new switch' in processes.text('switch')
        assert all('changed' not in processes.text(i) for i in range(COUNT))
    if fault == 'a process hangs':
        owed = 'process 1 .stage 1. has done nothing since .* and owes process . .* of'
        assert re.search(f'ended: {owed}', processes.text(1))
        assert re.search(f'changed: {owed}', processes.text(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ('name', 'number', 'limit', 'sentence'),
    [
        (1, signal.SIGKILL, 14, r'process 1 \(stage 1\) has lost its connection: it was killed, '
         r'ran out of memory, or the network failed, at \S+; nobody came in its place within 8 s; '
         'the same command goes on from the last checkpoint'),
        (1, signal.SIGSTOP, 16, r'process 1 \(stage 1\) was silent for 4 s: it is suspended, hangs '
         r'or swaps, or the network failed, at \S+; nobody came in its place within 8 s; '
         'the same command goes on from the last checkpoint'),
        ('switch', signal.SIGKILL, 8, 'the switch at .* has not answered since .* .4 s.: it is '
         'stopped, swaps, or the network failed'),
        ('switch', signal.SIGSTOP, 8, 'the switch at .* has not answered since .* .4 s.: it is '
         'stopped, swaps, or the network failed'),
    ],
)  # fmt: skip
def test_a_sentence_says_what_does_not_return(begin, name, number, limit, sentence):
    processes = begin(direct='no', silent=4, back=8)
    processes.reach(12)
    processes.signal(name, number)
    said, seconds = processes.endings([i for i in range(COUNT) if i != name], limit)
    assert all(re.fullmatch(sentence, text) for text in said), said
    assert seconds > 3


NAMESPACES = f'jaxmp-test-{os.getpid()}-a', f'jaxmp-test-{os.getpid()}-b'
HOSTS = '10.99.0.1', '10.99.0.2'


def ip(words):
    """Runs `ip`."""
    subprocess.run(['ip', *words.split()], check=True, capture_output=True)


def can_make_namespaces():
    """Whether this machine lets this user make network namespaces."""
    if not shutil.which('ip') or os.geteuid():
        return False
    made = subprocess.run(['ip', 'netns', 'add', NAMESPACES[0]], capture_output=True).returncode
    subprocess.run(['ip', 'netns', 'delete', NAMESPACES[0]], capture_output=True)
    return made == 0


@contextlib.contextmanager
def two_hosts():
    """Two hosts that reach each other."""
    a, b = NAMESPACES
    try:
        for name in NAMESPACES:
            ip(f'netns add {name}')
        ip(f'-n {a} link add link0 type veth peer name link0 netns {b}')
        for name, own in zip(NAMESPACES, HOSTS, strict=True):
            ip(f'-n {name} address add {own}/24 dev link0')
            for device in ('lo', 'link0'):
                ip(f'-n {name} link set {device} up')
        yield
    finally:
        for name in NAMESPACES:
            subprocess.run(['ip', 'netns', 'delete', name], capture_output=True)


def leave_one_port(port):
    """From now on the second host reaches one port of the first, and the first none."""
    a, b = NAMESPACES
    for name, other, end in ((a, HOSTS[1], 'sport'), (b, HOSTS[0], 'dport')):
        ip(f'-n {name} rule add pref 10 to {other} ipproto tcp {end} {port} lookup main')
        ip(f'-n {name} rule add pref 20 to {other} ipproto tcp blackhole')


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason='network namespaces need root and Linux')
def test_one_open_port_of_one_host_is_enough(tmp_path, undisturbed):
    """The switch and process 0 are on one host, the others on another."""
    inside = lambda name: ['ip', 'netns', 'exec', NAMESPACES[name in (1, 2)]]
    port = free_port()
    with two_hosts():
        leave_one_port(port)
        way = f'ip -n {NAMESPACES[1]} route get {HOSTS[0]} ipproto tcp dport'.split()
        assert not subprocess.run([*way, str(port)], capture_output=True).returncode
        assert subprocess.run([*way, str(port - 1)], capture_output=True).returncode
        processes = Processes(tmp_path, inside, port, host=HOSTS[0])
        try:
            assert processes.digests() == undisturbed
        finally:
            processes.close()
