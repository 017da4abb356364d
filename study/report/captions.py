"""What a picture says of its rows: names, number of seeds, training steps."""

from __future__ import annotations

from collections.abc import Sequence

from jaxmp.metrics import warmup_of
from jaxmp.pictures import style
from study.report.residuals import CONFIDENCE
from study.report.results import Row, difference, model_of

MARK = '\N{DAGGER}'  # of a row whose codec was mended after its runs
INTERVALS = (
    f'{100 * CONFIDENCE:g} % intervals of the mean over seeds (Student; rows that agree share a '
    'deviation), cut at the axes'
)


def text_of(row: Row) -> str:
    """The text of a row's exchange, or of the first of its channels that compresses."""
    run = row.runs[0]
    if 'exchange' in run:
        return run['exchange']['text']
    return run['bwd' if style.family(run['fwd']) == 'no compression' else 'fwd']


def names(rows: Sequence[Row]) -> list[str]:
    """Rows in words; rows that have the same words also have their names, mended ones a mark."""
    said = []
    for row in rows:
        run = row.runs[0]
        warmup = warmup_of(run['config'])
        pair = run['fwd'], run['bwd'], warmup
        name = style.exchange(text_of(row)) if 'exchange' in run else style.human(*pair)
        before = [p['codec'] for p in run.get('phases', ()) if p['start'] >= warmup]
        name = ', then '.join([*(style.human(*sides(text)) for text in before), name])
        said.append(''.join([name, *helped(row)]))
    apart = [f' ({r.name})' * (said.count(s) > 1) for s, r in zip(said, rows, strict=True)]
    marks = [f' {MARK}' * bool(r.mended) for r in rows]
    return [''.join(parts) for parts in zip(said, apart, marks, strict=True)]


def helped(row: Row) -> list[str]:
    """What the model of a row has that serves compression, in words."""
    model, found = row.runs[0]['config']['model'], []
    if count := model.get('bottleneck'):
        found.append(f', {count} learned channels')
    if model.get('embed_every_stage'):
        found.append(', tokens at every stage')
    return found


def note(rows: Sequence[Row]) -> str:
    """What the mark of a row means, after a semicolon; empty if no row has it."""
    return f'; {MARK} its codec was mended after these runs' * any(r.mended for r in rows)


def sides(phase: str) -> tuple[str, str]:
    """The texts forward and backward of a phase.

    >>> sides('uniform(2)'), sides('block(2) & raw | fp16')
    (('uniform(2)', 'uniform(2)'), ('block(2); raw', 'fp16'))
    """
    fwd, _, bwd = (text.strip().replace(' &', ';') for text in phase.partition('|'))
    return fwd, bwd or fwd


def trained(rows: Sequence[Row]) -> str:
    """How long the runs were trained."""
    steps = sorted({r['steps'] for row in rows for r in row.runs})
    return f'{" or ".join(f"{s:,}" for s in steps)} steps'


def task(rows: Sequence[Row]) -> str:
    """The model and the data of the rows, as configurations name them."""
    pairs = [(model_of(r), r['config']['data']['name']) for row in rows for r in row.runs]
    return ', '.join(f'{model} on {data}' for model, data in dict.fromkeys(pairs))


def seeds(rows: Sequence[Row]) -> str:
    """The number of seeds of the rows, and what bars are if there are several."""
    counts = sorted({len(row.runs) for row in rows})
    if counts == [1]:
        return 'n = 1 seed, so no intervals'
    return f'n = {" or ".join(map(str, counts))} seeds; bars: {INTERVALS}'


def reference(rows: Sequence[Row], of: Row | None = None) -> Row | None:
    """The row without compression, whose model has nothing that serves compression either.

    Args:
      rows: of a study.
      of: a row; then the one whose model has the same embeddings, if there is one.
    """
    model = lambda r: r.runs[0]['config']['model']
    embeds = lambda r: bool(model(r).get('embed_every_stage'))
    plain = [r for r in rows if style.family(text_of(r)) == 'no compression']
    alike = [r for r in plain if of is not None and embeds(r) == embeds(of)]
    return min(alike or plain, key=lambda r: len(helped(r)), default=None)


def apart(row: Row, none: Row, name: str) -> str:
    """How far a row ends from no compression, with an interval if there are several seeds."""
    unit, e = 'nats' if row.measure == 'perplexity' else 'points', difference(row, none)
    if e is None:
        return name
    known = f' [{e.low:+.2f}, {e.high:+.2f}]' if e.seeds > 1 else ''
    return f'{name}: {e.mean:+.2f}{known} {unit}'
