"""`python -m jaxmp.sweep FILE --scale=SCALE [--tables=1,2] [--rows=a,b] [--set data_dir=DIR]`.

Runs every row of a study for every seed; FILE is a Python file with ``get_study(scale, tables)``,
such as configs/paper_tables.py. A run is ``OUT/SCALE/ROW-sSEED.json`` when it is finished, and is
not run again; one that was killed goes on from its checkpoint in ``WORK``. A run holds a lock, so
the same command given twice shares the work between two processes. What fails is listed at the end
and stops nothing else.

Seeds of a row follow each other in one process and share its compiled programs: on CPU a batch of
seeds (`jax.vmap`) makes grouped convolutions of the network's, which take twice as long.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxmp.files import locked
from jaxmp.study import Job, Summary, finished, jobs, put, study_of


def left(todo: list[Job], done: list[Summary]) -> str:
    """Time that the runs ``todo`` will take, by the median of those done."""
    from jaxmp.log import duration

    if not done:
        return 'time not known yet'
    return f'about {duration(len(todo) * statistics.median(s["seconds"] for s in done))} left'


def sweep(plan: list[Job], quiet: bool = True) -> dict[str, str]:
    """Runs what is not finished, one after another; returns what failed, and why.

    Args:
      plan: from `jobs`.
      quiet: tell of whole runs only, not of their epochs.

    Raises:
      ValueError: if a result of the plan was made with another configuration.
      KeyboardInterrupt: on a signal, with the run's state saved.
    """
    done, failed, busy = [s for job in plan if (s := finished(job))], {}, 0
    prepared = Rows()
    show_plan(plan)
    for at, job in enumerate(plan, 1):
        with locked(job.workdir) as mine:
            if finished(job):
                continue
            if not mine:
                busy += 1
                continue
            try:
                done.append(one(job, prepared.of(job), quiet))
            except Exception as error:  # one run's failure is not the sweep's
                failed[job.result.stem] = ' '.join(
                    [f'{type(error).__name__}:', *str(error).split()]
                )
        told = failed.get(job.result.stem) or scores(done[-1])
        todo = [j for j in plan[at:] if not j.result.exists()]
        say(f'[{at}/{len(plan)}] {job.result.stem}  {told}; {len(todo)} to do, {left(todo, done)}')
    say(f'{len(done)} finished, {busy} at work elsewhere, {len(failed)} failed')
    for name, reason in failed.items():
        say(f'  {name}: {reason}')
    return failed


class Rows:
    """The compiled programs of one row at a time, for all its seeds."""

    def __init__(self) -> None:
        """Holds none."""
        self._row, self._made = '', None

    def of(self, job: Job) -> Any:
        """What runs ``job``; of another row, the last row's programs are freed first."""
        from jaxmp.run import prepare, reseed
        from jaxmp.team import Team

        if self._made is None or self._row != job.row:
            self._made = None
            made = prepare(job.config, Team())
            engine = made.engine._replace(epoch=functools.cache(made.engine.epoch))
            self._row, self._made = job.row, made._replace(engine=engine)
        return reseed(self._made, job.config)


def scores(summary: Summary) -> str:
    """The last epoch's scores, and the time the run took."""
    from jaxmp.log import duration, headline

    modes = summary['test'].items()
    said = [f'{m} {headline(summary["measure"], s["last"])}' for m, s in modes]
    return '  '.join([*said, duration(summary['seconds'])])


def one(job: Job, made: Any, quiet: bool) -> Summary:
    """Runs ``job`` and leaves its result; raises KeyboardInterrupt if a signal ended it."""
    from jaxmp.run import run

    summary = run(job.config, job.workdir, made=made, quiet=quiet)
    if summary is None:
        raise KeyboardInterrupt
    job.result.parent.mkdir(parents=True, exist_ok=True)
    whole = job.workdir / 'result.json'
    lines = (f' {json.dumps(k)}: {json.dumps(v)}' for k, v in summary.items())
    whole.write_text('{\n' + ',\n'.join(lines) + '\n}\n')
    whole.replace(job.result)
    shutil.rmtree(job.workdir / 'checkpoints')
    return summary


def show_plan(plan: list[Job]) -> None:
    """Prints the rows, how far each is, and the time that is left."""
    done = [s for job in plan if (s := finished(job))]
    rows: dict[str, list[Job]] = {}
    for job in plan:
        rows.setdefault(job.row, []).append(job)
    for own in rows.values():
        config, ready = own[0].config, sum(j.result.exists() for j in own)
        begun = sum((j.workdir / 'checkpoints').exists() and not j.result.exists() for j in own)
        say(
            f'{config.name:24} {ready}/{len(own)} done{f", {begun} begun" if begun else "":9}  '
            f'fwd {config.fwd}  bwd {config.bwd}'
        )
    todo = [j for j in plan if not j.result.exists()]
    say(f'{len(plan)} runs, {len(todo)} to do, {left(todo, done)}')


def say(text: str) -> None:
    """Prints a line at once, as a log wants it."""
    print(text, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog='python -m jaxmp.sweep', description=(__doc__ or '').partition('\n\n')[2]
    )
    parser.add_argument('file', type=Path, help='a study, such as configs/paper_tables.py')
    parser.add_argument('--scale', required=True, help='smoke, cpu or paper')
    parser.add_argument('--tables', default='1,2,3,4', help='numbers, with commas')
    parser.add_argument('--rows', default='', help='only these rows, with commas')
    parser.add_argument('--seeds', type=int, default=0, help='only so many; 0: all')
    parser.add_argument('--out', type=Path, default=Path('results'), help='folder of results')
    parser.add_argument('--work', type=Path, default=Path('runs/sweep'), help='of checkpoints')
    parser.add_argument('--set', action='append', default=[], help='key=value, of every run')
    parser.add_argument('--plan', action='store_true', help='show the plan and run nothing')
    parser.add_argument('--verbose', action='store_true', help='tell of every epoch')
    return parser.parse_args(argv)


def plan_of(args: argparse.Namespace) -> list[Job]:
    """The runs that the command line asks for.

    Raises:
      ValueError: for a row, a key or a value that does not exist.
    """
    study = study_of(args.file).get_study(args.scale, tuple(map(int, args.tables.split(','))))
    rows = {r for r in args.rows.split(',') if r}
    if unknown := rows - {c.name for _, c in study}:
        known = ', '.join(dict.fromkeys(c.name for _, c in study))
        raise ValueError(f'no rows {", ".join(sorted(unknown))}; there are {known}')
    kept = [(s, c) for s, c in study if (not rows or c.name in rows)]
    kept = [(s, c) for s, c in kept if not args.seeds or s < args.seeds]
    for _, config in kept:
        for text in args.set:
            put(config, text)
        config.lock()
    return jobs(kept, args.out / args.scale, args.work / args.scale)


def main(argv: list[str] | None = None) -> None:
    """Runs a study; ends with 1 if a run failed and 143 on a signal."""
    args = arguments(argv)
    try:
        plan = plan_of(args)
        if args.plan:
            return show_plan(plan)
        from absl import logging

        from jaxmp.devices import keep_compiled

        logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
        keep_compiled()
        failed = sweep(plan, quiet=not args.verbose)
    except (ValueError, OSError) as error:
        sys.exit(f'jaxmp.sweep: {error}')
    except KeyboardInterrupt:
        say('stopped by a signal, the run begun is saved; the same command goes on')
        sys.exit(143)
    sys.exit(1 if failed else 0)


if __name__ == '__main__':
    main()
