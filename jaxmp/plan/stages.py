"""`stage_times`: how long each stage computes, measured alone, by number of micro-batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.plan.clock import PASSES, Clock
from jaxmp.plan.crossings import Trained
from jaxmp.plan.predict import Times
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.state import MicroBatch, StageState
from jaxmp.runtimes.worker import CompiledStage, Worker
from jaxmp.training.engine import model_of
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.wire import Ctx

MOST = 16  # micro-batches


def stage_times(exp: Experiment, trained: Trained, clock: Clock) -> dict[int, list[Times]]:
    """Times of all stages by number of micro-batches.

    A step takes longer than its actions alone, which find their data in the cache and the program
    ready. All times grow by the ratio that a training step had to its actions.

    Args:
      exp: uncompressed, under ``mpmd``, of one replica.
      trained: its training steps.
      clock: of the probe.
    """
    own, size = exp.config.parallel.num_microbatches, exp.config.batch_size
    counts = [n for n in range(1, min(MOST, size) + 1) if size % n == 0]
    counts = list(dict.fromkeys([own, counts[-1], 1, *counts]))
    found, shares, ratio = {}, [()] * len(trained.variables), 1.0
    for i, count in enumerate(counts):
        if i and clock.spent():
            left = ', '.join(map(str, sorted(counts[i:])))
            clock.say(f'no time for {left} micro-batches, which are interpolated')
            break
        clock.say(f'stages with {count} micro-batches')
        run = passes(with_microbatches(exp, count), trained.variables)
        found[count] = run(False)
        if not i:
            ratio = max(1.0, trained.gradients / (own * np.sum(found[own])))
        if not i and not clock.spent():
            clock.say('backwards in two halves')
            pairs = zip(run(True), found[own], strict=True)
            shares = [tuple(t / b for t in halves) for (_, *halves), (_, b) in pairs]
    return {
        count: [
            Times(f, b, tuple(b * share for share in shares[s]), trained.rest)
            for s, (f, b) in enumerate(ratio * rows)
        ]
        for count, rows in sorted(interpolated(found, counts).items())
    }


def interpolated(
    found: Mapping[int, Sequence[Sequence[float]]], counts: Sequence[int]
) -> dict[int, np.ndarray]:
    """Times of all counts, linear in the size of a micro-batch; beyond the measured ones in ratio.

    >>> {n: a.tolist() for n, a in interpolated({1: [[4.0]], 4: [[1.0]]}, [1, 2, 4, 8]).items()}
    {1: [[4.0]], 2: [[2.0]], 4: [[1.0]], 8: [[0.5]]}
    """
    known = sorted(found, reverse=True)
    sizes, rows = [1 / n for n in known], [found[n] for n in known]
    at = lambda n: np.apply_along_axis(lambda t: np.interp(1 / n, sizes, t), 0, rows)
    return {n: at(n) * (1 / n / np.clip(1 / n, sizes[0], sizes[-1])) for n in counts}


def passes(exp: Experiment, variables: Sequence[Any]) -> Callable[[bool], list[list[float]]]:
    """A function of ``split``: for each stage the median seconds of F and B, or of F, B and W."""
    model, size = model_of(exp, exp.model.boundaries), microbatch_like(exp).shape[0]
    made = programs(
        model.stages, model.boundaries, model.loss, model.x, {'train': True}, model.remat
    )
    stages = [CompiledStage(p, None) for p in made]
    [batch] = data.batches(exp.data.train, size, np.arange(size))
    x = jax.jit(model.prepare)(batch['x'], jax.random.key(0))
    fresh = lambda v: jax.tree.map(jnp.array, {k: v[k] for k in v if k != 'params'})  # donated
    states = [
        StageState(v['params'], fresh(v), p.init_feedback())
        for v, p in zip(variables, made, strict=True)
    ]

    def run(split: bool) -> list[list[float]]:
        rows: list[dict[str, list[float]]] = [{k: [] for k in 'FBW'[: 2 + split]} for _ in stages]
        for turn in range(1 + PASSES):
            workers = [Worker(p, state, split) for p, state in zip(stages, states, strict=True)]
            ctx = Ctx(jax.random.key(turn), jnp.asarray(batch['id']), microbatch=np.int32(0))
            ctx = ctx.reading(x)
            for s, kind, seconds in one_pass(workers, (x, batch['y'], ctx), split):
                rows[s][kind] += [seconds] * (turn > 0)
            states[:] = [w.state() for w in workers]
        return [[statistics.median(times) for times in row.values()] for row in rows]

    return run


def one_pass(workers: Sequence[Worker], batch: tuple[Array, Any, Ctx], split: bool) -> Any:
    """Seconds of all actions of one micro-batch, ``(stage, kind, seconds)``."""
    x, y, ctx = batch
    last, message = len(workers) - 1, None
    for s, w in enumerate(workers):
        w.total = w.stage.init_accumulator(w.params, y if s == last else None)
        own = jax.device_put(MicroBatch(x if s == 0 else None, y if s == last else None, ctx))
        message, seconds = acted(w, 'F', own, message)
        yield s, 'F', seconds
    message = None
    for s in range(last, -1, -1):
        message, seconds = acted(workers[s], 'B', None, message)
        yield s, 'B', seconds
    for s, w in enumerate(workers if split else ()):
        yield s, 'W', acted(w, 'W', None, None)[1]


def acted(worker: Worker, kind: str, own: MicroBatch | None, message: Any) -> tuple[Any, float]:
    """The message that an action makes, and its seconds."""
    jax.block_until_ready(own)
    worker.wait(message)
    start = time.monotonic()
    made = worker.act(kind, 0, own, message)
    worker.wait(made)
    return made, time.monotonic() - start


def with_microbatches(exp: Experiment, count: int) -> Experiment:
    """The experiment with another number of micro-batches."""
    config = exp.config.copy_and_resolve_references()
    config.parallel.num_microbatches = count
    return exp._replace(config=config)
