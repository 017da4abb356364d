"""The trainer: a step, a run, its evaluation, what it refuses, and that nothing is lost."""

import functools
import json
import os
import re
import signal
import subprocess
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import data
from jaxmp.config import KEYS
from jaxmp.models import resnet18
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.types import ModelState
from jaxmp.training import checkpoint, experiment, loop, sizes
from jaxmp.training.generation import generate
from jaxmp.training.optimizer import optimizer_of
from jaxmp.training.step import TrainState
from jaxmp.training.tasks import task
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir import locks
from tests.base import ROOT, slow
from tests.runs import SMALL, config_of, damage_newest, known_model, records, start, wait_for_steps
from tests.tiny_stages import stages


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    known_model(monkeypatch, 'tiny', stages)


# Searching for the largest takes longest to compile, and is not what is tested here.
UNIFORM = {'fwd': 'uniform(2)', 'bwd': 'uniform(6)'}


def small(**changes):
    return config_of(**{'model': 'tiny', **UNIFORM, **SMALL, **changes})


def alone(s):
    """A trainer in one program, and its step, not compiled."""
    made = Trainer(s, ProcessGroup())
    return made, functools.partial(made.step(made.rules(0)), made.training.local)


def batch_of(s, rows=slice(0, 32)):
    x, y = s.data.train
    return {'x': x[rows], 'y': y[rows], 'id': np.arange(len(y), dtype=np.int32)[rows]}


def last_state(workdir, s):
    made = Trainer(s, ProcessGroup())
    state = made.create()
    found, _ = checkpoint.Checkpoints(workdir).restore(made.export(state))
    return made.load(state, found)


def leaves_equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


@pytest.mark.parametrize(
    ('fwd', 'bwd'),
    [('ef21(uniform(2))', 'ef(uniform(2))'), ('aqsgd(uniform(4), examples=examples)', 'raw')],
)
def test_a_step_changes_parameters_statistics_and_links(fwd, bwd):
    s = experiment.experiment_of(small(fwd=fwd, bwd=bwd))
    made, step = alone(s)
    before = made.create()
    after, metrics = jax.jit(step)(before, batch_of(s))
    assert int(after.step) == 1
    assert np.isfinite(metrics['loss'])
    pairs = zip(made.weights(before), made.weights(after), strict=True)
    for old, new in pairs:
        assert not leaves_equal(old['params'], new['params'])
        assert not leaves_equal(old['batch_stats'], new['batch_stats'])
    assert not leaves_equal(before.model.feedback.fwd, after.model.feedback.fwd)
    assert bwd == 'raw' or not leaves_equal(before.model.feedback.bwd, after.model.feedback.bwd)
    if fwd.startswith('aqsgd'):  # its batch of ids, and no other row
        table = np.asarray(after.model.feedback.fwd[0][0])
        assert table[:32].any(axis=(1, 2, 3)).all()
        assert not table[32:].any()


def test_scan_and_loop_are_the_same_epoch(monkeypatch):
    s = experiment.experiment_of(small(fwd='ef21(uniform(2))', bwd='uniform(8)', train_examples=64))
    order = np.arange(64, dtype=np.int32)[::-1]
    ends, losses = [], []
    for backend in ('cpu', 'gpu'):
        made = Trainer(s, ProcessGroup())
        state = made.create()
        monkeypatch.setattr(jax, 'default_backend', lambda backend=backend: backend)
        steps = list(made.epoch(0, state, order))
        losses.append(np.concatenate([values['loss'] for _, values, _ in steps]))
        assert made.scans == (backend == 'gpu')
        assert int(steps[-1][0].step) == 2
        ends.append(jax.tree.leaves(made.weights(steps[-1][0])))
    assert len(steps) == 1
    assert losses[0].shape == losses[1].shape == (2,)
    np.testing.assert_allclose(*losses, rtol=1e-2)
    for x, y in zip(*ends, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)


def test_a_run_ends_in_tables_and_a_picture(tmp_path, capsys):
    summary = loop.train_and_evaluate(small(), tmp_path)
    written = json.loads((tmp_path / 'summary.json').read_text())
    assert written == json.loads(json.dumps(summary))
    assert {'commit', 'hardware', 'seed', 'seconds', 'config', 'versions'} <= set(written)
    out = capsys.readouterr().out
    for row in written['bytes']:
        assert f'{row["forward"]:,}' in out
        assert row['uncompressed'] > 14 * row['forward']
    records = [json.loads(r) for r in (tmp_path / 'metrics.jsonl').read_text().splitlines()]
    assert [r['kind'] for r in records] == ['train', 'test', 'test'] * 2
    best = max(r['accuracy'] for r in records if r.get('compression') == 'on')
    assert written['test']['on']['best']['accuracy'] == best
    assert (tmp_path / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert b'<svg' in (tmp_path / 'curves.svg').read_bytes()
    assert json.loads((tmp_path / 'config.json').read_text())['model']['width'] == 2
    # Given again it is not made again, and fewer epochs do not undo it.
    kept = {n: (tmp_path / n).read_text() for n in ('config.json', 'metrics.jsonl')}
    (tmp_path / 'summary.json').write_text(json.dumps({**written, 'commit': 'of then'}))
    again = loop.train_and_evaluate(small(), tmp_path, draw=False)
    assert again == {**written, 'commit': 'of then'}
    with pytest.raises(locks.WorkdirError, match=r'has 2 epochs, more than config\.epochs=1'):
        loop.train_and_evaluate(small(epochs=1), tmp_path, quiet=True)
    assert json.loads((tmp_path / 'summary.json').read_text())['commit'] == 'of then'
    assert {n: (tmp_path / n).read_text() for n in kept} == kept


def test_evaluation_sees_every_example_and_leaves_the_state_alone():
    s = experiment.experiment_of(small(fwd='ef(uniform(1))', bwd='raw', test_examples=0))
    made = Trainer(s, ProcessGroup())
    *_, (state, _, _) = made.epoch(0, made.create(), np.arange(64))
    before = jax.tree.map(np.array, state.model)
    on, off = made.evaluate(state, True), made.evaluate(state, False)
    assert round(on['accuracy'] * 360) == pytest.approx(on['accuracy'] * 360, abs=1e-3)  # images
    assert round(on['loss'], 7) != round(off['loss'], 7)
    assert leaves_equal(before, state.model)


def test_aqsgd_evaluates_without_buffers():
    s = experiment.experiment_of(small(fwd='aqsgd(uniform(2), examples=examples)', bwd='raw'))
    plain = experiment.experiment_of(small(fwd='uniform(2)', bwd='raw'))
    one, other = (Trainer(e, ProcessGroup()) for e in (s, plain))
    assert one.evaluate(one.create(), True) == other.evaluate(other.create(), True)


def test_warm_up_sends_raw_and_primes(tmp_path):
    text = 'aqsgd(uniform(2), examples=examples)'
    config = small(fwd=text, bwd='ef21(top_k(0.1))', phases='raw@:1', epochs=1)
    loop.train_and_evaluate(config, tmp_path, quiet=True)
    s = experiment.experiment_of(config)
    state = last_state(tmp_path, s)
    links = state.model.feedback
    assert np.asarray(links.fwd[0][0]).any(axis=(1, 2, 3)).all()  # every example was seen
    gradient = np.asarray(links.bwd[0][0])
    assert (gradient != 0).mean() > 0.3  # the dense gradient, not a tenth of it
    config = small(epochs=1, fwd='raw', bwd='raw')
    raw = loop.train_and_evaluate(config, tmp_path / 'raw', quiet=True)
    off = next(r for r in records(tmp_path) if r.get('compression') == 'off')
    same = pytest.approx(off['loss'], rel=1e-5)  # the training of another program
    assert raw['test']['off']['last']['loss'] == same


def test_augmentation_shifts_and_mirrors():
    x = jnp.arange(6 * 8 * 8 * 3, dtype=jnp.uint8).reshape(6, 8, 8, 3) | 1
    y = np.asarray(jax.jit(task.crop_flip)(x, jax.random.key(3)))
    assert y.shape == x.shape
    assert y.dtype == np.uint8
    frame = np.pad(np.asarray(x), ((0, 0), (4, 4), (4, 4), (0, 0)))
    for image, whole in zip(y, frame, strict=True):
        crops = [whole[i : i + 8, j : j + 8] for i in range(9) for j in range(9)]
        assert any((image == c).all() or (image == c[:, ::-1]).all() for c in crops)


def test_resnet18_is_the_published_network():
    s = experiment.experiment_of(config_of(width=64, data='digits', fwd='raw', bwd='raw'))
    shapes = jax.eval_shape(
        lambda k: s.model.init(k, jnp.zeros((100, 32, 32, 3)), train=True)[0], jax.random.key(0)
    )
    params = jax.tree.leaves([v['params'] for v in shapes])
    assert sum(np.prod(p.shape) for p in params) == 11_173_962
    likes = s.model.likes(shapes, jax.ShapeDtypeStruct((100, 32, 32, 3), jnp.float32), train=True)
    assert [4 * np.prod(x.shape) for x in likes] == [26_214_400, 13_107_200, 6_553_600]
    with pytest.raises(ValueError, match='positive width'):
        resnet18(width=0)


@pytest.mark.parametrize(
    ('norm', 'collections', 'names'),
    [
        ('batch', {'params', 'batch_stats'}, {'kernel', 'bias', 'scale', 'mean', 'var'}),
        ('group', {'params'}, {'kernel', 'bias', 'scale'}),
        ('none', {'params'}, {'kernel', 'bias'}),
    ],
)
def test_a_normaliser_of_resnet18_says_what_it_keeps(norm, collections, names):
    stages, x = resnet18(classes=10, width=6, norm=norm), jnp.zeros((2, 8, 8, 3))
    for stage in stages:
        variables = jax.eval_shape(lambda k, x: stage.init(k, x), jax.random.key(0), x)  # noqa: B023
        x = jax.eval_shape(lambda v, x: stage.apply(v, x), variables, x)  # noqa: B023
        assert {*variables} == collections
        paths = jax.tree_util.tree_leaves_with_path(variables)
        assert {p[-1].key for p, _ in paths} == names
    with pytest.raises(ValueError, match=r"norm 'layer' is not one of batch, group, none"):
        resnet18(norm='layer')


def test_only_resnet18_reads_a_normaliser():
    with pytest.raises(ValueError, match=r"model\.norm='group' is read by config\.model\.name"):
        experiment.experiment_of(config_of(model='lenet', norm='group'))


def test_the_step_lowers_for_cuda():
    s = experiment.experiment_of(small(model='resnet18', fwd='ef21(top_k(0.1))', bwd='uniform(4)'))
    made, run = alone(s)
    state = jax.eval_shape(made.create)
    step = jax.jit(lambda m, o, e, batch: run(make(m, o, e), batch)[1])
    make = lambda m, o, e: TrainState(jnp.int32(0), ModelState(*m), o, e, jax.random.key(0))
    args = tuple(state.model), state.opt_state, state.exchange, batch_of(s)
    exported = jax.export.export(step, platforms=['cuda'])(*args)
    assert exported.platforms == ('cuda',)


GOLDEN_LOSSES = {  # five steps, width 4, batch 32 of digits; a change here is a change of numbers
    ('resnet18', 'top_k(0.1)', 'top_k(0.1)'): [2.5644, 2.5084, 2.5899, 2.2987, 2.2704],
    ('tiny', 'uniform(4)', 'uniform(8)'): [2.4575, 2.6558, 2.353, 2.4127, 2.0915],
    ('tiny', 'ef21(top_k(0.1))', 'ef(top_k(0.1))'): [2.5292, 2.5259, 2.5223, 2.5297, 2.5952],
}


@pytest.mark.parametrize(
    ('what', 'losses'),
    slow(GOLDEN_LOSSES.items(), lambda case: case[0][0] == 'resnet18'),
    ids=lambda v: str(v[0]),
)
def test_five_step_losses(what, losses):
    s = experiment.experiment_of(small(width=4, model=what[0], fwd=what[1], bwd=what[2]))
    made = Trainer(s, ProcessGroup())
    ran = made.epoch(0, made.create(), np.arange(160))
    np.testing.assert_allclose(np.concatenate([m['loss'] for _, m, _ in ran]), losses, rtol=5e-3)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'fwd': 'top_k(10)'}, 'for 10 % write top_k'),
        ({'bwd': 'aqsgd(raw, examples=9)'}, 'aqsgd is for activations'),
        ({'fwd': 'aqsgd(raw, examples=9)'}, 'buffers for 9 examples and the training set has 160'),
        ({'model': 'resnet19'}, "not one of 'resnet18'.*mean resnet18"),
        ({'augment': 'flip'}, "'none', 'crop_flip'"),
        ({'batch_size': 161}, r'not in 1\.\.160'),
        ({'train_examples': 10**6}, '1437'),
        ({'data': 'imagenet'}, "not one of 'digits', 'mnist'"),
        ({'data': 'cifar10'}, 'data_dir'),
    ],
)
def test_a_bad_setting_is_refused(change, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        experiment.experiment_of(small(**change))


TEXT = {'width': 16, 'heads': 2, 'blocks': 2, 'stages': 2, 'sequence_length': 16}
TEXT |= {'train_examples': 128, 'test_examples': 64, 'batch_size': 32}
ALIKE = {'fwd': 'raw', 'bwd': 'raw', 'clip_norm': 0.5, 'num_microbatches': 2, 'epochs': 1}


def small_text(**changes):
    return config_of('text_gpt2', **TEXT, **changes)


def untied_text(**changes):
    return small_text(tied=False, **changes)


@pytest.mark.slow
@pytest.mark.parametrize('make', [small, small_text, untied_text])
def test_one_program_and_a_program_each_stage_train_alike(make, tmp_path, capsys):
    """Float32, other fusions: losses to 1e-4, not to the bit; tied tables stay one to the bit."""
    found = []
    for runtime in KEYS['parallel.runtime'].words:
        config = make(**ALIKE, runtime=runtime)
        loop.train_and_evaluate(config, tmp_path / runtime, quiet=True)
        found.append(records(tmp_path / runtime))
        s = experiment.experiment_of(config)
        if s.task.tied:
            made = Trainer(s, ProcessGroup())
            before = made.export(made.create())
            after, _ = checkpoint.Checkpoints(tmp_path / runtime).restore(before)
            a, b, c, d = (
                np.asarray(state.parts[name]['params']['wte'])
                for state in (before, after)
                for name in ('0.0', '1.0')
            )
            assert np.array_equal(a, b)
            assert np.array_equal(c, d)
            assert not np.array_equal(a, c)
    if make is not small:
        generate.main([str(tmp_path / 'local'), '--prompt', 'Alice', '--tokens', '5'])
        out = capsys.readouterr().out
        assert out.startswith('Alice')
        assert 'compression' not in out
        with pytest.raises(SystemExit, match=r'no config\.json in'):
            generate.main([str(tmp_path)])
    for a, *others in zip(*found, strict=True):
        for b in others:
            np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-4)


@pytest.mark.parametrize('runtime', ['local', 'mpmd', 'spmd'])
@pytest.mark.parametrize(
    ('fwd', 'bwd'),
    [('aqsgd(top_k(0.3), examples)', 'ef21(uniform(6))'), ('ef(uniform(4))', 'raw')],
)
def test_the_memory_of_feedback_is_what_a_run_keeps(runtime, fwd, bwd):
    """With both ends apart a table per example is there twice; spmd pads to the largest."""
    changes = {'fwd': fwd, 'bwd': bwd, 'runtime': runtime, 'num_microbatches': 2}
    exp = experiment.experiment_of(small(**changes))
    state = Trainer(exp, ProcessGroup()).create()
    kept = sum(a.nbytes for a in jax.tree.leaves(state.model.feedback))
    assert sizes.feedback_bytes(exp) == kept
    rows = sum(sizes.feedback_rows(exp))
    assert rows == kept if runtime != 'spmd' else rows < kept


@pytest.mark.slow
def test_anchors_of_tokens_train_alike():
    """Tokens reach every stage, in training and in a test; both ends' tables agree to the bit."""
    found, fwd = [], 'anchored(block(4), vocabulary)'
    for runtime in ('local', 'mpmd'):
        bwd = 'anchored(block(4), vocabulary, target=True)'
        changes = {**ALIKE, 'fwd': fwd, 'bwd': bwd, 'runtime': runtime}
        exp = experiment.experiment_of(config_of('text_gpt2', **TEXT, **changes))
        trainer = Trainer(exp, ProcessGroup())
        order = data.order(0, 0, TEXT['train_examples'])
        *_, (state, _, _) = trainer.epoch(0, trainer.create(), order)
        found.append((state.model.feedback, trainer.evaluate(state, True)['loss']))
        assert sizes.feedback_rows(exp) == [2 * 256 * (16 + 1) * 4 * (1 + (runtime == 'mpmd'))]
    (local, loss), (apart, same) = found
    sent, received = apart[0][0].right_tx, apart[1][0].left_rx
    jax.tree.map(np.testing.assert_array_equal, sent, received)
    occurred = np.bincount(exp.data.train.x.ravel(), minlength=256)
    np.testing.assert_array_equal(sent.weight, occurred)  # each fewer times than the window
    np.testing.assert_allclose(local.fwd[0][0].mean, sent.mean, atol=0.02)
    back, arrived = apart[1][0].left_tx, apart[0][0].right_rx
    jax.tree.map(np.testing.assert_array_equal, back, arrived)
    follows = np.pad(exp.data.train.x[:, 1:], ((0, 0), (0, 1)))
    np.testing.assert_array_equal(back.weight, np.bincount(follows.ravel(), minlength=256))
    np.testing.assert_allclose(local.bwd[0][0].mean, back.mean, atol=1e-4)
    assert np.abs(back.mean).max() > 1e-3
    np.testing.assert_allclose(loss, same, rtol=1e-3)


def test_anchors_are_for_tokens_and_not_for_one_program_over_a_mesh():
    for make, changes, message in (
        (small, {'fwd': 'anchored(raw, 5)'}, 'the input of this model has no tokens'),
        (config_of, {'fwd': 'anchored(raw, 9)'}, 'anchors for 9 tokens and the data has 256'),
        (
            config_of,
            {'bwd': 'anchored(raw, 9, target=True)'},
            "config.bwd='.* has anchors for 9 to",
        ),
        (
            config_of,
            {'bwd': 'anchored(raw, vocabulary)'},
            'anchored is for activations; .*target=T',
        ),
        (config_of, {'fwd': 'anchored(raw, 256, target=True)'}, 'would tell the answer'),
    ):
        config = make('text_gpt2', **TEXT, **changes) if make is config_of else make(**changes)
        with pytest.raises(ValueError, match=message):
            experiment.experiment_of(config)
    spmd = {'fwd': 'anchored(raw, vocabulary)', 'runtime': 'spmd', 'bwd': 'raw'}
    exp = experiment.experiment_of(config_of('text_gpt2', **TEXT, **spmd))
    with pytest.raises(ValueError, match=r'a table per token, and runtime spmd .*; use mpmd'):
        Trainer(exp, ProcessGroup()).create()


def test_a_rule_of_ones_own_that_reads_tokens_is_for_tokens():
    """It need not have a table of them."""
    channel = jaxmp.ef21(jaxmp.raw)._replace(reads=frozenset({'tokens'}))
    experiment.check_tokens(channel, 'bwd', 'mine', 256)
    with pytest.raises(ValueError, match=r"config.bwd='mine' reads tokens, and the input .* no to"):
        experiment.check_tokens(channel, 'bwd', 'mine', 0)


def test_a_diverging_run_stops_and_keeps_its_checkpoint(tmp_path):
    loop.train_and_evaluate(small(epochs=1), tmp_path, quiet=True)
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(
        json.dumps({**config, 'optimizer': {**config['optimizer'], 'lr': 1e38}})
    )
    with pytest.raises(loop.DivergedError, match=r'at step (6|7|8).*checkpoint'):
        loop.train_and_evaluate(small(lr=1e38), tmp_path)
    assert os.listdir(tmp_path / 'checkpoints') == ['5']


def test_a_workdir_of_another_run_is_refused(tmp_path):
    loop.train_and_evaluate(small(epochs=1), tmp_path, quiet=True)
    kept = (tmp_path / 'metrics.jsonl').read_text()
    with pytest.raises(locks.WorkdirError, match=r"fwd='uniform\(2\)' \(now 'raw'\)"):
        loop.train_and_evaluate(small(fwd='raw'), tmp_path)
    (tmp_path / 'config.json').unlink()
    with pytest.raises(locks.WorkdirError, match='another model or channel'):
        loop.train_and_evaluate(small(width=3), tmp_path)
    assert (tmp_path / 'metrics.jsonl').read_text() == kept


def test_an_unwritable_workdir_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(locks.WorkdirError, match='writable folder'):
        loop.train_and_evaluate(small(), tmp_path / 'file' / 'run')


def test_every_config_key_is_read_and_headed():
    """No key is dead; a configuration says how it is run and how long it takes."""
    source = '\n'.join(p.read_text() for p in (ROOT / 'jaxmp').rglob('*.py'))
    for name in KEYS:
        last = name.rpartition('.')[2]
        read = rf"[\w)]\.{last}\b|'{last}'"
        assert re.search(read, source), f'{name} is not read'
    for path in (ROOT / 'configs').glob('[!_]*.py'):
        if path.stem == 'common':  # the schema
            continue
        text = path.read_text()
        header = text.split('"""')[1]
        if 'def get_config(' in text:
            config_of(path.stem)
            assert 'python train.py' in header
        elif 'def get_rows(' in text:
            assert f'--study={path.stem}' in header
        else:
            assert 'def get_study(' in text
            assert re.search(rf'jaxmp[ .]sweep configs/{path.name}', header)
        assert 'minute' in header or 'takes' in header


def last_arrays(workdir, config):
    state = last_state(workdir, experiment.experiment_of(config))
    return state.replace(key=jax.random.key_data(state.key))


@pytest.mark.slow
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path):
    """SIGTERM and kill -9 inside an epoch, a damaged checkpoint, then to the end: equal bits."""
    changes = {'fwd': 'aqsgd(top_k(0.3), examples=examples)', 'bwd': 'ef21(top_k(0.1))'}
    changes |= {'epochs': 7, 'phases': 'raw@:1', 'model': 'tests.tiny_stages:build'}
    changes |= {'eval_every': '3 steps', 'checkpoint_every': '2 steps'}
    whole, cut = tmp_path / 'whole', tmp_path / 'cut'
    process = start(whole, **changes)
    assert process.wait(300) == 0, process.stdout.read().decode()[-2000:]
    process.stdout.close()
    for step, number, code in ((5, signal.SIGTERM, 143), (20, signal.SIGKILL, -9)):
        process = start(cut, **changes)
        wait_for_steps(process, cut, step)
        process.send_signal(number)
        assert process.wait(60) == code, process.stdout.read().decode()[-2000:]
        process.stdout.close()
    step = damage_newest(cut)
    process = start(cut, **changes)
    assert process.wait(300) == 0
    out = process.stdout.read().decode()
    assert f'checkpoint at step {step} is damaged' in out
    assert 'resuming from step' in out
    process.stdout.close()
    config = small(**changes)
    assert leaves_equal(last_arrays(whole, config), last_arrays(cut, config))
    assert records(whole) == records(cut)
    assert not list(tmp_path.glob('*/curves.*'))  # --nocurves; tests/outside looks at a command's


def test_a_bad_command_line_is_refused(tmp_path):
    """See tests/test_errors.py for all kinds; this one has read its flags."""
    flags = [f'--workdir={tmp_path / "w"}', '--config.fwd=__import__("os")']
    args = [sys.executable, str(ROOT / 'train.py'), *flags]
    done = subprocess.run(args, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert re.fullmatch(r"train\.py: SpecError: in '__import__.*\n", done.stderr)
    assert not (tmp_path / 'w').exists()


def test_muon_is_for_kernels_and_adam_for_the_rest():
    """Its updates are nearly orthogonal, of matrices and convolutions; Adam's first are signs."""
    config = config_of('text_gpt2')
    config.optimizer.update(name='muon', schedule='constant', lr=0.1)
    shapes = {'wte': (20, 8), 'conv': {'kernel': (3, 3, 4, 12)}, 'bias': (8,)}
    r = np.random.default_rng(0)
    draw = lambda s: r.standard_normal(s).astype(np.float32)
    grads = jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))
    optimizer = optimizer_of(config, 10)
    zeros = jax.tree.map(np.zeros_like, grads)
    y, _ = jax.jit(lambda g: optimizer.update(g, optimizer.init(zeros), zeros))(grads)
    config.optimizer.adamw_scale = 2.0
    twice = optimizer_of(config, 10)
    z, _ = jax.jit(lambda g: twice.update(g, twice.init(zeros), zeros))(grads)
    for name, scale in ('wte', 2), ('bias', 2), ('conv', 1):
        same = lambda a, b, scale=scale: np.testing.assert_allclose(a, scale * b, rtol=1e-5)
        jax.tree.map(same, z[name], y[name])
    for name in ('wte', 'bias'):
        size = np.abs(y[name]).mean()  # Adam with Nesterov's momentum: above the rate
        np.testing.assert_allclose(y[name], -size * np.sign(grads[name]), rtol=1e-3)
    found, given = (
        np.linalg.svd(np.reshape(t['conv']['kernel'], (36, 12)), compute_uv=False)
        for t in (y, grads)
    )
    assert found[0] / found[-1] < 1.8 < given[0] / given[-1]


def test_muon_takes_each_blocks_matrix_of_a_decoder(tmp_path):
    """As the same matrix by itself; vectors and the table of tokens are Adam's."""
    config = config_of('text_gpt2')
    config.optimizer.update(name='muon', schedule='constant', lr=0.1)
    shapes = {
        'layers': {
            'q_proj': {'weight': (3, 12, 20), 'lora_a': (3, 4, 20), 'lora_b': (3, 12, 4)},
            'norm': {'weight': (3, 20)},
        },
        'embed_tokens': {'weight': (30, 20)},
    }
    r = np.random.default_rng(0)
    draw = lambda s: r.standard_normal(s).astype(np.float32)
    grads = jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))
    optimizer = optimizer_of(config, 10)
    first = jax.jit(
        lambda g: optimizer.update(g, optimizer.init(g), jax.tree.map(jnp.zeros_like, g))
    )
    y, _ = first(grads)
    for name, stack in grads['layers']['q_proj'].items():
        for i, matrix in enumerate(stack):
            alone, _ = first({'kernel': matrix.T})
            np.testing.assert_allclose(
                y['layers']['q_proj'][name][i], alone['kernel'].T, rtol=1e-3, atol=1e-5
            )
            rms = np.sqrt(np.mean(alone['kernel'] ** 2))
            assert 0.7 < rms / (0.2 * 0.1) < 1.2
    for found, given in (
        (y['embed_tokens']['weight'], grads['embed_tokens']['weight']),
        (y['layers']['norm']['weight'], grads['layers']['norm']['weight']),
    ):
        np.testing.assert_allclose(found, -np.abs(found).mean() * np.sign(given), rtol=1e-3)
