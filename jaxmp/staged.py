"""Training with a program each stage: over the devices of a process, or over processes.

The same setting, randomness and data order as in one program. The first stage's process prepares
the images, the last one's knows the loss; `jaxmp.team.together` lets all know what happened.
Clipping by the global norm needs the norm of all stages and makes them agree at every step. A table
that the first and the last stage hold is updated by the same program in both, of a gradient that
`jaxmp.exchange.copies` makes the same in both.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.boundary import Boundary, boundary
from jaxmp.codecs import raw
from jaxmp.engine import Engine
from jaxmp.evaluate import evaluation_key, evaluation_model, forgets, means, sums
from jaxmp.exchange.copies import ENDS, Copies
from jaxmp.feedback import direct
from jaxmp.mpmd import Mpmd, mpmd, place
from jaxmp.schedule import one_f_one_b
from jaxmp.setting import Setting, micro_like, shapes, tied_exchange
from jaxmp.stage import End, StageState
from jaxmp.task import once
from jaxmp.team import Team, together
from jaxmp.train import (
    Epoch,
    Stopped,
    TrainState,
    clip_scale,
    mean_score,
    square_norm,
    step_keys,
    update,
)
from jaxmp.transport import interface_bytes, open_links
from jaxmp.wire import Ctx


def staged(s: Setting, team: Team) -> Engine:
    """The engine of ``config.runtime = 'mpmd'``.

    Args:
      s: the setting, the same in all processes.
      team: the processes.

    Raises:
      ValueError: if there are more processes than stages.
    """
    own = _Staged(s, team)
    return Engine(own.create, own.epoch, own.evaluate, own.bytes)


class _Staged:
    """The compiled stages of this process, made when they are first used."""

    def __init__(self, s: Setting, team: Team) -> None:
        self.s, self.team, self.devices = s, team, place(len(s.model.stages))
        self.tasks = one_f_one_b(len(self.devices), s.config.micro_batches)
        self.update = jax.jit(functools.partial(update, s), donate_argnums=(0, 1))
        self.prepare = jax.jit(s.task.prepare)
        self.square_norm = jax.jit(square_norm)
        self.loss = functools.partial(mean_score, s)
        self.payload = np.zeros((len(self.devices) - 1, 2))  # bytes of all steps, each way
        self.steps, self.sent = 0, 0
        _ = self.training, self.ends  # opens every link; see `prepare` in jaxmp.run

    # Programs.

    def machine(self, cuts: tuple[Boundary, ...], train: bool) -> Mpmd:
        """The stages with other boundaries between them."""
        x, stages = micro_like(self.s), self.s.model.stages
        return mpmd(stages, cuts, self.loss, self.tasks, x, self.devices, train=train)

    @functools.cached_property
    def training(self) -> Mpmd:
        """Boundaries as configured."""
        return self.machine(self.s.model.boundaries, True)

    @functools.cached_property
    def warming(self) -> Mpmd:
        """Boundaries of the warm-up."""
        return self.machine(self.s.warm_model.boundaries, True)

    @functools.cached_property
    def compressed(self) -> Mpmd:
        """Boundaries of the test with compression on."""
        return self.machine(evaluation_model(self.s).boundaries, False)

    @functools.cached_property
    def plain(self) -> Mpmd:
        """Boundaries of the test with compression off."""
        wire = boundary(direct(raw), direct(raw))
        return self.machine((wire,) * (len(self.devices) - 1), False)

    def create(self, seeded: Setting) -> TrainState:
        """The state before the first step, of the stages of this process."""
        key, init = jax.random.key(seeded.config.seed), jax.jit(self.s.optimiser.init)
        first = jax.random.fold_in(key, 0)
        states = self.training.init(first)
        for s, st in states.items():
            made = self.s.task.start(s, st.variables, first)
            states[s] = st._replace(variables=jax.device_put(made, self.devices[s]))
        opt = {}
        for s, st in states.items():
            made = [init(p) for p in self.halves(s, st.variables['params'])]
            opt[s] = jax.device_put(tuple(made), self.devices[s])
        held = self.ends.init() if self.ends else ()
        return _pack(np.zeros((), np.int32), states, opt, key).replace(exchange=held)

    def halves(self, stage: int, params: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """What is updated apart: a tied table, by the same program at both ends, and the rest."""
        if not (self.s.task.tied and stage in (0, len(self.devices) - 1)):
            return (dict(params),)
        rest = {k: v for k, v in params.items() if k != 'wte'}
        return {'wte': params['wte']}, rest

    # Training.

    def epoch(self, number: int) -> Epoch:
        """See `Engine`."""
        machine = self.warming if number < self.s.config.warmup_epochs else self.training

        def run(state: TrainState, order: np.ndarray, stopped: Stopped) -> Iterator:
            size, sent = self.s.config.batch_size, interface_bytes()

            def steps(state: TrainState) -> Iterator:
                for batch in data.batches(self.s.data.train, size, order):
                    state, values = self.step(machine, state, batch)
                    yield state, values

            yield from together(self.team, steps(state), len(order) // size, stopped)
            self.sent += interface_bytes() - sent

        return run

    def step(
        self, machine: Mpmd, state: TrainState, batch: Mapping[str, np.ndarray]
    ) -> tuple[TrainState, Any]:
        """One optimiser step; loss and accuracy are None where the last stage is not."""
        states, opt = _unpack(state)
        x, (key, ctx) = batch['x'], step_keys(state.key, int(state.step), batch['id'])
        if 0 in states:
            x = self.prepare(*jax.device_put((x, key), self.devices[0]))
        result = machine.step(states, x, batch['y'], ctx)
        if machine is self.training:
            self.steps += 1
            for link, sizes in result.moved.items():
                self.payload[link] += sizes if link in states else 0
        grads, held = self.tie(result.grads, state)
        scale = self.scale(grads)
        for s, after in result.states.items():
            given = self.halves(s, after.variables['params']), opt[s], self.halves(s, grads[s])
            done = [self.update(*half, scale) for half in zip(*given, strict=True)]
            params = {k: v for half, _ in done for k, v in half.items()}
            opt[s] = tuple(o for _, o in done)
            states[s] = after._replace(variables={**after.variables, 'params': params})
        step = np.asarray(state.step + 1, np.int32)
        return _pack(step, states, opt, state.key).replace(exchange=held), result.aux

    @functools.cached_property
    def ends(self) -> Copies | None:
        """The copies of the token table in the first and in the last stage."""
        if not self.s.task.tied:
            return None
        table = shapes(self.s)[0][0]['params']['wte']
        shared = tied_exchange(self.s.config, True)
        copies = Copies(shared, table, (self.devices[0], self.devices[-1]))
        if len(copies.here) == 1:
            open_links(copies.mesh)
        return copies

    def tie(self, grads: Mapping[int, Any], state: TrainState) -> tuple[dict[int, Any], Any]:
        """Gradients with the sum of both tables' in both end stages; what the exchange keeps."""
        done, held = dict(grads), state.exchange
        of = {end: s for end, s in zip(ENDS, (0, len(self.devices) - 1), strict=True) if s in done}
        if self.ends and of:
            # A step's streams 0 and 1 are those of `step_keys`, 2 is the replicas'.
            key = jax.random.fold_in(jax.random.fold_in(state.key, state.step + 1), 3)
            own = {end: done[s]['wte'] for end, s in of.items()}
            totals, held = self.ends.add(own, held, key)
            for end, total in totals.items():
                done[of[end]] = {**done[of[end]], 'wte': total}
        return done, held

    def scale(self, grads: Mapping[int, Any]) -> Any:
        """For clipping by the norm over all stages, wherever they are."""
        if not self.s.config.clip_norm:
            return np.float32(1)
        mine = np.zeros(len(self.devices))
        for s, g in grads.items():
            mine[s] = self.square_norm(once(self.s.task, s, g))
        return np.asarray(clip_scale(self.s, np.sum(self.team.total(mine))))

    # Scoring.

    def evaluate(self, state: TrainState, compressed: bool) -> dict[str, float]:
        """See `Engine`."""
        s, (states, _), total = self.s, _unpack(state), np.zeros(2)
        machine = self.compressed if compressed else self.plain
        states = {i: self.scored(i, machine, st) for i, st in states.items()}
        for i, batch in enumerate(data.batches(s.data.test, s.config.batch_size, pad=True)):
            x, ids = batch['x'], batch['id']
            ctx = Ctx(evaluation_key(state.key, i), jnp.asarray(ids))
            if 0 in states:
                x = self.prepare(jax.device_put(x, self.devices[0]), None)
            logits, after = machine.predict(states, x, ctx)
            states = states if s.config.eval_feedback == 'frozen' else after
            if logits is not None:
                total += np.asarray(sums(s, jnp.concatenate(logits), batch))
        jax.block_until_ready(states)
        return means(s, self.team.total(total))

    def scored(self, i: int, machine: Mpmd, state: StageState) -> StageState:
        """The state that a test starts from: the training's, where its boundary has one."""
        trained = self.training.stages[i]
        empty = ((),) * self.s.config.micro_batches

        def end(cut: Boundary | None, own: End) -> End:
            kept = machine is self.compressed and cut and not forgets(self.s, cut)
            return own if kept or not cut else End(empty, empty)

        left, right = end(trained.left, state.left), end(trained.right, state.right)
        return StageState(state.variables, left, right)

    # Bytes.

    def bytes(self) -> dict[str, Any]:
        """Bytes a step on every link, as handed over, as compiled and as the machine counted."""
        steps, micros = max(self.steps, 1), self.s.config.micro_batches
        compiled = np.zeros_like(self.payload)
        for link, wire in self.training.wires.items():
            compiled[link] = wire.permuted() if link in self.training.stages else 0
        payload, compiled = self.team.total(self.payload) / steps, self.team.total(compiled)
        rows = [
            {
                'boundary': i,
                'payload': [int(n) for n in a],
                'collectives': [int(micros * n) for n in b],
            }
            for i, (a, b) in enumerate(zip(payload, compiled, strict=True), 1)
        ]
        if self.ends and self.ends.here:  # also process 0, which shows it
            table = self.ends.traffic()
            ways = {'payload': [table['handed']] * 2, 'collectives': [table['compiled']] * 2}
            rows.append({'boundary': 'token table', **ways})
        return {'processes': self.team.count, 'moved': rows, 'interface': self.sent // steps}


def _pack(
    step: np.ndarray, states: Mapping[int, StageState], opt: Mapping[int, Any], key: Array
) -> TrainState:
    """The states of this process's stages as a train state, by the stage's number."""
    variables = {str(s): st.variables for s, st in states.items()}
    links = {str(s): (tuple(st.left), tuple(st.right)) for s, st in states.items()}
    return TrainState(step, variables, {str(s): o for s, o in opt.items()}, links, key)


def _unpack(state: TrainState) -> tuple[dict[int, StageState], dict[int, Any]]:
    ends = {s: (End(*left), End(*right)) for s, (left, right) in state.links.items()}
    states = {int(s): StageState(v, *ends[s]) for s, v in state.variables.items()}
    return states, {int(s): o for s, o in state.opt_state.items()}
