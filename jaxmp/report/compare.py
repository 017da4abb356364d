"""Several runs side by side: a table, and accuracy against the bits an element costs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

Summary = dict[str, Any]


def load(folder: Path) -> list[Summary]:
    """Every summary in ``folder``: its ``*.json``, and the summary.json of folders in it.

    Raises:
      FileNotFoundError: if there is none.
    """
    paths = sorted([*folder.glob('*.json'), *folder.glob('*/summary.json')])
    found = [json.loads(p.read_text()) for p in paths]
    found = [s for s in found if 'test' in s and 'bytes' in s]
    if not found:
        raise FileNotFoundError(
            f'{folder} holds no summary.json of a finished run; give the --workdir of runs, or the '
            'folder that holds them'
        )
    return sorted(found, key=lambda s: -s['test']['on']['last']['accuracy'])


def bits_an_element(summary: Summary) -> float:
    """Mean bits an element over both directions and all boundaries, of 32 uncompressed."""
    full = sum(row['uncompressed'] for row in summary['bytes'])
    sent = sum(row['forward'] + row['backward'] for row in summary['bytes'])
    return 32 * sent / (2 * full)


def table(summaries: list[Summary]) -> str:
    """A Markdown table: best epoch (the paper's protocol) and last epoch, off and on.

    The standard error is that of a proportion over the test images, one seed: the spread between
    seeds is not in it.
    """
    heads = ['run', 'forward', 'backward', 'bits / element']
    heads += [f'{which} {mode}, %' for which in ('best', 'last') for mode in ('off', 'on')]
    lines = ['| ' + ' | '.join(heads) + ' |', '|---|---|---|' + '--:|' * 5]
    for s in summaries:
        cells = [s['name'], f'`{s["fwd"]}`', f'`{s["bwd"]}`', f'{bits_an_element(s):.2f}']
        cells += [
            f'{100 * s["test"][m][w]["accuracy"]:.2f}'
            for w in ('best', 'last')
            for m in ('off', 'on')
        ]
        lines.append('| ' + ' | '.join(cells) + ' |')
    return '\n'.join([*lines, '', note(summaries)])


def note(summaries: list[Summary]) -> str:
    """Where the numbers are from: commits, hardware, seeds, setting."""
    same = lambda key: ', '.join(sorted({str(s[key]) for s in summaries}))
    config = summaries[0]['config']
    words = ('data', 'train_examples', 'model', 'width', 'epochs', 'batch_size', 'lr')
    setting = ', '.join(f'{k} {config[k]}' for k in words)
    return (
        f'{setting}; seeds {same("seed")}; commit {same("commit")}; {same("hardware")}. '
        '*off* / *on*: boundaries open, or compressed, at the test; *best*: over epochs, off and '
        'on each their own (the protocol of the paper); *last*: the last epoch.'
    )


def draw(summaries: list[Summary], path: Path) -> None:
    """Accuracy of the last epoch against bits an element, compression off and on."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout='constrained')
    axes = figure.subplots()
    for s in summaries:
        x = bits_an_element(s)
        off, on = (100 * s['test'][m]['last']['accuracy'] for m in ('off', 'on'))
        axes.plot([x, x], [off, on], color='0.7', zorder=1)
        axes.plot(x, off, 'o', mfc='white', color='tab:blue', zorder=2)
        axes.plot(x, on, 'o', color='tab:orange', zorder=3)
        axes.annotate(s['name'], (x, on), xytext=(7, 2), textcoords='offset points', fontsize=8)
    axes.plot([], [], 'o', color='tab:orange', label='compression on')
    axes.plot([], [], 'o', mfc='white', color='tab:blue', label='compression off')
    axes.set_xscale('log', base=2)
    high = max(map(bits_an_element, summaries))
    low = min(map(bits_an_element, summaries))
    ticks = [2.0**i for i in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    axes.set_xticks(ticks, [f'{t:g}' for t in ticks])
    axes.set_xlim(low / 1.2, high * 1.6)
    axes.set(xlabel='bits an element on the wire, mean of both directions')
    axes.set(ylabel='test accuracy, last epoch (%)')
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=130)
