"""What a mistake, a foreign file or a machine at its end answers with: one line, no traceback."""

import json
import os
import re
import signal
import subprocess
import sys
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import Ctx, boundary, data, models, spec
from jaxmp import config as schema
from jaxmp.config.change import put
from jaxmp.data import Dataset, Split, text, tokenizer
from jaxmp.data.understood import contents
from jaxmp.models import gpt2_file
from jaxmp.net.views import ViewChangedError
from jaxmp.runtimes import stage
from jaxmp.runtimes.types import Model
from jaxmp.training import command, dry_run, experiment, loop, resume, sizes
from jaxmp.training.generation import generate
from jaxmp.training.portable import Portable
from jaxmp.training.tasks import task
from jaxmp.training.workdir.locks import WorkdirError, claim
from tests.base import ROOT
from tests.runs import SMALL, config_of, keyed


def small(name='digits_resnet', **changes):
    """A configuration whose values may be of any kind, as a file of one's own may have them."""
    config = config_of(name, **({} if name == 'text_gpt2' else {'model': 'lenet', **SMALL}))
    with config.unlocked(), config.ignore_type():
        changes = {'fwd': 'uniform(4)', 'bwd': 'uniform(4)', **changes}
        for name, value in keyed(changes).items():
            group, _, last = name.rpartition('.')
            (config[group] if group else config)[last] = value
    return config


WHOLE = 'is not a whole number from'
SETTINGS = {
    'no checkpoints': ({'checkpoint_every': 0},
                       "config.checkpoint_every=0 is no length of training; give '500 steps', '2"),
    'no epochs': ({'epochs': 0}, f'config.epochs=0 {WHOLE} 1'),
    'half an epoch': ({'epochs': 1.5}, f'config.epochs=1.5 {WHOLE} 1'),
    'a huge seed': ({'seed': 2**63}, f'config.seed=9223372036854775808 {WHOLE} 0 to 4294967295'),
    'a seed JAX would cut': ({'seed': 2**32}, f'config.seed=4294967296 {WHOLE} 0 to 4294967295'),
    'a negative seed': ({'seed': -1}, f'config.seed=-1 {WHOLE} 0'),
    'nan': ({'lr': float('nan')}, 'config.optimizer.lr=nan is not a finite number from 0'),
    'infinity': ({'clip_norm': float('inf')}, 'clip_norm=inf is not a finite number'),
    'a negative rate': ({'momentum': -0.5}, 'momentum=-0.5 is not a finite number from 0'),
    'a rate of text': ({'lr': '0.1'}, "config.optimizer.lr='0.1' is not a finite number"),
    'a switch of text': ({'download': 'no'}, "config.data.download='no' is not True or False"),
    'a switch for a number': ({'epochs': True}, f'config.epochs=True {WHOLE} 1'),
    'a network of text': ({'model': 'gpt2'}, 'no text .digits.'),
    'a rounding that is called': ({'fwd': 'uniform(4, rounding=stochastic(1, 2, 3))'},
                                  'stochastic takes no arguments; write stochastic'),
    'arguments of a rounding': ({'fwd': 'stochastic(4)'}, r'as in uniform\(4, rounding=stochastic'),
    'tables without end': ({'fwd': 'aqsgd(uniform(4), examples=1000000000000)'},
                           r'keep feedback states of [\d,.]+ GiB .*is a memory of .*; take'),
}  # fmt: skip


@pytest.mark.parametrize('case', SETTINGS)
def test_a_setting_that_makes_no_sense(case):
    change, message = SETTINGS[case]
    with pytest.raises(ValueError, match=message) as caught:
        loop.prepare(small(**change), loop.ProcessGroup())
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'model': 'lenet'}, r"'lenet' is for images, and alice is a text; take gpt2"),
        ({'heads': 2, 'model': 'lenet'}, r"heads=2 is read by config.model.name='gpt2' alone"),
        ({'adamw_scale': 2.0}, r"adamw_scale=2.0 is read by config.optimizer.name='muon' alone"),
        (
            {
                'optimizer.warmup': '9 epochs',
                'optimizer.schedule': 'wsd(2 epochs)',
            },
            r"warmup='9 epochs' and .*schedule='wsd\(2 epochs\)' are 671 steps and the run has 610",
        ),
        ({'data': 'allice'}, r"'allice' is not one of .*mean alice.* load\(config\)"),
        ({'parallel.remat': 1}, 'config.parallel.remat=1 is not True or False'),
    ],
)
def test_a_setting_of_text_that_makes_no_sense(change, message):
    with pytest.raises(ValueError, match=message):
        experiment.experiment_of(small('text_gpt2', **change))


def numbers(y, x=None, classes=4):
    """A task whose labels are ``y``; with ``x``, tokens."""
    x = np.zeros((len(y), 2), np.float32) if x is None else np.array(x)
    good = Split(x[:1], np.zeros(1, np.int32))
    dataset = Dataset('own', Split(x, np.array(y)), good, classes, mean=(), std=())
    prepare = lambda x, key: jnp.asarray(x)
    return task.Task(dataset, (nn.Dense(4),) * 2, prepare, task.score_classes, task.ACCURACY)


@pytest.mark.parametrize(
    ('labels', 'tokens', 'message'),
    [
        ([0, -1, 3], None, 'y of the train split has -1 to 3, and classes=4 allows 0 to 3; number'),
        ([1, 2, 4], None, 'y of the train split has 1 to 4, and'),
        ([0, 3, 1], [[0, 1], [4, 0], [0, 0]], 'x of the train split has 0 to 4, and'),
        ([0, 3, 1], [[0, 1], [3, 0], [0, -1]], 'x of the train split has -1 to 3, and'),
    ],
)
def test_labels_and_tokens_that_are_no_class(labels, tokens, message):
    """JAX reads -1 as the last class, and NaN beyond it."""
    config = schema.complete({'batch_size': 2})
    with pytest.raises(ValueError, match=f'^own: {message}') as caught:
        experiment.experiment_of(config, numbers(labels, tokens))
    assert '\n' not in str(caught.value)
    split = Split(np.array([[9]] * 3), np.array([-100, 0, 1]))
    data.check(Dataset('regression', split, split, classes=0, mean=(), std=()), tokens=True)
    experiment.experiment_of(config, numbers([0, 3, 1], [[0, 1], [3, 0], [0, 3]]))


def own_rate(config, steps_per_epoch):
    return lambda step: 0.1 if step < config.epochs else 0.01


@pytest.mark.parametrize(
    ('changes', 'key'),
    [
        ({'optimizer.schedule': 'linear'}, 'optimizer.schedule'),
        ({'optimizer.schedule': f'{__name__}:own_rate'}, 'optimizer.schedule'),
        ({'phases': 'raw@-1:'}, 'phases'),
        ({'phases': 'raw@1:'}, ''),
        ({'cosine': 4}, ''),
        ({'optimizer.schedule': 'wsd'}, 'optimizer.schedule'),
        ({'optimizer.warmup': '8 steps'}, ''),
        ({'optimizer.warmup': '50%', 'optimizer.schedule': 'constant'}, 'optimizer.schedule'),
    ],
)
def test_more_epochs_than_the_steps_so_far_were_made_for(tmp_path, changes, key):
    """A schedule to zero after 2 epochs would jump to two thirds of its rate with 6."""
    before = small(epochs=2, **changes)
    exp = experiment.experiment_of(small(epochs=6, **changes))
    (tmp_path / 'config.json').write_text(json.dumps(before.to_dict()))
    done = 2 * exp.epoch_steps
    resume.check_length(experiment.experiment_of(before), tmp_path, done)
    resume.check_length(exp, tmp_path, 0)
    if not key:
        return resume.check_length(exp, tmp_path, done)
    with pytest.raises(
        WorkdirError, match=f'config.epochs=6 config.{key}=.*give config.epochs=2'
    ) as caught:
        resume.check_length(exp, tmp_path, done)
    assert '\n' not in str(caught.value)


def test_rates_that_late_gradients_have_not_used_may_change(tmp_path):
    """Of 10 steps the first 8 made 6 updates, and the rate falls with the eighth."""
    words = {'optimizer.schedule': 'wsd(2 steps)', 'delay': 2}
    (tmp_path / 'config.json').write_text(json.dumps(small(epochs=2, **words).to_dict()))
    exp = experiment.experiment_of(small(epochs=6, **words))
    resume.check_length(exp, tmp_path, 9)
    with pytest.raises(
        WorkdirError, match=r"schedule='wsd\(2 steps\)' would have made its first 10 steps"
    ):
        resume.check_length(exp, tmp_path, 10)


TYPOS = {
    'lr': 'optimizer.lr', 'model.lr': 'optimizer.lr', 'optimiser.lr': 'optimizer.lr',
    'learning_rate': 'optimizer.lr', 'optimizer.learning_rate': 'optimizer.lr',
    'batchsize': 'batch_size', 'batch': 'batch_size', 'optimizer.batch_size': 'batch_size',
    'optimizer.epochs': 'epochs', 'epoch': 'epochs', 'model.seed': 'seed',
    'model.widht': 'model.width', 'data.nme': 'data.name', 'modle.name': 'model.name',
    'parallel.microbatches': 'parallel.num_microbatches', 'replica': 'parallel.replicas',
    'runtime': 'parallel.runtime', 'clip': 'optimizer.clip_norm', 'warmup': 'optimizer.warmup',
    'test_every': 'eval_every', 'checkpoints': 'checkpoint_every',
    'model': 'model.name', 'optimiser': 'optimizer.name', 'dataset': 'data.name',
    'foo': '', 'model.layers': '', 'model.colour': '', 'parallel.link': '', 'rate': '', 'bits': '',
}  # fmt: skip


@pytest.mark.parametrize('typo', TYPOS)
def test_the_key_that_is_meant(typo):
    assert schema.nearest(typo, schema.default().to_dict()) == TYPOS[typo]


def test_what_a_key_said_that_left_is_not_lost(tmp_path):
    """It is refused with what says it now; a workdir in which it said nothing goes on."""
    now, old = schema.default(), schema.default().to_dict()
    old |= {'warmup_epochs': 0, 'eval_feedback': 'carry'}
    file = tmp_path / 'config.json'
    file.write_text(json.dumps(old))
    claim(tmp_path, now.to_dict())
    file.write_text(json.dumps(old | {'warmup_epochs': 2}))
    line = r"config\.warmup_epochs=2 has left; config\.phases='raw@:N' sends"
    with pytest.raises(WorkdirError, match=rf'{file}: {line}.*; convert it with .*migrate\.py'):
        claim(tmp_path, now.to_dict())
    with pytest.raises(ValueError, match=line):
        schema.complete({'warmup_epochs': 2})
    own = schema.complete({'model': {'name': 'own.py:build', 'bottleneck': 3}})
    assert own.model.bottleneck == 3
    with pytest.raises(ValueError, match=r"no key 'optimizer.decay' \(it has left: .*wsd\(20%\)"):
        put(now, 'optimizer.decay=5%')
    said = command.mistake('common', ['--config.warmup_epochs=1'], ValueError())
    assert said.startswith('no key config.warmup_epochs (it has left: config.phases=')
    file = tmp_path / 'own.py'
    text = (
        'from jaxmp.config import load\ndef get_config():\n    c = load("common")\n    c.{} = 1\n'
    )
    file.write_text(text.format('optimizer.cosine_epochs'))
    assert "left: config.optimizer.schedule='cosine(N)'" in command.mistake(
        str(file), [], OSError()
    )


def test_a_rounding_is_not_called_while_it_is_parsed():
    assert spec.parse('uniform(4, rounding=stochastic)')
    with pytest.raises(spec.SpecError, match='nearest takes no arguments; write nearest'):
        spec.parse('uniform(4, rounding=nearest(1, 2))')


def folder(path):
    path.unlink(missing_ok=True)
    path.mkdir()


OLD = {'kind': 'train', 'step': 0, 'epoch': 1, 'loss': 1.0, 'accuracy': 0.5}
WORKDIRS = {
    'checkpoints are a file': (lambda w: (w / 'checkpoints').touch(), 'cannot keep checkpoints'),
    'records are a folder': (lambda w: folder(w / 'metrics.jsonl'), 'cannot read .*metrics'),
    'a config that is a folder': (lambda w: folder(w / 'config.json'), r'cannot read .*config'),
    'a config of a list': (lambda w: (w / 'config.json').write_text('[1]'), r'contains \[1\], not'),
    'a config of nothing': (lambda w: (w / 'config.json').write_text('null'), 'contains null, not'),
    'a config cut off': (lambda w: (w / 'config.json').write_text('{"a'), r'cannot read .*config'),
    'a record of nothing': (lambda w: (w / 'metrics.jsonl').write_text('{}\n'),
                            r"metrics.jsonl, line 1 .*has no epoch.*step: '{}'; remove the line"),
    'a record that is none': (lambda w: (w / 'metrics.jsonl').write_text(
        f'{json.dumps(OLD)}\n<html>\n{json.dumps(OLD)}\n'), r'line 2 is not a record.*<html>'),
}  # fmt: skip


@pytest.fixture(scope='module')
def made():
    """A setting whose first state takes no time."""
    made = loop.prepare(small(), loop.ProcessGroup())
    made.create = lambda: SimpleNamespace(step=0)
    made.export = lambda state: Portable(np.int32(0), np.zeros(2, np.uint32), {})
    return made


@pytest.mark.parametrize('case', WORKDIRS)
def test_a_workdir_with_foreign_files(tmp_path, made, case):
    damage, message = WORKDIRS[case]
    damage(tmp_path)
    with pytest.raises(WorkdirError, match=message) as caught:
        loop.train_and_evaluate(small(), tmp_path, trainer=made, quiet=True)
    assert '\n' not in str(caught.value)
    assert 'workdir' in str(caught.value)


SIZES = {'model_type': 'gpt2', 'n_embd': 24, 'n_head': 2, 'n_layer': 2, 'n_inner': None}
WEIGHTS = {
    'a size of text': ({'n_embd': '24'}, "n_embd='24', which is not a whole number from 1"),
    'half a layer': ({'n_layer': 2.5}, 'n_layer=2.5, which is not a whole number from 1'),
    'a switch for heads': ({'n_head': True}, 'n_head=True, which is not a whole number from 1'),
    'no width': ({'n_embd': None}, 'n_embd=None, which is not a whole number from 1'),
    'a negative part': ({'n_inner': -4}, 'n_inner=-4, which is not a whole number from 1'),
    'a rate of text': ({'attn_pdrop': '0.1'}, "attn_pdrop='0.1', which is not a number from 0"),
    'epsilon of nothing': (
        {'layer_norm_epsilon': None},
        'epsilon=None, which is not a number from 0',
    ),
    'a number for a switch': (
        {'tie_word_embeddings': 1},
        'tie_word_embeddings=1; allowed is True or False',
    ),
    'text for a switch': ({'scale_attn_weights': 'yes'}, "weights='yes'; allowed is True"),
    'a list for a word': ({'model_type': ['gpt2']}, r"model_type=\['gpt2'\]; allowed is 'gpt2'"),
}


@pytest.mark.parametrize('case', WEIGHTS)
def test_a_model_described_with_wrong_kinds(tmp_path, case):
    change, message = WEIGHTS[case]
    file = tmp_path / 'config.json'
    assert gpt2_file.config_of(SIZES, file).width == 24
    file.write_text(json.dumps({**SIZES, **change}))
    with pytest.raises(ValueError, match=message):
        gpt2_file.config_of(contents(file), file)


def test_a_vocabulary_of_wrong_kinds(tmp_path):
    (tmp_path / 'merges.txt').touch()
    for found in ({'a': 0, 'b': 'x'}, {'a': False, 'b': True}, [1], {}):
        (tmp_path / 'vocab.json').write_text(json.dumps(found))
        if found:
            with pytest.raises(ValueError, match=r'does not number its tokens|holds a list'):
                tokenizer.from_folder(str(tmp_path))


@pytest.mark.parametrize('name', ['cifar10', 'mnist', 'wikitext-2'])
def test_data_in_a_file(tmp_path, name):
    (tmp_path / 'file').touch()
    load = text.load if 'wiki' in name else data.load
    with pytest.raises(FileNotFoundError, match=r'file is not a folder|in .*file; put'):
        load(name, *[8] * ('wiki' in name), data_dir=str(tmp_path / 'file'), download=True)


def test_data_that_cannot_be_read(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, 'Permission denied', str(path))

    (tmp_path / 'wiki.train.tokens').touch()
    (tmp_path / 'wiki.valid.tokens').touch()
    (tmp_path / 'data_batch_1').touch()
    monkeypatch.setattr('pathlib.Path.read_bytes', refuse)
    for load, name in (
        (data.load, 'cifar10'),
        (lambda n, d: text.load(n, 8, 'bytes', d), 'wikitext-2'),
    ):
        with pytest.raises(
            OSError, match=f'cannot read {name} in data_dir .*denied.*; make it readable'
        ):
            load(name, str(tmp_path))


def test_a_download_into_a_file(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(FileNotFoundError, match='not a folder'):
        data.load('cifar10', str(tmp_path / 'file'), download=True)


def test_text_from_a_foreign_folder(tmp_path):
    (tmp_path / 'model').mkdir()
    for content in ('[]', 'null', '{"a'):
        (tmp_path / 'config.json').write_text(content)
        with pytest.raises(SystemExit, match=r'^jaxmp generate: .*config.json.* is not the config'):
            generate.main([str(tmp_path)])


def test_a_program_that_is_not_there(tmp_path):
    (tmp_path / 'script').write_text('x')
    for program, why in (('no-such-program', 'No such file'), (str(tmp_path / 'script'), 'denied')):
        launcher = str(ROOT / 'jaxmp' / 'launch' / '__main__.py')
        command = [sys.executable, launcher, '--processes', '2', '--']
        done = subprocess.run([*command, program], capture_output=True, text=True, check=False)
        assert done.returncode == 127
        assert re.fullmatch(f'jaxmp launch: cannot start {program}: .*{why}.*; .*\n', done.stderr)


# train.py itself.


FLAGS = {
    'an unknown key': (['--config.epohcs=3'], r'no key config\.epohcs .*you mean config\.epochs'),
    'a key without its group': (['--config.width=3'], r'mean config\.model\.width'),
    'a key inside a text': (['--config.data.x=3'], r'no key config\.data\.x'),
    'no name': (['--config.=3'], r'no key config\.;'),
    'no such file': (['--config=nowhere.py', '--config.model.width=3'], 'nowhere.py: .*no such'),
    'a folder': (['--config=configs'], '--config=configs: .*give a Python file with get_config'),
    'a misspelt file': (['--config=finetun'], r'no such Python file \(did you mean finetune\?\)'),
    'a misspelt path': (['--config=configs/finetun.py'], 'did you mean configs/finetune.py'),
    'no Python': (['--config', 'README.md'], '--config=README.md: .*give a Python file'),
    'a number of text': (['--config.optimizer.lr=low'], r"'low'; .*lr is a number, such as 0\.02"),
    'half a number': (['--config.epochs=1.5'], r"'1\.5'; config\.epochs is a whole number, such"),
    'a switch of text': (['--config.data.download=maybe'], r"'maybe'\).*download is True or False"),
    'an unknown flag': (['--workdri=x'], "Unknown command line flag 'workdri'"),
    'another order': (['--config.seed=2', '--config=configs/cifar10_small.py'], 'Found .* before'),
}  # fmt: skip


@pytest.mark.filterwarnings('ignore:the load_module')  # ml_collections loads files with it
@pytest.mark.parametrize('case', FLAGS)
def test_flags_that_make_no_sense(case, monkeypatch):
    given, message = FLAGS[case]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, 'argv', ['train.py', *given])
    with pytest.raises(SystemExit, match=f'^train.py: .*{message}') as caught:
        command.parse(sys.argv)
    assert '\n' not in str(caught.value)


def test_a_configuration_of_ones_own_with_a_mistake(tmp_path, monkeypatch):
    for code, message in (
        ('x = ', 'SyntaxError: '),
        ('x = 1', "has no attribute 'get_config'"),
        ('def get_config():\n  return 1', r'get_config\(\) gives a int, not a ConfigDict'),
        ('import nowhere', "ModuleNotFoundError: No module named 'nowhere'"),
    ):
        (tmp_path / 'own.py').write_text(code)
        monkeypatch.setattr(sys, 'argv', ['train.py', f'--config={tmp_path / "own.py"}'])
        with pytest.raises(SystemExit, match=message) as caught:
            command.parse(sys.argv)
        assert '\n' not in str(caught.value)


def test_what_ends_with_a_line_and_what_with_a_traceback():
    full = jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nMore')
    for error, said in (
        (
            full,
            'out of memory: JaxRuntimeError: RESOURCE_EXHAUSTED.* More; lower config',
        ),
        (MemoryError(), 'out of memory: MemoryError:'),
        (ConnectionError('no answer'), 'ConnectionError: no answer'),
        (PermissionError(13, 'Permission denied', 'x'), 'PermissionError: .*denied'),
        (OSError(28, 'No space left on device'), 'OSError: .*No space left'),
        (WorkdirError('in\nuse'), 'WorkdirError: in use'),
    ):
        line = command.expected(error)
        assert re.match(said, line), line
        assert '\n' not in line
    assert command.expected(KeyError('a mistake of ours')) is None
    assert command.expected(jax.errors.JaxRuntimeError('INTERNAL: ours')) is None


def test_ctrl_c_before_the_loop(tmp_path):
    """A jax that is interrupted while it is imported, and the second time while that is told."""
    again = 'os.kill(os.getpid(), signal.SIGINT)\n'
    (tmp_path / 'jax.py').write_text(f'import os, signal\n{again}{again}')
    done = subprocess.run(
        [sys.executable, str(ROOT / 'train.py'), f'--workdir={tmp_path / "w"}'],
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert done.stderr.startswith('train.py: stopped by Ctrl-C; ')
    assert done.stderr.count('\n') == 1


def test_the_second_ctrl_c_in_the_loop_does_not_wait():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    try:
        _second_ctrl_c()
    finally:
        signal.signal(signal.SIGINT, before)


def _second_ctrl_c():
    with resume.stop_signals() as seen:
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
            signal.raise_signal(number)
        assert seen == [signal.SIGTERM, signal.SIGTERM, signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def _lost_after_sigterm(heard):
    with resume.stop_signals():
        signal.raise_signal(signal.SIGTERM)
        assert not heard
        raise ViewChangedError('process 1 was started again')


def test_a_signal_is_not_lost_with_another_process():
    """The run would go on when that is back."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append('usual'))
    try:
        with pytest.raises(ViewChangedError):
            _lost_after_sigterm(heard)
        assert heard == ['usual']
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_stage_whose_output_changes_is_named():
    """A module that counts its calls in Python: the shapes of the messages were planned before."""
    calls = []

    class Growing(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            calls.append(1)
            return jnp.concatenate([x] * len(calls), 1)

    cut = boundary(spec.parse('raw'), spec.parse('raw'))
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    first, _ = stage.programs(Model((Growing(), nn.Dense(2)), (cut,), None, None, x), kwargs={})
    state = jax.eval_shape(first.init, jax.random.key(0))
    run = lambda state, x: first.forward(state, stage.MicroBatch(x, None, Ctx()), None)
    with pytest.raises(ValueError, match=r'stage 0, Growing, gives .* and gave .*one shape'):
        jax.eval_shape(run, state, x)


def test_an_exchange_given_as_a_channel_is_told_where_it_belongs():
    with pytest.raises(ValueError, match=r'all_gather is how replicas share .*config\.exchange'):
        experiment.experiment_of(small(fwd='all_gather(ef(one_bit))'))


def test_residuals_that_do_not_fit_are_refused(monkeypatch):
    """The bytes of what a stage's forward leaves, and as many as the schedule keeps."""
    config = small(runtime='mpmd', num_microbatches=4, fwd='ef21(uniform(4))')
    exp = experiment.experiment_of(config)
    rows = sizes.residual_rows(exp)
    assert [most for _, most in rows] == [2, 1]
    sizes.check_residuals(exp)
    total = sum(n * most for n, most in rows) + sizes.feedback_bytes(exp)
    monkeypatch.setattr(sizes, 'memory', lambda: total - 1)
    first = rf'2 stages keep .*stage 0: 2 x {rows[0][0]:,} bytes.*parallel\.remat=True'
    with pytest.raises(ValueError, match=first):
        sizes.check_residuals(exp)
    config.parallel.remat = True
    again = sizes.residual_rows(experiment.experiment_of(config))
    assert sum(n for n, _ in again) < sum(n for n, _ in rows) / 4
    sizes.check_residuals(experiment.experiment_of(config))


def test_a_dry_run_writes_nothing_and_says_what_does_not_fit(tmp_path, monkeypatch, capsys):
    """Stages, messages and memory; AQ-SGD over 50,000 examples is refused with the arithmetic."""
    monkeypatch.chdir(tmp_path)
    dry_run.dry_run(small(fwd='ef21(uniform(4))'), loop.ProcessGroup())
    said = capsys.readouterr().out
    assert re.search(r'stage.*parameters(.|\n)*boundary.*uncompressed.*feedback', said)
    assert 'compiles, and its first update runs' in said
    assert not list(tmp_path.iterdir())
    y = np.zeros(50_000, np.int32)
    images = np.broadcast_to(np.uint8(0), (50_000, 32, 32, 3))
    task_of = lambda c: task.classifier(
        c, Dataset('many', Split(images, y), Split(images, y), 10, (0.5,) * 3, (0.5,) * 3),
        models.resnet18(10, 64),
    )  # fmt: skip
    config = config_of('cifar10_resnet18', fwd='aqsgd(top_k(0.1), examples=examples)')
    monkeypatch.setattr(sizes, 'memory', lambda: 16 * 2**30)
    message = r'21\.4 GiB .boundary 1: 50,000 x 32 x 32 x 64 x 4 bytes.*a memory of 16\.0 GiB'
    with pytest.raises(ValueError, match=message):
        dry_run.dry_run(config, loop.ProcessGroup(), task_of(config))
