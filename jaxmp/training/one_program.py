"""Training of one replica in one program: its state, its step, its epochs and its checkpoint.

An epoch is a Python loop over a compiled step on CPU, where convolutions inside a scan are slow
(see `jaxmp.runtimes.microbatch.loop`), and one compiled scan on an accelerator. Data order is a
pure function of (seed, epoch) and every key one of (seed, step), so a resumed run
repeats to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.boundary import Boundary
from jaxmp.exchange import Collectives
from jaxmp.runtimes.local import Local, join
from jaxmp.runtimes.types import ModelState
from jaxmp.training import portable, step
from jaxmp.training.engine import Engine, Epoch, Stopped, Values, model_of, rules_of
from jaxmp.training.evaluate import cuts_to_score, feedback_to_score, means, sums, totals
from jaxmp.training.experiment import Experiment
from jaxmp.training.groups import Groups, equal, summed
from jaxmp.training.portable import Portable
from jaxmp.training.step import Across, Rules, TrainState, train_step

Step = Callable[[TrainState, dict[str, Array]], tuple[TrainState, Values]]


def one_program(exp: Experiment) -> Engine:
    """The engine of ``config.parallel.runtime = 'local'`` with one replica."""

    @functools.cache  # for run after run
    def compiled(cuts: tuple[Boundary, ...]) -> Epoch:
        return epoch_form()(exp, functools.partial(step_of(exp, cuts, rules_of(exp, 0)), None))

    return Engine(
        create=create,
        epoch=lambda n: compiled(exp.boundaries(n)),
        evaluate=evaluator(exp),
        export=lambda state: export(exp, state),
        load=lambda state, saved: load(exp, state, saved),
        moved=dict,
        weights=variables_of,
    )


# State and step.


def local_of(exp: Experiment) -> Local:
    """The runtime of the training."""
    return Local(model_of(exp, exp.model.boundaries))


def across(groups: Groups) -> Across:
    """The operations over all stages, which are in one program."""

    def total(squares: dict[int, list[Any]]) -> Array:
        return sum((x for row in squares.values() for x in row), jnp.zeros(()))

    def tie(gradients: dict[int, Any], state: Any, key: Array) -> tuple[dict[int, Any], Any]:
        return summed(groups, gradients), state

    return Across(total, tie, functools.partial(equal, groups), together=True)


def create(exp: Experiment, n: int = 1) -> TrainState:
    """The state before the first step, of one of n replicas."""
    via = Collectives(n, 0, *(lambda tree: tree,) * 3) if n > 1 else None
    start = lambda s, p, key: exp.task.start(s, {'params': p}, key)['params']
    runtime, key = _Placed(local_of(exp), via), jax.random.key(exp.config.seed)
    return step.create(rules_of(exp, 0), runtime, across(exp.groups), key, start)


class _Placed(Local):
    """The local runtime with each function of a stage compiled by itself."""

    def __init__(self, local: Local, via: Collectives | None) -> None:
        """Copies ``local``; ``via`` reaches no other replica, and tells their number."""
        super().__init__(local.model, local.train, via)

    def at(self, stage: int, f: Callable[..., Any], *trees: Any) -> Any:
        """See `Runtime`."""
        return jax.jit(lambda *t: super(_Placed, self).at(stage, f, *t))(*trees)


def step_of(
    exp: Experiment, cuts: tuple[Boundary, ...], rules: Rules
) -> Callable[..., tuple[TrainState, Values]]:
    """The step of a replica: ``(collectives or None, state, batch) -> (state, scores)``."""
    model = model_of(exp, cuts)
    over_stages = across(rules.groups)

    def step(via: Collectives | None, state: TrainState, batch: dict[str, Array]) -> Any:
        state, (_, values) = train_step(rules, Local(model, via=via), over_stages, (state, batch))
        return state, values

    return step


def variables_of(state: TrainState) -> tuple[Any, ...]:
    """The Flax variables of all stages."""
    return join(*state.model[:2])


def evaluator(exp: Experiment) -> Callable[[TrainState, bool], dict[str, float]]:
    """A function of (state, compressed): mean scores on the whole test split."""
    runtimes = {c: Local(model_of(exp, cuts_to_score(exp, c)), train=False) for c in (False, True)}

    @functools.partial(jax.jit, static_argnums=0)
    def predict(compressed: bool, state: ModelState, batch: dict[str, Array], key: Array) -> Any:
        output, feedback = runtimes[compressed].predict(state, batch, key)
        return sums(exp, output, batch), feedback

    def run(state: TrainState, compressed: bool) -> dict[str, float]:
        local = runtimes[compressed]
        trained = local.unpack(state.model.feedback)
        feedback = local.pack(feedback_to_score(exp, compressed, trained))
        start = state.model._replace(feedback=feedback)
        return means(exp, totals(exp, start, state.key, functools.partial(predict, compressed)))

    return run


# Epochs.


def never() -> bool:
    """False: no signal asks the run to stop."""
    return False


def epoch_by_step(exp: Experiment, step: Step) -> Epoch:
    """An epoch as a loop over a compiled step: the form for CPU."""
    step = jax.jit(step, donate_argnums=0)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        for batch in data.batches(exp.data.train, exp.config.batch_size, order):
            state, values = step(state, batch)
            yield state, values, stopped()

    return run


def epoch_by_scan(exp: Experiment, step: Step) -> Epoch:
    """An epoch inside one compiled scan, the data on the device: the form for accelerators."""
    arrays = tuple(jnp.asarray(a) for a in exp.data.train)

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(state: TrainState, x: Array, y: Array, rows: Array) -> Any:
        def one(state: TrainState, at: Array) -> tuple[TrainState, dict[str, Array]]:
            return step(state, {'x': x[at], 'y': y[at], 'id': at})

        return jax.lax.scan(one, state, rows)

    def run(state: TrainState, order: np.ndarray, stopped: Stopped = never) -> Iterator:
        steps = len(order) // exp.config.batch_size
        rows = order[: steps * exp.config.batch_size].reshape(steps, -1)
        state, values = scan(state, *arrays, rows)
        yield state, values, stopped()

    return run


def epoch_form() -> Callable[[Experiment, Step], Epoch]:
    """The form of an epoch on this backend."""
    return epoch_by_step if jax.default_backend() == 'cpu' else epoch_by_scan


# Checkpoints.


def export(exp: Experiment, state: TrainState, replica: int = 0) -> Portable:
    """See `Engine`."""
    return portable.export(exp, {replica: stages_of(exp, state)}, state)


def load(exp: Experiment, state: TrainState, saved: Portable, replica: int = 0) -> TrainState:
    """See `Engine`."""
    rows = portable.load(exp, {replica: stages_of(exp, state)}, saved)
    return jax.tree.map(jnp.asarray, state_of(exp, rows[replica], saved))


def stages_of(exp: Experiment, state: TrainState) -> dict[int, dict[str, Any]]:
    """The state of each stage of a replica."""
    return portable.stages_of(state, local_of(exp).unpack(state.model.feedback))


def state_of(exp: Experiment, stages: dict[int, Any], saved: Portable) -> TrainState:
    """The state of a replica; inverse of `stages_of`."""
    number, key = np.asarray(saved.step, np.int32), portable.key_of(saved)
    return portable.state_of(stages, local_of(exp).pack, number, key)
