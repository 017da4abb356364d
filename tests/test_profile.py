"""A profile under mpmd: the step's time is shared out, and no number changes."""

import gzip
import json
import time

import numpy as np
import pytest

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes import worker
from jaxmp.runtimes.schedule import Action
from jaxmp.training import experiment, profile, sizes
from jaxmp.training.trainer import Trainer
from tests.test_probe import COUNT, config, task

RATE = 0.5  # Mbit/s


def run(tmp_path=None, steps=6, **own):
    """The losses of the first steps, of 6."""
    settings = config(probe='off', fwd='uniform(4)', bwd='raw', runtime='mpmd', num_microbatches=2)
    settings.parallel.update({'link_rate': RATE, 'profile': tmp_path is not None, **own})
    exp = experiment.experiment_of(settings, task())
    trainer, found = Trainer(exp, ProcessGroup()), []
    state, order = trainer.create(), np.arange(COUNT)
    with profile.profiled(trainer, tmp_path):
        for epoch in (0, 1):
            for after, values, _ in trainer.epoch(epoch, state, order):
                state, found = after, found + list(values['loss'])
                if len(found) >= steps:
                    return exp, found
    return exp, found


@pytest.mark.parametrize('schedule', [pytest.param('1f1b', marks=pytest.mark.slow), 'zb_h1'])
def test_a_profile_shares_out_the_time_of_a_step(tmp_path, schedule, capsys, monkeypatch):
    wait, least = worker.Worker.wait, 0.005  # seconds by which every action ends later here
    monkeypatch.setattr(worker.Worker, 'wait', lambda w, out: (wait(w, out), time.sleep(least)))
    exp, losses = run(tmp_path, schedule=schedule)
    assert losses == run(schedule=schedule)[1]
    assert len(losses) == 6
    found = json.loads((tmp_path / 'profile.json').read_text())
    rows = [profile.Seconds(**row) for row in found['stages'].values()]
    end = sum(rows[0][:4])
    assert f'the {1e3 * end:.1f} ms from' in found['about']
    for row in rows:
        assert min(row.F, row.B) >= 2 * least  # two micro-batches
        assert min(row.encode, row.decode) > 0
        assert (row.W > 0) == (schedule != '1f1b')
        assert sum(row[:4]) == pytest.approx(end)
        assert row.encode + row.decode < end
    [size] = sizes.message_bytes(exp)
    for stage, way in ((1, 'forward'), (0, 'backward')):
        assert rows[stage].waiting > 8 * size[way] / (1e6 * RATE) / 2  # at least for one of two
    assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
    [trace] = (tmp_path / 'profile' / 'process-0').rglob('perfetto_trace.json.gz')
    assert json.loads(gzip.decompress(trace.read_bytes()))['traceEvents']
    profile.show(tmp_path)
    assert 'waiting' in capsys.readouterr().out


def test_two_processes_share_out_a_step():
    """The second stage waits for the first one, which then waits for its gradients."""
    first = profile.Told(3.0, 2.0, [Action(0.0, 0, 0, 'F', 0, 1.0)], [(0, 0.25, 0.0)])
    backward, forward = Action(2.0, 1, 0, 'B', 1, 2.5), Action(1.5, 1, 0, 'F', 1, 2.0)
    second = profile.Told(3.5, 1.0, [backward, forward], [(1, 0.0, 0.125)])
    rows, about = profile.together([first, second])
    assert rows[0] == profile.Seconds(1.0, 0.0, 0.0, 1.5, 0.25, 0.0)
    assert rows[1] == profile.Seconds(0.5, 0.5, 0.0, 1.5, 0.0, 0.125)
    assert 'the 2500.0 ms from' in about
    assert 'took 3500.0 ms' in about
    assert 'took 2000.0 ms' in about


def test_a_run_that_ends_within_the_trace_writes_it(tmp_path):
    run(tmp_path, steps=5)
    assert list((tmp_path / 'profile').rglob('*.xplane.pb'))
