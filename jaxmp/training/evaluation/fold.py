"""`jaxmp fold RUN [--out=FOLDER]`: a model that was trained with compression, to serve without it.

Each stage after a boundary gets two vectors at its entrance, a scale and a shift per channel. They
give an uncompressed activation the mean and the deviation that the stage knows from compressed
ones, as estimated on training examples (see `moments`). Nothing is trained.

With ``--batchnorm`` BatchNorm's statistics are estimated again instead, over open boundaries.

The result is another run, RUN-folded by default, whose channels are raw. `jaxmp evaluate`,
`jaxmp generate` and `jaxmp compare` take it as any other. Its scores beside those of RUN with
compression on and off are printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from jaxmp.config import Config
from jaxmp.models.entrance import NAME
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.types import ModelState
from jaxmp.training.agreement import inputs
from jaxmp.training.checkpoint import Checkpoints
from jaxmp.training.evaluation.moments import Affine, matched, normalised_again
from jaxmp.training.evaluation.saved import Run, load
from jaxmp.training.experiment import experiment_of
from jaxmp.training.step import TrainState
from jaxmp.training.summary import finish
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir.locks import WorkdirError, check_writable, replacing, write
from jaxmp.training.workdir.records import read

Scores = dict[str, float]


def config_of(config: Config, entrance: bool) -> Config:
    """The configuration of a folded run: nothing compressed, perhaps stages with an entrance."""
    made = config.copy_and_resolve_references().unlock()
    made.update(name=f'{config.name}-folded', fwd='raw', bwd='raw', phases='')
    made.model.entrance |= entrance
    return made.lock()


def check(run: Run, batchnorm: bool = False) -> None:
    """Checks that there is something to fold.

    Raises:
      ValueError: if the run has no boundary, or its last steps sent activations uncompressed; or
        no BatchNorm, whose statistics are wanted.
    """
    exp, step = run.exp, int(run.state.step)
    if not exp.model.boundaries:
        raise ValueError(f'{run.name} has one stage, so nothing is sent; fold a run of several')
    last = exp.boundaries(max(step - 1, 0) // exp.epoch_steps)
    if all(str(cut.fwd.codec) == 'raw' for cut in last):
        raise ValueError(
            f'{run.name} was trained on uncompressed activations at the end (fwd '
            f'{exp.config.fwd}), so it serves without compression as it is'
        )
    states = run.state.model.model_state.values()
    if batchnorm and not any({*state} - {NAME} for state in states):
        raise ValueError(f'{run.name} has no statistics of a normaliser; leave --batchnorm out')


def folded(model: ModelState, maps: Sequence[Affine]) -> ModelState:
    """``model`` whose later stages have ``maps`` at their entrance, before those that they have."""
    states = dict(model.model_state)
    for stage, (scale, shift) in enumerate(maps, 1):
        old = states[stage].get(NAME, {'scale_minus_one': 0.0, 'shift': 0.0})
        later = 1 + old['scale_minus_one']  # later * (scale * x + shift) + old shift
        vectors = {'scale_minus_one': later * scale - 1, 'shift': later * shift + old['shift']}
        states[stage] = {**states[stage], NAME: vectors}
    return model._replace(model_state=states)


def fold(run: Run, folder: Path, batchnorm: bool = False) -> Scores:
    """Writes the folded run.

    Args:
      run: trained with compression.
      folder: of the new run; it does not exist.
      batchnorm: estimate BatchNorm's statistics again, in place of entrances.

    Returns:
      Its scores.

    Raises:
      ValueError: as `check`.
      WorkdirError: if the folder cannot be written.
    """
    check(run, batchnorm)
    known = run.exp, run.state.model, run.state.key
    model = normalised_again(*known) if batchnorm else folded(run.state.model, matched(*known))
    trainer = Trainer(experiment_of(config_of(run.exp.config, not batchnorm)), ProcessGroup())
    nothing = trainer.create().model.feedback  # open boundaries remember nothing
    state = run.state.replace(model=model._replace(feedback=nothing))
    scores = trainer.evaluate(state, False)
    with replacing(folder) as part:
        save(trainer, state, run, records_of(run, scores), part)
    return scores


def records_of(run: Run, scores: Scores) -> list[dict[str, Any]]:
    """The records of the training, and the scores as those of a test with and without codecs."""
    step = int(run.state.step)
    base = {'kind': 'test', 'step': step, 'epoch': run.exp.points.epochs_at(step)}
    trained = [r for r in read(run.folder / 'metrics.jsonl') if r['kind'] == 'train']
    return [*trained, *({**base, 'compression': mode, **scores} for mode in ('off', 'on'))]


def save(
    trainer: Trainer, state: TrainState, run: Run, records: list[dict[str, Any]], folder: Path
) -> None:
    """Writes a run at the step of ``run``: checkpoint, configuration, records, perhaps summary."""
    exp, step = trainer.exp, int(state.step)
    with closing(Checkpoints(folder, config=exp.config.to_dict(), inputs=inputs(exp))) as saved:
        saved.save(step, trainer.export(state), run.place)
    write(folder / 'metrics.jsonl', ''.join(json.dumps(r) + '\n' for r in records))
    if run.trained and step == exp.points.end:  # else the same command trains on
        finish(exp, step, run.place, records, {}, folder)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog='jaxmp fold', description=(__doc__ or '').partition('\n\n')[2]
    )
    parser.add_argument('run', type=Path, metavar='RUN', help='workdir with a checkpoint')
    parser.add_argument('--out', type=Path, help='folder of the new run; default RUN-folded')
    parser.add_argument(
        '--batchnorm', action='store_true',
        help="estimate BatchNorm's statistics again, in place of a scale and a shift per channel",
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        told(args.run, args.out, args.batchnorm)
    except (OSError, ValueError, ImportError, WorkdirError) as error:
        sys.exit(f'jaxmp fold: {error}')


def told(workdir: Path, out: Path | None, batchnorm: bool) -> None:
    """Folds a run, and prints its scores beside those of the run.

    Raises:
      ValueError: as `load` and `check`, or if the folder of the new run exists.
      WorkdirError: as `load` and `fold`.
    """
    folder = out or workdir.with_name(f'{workdir.resolve().name}-folded')
    if folder.exists():
        raise ValueError(f'{folder} exists; give another --out, or remove it')
    run = load(workdir)
    check_writable(folder.parent, '--out')  # which makes it, and a misspelt run has none
    scores = fold(run, folder, batchnorm)
    trainer, metric = Trainer(run.exp, ProcessGroup()), run.exp.task.metric
    scores = {**trainer.tested(run.state), 'folded': scores}
    said = (f'{name} {metric.format(s)}' for name, s in scores.items())
    print(f'test {metric.name}: {", ".join(said)}')
    print(f'the folded run: {folder}')


if __name__ == '__main__':
    main()
