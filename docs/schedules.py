"""Writes the picture of all schedules, and their table in runtimes.md.

`python docs/schedules.py` from the root of a clone. `tests/test_schedule.py` compares the table.
"""

import itertools
from pathlib import Path
from typing import Any

from timeline import legend, paint

from jaxmp.pictures import style
from jaxmp.runtimes.schedule import Action, Costs, bubble, place, saved_inputs, size
from jaxmp.runtimes.schedules import SCHEDULES

HERE = Path(__file__).parent
NAMES = {
    'gpipe': 'GPipe',
    '1f1b': '1F1B',
    'eager_1f1b': 'eager 1F1B',
    'interleaved': 'interleaved 1F1B',
    'zb_h1': 'ZB-H1',
    'zb_h2': 'ZB-H2',
    'zb_v': 'ZB-V',
}
TIMES = (0.0, 0.25, 0.5, 1.0)  # of a message
DEVICES, MICROBATCHES = 4, 8
MARKS = '<!-- schedules -->', '<!-- /schedules -->'


def schedule(name: str, devices: int, microbatches: int, message: float) -> tuple[Action, ...]:
    """The schedule with F = B = W = 1."""
    chunks = 2 if name in ('interleaved', 'zb_v') else 1
    return SCHEDULES[name](chunks * devices, microbatches, Costs(message=message))


def kept(actions: tuple[Action, ...]) -> float:
    """The most micro-batches that a device keeps."""
    where = place(actions)
    return max(saved_inputs(actions)) * len({*where}) / len(where)


def table(devices: int, microbatches: int) -> str:
    """Bubbles and memory of all schedules in Markdown."""
    heads = ['`parallel.schedule`', *(f'$c = {c:g}$' for c in TIMES), 'micro-batches kept']
    rows = []
    for name in NAMES:
        made = [schedule(name, devices, microbatches, c) for c in TIMES]
        rows.append([f'`{name}`', *(f'{bubble(a):.3f}' for a in made), f'{kept(made[0]):g}'])
    rule = '|---' + '|--:' * (len(heads) - 1) + '|'
    lines = [f'| {" | ".join(row)} |' for row in (heads, *rows)]
    return '\n'.join([lines[0], rule, *lines[1:], ''])


def tables() -> str:
    """One table per size, between the marks of the page."""
    return '\n'.join(
        f'$D = {d}$, $M = {m}$:\n\n{table(d, m)}' for d, m in ((DEVICES, MICROBATCHES), (8, 64))
    )


def picture() -> Any:
    """Two panels per schedule: without message time, and with half a forward."""
    figure = style.figure(9, 17)
    messages = {0.0: 'no message time', 0.5: 'messages of half a forward'}
    shown = list(itertools.product(NAMES, messages))
    panels, ends = figure.subplots(len(shown), 1, sharex=True), []
    for ax, (name, message) in zip(panels, shown, strict=True):
        actions = schedule(name, DEVICES, MICROBATCHES, message)
        paint(ax, actions, 8)
        said = f'{NAMES[name]}, {messages[message]}: bubble {100 * bubble(actions):.0f} %'
        ax.set_title(said, loc='left', fontsize=10)
        ax.set_yticks(range(DEVICES), [f'device {d}' for d in range(DEVICES)], fontsize=8)
        ax.tick_params('x', bottom=False)
        ends.append(size(actions)[2])
    panels[-1].set(xlim=(0, max(ends)), xlabel='time in forwards of a device')
    panels[-1].tick_params('x', bottom=True)
    legend(figure, split=True)
    return figure


def main() -> None:
    """Writes both."""
    page = HERE / 'runtimes.md'
    before, rest = page.read_text().split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    page.write_text(f'{before}{MARKS[0]}\n\n{tables()}\n{MARKS[1]}{after}')
    with style.style():
        style.write(picture(), HERE / 'schedules.png', 'png', '')


if __name__ == '__main__':
    main()
