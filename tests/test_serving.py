"""Generation over processes: the tokens of one, whatever the streams and the channels."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from jaxmp import boundary, parse
from jaxmp.data.tokenizer import byte_level
from jaxmp.net.connect import owners, processes
from jaxmp.training import generate, language_model, sampling, serving
from tests.runs import ENV, LAUNCH
from tests.test_decoder import opened, save
from tests.test_generate import PROMPTS, texts
from tests.test_pretrained import tiny

CAUSAL = 'per_token(uniform(6))'


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
        part = serving.Part(
            model._replace(variables=mine),
            boundaries,
            range(own[0], own[-1] + 1),
            choose,
            size,
            3,
        )
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


@pytest.mark.parametrize(('text', 'count'), [('raw', 3), (CAUSAL, 2)])
def test_tokens_are_those_of_one_process(model, text, count):
    """Greedy, and drawn by the random numbers of each prompt; one stream is two prompts of two."""
    boundaries = cuts(text)
    local = partial(texts, sampling.reader_of(model, boundaries), stops=frozenset({9}), seed=3)
    greedy = local()
    assert over(model, boundaries, count, generate.Draw(0.0, 1.0)) == greedy
    drawn = generate.Draw(1.0, 0.9)
    assert over(model, boundaries, count, drawn) == local(chosen=drawn) != greedy


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


@pytest.mark.parametrize(
    'text', ['raw', 'bf16', CAUSAL, 'mx(4)', 'outliers(rotate(lloyd(4), 64), causal=True)']
)
def test_channels_that_can(text):
    serving.check_by_token(cuts(text), 64)
