"""Training whose stages are apart: a program per stage, or one program over a mesh, and replicas.

The same experiment, randomness and data order as in one program. What is per stage stays on its
device between steps; `jaxmp.team.together` lets all processes know what happened.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.devices import place
from jaxmp.exchange.copies import ENDS, Copies
from jaxmp.exchange.traffic import bytes_of
from jaxmp.hlo import interface_bytes
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.links import open_links
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.stage import Feedback
from jaxmp.runtimes.types import ByReplica, ModelState, each
from jaxmp.setting import Setting, tied_exchange
from jaxmp.team import Team, together
from jaxmp.training import portable, replicas
from jaxmp.training.engine import (
    Engine,
    Epoch,
    Stopped,
    cuts_to_score,
    evaluation_key,
    keeps,
    means,
    model_of,
    rules_of,
    sums,
)
from jaxmp.training.portable import Portable
from jaxmp.training.step import Across, TrainState, begin, train_step

RUNTIMES = {'mpmd': Mpmd, 'spmd': Spmd}


def by_stage(s: Setting, team: Team) -> Engine:
    """The engine of ``config.runtime = 'mpmd'`` and ``'spmd'``.

    Args:
      s: the setting, the same in all processes.
      team: the processes.

    Raises:
      ValueError: if there are too few devices, or more processes than stages of all replicas.
    """
    own = _ByStage(s, team)
    return Engine(
        own.create, own.epoch, own.evaluate, own.export, own.load, own.bytes, own.check, own.weights
    )


class _ByStage:
    """The runtimes of a run, each made when it is first used."""

    def __init__(self, s: Setting, team: Team) -> None:
        self.s, self.team = s, team
        apart = s.config.runtime == 'spmd'
        self.columns = Columns(place(s.replicas, len(s.task.stages), apart))
        self.last = len(s.task.stages) - 1
        self.steps, self.sent = 0, 0
        _ = self.training, self.tables  # opens every link; see `prepare` in jaxmp.run
        self.columns.open()
        self.across = Across(self.total, self.tie, init=self.init_tied)

    # Runtimes.

    def runtime(self, cuts: Any, train: bool) -> Any:
        """The stages with some boundaries between them."""
        return RUNTIMES[self.s.config.runtime](model_of(self.s, cuts), self.columns, train=train)

    @functools.cached_property
    def training(self) -> Any:
        """Boundaries as configured."""
        return self.runtime(self.s.model.boundaries, True)

    @functools.cached_property
    def warming(self) -> Any:
        """Boundaries of the warm-up."""
        return self.runtime(self.s.warm_model.boundaries, True)

    @functools.cache  # noqa: B019
    def scoring(self, compressed: bool) -> Any:
        """Boundaries of the test."""
        return self.runtime(cuts_to_score(self.s, compressed), False)

    # Training.

    def create(self, seeded: Setting) -> TrainState:
        """The state before the first step, of the stages of this process."""
        key = jax.random.key(seeded.config.seed)
        first = jax.random.fold_in(key, 0)
        model = self.training.init(first)
        start = functools.partial(self.start, first)
        params = {s: start(s, rows) for s, rows in model.params.items()}
        given = model._replace(params=params), key
        state = begin(rules_of(self.s, 0), self.training, self.across, given)
        return state.replace(step=np.zeros((), np.int32))

    def start(self, key: Array, stage: int, rows: ByReplica) -> ByReplica:
        """Parameters as the task wants them before the first step."""
        made = self.s.task.start(stage, {'params': next(iter(rows.values()))}, key)
        return self.columns.put(stage, made['params'])

    def epoch(self, number: int) -> Epoch:
        """See `Engine`."""
        warming = number < self.s.config.warmup_epochs
        runtime = self.warming if warming else self.training
        rules, count = rules_of(self.s, number), self.s.config.batch_size

        def run(state: TrainState, order: np.ndarray, stopped: Stopped) -> Iterator:
            sent = interface_bytes()

            def steps(state: TrainState) -> Iterator:
                for batch in data.batches(self.s.data.train, count, order):
                    state, found = train_step(rules, runtime, self.across, (state, batch))
                    self.steps += not warming
                    yield state.replace(step=np.asarray(state.step, np.int32)), found

            last = len(order) // count
            yield from together(self.team, steps(state), last, stopped, self.share)
            self.sent += interface_bytes() - sent

        return run

    def share(self, found: list[Any] | None) -> dict[str, float] | None:
        """This process's part of the means over the replicas."""
        if found is None:
            return None
        names = ('loss', 'accuracy')
        return {k: sum(float(aux[k]) for _, aux in found) / self.s.replicas for k in names}

    # Across stages.

    def total(self, squares: dict[int, list[Any]]) -> Any:
        """For clipping by the norm over all stages: replica 0's, which all others equal."""
        mine = np.zeros(self.last + 1)
        for s, rows in squares.items():
            if 0 in self.columns.here[s]:
                mine[s] = sum(float(r[0]) for r in rows)
        return jnp.asarray(np.sum(self.team.total(mine)), jnp.result_type(float))

    @functools.cached_property
    def tables(self) -> dict[int, Copies]:
        """The copies of the token table in the first and in the last stage, by replica."""
        if not self.s.task.tied:
            return {}
        table = self.training.shapes()[0].params['wte']
        ends = lambda r: (self.columns.devices[r, 0], self.columns.devices[r, self.last])
        rows = {r for s in (0, self.last) for r in self.columns.here.get(s, ())}
        shared = tied_exchange(self.s.config, True)
        made = {r: Copies(shared, table, ends(r)) for r in sorted(rows)}
        for copies in made.values():
            if len(copies.here) == 1:
                open_links(copies.mesh)
        return made

    def init_tied(self) -> Any:
        """What the exchange of the tied table's gradients remembers."""
        made = {r: copies.init() for r, copies in self.tables.items()}
        return ByReplica(made) if jax.tree.leaves(made) else ()

    def tie(self, grads: dict[int, Any], held: Any, key: Array) -> tuple[dict[int, Any], Any]:
        """Gradients with the sum of both tables' in both end stages; what the exchange keeps."""
        done, kept = dict(grads), {}
        ends: dict[str, int] = dict(zip(ENDS, (0, self.last), strict=True))
        for r, copies in self.tables.items():
            own = {e: grads[s][r]['wte'] for e, s in ends.items() if e in copies.here}
            totals, kept[r] = copies.add(own, held[r] if held else (), key)
            for e, total in totals.items():
                s = ends[e]
                done[s] = ByReplica({**done[s], r: {**done[s][r], 'wte': total}})
        return done, ByReplica(kept) if held else ()

    # Scoring.

    def evaluate(self, state: TrainState, compressed: bool) -> dict[str, float]:
        """See `Engine`; what replicas keep apart (BatchNorm's statistics) counts as its mean."""
        s, runtime, total = self.s, self.scoring(compressed), np.zeros(2)
        model = state.model
        statistics = {i: runtime.at(i, replicas.mean, t) for i, t in model.model_state.items()}
        feedback = runtime.pack(self.scored(runtime, model.feedback, compressed))
        scored, size = (
            ModelState(model.params, statistics, feedback), s.config.batch_size // s.replicas
        )  # fmt: skip
        here = 0 in self.columns.here.get(self.last, ())
        for i, batch in enumerate(data.batches(s.data.test, size, pad=True)):
            output, after = runtime.predict(scored, batch, evaluation_key(state.key, i))
            if s.config.eval_feedback != 'frozen':
                scored = scored._replace(feedback=after)
            if output is not None and here:
                total += np.asarray(self.sums(output, dict(batch)))
        jax.block_until_ready(scored.feedback)
        return means(s, self.team.total(total))

    @functools.cached_property
    def sums(self) -> Any:
        """Compiled: sums of loss and right answers."""
        return jax.jit(functools.partial(sums, self.s))

    def scored(self, runtime: Any, memory: Any, compressed: bool) -> dict[int, ByReplica]:
        """The feedback that a test starts from: the training's, where its boundary has one."""
        kept = [False, *keeps(self.s, compressed), False]

        def one(s: int, trained: Feedback) -> Feedback:
            empty = runtime.init_feedback(s)
            left = trained.left_rx if kept[s] else empty.left_rx
            right = trained.right_tx if kept[s + 1] else empty.right_tx
            return empty._replace(left_rx=left, right_tx=right)

        found = self.training.unpack(memory)
        return {s: each(functools.partial(one, s), rows) for s, rows in found.items()}

    def check(self, state: TrainState) -> None:
        """Raises DriftError if replicas differ."""
        if self.s.replicas > 1 and int(state.step) % self.s.exchange.every == 0:
            for s, params in state.model.params.items():
                rows = self.columns.at(s, replicas.gathered_checksums, params)
                found = np.asarray(next(iter(rows.values())))
                replicas.compare(found, params[next(iter(params))], int(state.step), f'stage {s}')

    def weights(self, state: TrainState) -> Any:
        """Variables of all stages, where this process has them."""
        if len(state.model.params) <= self.last:
            return None
        rows = zip(*(p.values() for p in state.model[:2]), strict=True)
        return tuple({'params': p[0], **st[0]} for p, st in rows)

    # Checkpoints.

    def parts(self, state: TrainState) -> dict[tuple[int, int], dict[str, Any]]:
        """What each stage and replica of this process holds."""
        feedback, ends = (
            self.training.unpack(state.model.feedback),
            dict(zip((0, self.last), ENDS, strict=True)),
        )

        def tied(s: int, r: int) -> Any:
            return state.tied[r][ends[s]] if state.tied and s in ends else ()

        return {
            (s, r): {
                'params': state.model.params[s][r],
                'model_state': state.model.model_state[s][r],
                'opt_state': [o[r] for o in state.opt_state[s]],
                'exchange': [x[r] for x in state.exchange[s]],
                'feedback': feedback[s][r],
                'tied': tied(s, r),
            }
            for s, here in self.columns.here.items()
            for r in here
        }

    def export(self, state: TrainState) -> Portable:
        """See `Engine`."""
        cuts = self.s.model.boundaries
        parts = {
            portable.name(*at): portable.part(at[0], self.last, tree, cuts)
            for at, tree in self.parts(state).items()
        }
        return Portable(np.asarray(state.step), jax.random.key_data(state.key), parts)

    def load(self, state: TrainState, found: Portable) -> TrainState:
        """See `Engine`."""
        cuts, device = self.s.model.boundaries, self.columns.devices
        loaded = {
            (s, r): jax.device_put(portable.whole((s, r), tree, found, cuts), device[r, s])
            for (s, r), tree in self.parts(state).items()
        }

        def by(name: str) -> dict[int, ByReplica]:
            own = lambda s, rows: ByReplica({r: loaded[s, r][name] for r in rows})
            return {s: own(s, rows) for s, rows in self.columns.here.items()}

        def listed(name: str) -> dict[int, list[ByReplica]]:
            rows = by(name)
            return {
                s: [each(lambda t, i=i: t[i], row) for i in range(len(next(iter(row.values()))))]
                for s, row in rows.items()
            }

        feedback = self.training.pack(by('feedback'))
        model = ModelState(by('params'), by('model_state'), feedback)
        tied: dict[int, dict[str, Any]] = {}
        for (s, r), tree in loaded.items():
            for stage, end in zip((0, self.last), ENDS, strict=True):
                if state.tied and s == stage:
                    tied.setdefault(r, {})[end] = tree['tied']
        key = jax.random.wrap_key_data(jnp.asarray(found.key))
        return TrainState(
            np.asarray(found.step, np.int32), model, listed('opt_state'), listed('exchange'), key,
            ByReplica(tied) if tied else (),
        )  # fmt: skip

    # Bytes.

    def bytes(self) -> dict[str, Any]:
        """Bytes a step on every link, as handed over, as compiled and as the machine counted."""
        micros, training = self.s.config.micro_batches, self.training
        compiled = np.zeros((self.last, 2))
        for link, sizes in training.collectives().items():
            compiled[link] = sizes if link in self.columns.here else 0
        payload = training.payload() / max(self.steps, 1)
        share = 1 if self.s.config.runtime == 'spmd' else self.team.count > 1
        payload, compiled = self.team.total(payload), self.team.total(compiled * bool(share))
        rows = [
            {
                'boundary': i,
                'payload': [int(n) for n in a],
                'collectives': [int(micros * n) for n in b],
            }
            for i, (a, b) in enumerate(zip(payload, compiled, strict=True), 1)
        ]
        if self.tables:
            table = next(iter(self.tables.values())).traffic()
            ways = {'payload': [table['handed']] * 2, 'collectives': [table['compiled']] * 2}
            rows.append({'boundary': 'token table', **ways})
        found = {'processes': self.team.count, 'moved': rows, 'interface': self.sent}
        found['interface'] = self.sent // max(self.steps, 1)
        return {**found, **self.exchanged()}

    def exchanged(self) -> dict[str, Any]:
        """Bytes a step of one replica's exchange, over all its stages."""
        if self.s.replicas == 1:
            return {}
        shapes = [st.params for st in self.training.shapes()]
        return {'exchange': replicas.traffic(self.s, shapes, bytes_of)}
