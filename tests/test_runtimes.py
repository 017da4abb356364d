"""Every runtime against the one-program runtime: the same means, parameters and states."""

import socket
import subprocess
import sys
from functools import cache, partial

import jax
import numpy as np
import pytest

from tests import pipelines
from tests.runs import ENV, ROOT

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
rounded = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # statistics are float32


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@cache
def wanted(case, n, replicas):
    return pipelines.local(case, n, replicas)


def parts_of(feedback, s, links):
    """What stage s holds of the one-program runtime's states, mirrored ones at both ends."""
    ends = lambda b, way: getattr(feedback, way)[b]
    receiver = lambda b, way, mirrored: ends(b, way)[0 if mirrored else 1]
    left = right = ((), ())
    if s:
        fwd = links[s - 1].fwd
        left = receiver(s - 1, 'fwd', fwd.mirrored), ends(s - 1, 'bwd')[0]
    if s < len(links):
        bwd = links[s].bwd
        right = ends(s, 'fwd')[0], receiver(s, 'bwd', bwd.mirrored)
    return (*left, *right)


def assert_equal(leaves, case, n, replicas):
    """``(name, stage, replica) -> leaves`` equal the one-program runtime's; all are there."""
    _, states = wanted(case, n, replicas)
    stages = pipelines.STAGES if replicas == 1 else pipelines.SHORT
    links = pipelines.cuts(case, n, len(stages) - 1)
    seen = 0
    for r, state in enumerate(states):
        for s in range(len(stages)):
            want = state.params[s], state.model_state[s], parts_of(state.feedback, s, links)
            check = close, rounded, close
            for name, tree, same in zip(state._fields, want, check, strict=True):
                found = leaves(name, s, r)
                for a, b in zip(found, jax.tree.leaves(tree), strict=True):
                    same(np.asarray(a), b)
                    seen += 1
    return seen


RUNS = [(kind, case, n, 1) for kind in ('mpmd', 'spmd') for case in pipelines.CASES for n in (1, 4)]
RUNS += [(kind, 'ef21', n, 2) for kind in ('mpmd', 'spmd') for n in (1, 4)]


@pytest.mark.parametrize(('kind', 'case', 'n', 'replicas'), RUNS)
def test_a_runtime_equals_one_program(kind, case, n, replicas):
    found, model, runtime = pipelines.apart(kind, case, n, replicas)
    close(np.array(found), np.array(wanted(case, n, replicas)[0]))
    leaves = lambda name, s, r: jax.tree.leaves(getattr(model, name)[s][r])
    assert assert_equal(leaves, case, n, replicas)
    for s, rows in model.params.items():
        for r, tree in rows.items():
            device = runtime.columns.devices[r, s]
            assert all(a.devices() == {device} for a in jax.tree.leaves(tree))


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def run_processes(folder, count, *what):
    """Runs processes to their end, or to ours; returns what each of them saved."""
    address, outs = f'127.0.0.1:{free_port()}', [folder / f'{i}.npz' for i in range(count)]
    logs = [(folder / f'{i}.log').open('w+') for i in range(count)]
    command = [sys.executable, '-m', 'tests.pipelines', address]
    running = []
    try:
        for i in range(count):
            rest = [str(a) for a in (i, count, *what, outs[i])]
            running.append(
                subprocess.Popen(
                    command + rest, env=ENV, cwd=ROOT, stdout=logs[i], stderr=subprocess.STDOUT
                )
            )
        codes = [p.wait(timeout=240) for p in running]
    finally:
        for p in running:
            p.kill()
            p.wait()
        texts = [(f.seek(0), f.read()[-2000:], f.close())[1] for f in logs]
    assert codes == [0] * count, texts
    return [dict(np.load(out)) for out in outs]


@pytest.mark.parametrize(
    ('processes', 'case', 'n', 'replicas'), [(2, 'ef', 4, 1), (4, 'ef21', 1, 1), (4, 'ef21', 4, 2)]
)
def test_processes_equal_one_program(tmp_path, processes, case, n, replicas):
    saved = run_processes(tmp_path, processes, case, n, replicas)
    found = {k: a for one in saved for k, a in one.items() if k not in ('means', 'compiled')}
    means = [one['means'] for one in saved if 'means' in one]
    close(np.concatenate(means, 1), np.array(wanted(case, n, replicas)[0]))

    def leaves(name, s, r):
        keys = [k for k in found if k.startswith(f'{name}/{s}/{r}/')]
        return [found[k] for k in sorted(keys, key=lambda k: int(k.rsplit('/', 1)[1]))]

    assert assert_equal(leaves, case, n, replicas) == len(found)
