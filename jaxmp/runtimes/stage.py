"""`StageProgram`: a pipeline stage as two pure functions over messages, forward and backward.

The forward reads a message, runs the Flax module and writes a message; the backward reads a
gradient, recomputes the module from its saved input, adds to the sums and writes the gradient of
the input. When these run, and how messages travel, is the runtime's business (`jaxmp.runtimes.mpmd`
compiles a program per stage, `jaxmp.runtimes.spmd` one program for all).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.wire import Ctx, Like, Payload, like

Loss = Callable[[Array, Array], tuple[Array, Any]]


class Feedback(NamedTuple):
    """Feedback states at a stage's ends of its boundaries; ``()`` where there is no boundary.

    Attributes:
      left_rx: of the receiver of activations.
      left_tx: of the sender of gradients.
      right_tx: of the sender of activations.
      right_rx: of the receiver of gradients.
    """

    left_rx: Any = ()
    left_tx: Any = ()
    right_tx: Any = ()
    right_rx: Any = ()


class StageState(NamedTuple):
    """What a stage keeps between steps.

    Attributes:
      params: parameters; only the optimizer changes them.
      model_state: other Flax collections (BatchNorm's statistics), changed by the forward.
      feedback: states of its ends of the boundaries.
    """

    params: Any
    model_state: Any
    feedback: Feedback


class MicroBatch(NamedTuple):
    """A micro-batch as a stage sees it.

    Attributes:
      x: input, in the first stage.
      y: targets, in the last.
      ctx: its key, ids and number.
    """

    x: Any
    y: Any
    ctx: Ctx


class Residuals(NamedTuple):
    """What the forward of a micro-batch leaves for its backward."""

    x: Array
    model_state: Any
    received: Array | None
    sent: Array | None


class Total(NamedTuple):
    """Sums over micro-batches: loss and what comes with it (in the last stage), gradients."""

    loss: Array
    aux: Any
    grads: Any

    def add(self, grads: Any, *means: Any) -> Total:
        """These sums and another micro-batch's gradients, and in the last stage loss and aux."""
        plus = lambda t, a: t + a.astype(t.dtype)
        before = (self.grads, self.loss, self.aux) if means else (self.grads,)
        grads, *new = jax.tree.map(plus, before, (grads, *means))
        loss, aux = new or (self.loss, self.aux)
        return Total(loss, aux, grads)


@dataclass(frozen=True)
class StageProgram:
    """One stage: its module and the boundaries beside it.

    Attributes:
      index: its number; a runtime that shares one program between stages makes it dynamic.
      module: Flax module.
      left: boundary to the stage before, or None.
      right: boundary to the stage after, or None.
      x: shape and dtype of a micro-batch of its input.
      y: shape and dtype of a micro-batch of its output.
      loss: ``(y, target) -> (scalar, aux)``, in the last stage.
      kwargs: passed to the module, as sorted items.
    """

    index: Any
    module: nn.Module
    left: Boundary | None
    right: Boundary | None
    x: Like
    y: Like
    loss: Loss | None
    kwargs: tuple[tuple[str, Any], ...]

    def init(self, key: Array) -> StageState:
        """State before the first step; variables as `jaxmp.pipeline` makes them of this key."""
        keys = {'params': jax.random.fold_in(key, self.index), 'dropout': key}
        x = jnp.zeros(self.x.shape, self.x.dtype)
        made = dict(self.module.init(keys, x, **dict(self.kwargs)))
        return StageState(made.pop('params', {}), made, self.init_feedback())

    def init_feedback(self) -> Feedback:
        """Feedback states before the first step."""
        left = right = ((), ())
        if self.left:
            left = self.left.fwd.init(self.x)[1], self.left.bwd.init(self.x)[0]
        if self.right:
            right = self.right.fwd.init(self.y)[0], self.right.bwd.init(self.y)[1]
        return Feedback(*left, *right)

    def init_total(self, params: Any, target: Any) -> Total:
        """Sums before the first micro-batch."""
        wide = lambda a: jnp.zeros(a.shape, jnp.promote_types(a.dtype, jnp.float32))
        score = self.loss or (lambda y, target: (jnp.zeros(()), None))
        loss, aux = jax.tree.map(wide, jax.eval_shape(score, self.y, target))
        return Total(loss, aux, jax.tree.map(jnp.zeros_like, params))

    def forward(
        self, state: StageState, batch: MicroBatch, message: Payload
    ) -> tuple[StageState, Any, Residuals]:
        """The message to the next stage (in the last one the output), and what the backward needs.

        Args:
          state: before.
          batch: the micro-batch.
          message: from the stage before; not read in the first.
        """
        left, own, right = self._contexts(batch.ctx)
        f, received, sent, x = state.feedback, None, None, batch.x
        if self.left:
            x, rx, received = self.left.recv('fwd', message, f.left_rx, (self.x, left))
            f = f._replace(left_rx=rx)
        out, model_state = self._apply(state.params, state.model_state, x, own)
        if self.right:
            out, tx, sent = self.right.send('fwd', out, f.right_tx, right)
            f = f._replace(right_tx=tx)
        residuals = Residuals(x, state.model_state, received, sent)
        return StageState(state.params, model_state, f), out, residuals

    def backward(
        self,
        state: StageState,
        total: Total,
        residuals: Residuals,
        arrived: tuple[MicroBatch, Payload],
    ) -> tuple[StageState, Total, Payload | None]:
        """The sums with this micro-batch added, and the message to the stage before.

        Args:
          state: before.
          total: sums so far.
          residuals: from the forward of this micro-batch.
          arrived: the micro-batch, and the message from the stage after (not read in the last).
        """
        batch, message = arrived
        left, own, right = self._contexts(batch.ctx)
        f = state.feedback

        def run(params: Any, x: Array) -> tuple[Array, Any]:
            y, _ = self._apply(params, residuals.model_state, x, own)
            return self.loss(y, batch.y) if self.loss else (y, None)

        y, pull, aux = jax.vjp(run, state.params, residuals.x, has_aux=True)
        if self.right:
            at = self.y, right._replace(support=residuals.sent)
            g, rx, _ = self.right.recv('bwd', message, f.right_rx, at)
            f, means = f._replace(right_rx=rx), ()
        else:
            g, means = jnp.ones_like(y), (y, aux)
        grads, gx = pull(g)
        total = total.add(grads, *means)
        out = None
        if self.left:
            at = left._replace(support=residuals.received)
            out, tx, _ = self.left.send('bwd', gx, f.left_tx, at)
            f = f._replace(left_tx=tx)
        return state._replace(feedback=f), total, out

    def _contexts(self, ctx: Ctx) -> tuple[Ctx, Ctx, Ctx]:
        """Contexts of the left boundary, of the module and of the right boundary."""
        i = 2 * self.index
        return ctx.fold(i), ctx.fold(i + 1), ctx.fold(i + 2)

    def _apply(self, params: Any, model_state: Any, x: Array, ctx: Ctx) -> tuple[Array, Any]:
        rngs = {} if ctx.key is None else {'dropout': ctx.key}
        y, changed = self.module.apply(
            {'params': params, **model_state}, x, mutable=list(model_state), rngs=rngs,
            **dict(self.kwargs),
        )  # fmt: skip
        keep = lambda old, new: new.astype(old.dtype)  # a scan, and a checkpoint, keep dtypes
        return y, jax.tree.map(keep, model_state, {**model_state, **changed})


def programs(
    stages: Sequence[nn.Module],
    boundaries: Sequence[Boundary],
    loss: Loss | None,
    x: Array | Like,
    kwargs: Mapping[str, Any],
) -> tuple[StageProgram, ...]:
    """The programs of all stages.

    Args:
      stages: Flax modules, each taking the last one's output.
      boundaries: one between each two.
      loss: ``(output, target) -> (mean over the micro-batch, further means)``; None to predict.
      x: a micro-batch of the input, or its shape and dtype.
      kwargs: passed to every stage's ``__call__``, for example ``train=True``.

    Raises:
      ValueError: if there is not one boundary between each two stages.
    """
    n = len(stages)
    if len(boundaries) != n - 1:
        raise ValueError(
            f'{n} stages need a boundary between each two, {n - 1} in all, got {len(boundaries)}'
        )
    cuts, shapes, items = [None, *boundaries, None], [like(x)], tuple(sorted(kwargs.items()))
    for stage in stages:
        shapes.append(_output(stage, shapes[-1], dict(items)))
    return tuple(
        StageProgram(
            s, stage, cuts[s], cuts[s + 1], shapes[s], shapes[s + 1],
            loss if s == n - 1 else None, items,
        )
        for s, stage in enumerate(stages)
    )  # fmt: skip


def _output(stage: nn.Module, x: Like, kwargs: Mapping[str, Any]) -> Like:
    def run(x: Array) -> Array:
        keys = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
        return stage.init_with_output(keys, x, **kwargs)[0]

    return like(jax.eval_shape(run, x))


def shapes(made: Sequence[StageProgram]) -> list[StageState]:
    """Shapes of all stages' states."""
    return [jax.eval_shape(p.init, jax.random.key(0)) for p in made]
