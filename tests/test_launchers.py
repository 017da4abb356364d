"""Launchers: what they say of a process, what ends a run, and that nothing outlives ours."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from jaxmp.launch import __main__ as launch
from jaxmp.launch import launchers
from jaxmp.launch.signals import leave_closed_terminal
from jaxmp.net.connect import Address, endpoint
from jaxmp.net.group import ProcessGroup
from jaxmp.net.views import Terms
from jaxmp.runtimes import world
from jaxmp.training import loop
from jaxmp.training.loop import process_group_of
from jaxmp.training.resume import stop_signals
from tests.base import ENV
from tests.runs import LAUNCH, config_of

NOBODY = Address(None, None, None)
SALLOC = {'SLURM_JOB_ID': '4095', 'SLURM_NTASKS': '4'}
SHELL = {  # a shell inside an allocation, as a step of its own
    **SALLOC, 'SLURM_STEP_NUM_TASKS': '1', 'SLURM_PROCID': '0', 'SLURM_LOCALID': '0',
    'SLURM_STEP_NODELIST': 'localhost',
}  # fmt: skip
KUBEFLOW = {
    'JAX_COORDINATOR_ADDRESS': 'node-0:6666', 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1',
}  # fmt: skip
SKY = {
    'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8', 'SKYPILOT_NUM_NODES': '2',
    'SKYPILOT_NODE_RANK': '1',
}  # fmt: skip


@pytest.mark.parametrize(
    ('env', 'place'),
    [
        (KUBEFLOW, ('node-0:6666', 2, 1)),
        (SKY, ('10.0.0.7:9876', 2, 1)),
        ({**SKY, 'SKYPILOT_NODE_IPS': 'fd00::7\nfd00::8'}, ('[fd00::7]:9876', 2, 1)),
        ({**KUBEFLOW, **SKY, **SALLOC}, ('node-0:6666', 2, 1)),
        (SHELL, None),
        ({}, None),
        ({'JAX_NUM_PROCESSES': ' '}, None),
    ],
)
def test_the_variables_of_launchers_are_read(env, place):
    assert launchers.place_of(env) == place


@pytest.mark.parametrize('change', [{'JAX_NUM_PROCESSES': 'two'}, {'JAX_PROCESS_ID': ''}])
def test_incomplete_variables_are_named(change):
    with pytest.raises(ValueError, match=r"='node-0:6666'.* do not say where process 0 is"):
        launchers.place_of({**KUBEFLOW, **change})


@pytest.mark.parametrize(
    ('env', 'runtime', 'named'),
    [
        (KUBEFLOW, 'local', 'JAX_NUM_PROCESSES=2 and JAX_PROCESS_ID=1'),
        (SKY, 'local', 'SKYPILOT_NUM_NODES=2 and SKYPILOT_NODE_RANK=1'),
        (SALLOC, 'local', "SLURM_NTASKS=4: .*runtime='local' without replicas is one"),
        (SALLOC, 'mpmd', 'SLURM_NTASKS=4: .*no variable says where process 0 is'),
        (SHELL, 'mpmd', 'SLURM_NTASKS=4: .*no variable says where process 0 is'),
        ({'WORLD_SIZE': '2', 'RANK': '0'}, 'mpmd', 'WORLD_SIZE=2 and RANK=0'),
        ({'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '0'}, 'local', 'OMPI_COMM_WORLD_SI'),
    ],
)
def test_who_would_train_alone_beside_others_is_refused(env, runtime, named, monkeypatch):
    """In a line that names the variables and --processes=1, which is taken."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f'{named}.*; give --processes=1 to train in'):
        process_group_of(config_of(runtime=runtime), NOBODY)
    alone = process_group_of(config_of(runtime=runtime), NOBODY._replace(processes=1))
    assert alone.count == 1


@pytest.mark.parametrize(
    ('runtime', 'replicas', 'joined'),
    [('spmd', 1, True), ('spmd', 2, True), ('local', 2, True), ('mpmd', 2, False)],
)
def test_processes_of_one_program_are_one_jax(runtime, replicas, joined, monkeypatch):
    """JAX's coordinator has the launcher's address then, and ours the next port."""
    met, note = [], lambda name: lambda address, *_, **__: met.append((name, address[:3]))
    monkeypatch.setattr(loop, 'connect', note('ours'))
    monkeypatch.setattr(loop, 'start_jax', note('JAX'))
    for name, value in KUBEFLOW.items():
        monkeypatch.setenv(name, value)
    process_group_of(config_of(model='lenet', runtime=runtime, replicas=replicas), NOBODY)
    first, second = ('node-0:6666', 2, 1), ('node-0:6667', 2, 1)
    assert met == ([('ours', second), ('JAX', first)] if joined else [('ours', first)])


def a_group():
    """Process 1 of two, without a connection."""
    group = ProcessGroup()
    terms = Terms(('a', 'b'), 2)
    group.peer, group.index = SimpleNamespace(terms=terms, host='10.0.0.2'), 1
    return group


def test_no_proxy_stands_before_process_0(monkeypatch):
    """gRPC takes http_proxy even to loopback; hosts that the user has named stay."""
    env = {'http_proxy': 'http://127.0.0.1:9', 'no_proxy': 'a.example', 'no_grpc_proxy': ''}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    seen, direct = [], 'no_grpc_proxy'
    note = lambda *_, **__: seen.append(os.environ.get(direct))
    monkeypatch.setattr(world.jax.distributed, 'initialize', note)
    monkeypatch.setattr(world, '_use_gloo', lambda own: None)
    world.start_jax(Address('10.0.0.1:9', 2, 1), a_group())
    assert seen == ['a.example,10.0.0.1,127.0.0.1']
    assert os.environ['http_proxy'] == env['http_proxy'], 'downloads take it'


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
        coordinator, processes, process = launchers.place_of()
        assert (processes, process) == (2, i)
        assert coordinator.split(':')[0] in ('localhost', '127.0.0.1')
        _, port = endpoint(world.beside(Address(coordinator, processes, process)))
        assert 1024 < port < 65536


SAVE = """
import os, pathlib, signal, sys, time

def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[1], 'saved').touch()
    os._exit(143)

signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], 'ready').touch()
time.sleep(60)
"""


def behind_a_shell(folder):
    """The command of a program that saves after SIGTERM, and of a shell that waits for it."""
    (folder / 'save.py').write_text(SAVE)
    return ['sh', '-c', f'"{sys.executable}" -S {folder}/save.py {folder}; true']


def wait_for(path, limit=20.0):
    """Waits until a file is there."""
    end = time.monotonic() + limit
    while not path.exists():
        assert time.monotonic() < end, f'no {path.name}'
        time.sleep(0.02)


@pytest.mark.parametrize('cause', ['a sibling that failed', 'a signal'])
def test_what_stands_behind_a_shell_saves_and_ends(cause, tmp_path, monkeypatch):
    """SIGTERM ends the shell at once, and not the program, for which the launcher waits."""
    monkeypatch.setattr(launch, 'NOTICE', 0.1)
    running = [subprocess.Popen(behind_a_shell(tmp_path), start_new_session=True)]
    wait_for(tmp_path / 'ready')
    began = time.monotonic()
    if cause == 'a signal':
        assert launch.watch(running, [signal.SIGUSR1]) == 143
    else:
        running.append(
            subprocess.Popen(
                [sys.executable, '-Sc', 'import sys; sys.exit(3)'], start_new_session=True
            )
        )
        assert launch.watch(running, []) == 3
    assert time.monotonic() - began < 10
    assert (tmp_path / 'saved').exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(running[0].pid, 0)


def test_a_launcher_that_is_killed_takes_all_with_it(tmp_path):
    """Also what stands behind a shell, and after it has saved."""
    process = subprocess.Popen([*LAUNCH[:4], '1', '--', *behind_a_shell(tmp_path)], env=ENV)
    wait_for(tmp_path / 'ready', 60)
    process.kill()
    process.wait()
    wait_for(tmp_path / 'saved')
    for _ in range(100):
        if subprocess.run(['pgrep', '-f', str(tmp_path)], check=False).returncode == 1:
            return
        time.sleep(0.05)
    pytest.fail('somebody is left')


@pytest.mark.parametrize('listen', [launch._signals, stop_signals], ids=['launcher', 'run'])
def test_signals_that_end_a_run(listen):
    """Of a closed terminal and of Slurm too; who ignores SIGHUP, as under nohup, goes on to."""
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1
    before = {n: signal.signal(n, signal.SIG_DFL) for n in numbers}
    try:
        with contextlib.ExitStack() as stack:
            seen = listen()
            seen = seen if isinstance(seen, list) else stack.enter_context(seen)
            for n in numbers:
                signal.raise_signal(n)
            assert seen == list(numbers)
        for n in numbers:
            signal.signal(n, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with contextlib.ExitStack() as stack:
            seen = listen()
            seen = seen if isinstance(seen, list) else stack.enter_context(seen)
            signal.raise_signal(signal.SIGHUP)
            assert seen == []
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)


def test_output_to_a_closed_terminal_ends_no_run(tmp_path):
    """It goes nowhere; that to a file, a pipe or an open terminal stays."""
    far, near = os.openpty()
    open_far, open_near = os.openpty()
    read, write = os.pipe()
    os.close(far)
    with pytest.raises(OSError, match='Input/output'):
        os.write(near, b'x')
    leave_closed_terminal((near, open_near, write))
    for output in (near, open_near, write):
        assert os.write(output, b'x') == 1
    assert os.read(read, 1) == os.read(open_far, 1) == b'x'
    for end in (near, open_far, open_near, read, write):
        os.close(end)
