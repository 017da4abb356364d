"""Generation over processes: the tokens of one, whatever the streams and the channels."""

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import numpy as np
import pytest

from jaxmp import boundary, parse
from jaxmp.data.tokenizer import byte_level
from jaxmp.net.connect import owners, processes
from jaxmp.net.group import ProcessGroup
from jaxmp.training.evaluation import language_model
from jaxmp.training.generation import generate, sampling, serving
from tests.base import ENV, slow
from tests.runs import LAUNCH
from tests.test_decoder import opened, save
from tests.test_generate import PROMPTS, texts
from tests.test_pretrained import tiny

CAUSAL = 'per_token(uniform(6))'
ROTATED = 'outliers(rotate(lloyd(4), 16), causal=True)'  # draws signs


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """Three stages of a decoder whose tokens vary."""
    _, stages, variables = opened(save(tmp_path_factory.mktemp('llama3'), 'llama3'), 3)
    return language_model.LanguageModel('random', stages, tuple(variables), byte_level())


def cuts(text, count=2):
    return (boundary(parse(text), parse('raw')),) * count


def over(model, boundaries, count, choose, prompts=PROMPTS):
    """The texts by ``count`` processes, which are threads here; each has its own stages alone."""
    owner = owners(len(model.stages), count)
    size = len(prompts), max(map(len, prompts)) + 4

    def run(group):
        own = [s for s, o in enumerate(owner) if o == group.index]
        mine = tuple(v if s in own else None for s, v in enumerate(model.variables))
        places, theirs = range(own[0], own[-1] + 1), model._replace(variables=mine)
        part = serving.Part(theirs, boundaries, places, choose, size, seed=3)
        ends = serving.Ends(group, part)
        if group.index:
            return serving.serve(part, ends)
        rows = [[] for _ in prompts]
        for i, token in serving.written(part, ends, prompts, 4, frozenset({9})):
            rows[i].append(token)
        return rows

    def or_end(group):
        try:
            return run(group)
        except BaseException as error:
            group.fail(repr(error))
            raise

    with processes(count) as groups, ThreadPoolExecutor(count) as threads:
        [rows, *rest] = threads.map(or_end, groups)
    assert not any(rest)
    assert all(row[-1] is None for row in rows)
    return [row[:-1] for row in rows]


GREEDY, DRAWN = generate.Draw(0.0, 1.0), generate.Draw(1.0, 0.9)


@pytest.mark.parametrize(
    ('text', 'count', 'chosen'),
    slow(
        [('raw', 3, GREEDY), ('raw', 3, DRAWN), (CAUSAL, 2, GREEDY), (CAUSAL, 2, DRAWN)],
        lambda case: case != (CAUSAL, 2, DRAWN),
    ),
)
def test_tokens_are_those_of_one_process(model, text, count, chosen):
    """Greedy, and drawn by the random numbers of each prompt; one stream is two prompts of two."""
    boundaries = cuts(text)
    local = partial(texts, sampling.reader_of(model, boundaries), stops=frozenset({9}), seed=3)
    found = local(chosen=chosen)
    assert over(model, boundaries, count, chosen) == found
    assert chosen == GREEDY or found != local(chosen=GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize('prompt', PROMPTS[:2], ids=len)
def test_a_codec_that_draws_gives_a_prompt_the_text_of_one_process(model, prompt):
    """One prompt: in one process several cross as one message, whose places draw other signs."""
    boundaries = cuts(ROTATED)
    reader = sampling.reader_of(model, boundaries)
    greedy = texts(reader, prompts=[prompt], stops=frozenset({9}), seed=3)
    assert over(model, boundaries, 2, generate.Draw(0.0, 1.0), [prompt]) == greedy


def middle(model, text='raw', prompts=3):
    """The second stage's process."""
    draw = generate.Draw(0.0, 1.0)
    return serving.Part(model, cuts(text), range(1, 2), draw, (prompts, 9))


def activations(prompts, position, read=False):
    """A message of raw: the tokens before a position, or the one there, which is drawn from."""
    start, count = (0, position) if read else (position, 1)
    x = np.stack([np.random.default_rng((i, count)).normal(size=(1, count, 16)) for i in prompts])
    words = tuple(serving.Word(i, start, count, not read) for i in prompts)
    return serving.Message(words, x.astype(np.float32))


def test_a_batch_gives_each_prompt_what_it_gave_alone(model):
    """Prompts of unlike lengths; matrices of several rows are summed in another order."""
    alone, batch = middle(model), middle(model)
    lengths = (3, 1, 5)
    for i, length in enumerate(lengths):
        for part in (alone, batch):
            part.run(activations([i], length, read=True))
    steps = [activations([i], length) for i, length in enumerate(lengths)]
    wanted = [alone.run(step).arrays for step in steps]
    [together] = map(batch.run, serving.joined([steps[2], *steps[:2]]))
    assert [word.prompt for word in together.words] == [2, 0, 1]
    for i, row in zip((2, 0, 1), together.arrays, strict=True):
        np.testing.assert_allclose(row, wanted[i][0], atol=1e-6 * np.abs(wanted[i]).max())


@pytest.mark.parametrize('text', [CAUSAL, ROTATED])
def test_a_codec_gives_each_prompt_of_a_batch_the_bits_it_gave_alone(model, text):
    """Of equal tensors, at positions of their own."""
    part, message = middle(model, text), activations(range(3), 4)
    sent = jax.jit(part._sent, static_argnums=0)
    x, keys = message.arrays[:, 0], jax.random.split(part.key, 3)
    together = jax.tree.leaves(sent(0, x, keys))
    for i in range(3):
        alone = jax.tree.leaves(sent(0, x[i : i + 1], keys[i : i + 1]))
        for row, [wanted] in zip((a[i] for a in together), alone, strict=True):
            np.testing.assert_array_equal(row, wanted)


def test_prompts_that_wait_go_as_one_batch():
    """While the first ones compute the others come; each is asked once."""
    waiting, come = [activations([i], 2) for i in range(5)], threading.Event()
    runs, sent = [], []

    class Ends:
        group = ProcessGroup()
        send = sent.append

        def receive(self):
            if waiting:
                return waiting.pop(0)
            come.set()
            return serving.END

    class Part:
        last = True
        compile = lambda self: None

        def run(self, message):
            assert come.wait(10)
            runs.append([word.prompt for word in message.words])
            assert len(message.arrays) == len(message.words)
            return message

    serving.serve(Part(), Ends())
    assert sorted(itertools.chain(*runs)) == [0, 1, 2, 3, 4]
    assert len(runs) <= 2
    assert len(sent) == len(runs) + 1
    assert sent[-1] is serving.END


def test_few_programs_are_compiled_and_none_while_texts_are_written(model):
    """Batches of 1, 4 and 5 of five prompts; what fills a batch leaves the caches as they are."""
    part = middle(model, prompts=5)
    part.compile()
    compiled = part._program._cache_size()
    assert compiled == len(serving.sizes(5)) == 3
    before = jax.tree.map(np.asarray, part.caches)
    for prompts in ([4], [0, 1], [2, 3, 4]):
        part.run(activations(prompts, 2))
        whole = [c['layers']['self_attn']['keys'] for c in (part.caches[0], before[0])]
        changed = (np.asarray(whole[0]) != whole[1]).any((0, 2, 3, 4))
        assert set(np.flatnonzero(changed)) - {5} == set(prompts)
        before = jax.tree.map(np.asarray, part.caches)
    assert part._program._cache_size() == compiled


@pytest.mark.slow
def test_two_processes_write_what_one_does_and_end_in_a_line_when_one_is_killed(tmp_path, capsys):
    """A prompt is read by both; what was written before the kill stays."""
    folder = tiny(tmp_path, max_position_embeddings=4096)
    words = [str(folder), '--tokenizer=bytes', '--temperature=0', '--codec', CAUSAL]
    short = [*words, '--tokens=4', '--prompt', 'ab', 'xyz']
    generate.main([*short, '--stages=2'])
    wanted = capsys.readouterr().out
    command = [*LAUNCH, sys.executable, '-m', 'jaxmp', 'generate']
    done = subprocess.run([*command, *short], env=ENV, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, wanted), done.stderr
    long = [*command, *words, '--tokens=4000', '--prompt', 'abc']
    pipes = {'stdout': subprocess.PIPE, 'stderr': subprocess.PIPE}
    with subprocess.Popen(long, env=ENV, bufsize=0, **pipes) as running:
        while b'abc' not in (begin := running.stdout.read(8)):
            assert begin
        found = subprocess.run(['pgrep', '-P', str(running.pid)], capture_output=True, check=True)
        os.kill(int(found.stdout.split()[-1]), signal.SIGKILL)  # process 1 was started last
        errors = running.communicate(timeout=60)[1].decode()
    assert running.returncode
    assert re.search(r'process 0 \(stage 0\): stopped: process 1 \(stage 1\)', errors)
    assert 'Traceback' not in errors


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('top_k(0.1)', r'fwd top_k\(0\.1\) codes tokens together with later ones, .*by token'),
        ('nvfp4', 'fwd nvfp4 codes tokens together'),  # one scale of a tensor
        ('ef21(top_k(0.1))', r'fwd ef21\(top_k\(0\.1\)\) remembers what it sent, and in serving'),
    ],
)
def test_channels_that_cannot_serve_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        serving.check_by_token(cuts(text), 64)


@pytest.mark.parametrize('text', ['raw', 'bf16', CAUSAL, 'mx(4)', ROTATED])
def test_channels_that_can(text):
    serving.check_by_token(cuts(text), 64)
