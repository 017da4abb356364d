"""How long a run is and how often it is tested and saved: in epochs, steps, a share of it."""

import json
import signal
import sys

import jax
import numpy as np
import optax
import pytest

from jaxmp import config as schema
from jaxmp.pictures import compare, curves
from jaxmp.training import checkpoint, command, experiment, loop, together
from jaxmp.training.optimizer import rate_of
from jaxmp.training.workdir import locks, points
from tests.base import slow
from tests.runs import SMALL, config_of, known_model, records
from tests.tiny_stages import stages

RANDOM = {'fwd': 'ef21(uniform(2, rounding=stochastic))', 'bwd': 'ef(uniform(4))'}
RANDOM |= {'augment': 'crop_flip', 'num_microbatches': 2, 'momentum': 0.9}
INSIDE = {'steps': 13, 'eval_every': '4 steps', 'checkpoint_every': '3 steps'}  # 5 are an epoch


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    known_model(monkeypatch, 'tiny', stages)


def small(**changes):
    return config_of(**{'model': 'tiny', 'fwd': 'raw', 'bwd': 'raw', **SMALL, **changes})


class Killed(BaseException):
    """A process that ends without a word."""


def interrupted(monkeypatch, config, workdir, trainer, at):
    """Trains to step ``at``, at which the process is killed, or gets SIGTERM if it is negative."""
    with monkeypatch.context() as patch:

        def add(place, values, tested):
            after = summed(place, values, tested)
            if tested + place['steps'] < abs(at) <= tested + after['steps']:
                if at > 0:
                    raise Killed
                signal.raise_signal(signal.SIGTERM)
            return after

        def each_step(*about):
            agreed = asked(*about)
            return lambda: agreed()._replace(gap=1)

        summed, asked = loop.add, together._asked
        patch.setattr(together, '_asked', each_step)
        patch.setattr(loop, 'add', add)
        try:
            assert loop.train_and_evaluate(config, workdir, trainer=trainer, quiet=True) is None
        except Killed:
            assert at > 0


def arrays(workdir, trainer):
    """All that the last checkpoint holds."""
    like = trainer.export(trainer.create())
    saved, place = checkpoint.Checkpoints(workdir).restore(like)
    return jax.tree.leaves(saved.parts), {k: v for k, v in place.items() if k != 'seconds'}


def small_text(**changes):
    """A tied table, dropout, Adam's moments and a clipped norm."""
    sizes = {'width': 8, 'heads': 2, 'blocks': 2, 'stages': 2, 'sequence_length': 16}
    sizes |= {'train_examples': 84, 'test_examples': 24, 'dropout': 0.1, 'warmup': '4 steps'}
    return config_of('text_gpt2', **sizes, **{**changes, 'augment': 'none'})


@pytest.mark.parametrize('make', [small, pytest.param(small_text, marks=pytest.mark.slow)])
@pytest.mark.parametrize('runtime', slow(schema.KEYS['parallel.runtime'].words, 'local'.__ne__))
def test_a_run_that_is_killed_inside_an_epoch_ends_like_another(
    make, runtime, tmp_path, monkeypatch
):
    """To the bit: parameters, moments, feedback, all records; tested and saved inside epochs."""
    config = make(**RANDOM, **INSIDE, runtime=runtime)
    trainer = loop.prepare(config, loop.ProcessGroup())
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    loop.train_and_evaluate(config, whole, trainer=trainer, quiet=True)
    saved = []
    for at in (-1, 5, 8, 11):
        interrupted(monkeypatch, config, cut, trainer, at)
        saved.append(max(int(p.name) for p in (cut / 'checkpoints').iterdir()))
    assert saved == [2, 3, 6, 9]  # 2 by the signal
    loop.train_and_evaluate(config, cut, trainer=trainer, quiet=True)
    assert records(cut) == records(whole)
    assert [r['step'] for r in records(whole) if r['kind'] == 'train'] == [4, 8, 12, 13]
    (a, place), (b, other) = arrays(whole, trainer), arrays(cut, trainer)
    assert place == other
    assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
def test_a_killed_run_ends_like_another_where_the_steps_to_a_point_are_one_program(
    tmp_path, monkeypatch
):
    """As on an accelerator, which looks for a signal at points alone."""
    monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
    config = small(**RANDOM, **INSIDE)
    trainer = loop.prepare(config, loop.ProcessGroup())
    assert trainer.scans
    loop.train_and_evaluate(config, tmp_path / 'whole', trainer=trainer, quiet=True)
    for at, saved in ((-1, 4), (5, 4), (8, 6), (11, 9)):
        interrupted(monkeypatch, config, tmp_path / 'cut', trainer, at)
        assert (tmp_path / 'cut' / 'checkpoints' / str(saved)).is_dir()
    loop.train_and_evaluate(config, tmp_path / 'cut', trainer=trainer, quiet=True)
    assert records(tmp_path / 'cut') == records(tmp_path / 'whole')


def test_where_a_run_is_tested_changes_nothing_of_it(tmp_path):
    """By steps, in other pieces, it is the run by epochs; its loss is the mean since a test."""
    by_epochs = loop.train_and_evaluate(small(epochs=2), tmp_path / 'a', quiet=True)
    config = small(steps=10, eval_every='2 steps', checkpoint_every=1)
    by_steps = loop.train_and_evaluate(config, tmp_path / 'b', quiet=True)
    assert by_steps['steps'] == by_epochs['steps'] == 10
    assert by_steps['epochs'] == by_epochs['epochs'] == 2
    assert by_steps['test']['on']['last'] == by_epochs['test']['on']['last']
    ends = lambda row: {k: row[k] for k in ('step', 'epoch', 'loss', 'accuracy')}
    last = {r['compression']: ends(r) for r in records(tmp_path / 'b') if r['kind'] == 'test'}
    assert last == {r['compression']: ends(r) for r in records(tmp_path / 'a')[-2:]}
    train = by_steps['history']['train']
    assert train['step'] == [2, 4, 6, 8, 10]
    assert train['epoch'] == [0.4, 0.8, 1.2, 1.6, 2]
    losses = by_epochs['history']['train']['loss']
    mean = np.average([train['loss'][2], train['loss'][3], train['loss'][4]], weights=(1, 2, 2))
    assert abs(np.mean(train['loss']) - np.mean(losses)) < 1e-5
    assert abs(mean - losses[1]) < 0.2  # the third of them is of both epochs


def test_a_run_goes_on_with_other_points_and_another_length(tmp_path):
    """A checkpoint inside an epoch may become the end, which is then tested once."""
    config = small(**INSIDE)
    trainer = loop.prepare(config, loop.ProcessGroup())
    run = lambda **changes: loop.train_and_evaluate(
        small(**{**INSIDE, **changes}), tmp_path, trainer=of(**changes), quiet=True
    )
    of = lambda **changes: trainer.of_seed(small(**{**INSIDE, **changes}))
    run(steps=9, eval_every='9 steps', checkpoint_every='6 steps')
    steps = lambda: [r['step'] for r in records(tmp_path) if r['kind'] == 'train']
    assert steps() == [9]
    run(steps=14, eval_every='10 steps', checkpoint_every='12 steps')
    assert steps() == [9, 10, 14]
    for step in (14, 12):  # as if it had been killed after the test of step 14, before its end
        if step == 14:
            (tmp_path / 'summary.json').unlink()
            checkpoints = tmp_path / 'checkpoints'
            (checkpoints / '14').rename(tmp_path / 'gone')
        summary = run(steps=12)
        assert steps() == [9, 10, 12]
        assert summary['epochs'] == 2.4
    with pytest.raises(locks.WorkdirError, match=r'has 12 steps, more than config\.steps=11; give'):
        run(steps=11)


@pytest.mark.parametrize(
    ('value', 'problem'),
    [
        ('10 stepz', "'10 stepz'"), ('1.5 steps', "'1.5 steps'"), ('-1 epochs', "'-1 epochs'"),
        (0, '0'), ('0%', "'0%'"), (True, 'True'), (float('nan'), 'nan'), ('', "''"),
    ],
)  # fmt: skip
def test_a_length_that_is_none(value, problem):
    said = "is no length of training; give '500 steps', '2 epochs', '10%' of the run, or a number"
    for name in ('eval_every', 'checkpoint_every'):
        config = schema.complete({})
        with config.unlocked(), config.ignore_type():
            config.update_from_flattened_dict({name: value})
        with pytest.raises(ValueError, match=f'^config.{name}={problem} {said}') as caught:
            schema.check(config)
        assert str(caught.value).endswith('a number of epochs, more than 0')


@pytest.mark.filterwarnings('ignore:the load_module')  # ml_collections loads files with it
def test_a_command_gives_a_length_as_a_number_or_a_text(monkeypatch, tmp_path):
    own = tmp_path / 'own.py'
    text = 'c.eval_every = 2\n    c.checkpoint_every = "7 steps"\n    return c'
    own.write_text(
        f'from jaxmp.config import load\ndef get_config():\n    c = load("common")\n    {text}\n'
    )
    given = ['--config.eval_every=500 steps', '--config.optimizer.warmup=3%', '--config.steps=9']
    for more, wanted in (([], (2, '7 steps', '0 steps')), (given, ('500 steps', '7 steps', '3%'))):
        argv = ['train.py', f'--config={own}', *more]
        monkeypatch.setattr(sys, 'argv', argv)
        command.parse(argv)
        config = schema.complete(command.CONFIG.value)
        schema.check(config)
        assert (config.eval_every, config.checkpoint_every, config.optimizer.warmup) == wanted
    assert config.steps == 9


def rates(steps, **changes):
    """The rate of every step of a run with 10 steps an epoch."""
    config = schema.complete({})
    config.update(steps=steps)
    config.optimizer.update(changes, lr=0.5)
    schema.check(config)
    rate = rate_of(config, 10)
    return np.array([float(rate(i)) for i in range(steps)])


def test_the_rate_warms_up_and_falls():
    """Where it is warm, each schedule is that of optax over the steps that are left."""
    up = np.arange(8) / 8 * 0.5
    for name, fall in (
        ('linear', optax.linear_schedule(0.5, 0.0, 32)),
        ('cosine', optax.cosine_decay_schedule(0.5, 32)),
        ('constant', lambda step: 0.5),
        ('wsd', lambda step: 0.5 * min(1, (32 - step) / 10)),
    ):
        after = [float(fall(i)) for i in range(32)]
        share, steps = ('wsd(25%)', 'wsd(10 steps)') if name == 'wsd' else (name, name)
        for warmup in ('8 steps', '20%', 0.8, '0.8 epochs'):
            found = rates(40, warmup=warmup, schedule=share)
            np.testing.assert_allclose(found, [*up, *after], atol=1e-6, err_msg=name)
        np.testing.assert_allclose(rates(32, schedule=steps), after, atol=1e-6)
    assert rates(32, schedule='wsd').tolist() == rates(32, schedule='wsd(20%)').tolist()
    plain = rates(40, schedule='cosine(4)')
    assert plain.tolist() == [plain[10 * (i // 10)] for i in range(40)]
    warmed = rates(48, schedule='cosine(4)', warmup='8 steps')
    np.testing.assert_allclose(warmed, [*up, *plain], atol=1e-6)


@pytest.mark.parametrize('schedule', ['linear', 'cosine', 'wsd'])
def test_the_rate_of_late_gradients_falls_to_0_with_the_last_update(schedule):
    """A run of 44 steps, of which the first four move nothing, has the rates of one of 40."""
    found, on_time = (
        rates(steps, schedule=schedule, warmup='10%', delay=steps - 40) for steps in (44, 40)
    )
    np.testing.assert_array_equal(found[:40], on_time)


def test_a_run_that_is_too_short_for_its_rate():
    for changes, said in (
        ({'warmup': '40 steps'}, r"warmup='40 steps' are 40 steps and the run has 40; shorten"),
        ({'warmup': 5}, r'warmup=5 are 50 steps and the run has 40'),
        ({'warmup': '50%', 'schedule': 'wsd(21 steps)'},
         r"warmup='50%' and config.optimizer.schedule='wsd\(21 steps\)' are 41 steps"),
        ({'delay': 40}, r'delay=40 leaves none of 40 steps .*; give a delay of 39 at most'),
        ({'delay': 30, 'warmup': 2}, r'warmup=2 are 20 .* 40, of which .*delay=30 move nothing'),
        ({'schedule': 'wsd(half)'}, r"schedule='wsd\(half\)' is not one .*, nor one with a length"),
        ({'schedule': 'cosine(0)'}, r"schedule='cosine\(0\)' is not one .*such as 'cosine\(20\)'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f'^config.optimizer.{said}') as caught:
            rates(40, **changes)
        assert '\n' not in str(caught.value)
    assert len(rates(40, warmup='20 steps', schedule='wsd(20 steps)')) == 40


def test_epochs_of_a_run_in_steps_are_those_that_it_begins():
    """Phases count them from the end."""
    exp = experiment.experiment_of(small(steps=12, phases='raw@:1; raw@-1:', fwd='uniform(2)'))
    assert exp.points.epochs == 3
    assert [p.epochs for p in exp.phases] == [range(1), range(2, 3)]
    assert exp.points == points.Points(5, 5, 5, 12, in_steps=True)


def test_a_text_is_drawn_by_steps_and_images_by_epochs(tmp_path, monkeypatch):
    """An older summary, which does not say where it was tested, was at every epoch."""
    seen = {}
    monkeypatch.setattr(compare.style, 'save', lambda figure, path: seen.update(figure=figure))
    scores = {'loss': [2.0, 1.0]}
    for name, unit, x in (('alice', 'step', [7, 14]), ('digits', 'epoch', [1, 2])):
        run = {'config': schema.complete({'data': {'name': name}, 'epochs': 2}).to_dict()}
        run |= {
            'steps': 14,
            'measure': 'loss',
            'history': dict.fromkeys(('train', 'off', 'on'), scores),
        }
        compare.draw(tmp_path, {'runs/x': run})
        loss, test, _ = seen['figure'].axes
        for axes in (loss, test):
            assert axes.get_xlabel() == unit
            assert list(axes.lines[0].get_xdata()) == x
        run['history'] = {p: {**scores, 'step': [3, 14], 'epoch': [0.4, 2]} for p in run['history']}
        assert compare.curves_of(run)['on'][unit] == ([3, 14] if x[0] == 7 else [0.4, 2])
        rows = [
            {'kind': 'train', 'step': s, 'epoch': e, 'loss': 1.0} for s, e in ((3, 0.4), (14, 2))
        ]
        rows += [{**r, 'kind': 'test', 'compression': m} for r in rows for m in ('off', 'on')]
        row = {'boundary': 1, 'uncompressed': 9, 'forward': 1, 'backward': 1}
        run |= {'name': 'x', 'fwd': 'raw', 'bwd': 'raw', 'seed': 0, 'bytes': [row], 'epochs': 2}
        loss, *tests = curves.draw(rows, json.loads(json.dumps(run))).axes
        assert loss.get_xlabel() == tests[0].get_xlabel() == unit
        assert list(loss.lines[0].get_xdata()) == ([3, 14] if unit == 'step' else [0.4, 2])
