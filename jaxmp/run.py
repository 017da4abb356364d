"""A run from start to summary: resume, epochs, records, checkpoints, the closing table."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from jaxmp import data
from jaxmp.checkpoint import Checkpoints, claim
from jaxmp.evaluate import Evaluate, evaluator
from jaxmp.log import Display, Metrics, duration, provenance, show
from jaxmp.report import curves
from jaxmp.train import (
    Config,
    Epoch,
    Setting,
    TrainState,
    create,
    epoch_by_scan,
    epoch_by_step,
    message_bytes,
    setting,
    split,
)

Place = dict[str, Any]


class DivergedError(RuntimeError):
    """The loss is not finite; the last checkpoint is from before."""


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT append to, so that the loop can save before it ends."""
    seen: list[int] = []
    old = {
        n: signal.signal(n, lambda n, _: seen.append(n)) for n in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield seen
    finally:
        for n, handler in old.items():
            signal.signal(n, handler)


def run(config: Config, workdir: str | Path) -> dict[str, Any] | None:
    """Trains, evaluates every epoch, and leaves config, metrics, checkpoints, summary and curves.

    Goes on from the workdir's last checkpoint if there is one.

    Args:
      config: as in configs/.
      workdir: the run's folder.

    Returns:
      The summary, or None if a signal ended the run early (its state is saved).

    Raises:
      ValueError: for a configuration that makes no sense.
      WorkdirError: if the workdir cannot be used.
      DivergedError: if the loss is not finite.
    """
    workdir = Path(workdir)
    s = setting(config)
    claim(workdir, config.to_dict())
    checkpoints = Checkpoints(workdir)
    state = create(s)
    place = {'loss': 0.0, 'accuracy': 0.0, 'steps': 0, 'seconds': 0.0}
    if (found := checkpoints.restore(state)) is not None:
        state, place = found
    done = int(state.step)
    metrics = Metrics(workdir, done, config.tensorboard)
    display = Display(config.epochs * s.epoch_steps, done, config.batch_size)
    if done:
        display.say(f'going on from step {done} of {workdir}')
    try:
        with stop_signals() as stopped:
            r = Run(s, checkpoints, metrics, display, stopped)
            state, place = train(r, state, place)
    finally:
        display.close()
        metrics.close()
        checkpoints.close()
    if stopped:
        step = int(state.step)
        print(f'stopped by signal {stopped[0]}, saved at step {step}; the same command goes on')
        return None
    return finish(s, state, place, metrics.records, workdir)


class Run(NamedTuple):
    """A setting and what its run talks to."""

    s: Setting
    checkpoints: Checkpoints
    metrics: Metrics
    display: Display
    stopped: list[int]


def train(r: Run, state: TrainState, place: Place) -> tuple[TrainState, Place]:
    """The epochs from ``state`` on; ``place`` holds the sums of the epoch begun."""
    config, n = r.s.config, r.s.epoch_steps
    form = epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan
    phases: dict[bool, Epoch] = {}
    evaluate = evaluator(r.s)
    start = time.time() - place['seconds']
    for epoch in range(int(state.step) // n, config.epochs):
        warming = epoch < config.warmup_epochs
        if warming not in phases:
            phases = {warming: form(r.s, r.s.warm_model if warming else r.s.model)}
        order = data.order(config.seed, epoch, len(r.s.data.train.y))[: n * config.batch_size]
        left = order[place['steps'] * config.batch_size :]
        for after, sums, steps in phases[warming](state, left):
            state = after
            place = add(place, sums, steps, epoch * n)
            show_progress(r, place, epoch)
            if r.stopped:
                break
        place = {**place, 'seconds': time.time() - start}
        if place['steps'] == n:
            record(r, state, place, epoch + 1, evaluate)
            place = {**place, 'loss': 0.0, 'accuracy': 0.0, 'steps': 0}
        if r.stopped or epoch + 1 == config.epochs or (epoch + 1) % config.checkpoint_every == 0:
            r.checkpoints.save(int(state.step), state, place)
        if r.stopped:
            break
    return state, place


def add(place: Place, sums: dict[str, Array], steps: int, before: int) -> Place:
    """Adds the sums of some steps to the epoch's; raises DivergedError on a loss not finite."""
    loss = float(sums['loss'])
    if not math.isfinite(loss):
        raise DivergedError(
            f'the loss is {loss} at step {before + place["steps"] + steps}; the last checkpoint is '
            'from before it. Lower config.lr, or send more bits backward'
        )
    total = {k: place[k] + float(v) for k, v in sums.items()}
    return {**place, **total, 'steps': place['steps'] + steps}


def show_progress(r: Run, place: Place, epoch: int) -> None:
    """Tells the display the running means of the epoch."""
    loss, accuracy = (place[k] / place['steps'] for k in ('loss', 'accuracy'))
    step = epoch * r.s.epoch_steps + place['steps']
    r.display.update(f'epoch {epoch + 1}/{r.s.config.epochs}', step, loss, accuracy)


def record(r: Run, state: TrainState, place: Place, epoch: int, evaluate: Evaluate) -> None:
    """Closes an epoch: its mean training loss, and the test with compression off and on."""
    base = {'step': int(state.step), 'epoch': epoch}
    means = {k: place[k] / place['steps'] for k in ('loss', 'accuracy')}
    r.metrics.write({'kind': 'train', **base, **means, 'seconds': place['seconds']})
    off, on = evaluate(state, False), evaluate(state, True)
    for mode, scores in (('off', off), ('on', on)):
        r.metrics.write({'kind': 'test', **base, 'compression': mode, **scores})
    r.display.say(
        f'epoch {epoch}/{r.s.config.epochs}  {duration(place["seconds"])}  '
        f'train loss {means["loss"]:.4f}  test accuracy off {off["accuracy"]:.2%}  '
        f'on {on["accuracy"]:.2%}'
    )


def finish(
    s: Setting,
    state: TrainState,
    place: Place,
    records: list[dict[str, Any]],
    workdir: Path,
) -> dict[str, Any]:
    """Writes summary.json and curves.png, prints the closing tables."""
    keep = ('epoch', 'loss', 'accuracy')
    test = {}
    for mode in ('off', 'on'):
        rows = [r for r in records if r['kind'] == 'test' and r['compression'] == mode]
        best = max(rows, key=lambda r: r['accuracy'])
        test[mode] = {n: {k: r[k] for k in keep} for n, r in (('best', best), ('last', rows[-1]))}
    summary = {
        **{k: s.config[k] for k in ('name', 'fwd', 'bwd', 'seed')},
        'test': test,
        'bytes': message_bytes(s, state),
        'parameters': sum(p.size for p in jax.tree.leaves(split(state.variables)[0])),
        'steps': int(state.step),
        'seconds': round(place['seconds'], 1),
        **provenance(),
        # Where the data lay says nothing of the run, and much of the machine.
        'config': {k: v for k, v in s.config.to_dict().items() if k != 'data_dir'},
    }
    (workdir / 'summary.json').write_text(json.dumps(summary, indent=1) + '\n')
    picture = curves.draw(workdir)
    show(summary)
    print(f'{summary["seconds"]} s; summary and curves: {workdir / "summary.json"}, {picture}')
    return summary
