"""A checkpoint as a task: what is read and trained, what is written, GGUF files, the hub."""

import functools
import json
import os
import re
import shutil
import signal
import urllib.error

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import unflatten_dict
from safetensors.numpy import load_file

from jaxmp.data import tokenizer
from jaxmp.models import (
    adapters,
    checkpoint,
    families,
    gguf_file,
    gpt2,
    gpt2_file,
    huggingface,
    pretrained,
    safetensors_file,
)
from jaxmp.models.decoder import PROJECTIONS, decoder
from jaxmp.models.rotary import frequencies
from jaxmp.net.group import ProcessGroup
from jaxmp.plan import stages as plan_stages
from jaxmp.training import experiment, fingerprint, footprint, loop, masters
from jaxmp.training.ahead import compile_ahead
from jaxmp.training.evaluation import language_model, saved
from jaxmp.training.parallel import parallel_of
from jaxmp.training.sizes import residual_rows
from jaxmp.training.summary import costs
from jaxmp.training.tasks import named as tasks
from jaxmp.training.tasks import trained
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir import locks
from tests.base import ROOT, slow
from tests.runs import LAUNCH, config_of, pids, records, text_of, wait_for_steps
from tests.runs import start as start_run
from tests.test_decoder import (
    CASES,
    GOLDEN,
    close,
    described,
    logits,
    opened,
    save,
    shard,
    tensors,
)

TINY = {
    'model_type': 'llama', 'vocab_size': 256, 'hidden_size': 16, 'intermediate_size': 24,
    'num_hidden_layers': 3, 'num_attention_heads': 2, 'num_key_value_heads': 1,
    'tie_word_embeddings': True,
}  # fmt: skip
SHORT = {
    'train_examples': 24, 'test_examples': 4, 'sequence_length': 16, 'batch_size': 4, 'stages': 2,
    'lr': 0.01, 'fwd': 'raw', 'bwd': 'raw', 'clip_norm': 0.0,
}  # fmt: skip


def tiny(folder, **changes):
    """A folder with a random decoder on bytes."""
    found = TINY | changes
    stages = decoder(families.config_of(found), 2)
    random, made = np.random.default_rng(1), []
    draw = lambda shape: random.normal(1 if len(shape) == 1 else 0, 0.05, shape)
    for s in stages:
        arrays = {p: draw(shape).astype(np.float32) for p, shape in pretrained.shapes(s).items()}
        made.append({'params': unflatten_dict(arrays)})
    if stages[0].config.tied:
        made[1]['params']['embed_tokens'] = made[0]['params']['embed_tokens']
    pretrained.write(folder, found, stages, made)
    return folder


def small(folder, **changes):
    return config_of('finetune', **{'path': str(folder), **SHORT, **changes})


def start(config):
    """The parameters before the first step."""
    made = tasks.task_of(config)
    return [made.read(s, jax.random.key(0))['params'] for s in range(len(made.stages))]


def names(tree):
    return {'.'.join(k.key for k in path): a for path, a in jax.tree.leaves_with_path(tree)}


@pytest.fixture
def weights_after(tmp_path):
    """Trains a tiny decoder and returns the parameters before and after by stage, and the task."""

    def run(**changes):
        config = small(tiny(tmp_path / 'base'), **changes)
        made = tasks.task_of(config)
        seen = []
        export = lambda folder, variables: seen.append(variables) or made.export(folder, variables)
        summary = loop.train_and_evaluate(
            config, tmp_path / 'run', made._replace(export=export), quiet=True, draw=False
        )
        before = [names(p) for p in start(config)]
        return before, [names(v['params']) for v in seen[0]], summary

    return run


def moved(before, after):
    """The names of the parameters that training moved."""
    return {
        n for old, new in zip(before, after, strict=True) for n in old
        if not np.array_equal(old[n], new[n])
    }  # fmt: skip


@pytest.mark.parametrize(
    ('train', 'first', 'leaf'),
    slow(
        [('lora(2)', 0, ('lora_a', 'lora_b')), ('stage1.*mlp*', 1, ('weight',))],
        lambda case: case[1] == 1,
    ),
)
def test_a_plan_times_the_gradients_of_what_is_trained_alone(
    tmp_path, monkeypatch, train, first, leaf
):
    """A stage before all that is trained runs no backward, in one piece or in two halves."""
    exp = experiment.experiment_of(small(tiny(tmp_path / 'base'), train=train, runtime='mpmd'))
    timed, seen = plan_stages.one_pass, []
    monkeypatch.setattr(
        plan_stages,
        'one_pass',
        lambda workers, *given: seen.append(workers) or timed(workers, *given),
    )
    trainer = Trainer(exp, ProcessGroup())
    variables = jax.device_put(trainer.weights(trainer.create()), jax.devices()[0])
    run = plan_stages.passes(exp, variables)
    for split in (False, True):
        rows = run(split)
        assert [[seconds > 0 for seconds in row[1:]] for row in rows] == [
            [s >= first] * (1 + split) for s in (0, 1)
        ]
        for worker in seen.pop()[first:]:
            assert {name.split('.')[-1] for name in names(worker.total.grads)} == {*leaf}


def test_by_default_all_but_the_table_is_trained(tmp_path, weights_after):
    before, after, summary = weights_after()
    everything = set().union(*before)
    assert moved(before, after) == everything - {'embed_tokens.weight'}
    assert summary['history']['train']['loss'][0] < np.log(256)
    variables = opened(tmp_path / 'run' / 'model', 2)[2]
    for new, own in zip(after, variables, strict=True):
        jax.tree.map(np.testing.assert_array_equal, names(own['params']), new)


@pytest.mark.slow
def test_lora_trains_its_updates_alone_and_leaves_them_as_peft_does(tmp_path, weights_after):
    before, after, _ = weights_after(train="lora(2, alpha=6, targets='q_proj down_proj')")
    kinds = [f'layers.{m}.lora_{x}' for m in ('self_attn.q_proj', 'mlp.down_proj') for x in 'ab']
    assert moved(before, after) == set(kinds)
    assert not np.any(before[0]['layers.mlp.down_proj.lora_b'])
    a = before[0]['layers.mlp.down_proj.lora_a']
    assert a.shape == (2, 2, 24)
    assert 0.8 * 24**-0.5 < np.abs(a).max() <= 24**-0.5
    root = tmp_path / 'run' / 'model'
    about = json.loads((root / 'adapter_config.json').read_text())
    assert (about['peft_type'], about['r'], about['lora_alpha']) == ('LORA', 2, 6)
    assert about['target_modules'] == ['q_proj', 'down_proj']
    found = load_file(root / 'adapter_model.safetensors')
    assert len(found) == 3 * 2 * 2
    name = 'base_model.model.model.layers.2.self_attn.q_proj.lora_{}.weight'
    np.testing.assert_array_equal(
        found[name.format('A')], after[1]['layers.self_attn.q_proj.lora_a'][0]
    )
    assert found[name.format('B')].shape == (16, 2)


def test_a_frozen_table_is_one_array_of_two_stages(tmp_path):
    folder = tiny(tmp_path / 'model')
    trainer = loop.prepare(small(folder, train='no_table'), loop.ProcessGroup())
    table = lambda state, stage: state.model.params[stage]['embed_tokens']['weight']
    state = trainer.create()
    first = table(state, 0)
    assert table(state, 1) is first
    for _ in range(2):
        state, *_ = next(trainer.epoch(0, state, np.arange(4)))
    assert table(state, 0) is table(state, 1) is first
    apart = loop.prepare(small(folder, train='all'), loop.ProcessGroup()).create()
    assert table(apart, 0) is not table(apart, 1)


def test_a_second_seed_trains_with_the_programs_of_the_first(tmp_path):
    """A step takes the buffers of what it trains; only a frozen table is kept for the next run."""
    config = small(tiny(tmp_path / 'model'), train='no_table')
    trainer = loop.prepare(config, loop.ProcessGroup())
    for seed in (0, 1):
        config.seed = seed
        summary = loop.train_and_evaluate(
            config, tmp_path / str(seed), trainer=trainer.of_seed(config), quiet=True
        )
        assert summary['seed'] == seed


def test_the_same_tensors_and_notes_are_the_same_bytes(tmp_path):
    written = set()
    for i in range(8):
        safetensors_file.save({'a.b': np.arange(3.0)}, tmp_path / f'{i}', one='1', two='2')
        written.add((tmp_path / f'{i}').read_bytes())
    assert len(written) == 1


def test_channels_that_cost_more_than_a_percent_are_told_before_training(tmp_path):
    config = small(tiny(tmp_path / 'base'), fwd='block(2)')
    tests = lambda on: {'off': {'loss': 3.0}, 'on': {'loss': on}}
    assert costs(tests(3.009), config) == ''
    assert "config.fwd='block(2)' adds 5.1 % to the perplexity" in costs(tests(3.05), config)
    assert 'adds inf % to' in costs(tests(np.nan), config)


def test_a_fine_tuning_is_tested_before_its_first_step(tmp_path, monkeypatch, capsys):
    """Which changes nothing of it, is made once, and is neither its best test nor in its curves."""
    words = {'fwd': 'ef21(uniform(4))', 'bwd': 'ef(uniform(4, rounding=stochastic))'}
    words |= {'optimizer.schedule': 'constant', 'train': 'lora(2)', 'eval_every': '3 steps'}
    folder = tiny(tmp_path / 'base')
    first, whole = (small(folder, steps=n, **words) for n in (3, 6))
    trainer = loop.prepare(whole, ProcessGroup(), say=print)
    run = lambda config, name, **more: loop.train_and_evaluate(
        config, tmp_path / name, trainer=trainer.of_seed(config), draw=False, **more
    )
    summary = run(whole, 'tested')
    out, err = capsys.readouterr()
    before = [r for r in records(tmp_path / 'tested') if not r['step']]
    assert [(r['kind'], r['epoch'], r['compression']) for r in before] == [
        ('test', 0, 'off'), ('test', 0, 'on'),
    ]  # fmt: skip
    [said] = (line for line in err.splitlines() if line.startswith('before training  test '))
    for row in before:
        tests, shown = summary['test'][row['compression']], np.exp(row['loss'])
        assert tests['before']['loss'] == row['loss'] != tests['last']['loss']
        assert f'{shown:.4g}' in said
        assert tests['best']['epoch'] > 0
        assert summary['history'][row['compression']]['step'] == [3, 6]
    assert 'step 6/6' in err
    assert 'epoch' not in err
    assert re.search(r'before training .* \(step\) ', out)
    assert re.search(
        r'^memory of this process: \d+\.\d\d GiB at its peak; (?!0\.00)\d+\.\d\d were f', out, re.M
    )
    # Given again, it has ended.
    assert run(whole, 'tested') == summary
    assert 'has ended already, at step 6; its summary:' in capsys.readouterr().err
    # Without it, as an older version made a workdir: the same numbers, and it goes on as it is.
    with monkeypatch.context() as patch:
        patch.setattr(loop, 'before_training', lambda r, state: None)
        run(first, 'older', quiet=True)
    run(whole, 'older', quiet=True)
    assert records(tmp_path / 'older') == records(tmp_path / 'tested')[2:]
    # Resumed, or begun again where it was killed before its first checkpoint, it is not made anew.
    run(first, 'resumed', quiet=True)
    monkeypatch.setattr(
        loop, 'tested', lambda r, state, base, t=loop.tested: base['step'] and t(r, state, base)
    )
    run(whole, 'resumed', quiet=True)
    shutil.rmtree(tmp_path / 'resumed' / 'checkpoints')
    run(whole, 'resumed', quiet=True)
    assert records(tmp_path / 'resumed') == records(tmp_path / 'tested')
    read = lambda name: load_file(tmp_path / name / 'model/adapter_model.safetensors')
    jax.tree.map(np.testing.assert_array_equal, read('older'), read('tested'))


def test_a_stage_updates_its_optimizer_state_in_place(tmp_path):
    """Where stages are apart, as where one program holds them: half of a large model's memory."""
    config = small(tiny(tmp_path), train='no_table', runtime='mpmd')
    trainer = loop.prepare(config, ProcessGroup())
    state, *_ = next(trainer.epoch(0, trainer.create(), np.arange(4)))
    next(trainer.epoch(0, state, np.arange(4)))  # the first state may not be at its device yet
    moments = [a for a in jax.tree.leaves(state.opt_state) if a.size > 1]
    assert moments
    assert all(a.is_deleted() for a in moments)


@pytest.mark.parametrize('train', slow(['lora(2)', 'all'], 'all'.__ne__))
def test_step_and_tests_are_compiled_before_parameters_are_read(tmp_path, train):
    """Then none is compiled again; a channel with a state and one without."""
    config = small(tiny(tmp_path), train=train, fwd='ef21(uniform(4))', bwd='mx(4)')
    trainer = loop.prepare(config, ProcessGroup())
    compile_ahead(trainer)
    state, batch = trainer.create(), next(trainer.batches(np.arange(4)))
    step, compiled = trainer.bound(trainer.training, trainer.rules(0)), []

    def note(event, seconds, fun_name='', **kwargs):
        if event.endswith('backend_compile_duration'):
            compiled.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        state, _ = step(state, batch)
        assert not compiled
        for compressed in (True, False):
            trainer.evaluate(state, compressed)
        assert 'jit(run)' not in compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.mark.slow
def test_updates_over_two_replicas_are_exchanged_alone_and_equal_the_joined_batch(tmp_path):
    folder, seen = tiny(tmp_path / 'model'), []
    for replicas in (1, 2):
        config = small(folder, train='lora(2)', replicas=replicas, exchange='mean')
        workdir = tmp_path / str(replicas)
        summary = loop.train_and_evaluate(config, workdir, quiet=True)
        seen.append((summary, load_file(workdir / 'model/adapter_model.safetensors')))
    (alone, a), (shared, b) = seen
    assert shared['test']['on']['last']['loss'] == pytest.approx(
        alone['test']['on']['last']['loss'], abs=1e-6
    )
    for name, adapter in a.items():
        np.testing.assert_allclose(b[name], adapter, atol=1e-6)
    adapters = sum(adapter.nbytes for adapter in a.values())
    assert shared['exchange']['compiled'] == {'all-reduce': adapters}
    assert shared['exchange']['sent'] == adapters


def killed(folder, changes):
    """The workdirs of two processes, and of two of which one was killed, with equal records."""
    changes |= {'fwd': 'outliers(mx(4))', 'bwd': 'ef21(top_k(0.1))', 'runtime': 'mpmd'}
    changes |= {'eval_every': '3 steps', 'checkpoint_every': '2 steps'}
    whole, cut = folder / 'whole', folder / 'cut'
    run = lambda workdir: start_run(workdir, *LAUNCH, name='finetune', **changes)
    out, code = text_of(run(whole))
    assert code == 0, out[-2000:]
    process = run(cut)
    wait_for_steps(process, cut, 4)
    os.kill(pids(cut, 1)[0], signal.SIGKILL)
    out, code = text_of(process)
    assert code == 137, out[-2000:]
    assert len(records(cut)) < len(records(whole))
    out, code = text_of(run(cut))
    assert code == 0, out[-2000:]
    assert 'resuming from step' in out
    assert records(cut) == records(whole)
    return whole, cut


@pytest.mark.slow
@pytest.mark.parametrize('train', ['lora(2)', 'all'])
def test_two_processes_one_of_them_killed_end_like_two_that_were_not(tmp_path, train):
    """kill -9 in the middle, then the same command: records, parameters and bytes are equal."""
    changes = {'path': str(tiny(tmp_path / 'model')), **SHORT, 'train': train, 'epochs': 2}
    whole, cut = killed(tmp_path, changes)
    assert [r['step'] for r in records(cut)[:3]] == [0, 0, 3]
    a, b = (json.loads((w / 'summary.json').read_text()) for w in (whole, cut))
    assert a['processes'] == 2
    same = ('bytes', *(['tied'] if train == 'all' else []))
    assert [a[k] for k in same] == [b[k] for k in same]
    written = sorted(p.name for p in (whole / 'model').glob('*.safetensors'))
    for name in written:
        one, other = (load_file(w / 'model' / name) for w in (whole, cut))
        jax.tree.map(np.testing.assert_array_equal, one, other)
    adapters = ['adapter_model.safetensors']
    shards = ['model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors']
    assert written == (shards if train == 'all' else adapters)


@pytest.mark.slow
def test_two_processes_send_what_a_frozen_stage_gives_once(tmp_path):
    """Two epochs of a decoder of which the second stage is trained: half of the bytes forward."""
    changes = {'path': str(tiny(tmp_path / 'model')), **SHORT, 'train': 'stage1.layers.*'}
    changes |= {'epochs': 2, 'fwd': 'per_token(uniform(4))', 'runtime': 'mpmd'}
    out, code = text_of(start_run(tmp_path / 'run', *LAUNCH, name='finetune', **changes))
    assert code == 0, out[-2000:]
    assert 'sends 24 examples once, which stage 1 keeps on disk' in out
    summary = json.loads((tmp_path / 'run' / 'summary.json').read_text())
    [moved], [row] = summary['moved'], summary['bytes']
    assert [2 * n for n in moved['payload']] == [row['forward'], 0]


def test_merged_updates_give_the_same_logits(tmp_path):
    config = small(tiny(tmp_path / 'base'), train='lora(2)', merge=True)
    made = tasks.task_of(config)
    key, x = jax.random.key(3), jnp.arange(12)[None]
    variables = [made.read(s, key) for s in range(2)]
    random = np.random.default_rng(0)
    noise = lambda a: a + 0.1 * random.standard_normal(a.shape, np.float32)
    variables = [jax.tree.map(noise, v) for v in variables]
    variables[1]['params']['embed_tokens'] = variables[0]['params']['embed_tokens']
    made.export(str(tmp_path / 'merged'), variables)
    _, stages, merged = opened(tmp_path / 'merged')
    close(logits(stages, merged, x), logits(made.stages, variables, x))


@pytest.mark.slow
def test_adapters_are_read_or_merged(tmp_path, weights_after):
    """The folder of a LoRA run is one to go on from, to train otherwise, and to generate from."""
    _, after, _ = weights_after(train='lora(2)')
    folder = tmp_path / 'run' / 'model'
    again = start(small(folder, train='lora(2)'))
    jax.tree.map(np.testing.assert_array_equal, [names(p) for p in again], after)
    lora = tasks.task_of(small(folder, train='lora(2)'))
    other = tasks.task_of(small(folder, train='all'))
    assert not any(p[-1] == 'lora_a' for p in pretrained.shapes(other.stages[0]))
    x = np.arange(12)[None]
    wanted = logits(lora.stages, [{'params': p} for p in again], x)
    merged = [{'params': p} for p in start(small(folder, train='all'))]
    close(logits(other.stages, merged, x), wanted)
    exp, read = language_model.opened(tmp_path / 'run')
    variables = read(language_model.every)
    close(logits(exp.task.stages, variables, x), wanted)


def changed(folder, **changes):
    about = json.loads((folder / adapters.ABOUT).read_text())
    (folder / adapters.ABOUT).write_text(json.dumps(about | changes))


def test_adapters_of_another_kind_or_model_are_refused(tmp_path):
    made = tasks.task_of(small(tiny(tmp_path / 'base'), train='lora(2)'))
    variables = [made.read(s, jax.random.key(0)) for s in range(2)]
    made.export(str(tmp_path / 'low'), variables)
    tiny(tmp_path / 'short', num_hidden_layers=2)
    changed(tmp_path / 'low', base_model_name_or_path=str(tmp_path / 'short'))
    with pytest.raises(ValueError, match=r'adapters of model.layers.2.*, which .*short lacks'):
        adapters.open_with_adapters(str(tmp_path / 'low'))
    tiny(tmp_path / 'other', rms_norm_eps=1e-3)
    changed(tmp_path / 'low', base_model_name_or_path=str(tmp_path / 'other'))
    with pytest.raises(
        ValueError, match=r'trained on other weights than those in .*other .digest_'
    ):
        adapters.open_with_adapters(str(tmp_path / 'low'))
    message = r"has adapters lora\(2, 4, targets='down_proj .*'\); train the same, or all"
    changed(tmp_path / 'low', base_model_name_or_path=str(tmp_path / 'base'))
    with pytest.raises(ValueError, match=message):
        tasks.task_of(small(tmp_path / 'low', train='lora(3)'))
    changed(tmp_path / 'low', base_model_name_or_path='/gone/away')
    with pytest.raises(FileNotFoundError, match="belong to '/gone/away', which is not there; put"):
        adapters.open_with_adapters(str(tmp_path / 'low'))
    (tmp_path / 'low' / adapters.FILE).unlink()
    with pytest.raises(FileNotFoundError, match=r'_config\.json and no adapter_model'):
        adapters.open_with_adapters(str(tmp_path / 'low'))
    changed(tmp_path / 'low', peft_type='IA3')
    with pytest.raises(
        ValueError, match="peft_type='IA3'; allowed is 'LORA': merge them with PEFT"
    ):
        adapters.open_with_adapters(str(tmp_path / 'low'))


def test_a_task_gives_the_variables_of_a_stage_itself(tmp_path):
    """No random parameters are needed: read has all of a stage, of the shapes of its init."""
    made = tasks.task_of(small(tiny(tmp_path), train='lora(2)'))
    x = jnp.zeros((1, 4), jnp.int32)
    for s, stage in enumerate(made.stages):
        shapes = jax.eval_shape(stage.init, jax.random.key(0), x)
        own = made.read(s, jax.random.key(0))
        assert jax.tree.structure(own) == jax.tree.structure(shapes)
        jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), own, shapes)
        blank = jax.tree.map(lambda a: jnp.zeros(a.shape), shapes)
        jax.tree.map(np.testing.assert_array_equal, made.start(s, blank, jax.random.key(0)), own)
        x = jax.eval_shape(stage.with_logits.apply, shapes, x)


def test_patterns_name_what_is_trained(tmp_path):
    made = tasks.task_of(small(tiny(tmp_path), train='*norm*, embed*, layers.mlp.*'))
    paths = [p for s in made.stages for p in pretrained.shapes(s)]
    chosen = {'.'.join(p) for p in paths if made.trained(0, p)}
    assert 'layers.self_attn.q_proj.weight' not in chosen
    assert {'norm.weight', 'embed_tokens.weight', 'layers.mlp.up_proj.weight'} < chosen
    assert made.copied is not None
    assert tasks.task_of(small(tmp_path)).copied is None
    config = small(tiny(tmp_path / 'apart', tie_word_embeddings=False), train='no_table')
    made = tasks.task_of(config)
    assert made.tied is None
    assert not made.trained(1, ('lm_head', 'weight'))


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('lora(0)', "train='lora.0.': .*rank 0 .* rank from 1; allowed are all, no_table"),
        ("lora(2, targets='q_proj kproj')", f"targets 'kproj', .* of {', '.join(PROJECTIONS)}"),
        ('lora(2, dropout=1)', 'dropout'),
        ('lora8', r"'lora8' \(did you mean lora\(8\)\?\): 'lora8' matches no parameter; there are"),
        ('lora', "'lora' matches no parameter; there are embed_tokens.weight, layers.inp"),
        ('*nrom*', r"'\*nrom\*' matches no parameter; there are embed_tokens.weight, layers.inp"),
        (' ', "train=' ' names nothing; allowed are all"),
    ],
)
def test_what_cannot_be_trained(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as caught:
        tasks.task_of(small(tiny(tmp_path), train=text))
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'path': ''}, "name='pretrained' needs config.model.path: a folder"),
        ({'path': 'no/such/folder'}, 'there is no no/such/folder; give a folder with config'),
        ({'cuts': '1 x'}, r"cuts='1 x' is not a list of numbers of blocks such as '8 16 23'"),
        ({'cuts': '2 1'}, r'cuts=\(2, 1\) of a decoder with 3 blocks'),
        ({'stages': 4}, '4 stages of a decoder with 3 blocks'),
        ({'tokenizer': 'bpe-300'}, 'has 256 tokens and the tokenizer 300, so it is of another m'),
        ({'model': 'gpt2', 'train': 'all'}, "train='all' is read by .*'pretrained' alone"),
    ],
)
def test_a_checkpoint_that_does_not_fit(tmp_path, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        experiment.experiment_of(small(tiny(tmp_path), **changes))


def test_sequences_are_no_longer_than_the_checkpoints(tmp_path):
    folder = tiny(tmp_path, max_position_embeddings=16)
    experiment.experiment_of(small(folder, sequence_length=16))
    with pytest.raises(ValueError, match='sequence_length=17 is more than the 16 positions of /'):
        experiment.experiment_of(small(folder, sequence_length=17))


def test_a_checkpoint_without_its_tokenizer_is_not_trained_on_bytes(tmp_path):
    """The rows of the bytes' numbers are those of other tokens."""
    message = 'table of .* has 5,000 tokens and the tokenizer 256, .*leave config.data.tokenizer ou'
    with pytest.raises(ValueError, match=message):
        experiment.experiment_of(small(tiny(tmp_path, vocab_size=5000)))


@pytest.mark.parametrize('dtype', ['F8_E4M3', 'I8'])
def test_weights_that_need_a_scale_are_refused(tmp_path, dtype):
    """They would be read as numbers of another size, or not at all."""
    name = 'model.layers.0.self_attn.q_proj.weight'
    header = json.dumps({name: {'dtype': dtype, 'shape': [4], 'data_offsets': [0, 4]}}).encode()
    file = tmp_path / 'model.safetensors'
    file.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(4))
    _, read = safetensors_file.open_tensors([file])
    with pytest.raises(
        ValueError, match=f'{name} in .* is {dtype}, and tensors of F64, .*quantise'
    ):
        read(name)


def test_cuts_are_the_boundaries(tmp_path):
    config = small(tiny(tmp_path), cuts='2')
    assert [s.blocks for s in tasks.task_of(config).stages] == [2, 1]
    assert tasks.stage_count(config) == 2
    assert tasks.stage_count(small(tmp_path, cuts='1,2')) == 3


def test_a_gpt2_is_read_by_the_same_key(tmp_path):
    sizes = gpt2.Config(256, 16, 8, 2, 2)
    stages = gpt2.gpt2(sizes, 1)
    variables = jax.jit(stages[0].init)(jax.random.key(0), jnp.zeros((1, 2), jnp.int32))
    gpt2_file.write(tmp_path, stages, [variables])
    made = tasks.task_of(small(tmp_path, cuts='1'))
    assert [type(s) for s in made.stages] == [gpt2.Stage] * 2
    own = made.start(0, {}, jax.random.key(0))
    np.testing.assert_array_equal(own['params']['wte'], variables['params']['wte'])
    with pytest.raises(
        ValueError, match=r'config.model.tied=False, and the weights in .* have one'
    ):
        tasks.task_of(small(tmp_path, tied=False))
    config = json.loads((tmp_path / 'config.json').read_text())
    (tmp_path / 'config.json').write_text(json.dumps({**config, 'vocab_size': 300}))
    with pytest.raises(ValueError, match=r'table of 300 tokens .* has 256; use the tokeniser of'):
        tasks.task_of(small(tmp_path))


def test_lora_begins_alike_in_every_process(tmp_path):
    """A stage's updates depend on the key and its number, not on who reads it."""
    made = tasks.task_of(small(tiny(tmp_path), train='lora(2)'))
    a = [made.read(s, jax.random.key(4))['params']['layers'] for s in (0, 1)]
    low = [x['mlp']['up_proj']['lora_a'] for x in a]
    assert not np.array_equal(low[0][0], low[1][0])
    again = made.read(1, jax.random.key(4))['params']['layers']['mlp']['up_proj']['lora_a']
    np.testing.assert_array_equal(again, low[1])


def test_forms_of_what_is_trained():
    assert trained.trained('lora(3)').lora == trained.Lora(3, 6)
    assert trained.trained("lora(3, 1, targets='*_proj')").lora.targets == PROJECTIONS


def test_what_is_not_trained_may_have_16_bits(tmp_path):
    """Low-rank updates, the residual stream and the messages stay float32."""
    folder = tiny(tmp_path)
    made = tasks.task_of(small(folder, train='lora(2)', param_dtype='bfloat16'))
    variables = [made.read(s, jax.random.key(0)) for s in range(2)]
    dtypes = {n.rpartition('.')[2]: a.dtype for n, a in names(variables[0]['params']).items()}
    assert {k: d.name for k, d in dtypes.items()} == {
        'weight': 'bfloat16', 'lora_a': 'float32', 'lora_b': 'float32'
    }  # fmt: skip
    traced = jax.eval_shape(lambda v: made.start(0, v, jax.random.key(0)), variables[0])
    assert jax.tree.map(lambda a: a.dtype, traced) == jax.tree.map(lambda a: a.dtype, variables[0])
    x = np.arange(12)[None]
    middle = made.stages[0].apply(variables[0], x)
    assert middle.dtype == jnp.float32
    wide = tasks.task_of(small(folder, train='lora(2)'))
    wanted = logits(wide.stages, [wide.read(s, jax.random.key(0)) for s in range(2)], x)
    error = np.abs(logits(made.stages, variables, x) - wanted).max() / np.abs(wanted).max()
    assert 0 < error < 0.02


def test_parameters_in_16_bits_are_float32_copies_rounded():
    """To the bit those of AdamW in float32 whose gradients are taken at the rounded parameters."""
    start = {'a': jax.random.normal(jax.random.key(0), (6, 5)), 'lora_a': jnp.ones(3)}
    narrow = {'a': start['a'].astype(jnp.bfloat16), 'lora_a': start['lora_a']}
    plain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4))
    loss = lambda p: sum(jnp.sum(jnp.sin(3 * a) ** 2) for a in p.values())
    gradient = jax.jit(jax.grad(loss))  # the rest is not compiled, which could join two roundings
    both = masters.with_masters(plain)
    params, wide = narrow, jax.tree.map(lambda a: a.astype(jnp.float32), narrow)
    state, wide_state = both.init(params), plain.init(wide)
    assert list(state.masters) == ["['a']"]  # what has float32 already needs no copy
    for _ in range(50):
        rounded = jax.tree.map(lambda a, p: a.astype(p.dtype), wide, narrow)
        widened = jax.tree.map(lambda g: g.astype(jnp.float32), gradient(rounded))
        updates, wide_state = plain.update(widened, wide_state, wide)
        wide = optax.apply_updates(wide, updates)
        updates, state = both.update(gradient(params), state, params)
        params = optax.apply_updates(params, updates)
        for name, a in params.items():
            assert a.dtype == narrow[name].dtype
            np.testing.assert_array_equal(a, wide[name].astype(a.dtype))
    moved = np.asarray(params['a'] != narrow['a'])
    assert moved.mean() > 0.5  # though no step was half the distance to the next number
    changed = {**params, 'a': params['a'] + 1}  # by an exchange of replicas
    _, state = both.update(jax.tree.map(jnp.zeros_like, changed), state, changed)
    np.testing.assert_allclose(state.masters["['a']"], changed['a'].astype(np.float32), atol=1e-3)


@pytest.mark.slow
def test_training_in_16_bits_is_that_in_float32_but_for_rounding(tmp_path):
    """Also its checkpoint, its export, and a table of two stages."""
    folder = tiny(tmp_path / 'base')
    losses, dtypes = {}, {}
    for dtype in ('float32', 'bfloat16'):
        run = tmp_path / dtype
        for epochs in (1, 3):  # the second goes on from a checkpoint
            config = small(folder, train='all', param_dtype=dtype, epochs=epochs, lr=3e-3)
            config.optimizer.schedule = 'constant'
            summary = loop.train_and_evaluate(config, run, quiet=True, draw=False)
        losses[dtype] = np.array(summary['history']['train']['loss'])
        stored = load_file(run / 'model' / 'model-00001-of-00002.safetensors')
        dtypes[dtype] = {a.dtype.name for a in stored.values()}
    assert dtypes == {d: {d} for d in losses}
    assert losses['float32'][0] - losses['float32'][-1] > 0.05
    np.testing.assert_allclose(losses['bfloat16'], losses['float32'], atol=0.02)
    at_once = loop.train_and_evaluate(config, tmp_path / 'one', quiet=True, draw=False)
    assert at_once['history']['train']['loss'] == losses['bfloat16'].tolist()


@pytest.mark.parametrize(
    'changes',
    slow(
        [{'train': 'no_table'}, {'train': 'lora(2)', 'param_dtype': 'bfloat16'}],
        lambda c: len(c) > 1,
    ),
)
def test_the_memory_of_a_process_is_that_of_its_arrays(tmp_path, changes):
    """A frozen table of two stages counts once."""
    lines = []
    config = small(tiny(tmp_path), stages=3, optimizer='adamw', **changes)
    trainer = loop.prepare(config, loop.ProcessGroup(), say=lines.append)
    state, exp = trainer.create(), trainer.exp
    unique = lambda tree: sum({id(a): a.nbytes for a in jax.tree.leaves(tree)}.values())
    sizes = footprint.footprint(exp, range(3))
    assert sizes['parameters'] == unique(state.model.params)
    assert sizes['optimizer'] == unique(state.opt_state)
    assert sizes['gradients'] == sum(
        a.nbytes for s, tree in state.model.params.items() for path, a in names(tree).items()
        if exp.task.trained(s, tuple(path.split('.')))
    )  # fmt: skip
    assert sizes['activations'] == sum(size for size, _ in residual_rows(exp))
    [line] = lines
    assert line.startswith(f'memory of a process: {footprint.described(sizes)}; it has ')
    assert re.search(r' GiB, of which Python, JAX and data have (?!0\.0)\d+\.\d', line)
    assert trainer.announced > sum(sizes.values()) + 2**26
    apart = [footprint.footprint(exp, [s])['parameters'] for s in range(3)]
    table = state.model.params[0]['embed_tokens']['weight'].nbytes
    assert sum(apart) == sizes['parameters'] + table


def test_a_metric_of_a_checkpoint_gets_the_scores_of_its_tokens(tmp_path):
    """As docs/own_model.md says: the nats of each next token, and -1 where none counts."""
    page = (ROOT / 'docs' / 'own_model.md').read_text()
    [code] = re.findall(r'^```python\n([^`]*def bits_per_token.*?)^```', page, re.M | re.S)
    (tmp_path / 'bits.py').write_text(code)
    made = tasks.task_of(small(tiny(tmp_path), metric=f'{tmp_path / "bits.py"}:bits_per_token'))
    output = np.random.default_rng(0).uniform(size=(2, 5, 2)).astype(np.float32)
    y = np.array([[1, 2, -1, 3, -1], [4, 5, 6, 7, 8]])
    scores = made.score(output, y)
    np.testing.assert_allclose(scores['bits_per_token'], scores['loss'] / np.log(2), rtol=1e-6)
    assert made.metric.score == 'bits_per_token'


def test_a_process_has_its_stages_for_each_of_its_replicas(tmp_path):
    of = lambda **changes: parallel_of(small(tmp_path, **changes), 3).stages_of_process
    assert of()(0, 1) == [0, 1, 2]
    assert of(replicas=4)(1, 2) == [0, 1, 2, 0, 1, 2]
    assert of(runtime='spmd', replicas=2)(0, 1) == [0, 1, 2, 0, 1, 2]
    assert [of(runtime='mpmd')(i, 2) for i in (0, 1)] == [[0, 1], [2]]
    assert of(runtime='mpmd', replicas=2)(1, 2) == [0, 1, 2]


def test_a_run_that_cannot_fit_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    folder = tiny(tmp_path)
    monkeypatch.setattr(footprint, 'memory', lambda: 2**10)
    monkeypatch.setattr(pretrained, 'read', None)
    config = small(folder, train='no_table')
    config.model.remat = False
    needs = r'at least 0\.00 GiB: parameters 0\.00, gradients .*; it has 0\.00 GiB.*; try config\.'
    helps = (
        r"model\.train='lora\(8\)', config\.model\.remat=True, a config\.batch_size below 4, stage"
    )
    with pytest.raises(ValueError, match=needs + helps):
        loop.prepare(config, loop.ProcessGroup())
    with pytest.raises(ValueError, match=r"try config\.model\.param_dtype='bfloat16'"):
        loop.prepare(small(folder, train='lora(2)'), loop.ProcessGroup())


# GGUF.


def by_pairs(weight, heads):
    """Inverse of `gguf_file.by_halves`: the rows of q or k as llama.cpp has them."""
    halves = weight.reshape(heads, 2, len(weight) // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def as_gguf(file, case, rope=None, **fields):
    """A golden model as llama.cpp's converter writes it, in float32."""
    gguf = pytest.importorskip('gguf')
    d = described(case)
    arch = fields.pop('architecture', d['model_type'].removesuffix('_text'))
    known = gguf_file.ARCHITECTURES.get(arch, gguf_file.ARCHITECTURES['llama'])
    theirs = {v: k for k, v in {**gguf_file._INSIDE, **known.inside}.items()}
    writer = gguf.GGUFWriter(file, arch)
    writer.add_context_length(d['max_position_embeddings'])
    writer.add_embedding_length(d['hidden_size'])
    writer.add_block_count(d['num_hidden_layers'])
    writer.add_feed_forward_length(d['intermediate_size'])
    writer.add_head_count(d['num_attention_heads'])
    writer.add_head_count_kv(d['num_key_value_heads'])
    writer.add_key_length(d.get('head_dim') or d['hidden_size'] // d['num_attention_heads'])
    writer.add_layer_norm_rms_eps(d['rms_norm_eps'])
    positions = d['rope_parameters'].get('full_attention', d['rope_parameters'])
    writer.add_rope_freq_base(positions.get('rope_theta', 10000.0))
    if positions['rope_type'] in ('linear', 'yarn'):
        writer.add_rope_scaling_type(gguf.RopeScalingType(positions['rope_type']))
        writer.add_rope_scaling_factor(positions['factor'])
        if original := positions.get('original_max_position_embeddings'):
            writer.add_rope_scaling_orig_ctx_len(original)
    if arch.startswith('gemma'):
        of_gemma(writer, arch, d)
    for name, a in tensors(case).items():
        a, words = a.astype(np.float32), name.split('.')
        for part, heads in (('q', 'num_attention_heads'), ('k', 'num_key_value_heads')):
            if arch == 'llama' and f'.{part}_proj.' in name:
                a = by_pairs(a, d[heads])
        if arch.startswith('gemma'):
            a = a + 1 if name.endswith('norm.weight') else a
            if name.endswith(f'{"q_proj" if arch == "gemma2" else "q_norm"}.weight'):
                # A file does not say query_pre_attn_scalar: the queries are scaled instead.
                a = a * np.float32((d['head_dim'] / d['query_pre_attn_scalar']) ** 0.5)
        if words[1] == 'layers':
            own = f'blk.{words[2]}.{theirs[".".join(words[3:-1])]}.{words[-1]}'
        else:
            outside = {v: k for k, v in gguf_file._OUTSIDE.items()}
            own = f'{outside[words[-2]]}.{words[-1]}'
        writer.add_tensor(own, a)
    if rope is not None:
        writer.add_tensor('rope_freqs.weight', np.asarray(rope, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def of_gemma(writer, arch, d):
    """What a file of a Gemma says beside; of Gemma 2 every second block sees all without a word."""
    writer.add_sliding_window(d['sliding_window'])
    if arch == 'gemma2':
        writer.add_attn_logit_softcapping(d['attn_logit_softcapping'])
        writer.add_final_logit_softcapping(d['final_logit_softcapping'])
    else:
        local = d['rope_parameters']['sliding_attention']['rope_theta']
        writer.add_float32('gemma3.rope.freq_base_swa', local)
        writer.add_uint32('gemma3.attention.sliding_window_pattern', 2)


@pytest.mark.parametrize('case', ['llama', 'llama_linear', 'qwen2', 'gemma2', 'gemma3'])
def test_a_gguf_file_is_read_as_the_folder(tmp_path, case):
    file = as_gguf(tmp_path / 'model.gguf', case)
    _, stages, variables = opened(file, cuts=(1,))
    close(logits(stages, variables), GOLDEN[f'{case}/logits'])


LLAMA3 = {
    'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0,
    'original_max_position_embeddings': 8192,
}  # fmt: skip


def test_a_gguf_file_is_listed_once_for_model_and_tokenizer(tmp_path, monkeypatch):
    import gguf

    files, begin = [], gguf.GGUFReader.__init__
    noted = lambda self, file: files.append(file) or begin(self, file)
    monkeypatch.setattr(gguf.GGUFReader, '__init__', noted)
    file = as_gguf(tmp_path / 'one.gguf', 'llama')
    checkpoint.open_checkpoint(file)
    with pytest.raises(ValueError, match='has a tokenizer of the kind None'):
        tokenizer.tokenizer_of(str(file))
    assert files == [file]


def test_llama_3s_scaling_is_recognised_in_a_gguf_file(tmp_path):
    plain, scaled = (frequencies(4, {'rope_theta': 10000.0, **s})[0] for s in ({}, LLAMA3))
    divisors = np.divide(plain, scaled)
    file = as_gguf(tmp_path / 'a.gguf', 'llama', rope=divisors)
    found = checkpoint.open_checkpoint(file)
    assert found.described['rope_scaling'] == {**LLAMA3, 'factor': float(divisors.max())}
    kind = families.config_of(found.described).kinds[0]
    np.testing.assert_allclose(kind.frequencies, scaled, rtol=1e-3)
    file = as_gguf(tmp_path / 'b.gguf', 'llama', rope=[5.0, 2.0])
    with pytest.raises(ValueError, match='scales its rotary positions as no published Llama 3'):
        checkpoint.open_checkpoint(file)


def test_a_gguf_file_that_is_not_what_it_should_be(tmp_path, monkeypatch):
    file = as_gguf(tmp_path / 'whole.gguf', 'llama')
    (cut := tmp_path / 'cut.gguf').write_bytes(file.read_bytes()[:-3000])
    with pytest.raises(ValueError, match=r'cut.gguf is damaged or cut off: [\d,]+ bytes'):
        checkpoint.open_checkpoint(cut)
    (other := tmp_path / 'other.gguf').write_bytes(b'no GGUF at all, but longer than a header')
    with pytest.raises(ValueError, match=r'other.gguf is damaged or cut off'):
        checkpoint.open_checkpoint(other)
    with pytest.raises(ValueError, match="architecture 'falcon'; of GGUF files llama, qwen2, qw"):
        checkpoint.open_checkpoint(as_gguf(tmp_path / 'f.gguf', 'llama', architecture='falcon'))
    monkeypatch.setitem(__import__('sys').modules, 'gguf', None)
    with pytest.raises(ImportError, match=r'needs the package gguf; pip install "jaxmp\[train\]"'):
        checkpoint.open_checkpoint(file)


# The hub.


@pytest.fixture
def hub(monkeypatch):
    """A hub whose cache and network are functions, which a test puts in their places."""
    import huggingface_hub

    calls = {'local': lambda **kwargs: None, 'network': lambda **kwargs: None}

    def download(local_files_only=False, **kwargs):
        return calls['local' if local_files_only else 'network'](**kwargs)

    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    answer = lambda request, timeout: (_ for _ in ()).throw(
        urllib.error.HTTPError('', 200, '', None, None)
    )
    monkeypatch.setattr('urllib.request.urlopen', answer)
    return calls


def test_a_download_that_was_cut_off_goes_on(tmp_path, hub, monkeypatch):
    folder = save(tmp_path / 'cache', 'llama')
    hub['local'] = hub['network'] = lambda **kwargs: str(folder)
    assert huggingface.local('owner/name') == folder
    shard(folder)
    hub['network'] = lambda **kwargs: pytest.fail('all is in the cache')
    assert huggingface.local('owner/name') == folder
    (folder / 'model-1.safetensors').unlink()
    hub['network'] = lambda **kwargs: 'completed'
    assert str(huggingface.local('owner/name')) == 'completed'
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)
    says = (
        'there is no folder owner/name, .*; HF_HUB_OFFLINE is set: .* download model-1.safetensors'
    )
    with pytest.raises(ConnectionError, match=says):
        huggingface.local('owner/name')


def test_a_misspelt_path_is_not_asked_of_the_hub(tmp_path, hub, monkeypatch):
    hub['local'] = hub['network'] = lambda **kwargs: pytest.fail('a stranger may have the name')
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs' / 'alice').mkdir(parents=True)
    with pytest.raises(
        FileNotFoundError, match=r'no runs/alcie \(did you mean runs/alice\?\); give a'
    ):
        huggingface.local('runs/alcie')


def test_a_gated_model_without_a_token(hub):
    from huggingface_hub import errors

    def refuse(kind, **kwargs):
        response = __import__('types').SimpleNamespace(headers={}, request=None, status_code=403)
        raise kind('refused', response=response)

    def nothing(**kwargs):
        raise errors.LocalEntryNotFoundError('not here')

    hub['local'] = nothing
    hub['network'] = functools.partial(refuse, errors.GatedRepoError)
    with pytest.raises(ValueError, match=r'accept it at .*/owner/name, then .* HF_TOKEN'):
        huggingface.local('owner/name')
    hub['network'] = functools.partial(refuse, errors.RepositoryNotFoundError)
    with pytest.raises(ValueError, match="has no model 'owner/name', or it is private"):
        huggingface.local('owner/name')


# Live, where torch is installed.


@pytest.mark.slow
@pytest.mark.parametrize('case', CASES)
def test_what_is_written_loads_in_transformers(tmp_path, case):
    torch, transformers = map(pytest.importorskip, ('torch', 'transformers'))
    found, stages, variables = opened(save(tmp_path / 'ours', case), cuts=(1,))
    scaled = jax.tree.map(lambda a: a * 0.9, variables)
    pretrained.write(tmp_path / 'out', found.described, stages, scaled)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / 'out', attn_implementation='eager'
    )
    tokens = GOLDEN['tokens']
    with torch.no_grad():
        wanted = theirs.eval()(torch.tensor(tokens.astype(np.int64))).logits.numpy()
    close(logits(stages, scaled), wanted)


@pytest.mark.slow
def test_a_run_is_not_resumed_on_another_text_or_other_weights(tmp_path, monkeypatch):
    """Frozen parameters are in no checkpoint, so that nothing else would tell."""
    monkeypatch.chdir(tmp_path)
    text, run = tmp_path / 'a.txt', tmp_path / 'run'
    base = tiny(tmp_path / 'base', max_position_embeddings=20)
    tensors = next(base.glob('*.safetensors'))
    words = ' '.join(map(str, range(2000)))
    text.write_text(words)
    keys = {'train': 'lora(1)', 'files': 'a.txt', 'optimizer.schedule': 'constant'}
    config = lambda steps: small(base, **keys, steps=steps)
    loop.train_and_evaluate(config(2), run, quiet=True, draw=False)
    low = r'adapters that were trained on other weights .*digest_of_base \w+, now \w+.; put the'
    for file, other, said in (
        (text, words.replace('3', '4').encode(), r'train\.x int32\[24, 16\] \w+ \(now int32'),
        (tensors, tensors.read_bytes()[:-4] + b'\0\0\0\1', r'config\.model\.path \w+ \(now \w+\)'),
    ):
        content = file.read_bytes()
        file.unlink()  # it may be mapped into memory
        file.write_bytes(other)
        with pytest.raises(locks.WorkdirError, match=f'other data or weights: {said}.*; give the '):
            loop.train_and_evaluate(config(3), run, quiet=True)
        with pytest.raises(locks.WorkdirError, match=f'other data or weights: {said}.*; give the '):
            saved.load(run)
        if file == tensors:  # its adapters are in PEFT's layout, with a note of their base
            for place in (run, run / 'model'):
                with pytest.raises(ValueError, match=low):
                    language_model.open_language_model(str(place))
        file.write_bytes(content)
    low_rank = run / 'model' / 'adapter_model.safetensors'
    content = low_rank.read_bytes()
    low_rank.write_bytes(content[:-4] + b'\0\0\0\1')
    with pytest.raises(
        locks.WorkdirError, match=r'weights: model/adapter\S+ \w+ \(now \w+\); give'
    ):
        language_model.open_language_model(str(run))
    low_rank.write_bytes(content)
    assert language_model.open_language_model(str(run)).positions == 20
    alone = fingerprint.weights(str(base))
    adapters.write_adapters(tmp_path / 'low', str(base), *_of_rank_1(base), '')
    assert fingerprint.weights(str(base)) == alone != fingerprint.weights(str(tmp_path / 'low'))
    assert loop.train_and_evaluate(config(3), run, quiet=True, draw=False)['steps'] == 3


def _of_rank_1(base):
    """Stages with low-rank updates, and their variables."""
    exp = experiment.experiment_of(small(base, train='lora(1)'))
    variables = [exp.task.read(s, jax.random.key(0)) for s in range(len(exp.task.stages))]
    return exp.task.stages, variables


def test_fewer_examples_of_a_text_are_one_array(tmp_path):
    """Whoever reads tokens and targets reads them once; a run may be tested on so many tokens."""
    exp = experiment.experiment_of(small(tiny(tmp_path), test_examples=3))
    for split, count in ((exp.data.train, 24), (exp.data.test, 3)):
        assert split.y is split.x
        assert split.x.shape == (count, 16)
