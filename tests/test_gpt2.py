"""GPT-2 against torch's, cut anywhere; its tied table; its weights in files."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxmp
from jaxmp.models import gpt2, gpt2_file, layers, pretrained, tied
from jaxmp.models.checkpoint import open_checkpoint
from tests.base import slow
from tests.laws import QUICK

GOLDEN = dict(np.load(pathlib.Path(__file__).parent / 'golden' / 'gpt2.npz'))
CONFIG = gpt2.Config(vocabulary=67, positions=16, width=24, blocks=4, heads=3)
TOKENS = GOLDEN['tokens']
STAGES = (1, 2, 3, 4)
FILE = 'model.safetensors'
SMALL = gpt2.Config(vocabulary=67, positions=300, width=24, blocks=2, heads=3)
jit = functools.partial(jax.jit, compiler_options=QUICK)


def part(kind):
    return {k.removeprefix(f'{kind}/'): v for k, v in GOLDEN.items() if k.startswith(f'{kind}/')}


def describe(folder, **changes):
    sizes = {'vocab_size': 67, 'n_positions': 16, 'n_embd': 24, 'n_layer': 4, 'n_head': 3}
    text = json.dumps({'model_type': 'gpt2', **sizes, **changes})
    (folder / 'config.json').write_text(text)


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    """The reference model's weights as transformers saves them."""
    folder = tmp_path_factory.mktemp('weights')
    tensors = {f'transformer.{k}': v.astype(np.float32) for k, v in part('weight').items()}
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    describe(folder)
    return folder


def config_in(folder):
    return pretrained.config_of(open_checkpoint(folder))


def read(folder, stages):
    checkpoint = open_checkpoint(folder)
    pretrained.check(checkpoint, stages)
    return [pretrained.read(checkpoint, stages, s) for s in range(len(stages))]


def params_of(variables, dtype=jnp.float32):
    return tuple(jax.tree.map(lambda a: jnp.asarray(a, dtype), v['params']) for v in variables)


def run(stages, params, tokens, **kwargs):
    x = jnp.asarray(tokens)
    for stage, own in zip(stages, params, strict=True):
        x = stage.apply({'params': own}, x, **kwargs)
    return x


def compiled(stages, **kwargs):
    return jit(lambda params, tokens, rngs=None: run(stages, params, tokens, rngs=rngs, **kwargs))


def score(stages, params, tokens):
    logits = run(stages, params, tokens)
    return layers.next_token_nats(logits, jnp.asarray(tokens)).mean(-1).mean(), logits


def as_file(folder, stages, params):
    """A tree of all stages, by the names of the file."""
    gpt2_file.write(folder, stages, [{'params': p} for p in params])
    found = load_file(folder / 'model.safetensors')
    return {k.removeprefix('transformer.'): v for k, v in found.items()}


def difference(found, wanted):
    """Norm of the difference of two dicts of arrays, over the norm of the second."""
    assert found.keys() == wanted.keys()
    norm = lambda arrays: np.sqrt(sum(np.square(a.astype(np.float64)).sum() for a in arrays))
    return norm(found[k] - v for k, v in wanted.items()) / norm(wanted.values())


@pytest.mark.parametrize(
    ('n', 'double'),
    slow(
        [*((n, False) for n in STAGES), (1, True), (4, True)],
        lambda case: not case[1] and case[0] < 4,  # between the others
    ),
)
def test_equals_torch(directory, tmp_path, n, double):
    with jax.enable_x64(double):
        stages = gpt2.gpt2(config_in(directory), n)
        dtype = jnp.float64 if double else jnp.float32
        params = params_of(read(directory, stages), dtype)
        f = jit(jax.value_and_grad(lambda p: score(stages, p, TOKENS), has_aux=True))
        (loss, logits), grads = f(params)
        np.testing.assert_allclose(logits, GOLDEN['logits'], atol=1e-5)
        np.testing.assert_allclose(loss, GOLDEN['loss'], atol=1e-12 if double else 1e-6)
        found = as_file(tmp_path, stages, tied.WTE.add(grads))
        assert difference(found, part('grad')) < 1e-6
        for name, wanted in part('grad').items():
            bound = (1e-6 if double else 4e-6) * np.abs(wanted).max()
            np.testing.assert_allclose(found[name], wanted, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize('length', [5, 300])
def test_attention_is_the_librarys(length):
    qkv = jax.random.normal(jax.random.key(length), (3, 2, 3, length, 8))
    swap = lambda a: a.swapaxes(1, 2)
    library = lambda *qkv: swap(jax.nn.dot_product_attention(*map(swap, qkv), is_causal=True))
    found = []
    for f in (layers.attention, library):
        both = lambda qkv, f=f: (jnp.sum(f(*qkv) ** 2), f(*qkv))
        (_, y), g = jit(jax.value_and_grad(both, has_aux=True))(qkv)
        found.append((y, g))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *found)


def made(config=SMALL, stages=1, seed=0, dtype=jnp.float32):
    """Stages and their shared, perturbed parameters."""
    built = gpt2.gpt2(config, stages)
    whole = gpt2.gpt2(config, 1)[0]
    x = jnp.zeros((1, 2), jnp.int32)
    params = jit(whole.init)({'params': jax.random.key(seed)}, x)['params']
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    noise = lambda k, a: (a + 0.1 * jax.random.normal(k, a.shape)).astype(dtype)
    params = jax.tree.unflatten(tree, [noise(k, a) for k, a in zip(keys, leaves, strict=True)])
    return built, deal(built, params)


def deal(stages, whole):
    """Parameters of a single stage as those of several."""
    found, start = [], 0
    for stage in stages:
        own = {f'h_{i}': whole[f'h_{start + i}'] for i in range(stage.blocks)}
        own |= {k: whole[k] for k in ('wte', 'wpe') if stage.embeds}
        own |= {k: whole[k] for k in ('wte', 'ln_f') if stage.scores}
        found.append(own)
        start += stage.blocks
    return tuple(found)


def test_later_tokens_are_not_seen():
    stages, params = made()
    f = compiled(stages)
    tokens = jax.random.randint(jax.random.key(2), (1, 300), 0, 67)
    seen = f(params, tokens)
    for at in (3, 130, 299):
        other = f(params, tokens.at[0, at].add(1) % 67)
        np.testing.assert_allclose(other[:, :at], seen[:, :at], atol=1e-6)
        assert np.abs(other[:, at:] - seen[:, at:]).max() > 1e-2


def test_half_precision():
    stages, params = made(stages=2)
    half = gpt2.gpt2(dataclasses.replace(SMALL, dtype=jnp.bfloat16), 2)
    f = jit(jax.value_and_grad(lambda p: score(half, p, TOKENS), has_aux=True))
    (_, near), grads = f(params)
    exact = compiled(stages)(params, TOKENS)
    assert near.dtype == jnp.float32
    assert 1e-4 < np.abs(near - exact).max() < 0.05 * np.abs(exact).max()
    sent = jax.eval_shape(lambda p: half[0].apply({'params': p}, TOKENS), params[0])
    assert sent.dtype == jnp.float32
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(grads))


DROPPING = dataclasses.replace(SMALL, dropout=(0.1, 0.2, 0.3))


def test_dropout_only_in_training():
    stages, params = made(DROPPING, 2)
    f = compiled(stages, train=True)
    plain = compiled(stages)(params, TOKENS)
    without = compiled(gpt2.gpt2(SMALL, 2), train=True)(params, TOKENS)
    np.testing.assert_array_equal(plain, without)
    a, b, c = (f(params, TOKENS, {'dropout': jax.random.key(i)}) for i in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert np.abs(a - c).max() > 0.1
    assert np.abs(a - plain).max() > 0.1


@pytest.mark.parametrize('shape', [(101, 103), (64, 8)])
def test_dropout_keeps_the_mean(shape):
    x = jnp.full(shape, 2.0)
    y = layers.Dropout(0.25).apply({}, x, True, rngs={'dropout': jax.random.key(0)})
    kept = np.asarray(y) > 0
    np.testing.assert_allclose(np.asarray(y)[kept], 2 / 0.75, rtol=1e-6)
    assert abs(kept.mean() - 0.75) < 4 * np.sqrt(0.25 * 0.75 / x.size)


def test_recomputing_changes_no_number():
    rngs = {'dropout': jax.random.key(3)}
    grads = []
    for remat in (False, True):
        stages, params = made(dataclasses.replace(DROPPING, remat=remat), 2)

        def loss(p, stages=stages):
            logits = run(stages, p, TOKENS, train=True, rngs=rngs)
            return layers.next_token_nats(logits, TOKENS).mean(-1).mean()

        grads.append(jit(jax.grad(loss))(params))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, *grads)


def test_recomputing_sends_nothing_twice(monkeypatch):
    sent, send = [], jaxmp.Boundary.send

    def counted(self, way, x, tx, ctx):
        jax.debug.callback(lambda: sent.append(1))
        return send(self, way, x, tx, ctx)

    monkeypatch.setattr(jaxmp.Boundary, 'send', counted)
    stages = gpt2.gpt2(dataclasses.replace(SMALL, remat=True), 2)
    model = jaxmp.pipeline(stages, jaxmp.parse('top_k(0.1)'), jaxmp.parse('same_support()'))
    variables, feedback = model.init(jax.random.key(0), jnp.asarray(TOKENS))

    def loss(params, feedback):
        variables = tuple({'params': p} for p in params)
        logits, _, feedback = model.apply(variables, feedback, jnp.asarray(TOKENS))
        return layers.next_token_nats(logits, jnp.asarray(TOKENS)).mean(-1).mean(), (feedback, None)

    params = tuple(v['params'] for v in variables)
    jax.block_until_ready(jit(jaxmp.value_and_grad(loss))(params, feedback))
    jax.effects_barrier()
    assert len(sent) == 2


def clipped_sgd(grads, params):
    """Plain SGD after clipping by the norm that counts the table once."""
    scale = jnp.minimum(1.0, 0.5 / tied.WTE.global_norm(grads))
    return jax.tree.map(lambda p, g: p - 0.3 * scale * g, params, grads)


def trained(stages, params):
    """Parameters after three clipped steps."""
    loss = lambda p: score(stages, p, TOKENS)[0]
    step = jit(lambda p: clipped_sgd(tied.WTE.add(jax.grad(loss)(p)), p))
    return step(step(step(params)))


@functools.cache
def trained_whole():
    stages, params = made(CONFIG, 1, dtype=jnp.float64)
    return trained(stages, params)[0]


@pytest.mark.parametrize('n', slow(STAGES[1:], lambda n: n > 2))
def test_tied_stages_learn_as_one(n):
    with jax.enable_x64(True):
        stages, params = made(CONFIG, n, dtype=jnp.float64)
        params = trained(stages, params)
        close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)
        jax.tree.map(close, params, deal(stages, trained_whole()))
        close(params[0]['wte'], params[-1]['wte'])


def test_tied_tables_stay_equal_under_adam():
    """By `tie` alone to rounding, since two equal updates may be fused in two ways."""
    stages, params = made(stages=2)
    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    state = optimizer.init(params)

    @jit
    def step(params, state):
        grads = tied.WTE.add(jax.grad(lambda p: score(stages, p, TOKENS)[0])(params))
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    alone, alone_state = params, state
    for _ in range(5):
        alone, alone_state = step(alone, alone_state)
        params, state = step(params, state)
        params = tied.WTE.share(params)
    np.testing.assert_allclose(alone[0]['wte'], alone[1]['wte'], rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(params[0]['wte'], params[1]['wte'])
    moments = state[0].mu
    np.testing.assert_allclose(moments[0]['wte'], moments[1]['wte'], rtol=1e-4, atol=1e-6)


def test_share_and_table():
    stages = gpt2.gpt2(SMALL, 2)
    model = jaxmp.pipeline(stages, jaxmp.parse('raw'), jaxmp.parse('raw'))
    key = jax.random.key(7)
    variables, _ = model.init(key, jnp.asarray(TOKENS))
    params = tuple(v['params'] for v in variables)
    assert np.abs(params[0]['wte'] - params[1]['wte']).max() > 0
    shared = tied.WTE.share(params)
    np.testing.assert_array_equal(shared[1]['wte'], params[0]['wte'])
    own = jax.jit(lambda k: tied.table(stages[0], jax.random.fold_in(k, 0)))(key)
    np.testing.assert_array_equal(own, params[0]['wte'])


def test_embedding_and_output_layer_as_stages_without_blocks():
    first, last = gpt2.Stage(SMALL, 0, embeds=True), gpt2.Stage(SMALL, 0, scores=True)
    cut, (stages, (whole,)) = (first, *(gpt2.Stage(SMALL, 1),) * 2, last), made()
    parts = deal(cut, whole)
    assert jax.tree.structure(parts[1]) == jax.tree.structure(parts[2])
    logits = compiled(cut)(parts, TOKENS)
    np.testing.assert_allclose(logits, compiled(stages)([whole], TOKENS), atol=1e-6)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda: gpt2.gpt2(CONFIG, 5), '5 stages of a GPT-2 with 4 blocks; .*give 1 to 4'),
        (lambda: gpt2.gpt2(CONFIG, 0), '0 stages'),
        (lambda: gpt2.gpt2(CONFIG, cuts=(2, 2)), r'cuts=\(2, 2\) .*ascend strictly within 1 to 3'),
        (lambda: gpt2.gpt2(CONFIG, cuts=(4,)), 'ascend strictly'),
        (lambda: gpt2.Config(width=100), '12 heads do not divide width 100; .*a multiple of 12'),
        (lambda: gpt2.Config(blocks=0), 'blocks=0; give 1 or more'),
        (lambda: gpt2.Config(dropout=(0.1, 1.0, 0.1)), r'three rates in \[0, 1\)'),
        (
            lambda: gpt2.gpt2(CONFIG)[0].init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32)),
            '17 tokens is too long for a GPT-2 with 16 positions; cut the text .* at most 16',
        ),
        (
            lambda: layers.next_token_nats(jnp.zeros((1, 1, 3)), jnp.zeros((1, 1), int)),
            'one token has nothing to predict',
        ),
        (lambda: tied.WTE.add([{}, {'wte': 1}]), 'missing in 2 stages; give the params'),
    ],
)
def test_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize('n', slow([1, 3], [1].__contains__))
def test_an_output_layer_with_a_table_of_its_own(directory, tmp_path, n):
    """Begun as the one that embeds: the same logits, and both gradients are one tied one's."""
    tensors = load_file(directory / 'model.safetensors')
    save_file(
        tensors | {'lm_head.weight': tensors['transformer.wte.weight'].copy()}, tmp_path / FILE
    )
    describe(tmp_path, tie_word_embeddings=False)
    config = config_in(tmp_path)
    assert config == dataclasses.replace(config_in(directory), tied=False)
    stages = gpt2.gpt2(config, n)
    params = params_of(read(tmp_path, stages))
    assert ['wte' in p for p in params] == [s.embeds for s in stages]
    (loss, logits), grads = jit(
        jax.value_and_grad(lambda p: score(stages, p, TOKENS), has_aux=True)
    )(params)
    np.testing.assert_allclose(logits, GOLDEN['logits'], atol=1e-5)
    np.testing.assert_allclose(loss, GOLDEN['loss'], atol=1e-6)
    found = as_file(tmp_path / 'again', stages, grads)
    head = found.pop('lm_head.weight')
    assert np.any(head != found['wte.weight'])
    found['wte.weight'] += head
    assert difference(found, part('grad')) < 1e-6
    assert config_in(tmp_path / 'again') == config


@pytest.mark.parametrize('n', STAGES)
def test_weights_go_out_and_in(directory, tmp_path, n):
    stages = gpt2.gpt2(config_in(directory), n)
    variables = read(directory, stages)
    gpt2_file.write(tmp_path, stages, variables)
    again = read(tmp_path, gpt2.gpt2(config_in(tmp_path), 3))
    assert config_in(tmp_path) == config_in(directory)
    before, after = (load_file(d / 'model.safetensors') for d in (directory, tmp_path))
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])
    assert len(again) == 3


def as_parts(folder, tensors):
    names = sorted(tensors)
    where = {name: f'model-0000{1 + i % 2}-of-00002.safetensors' for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({n: tensors[n] for n in names if where[n] == file}, folder / file)
    text = json.dumps({'metadata': {}, 'weight_map': where})
    (folder / 'model.safetensors.index.json').write_text(text)


def as_one(folder, tensors):
    save_file(tensors, folder / 'model.safetensors')


def short(tensors):
    return {k.removeprefix('transformer.'): v for k, v in tensors.items()}


FORMS = {
    'parts': (as_parts, lambda t: t),
    'published': (as_one, lambda t: {**short(t), 'h.0.attn.bias': np.ones((1, 1, 16, 16))}),
    'with head': (as_one, lambda t: {**t, 'lm_head.weight': t['transformer.wte.weight'].copy()}),
    'half': (as_one, lambda t: {k: v.astype(np.float16) for k, v in t.items()}),
    'bfloat16': (as_one, lambda t: {k: v.astype(jnp.bfloat16) for k, v in t.items()}),
}


@pytest.mark.parametrize('form', FORMS)
def test_forms_of_weights(directory, tmp_path, form):
    put, change = FORMS[form]
    put(tmp_path, change(load_file(directory / 'model.safetensors')))
    describe(tmp_path)
    stages = gpt2.gpt2(config_in(tmp_path), 2)
    found = params_of(read(tmp_path, stages))
    wanted = params_of(read(directory, stages))
    bound = 1e-2 if form == 'bfloat16' else 0
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=bound)
    jax.tree.map(close, found, wanted)


def cut(folder):
    file = folder / 'model.safetensors'
    file.write_bytes(file.read_bytes()[:-100])


def replace(**changes):
    """Puts tensors into the file, or takes them out (None)."""

    def damage(folder):
        tensors = load_file(folder / 'model.safetensors') | changes
        save_file({k: v for k, v in tensors.items() if v is not None}, folder / 'model.safetensors')

    return damage


def index(text):
    def damage(folder):
        (folder / 'model.safetensors').unlink()
        (folder / 'model.safetensors.index.json').write_text(text)

    return damage


def foreign(folder):
    save_file({'bert.embeddings.weight': np.ones(3)}, folder / 'model.safetensors')


def pickled(folder):
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')


DAMAGES = {
    'no config': (
        lambda d: (d / 'config.json').unlink(),
        FileNotFoundError,
        'no config.json in .*give a folder',
    ),
    'no weights': (
        lambda d: (d / 'model.safetensors').unlink(),
        FileNotFoundError,
        'no weights in .*index.json',
    ),
    'a pickle': (pickled, FileNotFoundError, 'only pytorch_model.bin; pickles are not read'),
    'truncated': (
        cut,
        ValueError,
        r'damaged or cut off: [\d,]+ bytes of .*download',
    ),
    'empty': (
        lambda d: (d / 'model.safetensors').write_bytes(b''),
        ValueError,
        'cut off: 0 bytes',
    ),
    'another model': (foreign, ValueError, r'52 missing .*1 unknown \(bert.embeddings.weight\)'),
    'a block too few': (
        replace(**{'transformer.h.3.ln_1.bias': None}),
        ValueError,
        r'1 missing \(h.3.ln_1.bias\), 0 un',
    ),
    'another vocabulary': (
        replace(**{'transformer.wte.weight': np.ones((99, 24), np.float32)}),
        ValueError,
        r'wte.weight has shape \(99, 24\), and its config.json says \(67, 24\)',
    ),
    'another head': (
        replace(**{'lm_head.weight': np.ones((67, 24), np.float32)}),
        ValueError,
        'lm_head.weight differs from wte.weight',
    ),
    'no head': (
        lambda d: describe(d, tie_word_embeddings=False),
        ValueError,
        'has no lm_head.weight, and by its config.json the output layer has a table of its own',
    ),
    'config of text': (
        lambda d: (d / 'config.json').write_text('<html>'),
        ValueError,
        'config.json is not JSON',
    ),
    'config of BERT': (
        lambda d: describe(d, model_type='bert'),
        ValueError,
        "model_type='bert'; known are gemma2, .* and gpt2",
    ),
    'another activation': (
        lambda d: describe(d, activation_function='relu'),
        ValueError,
        "='relu'; allowed is 'gelu_new'",
    ),
    'index of text': (index('[]'), ValueError, 'holds a list, not an object'),
    'index without map': (index('{}'), ValueError, 'has no weight_map'),
    'index of nothing': (
        index('{"weight_map": {"wte.weight": "a.safetensors"}}'),
        FileNotFoundError,
        'names a.safetensors, which is missing',
    ),
    'index that leaves': (
        index('{"weight_map": {"wte.weight": "../a.safetensors"}}'),
        FileNotFoundError,
        'names ../a.safetensors',
    ),
}


@pytest.mark.parametrize('damage', DAMAGES)
def test_damaged_weights(directory, tmp_path, damage):
    for file in directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    do, error, message = DAMAGES[damage]
    do(tmp_path)
    with pytest.raises(error, match=message):
        pretrained.stages_of(open_checkpoint(tmp_path), 2)


def test_tables_that_differ_are_not_written(tmp_path):
    stages, params = made(stages=2)
    params[1]['wte'] = params[1]['wte'] + 1
    with pytest.raises(ValueError, match='different tables wte'):
        gpt2_file.write(tmp_path, stages, [{'params': p} for p in params])


@pytest.mark.slow
def test_live_against_torch(tmp_path):
    """Both directions through files, with a model of other sizes than the committed one."""
    torch = pytest.importorskip('torch')
    transformers = pytest.importorskip('transformers')
    config = gpt2.Config(131, 200, 32, 3, 4, inner=48)
    stages, params = made(config, 3, seed=5)
    gpt2_file.write(tmp_path / 'ours', stages, [{'params': p} for p in params])
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / 'ours').eval()
    tokens = np.asarray(jax.random.randint(jax.random.key(0), (2, 150), 0, 131), np.int64)
    out = theirs(input_ids=torch.tensor(tokens), labels=torch.tensor(tokens))
    loss, logits = score(stages, params, tokens)
    np.testing.assert_allclose(logits, out.logits.detach().numpy(), atol=1e-5)
    np.testing.assert_allclose(loss, out.loss.item(), atol=1e-6)
    theirs.save_pretrained(tmp_path / 'theirs')
    again = read(tmp_path / 'theirs', stages)
    jax.tree.map(np.testing.assert_array_equal, params_of(again), params)
