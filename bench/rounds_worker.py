"""One replica of `slow_rounds.py` as a process; see `workers.serve`.

rounds_worker.py coordinator_address replicas replica
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import emulated_network
import jax
import numpy as np
from workers import interfaces, serve

from jaxmp import data
from jaxmp.config import complete, load
from jaxmp.exchange import AXIS, bytes_of
from jaxmp.net.connect import names_of
from jaxmp.net.group import ProcessGroup
from jaxmp.net.keys import keys_of
from jaxmp.net.peer import Peer
from jaxmp.net.switch import Switch
from jaxmp.net.views import Terms
from jaxmp.runtimes.placement import device_mesh, open_links
from jaxmp.training import replicas
from jaxmp.training.elastic.member import Member
from jaxmp.training.elastic.run import ElasticTrainer
from jaxmp.training.experiment import Experiment, experiment_of
from jaxmp.training.groups import exchanged
from jaxmp.training.trainer import Trainer

PATIENCE = 120.0


@dataclass
class Run:
    """Replicas with an exchange, and the steps that they have made."""

    exp: Experiment
    trainer: Trainer
    state: Any
    epoch: int
    count: int = 0


class Worker:
    """This process's replica."""

    def __init__(self, n: int) -> None:
        self.n, self.me = n, jax.process_index()
        open_links(device_mesh(**{AXIS: n}))
        self.runs: dict[str, Run] = {}

    def build(self, name: str, row: str, exchange: str, port: int) -> dict[str, Any]:
        """Makes network and exchange as run ``name``; says what the exchange hands over."""
        c = load(f'text_gpt2_diloco:{row}')
        c.parallel.replicas, c.exchange = self.n, exchange
        exp = experiment_of(complete(c))
        rounds = exp.exchange.rounds is not None
        self.runs[name] = self._rounds(exp, port) if rounds else self._every_step(exp)
        trainer = self.runs[name].trainer
        trees = exchanged(exp.groups, trainer.shapes(), together=True)
        return replicas.traffic(exp, trees, lambda rule, tree: bytes_of(rule, tree, self.n))

    def _rounds(self, exp: Experiment, port: int) -> Run:
        """Replicas that meet by a switch, beside the first of them."""
        where, keys = emulated_network.address(0), keys_of('bench')
        if self.me == 0:
            Switch(keys, where, port)
        terms = Terms(names_of(range(self.n), 'replica'), self.n, PATIENCE, PATIENCE)
        trainer = ElasticTrainer(exp, self.me, Path(tempfile.mkdtemp()))
        trainer.meetings.member = Member(Peer((where, port), keys, self.me, terms))
        return Run(exp, trainer, trainer.enter(trainer.create()), 0)

    def _every_step(self, exp: Experiment) -> Run:
        """Replicas that meet in each step, in one program over all processes, after any warm-up."""
        trainer = Trainer(exp, ProcessGroup())
        return Run(exp, trainer, trainer.create(), exp.config.epochs - 1)

    def drop(self, name: str) -> None:
        """Forgets a run."""
        del self.runs[name]

    def steps(self, name: str, n: int) -> dict[str, Any]:
        """Trains ``n`` steps of a run: their seconds, in all."""
        run = self.runs[name]
        size, images = run.exp.config.batch_size, len(run.exp.data.train.y)
        order = data.order(0, 0, images)[: images // size * size]
        rows = np.take(order, range(run.count * size, (run.count + n) * size), mode='wrap')
        start = time.perf_counter()
        for state, values, _ in run.trainer.epoch(run.epoch, run.state, rows):
            jax.block_until_ready(values)
            run.state = state
        run.count += n
        return {'seconds': time.perf_counter() - start}

    def sent(self) -> dict[str, int]:
        """Bytes that left this namespace so far."""
        return interfaces()


if __name__ == '__main__':
    serve(Worker, *sys.argv[1:])
