"""Replicas over a slow link that meet every 30 steps, now and then beside compute, or in each step.

Run as root on Linux: python bench/slow_rounds.py [--replicas 2 4] [--link 100m]
Rows are kept as they are measured (`.jsonl`), and it goes on where it was stopped; at the end a
table (`.md`) lies beside them.

The network is that of `configs/text_gpt2_diloco.py`; each replica is a process and a namespace, and
the replicas share this machine's cores. Namespaces stand in a chain. Rounds go
directly between replicas, and by a switch in the first namespace, as in a run with
``parallel.elastic``; exchanges of each step are collectives of one program.
**Step time**: wall time of two rounds over their steps, in the slowest replica, for which the
others wait where they meet; the median of ``--windows``. **Without**: that of the same replicas
and their optimizer with no exchange, in turns with it.
**Bytes**: of a replica's messages in 30 steps. **Interface**: bytes that left all
namespaces in 30 steps, by replica.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import emulated_network
from emulated_network import LINKS, Lab
from timing import stem
from workers import HERE, Crew, Rows, workers

from jaxmp.config import load

STEPS, DELAY, PORT = 30, 10, 9100
NONE = 'diloco(1000000, mean)'  # no exchange in these steps


class Case(NamedTuple):
    """A row of the study, whose optimizer is taken, and another exchange in place of its own."""

    row: str
    exchange: str = ''


CASES = {
    'AdamW in each step': Case('adamw'),
    'one bit in each step': Case('one_bit'),
    '1-bit Adam': Case('frozen_adam'),
    'DeMo': Case('demo'),
    'DiLoCo': Case('diloco'),
    'DiLoCo, beside 10 steps': Case('diloco', f'diloco({STEPS}, mean, delay={DELAY})'),
    'Streaming DiLoCo': Case('streaming'),
    'SparseLoCo': Case('sparseloco'),
    'SparseLoCo, beside 10 steps': Case('sparseloco', 'delay'),
    'MuLoCo': Case('muloco'),
    'MuLoCo, beside 10 steps': Case('muloco', 'delay'),
}


def text_of(case: Case) -> str:
    """The exchange of a case."""
    own = load(f'text_gpt2_diloco:{case.row}').exchange
    return f'{own[:-1]}, delay={DELAY})' if case.exchange == 'delay' else case.exchange or own


def measure(made: Crew, lab: Lab, rows: Rows, args: argparse.Namespace, n: int) -> None:
    """Builds each case and times it over the link, in turns with no exchange."""
    bases: dict[str, str] = {}  # by optimizer
    for i, name in enumerate(args.cases):
        if rows.has(kind='step', name=name, replicas=n):
            continue
        lab.use(LINKS['none'])
        base = f'{name}, without'
        optimizer = str(load(f'text_gpt2_diloco:{CASES[name].row}').optimizer)
        if bases.setdefault(optimizer, base) == base:
            build(made, base, Case(CASES[name].row, NONE), PORT + 2 * i)
        base, about = bases[optimizer], build(made, name, CASES[name], PORT + 2 * i + 1)
        lab.use(LINKS[args.link])
        sent, windows = 0, {base: [], name: []}
        for _ in range(args.windows):
            windows[base].append(window(made, base))
            before = made.sent()
            windows[name].append(window(made, name))
            sent += made.sent() - before
        made.ask('drop', name=name)
        step, none = (statistics.median(windows[k]) for k in (name, base))
        about |= {'step_s': step, 'none_s': none, 'windows': windows}
        rows.add(kind='step', name=name, interface=sent / args.windows / 2 / n, **about)
        print(f'{n} replicas  {name:28}{1e3 * step:9.1f} ms, {1e3 * none:.1f} without', flush=True)


def build(made: Crew, name: str, case: Case, port: int) -> dict[str, Any]:
    """Makes a case, and runs it up to the middle of a round; what it hands over."""
    order = {'row': case.row, 'exchange': text_of(case), 'port': port}
    about = made.ask('build', name=name, **order)[0]
    made.ask('steps', name=name, n=5 * STEPS // 2)  # a window then has whole rounds, on the way too
    return about


def window(made: Crew, name: str) -> float:
    """Seconds per step of the slowest replica in two rounds."""
    return max(a['seconds'] for a in made.ask('steps', name=name, n=2 * STEPS)) / 2 / STEPS


def markdown(rows: list[dict[str, Any]]) -> str:
    """The page."""
    runs = [r for r in rows if r['kind'] == 'run']
    run = runs[0]
    lines = [
        '# Replicas over a slow link, each step or every 30 steps',
        '',
        f'{run["hardware"]}, jax {run["versions"]["jax"]}, link {run["link"]}. Definitions:',
        '`bench/slow_rounds.py`. Wall times: other work counts. Rows of these commands:',
        '',
        *(f'* `{r["command"]}`, commit {r["commit"]}, load average {r["load"]}' for r in runs),
    ]
    steps = [r for r in rows if r['kind'] == 'step']
    for n in dict.fromkeys(r['replicas'] for r in steps):
        lines += [
            '',
            f'## {n} replicas',
            '',
            '| replicas meet by | exchange | ms per step | without | more | bytes | interface |',
            '|---|---|--:|--:|--:|--:|--:|',
        ]
        for r in (r for r in steps if r['replicas'] == n):
            more = 100 * (r['step_s'] / r['none_s'] - 1)
            lines.append(
                f'| {r["name"]} | `{r["text"]}` | {1e3 * r["step_s"]:.1f} '
                f'| {1e3 * r["none_s"]:.1f} | {more:+.1f} % | {STEPS * r["sent"]:,.0f} '
                f'| {r["interface"]:,.0f} |'
            )
    return '\n'.join(lines) + '\n'


def main() -> None:
    """Measures, then writes the table."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--replicas', nargs='+', type=int, default=[2, 4])
    ask.add_argument('--cases', nargs='+', choices=CASES, default=list(CASES))
    ask.add_argument('--link', choices=LINKS, default='100m')
    ask.add_argument('--windows', type=int, default=3)
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    args = ask.parse_args()
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    out = args.out or HERE / 'results' / stem('rounds')
    rows = Rows(out.with_suffix('.jsonl'), args.fresh)
    rows.start(link=args.link, windows=args.windows)
    for n in args.replicas:
        with emulated_network.lab(n) as lab, workers(lab, 'rounds_worker.py') as made:
            measure(made, lab, rows, args, n)
    text = markdown(rows.rows)
    out.with_suffix('.md').write_text(text)
    print(text)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
