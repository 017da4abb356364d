"""python -m jaxmp.report.exchanges WORKDIRS --out DIR: runs that differ in their exchange.

Reads finished runs (workdirs, or a folder of their summaries), and writes one JSON file a run,
``README.md`` with the table, and ``curves.png``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

Run = dict[str, Any]
NEAR = 0.005  # of the uncompressed accuracy


def load(folder: Path) -> list[Run]:
    """The runs in ``folder`` that exchanged gradients.

    Raises:
      FileNotFoundError: if there is none.
    """
    paths = sorted([*folder.glob('*.json'), *folder.glob('*/summary.json')])
    found = [json.loads(p.read_text()) for p in paths]
    found = [r for r in found if 'exchange' in r and 'history' in r]
    if not found:
        raise FileNotFoundError(
            f'{folder} holds no finished run with replicas; give the folder of such workdirs'
        )
    return sorted(found, key=lambda r: (-r['exchange']['sent'], r['name']))


def table(runs: list[Run]) -> str:
    """A Markdown table: accuracy, NLL, bytes and time of every exchange."""
    heads = ['exchange', 'accuracy, %', 'best (epoch)', 'NLL', 'bytes a step', 'ratio']
    heads += ['server up', 'server down', 'seconds']
    rates = len({r['config']['lr'] for r in runs}) > 1
    heads += ['lr'] * rates
    lines = ['| ' + ' | '.join(heads) + ' |', '|---|' + '--:|' * (len(heads) - 1)]
    for r in runs:
        last, best, e = r['test']['off']['last'], r['test']['off']['best'], r['exchange']
        full = 2 * e['uncompressed'] * (e['replicas'] - 1) // e['replicas']
        cells = [f'`{e["text"]}`', f'{100 * last["accuracy"]:.2f}']
        cells += [f'{100 * best["accuracy"]:.2f} ({best["epoch"]})', f'{last["loss"]:.4f}']
        cells += [f'{e["sent"]:,}', f'{full / e["sent"]:.1f}']
        cells += [f'{e["server"]["up"]:,}', f'{e["server"]["down"]:,}', f'{r["seconds"]:.0f}']
        cells += [f'{r["config"]["lr"]}'] * rates
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def note(runs: list[Run]) -> str:
    """Where the numbers are from."""
    same = lambda values: ', '.join(sorted({str(v) for v in values}))
    words = ('data', 'model', 'width', 'replicas', 'epochs', 'batch_size', 'lr', 'momentum')
    setting = ', '.join(f'{k} {same(r["config"][k] for r in runs)}' for k in words)
    return (
        f'{setting} (batch over all replicas); {same(r["parameters"] for r in runs)} parameters; '
        f'seeds {same(r["seed"] for r in runs)}; commit {same(r["commit"] for r in runs)}; '
        f'{same(r["hardware"] for r in runs)}. Accuracy and NLL: test, last epoch. *bytes a step*: '
        'what a replica sends on a ring, of the messages in the compiled collectives; *ratio*: to '
        'float32 by all-reduce; *server*: the same messages over a parameter server. *seconds*: '
        'wall time of training and tests.'
    )


def draw(runs: list[Run], path: Path) -> None:
    """Test accuracy and NLL by epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout='constrained')
    axes = figure.subplots(1, 2)
    for i, r in enumerate(runs):
        off = r['history']['off']
        epochs = range(1, 1 + len(off['loss']))
        style = {'marker': 'o^sv'[i // 10], 'ms': 3, 'lw': 1, 'color': f'C{i % 10}'}
        error = [100 * (1 - a) for a in off['accuracy']]
        axes[0].plot(epochs, error, label=r['exchange']['text'], **style)
        axes[1].plot(epochs, off['loss'], **style)
    axes[0].set(title='Test error (%)', xlabel='epoch', yscale='log')
    axes[1].set(title='Test NLL (nats)', xlabel='epoch', yscale='log')
    for a in axes:
        a.grid(alpha=0.3, which='both')
    figure.legend(loc='outside right center', fontsize=7)
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> None:
    """Reads finished runs, writes their table, picture and JSON files."""
    ask = argparse.ArgumentParser(prog='python -m jaxmp.report.exchanges')
    ask.add_argument('folder', type=Path, help='a folder of workdirs, or of files made by this')
    ask.add_argument('--out', type=Path, required=True, help='where the report goes')
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
