"""`jaxmp compare RUN ... [--out PICTURE]`: a table and a picture of any runs, finished or not.

A run is a workdir, its ``summary.json``, or a result of a sweep. A folder of a sweep's results is
shown by row: the mean over its seeds, with a standard error. The picture has the training loss,
the test metric with compression on (line) and off (dashes), and the metric against the bytes that
are sent per step. It is written as PNG and as SVG.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxmp import terminal
from jaxmp.config import KEYS, Summary, flat, reads_text, settings
from jaxmp.metrics import ACCURACY, METRICS, Metric, epochs_of, of_summary, positions
from jaxmp.pictures import style
from jaxmp.pictures.curves import sent, unit, value

if TYPE_CHECKING:
    from rich.table import Table


Columns = dict[str, dict[str, Sequence[float]]]  # by part (train, off, on) and score
UNSAID = ('name', 'epochs', 'steps', 'eval_every')  # settings that labels leave out
PARTS = 'train', 'off', 'on'
LINE, SHORT = (
    165,
    75,
)  # letters: of a label's line in the picture, and of one that leaves room for two


def load(path: Path) -> Summary:
    """The summary of a run, or the part of it that exists if the run has not ended.

    Raises:
      ValueError: if ``path`` is not a run, or is a run of an older version.
    """
    file = path / 'summary.json' if path.is_dir() else path
    try:
        summary = json.loads(file.read_text()) if file.is_file() else begun(path)
    except (OSError, ValueError) as error:
        near = terminal.near_file(str(path))
        raise ValueError(
            f'{path} is not a run: {error}{near}; give workdirs or result files'
        ) from None
    if not isinstance(summary, dict) or not {'config', 'history'} <= summary.keys():
        raise ValueError(f'{file} is not the result of a run; give workdirs or result files')
    if flat(summary['config']) == summary['config']:
        file = file if file.is_file() else path / 'config.json'
        raise ValueError(
            f'{file} is of an older version; convert it with python results/migrate.py {file}'
        )
    try:
        settings(summary['config'])
    except ValueError as error:
        raise ValueError(
            f'{file}: {error}; convert it with python results/migrate.py {file}'
        ) from None
    return summary


def study(folder: Path) -> dict[str, Summary]:
    """The rows of a folder with a sweep's results, each the mean of its seeds; empty of another.

    Raises:
      ValueError: if a file is no result.
    """
    by_row: dict[str, list[Summary]] = {}
    for file in sorted(folder.glob('*-s*.json')) if folder.is_dir() else ():
        by_row.setdefault(file.stem.rpartition('-s')[0], []).append(load(file))
    return {f'{folder / row}': mean_of(runs) for row, runs in by_row.items()}


def mean_of(runs: Sequence[Summary]) -> Summary:
    """Runs of one row as one run, whose curves are the means over seeds.

    The key ``errors`` has the standard error of each last score, by part.
    """
    history: dict[str, dict[str, list[float]]] = {}
    errors: dict[str, dict[str, float]] = {}
    for part in PARTS:
        history[part], errors[part] = {}, {}
        for score in runs[0]['history'][part]:
            curves = [run['history'][part][score] for run in runs]
            length = min(map(len, curves))
            history[part][score] = np.mean([c[:length] for c in curves], axis=0).tolist()
            if len(runs) > 1 and length:
                deviation = np.std([c[length - 1] for c in curves], ddof=1)
                errors[part][score] = float(deviation / len(runs) ** 0.5)
    seconds = sum(run['seconds'] for run in runs)
    return {**runs[0], 'history': history, 'errors': errors, 'seeds': len(runs), 'seconds': seconds}


def begun(workdir: Path) -> Summary:
    """The configuration and the records so far of a run that has not ended."""
    config = json.loads((workdir / 'config.json').read_text())
    if not isinstance(config, dict):
        raise ValueError('its config.json has no settings')
    lines = (workdir / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines if line.endswith('}')]
    records = [r for r in records if r['step']]  # not what was pretrained, as in a summary
    parts = {'train': [r for r in records if r['kind'] == 'train']}
    for mode in PARTS[1:]:
        parts[mode] = [r for r in records if r['kind'] == 'test' and r['compression'] == mode]
    first = next((rows[0] for rows in parts.values() if rows), {})
    names = [k for k in first if k not in ('kind', 'compression', 'seconds')]
    history = {part: {k: [r[k] for r in rows] for k in names} for part, rows in parts.items()}
    saved = [p.name for p in (workdir / 'checkpoints').glob('*')]
    values = settings(config)  # of an older version too
    usual = 'perplexity' if reads_text(config) else 'accuracy'
    name = values['metric'].rpartition(':')[2]  # a Metric may have another name than its variable
    scored = {*names, *(m.name for m in METRICS.values() if m.score in names)}
    return {
        'config': config,
        'history': history,
        'saved': max((int(n) for n in saved if n.isdigit()), default=0),
        'measure': next((m for m in (name or usual, usual) if m in scored or not names), 'loss'),
    }


def length(run: Summary) -> str:
    """How long a run has trained until its end, its last record or its last checkpoint."""
    train = run['history']['train']
    tested, epoch = ((train.get(k) or [0])[-1] for k in ('step', 'epoch'))
    if 'steps' in run:
        made, epochs = run['steps'], epochs_of(run)
    else:
        made = max(tested, run['saved'])
        epochs = made * epoch / tested if tested else 0  # before the first test it is not known
    if run['config'].get('steps') or not epochs:
        return f'{made:,} steps'
    return f'{epochs:.4g} epoch{"s" * (epochs != 1)}'


def labelled(runs: Mapping[str, Summary]) -> dict[str, Summary]:
    """Runs by their paths, as typed, and the settings in which those of the same name differ."""
    values = {path: settings(run['config']) for path, run in runs.items()}
    labels = {}
    for path, config in values.items():
        alike = [v for v in values.values() if v['name'] == config['name']]
        differ = [k for k in config if len({str(v.get(k)) for v in alike}) > 1 and k not in UNSAID]
        said = (f'{short(k)} {config[k] if config[k] != "" else "none"}' for k in differ)
        labels[', '.join([path, *said])] = runs[path]
    return labels


def curves_of(run: Summary) -> Columns:
    """The scores of a run by part, and the step and the epoch of each."""
    units = 'step', 'epoch'
    return {p: {**run['history'][p], **{u: positions(run, p, u) for u in units}} for p in PARTS}


def short(key: str) -> str:
    """The last word of a key, or all of a key whose last word other keys have too.

    >>> short('optimizer.lr'), short('model.name')
    ('lr', 'model.name')
    """
    word = key.rpartition('.')[2]
    count = Counter(k.rpartition('.')[2] for k in KEYS)
    return word if count[word] == 1 else key


def last(run: Summary, part: str) -> dict[str, float]:
    """The last scores in a part of the curves; empty before the first."""
    return {k: v[-1] for k, v in curves_of(run)[part].items() if v}


def table(runs: Mapping[str, Summary]) -> Table:
    """Last scores, bytes and time of each run."""
    from rich.table import Table

    grid = Table(title=f'{len(runs)} runs, scores of the last test')
    grid.add_column('run', overflow='fold')
    for head in ('length', 'metric', 'off', 'on', 'train loss', 'bytes per step', 'ratio', 'time'):
        grid.add_column(head, justify='right')
    for label, r in runs.items():
        metric, ends = of_summary(r), {m: last(r, m) for m in PARTS}
        tests = [metric.format(ends[m]) if ends[m] else '' for m in ('off', 'on')]
        if 'seeds' in r:
            spread = [error(metric, ends[m], r['errors'][m]) for m in ('off', 'on')]
            tests = [a + b for a, b in zip(tests, spread, strict=True)]
            label = f'{label} ({r["seeds"]} seed{"s" * (r["seeds"] > 1)})'
        loss = f'{ends["train"]["loss"]:.4f}' if ends['train'] else ''
        moved, full = sent(r) if 'bytes' in r else (0, 0)
        sizes = (f'{moved:,}', f'{full / max(moved, 1):.2f}') if 'bytes' in r else ('', '')
        time = f'{r["seconds"]:.0f} s' if 'seconds' in r else 'not ended'
        grid.add_row(label, length(r), metric.name, *tests, loss, *sizes, time)
    return grid


def error(metric: Metric, mean: Mapping[str, float], errors: Mapping[str, float]) -> str:
    """The standard error of a mean in the unit of its axis; empty with one seed."""
    name = metric.score
    if name not in errors:
        return ''
    low, high = (value(metric, {name: mean[name] + s * errors[name]}) for s in (-1, 1))
    return f' ± {(high - low) / 2:.2g}'


def draw(path: Path, runs: Mapping[str, Summary]) -> None:
    """Draws the runs that have the same metric as the first one."""
    first = next(iter(runs.values()))
    metric, x = of_summary(first), unit(first)
    alike = {label: r for label, r in runs.items() if of_summary(r).name == metric.name}
    columns = 2 if all(len(label) <= SHORT for label in alike) else 1
    labels = {label: textwrap.fill(label, LINE // columns) for label in alike}
    height = sum(label.count('\n') + 1 for label in labels.values()) / columns
    with style.style():
        figure = style.figure(12, 4 + 0.16 * height)
        loss, test, cost = figure.subplots(1, 3)
        for i, (label, r) in enumerate(alike.items()):
            curves = curves_of(r)
            kind = {'color': style.PALETTE[i % 8], 'ls': ('-', '-.', ':')[i // 8 % 3]}
            train = curves['train'].get('loss', [])
            loss.plot(curves['train'][x], train, label=labels[label], **kind)
            for mode, dashes in (('on', {}), ('off', {'ls': (0, (3, 2)), 'alpha': 0.5})):
                scores = curves[mode].get(metric.score, [])
                rows = [value(metric, {metric.score: v}) for v in scores]
                test.plot(curves[mode][x], rows, **{**kind, **dashes})
                if mode == 'on' and rows and 'bytes' in r:
                    cost.plot([sent(r)[0]], rows[-1:], 'o', color=kind['color'])
        loss.set(title='training loss', xlabel=x, ylabel='nats, logarithmic')
        style.logarithmic(loss)
        name = f'test {metric.name}{" (%)" if metric is ACCURACY else ""}'
        test.set(title='test: on (line), off (dashes)', xlabel=x, ylabel=name)
        cost.set(ylabel=name, title='last test, on')
        cost.set(xlabel='bytes per step, logarithmic', xscale='log')
        counts = sorted({r.get('seeds', 1) for r in alike.values()})
        caption = (  # below the axes it would lie over the legend
            f'mean of {counts[0]} to {counts[-1]} runs per line'
            if counts[-1] > 1
            else 'n = 1 run per line, so no intervals'
        )
        key = figure.legend(loc='outside lower left', ncols=columns, fontsize=8, title=caption)
        key.get_title().set(fontsize=8, color='dimgray')
        ends = {label: last(r, 'on') for label, r in alike.items()}
        if tested := [label for label, scores in ends.items() if metric.score in scores]:
            best = max(tested, key=lambda label: metric.rank(ends[label]))
            title = f'Best test {metric.name} at the end: {metric.format(ends[best])}, {best}'
            figure.suptitle(textwrap.fill(title, 100, max_lines=2, placeholder=' ...'))
        style.save(figure, path)


def picture(text: str) -> Path:
    """The path of a picture; its suffix, if any, is one that is written."""
    if Path(text).suffix not in ('', '.png', '.svg'):
        raise argparse.ArgumentTypeError(
            f'{text}: pictures are PNG and SVG; give {Path(text).with_suffix(".png")}'
        )
    return Path(text)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog='jaxmp compare', description=(__doc__ or '').partition('\n\n')[2]
    )
    parser.add_argument(
        'run', type=Path, nargs='+', help='workdirs, result files, or folders of them'
    )
    parser.add_argument(
        '--out', type=picture, default=Path('compare.png'), help='the picture, as PNG and as SVG'
    )
    args = parser.parse_args(argv)
    try:
        runs: dict[str, Summary] = {}
        for path in args.run:
            runs |= study(path) or {str(path): load(path)}
        runs = labelled(runs)
        draw(args.out, runs)
    except (OSError, ValueError) as error:
        sys.exit(f'jaxmp compare: {error}')
    terminal.show(table(runs))
    print(args.out.with_suffix('.png'), args.out.with_suffix('.svg'))
