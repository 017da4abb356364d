"""Stages of a run are killed, stopped and cut off: the same bits follow, or a sentence."""

import functools
import json
import os
import re
import signal
import subprocess
import time

import pytest

from jaxmp.launch.__main__ import free_port
from tests.base import ENV
from tests.runs import LAUNCH, command, pids, records, text_of, wait_for_steps
from tests.test_net_faults import (
    HOSTS,
    NAMESPACES,
    can_make_namespaces,
    leave_one_port,
    two_hosts,
)

COUNT, STEPS, EVERY = 4, 16, 4
CHANGES = {
    'runtime': 'mpmd',
    'num_microbatches': 2,
    'fwd': 'ef21(uniform(2))',
    'bwd': 'ef(uniform(4))',
    'steps': STEPS,
    'eval_every': f'{2 * EVERY} steps',
    'checkpoint_every': f'{EVERY} steps',
}


@pytest.fixture(scope='module')
def compiled(tmp_path_factory):
    """The environment of all runs, which share compiled programs."""
    cache = {'JAX_COMPILATION_CACHE_DIR': str(tmp_path_factory.mktemp('compiled'))}
    cache |= {'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0'}
    return {**ENV, **cache, 'JAXMP_TOKEN': 'secret'}


class Run:
    """Processes of `train.py`, each with a file of what it says."""

    def __init__(self, folder, env, changes=CHANGES, inside=lambda i: [], **flags):
        self.folder, self.env, self.changes, self.inside = folder, env, changes, inside
        flags = {'silent': 5, 'back': 60, 'processes': COUNT, **flags}
        place = {'coordinator': f'127.0.0.1:{free_port()}', **flags}
        self.flags = [f'--{k}={v}' for k, v in place.items()]
        self.workdir, self.running = folder / 'run', {}
        for i in range(flags['processes']):
            self.start(i)

    def start(self, i):
        """Starts a process, perhaps again."""
        own = '--spare' if i == 'spare' else f'--process={i}'
        words = [*command(self.workdir, **self.changes), *self.flags, own]
        with open(self.folder / str(i), 'a') as out:
            self.running[i] = subprocess.Popen(
                [*self.inside(i), *words], stdout=out, stderr=out, env=self.env
            )

    def kill(self, *numbers, again=True):
        """Kills processes, which are started again at once."""
        assert all(self.running[i].poll() is None for i in numbers), 'the run has ended before'
        for i in numbers:
            self.running[i].kill()
        for i in numbers:
            self.running[i].wait(10)
            if again:
                self.start(i)

    def stop(self, i, seconds):
        """Stops a process for some seconds."""
        self.running[i].send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.running[i].send_signal(signal.SIGCONT)

    def text(self, i):
        """What a process has said."""
        return (self.folder / str(i)).read_text()

    def until(self, condition, limit=90):
        """Waits for a condition."""
        end = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < end, {i: self.text(i)[-800:] for i in self.running}
            time.sleep(0.002)

    def saved(self):
        """The step of the last checkpoint."""
        names = [p.name for p in (self.workdir / 'checkpoints').glob('*')]
        return max((int(n) for n in names if n.isdigit()), default=0)

    def reach(self, step):
        """Waits for a checkpoint."""
        self.until(lambda: self.saved() >= step)

    def saving(self):
        """Whether a checkpoint is being written."""
        return any('tmp' in p.name for p in (self.workdir / 'checkpoints').glob('*'))

    def end(self):
        """Waits until all have ended without an error."""
        self.until(lambda: all(p.poll() is not None for p in self.running.values()))
        codes = [p.returncode for p in self.running.values()]
        assert not any(codes), {i: self.text(i)[-800:] for i in self.running}

    def endings(self, limit):
        """The lines with which those end that still run, within a limit."""
        self.until(lambda: all(p.poll() is not None for p in self.running.values()), limit)
        assert not any('Traceback' in self.text(i) for i in self.running)
        left = [i for i, p in self.running.items() if p.returncode != -signal.SIGKILL]
        return [re.findall('^train.py: (.*)$', self.text(i), re.MULTILINE)[-1] for i in left]

    def close(self):
        """Ends all."""
        for process in self.running.values():
            process.kill()
            process.wait()


def outcome(workdir):
    """All that a run has measured, and checksums of its last state."""
    *_, last = sorted(workdir.glob('checkpoints/*'), key=lambda p: int(p.name))
    about = json.loads((last / 'place' / 'metadata').read_text())
    return records(workdir), about['crc32'], about['large']


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, compiled):
    """What a run gives to which nothing happens."""
    run = Run(tmp_path_factory.mktemp('undisturbed'), compiled)
    try:
        run.end()
        return outcome(run.workdir)
    finally:
        run.close()


def killed(*numbers, at=EVERY):
    def fault(run):
        run.reach(at)
        run.kill(*numbers)

    return fault


def killed_one_by_one(run):
    for i in range(COUNT):
        run.reach((1 + i) * EVERY - EVERY)
        time.sleep(0.2)
        run.kill(i)
        run.until(lambda i=i: 'resuming' in run.text(0) or i == 0)


def killed_while_it_starts(run):
    run.until((run.workdir / 'lock').exists)
    run.kill(2)


def killed_before_all_are_there(run):
    time.sleep(0.5)
    run.kill(0, 3)


def killed_while_it_saves(*numbers):
    def fault(run):
        run.reach(EVERY)
        run.until(run.saving)
        run.kill(*numbers)

    return fault


def stopped(i, seconds):
    def fault(run):
        run.reach(EVERY)
        run.stop(i, seconds)

    return fault


FAULTS = {
    'a process killed': killed(2),
    'the first process, and the switch in it, killed': killed(0),
    'the last process killed': killed(3),
    'two neighbours killed': killed(1, 2),
    'the first and the last killed': killed(0, 3),
    'all killed': killed(0, 1, 2, 3),
    'one after another killed': killed_one_by_one,
    'killed while it starts': killed_while_it_starts,
    'killed before all are there': killed_before_all_are_there,
    'killed while it saves': killed_while_it_saves(0),
    'killed while another saves': killed_while_it_saves(2),
    'killed after the last step': killed(2, at=STEPS),
    'stopped for a while': stopped(1, 2.5),
    'stopped for too long': stopped(1, 9),
    'the switch stopped for a while': stopped(0, 2.5),
    'the switch stopped for too long': stopped(0, 9),
}


@pytest.mark.slow
@pytest.mark.parametrize('fault', FAULTS)
def test_all_go_on_to_the_same_bits(tmp_path, compiled, undisturbed, fault):
    run = Run(tmp_path, compiled)
    try:
        FAULTS[fault](run)
        run.end()
    finally:
        run.close()
    assert outcome(run.workdir) == undisturbed


LATE = {**CHANGES, 'delay': 2, 'correction': 'predict(0.5)', 'clip_norm': 0.5}


@pytest.fixture(scope='module')
def late(tmp_path_factory, compiled):
    """What a run gives whose pipeline is never emptied, and to which nothing happens."""

    @functools.cache
    def undisturbed(by_stage):
        changes = {**LATE, 'delay_by_stage': by_stage}
        run = Run(tmp_path_factory.mktemp('late'), compiled, changes)
        try:
            run.end()
            return outcome(run.workdir)
        finally:
            run.close()

    return undisturbed


LATE_FAULTS = (
    'a process killed', 'the first process, and the switch in it, killed',
    'the last process killed', 'killed while another saves',
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fault', 'by_stage'),
    [*((f, False) for f in LATE_FAULTS), *((f, True) for f in LATE_FAULTS[::2])],
)
def test_late_gradients_go_on_to_the_same_bits(tmp_path, compiled, late, fault, by_stage):
    """Batches are under way when a process is killed, by stage of several numbers."""
    run = Run(tmp_path, compiled, {**LATE, 'delay_by_stage': by_stage})
    try:
        FAULTS[fault](run)
        run.end()
    finally:
        run.close()
    assert outcome(run.workdir) == late(by_stage)


@pytest.mark.slow
def test_a_spare_process_takes_the_part_of_one_that_does_not_come_back(
    tmp_path, compiled, undisturbed
):
    run = Run(tmp_path, compiled, back=20)
    try:
        run.start('spare')
        run.reach(EVERY)
        run.kill(2, again=False)
        lost = run.running.pop(2)
        run.end()
    finally:
        run.close()
    assert lost.returncode == -signal.SIGKILL
    assert outcome(run.workdir) == undisturbed
    assert 'process 2 (stage 2) has lost its connection' in run.text(0)


@pytest.mark.slow
def test_a_stage_of_a_replica_comes_back(tmp_path, compiled):
    """Two replicas of two stages, which meet every second step; one run is not disturbed."""
    exchange = {'replicas': 2, 'exchange': 'diloco(2, all_gather(ef(one_bit)))'}
    runs = []
    try:
        for name in ('whole', 'disturbed'):
            (tmp_path / name).mkdir()
            runs.append(Run(tmp_path / name, compiled, {**CHANGES, **exchange, 'model': 'lenet'}))
            runs[0].end()
        runs[1].reach(EVERY)
        runs[1].kill(2)
        runs[1].end()
    finally:
        for run in runs:
            run.close()
    assert outcome(runs[0].workdir) == outcome(runs[1].workdir)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_namespaces(), reason='network namespaces need root and Linux')
def test_neighbours_that_are_cut_off_go_by_the_switch(tmp_path, compiled, undisturbed):
    """Stages 0 and 1 are on one host, 2 and 3 on another, which then reaches the switch alone."""
    inside, port = lambda i: ['ip', 'netns', 'exec', NAMESPACES[i // 2]], free_port()
    with two_hosts():
        run = Run(tmp_path, compiled, inside=inside, coordinator=f'{HOSTS[0]}:{port}')
        try:
            run.reach(EVERY)
            leave_one_port(port)
            run.end()
        finally:
            run.close()
    assert outcome(run.workdir) == undisturbed
    assert 'until all are there' not in run.text(0), 'nobody repeats a step'


LOST = 'has lost its connection: it was killed, ran out of memory, or the network failed'
NOBODY = 'nobody came in its place within 4 s; the same command goes on from the last checkpoint'
SENTENCES = [
    (2, signal.SIGKILL, 12, rf'process 2 \(stage 2\) {LOST}, at \S+; {NOBODY}'),
    (0, signal.SIGKILL, 12, rf'process 0 \(stage 0\) {LOST}, at \S+; {NOBODY}'),
    (1, signal.SIGSTOP, 16, r'process 1 \(stage 1\) was silent for 5 s: it is suspended, hangs or '
     rf'swaps, or the network failed, at \S+; {NOBODY}'),
    (0, signal.SIGSTOP, 16, r'process 0 \(stage 0\) has not answered since \S+ \(9 s\): it is '
     'stopped, swaps, or the network failed'),
]  # fmt: skip


def check_sentence(run, i, number, limit, sentence):
    """A process gets a signal, and all others end with the sentence within the limit."""
    try:
        run.reach(EVERY)
        lost = run.running.pop(i)
        lost.send_signal(number)
        began, said = time.monotonic(), run.endings(limit)
        assert time.monotonic() - began > 3
    finally:
        lost.kill()
        lost.wait()
        run.close()
    for text in said:
        assert re.fullmatch(rf'process \d \(stage \d\): stopped: {sentence}', text), said


@pytest.mark.slow
@pytest.mark.parametrize(('i', 'number', 'limit', 'sentence'), SENTENCES)
def test_a_sentence_says_who_does_not_come_back(tmp_path, compiled, i, number, limit, sentence):
    check_sentence(Run(tmp_path, compiled, back=4), i, number, limit, sentence)


# With two stages; the second case is in the quick tier, as two of tests/test_net_faults.py are.

PAIR = {**CHANGES, 'model': 'lenet', 'steps': 2 * EVERY}


@pytest.mark.slow
def test_a_sentence_says_that_one_of_two_does_not_come_back(tmp_path):
    env, [_, number, limit, _] = {**ENV, 'JAXMP_TOKEN': 'secret'}, SENTENCES[0]
    sentence = rf'process 1 \(stage 1\) {LOST}, at \S+; {NOBODY}'
    run = Run(tmp_path, env, PAIR, processes=2, back=4)
    check_sentence(run, 1, number, limit, sentence)


@pytest.mark.slow
def test_the_others_are_waited_for_as_long_as_the_command_says(tmp_path):
    env, flags = {**ENV, 'JAXMP_TOKEN': 'secret'}, {'start-timeout': 1.5, 'processes': 1}
    run = Run(tmp_path, env, {**PAIR, 'model': 'tests.tiny_stages:build'}, **flags | {'back': 0})
    run.close()
    run.flags = [f.replace('processes=1', 'processes=3') for f in run.flags]
    run.start(0)
    try:
        [said] = run.endings(30)
    finally:
        run.close()
    assert 'process 1 (stage 1) and process 2 (stage 2) did not connect within 1.5 s' in said


@pytest.mark.slow
@pytest.mark.parametrize('late', [0, 1])
def test_a_sentence_says_which_stage_hangs(tmp_path, late):
    """And not the one before, which waits for it."""
    changes = {**CHANGES, 'model': 'tests.tiny_stages:stuck', 'clip_norm': 1.0, 'delay': late}
    changes |= {'eval_every': f'{STEPS} steps', 'checkpoint_every': f'{STEPS} steps'}
    env = {**ENV, 'JAXMP_TOKEN': 'secret'}
    run = Run(tmp_path, env, changes, processes=3, back=4)
    try:
        lost = run.running.pop(1)
        said = run.endings(60)
    finally:
        lost.kill()
        lost.wait()
        run.close()
    idle = lambda i: f'process {i} (stage {i}) has done nothing since'
    for text in said:  # the next one may be named too, if each of them waits for the other
        assert idle(1) in text
        assert idle(0) not in text


@pytest.mark.slow
def test_the_launcher_starts_a_stage_again(tmp_path):
    """One of the runs is not disturbed."""
    folders, running = [tmp_path / name for name in ('a', 'b')], []
    for folder in folders:
        words = [*LAUNCH, *command(folder, **PAIR), '--back=60']
        pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        running.append(subprocess.Popen(words, env=ENV, **pipes))
    wait_for_steps(running[1], folders[1], EVERY)
    [victim] = pids(folders[1], 1)
    os.kill(victim, signal.SIGKILL)
    (_, whole), (said, code) = map(text_of, running)
    assert (whole, code) == (0, 0), said[-2000:]
    assert 'process 1 was killed by SIGKILL; started again, 2 times more at most' in said
    assert 'waits 60 s at most until all are there' in said
    assert 'resuming from step 4 of' in said
    assert outcome(folders[0]) == outcome(folders[1])
