"""`Row`: what is known of an entry: costs, training, and the predicted time over each link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxmp.net.speed import parse
from study.bench.cost import Cost
from study.bench.entries import DEFAULT, Entry
from study.bench.protocol import COPY, DENSE, LINKS, TOKENS, WIDTH, Way, best
from study.bench.twin import Twin

NEVER = 'never'


class Row(NamedTuple):
    """An entry of the table.

    Attributes:
      entry: the channels.
      costs: forward and backward.
      twin: how it trained; None if no run has ended.
      failed: why a run has failed; empty if none has.
      steps: predicted seconds of a step, and schedule and micro-batches, by link.
    """

    entry: Entry
    costs: tuple[Cost, Cost]
    twin: Twin | None
    failed: str
    steps: Mapping[str, tuple[float, str]]

    @property
    def bits(self) -> float:
        """Per element, the mean of both directions."""
        return sum(c.bits for c in self.costs) / 2

    @property
    def ratio(self) -> float | None:
        """Steps until the loss over those without compression; None if it is never reached."""
        return None if self.failed or self.twin is None else self.twin.ratio

    def seconds(self, link: str) -> float | None:
        """Predicted time until the loss: the dense record's steps, times ratio and step."""
        return None if self.ratio is None else DENSE.steps * self.ratio * self.steps[link][0]


def row_of(entry: Entry, costs: tuple[Cost, Cost], twin: Twin | None, failed: str) -> Row:
    """The row of an entry, with its predicted steps."""
    ways = way(costs[0]), way(costs[1])
    fastest = {link: best(parse(link), ways) for link in LINKS}
    steps = {link: (seconds, order.line) for link, (seconds, order) in fastest.items()}
    return Row(entry, costs, twin, failed, steps)


def way(cost: Cost) -> Way:
    """A channel's messages of a step, whose codec takes as many memcpys as here, on an H100."""
    elements = TOKENS * WIDTH
    memcpy = 2 * elements / COPY
    return Way(elements * cost.bits / 8, cost.encode * memcpy, cost.decode * memcpy)


def ranked(rows: Sequence[Row], link: str) -> list[Row]:
    """Rows by their time over a link; those that never reach the loss follow, by bits."""
    return sorted(rows, key=lambda r: (r.ratio is None, r.seconds(link) or 0.0, r.bits))


def record(row: Row) -> dict[str, Any]:
    """A row for a JSON file."""
    twin = row.twin._asdict() if row.twin else None
    return {
        **row.entry._asdict(),
        'peer': DEFAULT.get(row.entry, ''),
        'costs': {w: c._asdict() for w, c in zip(('fwd', 'bwd'), row.costs, strict=True)},
        'ratio': row.ratio,
        'twin': twin,
        'failed': row.failed,
        'steps': {k: {'seconds': s, 'schedule': o} for k, (s, o) in row.steps.items()},
        'seconds': {link: row.seconds(link) for link in LINKS},
    }
