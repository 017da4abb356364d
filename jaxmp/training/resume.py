"""Stop and resumption of a run: signals, the last valid checkpoint, a finished run's summary."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmp.config import complete, flat
from jaxmp.distributed.signals import leave_closed_terminal, stopping
from jaxmp.training.checkpoint import Checkpoints
from jaxmp.training.experiment import Experiment
from jaxmp.training.files import WorkdirError
from jaxmp.training.optimizer import rate_of
from jaxmp.training.phases import spans
from jaxmp.training.progress import Display
from jaxmp.training.trainer import Trainer

Place = dict[str, Any]  # of the current epoch: its steps, those that this process missed, sums over
# the others; and the seconds of the run


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list to which signals that end the run are appended, so that the loop can save before.

    The second Ctrl-C has its usual effect.
    """
    seen: list[int] = []

    def note(number: int, _: Any) -> None:
        leave_closed_terminal()
        if number == signal.SIGINT and number in seen:
            signal.signal(signal.SIGINT, old[signal.SIGINT])
            signal.raise_signal(signal.SIGINT)
        seen.append(number)

    old = {n: signal.signal(n, note) for n in stopping()}
    try:
        yield seen
    finally:
        for n, handler in old.items():
            signal.signal(n, handler)


def begin(trainer: Trainer, checkpoints: Checkpoints, workdir: Path) -> tuple[Any, Place]:
    """The state and place from which the run starts or resumes.

    Raises:
      WorkdirError: if the run has more epochs than ``config.epochs``, as `check_length`, or as
        described in `Checkpoints.restore`.
    """
    exp, state = trainer.exp, trainer.create()
    place = {**dict.fromkeys(exp.task.scores, 0.0), 'steps': 0, 'missed': 0, 'seconds': 0.0}
    if (saved := checkpoints.restore(trainer.export(state))) is not None:
        state, place = trainer.load(state, saved[0]), {**place, **saved[1]}
    before, state = int(state.step), trainer.enter(state)
    done = int(state.step)
    if done != before:
        here = (done - 1) % exp.epoch_steps + 1 if done else 0
        place = {**place, **dict.fromkeys(exp.task.scores, 0.0), 'steps': here, 'missed': here}
    if done > exp.config.epochs * exp.epoch_steps:
        raise WorkdirError(
            f'{workdir} has {done / exp.epoch_steps:.4g} epochs, more than config.epochs='
            f'{exp.config.epochs}; give at least as many to resume it, or a new --workdir'
        )
    check_length(exp, workdir, done)
    return state, place


def check_length(exp: Experiment, workdir: Path, done: int) -> None:
    """Checks that the steps before ``done`` would be the same with the ``config.epochs`` of now.

    A linear schedule of the rate, or phases counted from the end, depend on it.

    Raises:
      WorkdirError: if a rate or a phase of these steps would be another.
    """
    path = workdir / 'config.json'
    if not done or not path.is_file():
        return
    epochs, now = json.loads(path.read_text()).get('epochs'), exp.config
    if not isinstance(epochs, int) or epochs == now.epochs:
        return
    before = complete({**now.to_dict(), 'epochs': epochs})
    steps = sorted({i * (done - 1) // 31 for i in range(32)})
    passed = range(-(-done // exp.epoch_steps))
    kinds = {
        'optimizer.schedule': lambda c: [float(rate_of(c, exp.epoch_steps)(s)) for s in steps],
        'phases': lambda c: [[e in p for p in spans(c)] for e in passed],
    }
    for key, of in kinds.items():
        if of(before) != of(now):
            raise WorkdirError(
                f'{workdir} was begun with config.epochs={epochs}, and with {now.epochs} config.'
                f'{key}={flat(now.to_dict())[key]!r} would have made its first {done} steps '
                f'otherwise; give config.epochs={epochs} to resume it, or a new --workdir to train '
                f'{now.epochs} epochs'
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


def finished(workdir: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that finished after ``steps`` steps, or None."""
    try:
        summary = json.loads((workdir / 'summary.json').read_text())
    except (OSError, ValueError):
        return None
    return summary if isinstance(summary, dict) and summary.get('steps') == steps else None
