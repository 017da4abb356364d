"""The eight-stage twin: how many more steps a pair of channels needs until a fixed loss.

A GPT of eight blocks, one per stage, learns the embedded text byte by byte (`configs/text_twin.py`)
with a learning rate that is constant after a warm-up. It is tested after every epoch, through its
channels. The loss between two tests is interpolated. A ratio is that of two runs of the same seed,
which start from the same weights and see the same batches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from jaxmp.config import Config, Summary, load
from jaxmp.sweep.study import Job, jobs
from jaxmp.training.optimizer import Rate
from study.bench.entries import RAW, Entry

WARM = 100  # steps


class Goal(NamedTuple):
    """What the twin learns.

    Attributes:
      loss: that counts as learned, nats per byte.
      changes: of `configs/text_twin.py`, by dotted names.
    """

    loss: float
    changes: Mapping[str, object] = MappingProxyType({})


GOAL = Goal(loss=1.9)


class Twin(NamedTuple):
    """How a pair of channels trained.

    Attributes:
      ratios: steps until the loss over those of the uncompressed run, of each seed; None of a seed
        that never gets there, or whose uncompressed run does not.
      losses: the last test loss of each seed.
      raw: likewise of the uncompressed runs.
    """

    ratios: list[float | None]
    losses: list[float]
    raw: list[float]

    @property
    def ratio(self) -> float | None:
        """The mean ratio; None if a seed never reaches the loss."""
        reached = [r for r in self.ratios if r is not None]
        return sum(reached) / len(reached) if reached and len(reached) == len(self.ratios) else None


def plan(entries: Sequence[Entry], seeds: int, out: Path, goal: Goal = GOAL) -> list[Job]:
    """The runs of entries, with the seeds of an entry one after another.

    Args:
      entries: pairs of channels.
      seeds: number of runs of each.
      out: folder of results and of unfinished runs.
      goal: what is learned.
    """
    study = [(s, config_of(e, s, goal)) for e in entries for s in range(seeds)]
    return jobs(study, out / 'runs', out / 'work')


def config_of(entry: Entry, seed: int, goal: Goal = GOAL) -> Config:
    """The configuration of a run."""
    c = load('text_twin')
    c.update_from_flattened_dict(dict(goal.changes))
    c.update(name=entry.name, fwd=entry.fwd, bwd=entry.bwd, codecs=entry.codecs, seed=seed)
    return c.lock()


def rate(config: Config, epoch_steps: int) -> Rate:
    """The learning rate: linear over `WARM` steps, then constant, for ``optimizer.schedule``."""
    return lambda step: config.optimizer.lr * jnp.minimum(1.0, (step + 1) / WARM)


def entry_of(summary: Summary) -> Entry:
    """The entry of a result."""
    return Entry(summary['fwd'], summary['bwd'], summary['config']['codecs'])


def twins(results: Sequence[Summary], loss: float) -> dict[Entry, Twin]:
    """What the results say of each entry, by the seeds that have an uncompressed run too."""
    runs: dict[Entry, dict[int, Summary]] = {}
    for summary in results:
        runs.setdefault(entry_of(summary), {})[summary['seed']] = summary
    base, by_entry = runs.get(RAW, {}), {}
    for entry, of_entry in runs.items():
        seeds = sorted(of_entry.keys() & base.keys())
        pairs = [(steps_to(of_entry[s], loss), steps_to(base[s], loss)) for s in seeds]
        ratios = [a / b if a and b else None for a, b in pairs]
        last = lambda runs, seeds=seeds: [runs[s]['history']['on']['loss'][-1] for s in seeds]
        by_entry[entry] = Twin(ratios, last(of_entry), last(base))
    return by_entry


def steps_to(summary: Summary, loss: float) -> float | None:
    """Steps until the test loss is ``loss``, linear between two tests; None if it never is.

    A run that is there at its first test took at most the steps until then, which count.

    >>> run = {'steps': 30, 'history': {'on': {'loss': [3.0, 2.0, 1.5]}}}
    >>> steps_to(run, 2.25), steps_to(run, 1.0)
    (17.5, None)
    """
    losses = summary['history']['on']['loss']
    each, before = summary['steps'] / len(losses), math.inf
    for i, after in enumerate(losses):
        if after <= loss:
            part = (before - loss) / (before - after) if math.isfinite(before) else 1.0
            return each * (i + part)
        before = after
    return None
