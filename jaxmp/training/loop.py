"""`train_and_evaluate`: a run from start to summary: resume, steps, tests, checkpoints."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from jaxmp import config as schema
from jaxmp import data
from jaxmp.config import Config, Summary
from jaxmp.launch.launchers import check_alone, placed
from jaxmp.metrics import warmup_of
from jaxmp.net.connect import Address, connect
from jaxmp.net.group import ProcessGroup
from jaxmp.net.views import ViewChangedError
from jaxmp.runtimes.allocator import pages_after_step, release_freed_pages
from jaxmp.runtimes.world import beside, start_jax
from jaxmp.training import footprint
from jaxmp.training.agreement import check_alike, inputs, settings_of
from jaxmp.training.checkpoint import Checkpoints
from jaxmp.training.experiment import Experiment, experiment_of, vocabulary, warnings_on
from jaxmp.training.parallel import parallel_of
from jaxmp.training.portable import Portable, layout, variables_of
from jaxmp.training.probe import prober
from jaxmp.training.profile import profiled
from jaxmp.training.resume import Place, begin, finished, stop_signals, tell_resumption
from jaxmp.training.sizes import check_memory, shapes
from jaxmp.training.step import TrainState
from jaxmp.training.summary import Tests, conclude, costs, finish, recipe, said
from jaxmp.training.tasks.named import stage_count
from jaxmp.training.tasks.task import Task
from jaxmp.training.trainer import Trainer, Values
from jaxmp.training.unchanging import with_kept
from jaxmp.training.workdir.locks import claim, owned
from jaxmp.training.workdir.progress import Display, duration
from jaxmp.training.workdir.records import Records
from jaxmp.training.workdir.trackers import Callback, Record


class DivergedError(RuntimeError):
    """The loss of ``step`` is not finite; the last checkpoint is from before."""

    def __init__(self, loss: float, step: int) -> None:
        """Says what to do."""
        super().__init__(
            f'the loss, in the last stage, is {loss} at step {step}; the last checkpoint is from '
            'before it. Lower config.optimizer.lr, or send more bits backward'
        )
        self.step = step


def process_group_of(config: Config, address: Address) -> ProcessGroup:
    """The processes of a run of ``config``, which share its stages or its replicas.

    Raises:
      ValueError: if there are several processes for a run of one; or as `connect`.
      ProcessGroupError: as `connect`.
    """
    schema.check(config)
    parallel = parallel_of(config, stage_count(config))
    runtime = config.parallel.runtime
    if address.back and parallel.joined:
        raise ValueError(
            f'--back={address.back:g} waits until a stage is back, and one program, of '
            f'config.parallel.runtime={runtime!r}, ends as a whole; leave it out, or take '
            '--config.parallel.runtime=mpmd'
        )
    if len(parts := parallel.parts()) > 1 or not parallel.joined:
        address = placed(address)
        # JAX has the port that was given; ours meet before, at the next one.
        joined = parallel.joined and address.processes != 1
        meeting = beside(address) if joined else address
        group = connect(meeting, parts, settings_of(config), what=parallel.part)
        if joined:
            start_jax(address, group)
        return group
    if all(a is None for a in address[:3]):
        check_alone(f'config.parallel.runtime={runtime!r} without replicas is one')
    elif address.processes != 1:
        raise ValueError(
            f'config.parallel.runtime={runtime!r} is one process, and '
            f'{address.processes or "several"} were started; processes need '
            '--config.parallel.runtime=mpmd or spmd, or --config.parallel.replicas=N'
        )
    return ProcessGroup()


def devices(config: Config, processes: int) -> int:
    """How many devices a process of a run needs."""
    return parallel_of(config, stage_count(config)).devices(processes)


def prepare(
    config: Config,
    group: ProcessGroup,
    task: Task | None = None,
    say: Callable[[str], object] = lambda line: None,
) -> Trainer:
    """What trains.

    Args:
      config: all keys.
      group: the processes.
      task: in place of the one that ``config`` names.
      say: is told what memory this process needs, where its parameters are of a checkpoint.

    Raises:
      ValueError: where ``config`` makes no sense, or needs more memory than there is.
      ProcessGroupError: if the processes differ.
    """
    exp = with_kept(experiment_of(config, task), group)
    release_freed_pages()  # of the data as it was read
    if group.count == 1:
        check_memory(exp)
    announced = 0
    if config.model.path:
        stages = exp.parallel.stages_of_process(group.index, group.count)
        sizes = footprint.footprint(exp, stages)
        line, announced = footprint.check(exp, sizes, len(set(stages)))
        say(line)
    check_alike(group, exp)
    group.barrier()  # all are here: links open now, before compiling parts them
    return Trainer(exp, group, announced)


def prepare_again(trainer: Trainer) -> Trainer:
    """The same trainer in another view; meanwhile processes that began again `prepare` theirs.

    Raises:
      ProcessGroupError: if the processes differ.
    """
    trainer.again()
    with_kept(trainer.exp, trainer.group)
    check_alike(trainer.group, trainer.exp)
    trainer.group.barrier()
    return trainer


def train_and_evaluate(
    config: Mapping[str, Any] | ml_collections.ConfigDict,
    workdir: str | Path,
    task: Task | None = None,
    group: ProcessGroup | None = None,
    trainer: Trainer | None = None,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    draw: bool = True,
) -> Summary | None:
    """Trains, tests at every point, and leaves config, metrics, checkpoints, summary and curves.

    Goes on from the last checkpoint. Of several processes the first one shows and writes. If one of
    them is lost, the others wait for it as the group says, and all go on from that checkpoint.

    Args:
      config: nested, as in configs/; what it lacks has its default.
      workdir: the run's folder.
      task: data, stages and scores, in place of those that ``config`` names.
      group: the processes, from `jaxmp.net.connect.connect`; default this one alone.
      trainer: from `prepare`, where other runs have used it.
      quiet: show and draw nothing.
      callbacks: each is called with every record, a dict, once it is a line of ``metrics.jsonl``,
        in the first process. What a callback raises ends the run.
      draw: draw the curves at the end, which takes a second or two.

    Returns:
      The summary, or None if a signal ended the run early (its state is saved).

    Raises:
      ValueError: for a configuration that makes no sense.
      WorkdirError: if the workdir cannot be used.
      ProcessGroupError: if the processes have different data or workdirs.
      DivergedError: if the loss is not finite.
    """
    workdir, group = Path(workdir), group or ProcessGroup()
    resolved, why, memory = schema.complete(config), '', {}
    say = lambda line: None if quiet or group.index else print(line, file=sys.stderr)
    while True:
        try:
            if why:
                if group.peer and (back := group.peer.terms.back):
                    say(f'{why}; waits {back:g} s at most until all are there')
                group.again()
                trainer = trainer and prepare_again(trainer)
            trainer = trainer or prepare(resolved, group, task, say)
            options = task, quiet, callbacks, draw, memory
            summary = begun(resolved, workdir, trainer, options)
            group.barrier()  # whoever was lost until here may need the others
            return summary
        except ViewChangedError as error:
            why = str(error)


def begun(
    resolved: Config, workdir: Path, trainer: Trainer, options: tuple[Any, ...]
) -> Summary | None:
    """Trains from the last checkpoint to the end, with the processes of a view.

    Args:
      resolved: all keys.
      workdir: the run's folder.
      trainer: what trains.
      options: the last arguments of `train_and_evaluate`, whose value this returns, and where a
        process keeps what it saved last while another one may come back.
    """
    (task, quiet, callbacks, draw, memory), group, exp = options, trainer.group, trainer.exp
    lead, written = group.index == 0, None
    with ExitStack() as stack:
        if lead:
            several = not exp.parallel.joined or group.count > 1
            written = resolved.to_dict() | ({'processes': group.count} if several else {})
            stack.enter_context(owned(workdir))
            claim(workdir, written)
        memory = memory if group.peer and group.peer.terms.back else None
        checkpoints = Checkpoints(workdir, group, written, inputs(exp), memory)
        stack.enter_context(closing(checkpoints))
        warnings = warnings_on(exp) if lead else []  # compiled before weights take memory
        state, place = begin(trainer, checkpoints, workdir)
        done, total = int(state.step), exp.points.end
        tested = done - (place['steps'] > 0)  # a test of ``done`` would have set it to 0
        folder = workdir if lead else None
        records = stack.enter_context(closing(Records(folder, tested, callbacks)))
        tokens = math.prod(exp.task.like.shape) if vocabulary(exp.task) else 0
        sizes = (n * resolved.batch_size for n in (1, tokens))
        display = Display(total, done, quiet or not lead, *sizes)
        trainer.say = display.say
        with closing(display), stop_signals() as seen:
            if task is not None or ':' in resolved.model.name + resolved.data.name:
                display.say(recipe(resolved))
            for line in warnings:
                display.say(f'warning: {line}')
            if exp.sending and lead:
                display.say(f'boundary {exp.first} {exp.sending}')
            if done == total and not place['steps'] and finished(workdir, total):
                display.say(f'{workdir} has ended already, at step {done}; its summary:')
            else:
                tell_resumption(display, checkpoints, workdir, done)
            probe = prober(exp) if probed(exp, group) else None
            r = Run(trainer, probe, checkpoints, records, display, seen, workdir, done)
            with profiled(trainer, workdir):
                state, place, stopped = train(r, state, place)
            trainer.leave(state, not stopped)
        if stopped:
            if lead and not quiet:
                print(f'stopped by a signal, saved at step {state.step}; the same command goes on')
            return None
        ended = group.share(finished(workdir, total) if lead and done == total else None)[0]
        moved, weights = ended or trainer.moved(), trainer.weights(state)
        if not lead:
            return {}
        if exp.task.export and weights is None:  # stages of other processes are in the checkpoint
            like = layout(trainer.export(state))
            del state  # that of all stages needs the memory
            weights = variables_of(exp, checkpoints.newest(like), shapes(exp)[0])
        summary = ended or finish(exp, total, place, records.records, moved, workdir)
        conclude(r, summary, weights, quiet, draw)
        return summary


class Run(NamedTuple):
    """What a run trains with and talks to, its folder and the step that this start began at."""

    trainer: Trainer
    probe: Callable[[Portable], list[Record]] | None
    checkpoints: Checkpoints
    records: Records
    display: Display
    signals: list[int]
    workdir: Path
    start: int

    @property
    def exp(self) -> Experiment:
        """The experiment."""
        return self.trainer.exp


def probed(exp: Experiment, group: ProcessGroup) -> bool:
    """Whether the boundaries are probed: where asked for, in a single process that has all."""
    return exp.config.probe != 'off' and group.count == 1 and bool(exp.model.boundaries)


def train(r: Run, state: TrainState, place: Place) -> tuple[TrainState, Place, bool]:
    """The steps from ``state`` to the end; ``place`` holds the sums since the last test.

    Returns:
      State and place after the last step, and whether a signal stopped the run there.
    """
    points, stop = r.exp.points, False
    start = time.time() - place['seconds']
    if r.exp.config.model.path and not int(state.step):
        with r.display.pause():
            before_training(r, state)
    while not stop and (place['steps'] or int(state.step) < points.end):
        if not (place['steps'] and points.tests(int(state.step))):  # as where a replica has joined
            state, place, stop = advance(r, state, place)
        place, step = {**place, 'seconds': time.time() - start}, int(state.step)
        with r.display.pause():
            state = r.trainer.drained(state)
            if points.tests(step):
                record(r, state, place)
                place = {**place, **dict.fromkeys(r.exp.task.scores, 0.0), 'steps': 0, 'missed': 0}
            if stop or points.saves(step):
                r.trainer.check(state)
                with r.trainer.group.phase('saving'):
                    r.checkpoints.save(step, r.trainer.export(state), place)
        release_freed_pages()  # of tests and checkpoints, between which steps take others
    return state, place, stop


def advance(r: Run, state: TrainState, place: Place) -> tuple[TrainState, Place, bool]:
    """The steps from ``state`` to the next point.

    Returns:
      State and place there, or where a signal has stopped the run, and whether one has.
    """
    exp, points, stop = r.exp, r.exp.points, False
    step, size = int(state.step), exp.config.batch_size
    epoch, tested = step // points.epoch, step - place['steps']
    examples = data.order(exp.config.seed, epoch, len(exp.data.train.y))
    start, end = (size * (s - epoch * points.epoch) for s in (step, points.after(step)))
    steps = r.trainer.epoch(epoch, state, examples[start:end], lambda: bool(r.signals))
    began = time.time()
    for after, values, stop in steps:
        state, place = after, add(place, values, tested)
        now = time.time()
        pages_after_step(now - began)
        began = now
        means, metric, count = means_of(r, place), exp.task.metric, tested + place['steps']
        name = points.name(count) if points.in_steps else f'epoch {epoch + 1}/{points.epochs}'
        parts = [f'loss {means["loss"]:.3f}', f'{metric.name} {metric.format(means)}']
        r.display.update(name, count, parts)
        if stop:
            break
    return state, place, stop


def add(place: Place, values: Values, tested: int) -> Place:
    """Adds the values of steps to the sums since the test at step ``tested``.

    Raises:
      DivergedError: if a loss is not finite.
    """
    rows = {k: np.ravel(v).astype(float).tolist() for k, v in values.items()}
    for step_values in zip(*rows.values(), strict=True):
        scores = dict(zip(rows, step_values, strict=True))
        if not math.isfinite(scores['loss']):
            raise DivergedError(scores['loss'], tested + place['steps'] + 1)
        total = {name: place[name] + value for name, value in scores.items()}
        place = {**place, **total, 'steps': place['steps'] + 1}
    return place


def means_of(r: Run, place: Place) -> Values:
    """The means of the scores over the steps since the last test that this process has made."""
    count = place['steps'] - place['missed']
    return {k: place[k] / count if count else math.nan for k in r.exp.task.scores}


def record(r: Run, state: TrainState, place: Place) -> None:
    """The mean training loss since the last test, the probe, a test with compression off and on."""
    r.trainer.check(state)
    step, points = int(state.step), r.exp.points
    base = {'step': step, 'epoch': points.epochs_at(step)}
    means = means_of(r, place)
    if place['steps'] > place['missed']:
        r.records.write({'kind': 'train', **base, **means, 'seconds': place['seconds']})
    if r.probe and base['epoch'] >= warmup_of(r.exp.config):
        for row in r.probe(r.trainer.export(state)):
            r.records.write({'kind': 'boundary', **base, **row})
    scores = said(tested(r, state, base), r.exp)
    r.display.say(
        f'{points.name(step)}  {duration(place["seconds"])}  '
        f'train loss {means["loss"]:.4f}  test {scores}'
    )


def before_training(r: Run, state: TrainState) -> None:
    """Tests pretrained weights, unless a start of this run before has: what is it better than?"""
    there = any(row.get('compression') == 'on' for row in r.records.records)  # written last
    if not r.trainer.group.share(there)[0]:  # the first process has the records
        scores = tested(r, state, {'step': 0, 'epoch': 0})
        r.display.say(f'before training  test {said(scores, r.exp)}')
        if line := costs(scores, r.exp.config):
            r.display.say(f'warning: {line}')


def tested(r: Run, state: TrainState, base: Record) -> Tests:
    """Tests a state with compression off and on, and writes the records."""
    with r.trainer.group.phase('testing'):
        tests = r.trainer.tested(state)
    for mode, scores in tests.items():
        r.records.write({'kind': 'test', **base, 'compression': mode, **scores})
    return tests
