"""Training step by link and codec, over a really slow network: every stage a process, a namespace.

Run as root on Linux: python bench/slow_network.py [--links ...] [--codecs ...] [--models ...]
It writes a row as soon as it is measured and goes on where it was stopped; at the end a table
(`.md`) and a picture (`.png`) lie beside the rows (`.jsonl`). Elsewhere it says why it skips.

**Step time**: wall time of a training step (both passes, messages, optimizer), drawing the batch
included, in the first stage's process (with ``--delay`` in the slowest); mean of three consecutive
windows of ``--steps`` steps that agree within 5 %. If ``--windows`` of them did not get there, the
row says so.
**Payload**: bytes of the messages of a step, both ways, as the runtime hands them to the wire.
**Interface**: bytes that left all stages, from /sys/class/net inside their namespaces, headers and
acknowledgements included. The kernel counts a large packet once, with one header, where a card
would cut it into many (GSO), so this is a little less than a cable would carry.
**Compute**: a raw step with all stages in one process, median: no codec and no wire. With one
micro-batch only one stage works at a time, so stages in turn are what the pipeline does too.
**Bound**: with several micro-batches, max(compute, bytes over one direction of a link) and fill:
the rest of the way of one micro-batch through all stages and back. The compute of a stage is an
equal part of a coded step with all stages in one process; where there are fewer cores than stages,
all stages share them, and the CPU-seconds of such a step over the cores count. With ``--delay``
the pipeline stays full from step to step, and there is no fill.
**Busy**: CPU-seconds of a step in the stages' own processes, together, over the cores: what it
would take if no core ever waited. **Plan**: what the schedule's order would take if nothing cost
but these and the bytes (`slow_plan.py`).
**Machine**: CPU-seconds of a step in all the machine, over the cores: the kernel's, and those of
the emulated links, which a real network does not take. **Limit**: max(machine, bytes over one
direction of a link).
**Codec**: what the codec adds to such a step in one process, raw and coded steps taken in turn;
*alone*: sending and receiving at each cut, both ways, each a program by itself, summed.
**Wire**: the rest of the step time.
**Loss**: training loss at step 50 with the codec on, from the same seed and batches; no link
changes it.
**Bars**: the exit status is 1 if one is missed. They are set for a machine that does nothing else:
beside other work the codec and the network wait for a core, and the speed-up shrinks.
**Model**: compute + codec + payload and headers / rate + two delays a link.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import emulated_network
import slow_report
from emulated_network import LINKS, Lab
from slow_models import CODECS, TASKS
from timing import stem
from workers import Crew, Rows, machine_seconds, steady, workers

HERE = Path(__file__).parent
LOSS_STEPS, WARM, REPEATS = 50, 4, 30


def measure(made: Crew, lab: Lab, n: int, most: int, late: bool) -> dict[str, Any]:
    """Step time and bytes of what is built, over the link that is up."""
    made.ask('steps', n=n if late else WARM)  # a window fills a late pipeline, and TCP's own
    windows: list[float] = []
    busy: list[float] = []
    links: list[float] = []
    machine: list[float] = []
    # Counters are read when all stages are done: what one has sent is then out of its buffers.
    before, answers = made.sent(), []
    while not steady(windows) and len(windows) < most:
        since = lab.seconds(), machine_seconds()
        answers = made.ask('steps', n=n)
        links.append((lab.seconds() - since[0]) / n)
        machine.append((machine_seconds() - since[1]) / n)
        # Where the pipeline stays full, the first stage begins a window with gradients at hand.
        first = answers[0]['seconds'], *(a['seconds'] for a in answers if late)
        windows.append(max(map(sum, first)) / n)
        busy.append(sum(a['cpu_s'] for a in answers) / n)
    moved = {link: sizes for a in answers for link, sizes in a['moved'].items()}
    return {
        'step_s': sum(windows[-3:]) / len(windows[-3:]),
        'windows': windows,
        'steady': steady(windows),
        'cpu_s': sum(busy[-3:]) / len(busy[-3:]),
        'links_cpu_s': sum(links[-3:]) / len(links[-3:]),
        'machine_cpu_s': sum(machine[-3:]) / len(machine[-3:]),
        'payload': sum(map(sum, moved.values())),
        'moved': moved,
        'interface': (made.sent() - before) / n / len(windows),
    }


class Clock:
    """Progress and the time left, from a rough cost of every piece of work."""

    def __init__(self, costs: dict[Any, float]) -> None:
        self.costs, self.done, self.since = costs, 0.0, time.monotonic()

    def tick(self, key: Any, text: str) -> None:
        """Says that a piece is done."""
        self.done += self.costs.pop(key)
        pace = (time.monotonic() - self.since) / self.done
        left = pace * sum(self.costs.values()) / 60
        print(f'{" ".join(key):36}{text:60}{left:6.1f} min left', flush=True)


def cost(model: str, codec: str, link: str, steps: int) -> float:
    """A rough guess of the seconds that a piece takes."""
    compute = {'mlp': 0.04, 'resnet': 0.25}[model]
    share = {'raw': 1, 'bf16': 0.5, '8-bit': 0.25, 'fw4-bw8': 0.19}.get(codec, 0.1)
    if link == 'start':
        return 12 + 130 * compute
    if link == 'compute':
        return 5 + 70 * compute
    rate, delay = LINKS[link]
    return 1 + 3.5 * steps * (compute + share * 8.4e6 * 8 / (rate or 8e9) + 2 * delay)


def plan(rows: Rows, args: argparse.Namespace) -> dict[Any, float]:
    """What is still to be measured: (model, codec, link), with its cost."""
    todo = []
    for model in args.models:
        if not rows.has(kind='compute', model=model):
            todo.append((model, 'raw', 'compute'))
        for codec in args.codecs:
            cells = [
                (model, codec, link)
                for link in args.links
                if not rows.has(kind='step', model=model, codec=codec, link=link)
            ]
            if cells or not rows.has(kind='codec', model=model, codec=codec):
                todo += [(model, codec, 'start'), *cells]
    return {(m, c, l): cost(m, c, l, args.steps) for m, c, l in todo}


def work(made: Crew, lab: Lab, rows: Rows, args: argparse.Namespace) -> None:
    """Measures whatever the plan says, row by row."""
    todo = plan(rows, args)
    clock = Clock(dict(todo))
    for key in todo:
        model, codec, link = key
        if link == 'compute':
            words = {'fwd': 'raw', 'bwd': 'raw', 'n': REPEATS, 'plan': (*pipeline(args).values(),)}
            found = made.ask('local', 0, model=model, **words)[0]['raw_s']
            rows.add(kind='compute', model=model, compute_s=found)
            text = f'{1e3 * found:8.1f} ms a raw step in one process'
        elif link == 'start':
            text = start(made, lab, rows, (model, codec), (*pipeline(args).values(),))
        else:
            lab.use(LINKS[link])
            found = measure(made, lab, args.steps, args.windows, bool(args.delay))
            rows.add(kind='step', model=model, codec=codec, link=link, **found)
            text = (
                f'{1e3 * found["step_s"]:8.1f} ms a step, '
                f'interface / payload {found["interface"] / found["payload"]:.3f}'
                + ('' if found['steady'] else ', not steady')
            )
        clock.tick(key, text)


def pipeline(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a run that say how a step is scheduled."""
    return {
        'microbatches': args.microbatches, 'schedule': args.schedule, 'delay': args.delay,
        'by_stage': args.by_stage,
    }  # fmt: skip


def start(made: Crew, lab: Lab, rows: Rows, what: tuple[str, str], plan: Sequence[Any]) -> str:
    """Builds a network with a codec, trains it for the loss, times the codec by itself."""
    (model, codec), (fwd, bwd) = what, CODECS[what[1]]
    lab.use(LINKS['none'])
    made.ask('build', model=model, fwd=fwd, bwd=bwd, plan=plan)
    losses = made.ask('steps', n=LOSS_STEPS)[-1]['losses']
    if rows.has(kind='codec', model=model, codec=codec):
        return '         built'
    texts = {'fwd': fwd, 'bwd': bwd}
    alone = made.ask('alone', 0, model=model, n=REPEATS, **texts)[0]['seconds']
    local = made.ask('local', 0, model=model, n=REPEATS, **texts, plan=plan)[0]
    found = {'codec_s': local['coded_s'] - local['raw_s'], 'alone_s': alone, 'losses': losses}
    rows.add(kind='codec', model=model, codec=codec, **texts, **local, **found)
    return (
        f'{1e3 * found["codec_s"]:8.1f} ms for the codec, {1e3 * alone:.1f} alone; '
        f'loss {losses[-1] or float("nan"):.4f}'
    )


def probes(lab: Lab, rows: Rows, links: Sequence[str]) -> None:
    """What plain TCP reaches on every link."""
    for name in links:
        if not rows.has(kind='link', link=name):
            lab.use(LINKS[name])
            found = emulated_network.probe(lab, LINKS[name])
            rows.add(kind='link', link=name, nominal=LINKS[name], **found)
            print(f'{name:36}{found["tcp_bits"] / 1e6:8.1f} Mbit/s by plain TCP, ', end='')
            print(f'round trip {found["round_trip_ms"]:.2f} ms', flush=True)


FAR = '200m+150ms'  # where it is asked for: synchronous steps of seconds


def arguments() -> argparse.Namespace:
    """The command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    for name, choices in (('links', LINKS), ('codecs', CODECS), ('models', TASKS)):
        ask.add_argument(
            f'--{name}', nargs='+', choices=choices, default=[c for c in choices if c != FAR]
        )
    ask.add_argument('--steps', type=int, default=10, help='steps a window')
    ask.add_argument('--windows', type=int, default=9, help='windows at most')
    ask.add_argument('--stages', type=int, default=2, choices=(2, 4))
    ask.add_argument('--microbatches', type=int, default=1, help='of a batch')
    ask.add_argument(
        '--schedule',
        default='1f1b',
        help='of one stage per process, as config.parallel.schedule names it',
    )
    ask.add_argument('--delay', type=int, default=0, help='as config.optimizer.delay')
    ask.add_argument('--by_stage', action='store_true', help='as config.optimizer.delay_by_stage')
    ask.add_argument('--mtu', type=int, default=emulated_network.MTU, help='bytes of a packet')
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    return ask.parse_args()


def main() -> None:
    """Measures, then writes table and picture."""
    args = arguments()
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    out = args.out or HERE / 'results' / stem('network')
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = Rows(out.with_suffix('.jsonl'), args.fresh)
    cores = os.cpu_count()
    rows.start(stages=args.stages, steps=args.steps, mtu=args.mtu, cores=cores, **pipeline(args))
    with emulated_network.lab(args.stages, args.mtu) as lab:
        probes(lab, rows, args.links)
        with workers(lab, 'slow_worker.py') as made:
            work(made, lab, rows, args)
    sys.exit(1 if slow_report.write(rows.rows, out) else 0)


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the same command goes on from here')
