"""How far messages overlap compute: stages that sleep, over a really slow network, by schedule.

Run as root on Linux: python bench/overlap.py [--links ...] [--schedules ...]; else it says why it
skips. Four processes, each in a network namespace, run stages whose forward, gradient of the input
and gradient of the weights sleep ``--times`` ms, so that a few cores carry four devices; the
messages of float32 are sent as they are. A row is written as soon as it is measured, and a table
(`.md`) lies beside the rows (`.jsonl`).

**Step**: wall time of a step in the first stage's process, median of ``--steps`` after two more.
**Plan**: end of the schedule by its own rule (`jaxmp.runtimes.schedules`), with the time of a
message alone on its link; messages that wait for each other are not in it.
**Bound**: M times what the busiest stage or direction of a link takes per micro-batch, and fill:
the rest of the way of one micro-batch through all stages and back.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import emulated_network
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from emulated_network import LINKS, Link
from slow_report import ETHERNET, TCP
from timing import stem
from workers import Rows, serve, workers

import jaxmp
from jaxmp import Ctx
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.driver import Driver
from jaxmp.runtimes.links import opener
from jaxmp.runtimes.placement import place
from jaxmp.runtimes.schedule import Costs, size
from jaxmp.runtimes.schedules import SCHEDULES
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.types import Model

STAGES, WARM = 4, 2
BUSY = threading.Lock()  # of the one device of a process


def sleep(seconds: float, x: Any) -> Any:
    """``x``, after so long in which this process sleeps no other time."""

    def wait(first: Any) -> Any:
        with BUSY:
            time.sleep(seconds)
        return np.zeros((), np.float32) * first

    return x + jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x.ravel()[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def slept(seconds: tuple[float, float], x: Any) -> Any:
    """``x``, after the first time; its gradient comes after the second."""
    return sleep(seconds[0], x) if seconds[0] else x


slept.defvjp(
    lambda seconds, x: (slept(seconds, x), None),
    lambda seconds, _, g: (sleep(seconds[1], g),),
)


class Sleeper(nn.Module):
    """A stage whose forward, gradient of the input and gradient of the weight take such times."""

    times: tuple[float, float, float]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """``x`` and a weight."""
        forward, backward, weights = self.times
        weight = self.param('weight', nn.initializers.zeros, ())
        return slept((forward, backward), x) + slept((0.0, weights), weight)


class Case(NamedTuple):
    """What is measured: sleeps in ms, floats of a message, micro-batches, schedule."""

    times: tuple[float, float, float]
    floats: int
    microbatches: int
    schedule: str


def machine(case: Case, stages: int, group: ProcessGroup) -> Any:
    """The pipeline of a case."""
    seconds = tuple(t / 1e3 for t in case.times)
    cut = jaxmp.boundary(jaxmp.parse('raw'), jaxmp.parse('raw'))
    x = jax.ShapeDtypeStruct((1, case.floats), np.float32)
    score = lambda y, target: (y.mean() + 0 * target.mean(), None)
    sleepers = (Sleeper(seconds),) * stages
    model = Model(sleepers, (cut,) * (stages - 1), lambda x, key: x, score, x)
    made = programs(model, kwargs={})
    plan = SCHEDULES[case.schedule](stages, case.microbatches, Costs(*seconds))
    at = place(1, stages, group=group)[0]
    return Driver(made, at, plan, functools.partial(opener(np.array([at]), group), 0))


class Worker:
    """Answers the orders."""

    def __init__(self, stages: int, group: ProcessGroup) -> None:
        self.stages, self.group = stages, group

    def steps(self, case: Sequence[Any], n: int) -> list[float]:
        """Seconds of ``n`` steps of a new pipeline, after some that do not count."""
        times, *others = case
        made = Case(tuple(times), *others)
        driver, m = machine(made, self.stages, self.group), made.microbatches
        states, taken = driver.init(jax.random.key(0)), []
        x = np.ones((m, made.floats), np.float32)
        for _ in range(WARM + n):
            start = time.perf_counter()
            result = driver.step(states, x, x[:, :1], Ctx())
            states = result.states
            jax.block_until_ready((result.grads, states))
            taken.append(time.perf_counter() - start)
        return taken[WARM:]


def message_seconds(floats: int, link: Link, mtu: int) -> float:
    """The time that a message occupies a direction of a link, headers included."""
    return 8 * 4 * floats * (mtu + ETHERNET) / (mtu - TCP) / link.rate if link.rate else 0.0


def bound(times: Sequence[float], wire: float, delay: float, stages: int, m: int) -> float:
    """See the module."""
    own = sum(times)
    return max(own, wire) * (m - 1) + stages * own + 2 * (stages - 1) * (wire + delay)


def row(case: Case, link: Link, mtu: int, seconds: Sequence[float]) -> dict[str, Any]:
    """A measured case with its bound and the plan of its schedule."""
    times = [t / 1e3 for t in case.times]
    wire = message_seconds(case.floats, link, mtu)
    costs = Costs(*times, message=wire + link.delay)
    plan = SCHEDULES[case.schedule](STAGES, case.microbatches, costs)
    return {
        **case._asdict(),
        'seconds': list(seconds),
        'step_s': statistics.median(seconds),
        'message_s': wire + link.delay,
        'plan_s': size(plan)[2],
        'bound_s': bound(times, wire, link.delay, STAGES, case.microbatches),
    }


def markdown(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The page, line by line; rows of several commits stand beside each other."""
    runs = [r for r in rows if r['kind'] == 'run']
    yield from ('# Overlap of messages and compute', '')
    hardware = f'{runs[0]["hardware"]}, jax {runs[0]["versions"]["jax"]}'
    yield f'{hardware}; {STAGES} stages that sleep, in'
    yield f'as many processes and network namespaces, packets of {runs[0]["mtu"]} bytes.'
    yield 'Definitions are in `bench/overlap.py`.'
    yield from ('', *dict.fromkeys(f'{r["text"]}: `{r["command"]}`, {r["commit"]}' for r in runs))
    yield from ('', *(r['text'] for r in rows if r['kind'] == 'note'))
    steps = [r for r in rows if r['kind'] == 'step']
    texts = list(dict.fromkeys(r['text'] for r in steps))
    same = ('link', 'times', 'floats', 'microbatches', 'schedule')
    cases = {json.dumps([r[k] for k in same]): r for r in reversed(steps)}
    columns = ''.join(f' {t} ms | / plan | / bound |' for t in texts)
    yield from ('', f'| link | F, B, W ms | message ms | schedule | plan ms | bound ms |{columns}')
    yield '|---|---|--:|---|--:|--:|' + '--:|' * 3 * len(texts)
    for key, r in reversed(cases.items()):
        line = f'| {r["link"]} | {", ".join(f"{t:g}" for t in r["times"])} '
        line += f'| {1e3 * r["message_s"]:.1f} | {r["schedule"]} '
        line += f'| {1e3 * r["plan_s"]:.0f} | {1e3 * r["bound_s"]:.0f} |'
        for text in texts:
            own = [
                s for s in steps if s['text'] == text and json.dumps([s[k] for k in same]) == key
            ]
            line += f' {1e3 * own[-1]["step_s"]:.0f} |' if own else ' |'
            line += ''.join(
                f' {own[-1]["step_s"] / r[k]:.2f} |' if own else ' |' for k in ('plan_s', 'bound_s')
            )
        yield line


def arguments() -> argparse.Namespace:
    """The command line."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--links', nargs='+', choices=LINKS, default=['none', '100m', '200m+50ms'])
    ask.add_argument('--schedules', nargs='+', default=['1f1b', 'eager_1f1b', 'zb_h2', 'gpipe'])
    ask.add_argument('--times', nargs=3, type=float, default=[40, 40, 40], help='ms of F, B, W')
    ask.add_argument('--floats', nargs='+', type=int, default=[62_500], help='of a message')
    ask.add_argument('--microbatches', type=int, default=8)
    ask.add_argument('--steps', type=int, default=7)
    ask.add_argument('--text', default='now', help='what the column of this run is called')
    ask.add_argument('--out', type=Path, help='results without their ending')
    ask.add_argument('--fresh', action='store_true', help='forget what was measured')
    return ask.parse_args()


def main() -> None:
    """Measures, then writes the table."""
    args = arguments()
    if why := emulated_network.obstacle():
        return print(f'skipped: {why}')
    out = args.out or Path(__file__).parent / 'results' / stem('overlap')
    rows, mtu = Rows(out.with_suffix('.jsonl'), args.fresh), emulated_network.MTU
    rows.start(mtu=mtu, text=args.text)
    with emulated_network.lab(STAGES) as lab, workers(lab, Path(__file__).name) as made:
        for name in args.links:
            lab.use(LINKS[name])
            for floats in args.floats:
                for schedule in args.schedules:
                    case = Case(tuple(args.times), floats, args.microbatches, schedule)
                    seconds = made.ask('steps', case=case, n=args.steps)[0]
                    found = row(case, LINKS[name], mtu, seconds)
                    rows.add(kind='step', text=args.text, link=name, **found)
                    said = [f'{1e3 * found[k]:7.0f}' for k in ('step_s', 'plan_s', 'bound_s')]
                    print(f'{name:12}{floats:9}{schedule:>12}', *said, flush=True)
    out.with_suffix('.md').write_text('\n'.join(markdown(rows.rows)) + '\n')


if __name__ == '__main__':
    serve(Worker, *sys.argv[1:], apart=True) if ':' in ''.join(sys.argv[1:2]) else main()
