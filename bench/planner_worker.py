"""Steps of several configurations in turns, by two processes with a core each, for `planner.py`.

`launched` starts `python bench/planner_worker.py --link=1gbit FILE FILE ...` in a group of
`jaxmp launch`; process 0 prints the seconds of all steps as JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

CORES = 2
WARM = 1  # steps of a configuration in each round that do not count


def launched(files: Sequence[Path], link: str, rounds: int, steps: int) -> list[list[float]]:
    """Seconds of all steps of each file, in process 0."""
    command = [sys.executable, '-m', 'jaxmp.launch', f'--processes={CORES}', '--', sys.executable]
    command += [str(Path(__file__)), f'--link={link}', f'--rounds={rounds}', f'--steps={steps}']
    command += map(str, files)
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    if said.returncode:
        raise RuntimeError(said.stderr[-2000:])
    return json.loads(said.stdout.splitlines()[-1])


def in_rounds(
    runs: Sequence[Callable[[], float]], rounds: int, steps: int, warm: int = WARM
) -> list[list[float]]:
    """What each run gives in all rounds, which have orders of their own, the same everywhere."""
    found: list[list[float]] = [[] for _ in runs]
    for number in range(rounds):
        for i in np.random.default_rng(number).permutation(len(runs)).tolist():
            found[i] += [runs[i]() for _ in range(warm + steps)][warm:]
    return found


class Run:
    """A training that makes a step when it is called, and gives its seconds."""

    def __init__(self, trainer: Any) -> None:
        """Makes the state before the first step."""
        self._trainer, self._rules = trainer, trainer.rules(0)
        self._state, self._batches = trainer.create(), self._endless()

    def _endless(self) -> Iterator[Any]:
        from jaxmp import data

        exp = self._trainer.exp
        for epoch in itertools.count():
            order = data.order(exp.config.seed, epoch, len(exp.data.train.y))
            yield from data.batches(exp.data.train, exp.config.batch_size, order)

    def __call__(self) -> float:
        """Makes a step."""
        import jax

        from jaxmp.training.step import train_step

        start, e = time.perf_counter(), self._trainer
        given = self._state, next(self._batches)
        self._state, _ = jax.block_until_ready(train_step(self._rules, e.training, e.across, given))
        return time.perf_counter() - start


def with_cpu(run: Callable[[], float]) -> tuple[float, float]:
    """The seconds that a run gives, and the CPU-seconds of this process meanwhile."""
    before = time.process_time()
    return run(), time.process_time() - before


class Alone(Run):
    """The training by one machine."""

    def __init__(self, config: Any) -> None:
        """Makes the state before the first step, and what makes a step."""
        from jaxmp.net.group import ProcessGroup
        from jaxmp.plan.pays import by_itself
        from jaxmp.training.experiment import experiment_of
        from jaxmp.training.trainer import Trainer

        super().__init__(trainer := Trainer(experiment_of(by_itself(config)), ProcessGroup()))
        self._step = trainer.bound(trainer.training, self._rules)

    def __call__(self) -> float:
        """Makes a step."""
        import jax

        batch = next(self._batches)
        if self._trainer.scans:
            batch = batch['id'][None]
        start = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._step(self._state, batch))
        return time.perf_counter() - start


def measure(args: argparse.Namespace) -> None:
    """Steps of configurations in this process of a group."""
    core = args.process % (os.cpu_count() or 1) if args.core is None else args.core
    os.sched_setaffinity(0, {core})
    import jax

    from jaxmp.config import complete, load
    from jaxmp.net.connect import Address
    from jaxmp.net.speed import Link, parse
    from jaxmp.runtimes.allocator import keep_freed_pages
    from jaxmp.runtimes.placement import keep_compiled
    from jaxmp.training.experiment import experiment_of
    from jaxmp.training.loop import devices, process_group_of
    from jaxmp.training.trainer import Trainer

    configs = [complete(load(file)) for file in args.files]
    link = parse(args.link) if args.link else Link(0.0)
    for config in configs:
        config.parallel.update(link_rate=link.rate, link_delay=link.delay)
    keep_compiled()
    keep_freed_pages()
    place = args.coordinator, args.processes, args.process
    group = process_group_of(configs[0], Address(*place, None, 60.0))
    if (count := devices(configs[0], group.count)) > 1:
        jax.config.update('jax_num_cpu_devices', count)
    made = [Trainer(experiment_of(config), group) for config in configs]
    group.share(None)  # all links are open before anything is compiled
    runs: list[Any] = [Run(trainer) for trainer in made]
    if args.alone:
        runs = [Alone(configs[0]) if args.process == 0 else lambda: 0.0, *runs]
        runs = [lambda run=run: with_cpu(run) for run in runs]
    in_rounds(runs, 1, 0)  # compiles
    seconds = in_rounds(runs, args.rounds, args.steps)
    group.share(None)
    print(json.dumps(seconds), flush=True)
    group.close()


def main() -> None:
    """Runs the command line, to which `jaxmp launch` adds the group."""
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('files', nargs='+')
    ask.add_argument('--link', default='', help='emulated; empty: as it is')
    ask.add_argument('--core', type=int, help='of this process; default: of its number')
    ask.add_argument('--alone', action='store_true', help='one machine first; CPU-seconds too')
    ask.add_argument('--rounds', type=int, required=True)
    ask.add_argument('--steps', type=int, required=True)
    ask.add_argument('--coordinator')
    ask.add_argument('--processes', type=int)
    ask.add_argument('--process', type=int)
    measure(ask.parse_args())


if __name__ == '__main__':
    main()
