"""`markdown`: the table of all entries, losers kept; `write` saves it with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jaxmp.config import Summary
from jaxmp.net.speed import parse
from jaxmp.plan.choose import Order
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import write as written
from jaxmp.training.workdir.locks import write_json
from study.bench import picture
from study.bench.entries import DEFAULT, MISSING
from study.bench.protocol import LINK, LINKS, RECORDS, step
from study.bench.rows import NEVER, Row, ranked, record
from study.report.tables import NONE, plain


def markdown(rows: Sequence[Row], link: str, loss: float, origin: Summary) -> str:
    """The table, the test of the event model, and where they were made.

    Args:
      rows: of the entries.
      link: that ranks them.
      loss: of the twin, that counts as learned.
      origin: commit, hardware and versions.
    """
    heads = 'channels, forward; backward', 'as', 'bits', 'above Shannon', 'memcpys', 'steps'
    heads = [*heads, 'last loss', 'step', *LINKS]
    lines = [heads, ['---', '---', *['--:'] * (len(heads) - 2)]]
    lines += [cells(row, link) for row in ranked(rows, link)]
    table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    versions = ', '.join(f'{k} {v}' for k, v in origin['versions'].items())
    return (
        f'# Channels, by predicted time over {link}\n\n{table}\n\n'
        'Bits per element, as compiled, forward / backward; memcpys to encode and decode, forward '
        '/ backward; steps of the eight-stage twin until '
        f'{loss:g} nats per byte over those without compression of the same seed, the mean of the '
        'seeds and their range; its last test loss, and the difference to the loss without '
        f'compression; predicted seconds of a step over {link}; predicted seconds until '
        f"ProtocolNanoGPT's loss over each link.\n\n{MISSING}\n\n{checked()}\n\n"
        f'{origin["hardware"]}, {versions}, commit {origin["commit"]}.\n'
    )


def cells(row: Row, link: str) -> list[str]:
    """A line of the table."""
    fwd, bwd = row.costs
    each_way = lambda one, digits=2: f'{plain(one(fwd), digits)} / {plain(one(bwd), digits)}'
    times = [NEVER if (t := row.seconds(k)) is None else plain(t, 0) for k in LINKS]
    return [
        '; '.join(f'`{text}`' for text in dict.fromkeys(row.entry[:2])),
        DEFAULT.get(row.entry, ''),
        each_way(lambda c: c.bits),
        each_way(lambda c: c.gap),
        each_way(lambda c: c.encode + c.decode, 1),
        trained(row),
        lost(row),
        plain(row.steps[link][0]),
        *times,
    ]


def trained(row: Row) -> str:
    """The ratio of steps, or how many seeds never reach the loss."""
    if row.failed or row.twin is None:
        return f'{NEVER}: {row.failed.partition(":")[0] or "no run"}'
    reached = [r for r in row.twin.ratios if r is not None]
    if row.ratio is None:
        return f'{NEVER} ({len(row.twin.ratios) - len(reached)} of {len(row.twin.ratios)} seeds)'
    spread = f' ({min(reached):.2f} to {max(reached):.2f})' if len(reached) > 1 else ''
    return f'{row.ratio:.2f}{spread}'


def lost(row: Row) -> str:
    """The mean of the last losses, and what they are above those without compression."""
    if row.twin is None or not row.twin.losses:
        return NONE
    mean = lambda values: sum(values) / len(values)
    loss = mean(row.twin.losses)
    return f'{loss:.3f} ({loss - mean(row.twin.raw):+.3f})'


def checked() -> str:
    """The event model beside the published records."""
    texts = []
    for r in RECORDS:
        seconds = step(parse(LINK), (r.way, r.way), Order('1f1b', r.microbatches), r.computing)
        part = f'{seconds:.2f} s for {r.seconds:.2f} s published ({seconds / r.seconds - 1:+.1%})'
        texts.append(f'{r.name} {part}, {r.seconds * r.steps:,.0f} s in all')
    return (
        f'The event model at the two records of ProtocolNanoGPT: {"; ".join(texts)}. So a step is '
        'checked; the ratio of steps is that of the twin at one loss, and no published run checks '
        'it, nor the seconds until the loss.'
    )


def write(rows: Sequence[Row], link: str, loss: float, out: Path) -> str:
    """Saves ``table.md``, ``table.json``, ``time.png`` and ``time.svg``; returns the table."""
    origin = provenance()
    text = markdown(rows, link, loss, origin)
    written(out / 'table.md', text)
    shown = [record(row) for row in ranked(rows, link)]
    write_json(out / 'table.json', {'link': link, 'loss': loss, **origin, 'rows': shown})
    picture.draw(rows, link, out / 'time.png')
    return text
