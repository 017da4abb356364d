"""`stage_times`: how long each stage computes, measured alone, by number of micro-batches."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.plan.clock import PASSES, Clock
from jaxmp.plan.predict import Times
from jaxmp.plan.steps import Trained
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.state import MicroBatch, StageState
from jaxmp.runtimes.worker import CompiledStage, Worker
from jaxmp.training.evaluate import model_of
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.wire import Ctx

MOST = 16  # micro-batches, or those of the training steps
MOST_TURNS = 25  # in which all are timed; at least `PASSES`
SHARE = 0.85  # of the time, after which no further number of micro-batches is compiled


def stage_times(exp: Experiment, trained: Trained, clock: Clock) -> dict[int, list[Times]]:
    """Times of all stages by number of micro-batches.

    A machine's speed varies from second to second, so all numbers of micro-batches, and backwards
    whole and in two halves, are timed in turns. A step takes longer than its actions alone, which
    find their data in the cache and the program ready: all times grow by the ratio that a training
    step had to its actions.

    Args:
      exp: uncompressed, under ``mpmd``, of one replica.
      trained: its training steps.
      clock: of the probe.
    """
    own = exp.config.parallel.num_microbatches
    near = [n for n in divisors(exp.config.batch_size, own) if n <= max(own, MOST)]
    counts = list(dict.fromkeys([own, max(near), *near]))  # so that few lie beyond the first two
    runs: dict[tuple[int, bool], Callable[[bool], list[list[float]]]] = {}
    for i, count in enumerate(counts):
        if i and clock.spent(SHARE):
            left = ', '.join(map(str, sorted(counts[i:])))
            clock.say(f'no time for {left} micro-batches, whose times are estimated')
            break
        clock.say(f'stages with {count} micro-batches')
        runs[count, False] = passes(with_microbatches(exp, count), trained.variables)
        runs[count, False](False)  # compiles
        if not i and not clock.spent(SHARE):
            clock.say('backwards in two halves')
            runs[count, True] = runs[count, False]
            runs[count, True](True)
    clock.say('stages in turns')
    found, shares = in_turns(runs, clock), [()] * len(trained.variables)
    ratio = max(1.0, trained.gradients / (own * np.sum(found[own, False])))
    if (own, True) in found:
        pairs = zip(found[own, True], found[own, False], strict=True)
        shares = [tuple(t / b if b else 0.0 for t in halves) for (_, *halves), (_, b) in pairs]
    whole = {count: rows for (count, split), rows in found.items() if not split}
    return {
        count: [
            Times(f, b, tuple(b * share for share in shares[s]), trained.rest)
            for s, (f, b) in enumerate(ratio * rows)
        ]
        for count, rows in sorted(interpolated(whole, counts).items())
    }


def divisors(size: int, near: int) -> list[int]:
    """The numbers that divide ``size``, those of the least ratio to ``near`` first.

    >>> divisors(24, 8)
    [8, 6, 12, 4, 3, 24, 2, 1]
    """
    found = [n for n in range(1, size + 1) if size % n == 0]
    return sorted(found, key=lambda n: abs(math.log(n / near)))


def in_turns(
    runs: Mapping[Any, Callable[[bool], list[list[float]]]], clock: Clock
) -> dict[Any, np.ndarray]:
    """Medians of what runs give, which take turns, by their keys, whose end is their argument."""
    found: dict[Any, list[Any]] = {key: [] for key in runs}
    for turn in range(MOST_TURNS):
        if turn >= PASSES and clock.spent():
            break
        for key, run in runs.items():
            found[key].append(run(key[-1]))
    return {key: np.median(rows, 0) for key, rows in found.items()}


def interpolated(found: Mapping[int, Any], counts: Sequence[int]) -> dict[int, np.ndarray]:
    """Times of all counts, linear in the size of a micro-batch; beyond the measured ones in ratio.

    >>> {n: a.tolist() for n, a in interpolated({1: [[4.0]], 4: [[1.0]]}, [1, 2, 4, 8]).items()}
    {1: [[4.0]], 2: [[2.0]], 4: [[1.0]], 8: [[0.5]]}
    """
    known = sorted(found, reverse=True)
    sizes, rows = [1 / n for n in known], [found[n] for n in known]
    at = lambda n: np.apply_along_axis(lambda t: np.interp(1 / n, sizes, t), 0, rows)
    return {n: at(n) * (1 / n / np.clip(1 / n, sizes[0], sizes[-1])) for n in counts}


def passes(exp: Experiment, variables: Sequence[Any]) -> Callable[[bool], list[list[float]]]:
    """A function of ``split``: for each stage the seconds of F and B, or of F, B and W."""
    model, size = model_of(exp, exp.model.boundaries), microbatch_like(exp).shape[0]
    made = programs(model)
    stages = [CompiledStage(p, None) for p in made]
    [batch] = data.batches(exp.data.train, size, np.arange(size))
    x = jax.jit(model.prepare)(batch['x'], jax.random.key(0))
    fresh = lambda v: jax.tree.map(jnp.array, {k: v[k] for k in v if k != 'params'})  # donated
    states = [
        StageState(v['params'], fresh(v), p.init_feedback())
        for v, p in zip(variables, made, strict=True)
    ]

    def run(split: bool) -> list[list[float]]:
        rows: list[dict[str, float]] = [{} for _ in stages]
        workers = [Worker(p, st, (0,) * split) for p, st in zip(stages, states, strict=True)]
        ctx = Ctx(jax.random.key(0), jnp.asarray(batch['id']), microbatch=np.int32(0))
        own = x, batch['y'], ctx.reading(x)
        for s, kind, seconds in one_pass(workers, own, model.first, split):
            rows[s][kind] = seconds
        states[:] = [w.state() for w in workers]
        return [[row.get(kind, 0.0) for kind in 'FBW'[: 2 + split]] for row in rows]

    return run


def one_pass(
    workers: Sequence[Worker], batch: tuple[Array, Any, Ctx], first: int, split: bool
) -> Iterator[tuple[int, str, float]]:
    """Seconds of all actions of one micro-batch, ``(stage, kind, seconds)``.

    Stages before ``first`` have nothing that is trained, and run no backward.
    """
    x, y, ctx = batch
    last, message = len(workers) - 1, None
    for s, w in enumerate(workers):
        w.total = w.stage.init_accumulator(w.params, y if s == last else None)
        rows = MicroBatch(x if s == 0 else None, y if s == last else None, ctx)
        w.waiting[0] = jax.device_put(rows)
        message, seconds = acted(w, 'F', message)
        yield s, 'F', seconds
    message = None
    for s in range(last, first - 1, -1):
        message, seconds = acted(workers[s], 'B', message)
        yield s, 'B', seconds
    for s in range(first, len(workers) if split else 0):
        yield s, 'W', acted(workers[s], 'W', None)[1]


def acted(worker: Worker, kind: str, message: Any) -> tuple[Any, float]:
    """The message that an action makes, and its seconds."""
    worker.wait(message)
    start = time.monotonic()
    made = worker.act(kind, 0, message)
    worker.wait(made)
    return made, time.monotonic() - start


def with_microbatches(exp: Experiment, count: int) -> Experiment:
    """The experiment with another number of micro-batches."""
    config = exp.config.copy_and_resolve_references()
    config.parallel.num_microbatches = count
    return exp._replace(config=config)
