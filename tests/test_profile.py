"""A profile under mpmd: the step's time is shared out, and no number changes."""

import json
import time

import numpy as np
import pytest

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes import worker
from jaxmp.training import experiment, profile, profile_page, sizes
from jaxmp.training.trainer import Trainer
from tests.test_probe import COUNT, config, task

RATE = 0.5  # Mbit/s


def run(tmp_path=None, **own):
    """The losses of 6 steps."""
    settings = config(probe='off', fwd='uniform(4)', bwd='raw', runtime='mpmd', num_microbatches=2)
    settings.parallel.update({'link_rate': RATE, 'profile': tmp_path is not None, **own})
    exp = experiment.experiment_of(settings, task())
    trainer, found = Trainer(exp, ProcessGroup()), []
    state, order = trainer.create(), np.arange(COUNT)
    with profile.profiled(trainer, tmp_path):
        for epoch in (0, 1):
            for after, values, _ in trainer.epoch(epoch, state, order):
                state, found = after, found + list(values['loss'])
    return exp, found


@pytest.mark.parametrize('schedule', [pytest.param('1f1b', marks=pytest.mark.slow), 'zb_h1'])
def test_a_profile_shares_out_the_time_of_a_step(tmp_path, schedule, capsys, monkeypatch):
    wait, least = worker.Worker.wait, 0.005  # seconds by which every action ends later here
    monkeypatch.setattr(worker.Worker, 'wait', lambda w, out: (wait(w, out), time.sleep(least)))
    exp, losses = run(tmp_path, schedule=schedule)
    assert losses == run(schedule=schedule)[1]
    assert len(losses) == 6
    found = json.loads((tmp_path / 'profile.json').read_text())
    done = [tuple(a[1:5]) for a in found['actions']]
    assert sorted(done) == sorted(tuple(a[1:5]) for a in found['plan'])
    assert min(a[5] - a[0] for a in found['actions']) >= least
    rows, end = profile_page.rows(found), max(a[5] for a in found['actions'])
    for row in rows.values():
        assert min(row.F, row.B, row.encode, row.decode) > 0
        assert (row.W > 0) == (schedule != '1f1b')
        assert sum(row[:4]) == pytest.approx(end)
        assert row.encode + row.decode < end
    [size] = sizes.message_bytes(exp)
    for stage, way in ((1, 'forward'), (0, 'backward')):
        needed = 8 * size[way] / (1e6 * RATE)
        assert needed <= rows[stage].wire < needed + 1.0  # a busy machine wakes threads late
        assert rows[stage].waiting > needed / 2  # at least for one of two messages
    assert end <= found['step']
    assert list((tmp_path / 'trace').rglob('*.xplane.pb'))
    profile.show(tmp_path)
    assert 'wire in' in capsys.readouterr().out
    assert (tmp_path / 'profile.md').read_text().startswith('| stage | F | B | W | waiting |')
    assert b'PNG' in (tmp_path / 'timeline.png').read_bytes()[:8]
    assert 'measured' in (tmp_path / 'timeline.svg').read_text()


def test_two_processes_know_one_end_of_a_message_each():
    """The sender knows when it left, the receiver when it arrived; all is sent as JSON."""
    first = {
        'step': 3.0, 'usual': 2.0, 'actions': [[0.0, 0, 0, 'F', 0, 1.0]],
        'messages': [[0, 1, 0, 'F', 1.0, None], [1, 0, 0, 'B', None, 2.75]],
        'codecs': {'0': {'encode': 0.25, 'decode': 0.0}},
    }  # fmt: skip
    second = {
        'step': 3.5, 'usual': 1.0, 'actions': [[1.5, 1, 0, 'F', 1, 2.0], [2.0, 1, 0, 'B', 1, 2.5]],
        'messages': [[0, 1, 0, 'F', None, 1.5], [1, 0, 0, 'B', 2.5, None]],
        'codecs': {'1': {'encode': 0.0, 'decode': 0.125}},
    }  # fmt: skip
    found = profile.together([first, second], ())
    assert (found['step'], found['usual']) == (3.5, 2.0)
    assert found['messages'] == [[0, 1, 0, 'F', 1.0, 1.5], [1, 0, 0, 'B', 2.5, 2.75]]
    rows = profile_page.rows(found)
    assert rows[0] == profile_page.Seconds(1.0, 0.0, 0.0, 1.5, 0.25, 0.0, 0.25)
    assert rows[1] == profile_page.Seconds(0.5, 0.5, 0.0, 1.5, 0.0, 0.125, 0.5)
