"""Processes of a run: they find each other or say who is missing, and end together."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmp.data import Dataset, Split
from jaxmp.launch import __main__ as launch
from jaxmp.launch import guard
from jaxmp.net import address, connect
from jaxmp.net.address import ProcessGroupError
from jaxmp.net.connect import Address, names_of
from jaxmp.net.group import ALONE, LONG, ProcessGroup
from jaxmp.net.views import Terms
from jaxmp.runtimes import world
from jaxmp.training import agreement, loop, parallel
from jaxmp.training import together as together_
from jaxmp.training.elastic import run as elastic
from jaxmp.training.experiment import experiment_of
from jaxmp.training.fingerprint import fingerprint, own_files
from jaxmp.training.loop import process_group_of
from jaxmp.training.trainer import Trainer
from tests import one_port
from tests.base import ENV, ROOT
from tests.runs import (
    LAUNCH,
    config_of,
    damage_newest,
    pids,
    records,
    start,
    text_of,
    wait_for_steps,
)

NAMES = names_of([0, 1, 2, 2])
REPLICAS = {'runtime': 'local', 'replicas': 2, 'exchange': 'mean'}
ABOUT = {'lr': 0.1, 'jaxmp': '1'}


def together(*calls):
    """What calls give that wait for each other, or the text of their TeamErrors."""
    got = [None] * len(calls)

    def run(i, call):
        try:
            got[i] = call()
        except ProcessGroupError as error:
            got[i] = str(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return got


@pytest.fixture
def three():
    """Three processes that have met, in threads of this one."""
    with connect.processes(3, silent=20.0) as groups:
        yield groups


@pytest.fixture
def processes(monkeypatch):
    """``process -> group``: `connect` in this process; causes that would end it are listed."""
    port, causes = launch.free_port(), []
    monkeypatch.setattr(connect, 'end', lambda name, seconds, why: causes.append(why))

    def met(process, count=2, about=ABOUT, token='secret'):
        monkeypatch.setenv(address.TOKEN, token)
        place = Address(f'127.0.0.1:{port}', count, process)
        return connect.connect(place, range(4), about)

    met.causes = causes
    return met


def test_processes_meet_at_the_first(processes):
    groups = together(lambda: processes(1), lambda: processes(0))
    assert [g.index for g in groups] == [1, 0]
    assert [g.names for g in groups] == [names_of([0, 0, 1, 1])] * 2
    assert together(*(lambda g=g: g.share(g.index) for g in groups)) == [[0, 1]] * 2
    for g in groups:
        g.begin(3)
    rows = [b'a' * 100, b'b' * 7]
    plain = lambda pieces: list(map(bytes, pieces))
    swap = lambda g: [bytes(row) for row in g.swapped([1, 0], 'x', rows[g.index])]
    assert together(*(lambda g=g: swap(g) for g in groups)) == [rows[::-1]] * 2
    both = [[row, b'c'] for row in rows]
    first, second = (lambda g=g: g.to_first(both[g.index]) for g in groups[::-1])
    gathered, none = together(first, second)
    assert [*map(plain, gathered)] == both
    assert none is None
    given = lambda g: plain(g.from_first(None if g.index else both))
    assert together(*(lambda g=g: given(g) for g in groups[::-1])) == both
    assert groups[0].address('x')[1:] == (3, 'x 2')
    assert together(*(g.close for g in groups)) == [None] * 2
    assert not processes.causes


def test_settings_and_numbers_of_processes_are_compared(processes):
    said = together(lambda: processes(0), lambda: processes(1, about={**ABOUT, 'lr': 0.2}))
    assert said[0] == said[1], said
    assert re.search(
        r'process \d .* was started with lr=0\.\d \(first: 0\.\d\); start all', said[0]
    )
    assert processes.causes == said


def test_a_port_in_use_is_named():
    """That of the processes, and the one of JAX's own group."""
    port = launch.free_port()
    own = Address(f'127.0.0.1:{port}', 2, 0)
    group = SimpleNamespace(index=0, peer=True)
    for use in (lambda: connect.connect(own, range(4), ABOUT), lambda: world.start_jax(own, group)):
        with (
            socket.create_server(('', port)),
            pytest.raises(ProcessGroupError, match=rf'port {port} cannot be used.*another'),
        ):
            use()


def test_where_process_0_listens(monkeypatch):
    """At the coordinator's address; at all where that is not this machine's, or only loopback."""
    found = {'localhost': '127.0.0.1', '127.0.0.1': '127.0.0.1', 'debian': '127.0.1.1'}
    found |= {'far': '192.0.2.77'}

    def look_up(host, port, **_):
        if host not in found:
            raise socket.gaierror(-2, 'Name or service not known')
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, '', (found[host], port))]

    monkeypatch.setattr(socket, 'getaddrinfo', look_up)
    where = {host: address.own_address(host) for host in (*found, 'nobody')}
    assert where == {
        'localhost': '127.0.0.1', '127.0.0.1': '127.0.0.1',
        'debian': '', 'far': '', 'nobody': '',
    }  # fmt: skip
    for own in ('127.0.0.1', ''):
        with world.listen(own, 0) as server:
            assert (server.getsockname()[0] in ('::', '0.0.0.0')) == (not own)


def test_hosts_need_a_secret(tmp_path, monkeypatch):
    """From a file or the environment; on one machine it may be missing."""
    monkeypatch.delenv(address.TOKEN, raising=False)
    with pytest.raises(
        ProcessGroupError, match='same secret text, by the environment variable JAX'
    ):
        connect.connect(Address('10.77.77.1:9000', 2, 0), range(4), ABOUT)
    monkeypatch.setenv(address.TOKEN, ' \r')
    with pytest.raises(ProcessGroupError, match='any machine that reaches 10'):
        address.token_of(None, '10.77.77.1')
    assert len(launch.group_of(['train.py'], 2, 9999).token) == 32
    monkeypatch.delenv(address.TOKEN)
    (tmp_path / 'token').write_text('\ufeff of a file\r\n', encoding='utf-8')
    (tmp_path / 'empty').write_text('\ufeff\r\n', encoding='utf-8')
    assert address.secret(None) == ''
    monkeypatch.setenv(address.TOKEN, ' of the environment\r')
    assert address.secret(None) == 'of the environment'
    assert address.secret(str(tmp_path / 'token')) == 'of a file'
    for name, problem in (('empty', 'is empty'), ('missing', 'cannot read the token file')):
        with pytest.raises(ProcessGroupError, match=problem):
            address.secret(str(tmp_path / name))


def test_the_launcher_makes_a_secret(monkeypatch):
    """All processes have it, another one each time, and no command line shows it."""
    monkeypatch.delenv(address.TOKEN, raising=False)
    monkeypatch.setattr(launch.subprocess, 'Popen', lambda words, env, **_: (words, env))
    told = []
    for _ in range(2):
        group = launch.group_of(['train.py'], 2, 9999)
        for words, env in (launch.start(group, i) for i in range(2)):
            told.append(env[address.TOKEN])
            assert '127.0.0.1:9999' in words[1]
            assert not any(told[-1] in word for word in words)
    assert told[0] == told[1] != told[2] == told[3]
    assert len(told[0]) == 32


def test_a_port_in_use_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(launch.signal, 'signal', lambda *_: None)
    with socket.create_server(('127.0.0.1', 0)) as taken:
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit):
            launch.main(['--processes=2', '--elastic', f'--port={port}', '--', 'true'])
    assert f'port {port} cannot be used' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        launch.main(['--processes=2', '--port=65535', '--', 'true'])
    assert 'give a port from 1 to 65534' in capsys.readouterr().err


@pytest.mark.parametrize('late', [0, 2])
def test_only_steps_that_have_compiled_are_expected_soon(three, late):
    """Of five steps the first may take as long as they like, the rest the time of the terms."""
    group, limits = three[0], []

    def steps(g):
        for n in range(5):
            limits.extend([(g.peer._phase, g.peer._limit)] if g is group else [])
            yield n, {'loss': float(n)}

    def run(g):
        with g.phase('starting'):
            rows = list(together_.together(g, steps(g), (5, ['loss']), lambda: False, late=late))
        return [list(values['loss']) for _, values, _ in rows]

    assert together(*(lambda g=g: run(g) for g in three))[0][0] == [0.0]
    free = max(1, late)
    assert {*limits[:free]} == {('starting', LONG)}
    assert {*limits[free:]} == {('training', 20.0)}


def text_data(seed, length=40):
    r = np.random.default_rng(seed)
    splits = [
        Split(r.integers(0, 99, (n, 8), np.int32), np.zeros(n, np.int32)) for n in (length, 4)
    ]
    return Dataset('text', *splits, classes=99, mean=(), std=())


@pytest.mark.parametrize(('other', 'arrays'), [((0, 40), ''), ((1, 40), 'train.x, test.x'),
                                               ((0, 41), 'train.x, train.y, test.x')])  # fmt: skip
def test_processes_with_other_data_are_named(three, other, arrays):
    """Of equal lengths, which trained on a mixture, and of unequal, which waited for ever."""
    given = text_data(0), text_data(0), text_data(*other)
    calls = [lambda t=t, d=d: agreement.check_data(t, d) for t, d in zip(three, given, strict=True)]
    want = f'process 2 (stage 2) has other data than process 0 (stage 0), in {arrays} (train.x'
    for told in together(*calls):
        assert told is None if not arrays else told.startswith(want), told


SWITCHES = {
    'JAX_DEFAULT_PRNG_IMPL': lambda: jax.default_prng_impl('rbg'),
    'JAX_THREEFRY_PARTITIONABLE': lambda: jax.threefry_partitionable(False),
    'JAX_ENABLE_X64': lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize('switch', SWITCHES)
def test_processes_that_compute_other_numbers_are_named(three, switch):
    """With the variable that makes the difference, and before their data are compared."""
    exp = experiment_of(config_of(model='lenet', runtime='mpmd', fwd='random_k(0.25)', bwd='raw'))
    with SWITCHES[switch]():
        other = fingerprint(exp)
    here = fingerprint(exp)
    first = f'process 2 (stage 2) computes other numbers than process 0 (stage 0), in {switch}, '
    last = (
        f'random bits, fwd=random_k(0.25) ({switch}: {other[switch]}, process 0: {here[switch]}); '
        f'set the environment variable {switch} alike for all processes, or nowhere'
    )
    rows = [here, here, other]
    calls = [
        lambda t=t, row=row: agreement.compare(
            t, row, 'computes other numbers than', agreement.cure_of
        )
        for t, row in zip(three, rows, strict=True)
    ]
    for told in together(*calls):
        assert told.startswith(first), told
        assert told.endswith(last), told


def test_what_computes_is_compared_before_a_run(monkeypatch):
    """Between the processes of a group, and of an elastic run by the switch."""
    monkeypatch.setattr(loop, 'Trainer', lambda exp, group: None)
    other = lambda value: [value, {**value, 'random bits': '0'} if value else value]
    group = SimpleNamespace(index=0, count=2, names=NAMES[:2], share=other, view=ALONE)
    config = config_of(model='lenet', runtime='mpmd', fwd='raw', bwd='raw')
    with pytest.raises(ProcessGroupError, match=r'\(random bits: 0, process 0: .* XLA_FLAGS'):
        loop.prepare(config, group)
    exp = experiment_of(config_of('digits_dataparallel'))
    assert fingerprint(exp).items() <= elastic.about(exp).items()
    assert 'exchange=all_gather(ef(one_bit))' in fingerprint(exp)


def test_own_files_are_compared_with_those_that_they_import(tmp_path, monkeypatch):
    """An equal import path over another file is another model."""
    monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
    digests = []
    for number in range(3):
        (tmp_path / 'beside.py').write_text(f'def f():\n    return {number == 1}\n')
        text = (
            f'from beside import f\nimport optax\ndef make(config, rate):\n    return {number == 2}'
        )
        (tmp_path / 'mine.py').write_text(text)
        keys = {'optimizer.name': f'{tmp_path}/mine.py:make', 'model.name': 'lenet', 'codecs': ''}
        digests.append(own_files(keys)['config.optimizer.name'])
        assert digests[-1].startswith('beside.py, mine.py ')
    assert len(set(digests)) == 3
    sys.modules.pop('beside')
    sys.modules.pop(str((tmp_path / 'mine.py').resolve()))


@pytest.mark.parametrize(('runtime', 'axes'), [('local', [2]), ('spmd', [2, 2])])
def test_processes_of_one_program_meet_before_anything_compiles(runtime, axes, monkeypatch):
    opened, one = [], ProcessGroup()
    mesh = lambda **axes: jax.make_mesh(tuple(axes.values()), tuple(axes))
    monkeypatch.setattr(parallel, 'open_links', lambda mesh: opened.append([*mesh.shape.values()]))
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(parallel, 'device_mesh', mesh)
    Trainer(experiment_of(config_of('digits_dataparallel', runtime=runtime)), one)
    assert opened == [axes]


def test_stages_of_one_program_are_divided_evenly(monkeypatch):
    """Between processes that are one JAX; else a process would have a device without a stage."""
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    exp = experiment_of(config_of(model='gpt2', data='alice', stages=3, runtime='spmd'))
    with pytest.raises(ValueError, match='3 stages cannot be divided evenly among 2 processes; st'):
        Trainer(exp, ProcessGroup())


@pytest.mark.skipif(not hasattr(socket, 'TCP_USER_TIMEOUT'), reason='Linux only')
def test_jaxs_connections_outlast_a_cut_network(monkeypatch):
    """Both ends of the coordinator's connection, and no other, wait as long as JAX's heartbeats."""
    waits = lambda link: link.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1e3
    listening = lambda: opened.enter_context(socket.create_server(('127.0.0.1', 0)))
    with contextlib.ExitStack() as opened:
        server, ends = listening(), []
        other = opened.enter_context(socket.create_connection(listening().getsockname()))

        def initialize(*_, **__):
            ends.append(opened.enter_context(socket.create_connection(server.getsockname())))
            ends.append(opened.enter_context(server.accept()[0]))

        monkeypatch.setattr(world.jax.distributed, 'initialize', initialize)
        monkeypatch.setattr(world, '_use_gloo', lambda own: None)
        host, port = server.getsockname()
        peer, after = SimpleNamespace(host=host, terms=Terms(NAMES, 2, silent=60.0)), []
        group = SimpleNamespace(index=1, count=2, peer=peer, after=after)
        world.start_jax(Address(f'{host}:{port}', 2, 1), group)
        assert after == [jax.distributed.shutdown]
        assert [*map(waits, ends), waits(other)] == [180, 180, 0]


def test_jaxs_client_does_not_see_its_coordinator_end():
    """It would abort its process; the group ends it, with a line."""
    with socket.create_server(('127.0.0.1', 0)) as server:
        port = world._held_open(server.getsockname(), 5.0)
        with socket.create_connection(('127.0.0.1', port), 20) as near:
            near.sendall(b'ask')
            far = server.accept()[0]
            assert far.recv(9) == b'ask'
            far.sendall(b'answer')
            assert near.recv(9) == b'answer'
            far.close()
            near.settimeout(0.5)
            with pytest.raises(TimeoutError):
                near.recv(9)


@pytest.mark.slow
@pytest.mark.parametrize('victim', [0, 1])
@pytest.mark.parametrize(('part', 'keys'), [('stage', {'runtime': 'spmd'}), ('replica', REPLICAS)])
def test_a_killed_process_of_one_jax_is_named_in_a_line(tmp_path, part, keys, victim):
    """And in no other: neither JAX nor the collectives say more."""
    words = {'model': 'lenet', 'fwd': 'raw', 'bwd': 'raw', **keys, 'checkpoint_every': '3 steps'}
    process = start(tmp_path, *LAUNCH, epochs=500, **words)
    wait_for_steps(process, tmp_path, 3)
    began, [pid] = time.time(), pids(tmp_path, victim)
    os.kill(pid, signal.SIGKILL)
    out, code = text_of(process)
    assert code == 137, out[-2000:]
    assert time.time() - began < 20
    said = [line for line in out.splitlines() if not line.startswith(('epoch', '[Gloo]'))]
    cause = (
        f'process {victim} ({part} {victim}) has lost its connection: it was killed, ran out of '
    )
    assert f'jaxmp launch: process {victim} was killed by SIGKILL' in said
    [line] = (line for line in said if not line.startswith('jaxmp launch: '))
    assert line.startswith(
        f'train.py: process {1 - victim} ({part} {1 - victim}): stopped: {cause}'
    )


@pytest.mark.parametrize(
    ('given', 'problem'),
    [
        (('h:1', 2, None), 'give --process too; a process of several needs all three'),
        (('h:1', 2, 2), 'process 2 is not one of 2'),
        (('host', 2, 0), 'is not host:port'),
        (('h:65536', 2, 0), 'is not host:port.*up to 65535'),
        (('h:1', 2, 0, None, 60.0, -1.0), '--back=-1.0 is no time to wait; give 0'),
        (('h:1', 5, 0), '4 stages run in at most 4 processes, got 5'),
    ],
)
def test_a_wrong_address_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        connect.connect(Address(*given), range(4), ABOUT)


def test_one_process_needs_no_team_and_one_program_takes_none():
    nobody = Address(None, None, None)
    assert process_group_of(config_of(runtime='mpmd'), nobody).count == 1
    with pytest.raises(
        ValueError,
        match=r'processes need --config\.parallel\.runtime=mpmd or spmd, or --config\.par',
    ):
        process_group_of(config_of(), Address('h:1', 2, 0))
    for runtime in ('local', 'spmd'):
        with pytest.raises(ValueError, match=rf"--back=60 .*runtime='{runtime}', ends as a whole"):
            process_group_of(config_of(runtime=runtime), Address('h:1', 2, 0, back=60.0))
    with pytest.raises(ValueError, match=r'--back=60 makes all wait .* leave one of them out'):
        elastic.check(config_of('digits_dataparallel'), Address('h:1', 2, 0, back=60.0))


@pytest.mark.parametrize('signals', [[-9], [1], [143, 143]])
def test_the_launcher_lets_nobody_outlive(signals, monkeypatch, capfd):
    """The first to fail gives the status; who does not listen to SIGTERM is killed."""
    monkeypatch.setattr(launch, 'NOTICE', 0.0)
    monkeypatch.setattr(guard, 'GRACE', 1.0)
    ends = {-9: 'import os; os.kill(os.getpid(), 9)', 1: 'exit(1)', 143: 'exit(143)'}
    sleep = (
        'import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)'
    )
    running = [
        subprocess.Popen([sys.executable, '-c', ends[signals[i]] if i < len(signals) else sleep],
                         start_new_session=True, stdout=subprocess.PIPE)
        for i in range(2)
    ]  # fmt: skip
    for process in running:
        with process.stdout as out:
            out.readline()  # that of a process that sleeps, which does not listen from then on
    began = time.time()
    code = launch.watch(running, [])
    assert code == (137 if signals[0] == -9 else signals[0])
    assert time.time() - began < 10
    assert all(p.poll() is not None for p in running)
    said = capfd.readouterr().err
    who = '[01]' if len(signals) == 2 else '0'  # of two that end alike either may be seen first
    assert re.search(f'process {who} {launch.ending(signals[0])}', said), said
    assert ('killed processes [1]' in said) == (len(signals) == 1)


class Brief:
    """A process that fails right after the first look at it, or the first few."""

    returncode, pid = None, 2**30  # no process has such a number

    def __init__(self, code, looks):
        self.ends = iter([None] * looks + [code])

    def poll(self):
        self.returncode = next(self.ends, self.returncode)
        return self.returncode


@pytest.mark.parametrize('looks', [1, 2, 3])
@pytest.mark.parametrize('elastic', [False, True])
def test_a_failure_between_two_looks_is_no_success(looks, elastic):
    again = {'again': lambda i: Brief(0, looks), 'restarts': 1} if elastic else {}
    assert launch.watch([Brief(3, looks)], [], **again) == 3
    assert launch.watch([Brief(-9, looks)], [], **again) == (0 if elastic else 137)


@pytest.mark.parametrize('elastic', [{}, {'again': subprocess.Popen}])
def test_the_second_ctrl_c_ends_what_the_first_does_not(elastic):
    """Two processes that do not listen to SIGTERM; PATIENCE is a minute."""
    deaf = 'import signal, time; signal.signal(15, signal.SIG_IGN); print(1); time.sleep(50)'
    running = [
        subprocess.Popen(
            [sys.executable, '-uc', deaf], start_new_session=True, stdout=subprocess.PIPE
        )
        for _ in range(2)
    ]
    for p in running:
        assert p.stdout.readline() == b'1\n'
        p.stdout.close()
    asked, began = [signal.SIGINT], time.time()
    timer = threading.Timer(0.5, asked.append, [signal.SIGINT])
    timer.start()
    assert launch.watch(running, asked, **elastic) == 137
    assert 0.5 <= time.time() - began < 30
    assert all(p.returncode == -9 for p in running)


MPMD = {
    'model': 'lenet',
    'runtime': 'mpmd',
    'fwd': 'ef21(uniform(2))',
    'bwd': 'ef(uniform(4))',
    'num_microbatches': 2,
    'eval_every': '4 steps',
    'checkpoint_every': '3 steps',  # 5 are an epoch
}


def listening(pid):
    """The ends of the addresses at which a process of this machine listens, as /proc has them."""
    own = []
    for n in os.listdir(f'/proc/{pid}/fd'):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, such as a checkpoint's
            own.append(os.readlink(f'/proc/{pid}/fd/{n}'))
    tables = [Path(f'/proc/net/tcp{v}').read_text().splitlines()[1:] for v in ('', '6')]
    rows = [row.split() for table in tables for row in table]
    return {r[1].split(':')[0][-8:] for r in rows if r[3] == '0A' and f'socket:[{r[9]}]' in own}


@pytest.mark.slow
@pytest.mark.parametrize('runtime', ['mpmd', 'spmd'])
def test_two_processes_end_like_one_whatever_happens(tmp_path, runtime):
    """Ctrl-C in mid-epoch, kill -9, a damaged checkpoint, then to the end: the same numbers.

    And on one machine nothing listens but on loopback: the switch, the peers, JAX's own group.
    """
    whole, cut, keys = tmp_path / 'whole', tmp_path / 'cut', {**MPMD, 'runtime': runtime}
    out, code = text_of(start(whole, *LAUNCH, epochs=10, **keys))
    assert code == 0, out[-2000:]
    process = start(cut, *LAUNCH, epochs=10, **keys)
    wait_for_steps(process, cut, 5)
    assert listening(*pids(cut, 0)) | listening(*pids(cut, 1)) == {'0100007F'}, '127.0.0.1'
    process.send_signal(signal.SIGINT)
    out, code = text_of(process)
    assert code == 143, out[-2000:]
    assert 'the same command goes on' in out
    saved = max(int(p.name) for p in (cut / 'checkpoints').iterdir() if p.name.isdigit())
    process = start(cut, *LAUNCH, epochs=10, **keys)
    wait_for_steps(process, cut, saved + 1)  # it has gone on
    began = time.time()
    [victim] = pids(cut, 1)
    os.kill(victim, signal.SIGKILL)
    out, code = text_of(process)
    assert code == 137, out[-2000:]
    assert time.time() - began < 20
    assert 'stopped: process 1 (stage 1) has lost its connection: it was killed' in out
    assert subprocess.run(['pgrep', '-f', str(cut)], check=False).returncode == 1, 'nobody is left'
    alone = tmp_path / 'alone'
    shutil.copytree(cut, alone)
    out, code = text_of(start(alone, epochs=10, **keys))
    assert code == 0, out[-2000:]
    assert 'resuming from step' in out
    for a, b in zip(records(whole), records(alone), strict=True):  # one goes on where two were
        assert {**a, 'loss': pytest.approx(a['loss'], rel=1e-4)} == b  # with fewer threads
    step = damage_newest(cut)
    out, code = text_of(start(cut, *LAUNCH, epochs=10, **keys))
    assert code == 0, out[-2000:]
    assert f'checkpoint at step {step} is damaged (' in out
    assert 'resuming from step' in out
    assert records(whole) == records(cut)
    summary = json.loads((cut / 'summary.json').read_text())
    for row, sent in zip(summary['bytes'], summary['moved'], strict=True):
        assert sent['payload'] == [row['forward'], row['backward']]
        assert sent['collectives'] in ([0, 0], sent['payload'])
    assert summary['moved'][0]['collectives'] == summary['moved'][0]['payload']


TIED = """
from jaxmp.config import load


def get_config():
    c = load('text_gpt2')
    c.model.update(width=8, heads=2, blocks=3, stages=3)
    c.data.update(sequence_length=16, train_examples=64, test_examples=24)
    c.update(parallel={'num_microbatches': 2}, epochs=1)
    c.update(fwd='ef21(uniform(2))', bwd='ef(uniform(4))')
    # Adam divides a key bias's gradient, which is rounding noise about 0, by its own size.
    c.optimizer.update(name='sgd', momentum=0.9, schedule='cosine(2)')
    return c
"""


@pytest.mark.slow
@pytest.mark.parametrize('runtime', ['mpmd', 'spmd'])
def test_tied_tables_in_three_processes_are_one_parameter(tmp_path, runtime):
    """Three processes, the second without a table, and one program, in float64: the same losses.

    One program goes on from the checkpoint of the three as from its own.
    """
    (tmp_path / 'tied.py').write_text(TIED)
    config = f'--config={tmp_path / "tied.py"}'
    env = {**ENV, 'JAX_ENABLE_X64': '1'}
    train = [sys.executable, str(ROOT / 'train.py'), config, '--nocurves']
    three = [*LAUNCH[:4], '3', '--', *train, f'--config.parallel.runtime={runtime}']
    train.append(f'--workdir={tmp_path / "one"}')
    three.append(f'--workdir={tmp_path / "three"}')
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    for process in [subprocess.Popen(c, env=env, **pipes) for c in (train, three)]:
        out, code = text_of(process)
        assert code == 0, out[-2000:]
    one, three = (records(tmp_path / name) for name in ('one', 'three'))
    assert len(one) == len(three) == 3
    for a, b in zip(one, three, strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-12)
    assert one[1]['loss'] != one[2]['loss'], 'compression off and on'
    summary = json.loads((tmp_path / 'three' / 'summary.json').read_text())
    *links, table = summary['moved']
    whole = 2 * [256 * 8 * 8]  # the table's gradient, in float64, each way
    assert len(links) == 2
    assert table == {'boundary': 'token table', 'payload': whole, 'collectives': whole}
    assert summary['tied']['forward'] == summary['tied']['uncompressed'] == whole[0]
    alone, spread = (
        load_file(tmp_path / name / 'model' / 'model.safetensors') for name in ('one', 'three')
    )
    assert alone.keys() == spread.keys()
    for name, a in alone.items():  # of all stages, wherever they were
        np.testing.assert_allclose(spread[name], a, rtol=1e-6, atol=1e-7, err_msg=name)
    for folder in ('one', 'three'):
        on = [*train[:-1], f'--workdir={tmp_path / folder}', '--config.epochs=2']
        out, code = text_of(subprocess.Popen(on, env=env, **pipes))
        assert code == 0, out[-2000:]
    one, three = (records(tmp_path / name) for name in ('one', 'three'))
    assert len(one) == len(three) == 6
    for a, b in zip(one, three, strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-12)


def no_namespaces():
    """Why this user can make no network namespaces here; empty if it can."""
    if not shutil.which('unshare'):
        return 'no unshare'
    done = subprocess.run(['unshare', '-Urn', 'true'], capture_output=True, text=True, check=False)
    return done.stderr.strip() if done.returncode else ''


@pytest.mark.slow
def test_one_open_port_of_one_host_is_enough(tmp_path):
    """The second of three stages is in a namespace that reaches process 0's port and no other.

    Nothing reaches it. The first and the last stage are neighbours of it, and of the token table.
    """
    if why := no_namespaces():
        pytest.skip(why)
    (tmp_path / 'tied.py').write_text(TIED)
    train = [sys.executable, str(ROOT / 'train.py'), f'--config={tmp_path / "tied.py"}']
    train += ['--nocurves', '--config.parallel.runtime=mpmd']
    port = launch.free_port()
    place = [
        f'--coordinator={one_port.HOST}:{port}',
        '--processes=3',
        f'--workdir={tmp_path}/three',
    ]
    commands = [[*train, *place, f'--process={i}'] for i in range(3)]
    inside = [[commands[0], commands[2]], [commands[1]]]
    spread = ['unshare', '-Urn', sys.executable, one_port.__file__, str(port), json.dumps(inside)]
    env = {**ENV, 'JAX_ENABLE_X64': '1', address.TOKEN: 'secret'}
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    for command in ([*train, f'--workdir={tmp_path}/one'], spread):
        out, code = text_of(subprocess.Popen(command, env=env, **pipes))
        assert code == 0, out[-2000:]
    one, three = (records(tmp_path / name) for name in ('one', 'three'))
    assert len(one) == len(three) == 3
    for a, b in zip(one, three, strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-12)


def test_a_loss_that_is_not_finite_ends_all(tmp_path):
    out, code = text_of(start(tmp_path, *LAUNCH, **{**MPMD, 'lr': 1e38}))
    assert code == 1
    assert 'DivergedError: the loss, in the last stage, is' in out
