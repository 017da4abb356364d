"""Whether the plan of `jaxmp plan` is fastest: predicted and measured steps beside other choices.

python bench/planner.py [--config=text_gpt2] [--links 1gbit 100mbit 200mbit,50ms] [--error=.1]
It probes the configuration once, on a core while another process probes it on the other one, since
the processes to be measured share caches and memory as well. For each link it measures the plan and
channels chosen by hand, each in the schedule that is predicted to be the best for it. The rows of a
link are written when all are measured, and the same command goes on where it was stopped; a table
(`.md`) lies beside the rows.

**Measured**: wall time of a training step in process 0; two processes, each on a core of its own,
with links emulated between them. Both have all choices of a link ready and run them in ``--rounds``
rounds, in another order each, ``--steps`` steps of each after one that does not count: a machine's
speed varies from second to second, and so all choices see the same. The lower quartile of the steps
counts, and of ``--turns`` the least. The paper's codecs are measured in plain 1F1B too, with the
number of micro-batches that is predicted to be the best for it: what they take without a planner.
Anything else that the machine does counts, so it must do nothing else.
**Loss**: mean training loss of the last tenth of an epoch in one program, from the same seed and
batches; none of links and schedules changes it. Of several ``--seeds`` it is their mean, with the
mean of the differences from no compression, seed by seed, and the standard error of that mean.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from planner_worker import CORES, launched
from timing import stem
from workers import Rows

from jaxmp.net.speed import parse
from jaxmp.plan.asked import changed
from jaxmp.plan.candidates import ALIKE, RAW
from jaxmp.plan.choose import Choice, Probed, choose, uniform
from jaxmp.plan.planned import planned
from jaxmp.plan.write import text as written
from jaxmp.training.tasks.named import stage_count

HERE, STEPS, ROUNDS = Path(__file__).parent, 3, 10
PAPER = (  # of the paper
    ('raw', 'raw'),
    ('uniform(8)', 'uniform(8)'),
    ('uniform(4)', 'uniform(8)'),
    ('uniform(4)', 'uniform(4)'),
    ('top_k(0.1)', 'top_k(0.1)'),
    ('top_k(0.3)', 'top_k(0.3)'),
)
HAND = (
    ('fp16', 'fp16'),
    ('block(4)', 'block(4)'),
    ('rotate(lloyd(4))', 'rotate(lloyd(4))'),
    ('rotate(lloyd(3))', 'rotate(lloyd(3))'),
    ('rotate(lloyd(2))', 'rotate(lloyd(4))'),
)


def choices(probed: Probed, link: str, budget: float) -> Iterator[tuple[str, Choice]]:
    """The plan and the others, with their names."""
    yield 'the plan', choose(probed, parse(link), budget)
    pairs = *((*p, None) for p in (*PAPER, *HAND)), *((*p, '1f1b') for p in PAPER)
    for fwd, bwd, schedule in pairs:
        if made := uniform(probed, parse(link), fwd, bwd, schedule):
            yield f'{fwd} forward, {bwd} backward{", 1F1B" * bool(schedule)}', made


def file_of(choice: Choice, args: argparse.Namespace, out: Path) -> Path:
    """A configuration's file for a choice."""
    out.write_text(written(choice, args.config, values(args), out, 'A choice.'))
    return out


def values(args: argparse.Namespace) -> dict[str, Any]:
    """What the command line changes."""
    return changed(args.config, args.change)[1]


def probed_beside(args: argparse.Namespace) -> Probed:
    """What a probe on a core finds while another one works on the other."""
    if (found := stage_count(changed(args.config, args.change)[0])) != CORES:
        sys.exit(f'{args.config} has {found} stages, and there are {CORES} cores; give --change')
    command = [sys.executable, str(HERE / 'planner.py'), '--beside', f'--config={args.config}']
    command += [f'--seconds={args.seconds}', '--change', *args.change]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as other:
        try:
            return probe(args)
        finally:
            other.terminate()


def probe(args: argparse.Namespace) -> Probed:
    """What the planner's probe finds."""
    from jaxmp.runtimes.allocator import keep_freed_pages

    keep_freed_pages()
    config, _ = changed(args.config, args.change)
    own = list(dict.fromkeys(t for pair in (*PAPER, *HAND) for t in pair if t not in (RAW, *ALIKE)))
    return planned(config, own, parse(args.links[0]), args.error, args.seconds)[0]


def train_on(args: argparse.Namespace) -> None:
    """Trains without an end, in the way in which a probe does."""
    from jaxmp import data
    from jaxmp.net.group import ProcessGroup
    from jaxmp.plan.planned import probed_experiment
    from jaxmp.runtimes.allocator import keep_freed_pages
    from jaxmp.training.trainer import Trainer

    keep_freed_pages()
    exp = probed_experiment(changed(args.config, args.change)[0])
    trainer = Trainer(exp, ProcessGroup())
    for epoch in itertools.count():
        rows = data.order(exp.config.seed, epoch, len(exp.data.train.y))
        for _ in trainer.epoch(0, trainer.create(), rows):
            pass


def loss_of(out: Path, seed: int) -> float:
    """Mean training loss of the last tenth of an epoch."""
    import numpy as np

    from jaxmp import data
    from jaxmp.config import complete, load
    from jaxmp.net.group import ProcessGroup
    from jaxmp.training.loop import prepare

    config = complete(load(str(out)))
    config.seed = seed
    config.parallel.update(runtime='local', schedule='1f1b')
    trainer = prepare(config, ProcessGroup())
    rows = data.order(config.seed, 0, len(trainer.exp.data.train.y))
    losses: list[float] = []
    for _, found, _ in trainer.epoch(0, trainer.create(), rows):
        losses += np.ravel(found['loss']).tolist()
    return statistics.mean(losses[-max(1, len(losses) // 10) :])


def work(args: argparse.Namespace, rows: Rows, probed: Probed) -> None:
    """Measures what is not measured yet."""
    for turn, link in itertools.product(range(args.turns), args.links):
        named = dict(choices(probed, link, args.error))
        texts = [
            '; '.join(c.text for _, c in sorted(made.codecs.items())) for made in named.values()
        ]
        with tempfile.TemporaryDirectory() as folder:
            files = [
                file_of(made, args, Path(folder) / f'{i}.py')
                for i, made in enumerate(named.values())
            ]
            for (codecs, file), seed in itertools.product(
                zip(texts, files, strict=True), range(args.seeds)
            ):
                if not rows.has(kind='loss', codecs=codecs, seed=seed):
                    rows.add(kind='loss', codecs=codecs, seed=seed, loss=loss_of(file, seed))
            if rows.has(kind='step', turn=turn, link=link):
                continue
            seconds = launched(files, link, args.rounds, args.steps)
        for (name, made), codecs, own in zip(named.items(), texts, seconds, strict=True):
            rows.add(
                kind='step', turn=turn, link=link, name=name, codecs=codecs,
                order=made.order.line, predicted=made.seconds,
                measured=statistics.quantiles(own, n=4)[0], seconds=own, error=made.error,
                load=os.getloadavg()[0],
            )  # fmt: skip
            said = f'{1e3 * made.seconds:8.1f} {1e3 * rows.rows[-1]["measured"]:8.1f} ms'
            print(f'{link:14}{name:46}{said}', flush=True)


def quietest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the measured steps, the turn of each choice in which it took the least."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for r in (r for r in rows if r['kind'] == 'step'):
        key = r['link'], r['name']
        found[key] = min(found.get(key, r), r, key=lambda r: r['measured'])
    return list(found.values())


def said_losses(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The loss of each choice by its codecs; of several seeds with its distance from raw's."""
    by_seed: dict[str, dict[int, float]] = {}
    for r in (r for r in rows if r['kind'] == 'loss'):
        by_seed.setdefault(r['codecs'], {})[r.get('seed', 0)] = r['loss']
    raw = next((own for codecs, own in by_seed.items() if set(codecs.split('; ')) == {'raw'}), {})
    said = {}
    for codecs, own in by_seed.items():
        said[codecs] = f'{statistics.mean(own.values()):.4f}'
        off = [own[seed] - raw[seed] for seed in own.keys() & raw.keys()]
        if len(off) > 1 and own is not raw:
            error = statistics.stdev(off) / len(off) ** 0.5
            said[codecs] += f' ({statistics.mean(off):+.4f} ± {error:.4f})'
    return said


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The page."""
    run = next(r for r in rows if r['kind'] == 'run')
    losses = said_losses(rows)
    steps = quietest(rows)
    lines = [
        '# Predicted and measured steps',
        '',
        f'{run["hardware"]}, jax {run["versions"]["jax"]}, commit {run["commit"]};',
        f'{CORES} processes, a core each, links emulated. Definitions: `bench/planner.py`.',
        '',
        f'`{run["command"]}`',
    ]
    for link in dict.fromkeys(r['link'] for r in steps):
        own = [r for r in steps if r['link'] == link]
        lines += [
            '',
            f'## {link}',
            '',
            '| channels | schedule | predicted ms | measured ms | off | largest error | loss |',
            '|---|---|--:|--:|--:|--:|--:|',
        ]
        for r in sorted(own, key=lambda r: r['measured']):
            kinds = ', '.join(f'`{t}`' for t in dict.fromkeys(r['codecs'].split('; ')))
            name = f'**the plan**: {kinds}' if r['name'] == 'the plan' else r['name']
            lines.append(
                f'| {name} | {r["order"]} | {1e3 * r["predicted"]:.1f} | {1e3 * r["measured"]:.1f} '
                f'| {r["measured"] / r["predicted"] - 1:+.0%} | {r["error"]:.2g} '
                f'| {losses[r["codecs"]]} |'
            )
    return '\n'.join(lines) + '\n'


def main() -> None:
    """Probes, measures, writes the table."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--config', default='text_gpt2')
    ask.add_argument('--links', nargs='+', default=['1gbit', '100mbit', '200mbit,50ms'])
    ask.add_argument('--error', type=float, default=0.1)
    ask.add_argument('--seconds', type=float, default=90, help='of the probe')
    ask.add_argument('--steps', type=int, default=STEPS, help='of a choice, in each round')
    ask.add_argument('--rounds', type=int, default=ROUNDS, help='of all choices, in each turn')
    ask.add_argument('--turns', type=int, default=2)
    ask.add_argument('--seeds', type=int, default=1, help='of the loss')
    ask.add_argument(
        '--change', nargs='*', default=['model.stages=2'], help='key=value of the configuration'
    )
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    ask.add_argument('--beside', action='store_true', help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.beside:
        os.sched_setaffinity(0, {1})
        return train_on(args)
    out = args.out or HERE / 'results' / stem('planner')
    rows = Rows(out.with_suffix('.jsonl'), args.fresh)
    os.sched_setaffinity(0, {0})  # before anything lets JAX make its threads: a probe of one core
    kept = out.with_suffix('.probe')
    if kept.exists() and not args.fresh:
        probed = pickle.loads(kept.read_bytes())
    else:
        probed = probed_beside(args)
        kept.write_bytes(pickle.dumps(probed))
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)))  # of the processes to start
    rows.start(config=args.config, change=args.change, error=args.error)
    work(args, rows, probed)
    out.with_suffix('.md').write_text(table(rows.rows))
    kept.unlink()


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
