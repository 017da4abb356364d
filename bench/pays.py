"""Whether `jaxmp pays` is right: predicted and measured steps and verdicts, by model and link.

Run as root on Linux: python bench/pays.py [--models digits text_gpt2 lora full] [--links ...]
It writes a row as soon as it is measured and goes on where it was stopped; a table (`.md`) lies
beside the rows (`.jsonl`). SmolLM2 needs --checkpoint=FILE.gguf.

**Predicted**: what `jaxmp pays --link=LINK` says: alone, raw, and with the plan's codecs.
**Measured**: two processes in two network namespaces, joined by a link that `tc` and a relay slow
down (`emulated_network.py`), each on a core of its own, which is the machine. The model alone,
raw messages and the plan take turns in ``--rounds`` rounds; medians count. Each makes as many
steps in a round as the fastest of them makes in a second, and at least ``--steps``.
**Right**: both say that it pays, or both that it does not; or the steps are within 5 % of alone.
**Waited**: the share of a step alone in which its process had no core. With more than a few percent
the machine did other work and the row says little; `--fresh` measures it again.
With ``--cores 0 0`` both processes share a core. Then a step has one micro-batch, so that only one
stage works at a time, and no second machine can pay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulated_network
from emulated_network import Lab
from timing import stem
from workers import Rows

from jaxmp.net.speed import parse
from jaxmp.plan.asked import changed
from jaxmp.plan.choose import Choice, Probed, choose, uniform
from jaxmp.plan.pays import alone, by_itself
from jaxmp.plan.verdict import ALIKE, paying
from jaxmp.plan.write import text as written

HERE, PORT = Path(__file__).parent, 7079
RELAYED = 20  # Mbit/s up to which the bucket of an emulated link matters, see `Lab.use`
ROUND = 1.0  # seconds that the steps of a choice take in a round, at least
LINKS = tuple(f'{rate}{late}' for rate in ('1gbit', '100mbit', '20mbit', '5mbit')
              for late in ('', ',40ms'))  # fmt: skip
SMOL = ('model.stages=2', 'data.sequence_length=128', 'data.train_examples=64')
MODELS = {  # configuration and what is changed
    'digits': ('digits_resnet', ('parallel.place=0 0 1 1',)),
    'text_gpt2': ('text_gpt2', ('model.stages=2',)),
    'lora': ('finetune', (*SMOL, 'model.train=lora(8)')),
    'full': ('finetune', (*SMOL, 'model.train=no_table')),  # its default: all but the table
}
CHOICES = 'alone', 'raw', 'plan'


def changes(model: str, args: argparse.Namespace) -> tuple[str, list[str]]:
    """The configuration of a model, and what changes it."""
    base, texts = MODELS[model]
    more = [f'model.path={args.checkpoint}'] if base == 'finetune' else []
    return base, ['parallel.runtime=mpmd', *texts, *more, *args.change]


def config_of(model: str, args: argparse.Namespace) -> Any:
    """The configuration itself."""
    return changed(*changes(model, args))[0]


def probe(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """What the command measures, in this process, on one core."""
    from jaxmp.plan.planned import planned
    from jaxmp.runtimes.allocator import keep_freed_pages
    from jaxmp.runtimes.placement import keep_compiled
    from jaxmp.training.experiment import experiment_of

    os.sched_setaffinity(0, {args.cores[0]})
    keep_compiled()
    keep_freed_pages()
    config = config_of(model, args)
    probed, _ = planned(config, [], parse(LINKS[0]), args.error, args.seconds)
    if place := config.parallel.place:
        probed = probed.on(tuple(map(int, place.split())), (1.0, 1.0))
    return {'probed': probed, 'alone': statistics.median(alone(experiment_of(by_itself(config))))}


def probed_of(model: str, args: argparse.Namespace, out: Path) -> tuple[Probed, float]:
    """The probe of a model, in a process of its own, kept beside the rows until all are there."""
    kept = out.with_suffix(f'.{model}.probe')
    if not kept.exists():
        command = [sys.executable, str(HERE / 'pays.py'), '--probe', str(kept), '--models', model]
        command += ['--cores', *map(str, args.cores), f'--seconds={args.seconds}']
        command += ['--change', *args.change]
        subprocess.run([*command, f'--checkpoint={args.checkpoint}'], check=True)
    found = pickle.loads(kept.read_bytes())
    probed = found['probed']
    if len({*args.cores}) == 1:
        probed = probed._replace(stages={1: probed.stages[1]})
    return probed, found['alone']


def measured(
    lab: Lab, model: str, choices: Sequence[Choice], args: argparse.Namespace, steps: int
) -> dict[str, Any]:
    """Median seconds of a step alone, raw and planned, in process 0, and their CPU-seconds."""
    base, texts = changes(model, args)
    values = changed(base, texts)[1]
    with tempfile.TemporaryDirectory() as folder:
        files = []
        for i, choice in enumerate(choices):
            files.append(Path(folder) / f'{i}.py')
            files[-1].write_text(written(choice, base, values, files[-1], 'A choice.'))
        rows = run(lab, files, args, steps)
    walls, busy = ([statistics.median(x[i] for x in own) for own in rows] for i in (0, 1))
    return dict(zip(CHOICES, walls, strict=True)) | {'cpu_alone': busy[0], 'steps': rows}


def run(lab: Lab, files: Sequence[Path], args: argparse.Namespace, steps: int) -> list[Any]:
    """Steps of the first file's model alone and of all files, by two processes in a lab."""
    where = f'--coordinator={emulated_network.address(0)}:{PORT}', '--processes=2'
    paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get('PYTHONPATH')])])
    running = []
    for s, core in enumerate(args.cores):
        words = [sys.executable, str(HERE / 'planner_worker.py'), f'--core={core}', '--alone']
        words += [f'--rounds={args.rounds}', f'--steps={steps}', *where, f'--process={s}']
        running.append(subprocess.Popen(
            lab.inside(s, *words, *map(str, files)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={**os.environ, 'PYTHONPATH': paths, 'JAXMP_TOKEN': 'bench'}, text=True,
        ))  # fmt: skip
    try:
        said, errors = running[0].communicate()
        if running[0].returncode:
            raise RuntimeError(errors[-2000:])
    finally:
        for process in running:
            process.kill()
            process.communicate()
    return json.loads(said.splitlines()[-1])


def row(lab: Lab, model: str, link: str, probe: tuple[Probed, float], args: Any) -> dict[str, Any]:
    """A row of the table."""
    probed, by_itself_s = probe
    wanted = parse(link)
    nominal = emulated_network.Link(1e6 * wanted.rate, wanted.delay / 1e3)
    raw, plan = uniform(probed, wanted, 'raw', 'raw'), choose(probed, wanted, args.error)
    assert raw
    lab.use(nominal, relayed=wanted.rate <= RELAYED)
    predicted = dict(zip(CHOICES, (by_itself_s, raw.seconds, plan.seconds), strict=True))
    steps = max(args.steps, math.ceil(ROUND / min(predicted.values())))
    found = measured(lab, model, (raw, plan), args, steps)
    codecs = {f'{a}-{b}': c.text for (a, b), c in plan.codecs.items()}
    orders = {'raw': raw.order.line, 'plan': plan.order.line}
    return {
        'kind': 'step', 'model': model, 'link': link, 'predicted': predicted, 'measured': found,
        'codecs': codecs, 'orders': orders, 'load': os.getloadavg()[0],
    }  # fmt: skip


def right(predicted: float, found: float) -> bool:
    """Whether two ratios to a step alone say the same, or one is too near to alone to say.

    >>> right(0.8, 0.9), right(0.8, 1.2), right(0.99, 1.2)
    (True, False, True)
    """
    near = any(abs(ratio - 1) <= ALIKE for ratio in (predicted, found))
    return near or (predicted < 1) == (found < 1)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The page."""
    setting = next(r for r in rows if r['kind'] == 'run')
    lines = [
        '# Predicted and measured: does a second machine pay?',
        '',
        f'{setting["hardware"]}, jax {setting["versions"]["jax"]}, commit {setting["commit"]}; '
        f'cores {setting["cores"]}. Definitions: `bench/pays.py`. Steps in ms.',
        '',
        f'`{setting["command"]}`',
        '',
        '| model | link | alone | raw | off | plan | off | predicted | measured | right | waited |',
        '|---|---|--:|--:|--:|--:|--:|---|---|---|--:|',
    ]
    for r in (r for r in rows if r['kind'] == 'step'):
        p, m = r['predicted'], r['measured']
        cells = [f'{1e3 * p["alone"]:.1f} / {1e3 * m["alone"]:.1f}']
        for name in ('raw', 'plan'):
            cells += [f'{1e3 * p[name]:.1f} / {1e3 * m[name]:.1f}', f'{p[name] / m[name] - 1:+.0%}']
        ratios = [x['plan'] / x['alone'] for x in (p, m)]
        cells += [f'{ratio:.2f}: {paying(ratio)[3:]}' for ratio in ratios]
        cells += ['yes' if right(*ratios) else '**no**', f'{1 - m["cpu_alone"] / m["alone"]:.0%}']
        lines.append(f'| {r["model"]} | {r["link"]} | {" | ".join(cells)} |')
    return '\n'.join(lines) + '\n'


def main() -> None:
    """Probes, measures row by row, writes the table."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--models', nargs='+', choices=MODELS, default=['digits', 'text_gpt2'])
    ask.add_argument('--links', nargs='+', default=list(LINKS))
    ask.add_argument('--checkpoint', default='', help='SmolLM2-135M as a GGUF file or a folder')
    ask.add_argument('--cores', nargs=2, type=int, default=[0, 1], help='of the two machines')
    ask.add_argument('--change', nargs='*', default=[], help='key=value of all models')
    ask.add_argument('--error', type=float, default=0.1)
    ask.add_argument('--seconds', type=float, default=60, help='of the probe')
    ask.add_argument('--steps', type=int, default=3, help='in each round, at least')
    ask.add_argument('--rounds', type=int, default=3)
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    ask.add_argument('--probe', type=Path, help=argparse.SUPPRESS)
    args = ask.parse_args()
    if args.probe:
        args.probe.write_bytes(pickle.dumps(probe(args.models[0], args)))
        return
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    out = args.out or HERE / 'results' / stem('pays')
    rows = Rows(out.with_suffix('.jsonl'), args.fresh)
    for kept in out.parent.glob(f'{out.name}.*.probe') if args.fresh else ():
        kept.unlink()
    rows.start(cores=args.cores, error=args.error, change=args.change)
    for model in args.models:
        left = [k for k in args.links if not rows.has(kind='step', model=model, link=k)]
        if not left:
            continue
        found = probed_of(model, args, out)
        # Frames as on the internet: of 9,000 bytes the bucket lets a small message pass at once.
        with emulated_network.lab(2, mtu=1500) as lab:
            for link in left:
                rows.add(**row(lab, model, link, found, args))
                out.with_suffix('.md').write_text(table(rows.rows))
                print(table(rows.rows).splitlines()[-1], flush=True)
        out.with_suffix(f'.{model}.probe').unlink()


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
