"""`python -m study.report.exchanges WORKDIRS --out DIR`: a table of runs with different exchanges.

The command reads finished runs (workdirs, or a folder of their summaries). It writes one JSON file
per run, unless DIR contains WORKDIRS, and ``README.md`` with the table, and ``curves.png``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

from jaxmp.config import Summary, settings
from jaxmp.exchange import parse
from jaxmp.metrics import ACCURACY, Metric, Scores, of_summary, positions
from jaxmp.pictures import style
from study.report.residuals import estimate
from study.report.tables import with_error


def load(folder: Path) -> list[Summary]:
    """The runs in ``folder`` that exchanged gradients, by bytes sent, name and seed.

    Raises:
      FileNotFoundError: if there is none.
    """
    paths = sorted([*folder.glob('*.json'), *folder.glob('*/summary.json')])
    runs = [json.loads(p.read_text()) for p in paths]
    runs = [r for r in runs if 'exchange' in r and 'history' in r]
    if not runs:
        raise FileNotFoundError(
            f'{folder} has no finished run with replicas; give the folder of such workdirs'
        )
    return sorted(runs, key=lambda r: (-r['exchange']['sent'], r['name'], r['seed']))


def rows_of(runs: list[Summary]) -> list[list[Summary]]:
    """The runs of each row of the table, which differ in their seeds only."""
    return [list(seeds) for _, seeds in itertools.groupby(runs, key=lambda r: r['name'])]


def table(runs: list[Summary]) -> str:
    """A Markdown table: scores, bytes and time of each exchange."""
    metric, rows = of_summary(runs[0]), rows_of(runs)
    score = 'accuracy, %' if metric is ACCURACY else metric.name
    heads = ['exchange', score, 'best (epoch)', 'NLL', 'bytes per step', 'ratio']
    heads += ['server up', 'server down', 'seconds']
    configs = [settings(seeds[0]['config']) for seeds in rows]
    differ = [k for k in ('optimizer.name', 'optimizer.lr') if len({c[k] for c in configs}) > 1]
    periods = [parse(seeds[0]['exchange']['text']).period for seeds in rows]
    heads += [k.removeprefix('optimizer.').replace('name', 'optimizer') for k in differ]
    heads += ['message per round'] * (max(periods) > 1)
    lines = ['| ' + ' | '.join(heads) + ' |', '|---|' + '--:|' * (len(heads) - 1)]
    for seeds, config, period in zip(rows, configs, periods, strict=True):
        first, e = seeds[0], seeds[0]['exchange']
        last, best = ([r['test']['off'][k] for r in seeds] for k in ('last', 'best'))
        # An all-reduce on a ring sends 2 (n - 1) / n of the gradient from each replica.
        full = 2 * e['uncompressed'] * (e['replicas'] - 1) // e['replicas']
        cells = [f'`{e["text"]}`', _scores(metric, last)]
        epochs = ', '.join(map(str, sorted({b['epoch'] for b in best})))
        cells += [f'{_scores(metric, best)} ({epochs})']
        cells += [with_error(estimate([b['loss'] for b in last]), 4)]
        cells += [f'{e["sent"]:,}', f'{full / e["sent"]:.1f}']
        cells += [f'{e["server"]["up"]:,}', f'{e["server"]["down"]:,}', f'{first["seconds"]:.0f}']
        cells += [f'{config[k]}' for k in differ]
        message = sum(e['handed'].values())
        cells += [f'{period * message:,}'] * (max(periods) > 1)
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def _scores(metric: Metric, of_seeds: list[Scores]) -> str:
    if metric is ACCURACY:
        return with_error(estimate([100 * s['accuracy'] for s in of_seeds]))
    mean = statistics.mean(s[metric.score] for s in of_seeds)
    return metric.format({metric.score: mean})


def note(runs: list[Summary]) -> str:
    """The settings, commits and hardware of the runs, and a legend of the table."""
    same = lambda values: ', '.join(sorted({str(v) for v in values}))
    keys = ('data.name', 'model.name', 'model.width', 'parallel.replicas', 'epochs', 'batch_size')
    configs = [settings(r['config']) for r in runs]
    words = *keys, 'optimizer.lr', 'optimizer.momentum'
    setting = ', '.join(f'{k} {same(c[k] for c in configs)}' for k in words)
    score = 'Accuracy and NLL' if of_summary(runs[0]) is ACCURACY else 'Scores'
    several = len({r['seed'] for r in runs}) > 1
    score += ' (mean and standard error over the seeds)' * several
    rounds = any(parse(r['exchange']['text']).period > 1 for r in runs)
    message = '; *message per round*: bytes that a replica hands over in a round' * rounds
    return (
        f'{setting} (batch over all replicas); {same(r["parameters"] for r in runs)} parameters; '
        f'seeds {same(r["seed"] for r in runs)}; commit {same(r["commit"] for r in runs)}; '
        f'{same(r["hardware"] for r in runs)}. {score}: test, last epoch. *bytes per '
        'step*: bytes that a replica sends on a ring, from the operands of the compiled '
        'collectives; *ratio*: float32 by all-reduce over these; *server*: the same messages over '
        f'a parameter server; *seconds*: wall time of training and tests{message}.'
    )


def draw(runs: list[Summary], path: Path) -> None:
    """Draws scores by epoch, and of accuracies the error and the NLL, in the order of the last."""
    accuracy = of_summary(runs[0]) is ACCURACY
    last = lambda seeds: statistics.mean(r['history']['off']['loss'][-1] for r in seeds)
    if accuracy:
        last = lambda seeds: -statistics.mean(r['history']['off']['accuracy'][-1] for r in seeds)
    rows = sorted(rows_of(runs), key=last)
    with style.style():
        figure = style.figure(12, 5)
        axes = figure.subplots(1, 2)
        for i, seeds in enumerate(rows):
            text = seeds[0]['exchange']['text']
            kind = {'marker': 'o^svDPX*'[i % 8], 'ms': 3, 'lw': 1}
            family = style.FAMILIES[style.family(text)]
            kind |= {'color': family if accuracy else f'C{i}'}
            losses = _mean(seeds, 'loss')
            epochs = positions(seeds[0], 'off', 'epoch')
            if accuracy:  # as errors, since on a logarithmic axis what is near 100 % comes apart
                error = [100 * (1 - a) for a in _mean(seeds, 'accuracy')]
                name = f'{style.exchange(text)}: {error[-1]:.2f}'
                axes[0].plot(epochs, error, label=name, **kind)
                axes[1].plot(epochs, losses, **kind)
            else:
                name = f'{seeds[0]["name"]}, {style.exchange(text)}: {losses[-1]:.3f}'
                axes[0].plot(epochs, losses, label=name, **kind)
                ends = [r['history']['off']['loss'][-1] for r in seeds]
                axes[1].plot([seeds[0]['exchange']['sent']] * len(ends), ends, **{**kind, 'ms': 5})
        axes[0].set(title='test error', ylabel='error (%), logarithmic')
        axes[1].set(title='test NLL', ylabel='NLL (nats), logarithmic', xlabel='epoch')
        if not accuracy:
            axes[0].set(title='test NLL', ylabel='NLL (nats), logarithmic')
            axes[1].set(title='last NLL against bytes, a point per seed', ylabel='NLL (nats)')
            axes[1].set(xlabel='bytes per step that a replica sends, logarithmic', xscale='log')
        axes[0].set(xlabel='epoch')
        for a in axes[: 1 + accuracy]:
            style.logarithmic(a)
        best = rows[0][0]
        best = style.exchange(best['exchange']['text']) if accuracy else best['name']
        what = ('error', 'error (%)') if accuracy else ('NLL', 'NLL')
        figure.suptitle(f'Lowest {what[0]} in the last epoch: {best}', fontsize=11)
        figure.legend(loc='outside right center', fontsize=7, title=f'last {what[1]}')
        counts = ' or '.join(map(str, sorted({len(seeds) for seeds in rows})))
        runs_ = 'run' if counts == '1' else 'runs'
        style.caption(figure, f'n = {counts} {runs_} per exchange')
        style.save(figure, path)


def _mean(seeds: list[Summary], score: str) -> list[float]:
    """The mean over seeds, by epoch."""
    return [
        statistics.mean(v) for v in zip(*(r['history']['off'][score] for r in seeds), strict=True)
    ]


def main(argv: list[str] | None = None) -> None:
    """Runs the command: reads finished runs, writes their table, picture and JSON files."""
    ask = argparse.ArgumentParser(prog='python -m study.report.exchanges')
    ask.add_argument('folder', type=Path, help='folder of workdirs, or an earlier --out')
    ask.add_argument('--out', type=Path, required=True, help='folder of the report')
    args = ask.parse_args(argv)
    try:
        runs = load(args.folder)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f'study.report.exchanges: {error}')
    alone = len({r['name'] for r in runs}) == len(runs)
    inside = args.folder.resolve().is_relative_to(args.out.resolve())
    for r in [] if inside and args.folder.resolve() != args.out.resolve() else runs:
        name = r['name'] if alone else f'{r["name"]}-s{r["seed"]}'
        (args.out / f'{name}.json').write_text(json.dumps(r, indent=1) + '\n')
    text = '\n'.join([table(runs), '', note(runs), ''])
    (args.out / 'README.md').write_text(f'# Exchanges of gradients\n\n{text}\n![](curves.png)\n')
    draw(runs, args.out / 'curves.png')
    print(text)


if __name__ == '__main__':
    main()
