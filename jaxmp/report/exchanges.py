"""`python -m jaxmp.report.exchanges WORKDIRS --out DIR`: a table of runs with different exchanges.

The command reads finished runs (workdirs, or a folder of their summaries). It writes one JSON file
per run, ``README.md`` with the table, and ``curves.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from jaxmp.config import settings
from jaxmp.report import style

Run = dict[str, Any]
NEAR = 0.005  # of the uncompressed accuracy


def load(folder: Path) -> list[Run]:
    """The runs in ``folder`` that exchanged gradients.

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
    return sorted(runs, key=lambda r: (-r['exchange']['sent'], r['name']))


def table(runs: list[Run]) -> str:
    """A Markdown table: accuracy, NLL, bytes and time of each exchange."""
    heads = ['exchange', 'accuracy, %', 'best (epoch)', 'NLL', 'bytes per step', 'ratio']
    heads += ['server up', 'server down', 'seconds']
    rates = len({r['config']['optimizer']['lr'] for r in runs}) > 1
    heads += ['lr'] * rates
    lines = ['| ' + ' | '.join(heads) + ' |', '|---|' + '--:|' * (len(heads) - 1)]
    for r in runs:
        last, best, e = r['test']['off']['last'], r['test']['off']['best'], r['exchange']
        full = 2 * e['uncompressed'] * (e['replicas'] - 1) // e['replicas']
        cells = [f'`{e["text"]}`', f'{100 * last["accuracy"]:.2f}']
        cells += [f'{100 * best["accuracy"]:.2f} ({best["epoch"]})', f'{last["loss"]:.4f}']
        cells += [f'{e["sent"]:,}', f'{full / e["sent"]:.1f}']
        cells += [f'{e["server"]["up"]:,}', f'{e["server"]["down"]:,}', f'{r["seconds"]:.0f}']
        cells += [f'{r["config"]["optimizer"]["lr"]}'] * rates
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def note(runs: list[Run]) -> str:
    """The settings, commits and hardware of the runs, and a legend of the table."""
    same = lambda values: ', '.join(sorted({str(v) for v in values}))
    keys = ('data.name', 'model.name', 'model.width', 'parallel.replicas', 'epochs', 'batch_size')
    found = [settings(r['config']) for r in runs]
    words = *keys, 'optimizer.lr', 'optimizer.momentum'
    setting = ', '.join(f'{k} {same(c[k] for c in found)}' for k in words)
    return (
        f'{setting} (batch over all replicas); {same(r["parameters"] for r in runs)} parameters; '
        f'seeds {same(r["seed"] for r in runs)}; commit {same(r["commit"] for r in runs)}; '
        f'{same(r["hardware"] for r in runs)}. Accuracy and NLL: test, last epoch. *bytes per '
        'step*: bytes that a replica sends on a ring, from the operands of the compiled '
        'collectives; *ratio*: float32 by all-reduce over these; *server*: the same messages over '
        'a parameter server; *seconds*: wall time of training and tests.'
    )


def draw(runs: list[Run], path: Path) -> None:
    """Draws test error and NLL by epoch, in the order of the last error."""
    runs = sorted(runs, key=lambda r: -r['history']['off']['accuracy'][-1])
    with style.style():
        figure = style.figure(12, 5)
        axes = figure.subplots(1, 2)
        for i, r in enumerate(runs):
            off, text = r['history']['off'], r['exchange']['text']
            epochs = range(1, 1 + len(off['loss']))
            kind = {'marker': 'o^svDPX*'[i % 8], 'ms': 3, 'lw': 1}
            kind |= {'color': style.FAMILIES[style.family(text)]}
            error = [100 * (1 - a) for a in off['accuracy']]
            axes[0].plot(epochs, error, label=f'{style.exchange(text)}: {error[-1]:.2f}', **kind)
            axes[1].plot(epochs, off['loss'], **kind)
        axes[0].set(title='test error', ylabel='error (%), logarithmic')
        axes[1].set(title='test NLL', ylabel='NLL (nats), logarithmic')
        for a in axes:
            a.set(xlabel='epoch')
            style.logarithmic(a)
        best = style.exchange(runs[0]['exchange']['text'])
        figure.suptitle(f'Lowest error in the last epoch: {best}', fontsize=11)
        figure.legend(loc='outside right center', fontsize=7, title='last error (%)')
        counts = {sum(o['name'] == r['name'] for o in runs) for r in runs}
        style.caption(figure, f'n = {" or ".join(map(str, sorted(counts)))} run per exchange')
        style.save(figure, path)


def main(argv: list[str] | None = None) -> None:
    """Runs the command: reads finished runs, writes their table, picture and JSON files."""
    ask = argparse.ArgumentParser(prog='python -m jaxmp.report.exchanges')
    ask.add_argument('folder', type=Path, help='folder of workdirs, or an earlier --out')
    ask.add_argument('--out', type=Path, required=True, help='folder of the report')
    args = ask.parse_args(argv)
    try:
        runs = load(args.folder)
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f'jaxmp.report.exchanges: {error}')
    for r in runs:
        (args.out / f'{r["name"]}.json').write_text(json.dumps(r, indent=1) + '\n')
    text = '\n'.join([table(runs), '', note(runs), ''])
    (args.out / 'README.md').write_text(f'# Exchanges of gradients\n\n{text}\n![](curves.png)\n')
    draw(runs, args.out / 'curves.png')
    print(text)


if __name__ == '__main__':
    main()
