"""The training steps of a probe: what crossed in the last of them, and how long they took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp import data
from jaxmp.boundary.pipeline import pipeline
from jaxmp.codecs import raw
from jaxmp.exchange.traffic import bytes_of
from jaxmp.feedback import direct
from jaxmp.net.group import ProcessGroup
from jaxmp.plan.clock import Clock, timed
from jaxmp.plan.predict import Edge
from jaxmp.runtimes.types import Batch
from jaxmp.training.experiment import Experiment
from jaxmp.training.groups import copied, split
from jaxmp.training.portable import name
from jaxmp.training.probe import keeping
from jaxmp.training.step import train_step
from jaxmp.training.trainer import Trainer

STEPS = 30  # at most
SNAPSHOTS = 4  # steps in a row, the last, whose tensors are kept
SHARE = 0.25  # of the time, at whose end the steps stop

Tensors = Mapping[Edge, Sequence[Array]]


class Trained(NamedTuple):
    """What the training steps of a probe gave.

    Attributes:
      tensors: what micro-batch 0 sent over each edge in the last steps, in their order.
      variables: of all stages after them.
      gradients: median seconds of a step until its gradients are there.
      rest: median seconds per stage of what follows: a tied table's exchange, clipping, the
        optimizer.
      batches: of those steps.
      normed: whether what follows waits for the norm of all gradients.
      table: bytes of a tied table's gradient that the end stages send each other; 0 without one.
    """

    tensors: Tensors
    variables: Sequence[Any]
    gradients: float
    rest: float
    batches: Sequence[Batch] = ()
    normed: bool = False
    table: float = 0.0


def trained(exp: Experiment, clock: Clock) -> Trained:
    """Training steps without compression, until a share of the time is over."""
    keep, n = keeping(direct(raw)), len(exp.task.stages) - 1
    kept = exp._replace(model=pipeline(exp.task.stages, [keep] * n, [keep] * n))
    trainer, size = Trainer(kept, ProcessGroup()), exp.config.batch_size
    via: Any = Gradients(trainer.training)
    rules, state = trainer.rules(0), trainer.create()
    found, times, batches, i = [], [], [], 0
    while len(found) < SNAPSHOTS or not (i >= STEPS or clock.spent(SHARE)):
        rows = data.order(exp.config.seed, i // exp.epoch_steps, len(exp.data.train.y))
        first = i % exp.epoch_steps * size
        [batch] = data.batches(exp.data.train, size, rows[first : first + size])
        state, _ = train_step(rules, via, trainer.across, (state, batch))
        jax.block_until_ready(state)
        times.append((via.seconds, time.monotonic() - via.end))
        parts = trainer.export(state).parts
        found.append([parts[name(s, 0)]['feedback'] for s in range(n + 1)])
        batches.append(batch)
        found, batches, i = found[-SNAPSHOTS:], batches[-SNAPSHOTS:], i + 1
    clock.say(f'{i} training steps done')
    first = lambda kept: jnp.asarray(kept.tensor[0])
    ways: dict[Edge, list[Array]] = {}
    for s in range(n):
        ways[s, s + 1] = [first(stages[s].right_tx) for stages in found]
        ways[s + 1, s] = [first(stages[s + 1].left_tx) for stages in found]
    variables = jax.device_put(trainer.weights(state), jax.devices()[0])
    # The first step compiles.
    gradients, rest = (statistics.median(t) for t in zip(*times[1:], strict=True))
    table, params = 0.0, state.model.params
    if (group := copied(rules.groups)) and group.between:
        likes = jax.tree.leaves(split(rules.groups, params)[group.homes[0], group])
        table = float(bytes_of(group.between, likes, 2)['sent'])
    told = rules.clip_norm and not table  # the stages tell each other, before it is needed
    waits = rules.normed and not told
    return Trained(ways, variables, gradients, rest / (n + 1), batches, waits, table)


class Gradients:
    """A runtime that waits for its gradients, and keeps their seconds and the time of their end."""

    def __init__(self, runtime: Any) -> None:
        """Wraps a runtime."""
        self._runtime, self.seconds, self.end = runtime, 0.0, 0.0

    def __getattr__(self, name: str) -> Any:
        """What is not said here is the runtime's."""
        return getattr(self._runtime, name)

    def value_and_grad(self, *given: Any) -> Any:
        """See `Runtime`."""
        self.seconds, found = timed(self._runtime.value_and_grad, *given)
        self.end = time.monotonic()
        return found
