"""`proposal`: do gradients that come late (`optimizer.delay`) make a loss come sooner?

A pipeline that is never emptied waits neither for its fill nor for a link's delay, if gradients are
late by as many steps as a message's way there and back takes. They then take more steps to a loss.
How many more is read from `late.json`, which study/report/late.py makes from runs that were
finished. What was not measured there, for the optimizer and the kind of training, is not proposed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmp.plan.verdict import MARGIN, duration

if TYPE_CHECKING:
    from jaxmp.config import Config
    from jaxmp.net.speed import Link
    from jaxmp.plan.choose import Choice, Codecs, Probed
    from jaxmp.plan.predict import Edge, Message, Times
    from jaxmp.runtimes.schedule import Costs

MEASURED = Path(__file__).with_name('late.json')
MOST = 8  # steps late
STEADY = 4  # steps over which the time of one is predicted, once the pipeline is full


class Measured(NamedTuple):
    """What late gradients cost in runs that were finished; see `record` of study/report/late.py."""

    training: str
    optimizer: str
    delay: int
    by_stage: bool
    correction: str
    compressed: bool
    steps: float
    more: float
    seeds: int


class Proposed(NamedTuple):
    """Late gradients with a number of micro-batches, the predicted step, and what was measured."""

    row: Measured
    microbatches: int
    seconds: float

    @property
    def weighed(self) -> float:
        """Seconds that a step on time must beat; noise does not make late gradients learn more."""
        return self.seconds * max(1.0, self.row.steps)


def training_of(model: Mapping[str, Any]) -> str:
    """The kind of a training, of the keys `config.model`.

    >>> training_of({'name': 'pretrained', 'path': 'weights.gguf', 'train': 'lora(8)'})
    'LoRA'
    >>> training_of({'name': 'gpt2', 'path': 'folder', 'train': 'no_table'})
    'fine-tuning'
    >>> training_of({'name': 'gpt2', 'path': ''})
    'from nothing'
    >>> training_of({'name': 'gpt2', 'path': '', 'tied': False})
    'from nothing, untied'
    """
    if not model.get('path'):
        return 'from nothing' + ', untied' * (not model.get('tied', True))
    return 'LoRA' if model['name'] == 'pretrained' and 'lora' in model['train'] else 'fine-tuning'


@functools.cache
def table() -> tuple[Measured, ...]:
    """All that was measured."""
    return tuple(Measured(**row) for row in json.loads(MEASURED.read_text()))


def proposal(
    config: Config, probed: Probed, choice: Choice, link: Link, rows: Sequence[Measured] = ()
) -> str:
    """A line on late gradients over a link; empty where they could not make a step faster.

    Args:
      config: that was probed, whose gradients are on time.
      probed: what `jaxmp.plan.planned.planned` measured.
      choice: the plan.
      link: between neighbouring stages.
      rows: what was measured; default `table`.
    """
    from jaxmp.plan.choose import ALIKE

    training, optimizer = training_of(config.model), config.optimizer.name
    compressed = any(c.text != 'raw' for c in choice.codecs.values())
    known = best_of(rows or table(), training, optimizer, compressed)
    if not known:
        return unknown(probed, choice, link, f'{training} with {optimizer}')
    options = [
        Proposed(row, n, late_step(probed, link, choice.codecs, n, row.delay, row.by_stage))
        for row in known
        for n in probed.stages
    ]
    least = min(option.weighed for option in options)
    most = min(ALIKE * least, (1 - MARGIN) * choice.seconds)
    if not (fast := [option for option in options if option.weighed <= most]):
        return ''
    return said(min(fast, key=lambda option: (option.row.delay, option.weighed)), choice)


def best_of(
    rows: Iterable[Measured], training: str, optimizer: str, compressed: bool
) -> list[Measured]:
    """Of each delay the correction with the fewest steps, with such messages, or else with raw."""
    own = [row for row in rows if (row.training, row.optimizer) == (training, optimizer)]
    by_delay: dict[tuple[int, bool], list[Measured]] = {}
    for row in own:
        by_delay.setdefault((row.delay, row.by_stage), []).append(row)
    found = []
    for _, alike in sorted(by_delay.items()):
        such = [row for row in alike if row.compressed == compressed]
        such = such or [row for row in alike if not row.compressed]
        found += [min(such, key=lambda row: row.steps)] if such else []
    return found


def late_step(
    probed: Probed, link: Link, codecs: Codecs, count: int, delay: int, by_stage: bool = False
) -> float:
    """Predicted seconds of a step of a pipeline that stays full, with gradients ``delay`` late.

    The time of some steps more, with which neither fill nor emptying is counted. A stage moves its
    parameters beside no message, so this counts in its backwards.
    """
    from jaxmp.plan.choose import meetings, messages_of
    from jaxmp.plan.predict import step
    from jaxmp.runtimes.schedules import stream
    from jaxmp.training.late import delays_of

    times = [
        t._replace(backward=t.backward + t.update / count, update=0.0) for t in probed.stages[count]
    ]
    messages = messages_of(probed, link, codecs, count)
    place = probed.place or tuple(range(len(times)))
    costs = costs_of(times, messages, link)
    delays, ends = delays_of(delay, by_stage, len(times), bool(probed.table)), []
    for steps in (delay + 2, delay + 2 + STEADY):
        actions = stream(place, count, delays, steps, costs)
        ends.append(step(actions, times, messages, link.delay / 1e3))
    return (ends[1] - ends[0]) / STEADY + meetings(probed, link)


def costs_of(times: Sequence[Times], messages: Mapping[Edge, Message], link: Link) -> Costs:
    """Mean costs, which decide what a stage finds arrived first."""
    from jaxmp.runtimes.schedule import Costs

    mean = lambda values: sum(values) / max(1, len(values))
    coded = mean([m.encode + m.decode for m in messages.values()])
    forward, backward = (mean(row) + coded for row in zip(*(t[:2] for t in times), strict=True))
    wire = mean([m.wire for m in messages.values() if m.wire is not None])
    return Costs(forward, backward / 2, backward / 2, wire + link.delay / 1e3)


def covering(probed: Probed, link: Link, codecs: Codecs, count: int) -> tuple[int, float]:
    """The least delay that covers a message's way there and back, and the seconds of a step."""
    from jaxmp.plan.choose import ALIKE

    times = {n: late_step(probed, link, codecs, count, n) for n in range(1, MOST + 1)}
    least = min(times.values())
    return next((n, t) for n, t in times.items() if t <= ALIKE * least)


# What is said.


def said(best: Proposed, choice: Choice) -> str:
    """What is proposed, what it is weighed by, and what it costs."""
    row, gain = best.row, choice.seconds / best.weighed
    flags = {'optimizer.delay': row.delay, 'optimizer.delay_by_stage': row.by_stage}
    flags |= {'optimizer.correction': row.correction}
    flags |= {'parallel.schedule': '1f1b', 'parallel.num_microbatches': best.microbatches}
    if row.correction == 'none':
        del flags['optimizer.correction']
    if not row.by_stage:
        del flags['optimizer.delay_by_stage']
    if best.microbatches == choice.order.microbatches:
        del flags['parallel.num_microbatches']
    words = ' '.join(f'--config.{key}={value}' for key, value in flags.items())
    seeds = f'{row.seeds} seed{"s" * (row.seeds > 1)}'
    messages = 'compressed' if row.compressed else 'raw'
    return (
        f'Late gradients (`{words}`): predicted step {duration(best.seconds)} for '
        f'{duration(choice.seconds)}, times {max(1.0, row.steps):.3f} as many steps to a loss '
        f'(measured: {row.training} with {row.optimizer}, {messages} messages, {seeds}), so '
        f'{gain:.2f} times faster to a loss. A stage but the last keeps up to {row.delay + 1} '
        'versions of its weights.'
    )


def unknown(probed: Probed, choice: Choice, link: Link, training: str) -> str:
    """What is not proposed, since nobody measured it; empty where a step would gain nothing."""
    count = choice.order.microbatches
    delay, seconds = covering(probed, link, choice.codecs, count)
    if seconds > (1 - MARGIN) * choice.seconds:
        return ''
    return (
        f'Late gradients (`optimizer.delay={delay}`) would take {duration(seconds)} a step for '
        f'{duration(choice.seconds)}. They are not proposed: how many more steps {training} then '
        'takes to a loss was not measured.'
    )
