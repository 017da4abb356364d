"""One run's curves: training loss, and test accuracy with compression off and on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def draw(path: Path, records: Sequence[Mapping[str, Any]], config: Mapping[str, Any]) -> None:
    """Draws the curves of a run as a PNG file.

    Args:
      path: of the picture.
      records: of ``metrics.jsonl``.
      config: of ``config.json``.
    """
    from matplotlib.figure import Figure  # no pyplot: no global state, no display

    text = 'sequence_length' in config
    train = [r for r in records if r['kind'] == 'train']
    test = [r for r in records if r['kind'] == 'test']
    figure = Figure(figsize=(9, 3.6), layout='constrained')
    left, right = figure.subplots(1, 2)
    left.plot([r['epoch'] for r in train], [r['loss'] for r in train], color='black')
    left.set(title='Training loss', xlabel='epoch', ylabel='cross-entropy (nats)', yscale='log')
    for mode, style in (('off', '--'), ('on', '-')):
        epochs = [r['epoch'] for r in test if r['compression'] == mode]
        rows = [r for r in test if r['compression'] == mode]
        values = [math.exp(r['loss']) if text else 100 * r['accuracy'] for r in rows]
        right.plot(epochs, values, style, marker='.', label=f'compression {mode}')
    right.set(title='Validation', ylabel='perplexity') if text else right.set(
        title='Test accuracy', ylabel='%'
    )
    right.set(xlabel='epoch')
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(f'{config["name"]}\nfwd {config["fwd"]}   bwd {config["bwd"]}', fontsize=10)
    figure.savefig(path, dpi=120, format='png')
