"""Stopping a run, and going on with it: signals, the last good checkpoint, what is done already."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxmp.checkpoint import Checkpoints
from jaxmp.files import WorkdirError
from jaxmp.log import Display
from jaxmp.setting import Setting
from jaxmp.training.engine import Engine

Place = dict[str, Any]  # in the epoch begun: sums over its steps, and the seconds of the run


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that SIGTERM and SIGINT append to, so that the loop can save before it ends.

    A second Ctrl-C does what it did before.
    """
    seen: list[int] = []

    def note(number: int, _: Any) -> None:
        if number == signal.SIGINT and number in seen:
            signal.signal(signal.SIGINT, old[signal.SIGINT])
            signal.raise_signal(signal.SIGINT)
        seen.append(number)

    old = {n: signal.signal(n, note) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield seen
    finally:
        for n, handler in old.items():
            signal.signal(n, handler)


def begin(s: Setting, engine: Engine, checkpoints: Checkpoints, workdir: Path) -> tuple[Any, Place]:
    """State and place that the run goes on from.

    Raises:
      WorkdirError: if the run is past ``config.epochs`` already; or as `Checkpoints.restore`.
    """
    state = engine.create(s)
    place = {'loss': 0.0, 'accuracy': 0.0, 'steps': 0, 'seconds': 0.0}
    if (found := checkpoints.restore(engine.export(state))) is not None:
        state, place = engine.load(state, found[0]), found[1]
    done = int(state.step)
    if done > s.config.epochs * s.epoch_steps:
        raise WorkdirError(
            f'{workdir} holds {done / s.epoch_steps:.4g} epochs, and config.epochs='
            f'{s.config.epochs} are fewer; give as many or more to go on, or a new --workdir'
        )
    return state, place


def tell_resumption(display: Display, checkpoints: Checkpoints, workdir: Path, done: int) -> None:
    """Says where the run goes on, and what it had to pass over."""
    for step, why in checkpoints.damaged.items():
        display.say(
            f'checkpoint at step {step} is damaged ({why}), now in {workdir / "damaged"}; going on '
            f'from step {done}'
        )
    if done:
        display.say(f'going on from step {done} of {workdir}')


def finished(workdir: Path, steps: int) -> dict[str, Any] | None:
    """The summary of a run that ended after ``steps`` steps, if it is there."""
    try:
        found = json.loads((workdir / 'summary.json').read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get('steps') == steps else None
