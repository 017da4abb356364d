"""Runs tested with codecs that they were not trained with, and with other statistics."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from jaxmp.metrics import METRICS
from jaxmp.training import loop
from jaxmp.training.evaluation import crosstest, moments
from tests.runs import SMALL, config_of


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A run of three small stages with BatchNorm, and its summary."""
    folder = tmp_path_factory.mktemp('trained') / 'run'
    words = {**SMALL, 'fwd': 'top_k(0.1)', 'bwd': 'top_k(0.1)', 'epochs': 1, 'train_examples': 96}
    words |= {'model': 'tests.tiny_stages:build'}
    loop.train_and_evaluate(config_of(**words), folder, quiet=True)
    return folder, json.loads((folder / 'summary.json').read_text())


def test_the_runs_own_codec_scores_as_on_and_none_as_off(trained):
    folder, summary = trained
    run = crosstest.load(folder)
    for text, mode in (('raw', 'off'), (crosstest.trained_with(run)[0], 'on')):
        found = crosstest.scorer(run.exp, crosstest.same(run.exp, text))(run.state)
        assert found['loss'] == pytest.approx(summary['test'][mode]['last']['loss'], rel=1e-5)


def test_statistics_again_depend_on_neither_those_before_nor_the_codec(trained):
    """And parameters stay."""
    run = crosstest.load(trained[0])
    model = run.state.model
    other = model._replace(model_state=jax.tree.map(lambda a: 3 * a + 1, model.model_state))
    a, b = (moments.normalised_again(run.exp, m, run.state.key) for m in (model, other))
    for x, y in zip(jax.tree.leaves(a.model_state), jax.tree.leaves(b.model_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=0.02, atol=0.02)
    moved = zip(*map(jax.tree.leaves, (a.model_state, model.model_state)), strict=True)
    assert all(not np.allclose(x, y, rtol=0.1) for x, y in moved)
    assert all(map(np.array_equal, *map(jax.tree.leaves, (a.params, model.params))))


def test_open_boundaries_with_their_maps_deliver_the_moments_of_compressed_ones(trained):
    run = crosstest.load(trained[0])
    exp, state, key = run.exp, run.state.model, run.state.key
    maps = moments.matched(exp, state, key)
    assert len(maps) == 2
    opened = tuple(map(moments.opened_with, maps))
    raw = crosstest.same(exp, 'raw')  # top_k remembers nothing either
    for n in (1, 2):
        wanted = moments.moments(exp, state, key, exp.model.boundaries[:n])
        mapped = moments.moments(exp, state, key, opened[:n])
        np.testing.assert_allclose(np.stack(mapped), np.stack(wanted), rtol=1e-3, atol=1e-4)
        without = moments.moments(exp, state, key, raw[:n])
        assert not np.allclose(without[1], wanted[1], rtol=0.1)


def test_a_channel_that_is_constant_is_only_shifted():
    affine = moments.affine((np.array([2.0]), np.array([0.5])), (np.array([1.0]), np.zeros(1)))
    assert (affine.scale.tolist(), affine.shift.tolist()) == ([1.0], [1.0])


def test_the_command_prints_and_draws_a_row_per_run(trained, tmp_path, capsys):
    folder, out = str(trained[0]), tmp_path / 'grid.png'
    crosstest.main([folder, '--codec', 'fp16', '--batchnorm', '--moments', '--out', str(out)])
    text = capsys.readouterr().out
    assert text.count('statistics again') == text.count('moments matched') == 1
    assert all(name in text for name in ('raw', 'top_k(0.1)', 'fp16'))
    assert out.stat().st_size > 5000
    assert out.with_suffix('.svg').is_file()
    saved = json.loads(out.with_suffix('.json').read_text())
    assert f'{saved["test"]["run"]["raw"]["accuracy"]:.2%}' in text
    assert [*saved['test']['run, moments matched']] == ['raw']
    assert saved['runs']['run']['commit'] == trained[1]['commit']
    assert saved['hardware']
    with pytest.raises(SystemExit, match="unknown word 'nothing'"):
        crosstest.main([folder, '--codec', 'nothing'])
    shutil.copy(trained[0] / 'config.json', tmp_path)
    config = json.loads((tmp_path / 'config.json').read_text())
    config['parallel']['replicas'] = 2
    (tmp_path / 'config.json').write_text(json.dumps(config))
    with pytest.raises(SystemExit, match=r'parallel\.replicas=2, .* give runs with one replica'):
        crosstest.main([str(tmp_path)])


def test_runs_of_one_name_are_told_apart_by_their_folders(trained):
    run, folders = crosstest.load(trained[0]), [pathlib.Path('a/run'), pathlib.Path('b/run')]
    assert [r.name for r in crosstest.named([run, run], folders)] == ['a/run', 'b/run']
    other = run._replace(name='other')
    assert [r.name for r in crosstest.named([run, other], folders)] == ['run', 'other']


def test_runs_of_two_metrics_are_no_table(trained):
    run = crosstest.load(trained[0])
    task = run.exp.task._replace(metric=METRICS['perplexity'])
    other = run._replace(name='text', exp=run.exp._replace(task=task))
    with pytest.raises(ValueError, match='run has accuracy, text has perplexity; give runs of one'):
        crosstest.same_metric([run, other])
