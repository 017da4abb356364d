"""Time to a loss over a slow link: gradients that come late beside the best order that waits.

Run as root on Linux: python bench/late_time.py [MODEL] [--links 200m+50ms 200m+150ms]
     [--steps=N] [--tokens=N] [--batch=N] [--microbatches=N]
     [--fwd=CODEC --bwd=CODEC] [--out=RESULT]
With a checkpoint of a decoder it is fine-tuned by low-rank updates, without one a decoder of four
blocks learns from nothing: bytes of the package's Alice, by Muon, no table tied. Each of four
stages is a process of `jaxmp train` in a namespace (bench/emulated_network.py). A row is written as
soon as it is measured, and the same command goes on where it was stopped.

**Seconds** are those of the run's own records, its tests with them. Steps before the first test,
which compile, count as long as those after it. A test empties the pipeline. **The loss** is the
higher one of the last test losses of a run and of the one that waits, the lowest that both reach,
and its time lies on a line between two tests. Rates were tuned on another seed, for both orders.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import emulated_network
import serving
from emulated_network import LINKS
from timing import stem
from workers import Rows

STAGES, PORT = 4, 7079
TASKS = {
    'fine-tuning': {
        'model.train': 'lora(8)', 'optimizer.lr': 2e-3, 'data.sequence_length': 128,
        'batch_size': 4, 'parallel.num_microbatches': 4, 'data.test_examples': 8, 'steps': 48,
        'eval_every': '12 steps',
    },
    'from nothing': {
        'model.train': 'all', 'optimizer.name': 'muon', 'optimizer.lr': 8e-3,
        'data.sequence_length': 64, 'batch_size': 16, 'parallel.num_microbatches': 8,
        'data.test_examples': 64, 'steps': 400, 'eval_every': '50 steps',
    },
}  # fmt: skip
ORDER = 'eager_1f1b'  # the one that waits
ORDERS = {ORDER: {'parallel.schedule': 'eager_1f1b(7)'}} | {
    f'{n} late{word and f", {word}"}{", by stage" * by_stage}': {
        'optimizer.delay': n, 'optimizer.correction': word or 'none',
        'optimizer.delay_by_stage': by_stage,
    }
    for n in range(1, 10) for word in ('', 'predict')
    for by_stage in (False, True)
}  # fmt: skip


def trained(lab, words, folder):
    """The records of a run, a process in each namespace of a lab."""
    flags = [f'--config.{k}={v}' for k, v in words.items()]
    command = [sys.executable, '-m', 'jaxmp', 'train', '--config=finetune', *flags, '--nocurves']
    address = f'--coordinator={emulated_network.address(0)}:{PORT}', f'--processes={STAGES}'
    environment = {'JAXMP_TOKEN': 'bench', 'JAX_PLATFORMS': 'cpu'}
    with tempfile.TemporaryFile('w+') as log:
        members = [
            subprocess.Popen(
                lab.inside(s, *command, f'--workdir={folder}', *address, f'--process={s}'),
                env={**os.environ, **environment}, stdout=log, stderr=log,
            )
            for s in range(STAGES)
        ]  # fmt: skip
        ended = [m.wait() for m in members]
        if any(ended):
            log.seek(0)
            raise RuntimeError(log.read()[-2000:])
    return [json.loads(line) for line in (Path(folder) / 'metrics.jsonl').read_text().splitlines()]


def curve(records):
    """Steps, seconds and losses of the tests."""
    train = {r['step']: r['seconds'] for r in records if r['kind'] == 'train'}
    test = [r for r in records if r['kind'] == 'test' and r['compression'] == 'on' and r['step']]
    first, last = test[0]['step'], test[-1]['step']
    pace = (train[last] - train[first]) / (last - first)
    return [(r['step'], train[r['step']] - train[first] + pace * first, r['loss']) for r in test]


def reached(points, loss):
    """Step and second at which a curve first is at a loss."""
    if points[0][2] <= loss:
        return points[0][:2]
    for (s, t, high), (s1, t1, low) in itertools.pairwise(points):
        if low <= loss:
            share = (high - loss) / (high - low)
            return s + share * (s1 - s), t + share * (t1 - t)
    return float('nan'), float('nan')


def compared(row, waiting):
    """Loss that both runs reach, steps and seconds to it, and how many times sooner it comes."""
    loss = max(r['curve'][-1][2] for r in (row, waiting))
    steps, seconds = reached(row['curve'], loss)
    return loss, steps, seconds, reached(waiting['curve'], loss)[1] / seconds


def table(rows):
    """The page."""
    run, timed = rows[0], [r for r in rows if r['kind'] == 'time']
    commits = ', '.join(dict.fromkeys(r['commit'] for r in rows if r['kind'] == 'run'))
    lines = [
        f'# Time to a loss over a slow link: {run["task"]}', '',
        f'{run["hardware"]}, jax {run["versions"]["jax"]}, commit {commits}; {STAGES} '
        f'stages, a process and a namespace each; forward `{run["fwd"]}`, backward `{run["bwd"]}`; '
        f'load {min(r["load"][0] for r in timed):.1f} to {max(r["load"][0] for r in timed):.1f} at '
        'the ends of runs. Definitions: `bench/late_time.py`.', '', f'`{run["command"]}`', '',
        '| link | order | seconds a step | last test | to the loss | steps | seconds | faster |',
        '|---|---|--:|--:|--:|--:|--:|--:|',
    ]  # fmt: skip
    waiting = {r['link']: r for r in timed if r['order'] == ORDER}
    for row in timed:
        (s0, t0, _), *_, (s1, t1, last) = row['curve']
        cells = [row['link'], row['order'], f'{(t1 - t0) / (s1 - s0):.3f}', f'{last:.4f}']
        if row['link'] in waiting:
            loss, steps, seconds, times = compared(row, waiting[row['link']])
            cells += [f'{loss:.4f}', f'{steps:.0f}', f'{seconds:.1f}', f'{times:.2f}']
        lines.append(f'| {" | ".join(cells + ["-"] * (8 - len(cells)))} |')
    return '\n'.join(lines) + '\n'


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('model', nargs='?', default='')
    parser.add_argument('--links', nargs='+', default=['200m+50ms', '200m+150ms'])
    parser.add_argument('--orders', nargs='+', default=['eager_1f1b', '3 late', '3 late, predict'])
    parser.add_argument('--steps', type=int, default=0)
    parser.add_argument('--tokens', type=int, default=0, help='of an example')
    parser.add_argument('--batch', type=int, default=0, help='examples of a step')
    parser.add_argument('--microbatches', type=int, default=0)
    parser.add_argument('--fwd', default='raw')
    parser.add_argument('--bwd', default='raw')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--out', type=Path, default=None)
    parser.add_argument('--fresh', action='store_true')
    return parser.parse_args()


def main(a):
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    task = 'fine-tuning' if a.model else 'from nothing'
    settings = {'task': task, 'fwd': a.fwd, 'bwd': a.bwd, 'seed': a.seed, 'steps': a.steps}
    own = {
        'data.sequence_length': a.tokens, 'batch_size': a.batch,
        'parallel.num_microbatches': a.microbatches,
    }  # fmt: skip
    settings |= {k.rpartition('.')[2]: v for k, v in own.items()}
    own = {k: v for k, v in own.items() if v}
    out = a.out or Path(__file__).parent / 'results' / stem(f'late_time_{task.replace(" ", "_")}')
    rows = Rows(out.with_suffix('.jsonl'), a.fresh)
    rows.start(**settings)
    with tempfile.TemporaryDirectory() as folder, emulated_network.lab(STAGES) as lab:
        path = a.model or serving.write_random(f'{folder}/model', STAGES, 128, tied=False)
        for link, order in itertools.product(a.links, a.orders):
            if rows.has(kind='time', link=link, order=order):
                continue
            lab.use(LINKS[link])
            words = {**TASKS[task], **({'steps': a.steps} if a.steps else {}), **ORDERS[order]}
            words |= own | {'model.path': path, 'fwd': a.fwd, 'bwd': a.bwd, 'seed': a.seed}
            words |= {'parallel.runtime': 'mpmd', 'optimizer.warmup': '5%'}
            records = trained(lab, words, f'{folder}/{len(rows.rows)}')
            rows.add(
                kind='time', link=link, order=order, curve=curve(records), load=os.getloadavg()
            )
            out.with_suffix('.md').write_text(table(rows.rows))
    print(table(rows.rows))


if __name__ == '__main__':
    main(arguments())
