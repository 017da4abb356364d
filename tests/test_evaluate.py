"""Scoring has randomness of its own, and time of its own."""

import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import ml_collections
import numpy as np
import pytest

from jaxmp import boundary
from jaxmp.boundary.pipeline import Pipeline
from jaxmp.codecs import raw
from jaxmp.config import KEYS
from jaxmp.feedback import direct
from jaxmp.metrics import ACCURACY
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes import allocator
from jaxmp.training import experiment, loop
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir import points, progress, records
from tests.runs import SMALL, config_of, known_model


class Dense(nn.Module):
    """The cheapest of stages."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(x.reshape(len(x), -1))


def spying(seen):
    """``raw``, telling the key of every message it makes."""
    tell = lambda words: seen.append(tuple(np.asarray(words).tolist()))

    def send(x, tx, ctx):
        jax.debug.callback(tell, jax.random.key_data(ctx.key))
        return raw.encode(x, ctx), tx

    return direct(raw)._replace(send=send)


@pytest.mark.parametrize('runtime', KEYS['parallel.runtime'].words)
def test_an_evaluation_draws_from_no_training_steps_stream(runtime, monkeypatch):
    """Batch i of a test had the key of step i - 1."""
    known_model(monkeypatch, 'dense', lambda classes, width: (Dense(4), Dense(classes)))
    words = {**SMALL, 'model': 'dense', 'runtime': runtime, 'test_examples': 0}  # all of them
    s, seen = experiment.experiment_of(config_of(**words)), []
    model = Pipeline(s.model.stages, (boundary(spying(seen), direct(raw)),))
    s = s._replace(model=model)
    made = Trainer(s, ProcessGroup())
    state = made.create()
    made.evaluate(state, True)
    jax.effects_barrier()
    step = lambda i: jax.random.fold_in(jax.random.key(s.config.seed), i)
    at = lambda key, *path: at(jax.random.fold_in(key, path[0]), *path[1:]) if path else key
    drawn = lambda key: tuple(np.asarray(jax.random.key_data(key)).tolist())
    batches = -(-len(s.data.test.y) // s.config.batch_size)
    assert len(seen) == len(set(seen)) == batches > 5
    # The model's stream of a step, micro-batch 0, the boundary after stage 0, forward.
    shared = {drawn(at(step(i), 1, 0, 2, 0)) for i in range(batches + 1)}
    assert not shared & set(seen)


@pytest.mark.parametrize(
    ('fwd', 'wanted'),
    [
        ('bf16', ['asked', 'asked', 'read', 'read']),
        ('raw', ['asked', 'read']),
        (' raw;raw;raw', ['asked', 'read']),
    ],
)
def test_both_tests_of_a_point_wait_for_others_once(fwd, wanted, monkeypatch):
    """Over 150 ms each wait takes .9 s; of raw messages, one test is both."""
    made, seen = Trainer(experiment.experiment_of(config_of(**SMALL, fwd=fwd)), ProcessGroup()), []

    def totalled(values):
        seen.append('asked')
        return lambda: (seen.append('read'), values)[1]

    monkeypatch.setattr(made.group, 'totalled', totalled)
    scores = made.tested(made.create())
    assert seen == wanted
    assert (scores['on'] == scores['off']) == ('raw' in fwd)


def test_examples_a_second_leave_the_evaluation_out(monkeypatch, capsys):
    """A step of 100 examples takes 20 s, a test 1,000 s: 5 a second from the first to the last.

    After each of these 12 long steps, and after each of 3 tests, freed memory is returned.
    """
    now, released = [0.0], []
    monkeypatch.setattr(loop, 'release_freed_pages', lambda: released.append(now[0]))
    monkeypatch.setattr(allocator, 'release_freed_pages', lambda: released.append(now[0]))
    clock = SimpleNamespace(time=lambda: now[0])
    monkeypatch.setattr(progress, 'time', clock)
    monkeypatch.setattr(loop, 'time', clock)

    def steps(number, state, order, stopped):
        for i in range(len(order) // 100):
            now[0] += 20
            yield (
                SimpleNamespace(step=state.step + i + 1),
                {'loss': [1.0], 'accuracy': [0.5]},
                False,
            )

    def tested(state):
        now[0] += 1000
        return {mode: {'loss': 1.0, 'accuracy': 0.5} for mode in ('off', 'on')}

    config = {'seed': 0, 'batch_size': 100, 'fwd': 'raw', 'bwd': 'raw', 'model': {'path': ''}}
    s = SimpleNamespace(
        config=ml_collections.ConfigDict(config),
        points=points.Points(epoch=4, test=4, save=36, end=12),
        task=SimpleNamespace(metric=ACCURACY, scores=('loss', 'accuracy'), stages=()),
        data=SimpleNamespace(train=SimpleNamespace(y=np.zeros(400))),
    )  # fmt: skip
    r = SimpleNamespace(
        exp=s, signals=[], probe=None,
        trainer=SimpleNamespace(
            epoch=steps, tested=tested, group=ProcessGroup(),
            drained=lambda state: state, **dict.fromkeys(('check', 'export'), lambda state: None)),
        checkpoints=SimpleNamespace(save=lambda *given: None),
        records=records.Records(None, 0),
        display=progress.Display(12, 0, examples=100),
    )  # fmt: skip
    loop.train(
        r,
        SimpleNamespace(step=0),
        {'loss': 0.0, 'accuracy': 0.0, 'steps': 0, 'missed': 0, 'seconds': 0.0},
    )
    rates = re.findall(r'(\S+) ex/s', capsys.readouterr().err)
    assert rates == ['5'] * 11
    assert len(released) == 12 + 3


def test_a_loop_tells_the_time_left_after_what_compiles(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress, 'time', SimpleNamespace(time=lambda: now[0]))
    seen = []
    for item in progress.tracked(range(5), 'text'):
        seen.append(item)
        now[0] += 100 if item == 0 else 8
    assert seen == [0, 1, 2, 3, 4]
    lines = capsys.readouterr().err.splitlines()
    assert lines == ['text  0:24 left  step 2/5', 'text  0:08 left  step 4/5']
