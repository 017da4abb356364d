"""`markdown`: the table of all entries, losers kept; `write` saves it with a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.bench import picture
from jaxmp.bench.entries import DEFAULT, MISSING
from jaxmp.bench.protocol import LINK, LINKS, RECORDS, step
from jaxmp.bench.rows import NEVER, Row, ranked, record
from jaxmp.net.link import parse
from jaxmp.plan.choose import Order
from jaxmp.report.tables import NONE, plain
from jaxmp.training.files import write as written
from jaxmp.training.files import write_json
from jaxmp.training.summary import provenance


def markdown(rows: Sequence[Row], link: str, loss: float, made: dict[str, Any]) -> str:
    """The table, the test of the event model, and where they were made.

    Args:
      rows: of the entries.
      link: that ranks them.
      loss: of the twin, that counts as learned.
      made: commit, hardware and versions.
    """
    heads = 'channels, forward; backward', 'as', 'bits', 'above Shannon', 'memcpys', 'steps'
    heads = [*heads, 'last loss', 'step', *LINKS]
    lines = [heads, ['---', '---', *['--:'] * (len(heads) - 2)]]
    lines += [cells(row, link) for row in ranked(rows, link)]
    table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
    versions = ', '.join(f'{k} {v}' for k, v in made['versions'].items())
    return (
        f'# Channels, by predicted time over {link}\n\n{table}\n\n'
        'Bits per element, as compiled, forward / backward; memcpys to encode and decode, forward '
        '/ backward; steps of the eight-stage twin until '
        f'{loss:g} nats per byte over those without compression of the same seed, the mean of the '
        'seeds and their range; its last test loss, and the difference to the loss without '
        f'compression; predicted seconds of a step over {link}; predicted seconds until '
        f"ProtocolNanoGPT's loss over each link.\n\n{MISSING}\n\n{checked()}\n\n"
        f'{made["hardware"]}, {versions}, commit {made["commit"]}.\n'
    )


def cells(row: Row, link: str) -> list[str]:
    """A line of the table."""
    fwd, bwd = row.costs
    both = lambda one, digits=2: f'{plain(one(fwd), digits)} / {plain(one(bwd), digits)}'
    times = [NEVER if (t := row.seconds(k)) is None else plain(t, 0) for k in LINKS]
    return [
        '; '.join(f'`{text}`' for text in dict.fromkeys(row.entry[:2])),
        DEFAULT.get(row.entry, ''),
        both(lambda c: c.bits),
        both(lambda c: c.gap),
        both(lambda c: c.encode + c.decode, 1),
        trained(row),
        lost(row),
        plain(row.steps[link][0]),
        *times,
    ]


def trained(row: Row) -> str:
    """The ratio of steps, or how many seeds never reach the loss."""
    if row.failed or row.twin is None:
        return f'{NEVER}: {row.failed.partition(":")[0] or "no run"}'
    known = [r for r in row.twin.ratios if r is not None]
    if row.ratio is None:
        return f'{NEVER} ({len(row.twin.ratios) - len(known)} of {len(row.twin.ratios)} seeds)'
    spread = f' ({min(known):.2f} to {max(known):.2f})' if len(known) > 1 else ''
    return f'{row.ratio:.2f}{spread}'


def lost(row: Row) -> str:
    """The mean of the last losses, and what they are above those without compression."""
    if row.twin is None or not row.twin.losses:
        return NONE
    mean = lambda values: sum(values) / len(values)
    own = mean(row.twin.losses)
    return f'{own:.3f} ({own - mean(row.twin.raw):+.3f})'


def checked() -> str:
    """The event model beside the published records."""
    said = []
    for r in RECORDS:
        made = step(parse(LINK), (r.way, r.way), Order('1f1b', r.microbatches), r.computing)
        part = f'{made:.2f} s for {r.seconds:.2f} s published ({made / r.seconds - 1:+.1%})'
        said.append(f'{r.name} {part}, {r.seconds * r.steps:,.0f} s in all')
    return (
        f'The event model at the two records of ProtocolNanoGPT: {"; ".join(said)}. So a step is '
        'checked; the ratio of steps is that of the twin at one loss, and no published run checks '
        'it, nor the seconds until the loss.'
    )


def write(rows: Sequence[Row], link: str, loss: float, out: Path) -> str:
    """Saves ``table.md``, ``table.json``, ``time.png`` and ``time.svg``; returns the table."""
    made = provenance()
    text = markdown(rows, link, loss, made)
    written(out / 'table.md', text)
    shown = [record(row) for row in ranked(rows, link)]
    write_json(out / 'table.json', {'link': link, 'loss': loss, **made, 'rows': shown})
    picture.draw(rows, link, out / 'time.png')
    return text
