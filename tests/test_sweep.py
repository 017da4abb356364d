"""A study from its plan to its report; what is killed, what fails, what is refused."""

import errno
import hashlib
import json
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from jaxmp.models import checkpoint
from jaxmp.pictures import compare
from jaxmp.sweep import runner, study
from jaxmp.training import loop
from jaxmp.training.experiment import experiment_of
from jaxmp.training.workdir import locks
from study.report import results, tables
from tests.base import ENV, ROOT


def words(tmp_path, *more):
    places = f'--out={tmp_path / "results"}', f'--work={tmp_path / "work"}'
    return str(ROOT / 'tests' / 'tiny_study.py'), '--scale=smoke', *places, *more


def plan(tmp_path, *more):
    return runner.plan_of(runner.arguments(words(tmp_path, *more)))


def process(tmp_path, *more):
    command = sys.executable, '-m', 'jaxmp.sweep', *words(tmp_path, *more)
    return subprocess.Popen(command, env=ENV, cwd=ROOT, stdout=subprocess.DEVNULL)


def test_what_fails_is_listed_and_stops_nothing(tmp_path, capsys):
    jobs = plan(tmp_path, '--tables=1', '--rows=none', '--set', 'epochs=1')
    jobs[0].config.fwd = 'aqsgd(top_k(0.1), examples=5)'
    failed = runner.sweep(jobs)
    assert list(failed) == ['none-s0']
    assert failed['none-s0'].startswith('ValueError: config.fwd')
    assert jobs[1].result.exists()
    assert not (jobs[1].workdir / 'checkpoints').exists()
    assert '1 finished, 0 running in other processes, 1 failed' in capsys.readouterr().out


def test_a_run_that_diverges_counts_as_guessing(tmp_path, capsys, monkeypatch):
    """From the epoch in which it did; the ones before stay what they were."""
    words = 'epochs=3', 'probe=off', 'parallel.replicas=2'
    sets = [f'--set={word}' for word in words]
    jobs = plan(tmp_path, '--tables=1', '--rows=none', *sets)
    real = loop.add

    def add(place, values, before):
        third = 2 - place['steps']  # of the second epoch
        if before and 0 <= third < len(values['loss']):
            values = {k: np.where(np.arange(len(v)) == third, np.nan, v) for k, v in values.items()}
        return real(place, values, before)

    with monkeypatch.context() as patch:
        patch.setattr(loop, 'add', add)
        assert runner.sweep(jobs[:1]) == {}
    assert runner.sweep(jobs) == {}
    said = capsys.readouterr().out
    found, other = (json.loads(j.result.read_text()) for j in jobs)
    n = found['steps'] // 3
    assert found['diverged'] == n + 3
    assert f'diverged at step {n + 3}' in said
    assert found['steps'] == other['steps']
    assert set(found) - set(other) == {'diverged'}
    assert found['exchange'] == other['exchange']
    for mode in ('off', 'on'):
        first, *rest = found['history'][mode]['accuracy']
        y = experiment_of(jobs[0].config).data.test.y
        assert rest == [pytest.approx(np.mean(y == 0), abs=1e-6)] * 2
        assert found['history'][mode]['loss'][1:] == [pytest.approx(np.log(10), abs=1e-5)] * 2
        assert found['test'][mode]['best'] == {'epoch': 1} | found['test'][mode]['best']
        assert first > 0.2
    [row] = results.load(tmp_path / 'results')[0].rows.values()
    assert tables.count(row) == '2, 1 diverged'


def test_results_may_lie_on_another_disk_and_settings_be_tuples(tmp_path, monkeypatch):
    [job, *_] = plan(tmp_path, '--tables=1', '--rows=none', '--set', 'epochs=1')
    with job.config.unlocked():
        job.config.own = (16, 32)
    real = pathlib.Path.replace

    def replace(path, target):
        if path.parent != pathlib.Path(target).parent:
            raise OSError(errno.EXDEV, 'Invalid cross-device link')
        return real(path, target)

    monkeypatch.setattr(pathlib.Path, 'replace', replace)
    assert runner.sweep([job]) == {}
    assert study.finished(job)


def test_a_study_may_define_dataclasses(tmp_path):
    """`dataclasses` looks up the module of a class whose annotations are texts."""
    own = tmp_path / 'own.py'
    code = 'from __future__ import annotations', 'import dataclasses', '@dataclasses.dataclass'
    code += 'class A:', '  a: dataclasses.KW_ONLY', 'def get_study(scale, tables): return [A]'
    own.write_text('\n'.join(code))
    assert study.study_of(str(own)).get_study('', ())


def test_two_sweeps_share_the_work(tmp_path, capsys):
    jobs = plan(tmp_path, '--tables=1', '--rows=none', '--seeds=1')
    with locks.locked(jobs[0].workdir) as mine:
        assert mine
        assert runner.sweep(jobs) == {}
    assert '0 finished, 1 running in other processes' in capsys.readouterr().out


def records(workdir):
    path = workdir / 'metrics.jsonl'
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith('}')]


@pytest.mark.slow
def test_a_killed_sweep_loses_no_more_than_an_epoch(tmp_path, capfd):
    """kill -9 in the second run; then nothing is repeated."""
    more = ('--tables=1', '--rows=none', '--set', 'epochs=24')
    plan_ = first, second = plan(tmp_path, *more)
    running, limit = process(tmp_path, *more), time.time() + 900
    while len(records(second.workdir)) < 6 and running.poll() is None and time.time() < limit:
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -9
    done, at = first.result.stat().st_mtime_ns, records(second.workdir)[-1]['epoch']
    capfd.readouterr()
    assert runner.sweep([first, second], quiet=False) == {}
    assert first.result.stat().st_mtime_ns == done
    out, err = capfd.readouterr()
    assert '1/2 done, 1 begun' in out
    going_on = re.search(r'resuming from step (\d+)', err)
    assert going_on, err
    step = int(going_on[1])
    assert step >= (at - 1) * 10
    epochs = [len(json.loads(j.result.read_text())['history']['on']['loss']) for j in plan_]
    assert epochs == [24, 24]


@pytest.mark.parametrize(
    ('more', 'message'),
    [
        (
            ['--rows=fw9-bw9'],
            r'no rows fw9-bw9 \(did you mean fw4-bw8\?\); allowed are none, fw4-bw8',
        ),
        (['--set', 'widht=3'], "no key 'widht'"),
        (['--tables=9'], 'the tables 1, 2, 3, 4, 5'),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        plan(tmp_path, *more)


def test_a_file_without_a_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match='has no get_study'):
        study.study_of(str(ROOT / 'tests' / 'runs.py'))


def test_the_digest_of_a_checkpoint_in_one_file(tmp_path):
    (file := tmp_path / 'model.gguf').write_bytes(b'weights')
    assert checkpoint.digest(str(file)) == hashlib.sha256(b'weights').hexdigest()[:12]
    assert checkpoint.digest(str(tmp_path)) == checkpoint.digest('') == ''


def test_a_folder_of_results_is_compared_by_row(tmp_path):
    """The mean of a row's seeds, with a standard error; a row of one seed has none."""
    run = json.loads((ROOT / 'results' / 'cpu' / 'none-s0.json').read_text())
    for row, seed, more in (('a', 0, 0.0), ('a', 1, 0.02), ('b', 0, 0.1)):
        accuracies = [v + more for v in run['history']['on']['accuracy']]
        on = {**run['history']['on'], 'accuracy': accuracies}
        changed = {**run, 'seed': seed, 'history': {**run['history'], 'on': on}}
        (tmp_path / f'{row}-s{seed}.json').write_text(json.dumps(changed))
    rows = compare.study(tmp_path)
    last = 100 * run['history']['on']['accuracy'][-1]
    first, second = compare.table(rows).columns[4].cells
    assert first == f'{last + 1:.2f}% ± 1'
    assert second == f'{last + 10:.2f}%'
    assert compare.study(tmp_path / 'a-s0.json') == {}
