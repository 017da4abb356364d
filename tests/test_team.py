"""Processes of a run: they find each other or say who is missing, and end together."""

import contextlib
import errno
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
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxmp import launch
from jaxmp.data import Dataset, Split
from jaxmp.distributed import address, guard, process_group, rendezvous, service
from jaxmp.distributed import monitor as monitor
from jaxmp.distributed.rendezvous import Meeting
from jaxmp.exchange.copies import Copies
from jaxmp.runtimes import lanes
from jaxmp.training import across, agreement, elastic, loop, parallel
from jaxmp.training.experiment import experiment_of
from jaxmp.training.fingerprint import fingerprint, own_files
from jaxmp.training.loop import process_group_of
from jaxmp.training.trainer import Trainer
from tests.runs import (
    ENV,
    LAUNCH,
    ROOT,
    config_of,
    damage_newest,
    pids,
    records,
    start,
    text_of,
    wait_for_steps,
)

NAMES = rendezvous.names_of([0, 1, 2, 2])
ABOUT = {'lr': 0.1, 'jaxmp': '1'}


def meeting(port, **changes):
    """Three processes of four stages, on this machine."""
    given = {'names': NAMES, 'about': ABOUT, 'token': 'secret', 'timeout': 20.0, **changes}
    return Meeting('127.0.0.1', port, **given)


def joined(port, arrivals, **changes):
    """Joins as each (index, about) in a thread of its own; what each got or was told."""
    got = {}

    def arrive(index, about):
        try:
            got[index] = rendezvous.join_rendezvous(meeting(port, about=about, **changes), index)
        except monitor.ProcessGroupError as error:
            got[index] = str(error)

    threads = [threading.Thread(target=arrive, args=a, daemon=True) for a in arrivals]
    for t in threads:
        t.start()
    return got, threads


def together(*calls):
    """What calls give that wait for each other, or the text of their TeamErrors."""
    got = [None] * len(calls)

    def run(i, call):
        try:
            got[i] = call()
        except monitor.ProcessGroupError as error:
            got[i] = str(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    return got


@pytest.fixture
def three():
    """The watches of three processes that have met."""
    port = launch.free_port()
    got, threads = joined(port, [(1, ABOUT), (2, ABOUT)])
    lead = rendezvous.serve_rendezvous(meeting(port))
    for t in threads:
        t.join(20)
    assert sorted(got) == [1, 2]
    watches = lead, got[1], got[2]
    yield watches
    together(*(w.close for w in watches))


def test_all_come_and_share(three):
    """What each says all know, in order."""
    for round_ in range(3):
        want = [[i, round_] for i in range(3)]
        got = together(*(lambda w=w, r=round_: w.share((w.index, r)) for w in three))
        assert got == [want] * 3


@pytest.mark.parametrize(
    ('arrivals', 'timeout', 'problem'),
    [
        ([(1, ABOUT)], 1.0, r'process 2 \(stages 2, 3\) did not connect within 1 s'),
        ([], 0.5, r'process 1 \(stage 1\) and process 2 \(stages 2, 3\) did not connect'),
        ([(1, {**ABOUT, 'lr': 0.2})], 9.0, r'process 1 .* with lr=0.2 \(process 0: 0.1\)'),
        ([(1, {'lr': 0.1, 'jaxmp': '2'})], 9.0, "jaxmp='2'.*start all with the same settings"),
        ([(1, ABOUT), (1, ABOUT)], 9.0, 'two processes connected as process 1'),
        ([(7, ABOUT)], 9.0, '--process=7; give 0 to 2 for 3 processes'),
    ],
)
def test_who_does_not_fit_is_named_to_all(arrivals, timeout, problem):
    port = launch.free_port()
    got, threads = joined(port, arrivals)
    with pytest.raises(monitor.ProcessGroupError, match=problem):
        rendezvous.serve_rendezvous(meeting(port, timeout=timeout))
    for t in threads:
        t.join(20)
    assert len(got) == len({index for index, _ in arrivals})
    assert not arrivals or any('process' in text for text in got.values())


HELLO = {'process': 1, 'about': ABOUT, 'token': 'secret'}
STRANGERS = [
    b'', b'{"process": 1', b'[1]\n', b'7\n', b'GET / HTTP/1.1\r\n\r\n', b'\xff\xfe\n',
    b'[' * 60000 + b'\n', b'x' * 200000, b'{"a":' * 900 + b'1' + b'}' * 900 + b'\n',
    *(json.dumps(h).encode() + b'\n' for h in (
        {'process': 1, 'token': 'secret'},
        {**HELLO, 'about': 3},
        {**HELLO, 'process': True},
        {**HELLO, 'token': 5},
        {**HELLO, 'token': '\ud800'},
        {**HELLO, 'token': ''},
        {**HELLO, 'token': 'Secret', 'process': 7},
        {**HELLO, 'token': 'secret ', 'about': {}},
    )),
]  # fmt: skip


def test_strangers_neither_end_nor_delay_a_start(capfd):
    """They come before anybody else does, and more silent ones than are kept."""
    port, lead = launch.free_port(), []
    waiting = threading.Thread(
        target=lambda: lead.append(rendezvous.serve_rendezvous(meeting(port)))
    )
    waiting.start()
    strangers = []
    for text in STRANGERS + [b''] * (rendezvous.PENDING + 10):
        strangers.append(connected(port))
        try:
            strangers[-1].sendall(text)
        except OSError:  # turned away before all was said
            assert len(text) > rendezvous.HELLO
    began = time.monotonic()
    got, threads = joined(port, [(1, ABOUT), (2, ABOUT)])
    for t in (*threads, waiting):
        t.join(20)
    assert time.monotonic() - began < 2
    assert [w.index for w in (*lead, got[1], got[2])] == [0, 1, 2]
    together(*(w.close for w in (*lead, got[1], got[2])))
    for sock in strangers:
        sock.close()
    assert 'Traceback' not in capfd.readouterr().err


def connected(port):
    """A connection to ``port``, once somebody listens."""
    for _ in range(200):
        try:
            return socket.create_connection(('127.0.0.1', port), 5)
        except OSError:
            time.sleep(0.02)
    raise AssertionError(f'nobody listens at {port}')


def test_a_wrong_token_is_told_and_who_leaves_may_come_again():
    port = launch.free_port()
    lead = []
    waiting = threading.Thread(
        target=lambda: lead.append(rendezvous.serve_rendezvous(meeting(port)))
    )
    waiting.start()
    connected(port).close()
    with pytest.raises(
        monitor.ProcessGroupError, match=r'process 0 .* has another token; give all'
    ):
        rendezvous.join_rendezvous(meeting(port, token='other'), 1)
    early = connected(port)
    early.sendall(monitor.line_of(HELLO))
    early.close()
    time.sleep(0.2)
    got, threads = joined(port, [(1, ABOUT), (2, ABOUT)])
    for t in (*threads, waiting):
        t.join(20)
    assert sorted(got) == [1, 2]
    together(*(w.close for w in (*lead, *got.values())))


def test_who_was_turned_away_stands_beside_who_is_missing():
    port = launch.free_port()
    got, threads = joined(port, [(1, ABOUT)], token='other')
    missing = r'process 1 .*did not connect within 0 s; rejected 127.0.0.1, which has another tok'
    with pytest.raises(monitor.ProcessGroupError, match=missing):
        rendezvous.serve_rendezvous(meeting(port, timeout=0.4))
    threads[0].join(20)
    assert 'another token' in got[1]


def test_no_answer_from_process_0():
    with pytest.raises(
        monitor.ProcessGroupError, match=r'process 0 \(stage 0\) did not answer within 0 s'
    ):
        rendezvous.join_rendezvous(meeting(launch.free_port(), timeout=0.3), 1)


@pytest.mark.parametrize('taken', [0, 1])
def test_a_port_in_use_is_named(taken):
    port = launch.free_port()
    own = process_group.Address(f'127.0.0.1:{port}', 2, 0)
    with (
        socket.create_server(('', port + taken)),
        pytest.raises(
            monitor.ProcessGroupError, match=rf'port {port + taken} cannot be used.*another'
        ),
    ):
        process_group.connect(own, range(4), ABOUT)


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
        with address.listen(own, 0) as server:
            assert (server.getsockname()[0] in ('::', '0.0.0.0')) == (not own)


def test_hosts_need_a_secret(tmp_path, monkeypatch):
    """From a file or the environment; on one machine it may be missing."""
    monkeypatch.delenv(address.TOKEN, raising=False)
    with pytest.raises(
        monitor.ProcessGroupError, match='same secret text, by the environment variable JAX'
    ):
        process_group.connect(process_group.Address('10.77.77.1:9000', 2, 0), range(4), ABOUT)
    monkeypatch.setenv(address.TOKEN, ' \r')
    with pytest.raises(monitor.ProcessGroupError, match='any machine that reaches 10'):
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
        with pytest.raises(monitor.ProcessGroupError, match=problem):
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


class Watched(monitor.Monitor):
    """A monitor that notes where it would end the process, also after its test."""

    def __init__(self, names, index, lines, deadline):
        self.ended = threading.Event()
        super().__init__(names, index, lines, deadline)

    def _exit(self):
        self.ended.set()


@pytest.fixture
def soon(monkeypatch):
    """Less time for the others than a run gives them."""
    monkeypatch.setattr(monitor, 'GRACE', 0.1)


def pair(deadline):
    """Process 0's watch over process 1, and process 1's bare end of the line."""
    ours, theirs = socket.socketpair()
    lead = Watched(NAMES[:2], 0, {1: monitor.Connection(ours)}, deadline)
    return lead, monitor.Connection(theirs)


def test_heartbeats_keep_the_line():
    """For several deadlines nobody says anything else."""
    names, socks = NAMES[:2], socket.socketpair()
    both = [Watched(names, i, {1 - i: monitor.Connection(s)}, 0.5) for i, s in enumerate(socks)]
    time.sleep(1.2)
    assert not any(w.ended.is_set() for w in both)
    together(*(w.close for w in both))


def test_closing_ones_own_line_loses_nobody(soon):
    """The other has not said that it is done, within the time that it is given."""
    lead, other = pair(deadline=60.0)
    lead.close()
    assert not lead.ended.wait(0.5)
    other.close()


def test_a_silent_process_is_named_after_the_deadline_and_not_before(soon, capfd):
    """A pause below the deadline is survived; one above ends all, who are told."""
    lead, other = pair(deadline=2.0)
    for _ in range(2):
        other.send(beat=True)
        assert not lead.ended.wait(0.6)
    began = time.monotonic()
    assert lead.ended.wait(10)
    assert time.monotonic() - began < 8
    silent = 'no heartbeat from process 1 (stage 1) for 2 s: it is suspended, hangs or swaps'
    assert f'process 0 (stage 0): stopped: {silent}' in capfd.readouterr().err
    while 'fault' not in (told := other.read(5)):
        assert told == {'beat': True}
    assert told['fault'].startswith(silent)
    other.close()
    lead.close()


def test_who_stood_still_does_not_judge(soon, monkeypatch):
    """After a stop of its own a process waits another deadline for the others."""
    now, sleep = [0.0], time.sleep
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(monitor, 'time', clock)
    lead, other = pair(deadline=0.5)
    now[0] = 3600.0
    assert not lead.ended.wait(0.3)
    for _ in range(40):
        now[0] += 0.05
        if lead.ended.wait(0.07):
            break
    assert 3600.4 < now[0] < 3601.5
    other.close()
    lead.close()


def test_a_network_that_gives_up_is_a_process_that_is_gone(soon, capfd):
    """TCP's ETIMEDOUT is a TimeoutError, which once ended the thread that listens."""
    silent, theirs = socket.socketpair()
    line = monitor.Connection(silent)

    def readline(most):
        raise OSError(errno.ETIMEDOUT, 'Connection timed out')

    line._file = SimpleNamespace(readline=readline, close=line._file.close)
    lead = Watched(NAMES[:2], 0, {1: line}, 60.0)
    assert lead.ended.wait(5)
    assert 'lost connection to process 1 (stage 1): it was killed' in capfd.readouterr().err
    lead.close()
    theirs.close()


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
    teams = [process_group.ProcessGroup(w.index, 3, w) for w in three]
    calls = [lambda t=t, d=d: agreement.check_data(t, d) for t, d in zip(teams, given, strict=True)]
    want = f'process 2 (stages 2, 3) has other data than process 0 (stage 0), in {arrays} (train.x'
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
    first = (
        f'process 2 (stages 2, 3) computes other numbers than process 0 (stage 0), in {switch}, '
    )
    last = (
        f'random bits, fwd=random_k(0.25) ({switch}: {other[switch]}, process 0: {here[switch]}); '
        f'set the environment variable {switch} alike for all processes, or nowhere'
    )
    teams = [process_group.ProcessGroup(w.index, 3, w) for w in three]
    rows = [here, here, other]
    calls = [
        lambda t=t, row=row: agreement.compare(
            t, row, 'computes other numbers than', agreement.cure_of
        )
        for t, row in zip(teams, rows, strict=True)
    ]
    for told in together(*calls):
        assert told.startswith(first), told
        assert told.endswith(last), told


def test_what_computes_is_compared_before_a_run(monkeypatch):
    """Between the processes of a group, and of an elastic run by the hub."""
    monkeypatch.setattr(loop, 'Trainer', lambda exp, group: None)
    other = lambda value: [value, {**value, 'random bits': '0'} if value else value]
    several = SimpleNamespace(names=NAMES[:2], share=other)
    group = process_group.ProcessGroup(0, 2, several)
    config = config_of(model='lenet', runtime='mpmd', fwd='raw', bwd='raw')
    with pytest.raises(
        monitor.ProcessGroupError, match=r'\(random bits: 0, process 0: .* XLA_FLAGS'
    ):
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


def test_a_workdir_that_is_not_shared_is_named(three, tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, 'PATIENCE', 0.3)
    teams = [process_group.ProcessGroup(w.index, 3, w) for w in three]
    for folders, wrong in (('aaa', False), ('aba', True), ('acc', True)):
        for name in 'ab':
            (tmp_path / name).mkdir(exist_ok=True)
        calls = [
            lambda t=t, f=f: agreement.check_workdir(t, tmp_path / f)
            for t, f in zip(teams, folders, strict=True)
        ]
        want = f'process 1 (stage 1) does not see the workdir of process 0 (stage 0), {tmp_path}/a'
        for told in together(*calls):
            assert told.startswith(want) if wrong else told is None, told
        assert not list((tmp_path / 'a').iterdir()), 'nothing is left behind'


def test_every_link_is_opened_before_anything_compiles(monkeypatch):
    """Also that of the tied tables, and those of replicas."""
    config = config_of(
        'text_gpt2', runtime='mpmd', width=8, heads=2, sequence_length=16, train_examples=64
    )
    place = make_dataclass('Place', ['process_index', 'platform'], frozen=True)
    places, opened = [place(i, 'cpu') for i in range(4)], []
    note = lambda *ends: opened.append(tuple(d.process_index for d in ends))
    monkeypatch.setattr(parallel, 'place', lambda replicas, stages: [places])
    monkeypatch.setattr(Copies, 'mesh', property(lambda self: self.devices))
    monkeypatch.setattr(lanes, 'pair', lambda *ends: ends)
    monkeypatch.setattr(lanes, 'streamed_move', lambda ends, way, like: (note(*ends), None))
    monkeypatch.setattr(across, 'open_links', lambda mesh: note(*mesh))
    Trainer(experiment_of(config), process_group.ProcessGroup())
    assert opened == [(0, 1), (1, 0), (0, 3)]
    monkeypatch.setattr(parallel, 'open_links', lambda mesh: opened.append(mesh.size))
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    monkeypatch.setattr(parallel, 'device_mesh', lambda **axes: jax.make_mesh((2,), tuple(axes)))
    Trainer(experiment_of(config_of('digits_dataparallel')), process_group.ProcessGroup(0, 2))
    assert opened[3:] == [2]


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

        monkeypatch.setattr(service.jax.distributed, 'initialize', initialize)
        monkeypatch.setattr(service, '_use_gloo', lambda own: None)
        monkeypatch.setattr(service, 'listen_at', lambda own: None)
        host, port = server.getsockname()
        service.start_jax((f'{host}:{port}', 2, 1), (host, port), host, (50, 180))
        assert [*map(waits, ends), waits(other)] == [180, 180, 0]


@pytest.mark.parametrize(
    ('given', 'problem'),
    [
        (('h:1', 2, None), 'incomplete: give --coordinator'),
        (('h:1', 2, 2), 'process 2 is not one of 2'),
        (('host', 2, 0), 'is not host:port'),
        (('h:65536', 2, 0), 'is not host:port.*up to 65535'),
        (('h:1', 5, 0), '4 stages run in at most 4 processes, got 5'),
    ],
)
def test_a_wrong_address_is_refused(given, problem):
    with pytest.raises(ValueError, match=problem):
        process_group.connect(process_group.Address(*given), range(4), ABOUT)


def test_one_process_needs_no_team_and_one_program_takes_none():
    nobody = process_group.Address(None, None, None)
    assert process_group_of(config_of(runtime='mpmd'), nobody) == process_group.ProcessGroup()
    with pytest.raises(
        ValueError,
        match=r'processes need --config\.parallel\.runtime=mpmd or --config\.parallel\.replicas',
    ):
        process_group_of(config_of(), process_group.Address('h:1', 2, 0))


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
def test_two_processes_end_like_one_whatever_happens(tmp_path):
    """Ctrl-C in mid-epoch, kill -9, a damaged checkpoint, then to the end: the same numbers.

    And on one machine nothing listens but on loopback: JAX's coordinator, the stages' links.
    """
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    out, code = text_of(start(whole, *LAUNCH, epochs=10, **MPMD))
    assert code == 0, out[-2000:]
    process = start(cut, *LAUNCH, epochs=10, **MPMD)
    wait_for_steps(process, cut, 5)
    assert listening(*pids(cut, 0)) | listening(*pids(cut, 1)) == {'0100007F'}, '127.0.0.1'
    process.send_signal(signal.SIGINT)
    out, code = text_of(process)
    assert code == 143, out[-2000:]
    assert 'the same command goes on' in out
    saved = max(int(p.name) for p in (cut / 'checkpoints').iterdir() if p.name.isdigit())
    process = start(cut, *LAUNCH, epochs=10, **MPMD)
    wait_for_steps(process, cut, saved + 1)  # it has gone on
    began = time.time()
    [victim] = pids(cut, 1)
    os.kill(victim, signal.SIGKILL)
    out, code = text_of(process)
    assert code == 137, out[-2000:]
    assert time.time() - began < 20
    assert 'stopped: lost connection to process 1 (stage 1)' in out
    assert subprocess.run(['pgrep', '-f', str(cut)], check=False).returncode == 1, 'nobody is left'
    alone = tmp_path / 'alone'
    shutil.copytree(cut, alone)
    out, code = text_of(start(alone, epochs=10, **MPMD))
    assert code == 0, out[-2000:]
    assert 'resuming from step' in out
    for a, b in zip(records(whole), records(alone), strict=True):  # one goes on where two were
        assert {**a, 'loss': pytest.approx(a['loss'], rel=1e-4)} == b  # with fewer threads
    step = damage_newest(cut, 1)
    out, code = text_of(start(cut, *LAUNCH, epochs=10, **MPMD))
    assert code == 0, out[-2000:]
    damaged = rf'checkpoint at step {step} is damaged \(process 0: .*, process 1: '
    assert re.search(damaged, out), out
    assert 'resuming from step' in out
    assert records(whole) == records(cut)
    summary = json.loads((cut / 'summary.json').read_text())
    for row, sent in zip(summary['bytes'], summary['moved'], strict=True):
        assert sent['payload'] == [row['forward'], row['backward']]
        assert sent['collectives'] in ([0, 0], sent['payload'])
    assert summary['moved'][0]['collectives'] == summary['moved'][0]['payload']


TIED = """
from jaxmp.plugins import load


def get_config():
    c = load('text_gpt2')
    c.model.update(width=8, heads=2, blocks=3, stages=3)
    c.data.update(sequence_length=16, train_examples=64, test_examples=24)
    c.update(parallel={'num_microbatches': 2}, epochs=1)
    c.update(fwd='ef21(uniform(2))', bwd='ef(uniform(4))')
    # Adam divides a key bias's gradient, which is rounding noise about 0, by its own size.
    c.optimizer.update(name='sgd', momentum=0.9, schedule='cosine', cosine_epochs=2)
    return c
"""


@pytest.mark.slow
def test_tied_tables_in_three_processes_are_one_parameter(tmp_path):
    """Three processes, the second without a table, and one program, in float64: the same losses."""
    (tmp_path / 'tied.py').write_text(TIED)
    config = f'--config={tmp_path / "tied.py"}'
    env = {**ENV, 'JAX_ENABLE_X64': '1'}
    train = [sys.executable, str(ROOT / 'train.py'), config, '--nocurves']
    three = [*LAUNCH[:4], '3', '--', *train, '--config.parallel.runtime=mpmd']
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


def test_a_loss_that_is_not_finite_ends_all(tmp_path):
    out, code = text_of(start(tmp_path, *LAUNCH, **{**MPMD, 'lr': 1e38}))
    assert code == 1
    assert 'DivergedError: the loss, in the last stage, is' in out
