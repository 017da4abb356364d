"""python bench/remat.py [--configs text_gpt2 digits_resnet]: a step that keeps residuals, or not.

CPU-seconds of a training step under ``config.parallel.runtime='mpmd'``, all stages in one process,
four micro-batches, with ``config.parallel.remat`` off and on: medians over ``--turns`` of the mean
of ``--steps`` steps, in turns inside one process, after a turn that compiles. **Kept**: bytes that
all stages keep between a forward and its backward at most, as `jaxmp train --dry-run` counts them.
"""

import argparse
import itertools
import os
import statistics
import time

os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=4'

import numpy as np

from jaxmp import data
from jaxmp.config import complete, load
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.allocator import keep_freed_pages
from jaxmp.training import experiment, sizes
from jaxmp.training.trainer import Trainer


def experiment_of(name, remat):
    """The configuration in stages of their own."""
    c = load(name)
    c.parallel.update(runtime='mpmd', num_microbatches=4, remat=remat)
    return experiment.experiment_of(complete(c))


def steps(exp):
    """Trains some steps at each ``next``, and yields their number."""
    trainer = Trainer(exp, ProcessGroup())
    state = trainer.create()
    for number in itertools.count():
        order = data.order(0, number, len(exp.data.train.y))
        for after, values, _ in trainer.epoch(0, state, order):
            state = after
            yield np.size(values['loss'])


def mean_seconds(run, count):
    """CPU-seconds per step, over ``count`` steps or a few more."""
    start, done = time.process_time(), 0
    while done < count:
        done += next(run)
    return (time.process_time() - start) / done


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--configs', nargs='+', default=['text_gpt2', 'digits_resnet'])
    parser.add_argument('--steps', type=int, default=5)
    parser.add_argument('--turns', type=int, default=7)
    args = parser.parse_args()
    keep_freed_pages()  # as in training
    print('| configuration | remat | CPU-ms per step | kept, MiB |\n|---|---|--:|--:|')
    for name in args.configs:
        both = {remat: experiment_of(name, remat) for remat in (False, True)}
        runs = {remat: steps(exp) for remat, exp in both.items()}
        times = {remat: [] for remat in both}
        for _ in range(args.turns + 1):
            for remat, run in runs.items():
                times[remat].append(mean_seconds(run, args.steps))
        for remat, exp in both.items():
            kept = sum(size * most for size, most in sizes.residual_rows(exp)) / 2**20
            cpu = 1e3 * statistics.median(times[remat][1:])
            print(f'| {name} | {remat} | {cpu:.0f} | {kept:.1f} |', flush=True)


if __name__ == '__main__':
    main()
