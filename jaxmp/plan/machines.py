"""`compared`: how fast this machine and another one compute a model's parts, and their link.

Machine 0 is the one that listens, at the address where process 0 of the run will be, and machine 1
the one that calls. Both have the same configuration and measure in turn, so that two on one host do
not disturb each other.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp.config import Config
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.speed import Link
from jaxmp.plan import between
from jaxmp.plan.asked import Asked
from jaxmp.plan.splits import Machine, Split, best, in_parts, oriented, parts_of, spread, values_of
from jaxmp.plan.stages import passes
from jaxmp.runtimes.placement import memory
from jaxmp.training.agreement import settings_of
from jaxmp.training.experiment import Experiment
from jaxmp.training.trainer import Trainer

PASSES, SECONDS = 3, 4.0  # at least, after the first, which compiles


class Compared(NamedTuple):
    """Two machines, and how a model is divided between them.

    Attributes:
      machines: 0, which listens, and 1, which calls.
      link: between the stages of the split, forward and back.
      split: of the model's parts.
      values: keys of the configuration that it sets.
    """

    machines: tuple[Machine, ...]
    link: Link
    split: Split
    values: dict[str, str]

    @property
    def slower(self) -> list[float]:
        """How many times as long each machine takes as the one that calls."""
        return [m.seconds / self.machines[-1].seconds for m in self.machines]


def compared(asked: Asked, config: Config, probed: Callable[[Any], Experiment]) -> Compared:
    """Calls the machine that listens.

    Args:
      asked: the command line.
      config: whose model is divided.
      probed: the experiment of a probe, given a configuration.

    Raises:
      ProcessGroupError: if nobody listens, or the other has another secret or other settings.
      ValueError: if the model cannot be divided, or fits nowhere.
    """
    assert asked.peer
    exp, count = parts(config, probed)
    say(f'calling {asked.peer[0]}:{asked.peer[1]}')
    with between.met(asked.peer, False, settings_of(config), asked.token_file) as group:
        link, machines = meeting(group, exp, count)
        group.close()
    found = parts_of(exp, count)
    split = best(found, machines, link)
    turned = split.place[0] > split.place[-1]
    return Compared(machines, link.turned() if turned else link, split, values_of(split, found))


def listen(
    asked: Asked, config: Config, probed: Callable[[Any], Experiment], calls: int = 0
) -> None:
    """Answers callers, one after another, until Ctrl-C; or so many of them."""
    assert asked.peer
    exp, count = parts(config, probed)
    answered = 0
    while not calls or answered < calls:
        say(f'listening at {asked.peer[0]}:{asked.peer[1]}; Ctrl-C ends it')
        try:
            with between.met(asked.peer, True, settings_of(config), asked.token_file) as group:
                link, machines = meeting(group, exp, count)
                group.close()
        except between.CallEndedError as error:
            say(f'the call has ended: {error}')
            continue
        answered += 1
        here, there = machines
        say(f'{told(link)}; this machine is {there.seconds / here.seconds:.2f} times as fast')


def parts(config: Config, probed: Callable[[Any], Experiment]) -> tuple[Experiment, int]:
    """The experiment whose stages tell of all parts of a model, and their number."""
    divided, count = in_parts(config)
    return probed(divided), count


def meeting(group: ProcessGroup, exp: Experiment, count: int) -> tuple[Link, tuple[Machine, ...]]:
    """What both machines do: the link, then each its own speed."""
    say('the link')
    found = between.measured(group)
    turned = found._replace(there=found.back, back=found.there)
    link = oriented(found if group.index else turned)
    rows: list[Any] = []
    with group.phase('measuring its speed', LONG):
        for turn in (0, 1):
            if turn == group.index:
                say(f'the speed of this machine, {count} parts')
            rows.append(group.share(machine(exp, count) if turn == group.index else None)[turn])
    return link, tuple(Machine(*row) for row in rows)


def machine(exp: Experiment, count: int) -> Machine:
    """This machine; compiles the stages of an experiment as `in_parts` has it.

    A machine with a share of its processor, as by a quota, does some parts at full speed and stands
    still in others. So the least seconds tell how parts differ, and the mean over some seconds how
    fast the machine is.
    """
    trainer = Trainer(exp, ProcessGroup())
    run = passes(exp, jax.device_put(trainer.weights(trainer.create()), jax.devices()[0]))
    run(False)  # compiles
    started, rows = time.monotonic(), []
    while len(rows) < PASSES or time.monotonic() - started < SECONDS:
        rows.append(run(False))
    times = np.asarray(rows)  # by pass, stage and way
    least = times.min(0) * (times.mean(0).sum() / times.min(0).sum())
    forward, backward = (spread(way, count) for way in least.T.tolist())
    return Machine(forward, backward, memory())


def told(link: Link) -> str:
    """A measured link in words.

    >>> told(Link(93.21, 20.13, 9.5))
    '93.2 Mbit/s to the machine that calls, 9.5 back, 20.1 ms'
    """
    back = link.back or link.rate
    return f'{link.rate:.3g} Mbit/s to the machine that calls, {back:.3g} back, {link.delay:.3g} ms'


def say(text: str) -> None:
    """Tells progress."""
    print(text, file=sys.stderr, flush=True)
