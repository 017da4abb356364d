"""Perplexity of a text by codec: of a checkpoint that was not trained here, and the command."""

import functools
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import parse
from jaxmp.boundary import init_feedback
from jaxmp.boundary.pipeline import pipeline
from jaxmp.data.tokenizer import byte_level
from jaxmp.models import gpt2, gpt2_file
from jaxmp.models.layers import next_token_nats
from jaxmp.training.evaluation import crosstest, language_model, perplexity
from jaxmp.training.generation import generate, sampling
from jaxmp.wire import Ctx
from tests.test_decoder import opened, save
from tests.test_pretrained import tiny


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """A random decoder in three stages."""
    folder = save(tmp_path_factory.mktemp('llama3'), 'llama3')
    _, stages, variables = opened(folder, 3)
    return language_model.LanguageModel('random', stages, tuple(variables), byte_level())


BLOCKS = np.random.default_rng(0).integers(0, 37, (4, 8)).astype(np.int32)


def test_scores_are_those_of_the_whole_pipeline(model):
    """Each batch crosses both boundaries; the differences are paired by block."""
    codec = parse('block(2)')
    found = perplexity.scores(model, BLOCKS, {'raw': parse('raw'), 'block(2)': codec}, 2)
    nats = {}
    for name, channel in (('raw', None), ('block(2)', codec)):
        pipe = pipeline(model.stages, channel or parse('raw'), parse('raw'))
        run = jax.jit(lambda v, f, x, pipe=pipe: pipe.apply(v, f, x, Ctx(), train=False)[0])
        rows = []
        for i in (0, 2):
            x = jnp.asarray(BLOCKS[i : i + 2])
            feedback = init_feedback(pipe.boundaries, pipe.likes(model.variables, x, train=False))
            y = run(model.variables, channel and feedback, x)
            rows.append(np.asarray(next_token_nats(y, x)).mean(1))
        nats[name] = np.concatenate(rows)
        np.testing.assert_allclose(found[name].nats, nats[name], rtol=1e-4)
    lost = nats['block(2)'] - nats['raw']
    assert abs(lost.mean()) > 1e-3
    score = found['block(2)']
    assert score.lost.value == pytest.approx(lost.mean(), rel=0.01)
    assert score.lost.error == pytest.approx(lost.std(ddof=1) / 2, rel=0.01)
    assert score.perplexity == pytest.approx(np.exp(nats['block(2)'].mean()), rel=1e-3)
    assert (found['raw'].bits, found['raw'].lost.value) == (32, 0)
    assert score.bits == pytest.approx(2.6, abs=0.1)  # with scales of blocks


def test_what_stands_before_the_first_boundary_is_computed_once(model, monkeypatch):
    """For all codecs; and a rule's memory passes from batch to batch."""
    calls = []
    start = perplexity.before_first
    counted = lambda model: lambda tokens: calls.append(len(tokens)) or start(model)(tokens)
    monkeypatch.setattr(perplexity, 'before_first', counted)
    channels = {text: parse(text) for text in ('raw', 'fp16', 'ef21(uniform(8))')}
    found = perplexity.scores(model, np.tile(BLOCKS[:1], (3, 1)), channels, 1)
    assert calls == [1, 1, 1]
    nats = found['ef21(uniform(8))'].nats
    assert abs(nats[2] - found['raw'].nats[2]) < abs(nats[0] - found['raw'].nats[0])


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    return tiny(tmp_path_factory.mktemp('tiny'), max_position_embeddings=64)


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp('text') / 'some.txt'
    file.write_text('The Queen of Hearts, she made some tarts.')
    return file


def test_blocks_are_whole_batches_and_begin_as_a_text(model, text):
    blocks = lambda m, *rest: perplexity.blocks_of(m, text, *rest)
    assert blocks(model, 8, 1000, 2).shape == (4, 8)
    assert blocks(model, 8, 17, 4).shape == (2, 8)
    begins = model._replace(tokenizer=byte_level()._replace(begin=(1,)))
    assert blocks(begins, 8, 1000, 1)[:2].tolist() == [[1, *b'The Que'], [1, *b'en of H']]
    with pytest.raises(ValueError, match='--block=8 is more than the 7 positions of '):
        blocks(model._replace(positions=7), 8, 1000, 1)


def test_the_command_tests_a_checkpoint_with_codecs(folder, text, tmp_path, capsys, monkeypatch):
    """One of them from a file, as text `FILE:CODEC`."""
    monkeypatch.chdir(tmp_path)
    Path('mine.py').write_text(
        'import jaxmp\n\ndef mine() -> jaxmp.Codec:\n    return jaxmp.parse("fp16").codec\n'
    )
    out = tmp_path / 'lost.png'
    crosstest.main([
        str(folder), f'--text={text}', '--tokenizer=bytes', '--block=8', '--codec=uniform(2)',
        '--codec', 'fp16', 'nvfp4', 'mine.py:mine()', f'--out={out}',
    ])  # fmt: skip
    shown = capsys.readouterr().out
    saved = json.loads(out.with_suffix('.json').read_text())
    scores = saved['scores'][folder.name]
    assert [*scores] == ['raw', 'uniform(2)', 'fp16', 'nvfp4', 'mine.py:mine()']
    assert scores['mine.py:mine()'] == scores['fp16']
    assert saved['models'][folder.name] == {'stages': 2, 'blocks': 4}
    assert all(f'{s["nats_lost"]:+.4f}' in shown for s in scores.values())
    assert scores['uniform(2)']['bits'] == pytest.approx(2, abs=0.2)
    assert 200 < scores['raw']['perplexity'] < 300
    assert saved['hardware']
    assert out.stat().st_size > 5000
    assert out.with_suffix('.svg').is_file()


def test_the_command_predicts_what_codecs_cost_behind_every_block(folder, text, tmp_path, capsys):
    """Without a codec nothing is measured; with one both stand beside each other."""
    out = tmp_path / 'predicted.png'
    words = [str(folder), f'--text={text}', '--tokenizer=bytes', '--block=8', '--predict=32']
    crosstest.main([*words, f'--out={out}'])
    shown = capsys.readouterr().out
    saved = json.loads(out.with_suffix('.json').read_text())
    scores = saved['scores'][folder.name]
    assert [*scores] == [*perplexity.CANDIDATES]
    assert saved['models'][folder.name]['stages'] == 3  # a block each
    for score in scores.values():
        assert {'kl', 'nats_lost', 'perplexity'}.isdisjoint(score)
        assert sum(score['predicted_by_cut']) == pytest.approx(score['predicted_kl'])
        assert score['percent'] == pytest.approx(100 * np.expm1(score['predicted_kl']))
    assert 'kl predicted' in shown
    assert 'nats lost' not in shown
    within = min(s['bits'] for s in scores.values() if s['percent'] <= 1)
    assert re.search(rf'3 stages\. Within 1 % of perplexity: .*, {within:.2f} bits, is pred', shown)
    crosstest.main([*words, '--cuts=1', '--codec=block(2)', f'--out={out}'])
    scores = json.loads(out.with_suffix('.json').read_text())['scores'][folder.name]
    both = scores['block(2)']
    assert both['predicted_kl'] == pytest.approx(both['kl'], rel=0.5)
    assert 'kl' not in scores['nvfp4']


png = Path(__file__).parents[1] / 'docs' / 'slow_link.png'
MISTAKES = {
    'one stage': (['--stages=1'], 'in one stage has no boundary; give --stages=2 or more'),
    'too many stages': (['--stages=9'], '9 stages of a decoder with 3 blocks'),
    'cuts': (['--cuts=5'], r'cuts=\(5,\) of a decoder with 3 blocks'),
    'no codec': (['--block=8', '--codec=nothing'], "unknown word 'nothing'"),
    'a short text': (['--block=32'], 'make 1 blocks, and a standard error takes two; give'),
    'a block of one': (['--block=1'], 'give blocks of 2 tokens or more'),
    'BatchNorm': (['--batchnorm'], '--batchnorm and --moments are of a test split; leave --text'),
    'no file': (['--text=nowhere.txt'], '--text=nowhere.txt is not there, or no file; give a text'),
    'no text': ([f'--text={png}'], 'slow_link.png, line 3 is not UTF-8 text .a NUL byte'),
    'no folder': (['--out=/proc/no/a.png'], '--out: cannot write into /proc/no .*; give another f'),
    'no model': (['no.gguf'], 'there is no no.gguf; give a folder with config.json and weights'),
    'a long block': (['--block=99'], '--block=99 is more than the 64 positions of tiny'),
}  # fmt: skip


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_told_in_a_line_before_weights_are_read(folder, text, case, monkeypatch):
    fail = lambda *given, **more: pytest.fail('reads weights')
    monkeypatch.setattr(language_model.pretrained, 'read', fail)
    words, message = MISTAKES[case]
    models = [str(folder), *(word for word in words if not word.startswith('--'))]
    words = [word for word in words if word.startswith('--')]
    with pytest.raises(SystemExit, match=f'^jaxmp evaluate: .*{message}') as caught:
        crosstest.main([*models, f'--text={text}', '--tokenizer=bytes', *words])
    assert '\n' not in str(caught.value)


def test_a_checkpoint_without_a_text(folder):
    with pytest.raises(
        SystemExit, match=r'is not the workdir of a run: it has a checkpoint; .* --text=FILE'
    ):
        crosstest.main([str(folder)])
    with pytest.raises(
        SystemExit, match='--tokenizer and --predict are of a text; give --text=FILE'
    ):
        crosstest.main([str(folder), '--stages=2'])


@pytest.mark.slow
def test_a_gpt2_is_tested_too_and_has_no_cache(tmp_path):
    stages = gpt2.gpt2(gpt2.Config(256, 8, width=8, blocks=2, heads=2), 1)
    own = jax.jit(stages[0].init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    gpt2_file.write(str(tmp_path), stages, [own])
    model = language_model.open_language_model(str(tmp_path), 2, tokenizer='bytes')
    channels = {'raw': parse('raw')}
    found = perplexity.scores(model, BLOCKS, channels, 4)['raw'].nats
    y = jax.jit(stages[0].apply)(own, jnp.asarray(BLOCKS))
    np.testing.assert_allclose(found, next_token_nats(y, BLOCKS).mean(1), rtol=1e-4)


@pytest.mark.slow
def test_a_gpt2_continues_prompts_without_a_cache(tmp_path, capsys):
    """By the likeliest token of the text so far, computed anew."""
    stages = gpt2.gpt2(gpt2.Config(256, 12, width=8, blocks=2, heads=2), 1)
    own = jax.jit(stages[0].init)(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    own = jax.tree.map(lambda a: 8 * a, own)  # so that tokens vary
    gpt2_file.write(str(tmp_path), stages, [own])
    words = [str(tmp_path), '--tokenizer=bytes', '--temperature=0']
    generate.main([*words, '--tokens=5', '--prompt', 'ab', 'xyz'])
    model = language_model.open_language_model(str(tmp_path), tokenizer='bytes')
    rows = [list(b'ab'), list(b'xyz')]
    greedy = functools.partial(generate.choose, temperature=0)
    for i, token in sampling.continuations(sampling.reader_of(model), rows, 5, greedy):
        rows[i] += [] if token is None else [token]
    for row, start in zip(rows, (2, 3), strict=True):
        likeliest = stages[0].apply(own, jnp.asarray([row[:-1]]))[0].argmax(-1)
        np.testing.assert_array_equal(row[start:], likeliest[start - 1 :])
        assert len(set(row[start:])) > 1
    written = [bytes(row).decode(errors='replace') + '\n' for row in rows]
    assert capsys.readouterr().out == ''.join(written)
    with pytest.raises(SystemExit, match='and --tokens=10 are more than the 12 positions of'):
        generate.main([*words, '--tokens=10', '--prompt', 'xyz'])
