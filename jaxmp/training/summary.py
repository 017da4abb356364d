"""Summary of a run: best and last scores, curves, bytes, provenance; the tables at the end."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from jaxtyping import PyTree
from rich.table import Table

from jaxmp import terminal
from jaxmp.config import Config, Summary, flat
from jaxmp.metrics import (
    PERCENT,
    Metric,
    by_phases,
    epochs_of,
    of_summary,
    to_summary,
    warmup_of,
)
from jaxmp.pictures import curves, style
from jaxmp.training import footprint, profile
from jaxmp.training.across import Traffic
from jaxmp.training.experiment import Experiment
from jaxmp.training.fingerprint import exported
from jaxmp.training.footprint import GIB
from jaxmp.training.resume import Place
from jaxmp.training.sizes import message_bytes, parameters, phase_bytes, table_bytes
from jaxmp.training.workdir.locks import WorkdirError, replacing, write_json
from jaxmp.training.workdir.trackers import Record

if TYPE_CHECKING:
    from jaxmp.training.loop import Run

Columns = dict[str, list[float]]  # step, epoch and scores of a run's tests, or of its training
Tests = Mapping[str, Mapping[str, float]]  # scores, with compression 'off' and 'on'
BYTES = 'boundary', 'uncompressed', 'forward', 'forward ratio', 'backward', 'backward ratio'


def finish(
    exp: Experiment,
    steps: int,
    place: Place,
    records: list[Record],
    moved: Traffic,
    workdir: Path,
) -> Summary:
    """Writes and returns the summary of a run, ``summary.json``.

    Raises:
      WorkdirError: if the records are missing, or the file cannot be written.
    """
    metric, config = exp.task.metric, exp.config.to_dict()
    for mode in ('off', 'on'):
        if not any(r['step'] for r in rows_of(records, mode)):
            raise WorkdirError(
                f'{workdir / "metrics.jsonl"} has no test records of this run; restore the file, '
                'or give a new --workdir'
            )
    summary = {
        **{k: exp.config[k] for k in ('name', 'fwd', 'bwd', 'seed')},
        **to_summary(metric),
        'test': best_and_last(records, metric, warmup_of(config)),
        'history': history(records, exp.task.scores),
        'bytes': message_bytes(exp),
        'state_of': [b.fwd.state_of for b in exp.model.boundaries],
        'phases': phase_bytes(exp),
        **table_bytes(exp),
        **moved,
        'parameters': parameters(exp),
        'steps': steps,
        'epochs': exp.points.epochs_at(steps),
        **({'kept': exp.kept} if exp.kept else {}),
        'seconds': round(place['seconds'], 1),
        'peak_memory': footprint.status('VmHWM'),
        **provenance(),
        # The folder of the data does not affect the run, and would disclose paths of the machine.
        'config': {**config, 'data': {k: v for k, v in config['data'].items() if k != 'dir'}},
    }
    write_json(workdir / 'summary.json', summary)
    return summary


def recipe(config: Config) -> str:
    """A line with how a model of one's own is trained, whose settings no file of ours has chosen.

    >>> from jaxmp.config import default
    >>> recipe(default())
    'trains with fwd=raw bwd=raw epochs=15 batch_size=64 optimizer.name=sgd optimizer.lr=0.02 \
optimizer.schedule=constant optimizer.momentum=0.0'
    """
    values = flat(config.to_dict())
    parts = ['name', 'lr', 'schedule', *(['momentum'] if config.optimizer.name == 'sgd' else [])]
    length = 'steps' if config.steps else 'epochs'
    keys = ['fwd', 'bwd', length, 'batch_size', *(f'optimizer.{part}' for part in parts)]
    return 'trains with ' + ' '.join(f'{k}={values[k]}' for k in keys)


def conclude(r: Run, summary: Summary, weights: PyTree, quiet: bool, draw: bool) -> None:
    """Leaves the model and the curves of a run beside its summary, and shows its tables.

    Args:
      r: the run.
      summary: of the run.
      weights: variables of all stages.
      quiet: show and draw nothing.
      draw: whether the curves are drawn.
    """
    if r.exp.task.export:
        with replacing(r.workdir / 'model') as folder:
            r.exp.task.export(str(folder), weights)
        summary['exported'] = exported(r.workdir / 'model')
        write_json(r.workdir / 'summary.json', summary)
    if quiet:
        return
    terminal.show(*tables(summary))
    if r.exp.config.parallel.profile:
        profile.show(r.workdir)
    if said := r.trainer.announced:
        on_device = (jax.local_devices()[0].memory_stats() or {}).get('peak_bytes_in_use')
        most = on_device or footprint.status('VmHWM')
        terminal.show(
            f'memory of this process: {most / GIB:.2f} GiB at its peak; {said / GIB:.2f} '
            'were foreseen, without what XLA compiles and its temporary arrays'
        )
    if draw:
        figure = curves.draw(r.records.records, summary)
        for end in ('png', 'svg'):
            with replacing(r.workdir / f'curves.{end}') as part:
                style.write(figure, part, end)
    terminal.show(f'{summary["seconds"]} s; summary{" and curves" * draw}: {r.workdir}')


def best_and_last(
    records: list[Record], metric: Metric, warmup: int
) -> dict[str, dict[str, Record]]:
    """The best and the last scores with compression off and on, without the epochs of the warm-up.

    Those of pretrained weights, at step 0, are neither, but ``before``.

    >>> on = {'kind': 'test', 'compression': 'on'}
    >>> rows = [{**on, 'step': e, 'epoch': e, 'loss': l, 'accuracy': a}
    ...         for e, l, a in ((0, 0, 1), (1, 0.1, 0.9), (2, 0.3, 0.7), (3, 0.4, 0.6))]
    >>> off = [{**r, 'compression': 'off'} for r in rows]
    >>> from jaxmp.metrics import ACCURACY
    >>> best_and_last(rows + off, ACCURACY, warmup=1)['on']['best']
    {'epoch': 2, 'loss': 0.3, 'accuracy': 0.7}
    """
    tests = {}
    scores = lambda r: {k: v for k, v in r.items() if k not in ('kind', 'step', 'compression')}
    for mode in ('off', 'on'):
        rows = rows_of(records, mode)
        before, trained = ([r for r in rows if bool(r['step']) == t] for t in (False, True))
        after = [r for r in trained if r['epoch'] > warmup] or trained
        best = max(after, key=metric.rank)
        tests[mode] = {'best': scores(best), 'last': scores(rows[-1])}
        tests[mode] |= {'before': scores(before[0])} if before else {}
    return tests


def rows_of(records: list[Record], mode: str) -> list[Record]:
    """The tests with compression ``'off'`` or ``'on'``."""
    return [r for r in records if r['kind'] == 'test' and r['compression'] == mode]


def history(records: list[Record], names: Sequence[str]) -> dict[str, Columns | dict[str, Columns]]:
    """The curves of a run: step, epoch and scores in training and in its tests off and on.

    >>> history([{'kind': 'train', 'step': 9, 'epoch': 1, 'loss': 2.0}], ['loss'])['train']
    {'step': [9], 'epoch': [1], 'loss': [2.0]}
    """

    def columns(rows: list[Record]) -> Columns:
        return {k: [round(r[k], 6) for r in rows] for k in ('step', 'epoch', *names)}

    modes = {m: columns([r for r in rows_of(records, m) if r['step']]) for m in ('off', 'on')}
    return {'train': columns([r for r in records if r['kind'] == 'train']), **modes}


def provenance() -> dict[str, Any]:
    """Commit, hardware and versions that produced a result."""
    import jaxmp

    device = jax.devices()[0]
    kind = _cpu() if device.platform == 'cpu' else device.device_kind
    versions = {'jaxmp': jaxmp.__version__, 'jax': jax.__version__}
    versions['python'] = platform.python_version()
    count = len(os.sched_getaffinity(0)) if device.platform == 'cpu' else len(jax.devices())
    return {'commit': _commit(), 'hardware': f'{count} x {kind}', 'versions': versions}


def _cpu() -> str:
    try:
        lines = Path('/proc/cpuinfo').read_text().splitlines()
        return next(l.split(':', 1)[1].strip() for l in lines if l.startswith('model name'))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    root = Path(__file__).parents[2]
    ask = ['git', '-C', str(root), 'describe', '--always', '--dirty', '--exclude=*', '--abbrev=12']
    try:
        done = subprocess.run(ask, capture_output=True, text=True, timeout=10, check=True)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def costs(tests: Tests, config: Config) -> str:
    """A line for channels that cost pretrained weights more than `PERCENT` of their perplexity."""
    lost = tests['on'].get('loss', math.nan) - tests['off'].get('loss', math.nan)
    percent = 100 * math.expm1(min(lost, 700.0)) if math.isfinite(lost) else math.inf
    if not percent > PERCENT:
        return ''
    return (
        f'config.fwd={config.fwd!r} adds {percent:.2g} % to the perplexity of these weights before '
        'training. Codecs that add less are named by `jaxmp evaluate '
        f'{config.model.path} --text=FILE --predict`'
    )


def said(tests: Tests, exp: Experiment) -> str:
    """The scores of a test, as a line has them."""
    metric, labels = exp.task.metric, modes(len(exp.task.stages) - 1, exp.config)
    shown = [f'{label} {metric.format(tests[m])}'.strip() for m, label in labels.items()]
    return f'{metric.name} {"  ".join(shown)}'


def modes(boundaries: int, channels: Mapping[str, str]) -> dict[str, str]:
    """The labels of the tests that are shown: off and on, or one if nothing is compressed.

    Args:
      boundaries: number of boundaries.
      channels: the texts ``fwd`` and ``bwd``.

    >>> modes(1, {'fwd': 'raw', 'bwd': 'ef(top_k(0.1))'}), modes(1, {'fwd': 'raw', 'bwd': 'raw'})
    ({'off': 'off', 'on': 'on'}, {'on': ''})
    """
    alike = not boundaries or {channels['fwd'], channels['bwd']} == {'raw'}
    return {'on': ''} if alike else {'off': 'off', 'on': 'on'}


def tables(summary: Summary) -> list[Table]:
    """The tables of a summary: scores off and on, and bytes at each boundary."""
    shared = f', exchange {summary["exchange"]["text"]}' if 'exchange' in summary else ''
    scores = Table(title=f'{summary["name"]}: fwd {summary["fwd"]}, bwd {summary["bwd"]}{shared}')
    metric = of_summary(summary)
    before = ['before training'] if 'before' in summary['test']['on'] else []
    unit, each = '(epoch)', 1.0
    if summary['config'].get('steps'):  # its length was given in steps
        unit, each = '(step)', summary['steps'] / epochs_of(summary)
    heads = f'{metric.name} best', unit, f'{metric.name} last', 'loss last'
    for head in ('compression', *before, *heads):
        scores.add_column(head, justify='right')
    for mode, label in modes(len(summary['bytes']), summary).items():
        tests = summary['test'][mode]
        best, last = tests['best'], tests['last']
        row = metric.format(best), f'{best["epoch"] * each:.6g}', metric.format(last)
        first = [metric.format(tests['before'])] if before else []
        scores.add_row(label or 'none', *first, *row, f'{last["loss"]:.4f}')
    size = Table(title='bytes per step')
    for head in BYTES:
        size.add_column(head, justify='right')
    tied = [{'boundary': 'token table', **summary['tied']}] if 'tied' in summary else []
    for row in (*summary['bytes'], *tied):
        size.add_row(*byte_cells(row))
    if texts := _phases(summary):
        size.title = f'bytes per step; {texts}'
    if 'exchange' in summary:
        _add_exchange(size, summary['exchange'], summary['processes'])
    links = [_moved(summary)] if 'moved' in summary and summary['processes'] > 1 else []
    return [scores, size, *links]


def byte_cells(row: Traffic) -> tuple[str, ...]:
    """The cells under `BYTES` of a row of `jaxmp.training.sizes.message_bytes`.

    >>> byte_cells({'boundary': 1, 'uncompressed': 4096, 'forward': 1024, 'backward': 2048})
    ('1', '4,096', '1,024', '4.00', '2,048', '2.00')
    >>> byte_cells({'boundary': 1, 'uncompressed': 4096, 'forward': 1024, 'backward': 0})[-2:]
    ('0', '')
    """
    full = row['uncompressed']
    cells = lambda sent: (f'{sent:,}', f'{full / sent:.2f}' if sent else '')
    return str(row['boundary']), f'{full:,}', *cells(row['forward']), *cells(row['backward'])


def _phases(summary: Summary) -> str:
    """The phases of a run and the bytes that it sent at its boundaries; empty without phases."""
    epochs, steps = epochs_of(summary), summary['steps']
    sent = sum(r['forward'] + r['backward'] for r in summary['bytes'])
    full = sum(2 * r['uncompressed'] for r in summary['bytes'])
    if not summary.get('phases') or not full:  # older runs have none
        return ''
    texts = [f'{p["codec"]} in epochs {p["start"] + 1} to {p["stop"]}' for p in summary['phases']]
    mean = sent + by_phases(summary, epochs) / epochs
    total = f'over the run {round(mean * steps):,}, ratio {full / mean:.2f}'
    return '; '.join([*texts, total])


def _add_exchange(size: Table, exchange: Traffic, processes: int) -> None:
    """Adds the bytes that one replica sends for its gradient: on a ring and by a server."""
    n, full, server = exchange['replicas'], exchange['uncompressed'], exchange['server']
    ring = 2 * full * (n - 1) // n
    sent = f'{exchange["sent"]:,}', f'{ring / exchange["sent"]:.2f}'
    size.add_row('gradients, ring', f'{ring:,}', *sent, '', '')
    cells = (c for way in ('up', 'down') for c in (f'{server[way]:,}', f'{full / server[way]:.2f}'))
    size.add_row('gradients, server', f'{full:,}', *cells)
    where = f' in {processes} processes' if processes > 1 else ''
    size.caption = (
        f'of each of {n} replicas{where}; gradients by {exchange["text"]}; server: up, down'
    )


def _moved(summary: Summary) -> Table:
    """A table of bytes per link: payload, and operands of the compiled collectives."""
    sent = f'{summary["interface"]:,} bytes a step' if summary['interface'] else 'not known'
    table = Table(
        title=f'bytes per step over {summary["processes"]} processes',
        caption=f'for comparison, from all programs on the machine of process 0: {sent}',
    )
    heads = [
        f'{what} {way}' for what in ('payload', 'collectives') for way in ('forward', 'backward')
    ]
    for head in ('link', *heads):
        table.add_column(head, justify='right')
    for row in summary['moved']:
        cells = [*row['payload'], *row['collectives']]
        table.add_row(str(row['boundary']), *(f'{n:,}' for n in cells))
    return table
