"""python bench/elastic.py [--seconds=1]: a round between processes, with and without a delay.

One replica of two trains a small GPT-2; the other is away. A round takes the given time on the way,
for which the hub sleeps. The rows are medians over rounds of the mean time of a round's steps, in
turns, so that the load of the machine is the same for all.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from jaxmp import data
from jaxmp.config import complete
from jaxmp.distributed.hub import Hub
from jaxmp.distributed.member import Member
from jaxmp.distributed.rendezvous import listen
from jaxmp.plugins import load
from jaxmp.training.elastic import elastic
from jaxmp.training.experiment import experiment_of
from jaxmp.training.meetings import Meetings

STEPS, TURNS = 20, 5
RULE = 'all_gather(ef(one_bit))'
TEXTS = {
    'no exchange': 'diloco(1000000, mean)',
    'no delay': f'diloco({STEPS}, {RULE})',
    'delay': f'diloco({STEPS}, {RULE}, delay={STEPS // 2})',
}


def config_of(text):
    """A GPT-2 that takes about a tenth of a second per step."""
    c = load('text_gpt2')
    c.model.width, c.batch_size, c.parallel.replicas, c.exchange = 96, 16, 2, text
    return complete(c)


def rounds(text, seconds):
    """Runs a round at each ``next``, and yields the mean time of its steps."""
    server = listen('127.0.0.1', 0)
    hub, share = Hub(server, 1, say=lambda line: None), Hub._share
    hub._share = lambda: (time.sleep(seconds), share(hub))[1]
    threading.Thread(target=hub.serve, daemon=True).start()
    exp = experiment_of(config_of(text))
    meetings, folder = Meetings(exp), Path(tempfile.mkdtemp())
    engine = elastic(exp, meetings, 0, folder)
    meetings.member = Member(server.getsockname(), 0, '', 5.0)
    state, epoch = engine.enter(engine.create(exp)), 0
    while True:
        order = np.tile(data.order(0, epoch, len(exp.data.train.y)), 2)
        steps = engine.epoch(epoch)(state, order)
        for _ in range(len(order) // exp.config.batch_size // STEPS):
            began = time.time()
            for _ in range(STEPS):
                state, values, _ = next(steps)
                float(values['loss'])
            yield (time.time() - began) / STEPS
        epoch += 1


def main():
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument('--seconds', type=float, default=1.0)
    seconds = parser.parse_args().seconds
    runs = {name: rounds(text, seconds) for name, text in TEXTS.items()}
    for _ in range(2):  # compiles
        for run in runs.values():
            next(run)
    times = {name: [] for name in runs}
    for _ in range(TURNS):
        for name, run in runs.items():
            times[name].append(next(run))
    base = np.median(times['no exchange'])
    print(f'| {STEPS} steps per round, {seconds} s on the way | ms per step | over no exchange |')
    print('|---|--:|--:|')
    for name, row in times.items():
        print(
            f'| {name} | {1e3 * np.median(row):.1f} | {100 * (np.median(row) / base - 1):.1f} % |'
        )


if __name__ == '__main__':
    main()
