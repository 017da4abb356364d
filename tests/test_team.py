"""Processes of a run: they find each other or say who is missing, and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from jaxmp import launch, team, watch
from jaxmp.run import team_of
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

NAMES = watch.names_of([0, 1, 2, 2])
ABOUT = {'lr': 0.1, 'jaxmp': '1'}


def joined(port, arrivals, timeout=20.0):
    """Runs `watch.join` for each (index, about) in a thread; what each got or was told."""
    got = {}

    def arrive(index, about):
        try:
            got[index] = watch.join('127.0.0.1', port, index, NAMES, about, timeout)
        except watch.TeamError as error:
            got[index] = str(error)

    threads = [threading.Thread(target=arrive, args=a, daemon=True) for a in arrivals]
    for t in threads:
        t.start()
    return got, threads


def test_all_come():
    port = launch.free_port()
    got, threads = joined(port, [(1, ABOUT), (2, ABOUT)])
    lead = watch.hub(port, NAMES, ABOUT, 20.0)
    for t in threads:
        t.join(20)
    assert sorted(got) == [1, 2]
    assert all(isinstance(w, watch.Watch) for w in got.values())
    others = [threading.Thread(target=w.close) for w in got.values()]
    for t in others:
        t.start()
    lead.close()
    for t in others:
        t.join(20)


@pytest.mark.parametrize(
    ('arrivals', 'timeout', 'problem'),
    [
        ([(1, ABOUT)], 1.0, r'process 2 \(stages 2, 3\) did not come within 1 s'),
        ([], 0.5, r'process 1 \(stage 1\) and process 2 \(stages 2, 3\) did not come'),
        ([(1, {**ABOUT, 'lr': 0.2})], 9.0, r'process 1 .* with lr=0.2 \(process 0: 0.1\)'),
        ([(1, {'lr': 0.1, 'jaxmp': '2'})], 9.0, "jaxmp='2'.*start all processes alike"),
        ([(1, ABOUT), (1, ABOUT)], 9.0, 'two processes came as process 1'),
        ([(7, ABOUT)], 9.0, '3 processes are 0..2'),
    ],
)
def test_who_does_not_fit_is_named_to_all(arrivals, timeout, problem):
    port = launch.free_port()
    got, threads = joined(port, arrivals)
    with pytest.raises(watch.TeamError, match=problem):
        watch.hub(port, NAMES, ABOUT, timeout)
    for t in threads:
        t.join(20)
    assert len(got) == len({index for index, _ in arrivals})
    assert not arrivals or any('process' in text for text in got.values())


def test_no_answer_from_process_0():
    with pytest.raises(watch.TeamError, match=r'process 0 \(stage 0\) did not come within 0 s'):
        watch.join('127.0.0.1', launch.free_port(), 1, NAMES, ABOUT, 0.3)


@pytest.mark.parametrize('taken', [0, 1])
def test_a_port_in_use_is_named(taken):
    port = launch.free_port()
    address = team.Address(f'127.0.0.1:{port}', 2, 0)
    with (
        socket.create_server(('', port + taken)),
        pytest.raises(watch.TeamError, match=rf'port {port + taken} cannot be used.*another'),
    ):
        team.connect(address, 4, ABOUT)


@pytest.mark.parametrize(
    ('address', 'problem'),
    [
        (('h:1', 2, None), 'incomplete: give --coordinator'),
        (('h:1', 2, 2), 'process 2 is not one of 2'),
        (('host', 2, 0), 'is not host:port'),
        (('h:1', 5, 0), '4 stages run in at most 4 processes, got 5'),
    ],
)
def test_a_wrong_address_is_refused(address, problem):
    with pytest.raises(ValueError, match=problem):
        team.connect(team.Address(*address), 4, ABOUT)


def test_one_process_needs_no_team_and_one_program_takes_none():
    nobody = team.Address(None, None, None)
    assert team_of(config_of(runtime='mpmd'), nobody) == team.Team()
    with pytest.raises(
        ValueError, match=r'processes need --config\.runtime=mpmd or --config\.replicas'
    ):
        team_of(config_of(), team.Address('h:1', 2, 0))


@pytest.mark.parametrize('signals', [[-9], [1], [143, 143]])
def test_the_launcher_lets_nobody_outlive(signals, monkeypatch, capfd):
    """The first to fail gives the status; who stays is killed."""
    monkeypatch.setattr(launch, 'PATIENCE', 1.0)
    ends = {-9: 'import os; os.kill(os.getpid(), 9)', 1: 'exit(1)', 143: 'exit(143)'}
    sleep = 'import time; time.sleep(60)'
    running = [
        subprocess.Popen([sys.executable, '-c', ends[signals[i]] if i < len(signals) else sleep],
                         start_new_session=True)
        for i in range(2)
    ]  # fmt: skip
    began = time.time()
    code = launch.watch(running, [])
    assert code == (137 if signals[0] == -9 else signals[0])
    assert time.time() - began < 30
    assert all(p.poll() is not None for p in running)
    said = capfd.readouterr().err
    who = '[01]' if len(signals) == 2 else '0'  # of two that end alike either may be seen first
    assert re.search(f'process {who} {launch.ending(signals[0])}', said), said
    assert ('killed processes [1]' in said) == (len(signals) == 1)


MPMD = {
    'model': 'lenet',
    'runtime': 'mpmd',
    'fwd': 'ef21(uniform(2))',
    'bwd': 'ef(uniform(4))',
    'micro_batches': 2,
}


def test_two_processes_end_like_one_whatever_happens(tmp_path):
    """Ctrl-C in mid-epoch, kill -9 of a process, a damaged checkpoint: the same numbers."""
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    out, code = text_of(start(whole, epochs=6, **MPMD))
    assert code == 0, out[-2000:]
    process = start(cut, *LAUNCH, epochs=6, **MPMD)
    wait_for_steps(process, cut, 5)
    process.send_signal(signal.SIGINT)
    out, code = text_of(process)
    assert code == 143, out[-2000:]
    assert 'the same command goes on' in out
    process = start(cut, *LAUNCH, epochs=6, **MPMD)
    wait_for_steps(process, cut, 15)
    began = time.time()
    [victim] = pids(cut, 1)
    os.kill(victim, signal.SIGKILL)
    out, code = text_of(process)
    assert code == 137, out[-2000:]
    assert time.time() - began < 60
    assert 'because process 1 (stage 1) has gone' in out
    assert subprocess.run(['pgrep', '-f', str(cut)], check=False).returncode == 1, 'nobody is left'
    refused, code = text_of(start(cut, epochs=6, **MPMD))
    assert code == 1
    assert 'processes=2 (now 1)' in refused
    step = damage_newest(cut, 1)
    out, code = text_of(start(cut, *LAUNCH, epochs=6, **MPMD))
    assert code == 0, out[-2000:]
    assert f'checkpoint at step {step} is damaged (process 1: ' in out
    assert 'going on from step' in out
    assert records(whole) == records(cut)
    summary = json.loads((cut / 'summary.json').read_text())
    for row, sent in zip(summary['bytes'], summary['moved'], strict=True):
        assert sent['payload'] == [row['forward'], row['backward']]
        assert sent['collectives'] in ([0, 0], sent['payload'])
    assert summary['moved'][0]['collectives'] == summary['moved'][0]['payload']


TIED = """
from configs import text_gpt2


def get_config():
    c = text_gpt2.get_config()
    c.update(width=8, heads=2, sequence_length=16, train_examples=64, micro_batches=2, epochs=1)
    c.update(fwd='ef21(uniform(2))', bwd='ef(uniform(4))')
    # Adam divides a key bias's gradient, which is rounding noise about 0, by its own size.
    c.update(optimiser='sgd', momentum=0.9, cosine_epochs=2, weight_decay=0.0)
    return c
"""


def test_tied_tables_in_four_processes_are_one_parameter(tmp_path):
    """Four processes and one program, in float64: the same losses."""
    (tmp_path / 'tied.py').write_text(TIED)
    config = f'--config={tmp_path / "tied.py"}'
    env = {**ENV, 'JAX_ENABLE_X64': '1'}
    train = [sys.executable, str(ROOT / 'train.py'), config, f'--workdir={tmp_path / "one"}']
    four = [*LAUNCH[:4], '4', '--', *train[:3], '--config.runtime=mpmd']
    four.append(f'--workdir={tmp_path / "four"}')
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
    for process in [subprocess.Popen(c, env=env, **pipes) for c in (train, four)]:
        out, code = text_of(process)
        assert code == 0, out[-2000:]
    one, four = (records(tmp_path / name) for name in ('one', 'four'))
    assert len(one) == len(four) == 3
    for a, b in zip(one, four, strict=True):
        assert b['loss'] == pytest.approx(a['loss'], rel=1e-12)
    assert one[1]['loss'] != one[2]['loss'], 'compression off and on'


CLUSTERS = {
    'slurm': {
        'SLURM_JOB_ID': '4095', 'SLURM_STEP_NODELIST': 'localhost', 'SLURM_NTASKS': '2',
        'SLURM_PROCID': '{}', 'SLURM_LOCALID': '{}',
    },
    'ompi': {
        'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://127.0.0.1:34911',
        'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '{}',
        'OMPI_COMM_WORLD_LOCAL_RANK': '{}',
    },
}  # fmt: skip


@pytest.mark.parametrize('cluster', CLUSTERS)
def test_a_cluster_is_found(cluster, monkeypatch):
    """What these start a process with is enough; no cluster was at hand."""
    for i in range(2):
        for name, value in CLUSTERS[cluster].items():
            monkeypatch.setenv(name, value.format(i))
        coordinator, processes, process = team.found()
        assert (processes, process) == (2, i)
        assert coordinator.split(':')[0] in ('localhost', '127.0.0.1')
        assert 1024 < team._beside(int(coordinator.split(':')[1])) < 65536


def test_a_loss_that_is_not_finite_ends_all(tmp_path):
    out, code = text_of(start(tmp_path, *LAUNCH, **{**MPMD, 'lr': 1e38}))
    assert code == 1
    assert 'DivergedError: the loss, in the last stage, is' in out
