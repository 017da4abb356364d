r"""What gradients that come late cost: in loss, and in steps to a loss.

Late runs and those on time have the same steps, seed and channels. The loss to reach is the higher
one of their last tests, the lowest that both reach:

.. math:: r = t_{late}(L) / t_{on time}(L), \quad L = \max(L_{late}, L_{on time})

with t(L) the step at which the test loss first is L, on a line between two tests.
`python -m study.report.late results/late jaxmp/plan/late.json` writes what `jaxmp plan` reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.config import Summary, settings
from jaxmp.metrics import positions
from jaxmp.pictures import style
from jaxmp.plan.late import training_of
from study.report.residuals import Estimate, estimate
from study.report.results import Row, Study, last, load, score
from study.report.tables import NONE, markdown, plain, with_error

TITLE = 'Loss by the delay of gradients'
HEADS = (
    'training', 'messages', 'correction', 'steps', 'steps late', 'loss, nats',
    'more than on time, %', 'times the steps to a loss', 'seeds',
)  # fmt: skip


class Late(NamedTuple):
    """A row whose gradients are late, beside the same row on time.

    Attributes:
      training: see `training_of`.
      optimizer: its name.
      length: steps of the training.
      delay: steps.
      by_stage: whether a stage is only as late as its own way takes.
      correction: the word of `config.optimizer.correction`.
      compressed: whether messages are.
      loss: of the last test.
      more: how much higher it is than on time, as a share of that.
      steps: times as many steps to a loss.
    """

    training: str
    optimizer: str
    length: int
    delay: int
    by_stage: bool
    correction: str
    compressed: bool
    loss: Estimate
    more: Estimate
    steps: Estimate


def rows(study: Study) -> list[Late]:
    """The rows of a study by delay, where there are late ones beside those on time."""
    by_case = {case_of(row.runs[0]): row for row in study.rows.values()}
    if not any(delay for _, delay, *_ in by_case):
        return []
    found = []
    for case in sorted(by_case, key=key):
        codecs, *_, kind = case
        if on_time := by_case.get((codecs, 0, False, 'none', kind)):
            found += compared(by_case[case], on_time)
    return found


Case = tuple[tuple[str, str], int, bool, str, tuple[str, str]]


def case_of(run: Summary) -> Case:
    """The channels of a run, its delay and whether it is by stage, its correction, its training."""
    values = settings(run['config'])
    kind = training_of(run['config']['model']), values['optimizer.name']
    late = (values[f'optimizer.{key}'] for key in ('delay', 'delay_by_stage', 'correction'))
    return (run['fwd'], run['bwd']), *late, kind


def key(case: Case) -> tuple[Any, ...]:
    """Raw messages before compressed ones, then by correction and delay."""
    codecs, delay, by_stage, correction, kind = case
    late = correction != 'none', correction, delay, by_stage
    return kind, codecs != ('raw', 'raw'), codecs, *late


def compared(row: Row, on_time: Row) -> list[Late]:
    """A row beside the one on time, seed by seed; none without a common seed."""
    codecs, delay, by_stage, correction, kind = case_of(row.runs[0])
    by_seed = {run['seed']: run for run in on_time.runs}
    pairs = [(run, by_seed[run['seed']]) for run in row.runs if run['seed'] in by_seed]
    if not pairs:
        return []
    end = lambda run: score(run, row.judged, 'last')
    more = estimate([end(run) / end(first) - 1 for run, first in pairs])
    steps = estimate([ratio(run, first, row.judged) for run, first in pairs])
    compressed, length = codecs != ('raw', 'raw'), row.runs[0]['steps']
    how = delay, by_stage, correction, compressed
    return [Late(*kind, length, *how, last(row, row.judged), more, steps)]


def ratio(late: Summary, on_time: Summary, mode: str) -> float:
    """How many times the steps to the lowest loss that both runs reach; see the module."""
    curves = [curve(run, mode) for run in (late, on_time)]
    loss = max(losses[-1] for _, losses in curves)
    there, here = (reached(*c, loss) for c in curves)
    return there / here


def curve(run: Summary, mode: str) -> tuple[Sequence[float], Sequence[float]]:
    """Steps and losses of the tests of a run."""
    return positions(run, mode, 'step'), run['history'][mode]['loss']


def reached(steps: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """The step at which a curve first is at ``loss`` or below it.

    >>> reached([10, 20, 30], [3.0, 2.0, 1.0], 1.5), reached([10, 20], [3.0, 2.0], 4.0)
    (25.0, 10)
    """
    i = next(i for i, value in enumerate(losses) if value <= loss)
    if i == 0:
        return steps[0]
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return steps[i - 1] + share * (steps[i] - steps[i - 1])


# What is shown.


def table(studies: Iterable[Study]) -> str:
    """All rows in Markdown."""
    lines = [line(late) for study in studies for late in rows(study)]
    return markdown(HEADS, lines, words=3)


def page(known: Mapping[str, Any]) -> str:
    """The table of all studies, of whatever a report shows by name."""
    own = [found for _, found in sorted(known.items()) if isinstance(found, Study)]
    return f'{table(own)}\n'


def line(late: Late) -> list[str]:
    """The cells of a row."""
    percent = lambda e: e._replace(mean=100 * e.mean, error=100 * e.error)
    costs = (
        [with_error(percent(late.more)), with_error(late.steps, 3)] if late.delay else [NONE] * 2
    )
    return [
        f'{late.training}, {late.optimizer}', 'compressed' if late.compressed else 'raw',
        late.correction if late.delay else NONE, f'{late.length:,}',
        f'{late.delay}{", by stage" * late.by_stage}',
        plain(late.loss.mean, 4), *costs, str(late.loss.seeds),
    ]  # fmt: skip


def draw(study: Study, out: Path) -> str:
    """Draws the loss by delay if ``out`` lacks it; returns the name of the file."""
    late = rows(study)
    data = {'lines': lines(late), 'title': title(late), 'seeds': seeds(late)}
    path, mark = out / f'{study.name}_late.png', style.digest(data, __file__)
    if not style.holds(path, mark):
        with style.style():
            figure = style.figure(6.5, 4)
            axes = figure.subplots()
            words: dict[str, str] = {}
            for label, points in data['lines'].items():
                word, _, compressed = label.partition(', ')
                colour = words.setdefault(word, f'C{len(words)}')
                line_style = {'marker': 'o', 'ls': '--' if compressed else '-', 'color': colour}
                axes.plot(*zip(*points, strict=True), label=label, **line_style)
            axes.set(xlabel='steps that gradients come late', ylabel='test loss (nats)')
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.legend()
            figure.suptitle(data['title'])
            style.caption(figure, f'after equal steps; mean of {data["seeds"]}')
            style.save(figure, path, mark)
    return path.name


def title(late: Sequence[Late]) -> str:
    """What the least delay costs with raw messages, by the best correction and by none."""
    first = [r for r in late if r.delay and not r.compressed]
    own = [r for r in first if r.delay == min(r.delay for r in first)]
    if not own:
        return TITLE
    word = lambda r: r.correction + ' by stage' * r.by_stage
    costs = {word(r): f'{100 * r.more.mean:.2g} %' for r in own}
    best = word(min(own, key=lambda r: r.more.mean))
    told = [f'{costs[best]} of the loss with {best}'] if best != 'none' else []
    told += [f'{costs["none"]} uncorrected'] if 'none' in costs else []
    steps = f'{own[0].delay} step{"s" * (own[0].delay > 1)}'
    return f'{steps} late costs ' + ',\n'.join(told)


def seeds(late: Sequence[Late]) -> str:
    """How many seeds the rows have.

    >>> counts = (1, 3)
    >>> seeds([Late('', '', 9, 0, False, '', False, *[estimate([1.0] * n)] * 3) for n in counts])
    '1 to 3 seeds'
    """
    counts = sorted({r.loss.seeds for r in late})
    ending = 's' * (counts != [1])
    return ' to '.join(map(str, counts[:1] + counts[1:][-1:])) + f' seed{ending}'


def lines(late: Sequence[Late]) -> dict[str, list[tuple[int, float]]]:
    """Loss by delay, from the row on time, of each correction and kind of message."""
    found: dict[str, list[tuple[int, float]]] = {}
    for compressed in (False, True):
        own = [r for r in late if r.compressed == compressed]
        for how in dict.fromkeys((r.correction, r.by_stage) for r in own if r.delay):
            word = ('uncorrected' if how[0] == 'none' else how[0]) + ' by stage' * how[1]
            rows = [r for r in own if not r.delay or (r.correction, r.by_stage) == how]
            found[word + ', compressed' * compressed] = [(r.delay, r.loss.mean) for r in rows]
    return found


def record(studies: Iterable[Study]) -> list[dict[str, Any]]:
    """What `jaxmp plan` reads: a row per training, delay, correction and kind of message.

    Where trainings of several lengths were measured it is of the shortest, which loses most.
    """
    shortest: dict[tuple[Any, ...], Late] = {}
    for r in (r for study in studies for r in rows(study) if r.delay):
        case = r.training, r.optimizer, r.delay, r.by_stage, r.correction, r.compressed
        shortest[case] = min(r, shortest.get(case, r), key=lambda r: r.length)
    return [
        {
            'training': r.training, 'optimizer': r.optimizer, 'delay': r.delay,
            'by_stage': r.by_stage, 'correction': r.correction, 'compressed': r.compressed,
            'steps': round(r.steps.mean, 4), 'more': round(r.more.mean, 5),
            'seeds': r.steps.seeds,
        }
        for r in shortest.values()
    ]  # fmt: skip


def text(studies: Iterable[Study]) -> str:
    """`record` as JSON, a row per line."""
    lines = ',\n'.join(f' {json.dumps(row)}' for row in record(studies))
    return f'[\n{lines}\n]\n'


def main() -> None:
    """Reads a folder of results, and writes the file."""
    folder, out = map(Path, sys.argv[1:])
    out.write_text(text(sorted(load(folder), key=lambda study: study.name)))


if __name__ == '__main__':
    main()
