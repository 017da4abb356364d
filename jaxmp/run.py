"""A run from start to summary: resume, epochs, records, checkpoints, the closing table."""

from __future__ import annotations

import math
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmp import data, version
from jaxmp.alike import check_data, check_workdir
from jaxmp.checkpoint import Checkpoints
from jaxmp.files import WorkdirError, claim, owned, whole, write_json
from jaxmp.log import Display, Metrics, duration, headline, provenance, quality, show
from jaxmp.report import curves
from jaxmp.resume import Place, begin, finished, stop_signals, tell_resumption
from jaxmp.setting import (
    Setting,
    check_choices,
    check_memory,
    message_bytes,
    parameters,
    setting,
    table_bytes,
)
from jaxmp.task import Config, stage_count
from jaxmp.team import Address, Team, connect
from jaxmp.training.by_stage import by_stage
from jaxmp.training.engine import Engine, Values
from jaxmp.training.one_program import one_program
from jaxmp.training.step import TrainState


class DivergedError(RuntimeError):
    """The loss is not finite; the last checkpoint is from before."""


def team_of(config: Config, address: Address) -> Team:
    """The processes of a run of ``config``, which share its stages or its replicas.

    Raises:
      ValueError: if an address is given to a run of one process; or as `jaxmp.team.connect`.
      TeamError: as `jaxmp.team.connect`.
    """
    check_choices(config)
    staged, replicas = config.runtime == 'mpmd', config.get('replicas', 1)
    if config.runtime == 'spmd' or (not staged and replicas == 1):
        if any(a is not None for a in address[:3]):
            raise ValueError(
                f'config.runtime={config.runtime!r} is one process, got {address}; processes need '
                '--config.runtime=mpmd or --config.replicas=N'
            )
        return Team()
    own = {k: v for k, v in config.to_dict().items() if k not in ('data_dir', 'download')}
    versions = {'jaxmp': version.__version__, 'jax': jax.__version__}
    if staged:
        parts = replicas * stage_count(config)
        return connect(address, parts, {**versions, **own})
    return connect(address, replicas, {**versions, **own}, what='replica')


def devices(config: Config) -> int:
    """How many devices a run needs: one per replica, in spmd one per stage of each."""
    each = stage_count(config) if config.runtime == 'spmd' else 1
    return config.get('replicas', 1) * each


class Prepared(NamedTuple):
    """A setting and its runtime, whose compiled programs runs of other seeds share."""

    s: Setting
    engine: Engine


def prepare(config: Config, team: Team) -> Prepared:
    """What `run` needs for ``config``; raises ValueError or TeamError where it makes no sense."""
    s = setting(config)
    if team.count == 1:
        check_memory(s)
    check_data(team, s.data)
    team.gather(np.zeros(1))  # all are here: links open now, before compiling parts them
    return Prepared(s, engine_of(s, team))


def reseed(made: Prepared, config: Config) -> Prepared:
    """``made`` for ``config``, which differs in its seed."""
    return made._replace(s=made.s._replace(config=config))


def run(
    config: Config,
    workdir: str | Path,
    team: Team | None = None,
    made: Prepared | None = None,
    quiet: bool = False,
    tensorboard: bool = False,
) -> dict[str, Any] | None:
    """Trains, evaluates every epoch, and leaves config, metrics, checkpoints, summary and curves.

    Goes on from the workdir's last checkpoint if there is one. Of several processes the first
    shows and writes what all share.

    Args:
      config: as in configs/.
      workdir: the run's folder.
      team: the processes, from `jaxmp.team.connect`; default this one alone.
      made: from `prepare`, where other runs have used it.
      quiet: show and draw nothing.
      tensorboard: also write event files for TensorBoard.

    Returns:
      The summary, or None if a signal ended the run early (its state is saved).

    Raises:
      ValueError: for a configuration that makes no sense.
      WorkdirError: if the workdir cannot be used.
      TeamError: if the processes have different data or workdirs.
      DivergedError: if the loss is not finite.
    """
    workdir, team = Path(workdir), team or Team()
    s, engine = made or prepare(config, team)
    lead, kept = team.index == 0, None
    with ExitStack() as stack:
        if lead:
            count = {'processes': team.count} if config.runtime == 'mpmd' or team.count > 1 else {}
            kept = {**config.to_dict(), **count}
            stack.enter_context(owned(workdir))
            claim(workdir, kept)
        check_workdir(team, workdir)
        checkpoints = stack.enter_context(closing(Checkpoints(workdir, team, kept)))
        state, place = begin(s, engine, checkpoints, workdir)
        done, total = int(state.step), config.epochs * s.epoch_steps
        metrics = Metrics(workdir if lead else None, done, tensorboard)
        stack.enter_context(closing(metrics))
        display = Display(total, done, config.batch_size, quiet or not lead)
        with closing(display), stop_signals() as seen:
            tell_resumption(display, checkpoints, workdir, done)
            r = Run(s, engine, checkpoints, metrics, display, seen, workdir, done)
            state, place, stopped = train(r, state, place)
        if stopped:
            if lead and not quiet:
                print(f'stopped by a signal, saved at step {state.step}; the same command goes on')
            return None
        moved, weights = engine.moved(), engine.weights(state)
        return conclude(r, place, moved, weights, quiet) if lead else {}


def conclude(
    r: Run, place: Place, moved: dict[str, Any], weights: Any, quiet: bool
) -> dict[str, Any]:
    """Leaves summary, model and curves; a run that had ended before keeps its summary."""
    s, steps = r.s, r.s.config.epochs * r.s.epoch_steps
    summary = finished(r.workdir, steps) if r.start == steps else None
    summary = summary or finish(s, steps, place, r.metrics.records, moved, r.workdir)
    if s.task.export and weights is not None:
        with whole(r.workdir / 'model') as folder:
            s.task.export(str(folder), weights)
    if not quiet:
        show(summary)
        with whole(r.workdir / 'curves.png') as part:
            curves.draw(part, r.metrics.records, s.config)
        print(f'{summary["seconds"]} s; summary and curves: {r.workdir}')
    return summary


def engine_of(s: Setting, team: Team) -> Engine:
    """The runtime that the configuration asks for."""
    return (one_program if s.config.runtime == 'local' else by_stage)(s, team)


class Run(NamedTuple):
    """A setting, what its run talks to, its folder and the step that this start began at."""

    s: Setting
    engine: Engine
    checkpoints: Checkpoints
    metrics: Metrics
    display: Display
    signals: list[int]
    workdir: Path
    start: int


def train(r: Run, state: TrainState, place: Place) -> tuple[TrainState, Place, bool]:
    """The epochs from ``state`` on; ``place`` holds the sums of the epoch begun.

    Returns:
      State and place after the last step, and whether a signal stopped the run there.
    """
    config, n, stop = r.s.config, r.s.epoch_steps, False
    start = time.time() - place['seconds']
    for epoch in range(int(state.step) // n, config.epochs):
        steps = r.engine.epoch(epoch)
        order = data.order(config.seed, epoch, len(r.s.data.train.y))[: n * config.batch_size]
        left = order[place['steps'] * config.batch_size :]
        for after, values, asked in steps(state, left, lambda: bool(r.signals)):
            state, stop = after, asked
            place = add(place, values, epoch * n)
            show_progress(r, place, epoch)
            if stop:
                break
        place = {**place, 'seconds': time.time() - start}
        with r.display.pause():
            if place['steps'] == n:
                record(r, state, place, epoch + 1)
                place = {**place, 'loss': 0.0, 'accuracy': 0.0, 'steps': 0}
            if stop or epoch + 1 == config.epochs or (epoch + 1) % config.checkpoint_every == 0:
                r.engine.check(state)
                r.checkpoints.save(int(state.step), r.engine.export(state), place)
        if stop:
            break
    return state, place, stop


def add(place: Place, values: Values, before: int) -> Place:
    """Adds the values of some steps to the epoch's sums; raises DivergedError if not finite."""
    rows = {k: np.ravel(v).astype(float).tolist() for k, v in values.items()}
    for loss, accuracy in zip(rows['loss'], rows['accuracy'], strict=True):
        if not math.isfinite(loss):
            step = before + place['steps'] + 1
            raise DivergedError(
                f'the loss, in the last stage, is {loss} at step {step}; the last checkpoint is '
                'from before it. Lower config.lr, or send more bits backward'
            )
        total = {'loss': place['loss'] + loss, 'accuracy': place['accuracy'] + accuracy}
        place = {**place, **total, 'steps': place['steps'] + 1}
    return place


def show_progress(r: Run, place: Place, epoch: int) -> None:
    """Tells the display the running means of the epoch."""
    loss, accuracy = (place[k] / place['steps'] for k in ('loss', 'accuracy'))
    step = epoch * r.s.epoch_steps + place['steps']
    r.display.update(f'epoch {epoch + 1}/{r.s.config.epochs}', step, loss, accuracy)


def record(r: Run, state: TrainState, place: Place, epoch: int) -> None:
    """Closes an epoch: its mean training loss, and the test with compression off and on."""
    r.engine.check(state)
    base = {'step': int(state.step), 'epoch': epoch}
    means = {k: place[k] / place['steps'] for k in ('loss', 'accuracy')}
    r.metrics.write({'kind': 'train', **base, **means, 'seconds': place['seconds']})
    measure, said = r.s.task.measure, []
    for mode in ('off', 'on'):
        scores = r.engine.evaluate(state, mode == 'on')
        r.metrics.write({'kind': 'test', **base, 'compression': mode, **scores})
        said.append(f'{mode} {headline(measure, scores)}')
    r.display.say(
        f'epoch {epoch}/{r.s.config.epochs}  {duration(place["seconds"])}  '
        f'train loss {means["loss"]:.4f}  test {measure} {"  ".join(said)}'
    )


def finish(
    s: Setting,
    steps: int,
    place: Place,
    records: list[dict[str, Any]],
    moved: dict[str, Any],
    workdir: Path,
) -> dict[str, Any]:
    """Writes summary.json.

    Raises:
      WorkdirError: if the records are gone, or the file cannot be written.
    """
    for mode in ('off', 'on'):
        if not any(r['kind'] == 'test' and r['compression'] == mode for r in records):
            raise WorkdirError(
                f'{workdir / "metrics.jsonl"} has no test records of this run; put it back, or '
                'give a new --workdir'
            )
    summary = {
        **{k: s.config[k] for k in ('name', 'fwd', 'bwd', 'seed')},
        'measure': s.task.measure,
        'test': best_and_last(records, s.task.measure, s.config.warmup_epochs),
        'history': history(records),
        'bytes': message_bytes(s),
        **table_bytes(s),
        **moved,
        'parameters': parameters(s),
        'steps': steps,
        'seconds': round(place['seconds'], 1),
        **provenance(),
        # Where the data lay says nothing of the run, and much of the machine.
        'config': {k: v for k, v in s.config.to_dict().items() if k != 'data_dir'},
    }
    write_json(workdir / 'summary.json', summary)
    return summary


def best_and_last(records: list[dict[str, Any]], measure: str, warmup: int) -> dict[str, Any]:
    """The best and the last scores off and on; in the warm-up nothing is compressed yet.

    >>> rows = [{'kind': 'test', 'compression': 'on', 'epoch': e, 'loss': l, 'accuracy': a}
    ...         for e, l, a in ((1, 0.1, 0.9), (2, 0.3, 0.7), (3, 0.4, 0.6))]
    >>> off = [{**r, 'compression': 'off'} for r in rows]
    >>> best_and_last(rows + off, 'accuracy', warmup=1)['on']['best']
    {'epoch': 2, 'loss': 0.3, 'accuracy': 0.7}
    """
    keep, found = ('epoch', 'loss', 'accuracy'), {}
    for mode in ('off', 'on'):
        rows = [r for r in records if r['kind'] == 'test' and r['compression'] == mode]
        after = [r for r in rows if r['epoch'] > warmup] or rows
        best = max(after, key=lambda r: quality(measure, r))
        found[mode] = {n: {k: r[k] for k in keep} for n, r in (('best', best), ('last', rows[-1]))}
    return found


def history(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The curves of a run: a list an epoch of training loss, and of the scores off and on.

    >>> history([{'kind': 'train', 'epoch': 1, 'loss': 2.0, 'accuracy': 0.5}])['train']
    {'loss': [2.0], 'accuracy': [0.5]}
    """

    def columns(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
        return {k: [round(r[k], 6) for r in rows] for k in ('loss', 'accuracy')}

    test = [r for r in records if r['kind'] == 'test']
    modes = {m: columns([r for r in test if r['compression'] == m]) for m in ('off', 'on')}
    return {'train': columns([r for r in records if r['kind'] == 'train']), **modes}
