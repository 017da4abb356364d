"""`python -m study bench [TEXT ...]`: channels scored on one small task, ours and those of others.

    python -m study bench
    python -m study bench 'rotate(lloyd(2))' --backward='block(4)'
    python -m study bench 'mine.py:mine(2)'

A text is a forward channel; without one, all entries of the table are run. A score is the bits
of the messages as compiled, the bits above Shannon's bound, the time of the codec in memcpys, the
steps that an eight-stage GPT needs until a fixed loss (3 seeds, each against its run without
compression), and the time that ProtocolNanoGPT would need over four links. Two cores take about
an hour for all entries, and some minutes for a text of yours. What has ended is kept in the
folder --out, and the same command goes on there; the table shows all entries of the folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from study.bench.entries import Entry, entries_of
from study.bench.protocol import LINK, LINKS

if TYPE_CHECKING:
    from study.bench.rows import Row
    from study.bench.twin import Goal


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    parser = argparse.ArgumentParser(
        prog='python -m study bench',
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument('text', nargs='*', help='forward channels; default those of the table')
    parser.add_argument('--backward', default='', help='their backward channel; default the same')
    parser.add_argument('--seeds', type=int, default=3, help='runs of each; default 3')
    parser.add_argument(
        '--link', default=LINK, choices=LINKS, metavar='LINK',
        help=f'that ranks: {" or ".join(LINKS)}; default {LINK}',
    )  # fmt: skip
    parser.add_argument('--out', type=Path, default=Path('runs/bench'), help='default runs/bench')
    args = parser.parse_args(argv)
    if args.backward and not args.text:
        parser.error('--backward needs a forward channel before it')
    if args.seeds < 1:
        parser.error('--seeds is a whole number from 1')
    return args


def bench(
    entries: Sequence[Entry],
    out: Path,
    seeds: int = 3,
    link: str = LINK,
    goal: Goal | None = None,
) -> str:
    """Runs what has not been run, writes the table to ``out``, and returns it.

    Args:
      entries: pairs of channels, the uncompressed one among them.
      out: folder.
      seeds: runs of each entry.
      link: that ranks the table.
      goal: what the twin learns; default `study.bench.twin.GOAL`.

    Raises:
      ValueError: if a text names no channel, or one that does not fit the twin; before any run.
      KeyboardInterrupt: after a signal; the state of the run has been saved.
    """
    from jaxmp.sweep.runner import sweep
    from jaxmp.training.experiment import experiment_of
    from study.bench.cost import costs_of
    from study.bench.table import write
    from study.bench.twin import GOAL, config_of, plan

    goal = goal or GOAL
    for entry in entries:
        experiment_of(config_of(entry, 0, goal))
    out.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        costs_of(entry, out)
    failed = sweep(plan(entries, seeds, out, goal))
    why = {e: r for e in entries for n, r in failed.items() if n.rpartition('-s')[0] == e.name}
    return write(rows_in(out, goal.loss, entries, why), link, goal.loss, out)


def rows_in(
    out: Path, loss: float, entries: Sequence[Entry] = (), why: Mapping[Entry, str] | None = None
) -> list[Row]:
    """The rows of the entries that a folder has results of, and of ``entries``.

    Args:
      out: folder.
      loss: of the twin, that counts as learned.
      entries: pairs of channels.
      why: the error of an entry whose run has failed.
    """
    from study.bench.cost import costs_of
    from study.bench.rows import row_of
    from study.bench.twin import entry_of, twins

    results = [json.loads(p.read_text()) for p in sorted((out / 'runs').glob('*.json'))]
    twin_of, why = twins(results, loss), why or {}
    shown = dict.fromkeys([*map(entry_of, results), *entries])
    return [row_of(e, costs_of(e, out), twin_of.get(e), why.get(e, '')) for e in shown]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 143 after a signal."""
    args = arguments(argv)
    try:
        entries = entries_of(args.text, args.backward)
        from jaxmp.training.command import set_up

        set_up()
        print(bench(entries, args.out, args.seeds, args.link))
    except (OSError, ValueError) as error:
        sys.exit(f'python -m study bench: {error}')
    except KeyboardInterrupt:
        print('stopped by a signal; the current run is saved, and the same command continues it')
        sys.exit(143)
    print(f'wrote {args.out / "table.md"}, table.json, time.png and time.svg')
