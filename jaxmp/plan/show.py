"""`show`: the tables that a plan was decided from."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rich.table import Table

from jaxmp import terminal
from jaxmp.net.speed import Link
from jaxmp.plan.choose import ALIKE, Candidate, Choice, Probed
from jaxmp.plan.verdict import spelled


def summary(choice: Choice, base: str, link: Link, budget: float) -> str:
    """A line about a plan."""
    return (
        f'The plan for {base} over {spelled(link)}, error at most {budget:g}: predicted step '
        f'{1e3 * choice.seconds:.1f} ms.'
    )


def show(
    probed: Probed,
    choice: Choice,
    others: Mapping[tuple[str, str], Choice | None],
    link: Link,
    budget: float,
    every: bool = False,
) -> None:
    """Prints the plan beside uniform choices, its codecs and its stages.

    Args:
      probed: what was measured.
      choice: the plan.
      others: channels forward and backward at every boundary, in their best orders.
      link: between stages.
      budget: of the error.
      every: whether codecs that were not chosen are shown.
    """
    parts = (
        predictions(choice, others, budget),
        slower_because(choice, others, budget),
        crossings(probed, choice, link, budget, every),
        stages(probed, choice),
        open_because(probed, choice, budget),
    )
    terminal.show(*(part for part in parts if part))


def slower_because(
    choice: Choice, others: Mapping[tuple[str, str], Choice | None], budget: float
) -> str:
    """Why another row is faster than the plan, where one is."""
    faster = [row for row in others.values() if row and row.seconds < choice.seconds]
    if not faster:
        return ''
    if all(row.error > budget for row in faster):
        return f'what is faster than the plan errs more than --error={budget:g}'
    return f'the plan errs less than what is faster by at most {100 * (ALIKE - 1):.0f} %'


def open_because(probed: Probed, choice: Choice, budget: float) -> str:
    """Why nothing is compressed, where nothing is."""
    if any(c.text != 'raw' for c in choice.codecs.values()):
        return ''
    errors = [c.error for own in probed.crossings.values() for c in own if c.text != 'raw']
    if errors and min(errors) <= budget:
        return 'every crossing stays raw: no candidate is faster'
    return (
        f'every crossing stays raw: no other candidate meets --error={budget:g}, and the least '
        f'error is {min(errors, default=float("inf")):.2g}; give a larger --error or more --codecs'
    )


def crossings(probed: Probed, choice: Choice, link: Link, budget: float, every: bool) -> Table:
    """A row per chosen codec, or per candidate of each crossing, times per step."""
    what = 'candidates' if every else 'codecs'
    table = Table(
        title=f'{what}: ms per step at {link.rate:g} Mbit/s'
        + (f', without the delay of {link.delay:g} ms' if link.delay else '')
        + f'; error: of the message, relative squared, at most {budget:g}'
    )
    in_nats = any(c.nats for own in probed.crossings.values() for c in own)
    percent = ('perplexity',) * in_nats  # that it is predicted to add
    for head in ('boundary', 'way', 'codec', 'bits', 'error', *percent, 'encode', 'wire', 'decode',
                 ''):  # fmt: skip
        table.add_column(head, justify='left' if head in ('way', 'codec', '') else 'right')
    for edge, own in sorted(probed.crossings.items(), key=lambda row: (min(row[0]), row[0])):
        for c in sorted(own, key=lambda c: c.error):
            if not every and c != choice.codecs[edge]:
                continue
            mark = 'chosen' if c == choice.codecs[edge] else '' if c.error <= budget else 'above'
            times = (
                1e3 * t for t in (c.encode, link.seconds(c.nbytes, edge[0] > edge[1]), c.decode)
            )
            way = 'forward' if edge[0] < edge[1] else 'backward'
            cells = f'{c.bits:.2f}', f'{c.error:.2g}', *(added(c) for _ in percent)
            cells = *cells, *(f'{t:.2f}' for t in times)
            table.add_row(str(1 + min(edge)), way, c.text, *cells, mark)
        table.add_section()
    return table


def added(c: Candidate) -> str:
    """What a candidate is predicted to add to perplexity.

    >>> added(Candidate('nvfp4', 4.5, 0.1, 0.0, 0.0, 0.0, nats=0.02))
    '2.02 %'
    """
    return f'{100 * math.expm1(c.nats):.3g} %' if c.nats else ''


def stages(probed: Probed, choice: Choice) -> Table:
    """Times of each stage with the micro-batches that were chosen."""
    table = Table(
        title=f'stages: ms per micro-batch, {choice.order.microbatches} micro-batches; '
        f'{1e3 * probed.handover.fixed:.2f} ms to hand over a message, which holds up computing by '
        f'{1e3 * probed.busy.fixed:.2f} ms'
    )
    for head in ('stage', 'forward', 'backward', 'of inputs', 'of weights', 'update per step'):
        table.add_column(head, justify='right')
    for s, t in enumerate(probed.stages[choice.order.microbatches]):
        told = [f'{1e3 * x:.2f}' for x in (t.forward, t.backward, *t.halves, t.update)]
        halves = told[2:-1] or ['-'] * 2  # where there was no time to measure them
        table.add_row(str(s), *told[:2], *halves, told[-1])
    return table


def predictions(
    choice: Choice, others: Mapping[tuple[str, str], Choice | None], budget: float
) -> Table:
    """The plan beside uniform choices, and which of them err more than is allowed."""
    table = Table(title='predicted step')
    for head in ('codecs', 'schedule', 'ms', 'largest error', ''):
        table.add_column(head, justify='right' if head in ('ms', 'largest error') else 'left')
    rows = {f'{f} forward, {b} backward': other for (f, b), other in others.items()}
    for name, made in {'the plan': choice, **rows}.items():
        if made is not None:
            cells = f'{1e3 * made.seconds:.1f}', f'{made.error:.2g}'
            mark = 'above --error' if made.error > budget else ''
            table.add_row(name, made.order.line, *cells, mark)
    return table
