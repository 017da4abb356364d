"""`load`: a finished or stopped run, with the state of its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.config import KEYS, Summary, complete, flat, nested
from jaxmp.net.group import ProcessGroup
from jaxmp.terminal import named_as_on_hub, near_file
from jaxmp.training.agreement import inputs
from jaxmp.training.checkpoint import Checkpoints, Place, check_inputs, inputs_of
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.training.step import TrainState
from jaxmp.training.trainer import Trainer


class Run(NamedTuple):
    """A finished or stopped run.

    Attributes:
      name: as the table shows it.
      folder: its workdir.
      exp: its experiment, in one program.
      state: that of its last valid checkpoint.
      trained: its seed, and the commit and the hardware of its training, if it has ended.
      place: its position since the last test; see `jaxmp.training.resume`.
    """

    name: str
    folder: Path
    exp: Experiment
    state: TrainState
    trained: Summary
    place: Place


def config_of(workdir: Path) -> dict[str, Any]:
    """The keys of a run's configuration, by their names with dots.

    Raises:
      ValueError: if ``workdir`` holds none, or a run with replicas.
    """
    try:
        values = flat(json.loads((workdir / 'config.json').read_text()))
        if 'model_type' in values:
            raise ValueError('it has a checkpoint')
    except (OSError, ValueError, AttributeError) as error:
        if not workdir.exists() and not named_as_on_hub(str(workdir)):
            near = near_file(str(workdir))
            raise ValueError(f'there is no run {workdir}{near}; give the workdir of one') from None
        raise ValueError(
            f'{workdir} is not the workdir of a run: {error}; give one, or to jaxmp evaluate of a '
            'checkpoint --text=FILE'
        ) from None
    if (count := values.get('parallel.replicas', 1)) > 1:
        raise ValueError(
            f'{workdir} is a run with config.parallel.replicas={count}, whose checkpoint holds a '
            'state per replica; give runs with one replica'
        )
    return values


def load(workdir: Path) -> Run:
    """The run of a workdir.

    Raises:
      ValueError: as `config_of`, or if there is no checkpoint.
      WorkdirError: if its checkpoints are damaged, or of other data or weights.
    """
    values = config_of(workdir)
    # Any run is tested in one program, of which a checkpoint of another runtime is one too.
    values |= {name: key.default for name, key in KEYS.items() if key.runtime}
    values |= {'parallel.runtime': 'local', 'tied_exchange': 'mean'}
    exp = experiment_of(complete(nested(values)))
    check_inputs(*inputs_of(workdir), inputs(exp))
    trainer = Trainer(exp, ProcessGroup())
    state = trainer.create()
    saved = Checkpoints(workdir).restore(trainer.export(state))
    if saved is None:
        raise ValueError(f'{workdir} has no checkpoint; train it first, or longer')
    summary = workdir / 'summary.json'
    ended = json.loads(summary.read_text()) if summary.is_file() else {}
    trained = {k: ended[k] for k in ('seed', 'commit', 'hardware') if k in ended}
    folder, state = workdir.resolve(), trainer.load(state, saved[0])
    return Run(folder.name, folder, exp, state, trained, saved[1])
