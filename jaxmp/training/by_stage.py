"""Training whose stages are apart: a program per stage, or one program over a mesh, and replicas.

The same experiment, randomness and data order as in one program. What is per stage stays on its
device between steps; `together` lets all processes know what happened.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.boundary import Boundary
from jaxmp.config import Config
from jaxmp.distributed.placement import open_links, place
from jaxmp.distributed.process_group import ProcessGroup, together
from jaxmp.exchange.copies import ENDS, Copies
from jaxmp.exchange.traffic import bytes_of
from jaxmp.hlo import interface_bytes
from jaxmp.runtimes import schedule
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.types import ByReplica, ModelState, by_replica, of_replica
from jaxmp.training import portable, profile, replicas
from jaxmp.training.engine import Engine, Epoch, Stopped, model_of, rules_of
from jaxmp.training.evaluate import cuts_to_score, feedback_to_score, means, sums, totals
from jaxmp.training.experiment import Experiment, actions_of
from jaxmp.training.groups import copied, exchanged, joined, split
from jaxmp.training.portable import Portable
from jaxmp.training.step import Across, TrainState, create, train_step


def by_stage(exp: Experiment, group: ProcessGroup) -> Engine:
    """The engine of ``config.parallel.runtime = 'mpmd'`` and ``'spmd'``.

    Args:
      exp: the experiment, the same in all processes.
      group: the processes.

    Raises:
      ValueError: if there are too few devices, or more processes than stages of all replicas.
    """
    e = ByStage(exp, group)
    return Engine(
        e.create, e.epoch, e.evaluate, e.export, e.load, e.bytes, e.check, e.weights,
        profile=e.profile)  # fmt: skip


def places(config: Config, stages: int) -> list[list[Any]]:
    """The device of each replica and stage, as ``[r][s]``.

    Raises:
      ValueError: as `jaxmp.distributed.placement.place`.
    """
    replicas = config.parallel.replicas
    if config.parallel.runtime == 'spmd':
        return place(replicas, stages, apart=True)
    homes = schedule.place(actions_of(config, stages))
    rows = place(replicas, 1 + max(homes))
    return [[row[d] for d in homes] for row in rows]


class ByStage:
    """The engine, whose runtimes are built when they are first used."""

    def __init__(self, exp: Experiment, group: ProcessGroup) -> None:
        self.exp, self.group = exp, group
        self.columns = Columns(places(exp.config, len(exp.task.stages)))
        self.last = len(exp.task.stages) - 1
        self.ends = dict(zip(ENDS, (0, self.last), strict=True))
        self.steps, self.sent = 0, 0
        self.run_step: profile.Run = profile.plainly
        _ = self.training, self.tables  # opens every link; see `prepare` in jaxmp.training.loop
        self.columns.open()
        self.across = Across(self.total, self.tie, init=self.init_copies)

    # Runtimes.

    def runtime(self, cuts: Any, train: bool) -> Any:
        """The stages with some boundaries between them."""
        model = model_of(self.exp, cuts)
        if self.exp.config.parallel.runtime == 'spmd':
            return Spmd(model, self.columns, train=train)
        actions = actions_of(self.exp.config, len(self.exp.task.stages))
        c = self.exp.config.parallel
        emulated = (c.link_rate, c.link_delay) if train else (0.0, 0.0)
        return Mpmd(model, self.columns, actions, train=train, emulated=emulated)

    @property
    def training(self) -> Any:
        """Boundaries as configured."""
        return self.during(self.exp.model.boundaries)

    def shapes(self) -> dict[int, Any]:
        """Those of the parameters of all stages."""
        return {s: stage.params for s, stage in enumerate(self.training.shapes())}

    @functools.cache  # noqa: B019
    def during(self, cuts: tuple[Boundary, ...]) -> Any:
        """Boundaries of a phase."""
        return self.runtime(cuts, True)

    @functools.cache  # noqa: B019
    def scoring(self, compressed: bool) -> Any:
        """Boundaries of the test."""
        return self.runtime(cuts_to_score(self.exp, compressed), False)

    # Training.

    def create(self, seeded: Experiment) -> TrainState:
        """The state before the first step, of the stages of this process."""

        def start(stage: int, rows: ByReplica, key: Array) -> ByReplica:
            variables = {'params': next(iter(rows.values()))}
            return self.columns.put(stage, self.exp.task.start(stage, variables, key)['params'])

        key, rules = jax.random.key(seeded.config.seed), rules_of(self.exp, 0)
        state = create(rules, self.training, self.across, key, start)
        return state.replace(step=np.zeros((), np.int32))

    def epoch(self, number: int) -> Epoch:
        """See `Engine`."""
        runtime = self.during(self.exp.boundaries(number))
        configured = runtime is self.training
        rules, count = rules_of(self.exp, number), self.exp.config.batch_size

        def run(state: TrainState, order: np.ndarray, stopped: Stopped) -> Iterator:
            sent = interface_bytes()

            def steps(state: TrainState) -> Iterator:
                for batch in data.batches(self.exp.data.train, count, order):
                    step = lambda via, b=(state, batch): train_step(rules, via, self.across, b)
                    run_step = self.run_step if configured else profile.plainly
                    state, values = run_step(step, runtime)
                    self.steps += configured
                    yield state.replace(step=np.asarray(state.step, np.int32)), values

            ends = len(order) // count, self.exp.task.scores
            yield from together(self.group, steps(state), ends, stopped, self.share)
            self.sent += (interface_bytes() - sent) * configured

        return run

    def share(self, values: list[Any] | None) -> dict[str, float] | None:
        """This process's part of the means over the replicas."""
        means = lambda k: sum(float(aux[k]) for _, aux in values or ()) / self.exp.replicas
        return None if values is None else {k: means(k) for k in self.exp.task.scores}

    def profile(self, folder: Path) -> None:
        """See `Engine`; each call profiles one more run."""
        self.run_step = profile.Profiler(self.group, folder)

    # Across stages.

    def total(self, squares: dict[int, list[Any]]) -> Any:
        """The sum over all stages of each replica's squared norms, at every process."""
        here = np.zeros((self.columns.replicas, self.last + 1))
        for s, rows in jax.device_get(squares).items():
            for r in self.columns.here[s]:
                here[r, s] = sum(row[r] for row in rows)
        return jnp.asarray(self.group.total(here).sum(1).squeeze(), jnp.result_type(float))

    @functools.cached_property
    def tables(self) -> dict[int, Copies]:
        """The copies of the token table in the first and in the last stage, by replica."""
        if not (group := copied(self.exp.groups)):
            return {}
        assert group.between
        [table] = jax.tree.leaves(split(self.exp.groups, self.shapes())[group.homes[0], group])
        ends = lambda r: tuple(self.columns.devices[r, s] for s in group.homes)
        rows = {r for s in group.homes for r in self.columns.here.get(s, ())}
        tables = {r: Copies(group.between, table, ends(r)) for r in sorted(rows)}
        for copies in tables.values():
            if len(copies.here) == 1:
                open_links(copies.mesh)
        return tables

    def init_copies(self) -> Any:
        """The state of the exchange between the two copies of the table, by stage."""
        states = {r: copies.init() for r, copies in self.tables.items()}
        return self._by_end(states) if jax.tree.leaves(states) else ()

    def _by_end(self, states: dict[int, Any]) -> dict[int, ByReplica]:
        rows = {s: {r: t[e] for r, t in states.items() if e in t} for e, s in self.ends.items()}
        return {s: ByReplica(row) for s, row in rows.items() if row}

    def tie(self, grads: dict[int, Any], before: Any, key: Array) -> tuple[dict[int, Any], Any]:
        """Gradients with the sum of both tables' in both end stages; the exchange's next state."""
        after, group = {}, copied(self.exp.groups)
        assert group
        tables = {s: p for (s, g), p in split(self.exp.groups, grads).items() if g == group}
        for r, copies in self.tables.items():
            ends = {e: s for e, s in self.ends.items() if e in copies.here}
            parts = {e: jax.tree.leaves(tables[s][r])[0] for e, s in ends.items()}
            states = {e: before[s][r] for e, s in ends.items()} if before else ()
            totals, after[r] = copies.add(parts, states, key)
            for e, total in totals.items():
                table = tables[ends[e]]
                new = jax.tree.unflatten(jax.tree.structure(table[r]), [total])
                tables[ends[e]] = ByReplica({**table, r: new})
        summed = joined(grads, {(s, group): table for s, table in tables.items()})
        return summed, self._by_end(after) if before else ()

    # Scoring.

    def evaluate(self, state: TrainState, compressed: bool) -> dict[str, float]:
        """See `Engine`; statistics (BatchNorm), which differ by replica, count as their mean."""
        exp, runtime, model = self.exp, self.scoring(compressed), state.model
        statistics = {s: runtime.at(s, replicas.mean, t) for s, t in model.model_state.items()}
        trained = self.training.unpack(model.feedback)
        feedback = runtime.pack(feedback_to_score(exp, compressed, trained))
        here = 0 in self.columns.here.get(self.last, ())

        def predict(state: ModelState, batch: Any, key: Array) -> tuple[Any, Any]:
            output, after = runtime.predict(state, batch, key)
            return (self.sums(output, dict(batch)) if output is not None and here else None), after

        start = ModelState(model.params, statistics, feedback)
        return means(exp, self.group.total(totals(exp, start, state.key, predict)))

    @functools.cached_property
    def sums(self) -> Any:
        """Compiled: sums of the scores."""
        return jax.jit(functools.partial(sums, self.exp))

    def check(self, state: TrainState) -> None:
        """Raises DriftError if replicas differ."""
        if self.exp.replicas > 1:
            for s, trees in replicas.alike(self.exp.exchange, state).items():
                own = ByReplica({r: of_replica(trees, r) for r in self.columns.here[s]})
                rows = self.columns.at(s, replicas.gathered_checksums, own)
                checksums = np.asarray(next(iter(rows.values())))
                first = own[self.columns.here[s][0]]
                replicas.compare(checksums, first, int(state.step), f'stage {s}')

    def weights(self, state: TrainState) -> Any:
        """Variables of all stages of replica 0, where this process has them."""
        rows = list(zip(*(p.values() for p in state.model[:2]), strict=True))
        if len(rows) <= self.last or any(0 not in p for p, _ in rows):
            return None
        return tuple({'params': p[0], **st[0]} for p, st in rows)

    # Checkpoints.

    def rows_of(self, stages: dict[int, Any]) -> dict[int, dict[int, Any]]:
        """The state of each stage of each replica of this process."""
        rows: dict[int, dict[int, Any]] = {}
        for s, here in self.columns.here.items():
            for r in here:
                rows.setdefault(r, {})[s] = of_replica(stages[s], r)
        return rows

    def export(self, state: TrainState) -> Portable:
        """See `Engine`."""
        stages = portable.stages_of(state, self.training.unpack(state.model.feedback))
        return portable.export(self.exp, self.rows_of(stages), state)

    def load(self, state: TrainState, saved: Portable) -> TrainState:
        """See `Engine`."""
        like = portable.stages_of(state, self.training.unpack(state.model.feedback))
        rows = portable.load(self.exp, self.rows_of(like), saved)
        put = lambda s, r: jax.device_put(rows[r][s], self.columns.devices[r, s])
        stages = {
            s: by_replica(like[s], {r: put(s, r) for r in here})
            for s, here in self.columns.here.items()
        }
        number, key = np.asarray(saved.step, np.int32), portable.key_of(saved)
        return portable.state_of(stages, self.training.pack, number, key)

    # Bytes.

    def step_apart(self) -> None:
        """Makes a step with the configured boundaries and forgets it, where the run made none."""
        batch = next(data.batches(self.exp.data.train, self.exp.config.batch_size))
        at, rules = (self.create(self.exp), batch), rules_of(self.exp, self.exp.config.epochs)
        train_step(rules, self.training, self.across, at)
        self.steps = 1

    def bytes(self) -> dict[str, Any]:
        """Bytes per step of replica 0's links: payload, compiled collectives, network interface."""
        if not self.steps:
            self.step_apart()
        c, training, compiled = self.exp.config.parallel, self.training, np.zeros((self.last, 2))
        if c.runtime == 'spmd' or self.group.count > 1:
            for link, sizes in training.collectives().items():
                if 0 in self.columns.here.get(link, ()):
                    compiled[link] = np.multiply(c.num_microbatches, sizes)
        both = self.group.total(np.stack([training.payload() / self.steps, compiled]))
        sizes = enumerate(zip(*both.astype(int).tolist(), strict=True), 1)
        rows = [{'boundary': i, 'payload': a, 'collectives': b} for i, (a, b) in sizes]
        if self.tables:
            table = next(iter(self.tables.values())).traffic()
            ways = {'payload': [table['handed']] * 2, 'collectives': [table['compiled']] * 2}
            rows.append({'boundary': 'token table', **ways})
        interface = self.sent // self.steps
        report = {'processes': self.group.count, 'moved': rows, 'interface': interface}
        if self.exp.replicas > 1:
            trees = exchanged(self.exp.groups, self.shapes(), together=False)
            report['exchange'] = replicas.traffic(self.exp, trees, bytes_of)
        return report
