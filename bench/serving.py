"""Tokens a second of generation over processes, and nats lost, by codec, link and prompts.

Run: python bench/serving.py MODEL [--processes=2,4] [--prompts=1,4] [--links='100mbit;10mbit']
     [--codecs='raw;mx(8)'] [--tokens=32] [--out=RESULT]
     python bench/serving.py --random=4x256 --processes=4 --links=';1gbit,40ms' --codecs=raw
One machine alone, then stages in processes of this machine, between which a link is emulated. All
prompts are alike, so that every stage has as much to do for each. A row is written as soon as it is
measured, and the same command goes on where it was stopped; a table (`.md`) lies beside the rows
(`.jsonl`).

``--random=4x256`` needs no checkpoint. Its 4 blocks of 3.9 MB stay in the caches of one machine, so
that cores are the limit and not memory, and its table has 256 tokens, so that each of 4 processes
computes alike. Of random weights no nats are measured.

**Tokens a second**: of all prompts together, best of ``--turns`` runs, since other work on the
machine takes the cores away; 'load' is what wanted a core besides. In brackets: times those of one
prompt.
**Nats lost**: per token of ``--text`` (default: the package's Alice), by `jaxmp evaluate`, with the
model in as many stages as processes; the error is the standard error over blocks of 256 tokens.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from timing import stem
from workers import Rows

PROMPT = 'The history of the town begins'
CODECS = (
    'raw',
    'fp16',
    'mx(8)',
    *(f'outliers(rotate(lloyd({bits}), 64), causal=True)' for bits in (4, 3, 2)),
)


def tokens_a_second(a, processes, prompts, link, codec):
    """Tokens a second of one run."""
    words = [a.model, '--temperature=0', f'--tokens={a.tokens}', *a.words]
    words += ['--prompt', *[PROMPT] * prompts]
    command = [sys.executable, '-m', 'jaxmp', 'generate']
    if processes > 1:
        command = [
            sys.executable, '-m', 'jaxmp', 'launch', '--processes', str(processes), '--', *command,
        ]  # fmt: skip
        words += ['--codec', codec, *([f'--link={link}'] if link else [])]
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    [rate] = re.findall(r'tokens, ([\d.e+]+) a second', done.stderr)
    return float(rate)


def lost(a, stages):
    """Nats lost and bits of each codec, by the model in so many stages."""
    words = [a.model, f'--text={a.text}', f'--tokens={a.text_tokens}', f'--stages={stages}']
    for codec in a.codecs.split(';'):
        words += ['--codec', codec]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / 'lost.png'
        command = [sys.executable, '-m', 'jaxmp', 'evaluate', *words, f'--out={out}']
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr[-2000:])
        [scores] = json.loads(out.with_suffix('.json').read_text())['scores'].values()
    return scores


def write_random(folder, blocks, width, tied=True):
    """A decoder of equal blocks with random weights, whose tokens are bytes; its path."""
    import jax

    from jaxmp.models import decoder, families, pretrained

    heads = width // 64
    described = {
        'model_type': 'llama', 'vocab_size': 256, 'hidden_size': width,
        'intermediate_size': 4 * width, 'num_hidden_layers': blocks, 'num_attention_heads': heads,
        'num_key_value_heads': max(1, heads // 2), 'tie_word_embeddings': tied,
    }  # fmt: skip
    [stage] = stages = decoder.decoder(families.config_of(described), 1)
    variables = jax.jit(stage.init)(jax.random.key(0), jax.numpy.zeros((1, 2), int))
    pretrained.write(folder, described, stages, [variables])
    return folder


def runs(a):
    """What is to be measured: processes, prompts, link, codec."""
    counts, prompts = ([int(n) for n in t.split(',')] for t in (a.processes, a.prompts))
    yield from ((1, n, '', '') for n in prompts)
    yield from itertools.product(counts, prompts, a.links.split(';'), a.codecs.split(';'))


def table(rows):
    """The page: a line per codec and link, a column per number of processes and prompts."""
    run, speeds = rows[0], [r for r in rows if r['kind'] == 'speed']
    scores = {(r['stages'], r['codec']): r for r in rows if r['kind'] == 'lost'}
    columns = sorted({(r['processes'], r['prompts']) for r in speeds if r['processes'] > 1})
    alone = {r['prompts']: r['tokens_a_second'] for r in speeds if r['processes'] == 1}
    by_run = {(r['link'], r['codec'], r['processes'], r['prompts']): r for r in speeds}
    counts = sorted({n for n, _ in columns})

    def speed(link, codec, processes, prompts):
        row, one = (by_run.get((link, codec, processes, k)) for k in (prompts, 1))
        if not row:
            return '-'
        rate = row['tokens_a_second']
        times = f' (x{rate / one["tokens_a_second"]:.2f})' if one and prompts > 1 else ''
        return f'{rate:.3g}{times}'

    heads = [f'{n} processes, {k} prompt{"s" * (k > 1)}' for n, k in columns]
    heads += [f'nats lost, {n} stages' for n in counts]
    lines = [
        f'# Generation by {run["model"]} over processes: tokens a second and nats lost',
        '',
        f'{run["hardware"]}, jax {run["versions"]["jax"]}, commit {run["commit"]}, '
        f'{run["cores"]} cores, load {min(r["load"] for r in rows):g} to '
        f'{max(r["load"] for r in rows):g}. Definitions: `bench/serving.py`.',
        '',
        'One machine alone: '
        + ', '.join(f'{rate:.3g} a second with {k} prompts' for k, rate in alone.items())
        + '.',
        '',
        f'| link | codec | bits | {" | ".join(heads)} |',
        f'|---|---|--:|{"--:|" * len(heads)}',
    ]
    for link, codec in dict.fromkeys((r['link'], r['codec']) for r in speeds if r['codec']):
        cells = [speed(link, codec, *column) for column in columns]
        losses = [scores.get((n, codec)) for n in counts]
        cells += [
            f'{r["nats_lost"]:.4f} ± {r["standard_error"]:.4f}' if r else '-' for r in losses
        ]  # fmt: skip
        bits = next((f'{r["bits"]:.2f}' for r in losses if r), '-')
        lines.append(f'| {link or "none"} | `{codec}` | {bits} | {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main():
    """The command line."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('model', nargs='?', help='of jaxmp generate; or give --random')
    p.add_argument('--random', metavar='BLOCKSxWIDTH', help='such as 4x256, in place of a model')
    p.add_argument('--processes', default='2,4')
    p.add_argument('--prompts', default='1,4')
    p.add_argument('--links', default='100mbit;10mbit', help='with ; between; empty: none')
    p.add_argument('--codecs', default=';'.join(CODECS))
    p.add_argument('--tokens', type=int, default=32, help='after each prompt')
    p.add_argument('--turns', type=int, default=2)
    p.add_argument('--text', type=Path, default=files('jaxmp.data') / 'alice.txt')
    p.add_argument('--text_tokens', type=int, default=8192)
    p.add_argument('--out', type=Path, help='results without their ending')
    p.add_argument('--fresh', action='store_true', help='forget what was measured')
    a = p.parse_args()
    if bool(a.model) == bool(a.random):
        p.error('give a model, or --random=4x256 for one of random weights')
    with tempfile.TemporaryDirectory() as folder:
        a.words, name = [], Path(a.model or '').name
        if a.random:
            blocks, width = map(int, a.random.split('x'))
            a.model, a.words = write_random(folder, blocks, width), ['--tokenizer=bytes']
            name = f'random {a.random}'
        measure(a, name)


def measure(a, name):
    """Measures what is not measured yet of a model, and writes the table after each row."""
    out = a.out or Path(__file__).parent / 'results' / stem('serving')
    rows = Rows(out.with_suffix('.jsonl'), a.fresh)
    cores = len(os.sched_getaffinity(0))
    rows.start(model=name, tokens=a.tokens, text_tokens=a.text_tokens, cores=cores)
    load = lambda: round(os.getloadavg()[0], 1)

    def write():
        print(json.dumps(rows.rows[-1]), flush=True)
        out.with_suffix('.md').write_text(table(rows.rows))

    for processes, prompts, link, codec in runs(a):
        key = {'processes': processes, 'prompts': prompts, 'link': link, 'codec': codec}
        if not rows.has(kind='speed', **key):
            best = max(tokens_a_second(a, *key.values()) for _ in range(a.turns))
            rows.add(kind='speed', **key, tokens_a_second=best, load=load())
            write()
    for stages in () if a.random else map(int, a.processes.split(',')):
        if any(not rows.has(kind='lost', stages=stages, codec=c) for c in a.codecs.split(';')):
            for codec, score in lost(a, stages).items():
                rows.add(kind='lost', stages=stages, codec=codec, **score, load=load())
            write()


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
