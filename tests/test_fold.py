"""`jaxmp fold`: the folded run's scores, what takes it, what is refused."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.models.entrance import NAME, Entrance
from jaxmp.net.group import ProcessGroup
from jaxmp.pictures import compare
from jaxmp.runtimes.types import ModelState
from jaxmp.training import loop
from jaxmp.training.evaluation import crosstest, fold, language_model, moments
from jaxmp.training.experiment import experiment_of
from jaxmp.training.generation import generate
from jaxmp.training.trainer import Trainer
from tests import test_pretrained
from tests.base import slow
from tests.runs import SMALL, config_of

TOP = {'fwd': 'top_k(0.1)', 'bwd': 'top_k(0.1)', 'epochs': 1}
IMAGES = {**SMALL, **TOP, 'train_examples': 96}
TEXT = {'width': 8, 'heads': 2, 'blocks': 2, 'stages': 2, 'train_examples': 64, **TOP}
TEXT |= {'test_examples': 32, 'sequence_length': 32, 'checkpoint_every': 1}
CASES = {
    'tiny': ('digits_resnet', {**IMAGES, 'model': 'tests.tiny_stages:build'}),
    'resnet18': ('digits_resnet', IMAGES),
    'lenet': ('digits_resnet', {**IMAGES, 'model': 'lenet', 'width': 4}),
    'gpt2': ('text_gpt2', TEXT),
}
EXAMPLES = {**CASES['tiny'][1], 'fwd': 'aqsgd(top_k(0.1), examples)'}
CASES['aqsgd'] = 'digits_resnet', EXAMPLES  # which remembers the examples of the training


@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    """Trains a case once, and folds it: the two folders."""
    folders = {}

    def of(case):
        if case not in folders:
            folder = tmp_path_factory.mktemp(case) / 'run'
            name, changes = CASES[case]
            loop.train_and_evaluate(config_of(name, **changes), folder, quiet=True, draw=False)
            fold.main([str(folder)])
            folders[case] = folder, folder.with_name('run-folded')
        return folders[case]

    return of


def raw_score(folder):
    run = crosstest.load(folder)
    return crosstest.scorer(run.exp, crosstest.same(run.exp, 'raw'))(run.state)


@pytest.mark.parametrize('case', slow(CASES, 'tiny'.__ne__))
def test_a_folded_run_scores_as_its_run_with_matched_moments(pair, case):
    folder, out = pair(case)
    run = crosstest.load(folder)
    maps = moments.matched(run.exp, run.state.model, run.state.key)
    wanted = crosstest.scorer(run.exp, tuple(map(moments.opened_with, maps)))(run.state)
    found = raw_score(out)
    assert found == pytest.approx(wanted, abs=1e-6)
    assert abs(found['loss'] - raw_score(folder)['loss']) > 1e-4
    summary = json.loads((out / 'summary.json').read_text())
    for mode in ('off', 'on'):
        last = summary['test'][mode]['last']
        assert last['loss'] == pytest.approx(wanted['loss'], abs=1e-6)
    assert {row['forward'] / row['uncompressed'] for row in summary['bytes']} == {1.0}


def test_statistics_again_are_those_of_the_evaluation(pair, tmp_path):
    """In place of entrances, and scored as the row of `jaxmp evaluate --batchnorm`."""
    folder, out = pair('tiny')[0], tmp_path / 'again'
    fold.main([str(folder), '--batchnorm', f'--out={out}'])
    *_, (name, [wanted, *_]) = crosstest.rows_of(crosstest.load(folder), ['raw'], True, False)
    assert name == 'run, statistics again'
    assert raw_score(out) == pytest.approx(wanted, abs=1e-6)
    assert abs(wanted['loss'] - raw_score(folder)['loss']) > 1e-4
    assert all(NAME not in s for s in crosstest.load(out).state.model.model_state.values())


def test_what_is_printed_are_the_scores_of_both_runs(pair, capsys, tmp_path):
    folder, out = pair('tiny')
    fold.main([str(folder), '--out', str(tmp_path / 'new')])
    said = capsys.readouterr().out
    tests = [json.loads((f / 'summary.json').read_text())['test'] for f in (folder, out)]
    score = lambda i, mode: f'{tests[i][mode]["last"]["accuracy"]:.2%}'
    assert f'off {score(0, "off")}, on {score(0, "on")}, folded {score(1, "on")}' in said
    assert f'the folded run: {tmp_path / "new"}' in said


def test_a_folded_run_is_evaluated_and_compared_as_any_other(pair, tmp_path, capsys):
    folder, out = pair('tiny')
    crosstest.main([str(folder), str(out), '--batchnorm'])
    assert 'run-folded, statistics again' in capsys.readouterr().out
    compare.main([str(folder), str(out), '--out', str(tmp_path / 'both.png')])
    shown = capsys.readouterr().out
    assert 'run-folded' in shown
    assert shown.count(' 1 ') >= 2  # an epoch each


def test_a_folded_run_is_trained_on(pair, tmp_path):
    """It begins with parameters and momentum of its run, and its entrances stay as they are."""
    folder, out = pair('tiny')
    before, run = crosstest.load(out).state, crosstest.load(folder).state
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    same((before.model.params, before.opt_state), (run.model.params, run.opt_state))
    shutil.copytree(out, tmp_path / 'on')
    config = json.loads((out / 'config.json').read_text())
    summary = loop.train_and_evaluate({**config, 'epochs': 2}, tmp_path / 'on', quiet=True)
    assert summary['epochs'] == 2
    after = crosstest.load(tmp_path / 'on').state.model
    assert not np.allclose(*(m.params[1]['Conv_0']['kernel'] for m in (before.model, after)))
    for stage in (1, 2):
        same(*(m.model_state[stage][NAME] for m in (before.model, after)))
        assert np.any(after.model_state[stage][NAME]['shift'])


def test_a_stopped_run_gives_one_that_goes_on(pair, tmp_path, capsys):
    shutil.copytree(pair('tiny')[0], tmp_path / 'run')
    (tmp_path / 'run' / 'summary.json').unlink()
    config = json.loads((tmp_path / 'run' / 'config.json').read_text())
    (tmp_path / 'run' / 'config.json').write_text(json.dumps({**config, 'epochs': 2}))
    fold.main([str(tmp_path / 'run')])
    out = tmp_path / 'run-folded'
    assert not (out / 'summary.json').exists()
    compare.main([str(out), '--out', str(tmp_path / 'one.png')])
    assert 'not ended' in capsys.readouterr().out
    config = json.loads((out / 'config.json').read_text())
    assert loop.train_and_evaluate(config, out, quiet=True)['epochs'] == 2


@pytest.mark.slow
def test_a_folded_language_model_writes(pair, capsys):
    """Its stages have their entrances: the logits are those of the open run with the maps."""
    folder, out = pair('gpt2')
    exp, read = language_model.opened(out)
    variables = read(language_model.every)
    x = jnp.asarray(exp.data.test.x[:2], jnp.int32)
    logits = exp.model.apply(variables, None, x, train=False)[0]
    run = crosstest.load(folder)
    state, h = run.state.model, x
    [affine] = moments.matched(run.exp, state, run.state.key)
    for s, stage in enumerate(run.exp.task.stages):
        h = h * affine.scale + affine.shift if s else h
        h = stage.apply({'params': state.params[s]}, h)
    np.testing.assert_allclose(logits, h, rtol=1e-4, atol=1e-5)
    capsys.readouterr()  # of the fold, where this test is the first to need it
    generate.main([str(out), '--prompt=Alice', '--tokens=3', '--temperature=0'])
    text = capsys.readouterr().out
    assert text.startswith('Alice')
    assert 'compression' not in text  # nothing is compressed, so there is one text


@pytest.mark.slow
def test_a_run_without_the_folder_model_writes_from_its_checkpoint(tmp_path, capsys):
    """As one with entrances has none; one on images is no language model."""
    config = config_of('text_gpt2', **TEXT, entrance=True)
    loop.train_and_evaluate(config, tmp_path / 'run', quiet=True, draw=False)
    assert not (tmp_path / 'run' / 'model').exists()
    _, read = language_model.opened(tmp_path / 'run')
    variables = read(language_model.every)
    params = crosstest.load(tmp_path / 'run').state.model.params
    for s in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, variables[s]['params'], params[s])
    generate.main([str(tmp_path / 'run'), '--prompt=Alice', '--tokens=3'])
    assert capsys.readouterr().out.count('Alice') == 2  # off and on


def test_a_run_on_images_does_not_write(pair):
    with pytest.raises(SystemExit, match='run is a run on digits, not of a language model'):
        generate.main([str(pair('tiny')[0])])


def test_a_folded_model_may_be_compressed_and_folded_again():
    """The second map is before the first: what crosses passes both."""
    maps = [moments.Affine(jnp.array([2.0, 0.5]), jnp.array([1.0, -1.0]))]
    more = [moments.Affine(jnp.array([3.0, 4.0]), jnp.array([0.0, 5.0]))]
    model = fold.folded(fold.folded(ModelState({}, {0: {}, 1: {}}, None), maps), more)
    x = jnp.array([[1.0, 2.0], [-3.0, 4.0]])
    identity = type('Stage', (), {'apply': lambda self, variables, x, mutable: x})()
    stage = Entrance(identity)
    wanted = (x * more[0].scale + more[0].shift) * maps[0].scale + maps[0].shift
    np.testing.assert_allclose(stage.apply(model.model_state[1], x), wanted, rtol=1e-6)


def test_entrances_of_a_checkpoint_change_nothing_before_they_are_set(tmp_path):
    """Its statistics begin as zeros, for it is read and not drawn. With a cache it is one too."""
    folder, losses = test_pretrained.tiny(tmp_path / 'base'), []
    for entrance in (False, True):
        exp = experiment_of(test_pretrained.small(folder, entrance=entrance))
        trainer = Trainer(exp, ProcessGroup())
        state = trainer.create()
        losses.append(trainer.evaluate(state, False)['loss'])
    assert losses[0] == losses[1]
    stages = exp.task.stages
    assert [isinstance(s, Entrance) for s in stages] == [False, *[True] * (len(stages) - 1)]
    model = language_model.LanguageModel('x', stages, (), exp.data.tokenizer)
    assert model.cached
    assert stages[-1].reads_tokens
    assert not stages[-1].with_logits.reads_tokens


def test_channels_are_an_axis_behind_the_batch():
    with pytest.raises(ValueError, match=r'the last axis .* and float32\[4\] crosses a boundary'):
        Entrance(None).init(jax.random.key(0), jnp.ones(4))


MISTAKES = {
    'no run': ({}, r'there is no run .*nowhere; give the workdir of one$'),
    'uncompressed': ({'fwd': 'raw'}, r'trained on uncompressed activations at the end \(fwd raw\)'),
    'weaned': ({'phases': 'raw@:1', 'epochs': 2}, r'at the end \(fwd top_k\(0.1\)\), so it serves'),
    'replicas': ({'parallel.replicas': 2}, r'parallel\.replicas=2, .* give runs with one replica'),
    'elastic': (
        {'parallel.replicas': 2, 'parallel.elastic': True, 'exchange': 'diloco(2)'},
        r'parallel\.replicas=2, .* give runs with one replica',
    ),
    'no checkpoint': (None, 'has no checkpoint; train it first, or longer'),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_told_in_a_line(pair, tmp_path, case):
    changes, message = MISTAKES[case]
    folder = tmp_path / ('run' if case != 'no run' else 'nowhere')
    if case != 'no run':
        shutil.copytree(pair('tiny')[0], folder)
        config = config_of(**{**CASES['tiny'][1], **(changes or {})})
        (folder / 'config.json').write_text(json.dumps(config.to_dict()))
    if changes is None:
        shutil.rmtree(folder / 'checkpoints')
    with pytest.raises(SystemExit, match=f'^jaxmp fold: .*{message}') as caught:
        fold.main([str(folder)])
    assert '\n' not in str(caught.value)
    assert not folder.with_name(f'{folder.name}-folded').exists()


def test_a_folded_run_is_not_folded_again_nor_replaced(pair):
    folder, out = pair('tiny')
    with pytest.raises(SystemExit, match='run-folded was trained on uncompressed activations'):
        fold.main([str(out)])
    with pytest.raises(SystemExit, match='run-folded exists; give another --out, or remove it'):
        fold.main([str(folder)])


def test_what_has_one_stage_or_no_statistics_is_refused(pair):
    run = crosstest.load(pair('tiny')[0])
    model = dataclasses.replace(run.exp.model, stages=run.exp.model.stages[:1], boundaries=())
    alone = run._replace(exp=run.exp._replace(model=model))
    with pytest.raises(ValueError, match='run has one stage, so nothing is sent'):
        fold.check(alone)
    model = run.state.model._replace(model_state={s: {} for s in run.state.model.model_state})
    bare = run._replace(state=run.state.replace(model=model))
    fold.check(bare)
    with pytest.raises(ValueError, match='run has no statistics of a normaliser; leave --batch'):
        fold.check(bare, True)
