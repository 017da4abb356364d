"""Decoders of the Llama family against transformers', cut anywhere; their files; their cache."""

import functools
import json
import pathlib
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmp.models import checkpoint, decoder, families, pretrained, scores
from jaxmp.models.layers import next_token_nats
from tests.golden.make_decoders import CASES
from tests.laws import QUICK

GOLDEN = dict(np.load(pathlib.Path(__file__).parent / 'golden' / 'decoders.npz'))
TOKENS = GOLDEN['tokens']
jit = functools.partial(jax.jit, compiler_options=QUICK)


def tensors(case):
    head = f'{case}/weight/'
    return {k.removeprefix(head): v for k, v in GOLDEN.items() if k.startswith(head)}


def described(case):
    return json.loads(str(GOLDEN[f'{case}/config']))


def save(folder, case, dtype=np.float32):
    """A folder as transformers writes it."""
    folder.mkdir(exist_ok=True)
    arrays = {k: v.astype(dtype) for k, v in tensors(case).items()}
    save_file(arrays, folder / 'model.safetensors', metadata={'format': 'pt'})
    (folder / 'config.json').write_text(json.dumps(described(case)))
    return folder


def opened(folder, stages=1, cuts=None, **changes):
    """The checkpoint, the stages and their variables."""
    found = checkpoint.open_checkpoint(folder)
    config = families.config_of(found.described)
    config = config.__class__(**{**config.__dict__, **changes})
    parts = decoder.decoder(config, stages, cuts)
    pretrained.check(found, parts)
    key = jax.random.key(0)
    return found, parts, [pretrained.read(found, parts, s, key) for s in range(len(parts))]


def run(stages, variables, x):
    for stage, own in zip(stages, variables, strict=True):
        x = stage.with_logits.apply(own, x)
    return x


def logits(stages, variables, tokens=TOKENS):
    return np.asarray(jit(functools.partial(run, stages))(variables, jnp.asarray(tokens)))


def close(found, wanted):
    """Within 1e-4 of the largest logit."""
    assert np.abs(found - wanted).max() <= 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize('case', CASES)
def test_equals_transformers(tmp_path, case):
    _, stages, variables = opened(save(tmp_path, case), cuts=(1,))
    close(logits(stages, variables), GOLDEN[f'{case}/logits'])


@pytest.mark.parametrize('case', ['llama3', 'gemma3'])
def test_a_cache_gives_the_same_logits(tmp_path, case):
    """A prompt, then token by token; the second call begins where the first one ended."""
    _, stages, variables = opened(save(tmp_path, case), cuts=(2,))
    batch, length = TOKENS.shape
    filled = [
        {**own, 'cache': decoder.empty_cache(stage, batch, length + 3)}
        for stage, own in zip(stages, variables, strict=True)
    ]

    @jit
    def step(variables, x):
        following = []
        for stage, own in zip(stages, variables, strict=True):
            x, changed = stage.apply(own, x, mutable=['cache'])
            following.append({**own, **changed})
        return following, x

    found = []
    for tokens in (TOKENS[:, :6], *(TOKENS[:, i : i + 1] for i in range(6, length))):
        filled, y = step(filled, tokens)
        found.append(np.asarray(y))
    close(np.concatenate(found, 1), GOLDEN[f'{case}/logits'])


@pytest.mark.parametrize('case', ['llama', 'llama3'])
def test_what_is_written_is_read(tmp_path, case):
    """A file per stage; the table of a tied model once; config.json as it was."""
    found, stages, variables = opened(save(tmp_path / 'theirs', case), cuts=(1, 2))
    pretrained.write(tmp_path / 'ours', found.described, stages, variables)
    again, whole, joined = opened(tmp_path / 'ours')
    assert families.config_of(again.described) == stages[0].config == whole[0].config
    wanted = {n: a.astype(np.float32) for n, a in tensors(case).items()}
    assert again.shapes == {n: a.shape for n, a in wanted.items()}
    jax.tree.map(np.testing.assert_array_equal, {n: again.read(n) for n in wanted}, wanted)
    close(logits(whole, joined), GOLDEN[f'{case}/logits'])
    assert len(list((tmp_path / 'ours').glob('*.safetensors'))) == 3


def test_a_stage_reads_its_own_tensors_alone(tmp_path, monkeypatch):
    found, stages, _ = opened(save(tmp_path, 'llama3'), cuts=(1, 2))
    names = []
    read = lambda name: names.append(name) or found.read(name)
    pretrained.read(found._replace(read=read), stages, 1)
    assert names
    assert all(name.startswith('model.layers.1.') for name in names)


def test_the_files_dtype_is_kept(tmp_path):
    found, stages, _ = opened(save(tmp_path, 'qwen2', jnp.bfloat16), cuts=(1,))
    own = pretrained.read(found, stages, 1, dtype=lambda path: None)
    assert {a.dtype for a in jax.tree.leaves(own)} == {jnp.dtype(jnp.bfloat16)}
    pretrained.write(tmp_path / 'again', found.described, *_all(found, stages))
    assert json.loads((tmp_path / 'again' / 'config.json').read_text())['dtype'] == 'bfloat16'


def _all(found, stages):
    as_filed = lambda path: None
    return stages, [pretrained.read(found, stages, s, dtype=as_filed) for s in range(len(stages))]


def test_rematerialised_blocks_have_equal_gradients(tmp_path):
    folder = save(tmp_path, 'gemma2')

    def gradients(**changes):
        _, stages, variables = opened(folder, cuts=(1,), **changes)
        loss = lambda v: (run(stages, v, jnp.asarray(TOKENS)) ** 2).mean()
        return jit(jax.grad(loss))(variables)

    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        gradients(), gradients(remat=True),
    )  # fmt: skip


@pytest.mark.parametrize('cap', [0.0, 4.0])
def test_scores_by_token_are_those_of_logits(monkeypatch, cap):
    """Also where the rows are no multiple of a run; the gradients of both, or of the rows alone."""
    monkeypatch.setattr(scores, 'ROWS', 4)
    random = np.random.default_rng(0)
    x, w = (random.standard_normal(s).astype(np.float32) for s in ((2, 5, 6), (11, 6)))
    tokens = random.integers(0, 11, (2, 5)).astype(np.int32)
    weights = random.standard_normal((2, 5)).astype(np.float32)

    def whole(x, w):
        y = x @ w.T
        y = cap * jnp.tanh(y / cap) if cap else y
        true = jnp.take_along_axis(y, jnp.roll(tokens, -1, 1)[..., None], -1)[..., 0]
        return jax.nn.logsumexp(y, -1) - true, jnp.argmax(y, -1) == jnp.roll(tokens, -1, 1)

    def by_runs(x, w):
        targets = jnp.roll(tokens, -1, 1).reshape(-1)
        found = scores.next_token_scores(x.reshape(-1, 6), w, targets, cap).reshape(2, 5, 2)
        return found[..., 0], found[..., 1]

    for found, wanted in zip(jit(by_runs)(x, w), jit(whole)(x, w), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    gradients = [
        jit(jax.grad(lambda x, w, f=f: (f(x, w)[0] * weights).sum(), (0, 1)))(x, w)
        for f in (by_runs, whole)
    ]
    for found, wanted in zip(*gradients, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-6)


def test_a_stage_that_scores_tokens_never_has_all_logits():
    """Less memory than one array of logits, forward and backward; the loss is that of logits."""
    config = replace(families.config_of(described('gemma2')), layers=(), vocabulary=2000)
    by_token = decoder.Stage(config, (), embeds=True, scores=True, by_token=True)
    plain, random = by_token.with_logits, np.random.default_rng(0)
    tokens = jnp.asarray(random.integers(0, 2000, (2, 1024)), jnp.int32)
    table, scale = (random.standard_normal(s).astype(np.float32) for s in ((2000, 16), 16))
    own = {'params': {'embed_tokens': {'weight': table}, 'norm': {'weight': scale}}}

    def loss(params, way):
        y = way.apply(
            {'params': params}, tokens, **({'tokens': tokens} if way.reads_tokens else {})
        )
        return y[:, :-1, 0].mean() if way.by_token else next_token_nats(y, tokens).mean(-1).mean()

    sizes, values = [], []
    for way in (by_token, plain):
        run = jit(jax.value_and_grad(functools.partial(loss, way=way)))
        sizes.append(run.lower(own['params']).compile().memory_analysis().temp_size_in_bytes)
        values.append(run(own['params']))
    logits_size = 2 * 1024 * 2000 * 4
    assert sizes[0] < logits_size < sizes[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *values)
    with pytest.raises(ValueError, match='scores the tokens; give them as tokens='):
        by_token.apply(own, tokens)


# Files that are not what they should be.


def shard(folder):
    """The folder with two files and an index in place of one file."""
    arrays = load_file(folder / 'model.safetensors')
    (folder / 'model.safetensors').unlink()
    where = {}
    for number, names in enumerate((sorted(arrays)[::2], sorted(arrays)[1::2])):
        file = f'model-{number}.safetensors'
        save_file({n: arrays[n] for n in names}, folder / file)
        where |= dict.fromkeys(names, file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': where}))


def missing(folder):
    shard(folder)
    (folder / 'model-1.safetensors').unlink()


def cut_off(folder):
    shard(folder)
    file = folder / 'model-1.safetensors'
    file.write_bytes(file.read_bytes()[:-100])


def described_as(**changes):
    def change(folder):
        found = json.loads((folder / 'config.json').read_text())
        (folder / 'config.json').write_text(json.dumps(found | changes))

    return change


DAMAGES = {
    'a missing shard': (missing, FileNotFoundError, 'names model-1.safetensors, which is missing'),
    'a shard cut off': (cut_off, ValueError, r'model-1.* cut off: [\d,]+ bytes of [\d,]+ '),
    'no config': (lambda f: (f / 'config.json').unlink(), FileNotFoundError, 'no config.json in'),
    'a config that is no JSON': (
        lambda f: (f / 'config.json').write_text('{'), ValueError, 'is not JSON'),
    'another family': (
        described_as(model_type='bert'), ValueError, "model_type='bert'; known are gemma2, "),
    'a size of text': (
        described_as(hidden_size='16'), ValueError, "hidden_size='16', which is not a whole"),
    'another width': (
        described_as(hidden_size=32), ValueError, r'has shape \(37, 16\), and its .*\(37, 32\)'),
    'more blocks': (
        described_as(num_hidden_layers=4), ValueError, r'9 missing \(model.layers.3.input_lay'),
    'fewer blocks': (
        described_as(num_hidden_layers=2), ValueError, r'9 unknown \(model.layers.2.input_lay'),
    'biases': (described_as(attention_bias=True), ValueError, 'attention_bias=True; allowed is Fa'),
    'unknown positions': (
        described_as(rope_parameters={'rope_type': 'longrope'}), ValueError, "e='longrope'; allow"),
    'positions without a factor': (
        described_as(rope_parameters={'rope_type': 'linear'}), ValueError, 'factor=None, which is'),
    'an unknown activation': (
        described_as(hidden_act='relu'), ValueError, "hidden_act='relu'; allowed is 'silu' or"),
    'kinds of blocks': (
        described_as(layer_types=['full_attention']), ValueError, 'a list of 3, each full_att'),
    'key heads': (described_as(num_key_value_heads=3), ValueError, '4 heads, which 3 key/value'),
}  # fmt: skip


@pytest.mark.parametrize('case', DAMAGES)
def test_a_damaged_folder_is_refused(tmp_path, case):
    damage, kind, message = DAMAGES[case]
    damage(save(tmp_path, 'llama_linear'))
    with pytest.raises(kind, match=message) as caught:
        opened(tmp_path)
    assert '\n' not in str(caught.value)


def test_shards_are_read_as_one_file(tmp_path):
    shard(save(tmp_path, 'llama'))
    _, stages, variables = opened(tmp_path)
    close(logits(stages, variables), GOLDEN['llama/logits'])


@pytest.mark.parametrize(
    ('given', 'message'),
    [
        ({'stages': 4}, '4 stages of a decoder with 3 blocks; .* give 1 to 3'),
        ({'cuts': (2, 2)}, r'cuts=\(2, 2\) of a decoder with 3 blocks; cuts must ascend'),
        ({'cuts': (3,)}, r'cuts=\(3,\) of a decoder with 3 blocks; .* within 1 to 2'),
    ],
)
def test_cuts_that_do_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        decoder.decoder(families.config_of(described('llama')), **given)
