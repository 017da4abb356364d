"""`jaxmp pays`: does a further machine make a step faster over this link? One sentence first.

    jaxmp pays --config=digits_resnet --link=50mbit,40ms

It measures the model on this machine, as `jaxmp plan` does, and a step of the whole model alone.
Then it predicts the step with each stage on a machine of its own, as fast as this one: raw, and
with the codecs that `jaxmp plan` would choose. Steps are given in units of a step alone, which
is the same batch on one machine. OUT.png has the picture, OUT.json the numbers.

    jaxmp pays --config=text_gpt2 --listen=10.0.0.1:9876
    jaxmp pays --config=text_gpt2 --peer=10.0.0.1:9876

The first of these runs on a second machine, at its address. The other one measures that machine
and the link through this port, encrypted (both have a secret, `JAXMP_TOKEN`), and divides the model
between both machines by their speeds and memories. A configuration's keys may follow, such as
--config.model.path=DIR.

This is about training. For generation compare tokens per second of `jaxmp generate --link=...`
with and without --codec: a token is a small message, so that the delay counts, not the bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxmp import terminal
from jaxmp.config import Config
from jaxmp.net.speed import Link
from jaxmp.plan.asked import asked
from jaxmp.plan.verdict import (
    Row,
    Verdict,
    duration,
    following,
    named,
    paying,
    said,
    spelled,
    unsteady,
)

if TYPE_CHECKING:
    from jaxmp.plan.choose import Choice, Probed
    from jaxmp.plan.machines import Compared
    from jaxmp.training.experiment import Experiment

RATES = 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000  # Mbit/s
TURNS = 6  # steps alone, of which the first compiles


# What is measured.


def alone(exp: Experiment) -> list[float]:
    """Seconds of some steps of the whole model in one program."""
    import jax
    import numpy as np

    from jaxmp import data
    from jaxmp.net.group import ProcessGroup
    from jaxmp.training.trainer import Trainer

    trainer, size = Trainer(exp, ProcessGroup()), exp.config.batch_size
    step, state = trainer.bound(trainer.training, trainer.rules(0)), trainer.create()
    [batch] = data.batches(exp.data.train, size, np.arange(size))
    if trainer.scans:
        batch = np.arange(size)[None]
    times = []
    for _ in range(TURNS):
        start = time.monotonic()
        state, values = step(state, batch)
        jax.block_until_ready((state, values))
        times.append(time.monotonic() - start)
    return times[1:]


def by_itself(config: Config) -> Config:
    """The configuration of one machine: one program, no compression, the same batch."""
    from jaxmp.config import KEYS
    from jaxmp.plan.planned import probed_config

    c = probed_config(config)
    idle = [name for name, key in KEYS.items() if key.runtime]
    c.update_from_flattened_dict({name: KEYS[name].default for name in idle})
    c.parallel.update(runtime='local', num_microbatches=1)
    return c


def verdict(
    config: Config, probed: Probed, choice: Choice, link: Link, budget: float,
    compared: Compared | None = None,
) -> Verdict:  # fmt: skip
    """Measures a step alone, and predicts those over links.

    Args:
      config: that was probed.
      probed: what `jaxmp.plan.planned.planned` measured.
      choice: its plan over ``link``.
      link: between neighbouring stages.
      budget: of the error of a crossing.
      compared: two machines, where the other one is not as this one.

    Raises:
      ValueError: as `jaxmp.training.experiment.experiment_of`.
    """
    from jaxmp.plan.choose import choose, uniform
    from jaxmp.plan.late import proposal
    from jaxmp.runtimes.placement import memory
    from jaxmp.training.experiment import experiment_of
    from jaxmp.training.footprint import footprint

    exp = experiment_of(by_itself(config))
    print('the whole model alone', file=sys.stderr, flush=True)

    def row(link: Link, choice: Choice | None = None) -> Row:
        raw = uniform(probed, link, 'raw', 'raw')
        assert raw, 'raw is always measured'
        return Row(link, raw.seconds, choice or choose(probed, link, budget))

    needs = sum(footprint(exp, range(len(exp.task.stages))).values())
    links = [link, *(Link(r, link.delay) for r in RATES if r != link.rate)]
    rows = [row(l, None if l is not link else choice) for l in sorted(links)]
    here = next(r for r in rows if r.link is link)
    still = row(link._replace(delay=0.0)) if link.delay else here
    fastest = min(compared.slower, default=1.0) if compared else 1.0
    has = max(m.memory for m in compared.machines) if compared else memory()
    steps = [fastest * seconds for seconds in alone(exp)]
    return Verdict(
        probed.machines, statistics.median(steps), needs, has, here, still, rows,
        divided(compared) if compared else '', steps, proposal(config, probed, choice, link),
    )  # fmt: skip


def divided(compared: Compared) -> str:
    """What each of two machines has."""
    place, slower = compared.split.place, compared.slower
    other, own = place.count(0), place.count(1)
    faster = f'{1 / slower[0]:.2g}' if slower[0] < 1 else f'1/{slower[0]:.2g}'
    return (
        f' The other machine is {faster} times as fast and has {other} of {other + own} parts, '
        f'the {"first" if place[0] == 0 else "last"} ones.'
    )


# What is shown.


def record(v: Verdict) -> dict[str, Any]:
    """The numbers as JSON has them."""
    rows = [
        {
            'rate': r.link.rate, 'delay': r.link.delay, 'raw': r.raw, 'best': r.best,
            'codecs': named(r.choice), 'schedule': r.choice.order.schedule,
            'microbatches': r.choice.order.microbatches,
        }
        for r in v.rows
    ]  # fmt: skip
    one = {'machines': v.machines, 'alone': v.alone, 'needs': v.needs, 'has': v.has}
    return {'verdict': said(v), **one, 'rate': v.row.link.rate, 'rows': rows}


def show(v: Verdict) -> None:
    """Prints the sentence and a row per rate."""
    from rich.table import Table

    table = Table(title='a step, in units of a step alone; above 1 is slower')
    for head in ('link', 'raw', 'compressed', 'codecs', 'pays'):
        table.add_column(head, justify='right' if head in ('raw', 'compressed') else 'left')
    for r in v.rows:
        ratio, mark = r.best / v.alone, ', as asked' if r.link == v.row.link else ''
        pays = {'It pays': 'yes', 'It does not pay': 'no'}.get(paying(ratio), 'alike')
        cells = f'{r.raw / v.alone:.2f}', f'{ratio:.2f}', named(r.choice), pays
        table.add_row(spelled(r.link) + mark, *cells)
    terminal.show(said(v), table, *filter(None, (unsteady(v), v.late, following(v))))


def draw(v: Verdict, path: Path) -> None:
    """Time of a step against the rate of the link; both axes logarithmic."""
    from jaxmp.pictures import style

    with style.style():
        figure = style.figure(6.5, 4)
        axes = figure.subplots()
        rates = [r.link.rate for r in v.rows]
        lines = {
            'raw messages': ('black', 's', [r.raw / v.alone for r in v.rows]),
            'compressed as planned': (style.PALETTE[1], 'o', [r.best / v.alone for r in v.rows]),
        }
        for label, (colour, mark, values) in lines.items():
            axes.plot(rates, values, color=colour, marker=mark, ms=4, label=label)
        axes.axhline(1, color=style.PALETTE[2], label='one machine alone')
        axes.axvline(v.row.link.rate, color='gray', ls=':', label='the link asked about')
        axes.set_xscale('log')
        axes.xaxis.set_major_formatter('{x:g}')
        style.logarithmic(axes)
        late = f', {v.row.link.delay:g} ms' if v.row.link.delay else ''
        axes.set(xlabel=f'Mbit/s between stages{late}', ylabel='step, in steps alone')
        axes.legend()
        figure.suptitle(f'{v.machines} machines against one')
        style.caption(
            figure, f'predicted from measurements of this machine; 1 is {duration(v.alone)}'
        )
        style.save(figure, path, style.digest(record(v), __file__))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    from jaxmp.net.address import ProcessGroupError

    try:
        ask = asked(argv, 'jaxmp pays', __doc__, 'pays.png')
        from jaxmp.plan.planned import for_machines, planned_on

        config, _, link, machines = for_machines(ask)
        probed, choice = planned_on(machines, config, link, ask)
        v = verdict(config, probed, choice, link, ask.error, machines)
        show(v)
        draw(v, ask.out)
        ask.out.with_suffix('.json').write_text(json.dumps(record(v), indent=1) + '\n')
    except KeyboardInterrupt:
        sys.exit('jaxmp pays: stopped by Ctrl-C')
    except (OSError, ValueError, ProcessGroupError) as error:
        sys.exit(f'jaxmp pays: {error}')
    print(f'wrote {ask.out} and {ask.out.with_suffix(".json")}')


if __name__ == '__main__':
    main()
