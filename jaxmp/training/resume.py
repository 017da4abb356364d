"""Stop and resumption of a run: signals, the last valid checkpoint, a finished run's summary."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from jaxmp.config import KEYS, Config, Summary, complete, flat
from jaxmp.launch.signals import leave_closed_terminal, stopping
from jaxmp.net.views import ViewChangedError
from jaxmp.training.ahead import compile_ahead
from jaxmp.training.checkpoint import Checkpoints, Place
from jaxmp.training.experiment import Experiment
from jaxmp.training.optimizer import rate_of
from jaxmp.training.phases import spans
from jaxmp.training.step import TrainState
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir.locks import WorkdirError
from jaxmp.training.workdir.points import points_of
from jaxmp.training.workdir.progress import Display


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list to which signals that end the run are appended, so that the loop can save before.

    The second Ctrl-C has its usual effect, and so has a signal if a process is lost meanwhile.
    """
    seen: list[int] = []
    lost = False

    def note(number: int, _: FrameType | None) -> None:
        leave_closed_terminal()
        if number == signal.SIGINT and number in seen:
            signal.signal(signal.SIGINT, old[signal.SIGINT])
            signal.raise_signal(signal.SIGINT)
        seen.append(number)

    old = {n: signal.signal(n, note) for n in stopping()}
    try:
        yield seen
    except ViewChangedError:
        lost = True
        raise
    finally:
        for n, handler in old.items():
            signal.signal(n, handler)
        for n in seen[:lost]:
            signal.raise_signal(n)


def begin(trainer: Trainer, checkpoints: Checkpoints, workdir: Path) -> tuple[TrainState, Place]:
    """The state and place from which the run starts or resumes.

    Raises:
      WorkdirError: if the run is longer than the configuration says, as `check_length`, or as
        described in `Checkpoints.restore`.
    """
    compile_ahead(trainer)
    exp, state = trainer.exp, trainer.create()
    place = {**dict.fromkeys(exp.task.scores, 0.0), 'steps': 0, 'missed': 0, 'seconds': 0.0}
    if (saved := checkpoints.restore(trainer.export(state))) is not None:
        state, place = trainer.load(state, saved[0]), {**place, **saved[1]}
    before, state = int(state.step), trainer.enter(state)
    done = int(state.step)
    if done != before:
        missed = done - exp.points.before(done)
        place = {**place, **dict.fromkeys(exp.task.scores, 0.0), 'steps': missed, 'missed': missed}
    if done > exp.points.end:
        count = f'{done} steps' if exp.config.steps else f'{done / exp.epoch_steps:.4g} epochs'
        raise WorkdirError(
            f'{workdir} has {count}, more than {length(exp.config)}; give at least as many to '
            'resume it, or a new --workdir'
        )
    check_length(exp, workdir, done)
    return state, place


def length(config: Config) -> str:
    """The key that says how long a run is, with its value."""
    return f'config.steps={config.steps}' if config.steps else f'config.epochs={config.epochs}'


def check_length(exp: Experiment, workdir: Path, done: int) -> None:
    """Checks that the steps before ``done`` would be the same in a run as long as now.

    A schedule of the rate, or phases counted from the end, depend on the length.

    Raises:
      WorkdirError: if a rate or a phase of these steps would be another.
    """
    path = workdir / 'config.json'
    if not done or not path.is_file():
        return
    old, now = json.loads(path.read_text()), exp.config
    lengths = {key: old.get(key, KEYS[key].default) for key in ('epochs', 'steps')}
    before = complete({**now.to_dict(), **lengths})
    moved = max(0, done - now.optimizer.delay)  # steps whose rate was used
    steps = sorted({i * (moved - 1) // 31 for i in range(32)}) if moved else []
    passed = range(-(-done // exp.epoch_steps))
    epochs = lambda c: points_of(c, exp.epoch_steps).epochs
    kinds = {
        'optimizer.schedule': lambda c: [float(rate_of(c, exp.epoch_steps)(s)) for s in steps],
        'phases': lambda c: [[e in p for p in spans(c, epochs(c))] for e in passed],
    }
    for key, of in kinds.items() if length(before) != length(now) else ():
        if of(before) != of(now):
            raise WorkdirError(
                f'{workdir} was begun with {length(before)}, and with {length(now)} config.'
                f'{key}={flat(now.to_dict())[key]!r} would have made its first {done} steps '
                f'otherwise; give {length(before)} to resume it, or a new --workdir to train longer'
            )


def tell_resumption(display: Display, checkpoints: Checkpoints, workdir: Path, done: int) -> None:
    """Shows the step from which the run resumes, and the checkpoints that were skipped."""
    for step, why in checkpoints.damaged.items():
        display.say(
            f'checkpoint at step {step} is damaged ({why}), moved to {workdir / "damaged"}; '
            f'resuming from step {done}'
        )
    if done:
        display.say(f'resuming from step {done} of {workdir}')


def finished(workdir: Path, steps: int) -> Summary | None:
    """The summary of a run that finished after ``steps`` steps, or None."""
    try:
        summary = json.loads((workdir / 'summary.json').read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get('steps') == steps else None
