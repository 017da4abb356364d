"""Generation: a cache, a window and whole sequences give the same tokens; the command's errors."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import boundary, parse
from jaxmp.boundary import init_feedback
from jaxmp.boundary.pipeline import Pipeline
from jaxmp.data.chat import Template
from jaxmp.data.tokenizer import byte_level
from jaxmp.models import decoder, gpt2
from jaxmp.training.evaluation import language_model
from jaxmp.training.generation import generate, sampling
from jaxmp.wire import Ctx
from tests.laws import QUICK
from tests.test_decoder import opened, save
from tests.test_pretrained import tiny

PROMPTS = ([10, 20, 30, 4, 5], [7, 8], [31, 32, 33])
LIKELIEST = lambda logits, key: jnp.argmax(logits, -1)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    """A random decoder on bytes, without a tokenizer."""
    return tiny(tmp_path_factory.mktemp('tiny'), max_position_embeddings=40)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """A decoder whose tokens vary."""
    _, stages, variables = opened(save(tmp_path_factory.mktemp('llama3'), 'llama3'), 2)
    return language_model.LanguageModel('random', stages, tuple(variables), byte_level())


def texts(reader, prompts=PROMPTS, count=4, chosen=LIKELIEST, **given):
    rows = [[] for _ in prompts]
    for i, token in sampling.continuations(reader, prompts, count, chosen, **given):
        rows[i].append(token)
    assert all(row[-1] is None for row in rows)
    return [row[:-1] for row in rows]


def likeliest(model, cuts, rows):
    """After each token of each sequence the likeliest one, by one pass without a cache."""
    pipe = Pipeline(tuple(s.with_logits for s in model.stages), cuts or (None,))
    x = jnp.asarray([row + [0] * (12 - len(row)) for row in rows])  # causal, so the end is free

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(variables):
        feedback = None
        if cuts:
            feedback = init_feedback(cuts, pipe.likes(variables, x, train=False))
        return pipe.apply(variables, feedback, x, Ctx(), train=False)[0].argmax(-1)

    return run(model.variables).tolist()


@pytest.mark.parametrize('codec', ['', 'per_token(top_k(0.3))'])
def test_tokens_with_a_cache_are_those_without(model, codec):
    """Of a batch of prompts of several lengths; the codec sends each token apart."""
    cuts = (boundary(parse(codec), parse('raw')),) if codec else None
    found = texts(sampling.reader_of(model, cuts), count=6)
    rows = [[*prompt, *row] for prompt, row in zip(PROMPTS, found, strict=True)]
    after = likeliest(model, cuts, rows)
    for prompt, row, next_tokens in zip(PROMPTS, rows, after, strict=True):
        assert row[len(prompt) :] == next_tokens[len(prompt) - 1 : len(row) - 1]
    assert len({token for row in found for token in row}) > 2


def test_a_cache_is_indexed_alike_with_64_bits(model):
    with jax.enable_x64(True):
        tokens, cache = jnp.zeros((2, 3), jnp.int32), decoder.empty_cache(model.stages[0], 2, 8)
        variables = {**model.variables[0], 'cache': cache}
        run = functools.partial(model.stages[0].apply, mutable=['cache'])
        after = jax.eval_shape(run, variables, tokens)[1]['cache']
        assert jax.tree.map(lambda a: a.dtype, after) == jax.tree.map(lambda a: a.dtype, cache)


def test_boundaries_change_the_tokens(model):
    cuts = (boundary(parse('top_k(0.05)'), parse('raw')),)
    off, on = (sampling.reader_of(model, c) for c in (None, cuts))
    assert texts(off, count=8) != texts(on, count=8)


def test_a_window_ends_with_the_prompt_and_moves():
    """Stages without a cache; the window is full of other tokens before the prompt."""
    stages = gpt2.gpt2(gpt2.Config(50, 6, width=8, blocks=2, heads=2, dropout=(0.0,) * 3), 2)
    pipe = Pipeline(stages, (boundary(parse('raw'), parse('raw')),))
    variables = pipe.init(jax.random.key(0), jnp.zeros((1, 6), jnp.int32), train=False)[0]
    model = language_model.LanguageModel('', stages, variables, byte_level(), before=(1, 2, 3, 4))
    row = [1, 2, 3, 4, 10, 20]
    for _ in range(3):
        logits = pipe.apply(variables, None, jnp.asarray([row[-4:]]), train=False)[0]
        row.append(int(jnp.argmax(logits[0, -1])))
    assert texts(sampling.reader_of(model), [[10, 20]], 3) == [row[6:]]


def test_stop_tokens_end_a_text_and_are_left_out(model):
    first = texts(sampling.reader_of(model))
    assert first[0][1] not in first[0][:1]
    stopped = texts(sampling.reader_of(model), stops=frozenset([first[0][1]]))
    assert stopped[0] == first[0][:1]


def test_tokens_are_drawn_by_their_probabilities_among_the_likeliest():
    """Shares .5, .3, .15, .05; the seed fixes them; rows draw apart."""
    shares = jnp.array([0.15, 0.5, 0.05, 0.3])
    logits = jnp.tile(jnp.log(shares), (4000, 1))
    key = jax.random.key(0)
    drawn = lambda **words: np.asarray(sampling.choose(logits, key, **words))
    count = lambda tokens: np.bincount(tokens, minlength=4) / len(logits)
    np.testing.assert_allclose(count(drawn(temperature=1.0)), shares, atol=0.03)
    cold = shares**2 / (shares**2).sum()
    np.testing.assert_allclose(count(drawn(temperature=0.5)), cold, atol=0.03)
    few = count(drawn(temperature=1.0, top_p=0.7))
    np.testing.assert_allclose(few, [0, 0.625, 0, 0.375], atol=0.03)
    assert set(drawn(temperature=1.0, top_p=0.01)) == {1}
    assert set(drawn(temperature=0)) == {1}
    assert np.array_equal(drawn(temperature=1.0), drawn(temperature=1.0))
    for cold in (1e-6, 1e-45):
        assert set(drawn(temperature=cold, top_p=0.9)) == {1}
    np.testing.assert_allclose(count(drawn(temperature=1e9)), np.full(4, 0.25), atol=0.03)


def test_texts_are_written_as_they_come_in_their_order():
    """Half a character waits; the second text waits for the first; hidden tokens are not shown."""
    e = list('é'.encode())
    events = [(1, 66), (0, e[0]), (1, None), (0, e[1]), (0, None)]
    parts = []
    generate.written(events, [[65, 65], [67]], byte_level().decode, [1, 1], parts.append)
    assert [p for p in parts if p] == ['A', 'é', '\n', 'B', '\n']


def test_the_command_continues_prompts(folder, capsys):
    words = [str(folder), '--tokenizer=bytes', '--temperature=0', '--tokens=4']
    generate.main([*words, '--prompt', 'ab', 'xyz'])
    out, told = capsys.readouterr()
    assert re.fullmatch(r'8 tokens, [\d.e+]+ a second after the first\n', told)
    model = language_model.open_language_model(str(folder), tokenizer='bytes')
    rows = texts(sampling.reader_of(model), [list(b'ab'), list(b'xyz')])
    wanted = [
        bytes([*p, *r]).decode(errors='replace') for p, r in zip((b'ab', b'xyz'), rows, strict=True)
    ]
    assert out == ''.join(f'{text}\n' for text in wanted)


def test_a_chat_asks_by_the_template_and_shows_the_answer(model):
    source = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}!'
    talks = model._replace(tokenizer=byte_level()._replace(template=Template(source)))
    assert generate.prompts_of(talks, ['Hi'], True) == [list(b'<user>Hi!')]
    begins = model._replace(tokenizer=byte_level()._replace(begin=(1,)))
    assert generate.prompts_of(begins, ['Hi'], False) == [[1, *b'Hi']]


def test_stops_are_those_of_the_folder_too(tmp_path):
    root = tiny(tmp_path)
    (root / 'generation_config.json').write_text(json.dumps({'eos_token_id': [3, 5]}))
    model = language_model.open_language_model(str(root), tokenizer='bytes')
    assert generate.stops_of(model, ['a']) == {3, 5, 97}


MISTAKES = {
    'no template': (['--chat'], 'the tokenizer of .* has no chat template; leave --chat out'),
    'an empty prompt': (['--prompt', ''], 'an empty prompt; give --prompt a text'),
    'a stop of two tokens': (['--stop', 'ab'], "--stop 'ab' is 2 tokens; give a text of one"),
    'too many tokens': (['--tokens=36'], 'of 6 tokens and --tokens=36 are more than the 40 pos'),
    'half a character': (['--prompt', '\ud83d'], r"--prompt has '.ud83d', half of a character"),
    'no codec': (['--codec=nothing'], "unknown word 'nothing'"),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_told_in_a_line_before_weights_are_read(folder, case, monkeypatch):
    fail = lambda *given, **more: pytest.fail('reads weights')
    monkeypatch.setattr(language_model.pretrained, 'read', fail)
    words, message = MISTAKES[case]
    with pytest.raises(SystemExit, match=f'^jaxmp generate: .*{message}') as caught:
        generate.main([str(folder), '--tokenizer=bytes', *words])
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('flag', 'message'),
    [
        ('--top-p=0', 'a probability in (0, 1]'),
        ('--temperature=nan', 'a temperature of 0 or more'),
        (f'--seed={2**63}', 'give a whole number of 64 bits'),
    ],
)
def test_a_number_that_is_out_of_range(folder, capsys, flag, message):
    with pytest.raises(SystemExit):
        generate.main([str(folder), flag])
    assert message in capsys.readouterr().err


def test_stages_and_tokenizers_of_a_run_are_its_own(tmp_path):
    (tmp_path / 'model').mkdir()
    with pytest.raises(ValueError, match='is a run, which has its own stages and tokenizer; leave'):
        language_model.open_language_model(str(tmp_path), stages=2)


def test_a_tokenizer_of_more_tokens_than_the_table(tmp_path):
    with pytest.raises(ValueError, match=r'200 tokens and the tokenizer 256, .*leave --tokenizer'):
        language_model.open_language_model(str(tiny(tmp_path, vocab_size=200)), tokenizer='bytes')
