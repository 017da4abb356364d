"""An experiment whose parts are all one's own, named in a configuration by import paths."""

import json
import re
import runpy
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import config as schema
from jaxmp.pictures import compare
from tests.base import ENV, ROOT
from tests.outside import own, parts


@pytest.mark.slow
def test_train_py_trains_parts_that_the_package_does_not_know(tmp_path):
    command = [sys.executable, 'train.py', '--config=tests/outside/own.py', f'--workdir={tmp_path}']
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / 'summary.json').read_text())
    assert summary['measure'] == 'margin'
    assert summary['test']['on']['last']['accuracy'] > 0.8
    assert summary['test']['on']['last']['margin'] > summary['history']['on']['margin'][0]
    # 8 samples of 16 elements: a bit each and a scale of 16 bits, of two micro-batches.
    assert [r['forward'] for r in summary['bytes']] == [2 * 8 * (2 + 2)] * 2
    assert summary['exchange']['text'] == 'majority(0.5)'
    assert 'margin' in done.stdout
    assert all((tmp_path / f'curves.{end}').stat().st_size for end in ('png', 'svg'))


def test_a_task_of_ones_own_in_a_program_per_stage(tmp_path, capsys):
    """A regression: `Task` says what is minimized and what is reported, and no schedule matters."""
    dataset = parts.moons(schema.default())
    dataset = dataset._replace(
        train=dataset.train._replace(y=dataset.train.x[:, :1]),
        test=dataset.test._replace(y=dataset.test.x[:, :1]),
    )
    score = lambda output, y: {'loss': ((output - y) ** 2).mean(1)}
    task = jaxmp.Task(
        dataset, (parts.Hidden(8), parts.Head(1)), lambda x, key: x, score, jaxmp.Metric(
            'rmse', 'loss', higher_is_better=False, show=lambda m: f'{m**0.5:.3f}'), ('loss',)
    )  # fmt: skip
    config = {'epochs': 2, 'batch_size': 32, 'fwd': 'uniform(8)', 'optimizer': {'lr': 0.02}}
    losses = []
    for runtime, schedule in (('local', '1f1b'), ('mpmd', 'tests.outside.parts:all_forward_first')):
        config['parallel'] = {'runtime': runtime, 'num_microbatches': 2, 'schedule': schedule}
        summary = jaxmp.train_and_evaluate(config, tmp_path / runtime, task=task, draw=False)
        assert summary['measure'] == 'rmse'
        assert 'rmse best' in capsys.readouterr().out
        losses.append(summary['history']['on']['loss'])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(*losses, rtol=1e-4)
    runs = [str(tmp_path / r) for r in ('local', 'mpmd')]
    compare.main([*runs, '--out', str(tmp_path / 'both.png')])
    assert capsys.readouterr().out.count('rmse') == 2


@pytest.mark.slow
@pytest.mark.parametrize(('runtime', 'replicas'), [('local', 1), ('mpmd', 1), ('local', 2)])
def test_an_optimizer_that_clips_knows_the_norm_of_all_stages(tmp_path, runtime, replicas):
    losses = []
    ours = {'name': 'sgd', 'momentum': 0.9, 'clip_norm': 0.5}
    for k, optimizer in enumerate((ours, {'name': 'tests.outside.parts:clipped'})):
        config = {
            'epochs': 1, 'batch_size': 32, 'data': {'name': 'tests.outside.parts:moons'},
            'model': {'name': 'tests.outside.parts:network', 'width': 4},
            'optimizer': {'lr': 0.5, **optimizer},
            'parallel': {'runtime': runtime, 'replicas': replicas},
        }  # fmt: skip
        summary = jaxmp.train_and_evaluate(config, tmp_path / str(k), quiet=True)
        losses.append(summary['test']['on']['last']['loss'])
    np.testing.assert_allclose(*losses, rtol=1e-5)


NEIGHBOUR = """
def classes():
    from other import CLASSES
    return CLASSES
"""
MINE = """
import flax.linen as nn
from neighbour_of_mine import classes
class Flat(nn.Module):
    features: int
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(x.reshape(len(x), -1))
def network(config, dataset):
    return Flat(4), Flat(classes())
"""


def test_a_model_of_ones_own_has_plain_defaults_and_neighbours(tmp_path):
    """The same as in `train_and_evaluate`, and nothing of the digits; said at the start."""
    (tmp_path / 'mine.py').write_text(MINE)
    (tmp_path / 'neighbour_of_mine.py').write_text(NEIGHBOUR)
    (tmp_path / 'other.py').write_text('CLASSES = 10')
    short = {'epochs': 1, 'data.train_examples': 64, 'data.test_examples': 16}
    name = str(tmp_path / 'mine.py:network')
    config = {**short, 'model.name': name}
    flags = [f'--workdir={tmp_path / "command"}', '--nocurves']
    flags += [f'--config.{k}={v}' for k, v in config.items()]
    command = [sys.executable, 'train.py', *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    said = 'trains with fwd=raw bwd=raw epochs=1 batch_size=64 optimizer.name=sgd optimizer.lr=0.02'
    assert f'{said} optimizer.schedule=constant optimizer.momentum=0.0' in done.stderr
    jaxmp.train_and_evaluate(schema.nested(config), tmp_path / 'call', quiet=True)
    configs = [json.loads((tmp_path / d / 'config.json').read_text()) for d in ('command', 'call')]
    assert configs[0] == configs[1]


def llama(folder):
    """The small Llama of docs/own_model.md as a file, and its lines of code."""
    page = (ROOT / 'docs' / 'own_model.md').read_text()
    [code] = re.findall(r'^```python title="llama.py"\n(.*?)^```', page, re.MULTILINE | re.DOTALL)
    (folder / 'llama.py').write_text(code)
    return sum(bool(line.strip()) for line in code.splitlines())


def notes(folder):
    """Keys of a text in files: lines of a kind that is learned in a few steps."""
    (folder / 'notes').mkdir()
    for i in range(3):
        (folder / 'notes' / f'{i}.txt').write_text('the cat sat on the mat\n' * 200)
    keys = {'dir': folder, 'files': 'notes/*.txt', 'sequence_length': 32}
    return {f'data.{k}': v if isinstance(v, int) else str(v) for k, v in keys.items()}


OWN_TEXT = """
import numpy as np
from jaxmp.data import Dataset, Split
from jaxmp.data.tokenizer import byte_level
def load(config):
    x = np.arange(512, dtype=np.int32).reshape(16, 32) % 256
    split = Split(x, np.where(x % 3, x, -1))
    return Dataset('own', split, split, 256, (), (), byte_level())
"""


def test_stages_of_ones_own_read_a_text(tmp_path, monkeypatch):
    """With no more than the stages: next tokens, perplexity, the keys of texts; an own text too."""
    from jaxmp.training.experiment import experiment_of

    monkeypatch.setenv('HOME', str(tmp_path))  # where tokens are kept
    llama(tmp_path)
    (tmp_path / 'texts.py').write_text(OWN_TEXT)
    own = {'data.name': str(tmp_path / 'texts.py:load')}
    keys = {'model.name': str(tmp_path / 'llama.py:build'), 'batch_size': 8, 'model.width': 8}
    make = lambda more: experiment_of(schema.complete(schema.nested({**keys, **more})))
    alice = {'data.name': 'alice', 'data.sequence_length': 32}
    for more in (notes(tmp_path), alice, own):
        exp = make(more)
        assert exp.task.metric.name == 'perplexity'
        assert (exp.task.like.shape, exp.task.like.dtype) == ((32,), jnp.int32)
        assert exp.data.classes == 256
    with pytest.raises(
        ValueError, match=r'test_files=.a.txt. is read with config.data.files alone'
    ):
        make({**alice, 'data.test_files': 'a.txt'})
    with pytest.raises(ValueError, match=r'data.test_share=1.5 is not between 0 and 1'):
        make({'data.files': '*.txt', 'data.test_share': 1.5})


@pytest.mark.slow
def test_a_llama_of_ones_own_in_25_lines_trains_on_files(tmp_path):
    assert llama(tmp_path) <= 25
    keys = {**notes(tmp_path), 'model.name': 'llama.py:build', 'model.width': 32, 'epochs': 4}
    keys |= {'batch_size': 16, 'optimizer.name': 'adamw', 'optimizer.lr': 0.01, 'fwd': 'block(4)'}
    flags = [f'--config.{k}={v}' for k, v in keys.items()]
    command = [sys.executable, '-m', 'jaxmp', 'train', *flags, '--workdir=run', '--nocurves']
    done = subprocess.run(
        command, cwd=tmp_path, env={**ENV, 'XDG_CACHE_HOME': str(tmp_path / 'cache')},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-2000:]
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    assert summary['measure'] == 'perplexity'
    assert summary['history']['on']['loss'][-1] < 1 < summary['history']['train']['loss'][0]
    assert len([*(tmp_path / 'cache').rglob('train.blocks')]) == 1


WRONG = {
    'no module': ({'model.name': 'nowhere:build'}, "cannot import 'nowhere' .*it must name build"),
    'no file': ({'data.name': 'nowhere.py:load'}, 'no such Python file.*must name load'),
    'no object': ({'metric': 'tests.outside.parts:x'}, "has no 'x'; it must name metric"),
    'arguments': ({'data.name': 'tests.outside.parts:network'}, r'\(config, dataset\) does not'),
    'no such score': ({'metric': f'{own.PARTS}:of_nothing'}, "score 'f1', and the task has"),
    'no stages': ({'model.name': 'tests.outside.parts:lion'}, 'must be build.*Flax module'),
    'no data set': ({'data.name': 'builtins:len'}, 'must be load'),
    'no optimizer': ({'optimizer.name': 'tests.outside.parts:margin'}, 'line .*must be make'),
    'all gradients': ({'optimizer.name': 'tests.outside.parts:levelled'},
                      'levelled. moves .* of other stages.*take config.optimizer.clip_norm to'),
    'no word': ({'codecs': 'json.decoder', 'fwd': 'raw', 'exchange': 'mean'}, 'has no words; a w'),
    'no annotation': ({'fwd': 'margin(1, 2)'}, r'no word.*def margin\(output, y\) -> jaxmp.Codec'),
    'an unknown word': ({'fwd': 'sings'}, r'unknown word .sings. \(did you mean signs'),
    'no schedule': ({'parallel.schedule': 'gpipe'}, "read by config.parallel.runtime='mpmd'"),
}  # fmt: skip


@pytest.mark.parametrize('case', WRONG)
def test_a_part_that_does_not_fit_is_refused(case, monkeypatch):
    """One line: what came, and the signature that is wanted."""
    from jaxmp.training.experiment import experiment_of

    monkeypatch.chdir(ROOT)
    changes, message = WRONG[case]
    c = own.get_config()
    with c.ignore_type():
        c.update_from_flattened_dict(changes)
    with pytest.raises((ValueError, TypeError)) as caught:
        experiment_of(c)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_the_codec_of_ones_own_is_a_word_everywhere(monkeypatch):
    monkeypatch.chdir(ROOT)
    from jaxmp.grammar import own_words

    names = own_words('tests/outside/parts.py')
    assert {'signs', 'leaky', 'majority'} <= set(names)
    channel = jaxmp.parse('leaky(signs, keep=0.5)', names)
    assert str(channel) == 'leaky(signs, keep=0.5)'
    assert jaxmp.bits(channel, jnp.zeros((4, 16))) == 4 * 32
    assert isinstance(parts.lion(schema.default(), 0.1), optax.GradientTransformation)


def run(script, folder, monkeypatch):
    """The names of a script that was copied to a folder and run there."""
    monkeypatch.chdir(folder)
    return runpy.run_path(shutil.copy(ROOT / 'tests' / 'outside' / script, folder))


def test_a_flax_model_with_two_boundaries_and_a_codec_in_an_optax_loop(tmp_path, monkeypatch):
    """Written from docs/own_loop.md and docs/own_codec.md."""
    found = run('stages.py', tmp_path, monkeypatch)
    assert found['losses'][-1] < found['losses'][0] / 5
    assert found['accuracy']['on'] > 0.9
    # 32 samples of 32 elements: 8 means of 16 bits; 4 bits each. 4 means and a bitmap; 8 floats.
    assert found['bits'] == [(32 * 8 * 16, 32 * 32 * 4 + 64), (32 * (4 * 16 + 32), 32 * 8 * 32)]
    # Each of the two channels with feedback has a state, which the training filled.
    states = [np.any(a) for a in jax.tree.leaves(found['feedback']) if a.shape == (32, 32)]
    assert states == [True] * 2


def test_an_exchange_in_a_shard_map_loop(tmp_path, monkeypatch):
    """Written from docs/own_exchange.md and docs/exchanges.md."""
    found = run('replicas.py', tmp_path, monkeypatch)
    assert found['losses'][-1] < found['losses'][0] / 5
    params = jax.tree.leaves(found['params'])
    for p in params:
        one, other = (np.asarray(s.data) for s in p.addressable_shards)
        np.testing.assert_array_equal(one, other)
    errors = [np.asarray(a) for a in jax.tree.leaves(found['state'][0].held)]
    assert [a.shape for a in errors] == [(2, 32, 32)]
    assert np.any(errors[0][0] != errors[0][1])
    assert (errors[0] == 0).mean() == 0.25
    assert found['size']['sent'] == sum(4 * p.size for p in params)
