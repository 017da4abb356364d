"""The table and the timeline of a profile that `jaxmp.training.profile` has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from jaxmp import terminal
from jaxmp.report import style
from jaxmp.runtimes import timeline
from jaxmp.runtimes.schedule import Action
from jaxmp.training.locks import replacing, write

Profile = dict[str, Any]  # of a step, as profile.json has it
HEADS = ('stage', 'F', 'B', 'W', 'waiting', 'sum', 'encode', 'decode', 'wire in')


class Seconds(NamedTuple):
    """The seconds of one stage; F, B, W and waiting are the whole step of a device.

    Attributes:
      F: forwards.
      B: backwards; where W is apart, gradients of the input.
      W: gradients of the weights.
      waiting: what the device did not compute before the actions of this stage, and after the last.
      encode: part of F and B, timed alone.
      decode: likewise.
      wire: the time for which messages to this stage were on their way, also beside compute.
    """

    F: float
    B: float
    W: float
    waiting: float
    encode: float
    decode: float
    wire: float


def rows(profile: Profile) -> dict[int, Seconds]:
    """The row of each stage."""
    actions = [Action(*a) for a in profile['actions']]
    end = max(a.end for a in actions)
    spent: dict[int, dict[str, float]] = {}
    for device in {a.device for a in actions}:
        now, of_device = 0.0, sorted(a for a in actions if a.device == device)
        for a in of_device:
            row = spent.setdefault(a.stage, dict.fromkeys((*'FBW', 'waiting'), 0.0))
            row['waiting'] += a.start - now
            row[a.kind] += a.end - a.start
            now = a.end
        spent[of_device[-1].stage]['waiting'] += end - now
    wire = dict.fromkeys(spent, 0.0)
    for _, target, _, _, left, arrived in profile['messages']:
        wire[target] += arrived - left
    codecs = profile['codecs']
    return {s: Seconds(**spent[s], **codecs[str(s)], wire=wire[s]) for s in sorted(spent)}


def cells(seconds: Mapping[int, Seconds]) -> list[list[str]]:
    """The cells of the table in milliseconds: a line per stage, and the sums."""
    total = Seconds(*(sum(column) for column in zip(*seconds.values(), strict=True)))
    lines = []
    for name, row in [*((str(s + 1), r) for s, r in seconds.items()), ('all', total)]:
        values = *row[:4], sum(row[:4]), *row[4:]
        lines.append([name, *(f'{1e3 * v:.2f}' for v in values)])
    return lines


def about(profile: Profile) -> str:
    """What the table says, and how much the measurement changed."""
    end = max(a[5] for a in profile['actions'])
    return (
        f'ms of one step. F + B + W + waiting = sum, the {1e3 * end:.1f} ms from the start of the '
        'step to the end of its last action; encode and decode are parts of F and B, timed alone; '
        'wire in is the time that messages to a stage were on their way, also beside compute. With '
        f'the exchange and the optimizer the step took {1e3 * profile["step"]:.1f} ms; the step '
        f'before, whose actions were not measured, took {1e3 * profile["usual"]:.1f} ms.'
    )


def show(profile: Profile, folder: Path) -> None:
    """Prints the table; writes ``profile.md``, ``timeline.png`` and ``timeline.svg``."""
    lines = cells(rows(profile))
    table = Table(title='where the time of a step went', caption=about(profile))
    for head in HEADS:
        table.add_column(head, justify='right')
    for line in lines:
        table.add_row(*line)
    terminal.show(table)
    head, *page = (f'| {" | ".join(line)} |' for line in (HEADS, *lines))
    page = '\n'.join([head, f'|{"--:|" * len(HEADS)}', *page])
    write(folder / 'profile.md', f'{page}\n\n{about(profile)}\n\n![timeline](timeline.png)\n')
    figure = draw(profile)
    for end in ('png', 'svg'):
        with replacing(folder / f'timeline.{end}') as part:
            style.write(figure, part, end)


def draw(profile: Profile) -> Any:
    """The measured timeline, with a line per message, above the schedule's plan."""
    measured, plan = ([Action(*a) for a in profile[name]] for name in ('actions', 'plan'))
    devices = 1 + max(a.device for a in plan)
    width = min(20.0, max(7.0, 0.25 * len(plan) / devices + 1))
    figure = style.figure(width, 0.9 * devices + 2.2)
    above, below = figure.subplots(2, 1)
    timeline.paint(above, [_milliseconds(a) for a in measured])
    _paint_messages(above, profile['messages'], {a.stage: a.device for a in plan})
    above.set(title='measured; lines are messages on their way', xlabel='ms')
    timeline.paint(below, plan)
    below.set(title=f'plan: {timeline.title(plan)}', xlabel='time in forwards of a device')
    timeline.legend(figure, any(a.kind == 'W' for a in plan))
    return figure


def _milliseconds(a: Action) -> Action:
    return a._replace(start=1e3 * a.start, end=1e3 * a.end)


def _paint_messages(axes: Any, sent: Sequence[Sequence[Any]], device: Mapping[int, int]) -> None:
    for source, target, _, kind, left, arrived in sent:
        ends = device[source], device[target]
        colour = {'F': '#0072B2', 'B': '#D55E00'}[kind]
        axes.plot((1e3 * left, 1e3 * arrived), ends, color=colour, lw=0.8, alpha=0.8)
