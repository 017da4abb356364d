"""`jaxmp sweep FILE --scale=SCALE [--tables=1,2] [--rows=a,b] [--set data.dir=DIR]`.

Run every row of a study with every seed. FILE is a Python file with ``get_study(scale, tables)``,
such as configs/paper_tables.py. A finished run is saved as ``OUT/SCALE/ROW-sSEED.json`` and is not
run again; a run that was killed continues from its checkpoint in ``WORK``. A run holds a lock, so
that two processes with the same command share the work. A run that diverges has a result as well:
from there on it counts as guessing. A run that fails does not stop the others; failures are listed
at the end.

The seeds of a row run one after another in one process and share its compiled programs, unless a
``{seed}`` in --set makes rows of them. Batching seeds by `jax.vmap` would turn convolutions into
grouped ones, which take twice as long on CPU.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxmp.config import Summary
from jaxmp.config.change import put
from jaxmp.models.checkpoint import digest
from jaxmp.sweep.study import Job, finished, jobs, study_of
from jaxmp.terminal import hint
from jaxmp.training.command import one_line, set_up
from jaxmp.training.workdir.locks import locked, write

if TYPE_CHECKING:
    from jaxmp.training.trainer import Trainer


def left(todo: list[Job], done: list[Summary]) -> str:
    """The estimated time of the runs ``todo``, from the median time of those done."""
    from jaxmp.training.workdir.progress import duration

    if not done:
        return 'time not known yet'
    return f'about {duration(len(todo) * statistics.median(s["seconds"] for s in done))} left'


def sweep(plan: list[Job], quiet: bool = True, keep: bool = False) -> dict[str, str]:
    """Executes the runs that are not finished, one after another.

    Args:
      plan: runs from `jobs`.
      quiet: report each run only, not its epochs.
      keep: leave the last checkpoint of each run in its workdir.

    Returns:
      The error of each run that failed, by the name of its result.

    Raises:
      ValueError: if a result of the plan was made with another configuration.
      KeyboardInterrupt: after a signal; the state of the run has been saved.
    """
    done, failed, busy = [s for job in plan if (s := finished(job))], {}, 0
    prepared = Rows()
    show_plan(plan)
    for number, job in enumerate(plan, 1):
        with locked(job.workdir) as mine:
            if finished(job):
                continue
            if not mine:
                busy += 1
                continue
            try:
                done.append(one(job, prepared.of(job), quiet, keep))
            except Exception as error:  # a run that fails does not stop the sweep
                failed[job.result.stem] = one_line(error)
        outcome = failed.get(job.result.stem) or scores(done[-1])
        todo = [j for j in plan[number:] if not j.result.exists()]
        counts = f'{len(todo)} to do, {left(todo, done)}'
        say(f'[{number}/{len(plan)}] {job.result.stem}  {outcome}; {counts}')
    say(f'{len(done)} finished, {busy} running in other processes, {len(failed)} failed')
    for name, reason in failed.items():
        say(f'  {name}: {reason}')
    return failed


class Rows:
    """A cache of the compiled programs of one row, for all its seeds."""

    def __init__(self) -> None:
        """Creates an empty cache."""
        self._row, self._made = '', None

    def of(self, job: Job) -> Trainer:
        """The programs for ``job``; those of another row are freed first."""
        from jaxmp.net.group import ProcessGroup
        from jaxmp.training.loop import prepare

        if self._made is None or self._row != job.row:
            self._made = None
            self._row, self._made = job.row, prepare(job.config, ProcessGroup())
        return self._made.of_seed(job.config)


def scores(summary: Summary) -> str:
    """The scores of the last epoch, and the time of the run, as text."""
    from jaxmp.metrics import of_summary
    from jaxmp.training.workdir.progress import duration

    modes = summary['test'].items()
    metric = of_summary(summary)
    values = [f'{m} {metric.format(s["last"])}' for m, s in modes]
    if step := summary.get('diverged'):
        values.append(f'diverged at step {step:,}')
    return '  '.join([*values, duration(summary['seconds'])])


def one(job: Job, trainer: Trainer, quiet: bool, keep: bool) -> Summary:
    """Executes ``job`` and saves its result; raises KeyboardInterrupt if a signal ended it."""
    from jaxmp.sweep.diverged import diverged
    from jaxmp.training.loop import DivergedError, train_and_evaluate

    try:
        summary = train_and_evaluate(job.config, job.workdir, trainer=trainer, quiet=quiet)
    except DivergedError as error:
        summary = diverged(trainer.exp, error.step, job.workdir, trainer.moved())
    if summary is None:
        raise KeyboardInterrupt
    if weights := digest(job.config.model.path):
        summary['weights'] = weights
    job.result.parent.mkdir(parents=True, exist_ok=True)
    lines = (f' {json.dumps(k)}: {json.dumps(v)}' for k, v in summary.items())
    write(job.result, '{\n' + ',\n'.join(lines) + '\n}\n')
    if not keep:
        shutil.rmtree(job.workdir / 'checkpoints', ignore_errors=True)
    return summary


def show_plan(plan: list[Job]) -> None:
    """Prints the rows with their progress, and the remaining time."""
    done = [s for job in plan if (s := finished(job))]
    rows: dict[str, list[Job]] = {}
    for job in plan:
        rows.setdefault(job.row, []).append(job)
    for seeds in rows.values():
        config, ready = seeds[0].config, sum(j.result.exists() for j in seeds)
        begun = sum((j.workdir / 'checkpoints').exists() and not j.result.exists() for j in seeds)
        say(
            f'{config.name:24} {ready}/{len(seeds)} done{f", {begun} begun" if begun else "":9}  '
            f'fwd {config.fwd}  bwd {config.bwd}'
        )
    todo = [j for j in plan if not j.result.exists()]
    say(f'{len(plan)} runs, {len(todo)} to do, {left(todo, done)}')


def say(text: str) -> None:
    """Prints a line without buffering."""
    print(text, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog='jaxmp sweep', description=(__doc__ or '').partition('\n\n')[2]
    )
    parser.add_argument('file', help='a study: a file, or paper_tables')
    parser.add_argument('--scale', required=True, help='such as smoke, cpu, converged or paper')
    parser.add_argument('--tables', default='1,2,3,4', help='numbers of tables, with commas')
    parser.add_argument('--rows', default='', help='names of rows, with commas; default all')
    parser.add_argument('--seeds', type=int, default=0, help='number of seeds; 0: all')
    parser.add_argument('--out', type=Path, default=Path('results'), help='folder of results')
    parser.add_argument('--work', type=Path, default=Path('runs/sweep'), help='folder of workdirs')
    parser.add_argument(
        '--set',
        action='append',
        default=[],
        help='key=value for all runs; {seed} becomes that of each',
    )
    parser.add_argument(
        '--keep', action='store_true', help='leave the last checkpoints, for jaxmp evaluate'
    )
    parser.add_argument('--plan', action='store_true', help='show the plan and run nothing')
    parser.add_argument('--verbose', action='store_true', help='report each epoch')
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace) -> list[Job]:
    """The runs that the command line selects.

    Raises:
      ValueError: for an unknown row or key, or an invalid value.
    """
    study = study_of(args.file).get_study(args.scale, tuple(map(int, args.tables.split(','))))
    rows = {r for r in args.rows.split(',') if r}
    if unknown := rows - {c.name for _, c in study}:
        names = dict.fromkeys(c.name for _, c in study)
        each = ', '.join(row + hint(row, names) for row in sorted(unknown))
        raise ValueError(f'no rows {each}; allowed are {", ".join(names)}')
    chosen = [(s, c) for s, c in study if (not rows or c.name in rows)]
    chosen = [(s, c) for s, c in chosen if not args.seeds or s < args.seeds]
    for seed, config in chosen:
        for text in args.set:
            put(config, text.replace('{seed}', str(seed)))
        config.lock()
    return jobs(chosen, args.out / args.scale, args.work / args.scale)


def main(argv: list[str] | None = None) -> None:
    """Runs the command; exits with 1 if a run failed and with 143 after a signal."""
    args = arguments(argv)
    try:
        plan = plan_of(args)
        if args.plan:
            return show_plan(plan)
        set_up()
        failed = sweep(plan, not args.verbose, args.keep)
    except (ValueError, OSError) as error:
        sys.exit(f'jaxmp sweep: {error}')
    except KeyboardInterrupt:
        say('stopped by a signal; the current run is saved, and the same command continues it')
        sys.exit(143)
    sys.exit(1 if failed else 0)
