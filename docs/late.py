"""Writes the picture of late.md: three schedules over a slow link, step after step.

`python docs/late.py` from the root of a clone. `tests/test_schedule.py` compares the page's table.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timeline import legend, paint

from jaxmp.pictures import style
from jaxmp.runtimes.schedule import Action, Costs, Task, timed
from jaxmp.runtimes.schedules import SCHEDULES, stream

HERE = Path(__file__).parent
DEVICES, MICROBATCHES, DELAY, STEPS = 4, 8, 1, 6
COSTS = Costs(message=1.5)  # a forward takes 1, a backward 2
NAMES = {'1f1b': '1F1B', 'eager_1f1b': 'eager 1F1B', 'late': 'one step late'}
SHOWN = 110  # units of time
DARK = 0.75  # of the colour, of every second step
MARKS = '<!-- schedules -->', '<!-- /schedules -->'


def flushed(name: str) -> list[Task]:
    """The tasks of all steps; a device begins one when it has ended the one before."""
    step = SCHEDULES[name](DEVICES, MICROBATCHES, COSTS)
    task = lambda a, i: (a.kind, a.stage, a.microbatch + MICROBATCHES * i)
    return [task(a, i) for i in range(STEPS) for a in step]


def actions(name: str) -> tuple[Action, ...]:
    """All steps of a schedule, each action as early as it can."""
    if name == 'late':
        return stream(range(DEVICES), MICROBATCHES, (DELAY,) * DEVICES, STEPS, COSTS)
    tasks = flushed(name)
    orders = {d: [task for task in tasks if task[1] == d] for d in range(DEVICES)}
    return timed(orders, COSTS)


def step_time(steps: Sequence[Action]) -> float:
    """The time of a step between others: from the end of the first stage's third to its fourth."""
    ends = {a.microbatch: a.end for a in steps if (a.stage, a.kind) == (0, 'B')}
    return ends[4 * MICROBATCHES - 1] - ends[3 * MICROBATCHES - 1]


def table() -> str:
    """Time of a step of each schedule, in Markdown."""
    compute = MICROBATCHES * (COSTS.F + COSTS.B + COSTS.W)
    times = {name: step_time(actions(name)) for name in NAMES}
    rows = [f'| {NAMES[n]} | {t:g} | {100 * compute / t:.0f} % |' for n, t in times.items()]
    return '\n'.join(
        ['| schedule | time of a step | devices compute |', '|---|--:|--:|', *rows, '']
    )


def picture() -> Any:
    """A panel per schedule; every second step is darker."""
    figure = style.figure(11, 7)
    panels = figure.subplots(len(NAMES), 1, sharex=True)
    for ax, name in zip(panels, NAMES, strict=True):
        steps = actions(name)
        shown = [a for a in steps if a.start < SHOWN]
        paint(ax, [a._replace(microbatch=a.microbatch % MICROBATCHES) for a in shown], 6)
        for action, box in zip(shown, ax.patches, strict=False):
            dark = action.microbatch // MICROBATCHES % 2
            box.set_facecolor([part * (DARK if dark else 1) for part in box.get_facecolor()[:3]])
        for number in ax.texts:
            number.set_clip_on(True)
        ax.set_title(f'{NAMES[name]}: a step takes {step_time(steps):g}', loc='left', fontsize=10)
        ax.set_yticks(range(DEVICES), [f'device {d}' for d in range(DEVICES)], fontsize=8)
        ax.tick_params('x', bottom=False)
    panels[-1].set(xlim=(0, SHOWN), xlabel='time in forwards; a message takes 1.5 of them')
    panels[-1].tick_params('x', bottom=True)
    legend(figure, split=False)
    return figure


def main() -> None:
    """Writes the picture and the table."""
    page = HERE / 'late.md'
    before, rest = page.read_text().split(MARKS[0])
    page.write_text(f'{before}{MARKS[0]}\n{table()}{MARKS[1]}{rest.split(MARKS[1])[1]}')
    with style.style():
        style.write(picture(), HERE / 'late.png', 'png', '')


if __name__ == '__main__':
    main()
