"""`Worker`: what one stage computes, and stores between its actions.

Each end of a link has its own feedback state, with a slot per micro-batch, so that no schedule
changes the result. Statistics (BatchNorm) change in the forward, in micro-batch order; where the
backward runs the module again (``remat``), it starts from the statistics of its forward, and its
own are dropped.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from jaxmp.exchange.collectives import Grads, Params
from jaxmp.runtimes.links import Arrived
from jaxmp.runtimes.norms import Batch
from jaxmp.runtimes.schedule import Task
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import Accumulator, Linear, MicroBatch, Residuals, StageState, in_dtypes
from jaxmp.runtimes.trained import part
from jaxmp.wire import Payload


class CompiledStage:
    """The compiled functions of a stage.

    The training functions donate feedback states and statistics, so that a table of AQ-SGD is
    updated in place. A prediction donates nothing.
    """

    def __init__(self, program: StageProgram, options: Mapping[str, Any] | None) -> None:
        """Compiles nothing yet; ``options`` are those of `jax.jit`'s compiler."""
        self.program = program
        jit = functools.partial(jax.jit, compiler_options=dict(options or {}) or None)
        self.init = jit(program.init, static_argnums=1)
        self.trained = functools.partial(part, program.trained)
        self.forward = jit(self._forward, donate_argnums=1)
        self.predict = jit(self._predict)
        backward = lambda run: functools.partial(self._backward, run)
        self.backward = jit(backward(program.backward), donate_argnums=(1, 2))
        self.backward_input = jit(backward(program.backward_input), donate_argnums=1)
        self.backward_weights = jit(program.backward_weights, donate_argnums=1)
        self.init_accumulator = jit(program.init_accumulator, keep_unused=True)
        self.mean = jit(
            lambda total, n: jax.tree.map(lambda a: (a / n).astype(a.dtype), total),
            donate_argnums=0,
        )

    def _forward(self, params: Params, moving: Any, batch: MicroBatch, message: Payload) -> tuple:
        state, out, residuals = self.program.forward(
            StageState(params, *moving), _folded(batch), _rows(message)
        )
        return state[1:], _framed(out) if self.program.right else None, residuals

    def _predict(self, params: Params, moving: Any, batch: MicroBatch, message: Payload) -> tuple:
        state, out = self.program.predict(
            StageState(params, *moving), _folded(batch), _rows(message)
        )
        return state[1:], _framed(out) if self.program.right else out

    def _backward(self, run: Any, params: Params, feedback: Any, *given: Any) -> tuple:
        """A backward of the program: of ``given``, sums if it adds to them, residuals, arrived."""
        *before, (batch, message) = given
        arrived = _folded(batch), _rows(message)
        state, made, out = run(StageState(params, {}, feedback), *before, arrived)
        return state.feedback, made, _framed(out)


def _folded(batch: MicroBatch) -> MicroBatch:
    """``batch`` with the key of its number, as `jaxmp.runtimes.microbatch.context` folds it."""
    return batch._replace(ctx=batch.ctx.fold(batch.ctx.microbatch))


def _rows(message: Payload) -> Payload:
    return jax.tree.map(lambda a: a[0], message)


def _framed(message: Payload) -> Payload:
    """The arrays of a message under a leading axis of 1, the axis of the two ends of a link."""
    return jax.tree.map(lambda a: a[None], message)


class Worker:
    """A stage that trains: its state, and what micro-batches keep between two actions.

    Attributes:
      split: micro-batches whose B a W action follows.
      waiting: those whose forward has not run.
      saved: those whose backward has not run, with the parameters of their forward, which are also
        those of their backward.
      total: the sums of a batch, of which ``ended`` micro-batches have run.
      means: of the batches that have ended, the oldest first.
    """

    def __init__(
        self, stage: CompiledStage, state: StageState, split: Collection[int] = ()
    ) -> None:
        """Has run nothing."""
        self.stage, self.split = stage, split
        self.params, self.model_state, self.feedback = state
        self.waiting: dict[int, MicroBatch] = {}
        self.saved: dict[int, tuple[Params, MicroBatch, Residuals]] = {}
        self._halves: dict[int, tuple[Params, MicroBatch, Linear]] = {}
        self.total: Accumulator | None = None
        self.ended, self.means = 0, deque[Accumulator]()

    def act(self, kind: str, m: int, message: Payload) -> Payload:
        """Runs an action on the message that it reads; the message that it sends, or None."""
        if kind == 'F':
            return self.forward(m, message)
        if kind == 'W':
            return self.backward_weights(m)
        return self.backward_input(m, message) if m in self.split else self.backward(m, message)

    def forward(self, m: int, message: Payload) -> Payload:
        """The message to the next stage; what the backward needs is saved."""
        moving, batch = (self.model_state, self.feedback), self.waiting.pop(m)
        moving, out, residuals = self.stage.forward(self.params, moving, batch, message)
        self.model_state, self.feedback = moving
        self.saved[m] = self.params, batch._replace(x=None), residuals
        return out

    def backward(self, m: int, message: Payload) -> Payload:
        """The message to the stage before; the sums of the batch grow."""
        params, batch, residuals = self.saved.pop(m)
        self.feedback, self.total, out = self.stage.backward(
            params, self.feedback, self._sums(batch), residuals, (batch, message)
        )
        self.ended += 1
        return out

    def backward_input(self, m: int, message: Payload) -> Payload:
        """The message to the stage before; the rest of the backward is saved."""
        params, batch, residuals = self.saved.pop(m)
        self.feedback, later, out = self.stage.backward_input(
            params, self.feedback, residuals, (batch, message)
        )
        self._halves[m] = params, batch, self.stage.program.joined(params, residuals, later)
        return out

    def backward_weights(self, m: int) -> None:
        """Runs the rest of a backward; the sums of the batch grow."""
        params, batch, later = self._halves.pop(m)
        self.total = self.stage.backward_weights(params, self._sums(batch), later)
        self.ended += 1

    def wait(self, message: Payload) -> None:
        """Waits for ``message`` and all that the stage holds."""
        state = self.model_state, self.feedback, self.total
        jax.block_until_ready((message, state, self.waiting, self.saved, self._halves))

    def _sums(self, batch: MicroBatch) -> Accumulator:
        return self.total or self.stage.init_accumulator(self.params, batch.y)

    def end_batch(self) -> None:
        """Makes means of the sums; gradients have the dtypes of their parameters."""
        mean = self.stage.mean(self.total, np.float32(self.ended))
        grads = in_dtypes(mean.grads, self.stage.trained(self.params))
        self.means.append(mean._replace(grads=grads))
        self.total, self.ended = None, 0

    def gradients(self) -> Grads:
        """Those of the oldest batch that has ended."""
        return self.means.popleft().grads

    def state(self) -> StageState:
        """The stage's next state."""
        return StageState(self.params, self.model_state, self.feedback)


class Reader(Worker):
    """A stage that only runs forwards and saves nothing; the last one collects its outputs."""

    def __init__(self, stage: CompiledStage, state: StageState) -> None:
        super().__init__(stage, state)
        self.outputs: list[Array] = []

    def forward(self, m: int, message: Payload) -> Payload:
        """The message to the next stage."""
        moving, batch = (self.model_state, self.feedback), self.waiting.pop(m)
        moving, out = self.stage.predict(self.params, moving, batch, message)
        self.model_state, self.feedback = moving
        if self.stage.program.right:
            return out
        self.outputs.append(out)
        return None

    def gradients(self) -> Grads:
        """None."""
        return {}


class Flight(NamedTuple):
    """What is under way in a pipeline, of the stages of a process.

    Attributes:
      workers: of the stages.
      batches: those whose gradients some stage has not given, the oldest first.
      leaving: messages that no action has made.
      arriving: messages that no action has read.
    """

    workers: Mapping[int, Worker]
    batches: deque[Batch]
    leaving: dict[Task, Future[Payload]]
    arriving: dict[Task, Arrived]

    def resume(self, states: Mapping[int, StageState]) -> None:
        """Goes on from states of the stages."""
        for s, worker in self.workers.items():
            worker.params, worker.model_state, worker.feedback = states[s]

    def states(self) -> dict[int, StageState]:
        """The next state of each stage."""
        return {s: w.state() for s, w in self.workers.items()}

    def next_tasks(self, late: Sequence[int]) -> list[Task]:
        """What each stage may run once its message is there, the last one first, backwards first.

        Args:
          late: of each stage the most micro-batches that end in a later step.
        """
        tasks: list[Task] = []
        for s in sorted(self.workers, reverse=True):
            waiting, saved = self.workers[s].waiting, self.workers[s].saved
            if waiting or len(saved) > late[s]:
                tasks += [('B', s, m) for m in itertools.islice(saved, 1)]
                tasks += [('F', s, m) for m in itertools.islice(waiting, 1)]
        return tasks
