"""A frozen base that stays in the blocks of its GGUF file."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from jaxmp.models import blocks, checkpoint, pretrained, scores
from jaxmp.models.blocks import KINDS, Blocks
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.trained import part, whole
from jaxmp.training import dry_run, footprint, loop
from jaxmp.training.evaluation import language_model
from jaxmp.training.generation import generate
from jaxmp.training.tasks import named as tasks
from jaxmp.wire import nbytes
from tests.base import slow
from tests.runs import config_of
from tests.test_decoder import close, logits
from tests.test_pretrained import SHORT, killed, tiny

gguf = pytest.importorskip('gguf')

WIDE = {'width': 64, 'inner': 96, 'layers': 3, 'vocabulary': 256, 'heads': 2, 'kv_heads': 1}
MIXED = {  # as Q4_K_M: a kind of its own for the table, and two in turn for one kernel
    'token_embd': 'Q8_0', 'attn_v': ('Q4_1', 'Q5_0'), 'ffn_down': ('Q5_1', 'Q4_0', 'Q5_1'),
}  # fmt: skip


def random_blocks(random, kind, rows, width, scale=0.01):
    """Bytes of random codes, and scales that make weights of a usual size."""
    layout = KINDS[kind]
    shape = rows, width // layout.weights, layout.nbytes
    b = random.integers(0, 256, shape, dtype=np.uint8)
    numbers = {
        'F32': {}, 'F16': {}, 'BF16': {}, 'Q2_K': (80, 82), 'Q3_K': (108,), 'Q6_K': (208,),
    }.get(kind, (0, 2) if kind in ('Q4_1', 'Q5_1', 'Q4_K', 'Q5_K') else (0,))  # fmt: skip
    for place in numbers:
        d = (random.normal(size=shape[:2]) * scale).astype(np.float16)
        b[..., place : place + 2] = d[..., None].view(np.uint8)
    if not numbers:
        x = random.normal(size=(rows, width)).astype(np.float32)
        return gguf.quants.quantize(x, gguf.GGMLQuantizationType[kind]).view(np.uint8)
    return b.reshape(rows, -1)


def write(file, kinds, default='Q4_0', tied=True, **sizes):
    """A random Llama on bytes, whose kernels are in blocks of some kinds."""
    s, random = {**WIDE, **sizes}, np.random.default_rng(0)
    C, H, V = s['width'], s['inner'], s['vocabulary']
    of_head = C // s['heads']
    writer = gguf.GGUFWriter(file, 'llama')
    writer.add_context_length(64)
    writer.add_embedding_length(C)
    writer.add_block_count(s['layers'])
    writer.add_feed_forward_length(H)
    writer.add_head_count(s['heads'])
    writer.add_head_count_kv(s['kv_heads'])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model('gpt2')
    writer.add_tokenizer_pre('gpt-2')
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[:-1]
    writer.add_token_list([*letters, 'he'])
    writer.add_token_types([1] * V)
    writer.add_token_merges(['h e'])
    writer.add_eos_token_id(0)

    def add(name, rows, width, layer=0):
        kind = kinds.get(name.split('.')[-2], default)
        kind = kind if isinstance(kind, str) else kind[layer % len(kind)]
        quantised = gguf.GGMLQuantizationType[kind]
        x = random.normal(size=(rows, width)).astype(np.float32) * 0.1
        if kind.endswith('_K'):
            data = random_blocks(random, kind, rows, width, 0.002)
        else:
            data = gguf.quants.quantize(x, quantised)
        writer.add_tensor(name, data, raw_dtype=quantised)

    add('token_embd.weight', V, C)
    if not tied:
        add('output.weight', V, C)
    writer.add_tensor('output_norm.weight', np.ones(C, np.float32))
    for i in range(s['layers']):
        for norm in ('attn_norm', 'ffn_norm'):
            writer.add_tensor(f'blk.{i}.{norm}.weight', np.ones(C, np.float32))
        for name, rows, width in (
            ('attn_q', C, C), ('attn_k', s['kv_heads'] * of_head, C),
            ('attn_v', s['kv_heads'] * of_head, C), ('attn_output', C, C), ('ffn_gate', H, C),
            ('ffn_up', H, C), ('ffn_down', C, H),
        ):  # fmt: skip
            add(f'blk.{i}.{name}.weight', rows, width, i)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def small(file, **changes) -> Any:
    """A short run of LoRA over a file."""
    given = {'train': 'lora(2)', 'param_dtype': 'file', **SHORT, **changes}
    return config_of('finetune', **{'path': str(file), **given})


def opened(file, train_on_file=True, stages=2, **changes):
    """The task's stages and variables, in blocks or widened to float32."""
    config = small(
        file, param_dtype='file' if train_on_file else 'float32', stages=stages, **changes
    )
    task: Any = tasks.task_of(config)
    return task, [task.read(s, jax.random.key(0)) for s in range(stages)]


@pytest.mark.parametrize('kind', KINDS)
def test_a_kind_is_widened_as_the_package_gguf_does(kind):
    """To the bit, compiled or not."""
    number, layout = gguf.GGMLQuantizationType[kind], KINDS[kind]
    assert (layout.weights, layout.nbytes) == gguf.constants.GGML_QUANT_SIZES[number]
    rows = random_blocks(np.random.default_rng(1), kind, 24, 512)
    of_file = Blocks(jnp.asarray(rows), None, (kind,), 512)
    wanted = gguf.quants.dequantize(rows, number)
    assert np.isfinite(wanted).all()
    assert wanted.any()
    np.testing.assert_array_equal(of_file.widened(), wanted)
    np.testing.assert_array_equal(np.asarray(of_file), wanted)
    np.testing.assert_array_equal(of_file[jnp.array([3, 5])].widened(), wanted[[3, 5]])


def test_layers_of_several_kinds_are_one_stack():
    random, kinds = np.random.default_rng(2), ('Q4_K', 'Q6_K')
    stack = np.zeros((3, 8, blocks.row_bytes('Q6_K', 512)), np.uint8)
    wanted = []
    for rows, kind in zip(stack, ('Q6_K', 'Q4_K', 'Q6_K'), strict=True):
        b = random_blocks(random, kind, 8, 512)
        rows[:, : b.shape[1]] = b
        wanted.append(gguf.quants.dequantize(b, gguf.GGMLQuantizationType[kind]))
    mixed = Blocks(jnp.asarray(stack), jnp.array([1, 0, 1]), kinds, 512)
    np.testing.assert_array_equal(np.asarray(mixed), wanted)
    scanned = jax.lax.scan(lambda _, one: (0, one.widened()), 0, mixed)[1]
    np.testing.assert_array_equal(scanned, wanted)
    assert mixed.shape == (3, 8, 512)
    assert nbytes(mixed) == stack.nbytes + 12


@pytest.mark.parametrize('cap', [0.0, 2.0])
def test_scores_by_pieces_are_those_of_the_whole_output_layer(cap):
    """Of 700 rows the last of three pieces sees some again; also the gradient."""
    random = np.random.default_rng(3)
    rows = random_blocks(random, 'Q5_1', 700, 64, 0.1)
    w = Blocks(jnp.asarray(rows), None, ('Q5_1',), 64)
    x = jnp.asarray(random.normal(size=(4096, 64)), jnp.float32)
    targets = jnp.asarray(random.integers(0, 700, 4096))
    weights = jnp.asarray(random.normal(size=4096), jnp.float32)

    def loss(x, score, w):
        y = score(x, w, targets, cap)
        return (weights * y[:, 0]).sum(), y

    run = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)
    (_, y), g = run(x, scores.scores_of_blocks, w)
    (_, wanted), wanted_g = run(x, scores.next_token_scores, w.widened())
    np.testing.assert_allclose(y[:, 0], wanted[:, 0], rtol=1e-5)
    np.testing.assert_array_equal(y[:, 1], wanted[:, 1])
    assert 0 < y[:, 1].mean() < 1
    np.testing.assert_allclose(g, wanted_g, atol=1e-5 * np.abs(wanted_g).max())


@pytest.mark.parametrize('tied', [True, False])
def test_logits_are_those_of_the_widened_weights_to_the_bit(tmp_path, tied):
    """And the gradients of the adapters, which B = 0 would hide, within 1e-5."""
    file = write(tmp_path / 'a.gguf', MIXED, tied=tied, vocabulary=256)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 24)), jnp.int32)
    found = []
    for in_blocks in (True, False):
        task, variables = opened(file, in_blocks)
        for v in variables:
            trained = pretrained._flat(v['params'])
            for i, (path, a) in enumerate(sorted(trained.items())):
                if path[-1] == 'lora_b':
                    trained[path] = jax.random.normal(jax.random.key(i), a.shape) * 0.05
            v['params'] = pretrained.unflatten_dict(trained)
        is_low = lambda path: path[-1] in pretrained.LOW_RANK
        low = [part(is_low, v['params']) for v in variables]

        def forward(low, logits, task=task, variables=variables):
            x = tokens
            for stage, v, one in zip(task.stages, variables, low, strict=True):
                stage = stage.with_logits if logits else stage
                x = stage.apply({'params': whole(v['params'], one)}, x, tokens=tokens)
            return x

        y = jax.jit(functools.partial(forward, logits=True))(low)
        loss = lambda low: forward(low, False)[:, :-1, 0].mean()
        found.append((y, *jax.jit(jax.value_and_grad(loss))(low)))
    (y, loss, grads), (wanted, wanted_loss, wanted_grads) = found
    np.testing.assert_array_equal(y, wanted)
    assert abs(loss - wanted_loss) < 1e-5
    for a, b in zip(*map(jax.tree.leaves, (grads, wanted_grads)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


TRAINED = {'lr': 0.01, 'optimizer': 'adamw', 'steps': 3}


def adapters_after(workdir):
    return load_file(workdir / 'model' / 'adapter_model.safetensors')


@pytest.fixture(scope='module')
def run_of(tmp_path_factory):
    """Trains on a file once for each set of changes; gives folder and summary."""
    root = tmp_path_factory.mktemp('runs')
    file = write(root / 'a.gguf', MIXED, layers=2)

    @functools.cache
    def run(**changes):
        workdir = root / '_'.join(['run', *(f'{k}={v}' for k, v in changes.items())])
        config = small(file, **TRAINED, **changes)
        return workdir, loop.train_and_evaluate(config, workdir, quiet=True, draw=False)

    return run


@pytest.mark.parametrize(
    'changes',
    slow(
        [
            {'param_dtype': 'float32'}, {'runtime': 'mpmd'}, {'runtime': 'spmd'}, {'replicas': 2},
            {'runtime': 'mpmd', 'replicas': 2}, {'runtime': 'spmd', 'replicas': 2},
            {'num_microbatches': 2},
            {'runtime': 'mpmd', 'parallel.schedule': 'zb_h1', 'num_microbatches': 2},
        ],
        lambda c: 'param_dtype' not in c,
    ),
)  # fmt: skip
def test_runs_over_blocks_end_as_over_float32(run_of, changes):
    """Of any runtime, by replicas and micro-batches too: losses and adapters."""
    workdir, summary = run_of()
    other, wanted = run_of(**changes)
    np.testing.assert_allclose(
        summary['history']['train']['loss'], wanted['history']['train']['loss'], atol=1e-5
    )
    assert summary['parameters'] == wanted['parameters']
    one, two = adapters_after(workdir), adapters_after(other)
    assert one.keys() == two.keys()
    for name, a in one.items():
        np.testing.assert_allclose(a, two[name], atol=1e-4)  # AdamW divides by small gradients


def test_a_run_over_blocks_is_merged_read_and_generated_from(run_of, capsys):
    """Its folder names the file, whose float32 weights take the updates; or they are in it."""
    workdir, _ = run_of()
    tokens = np.arange(12)[None]
    exp, read = language_model.opened(workdir)
    wanted = logits(exp.task.stages, read(language_model.every), tokens)
    model = language_model.open_language_model(str(workdir / 'model'))
    close(logits(model.stages, model.variables, tokens), wanted)
    merged, _ = run_of(merge=True)
    model = language_model.open_language_model(str(merged / 'model'))
    stages: Any = model.stages
    assert not stages[0].config.stored
    close(logits(model.stages, model.variables, tokens), wanted)
    texts = []
    for place in (workdir, workdir / 'model'):
        generate.main([str(place), '--temperature=0', '--tokens=5', '--prompt', 'the'])
        texts.append(capsys.readouterr().out.splitlines()[-1])
    assert texts[0].endswith(texts[1].removeprefix('the'))
    assert len(texts[1]) > 3


@pytest.mark.slow
def test_two_processes_over_blocks_one_of_them_killed_end_as_if_not(tmp_path):
    file = write(tmp_path / 'a.gguf', MIXED, layers=2)
    changes = {'path': str(file), **SHORT, **TRAINED, 'train': 'lora(2)', 'param_dtype': 'file'}
    whole, cut = killed(tmp_path, {**changes, 'steps': 8})
    jax.tree.map(np.testing.assert_array_equal, *map(adapters_after, (whole, cut)))


@pytest.mark.parametrize('train', ['lora(2)', '*norm*'])
def test_the_memory_of_a_process_counts_blocks(tmp_path, train):
    """What is trained may be anything that is no block; a table of two stages counts once."""
    config = small(write(tmp_path / 'a.gguf', MIXED), stages=2, train=train, optimizer='adamw')
    trainer = loop.prepare(config, ProcessGroup())
    state, sizes = trainer.create(), footprint.footprint(trainer.exp, range(2))
    unique = lambda tree: sum({id(a): a.nbytes for a in jax.tree.leaves(tree)}.values())
    assert sizes['parameters'] == unique(state.model.params)
    assert sizes['optimizer'] == unique(state.opt_state)
    rows = dry_run.stages(trainer.exp).columns
    wide = dry_run.stages(
        loop.prepare(
            small(config.model.path, train=train, param_dtype='float32'), ProcessGroup()
        ).exp
    ).columns
    cells = lambda columns, i: [int(cell.replace(',', '')) for cell in columns[i].cells]
    assert cells(rows, 2) == cells(wide, 2)  # parameters
    assert sum(cells(rows, 3)) < sum(cells(wide, 3)) / 3  # bytes


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'train': 'no_table'}, r'keeps layers\..* in the blocks of its file, and config\.model\.'),
        ({'train': 'stage1.*q_proj.weight'}, r'q_proj.weight in the blocks .*take config\.model'),
        ({'train': 'all'}, r"model\.train='lora\(8\)', or config\.model\.param_dtype='bfloat16'"),
    ],
)
def test_a_parameter_in_blocks_is_not_trained(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        tasks.task_of(small(write(tmp_path / 'a.gguf', MIXED), **changes))


def test_blocks_that_are_none_or_not_known(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r'has no blocks of weights.*give a \.gguf file, or'):
        tasks.task_of(small(tiny(tmp_path / 'folder')))
    file = write(tmp_path / 'a.gguf', MIXED)
    monkeypatch.delitem(KINDS, 'Q5_1')
    known = r'a\.gguf: model\.layers\.\d\.mlp\.down_proj\.weight is in blocks Q5_1; F32, .* may'
    with pytest.raises(ValueError, match=known):
        tasks.task_of(small(file))


def test_a_stage_reads_its_own_blocks_alone(tmp_path):
    """Of a table that two stages have, one array; of the other stage's layers nothing."""
    file = write(tmp_path / 'a.gguf', MIXED)
    names = []
    found = checkpoint.open_checkpoint(file)
    theirs: Any = found.read_bytes
    found = found._replace(read_bytes=lambda name: names.append(name) or theirs(name))
    stages = pretrained.stages_of(found, 2, stored=pretrained.stored(found))
    pretrained.read(found, stages, 1)
    assert {name.split('.')[2] for name in names if '.layers.' in name} == {'2'}
    assert 'model.embed_tokens.weight' in names


def test_adapters_over_a_file_are_trained_on_its_blocks_unless_said_otherwise(
    tmp_path, monkeypatch
):
    """Not where all is trained, nor in float32, nor of a kind that is not known."""
    file = write(tmp_path / 'a.gguf', MIXED)

    def stored(**changes):
        task: Any = tasks.task_of(small(file, **{'param_dtype': '', **changes}))
        return dict(task.stages[0].config.stored)

    kinds = stored()
    assert len(kinds) == 8
    assert (kinds['embed_tokens'], kinds['down_proj']) == (('Q8_0',), ('Q4_0', 'Q5_1'))
    assert stored(train='no_table') == stored(param_dtype='float32') == {}
    monkeypatch.delitem(KINDS, 'Q5_0')
    assert stored() == {}
    wide = write(tmp_path / 'b.gguf', {}, default='F32')
    assert stored(path=str(wide)) == {}
