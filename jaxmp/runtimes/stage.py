"""`StageProgram`: a pipeline stage as two pure functions over messages, forward and backward.

The forward reads a message, runs the Flax module and writes a message; the backward reads a
gradient, pulls it back through the module, adds to the sums and writes the gradient of the input.
From the forward to the backward a micro-batch keeps the residuals of the module, or with ``remat``
its input alone, from which the backward runs the module again. When these run, and how messages
travel, is the runtime's business (`jaxmp.runtimes.mpmd` compiles a program per stage,
`jaxmp.runtimes.spmd` one program for all).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.boundary import Boundary
from jaxmp.boundary.pipeline import Stage, check_stages, run_stage
from jaxmp.exchange.collectives import Params
from jaxmp.runtimes.state import (
    Accumulator,
    Collections,
    Feedback,
    Linear,
    Loss,
    MicroBatch,
    Pullback,
    Residuals,
    StageState,
    Target,
)
from jaxmp.runtimes.trained import Path, all_paths, of_stage, part, whole
from jaxmp.runtimes.types import Model
from jaxmp.wire import Ctx, Index, Like, Payload, like, widened

Kwargs = tuple[tuple[str, object], ...]  # keywords of a module, as sorted items


@dataclass(frozen=True)
class StageProgram:
    """One stage: its module and the boundaries beside it.

    Attributes:
      index: its number; a runtime that shares one program between stages makes it dynamic.
      module: Flax module; see `jaxmp.boundary.pipeline.Stage`.
      left: boundary to the stage before, or None.
      right: boundary to the stage after, or None.
      x: shape and dtype of a micro-batch of its input.
      y: shape and dtype of a micro-batch of its output.
      loss: ``(y, target) -> (scalar, aux)``, in the last stage.
      kwargs: passed to the module, as sorted items.
      remat: whether the backward runs the module again, which costs a forward and saves residuals.
      trained: whether the parameter of a path has a gradient.
      returns: whether it sends the gradient of its input to the stage before.
    """

    index: Index
    module: Stage
    left: Boundary | None
    right: Boundary | None
    x: Like
    y: Like
    loss: Loss | None
    kwargs: Kwargs
    remat: bool = False
    trained: Callable[[Path], bool] = all_paths
    returns: bool = True

    def init(self, key: Array, draw: bool = True) -> StageState:
        """State before the first step; variables as `jaxmp.pipeline` makes them of this key.

        Without ``draw`` there are no parameters, and other collections are zeros.
        """
        keys = {'params': jax.random.fold_in(key, self.index), 'dropout': key}
        x = jnp.zeros(self.x.shape, self.x.dtype)
        init = functools.partial(self.module.init, **dict(self.kwargs))
        others = dict(init(keys, x) if draw else jax.eval_shape(init, keys, x))
        params = others.pop('params', {})
        if not draw:
            params, others = {}, jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), others)
        return StageState(params, others, self.init_feedback())

    def init_feedback(self) -> Feedback:
        """Feedback states before the first step."""
        left = right = ((), ())
        if self.left:
            left = self.left.fwd.init(self.x)[1], self.left.bwd.init(self.x)[0]
        if self.right:
            right = self.right.fwd.init(self.y)[0], self.right.bwd.init(self.y)[1]
        return Feedback(*left, *right)

    def init_accumulator(self, params: Params, target: Target) -> Accumulator:
        """Sums before the first micro-batch, in float32 or wider."""
        score = self.loss or (lambda y, target: (jnp.zeros(()), None))
        trained = part(self.trained, params)
        added = jax.eval_shape(widened, (*jax.eval_shape(score, self.y, target), trained))
        return Accumulator(*jax.tree.map(jnp.zeros_like, added))

    def predict(
        self, state: StageState, batch: MicroBatch, message: Payload
    ) -> tuple[StageState, Payload]:
        """The next state, and the message to the next stage; in the last one the output.

        Args:
          state: before.
          batch: the micro-batch.
          message: from the stage before; not read in the first.
        """
        run = lambda x, ctx: (*self._apply(state.params, state.model_state, x, ctx), None)
        return self._cross(state, batch, message, run)[:2]

    def forward(
        self, state: StageState, batch: MicroBatch, message: Payload
    ) -> tuple[StageState, Payload, Residuals]:
        """As `predict` for a step that has a backward; also what the backward needs."""

        def run(x: Array, ctx: Ctx) -> tuple[Array, Collections, PyTree]:
            if self.remat:
                y, after = self._apply(state.params, state.model_state, x, ctx)
                return y, after, (x, state.model_state)
            return self._linearize(state.params, (x, state.model_state), batch, ctx)

        return self._cross(state, batch, message, run)

    def _cross(
        self,
        state: StageState,
        batch: MicroBatch,
        message: Payload,
        run: Callable[[Array, Ctx], tuple],
    ) -> tuple[StageState, Payload, Residuals]:
        """Reads the message, runs the module, writes a message."""
        left, inner, right = self._contexts(batch.ctx)
        f, received, sent, x = state.feedback, None, None, batch.x
        if self.left:
            x, rx, received = self.left.recv('fwd', message, f.left_rx, (self.x, left))
            f = f._replace(left_rx=rx)
        out, model_state, residuals = run(x, inner)
        if self.right:
            right = self.right.informed(right, f.right_rx)
            out, tx, sent = self.right.send('fwd', out, f.right_tx, right)
            f = f._replace(right_tx=tx)
        return StageState(state.params, model_state, f), out, Residuals(residuals, received, sent)

    def _linearize(
        self, params: Params, point: tuple[Array, Collections], batch: MicroBatch, ctx: Ctx
    ) -> tuple[Array, Collections, Linear]:
        """Output (in the last stage the loss), collections after, and the map of gradients."""
        x, model_state = point

        def run(trained: Params, *moving: Array) -> tuple[Array, PyTree]:
            variables = whole(params, trained), model_state
            y, after = self._apply(*variables, moving[0] if moving else x, ctx)
            y, aux = self.loss(y, batch.y) if self.loss else (y, None)
            return y, (aux, after)

        inputs = part(self.trained, params), *((x,) if self.returns else ())
        y, pull, (aux, after) = jax.vjp(run, *inputs, has_aux=True)
        means = () if self.right else (y, aux)
        return y, after, Linear(Pullback.of(pull, params), means)

    def backward(
        self,
        state: StageState,
        total: Accumulator,
        residuals: Residuals,
        arrived: tuple[MicroBatch, Payload],
    ) -> tuple[StageState, Accumulator, Payload | None]:
        """The sums with this micro-batch added, and the message to the stage before.

        Args:
          state: before.
          total: sums so far.
          residuals: from the forward of this micro-batch.
          arrived: the micro-batch, and the message from the stage after (not read in the last).
        """
        linear, g, f = self._read_gradient(state, residuals, arrived)
        grads, *gx = linear.pull(state.params, g)
        total = total.add(grads, *linear.means)
        f, out = self._write_gradient(gx, f, residuals, arrived[0])
        return state._replace(feedback=f), total, out

    def backward_input(
        self, state: StageState, residuals: Residuals, arrived: tuple[MicroBatch, Payload]
    ) -> tuple[StageState, Linear, Payload | None]:
        """The part of `backward` that the stage before waits for, and what is left of it.

        The latter lacks what the residuals have, which `joined` adds.
        """
        linear, g, f = self._read_gradient(state, residuals, arrived)
        before = jax.tree.leaves(residuals.kept)
        gx, later = linear.pull.halves(state.params, g, before)
        f, out = self._write_gradient(gx, f, residuals, arrived[0])
        return state._replace(feedback=f), Linear(later, linear.means), out

    def joined(self, params: Params, residuals: Residuals, later: Linear) -> Linear:
        """What `backward_input` left, for `backward_weights`; no residual but those it needs."""
        return later._replace(pull=later.pull.joined(params, jax.tree.leaves(residuals.kept)))

    def backward_weights(self, params: Params, total: Accumulator, later: Linear) -> Accumulator:
        """The other part: the sums with this micro-batch added."""
        form = jax.tree.structure(part(self.trained, params))
        grads = jax.tree.unflatten(form, later.pull(params))
        return total.add(grads, *later.means)

    def _read_gradient(
        self, state: StageState, residuals: Residuals, arrived: tuple[MicroBatch, Payload]
    ) -> tuple[Linear, Array, Feedback]:
        """The module's linear map, the gradient of its output, and the feedback after."""
        batch, message = arrived
        _, inner, right = self._contexts(batch.ctx)
        f, linear = state.feedback, residuals.kept
        if self.remat:
            linear = self._linearize(state.params, residuals.kept, batch, inner)[2]
        if not self.right:
            return linear, jnp.ones_like(linear.means[0]), f
        crossing = self.y, right._replace(indices=residuals.sent)
        g, rx, _ = self.right.recv('bwd', message, f.right_rx, crossing)
        return linear, g, f._replace(right_rx=rx)

    def _write_gradient(
        self, gradient: Sequence[Array], f: Feedback, residuals: Residuals, batch: MicroBatch
    ) -> tuple[Feedback, Payload | None]:
        """The feedback after, and the message to the stage before, if it gets one."""
        if not (self.left and gradient):
            return f, None
        left = self._contexts(batch.ctx)[0]._replace(indices=residuals.received)
        out, tx, _ = self.left.send('bwd', gradient[0], f.left_tx, left)
        return f._replace(left_tx=tx), out

    def _contexts(self, ctx: Ctx) -> tuple[Ctx, Ctx, Ctx]:
        """Contexts of the left boundary, of the module and of the right boundary."""
        i = 2 * self.index
        return ctx.fold(i), ctx.fold(i + 1), ctx.fold(i + 2)

    def _apply(
        self, params: Params, model_state: Collections, x: Array, ctx: Ctx
    ) -> tuple[Array, Collections]:
        variables = {'params': params, **model_state}
        y, after = run_stage(self.module, variables, x, ctx, dict(self.kwargs))
        if self.right and like(y) != self.y:
            raise ValueError(
                f'stage {self.index}, {type(self.module).__name__}, gives {y.dtype}{list(y.shape)} '
                f'and gave {self.y.dtype}{list(self.y.shape)} before; a stage gives one shape and '
                'dtype for all micro-batches, in training and in a test'
            )
        return y, {name: after[name] for name in model_state}


def programs(
    model: Model, train: bool = True, kwargs: Mapping[str, object] | None = None
) -> tuple[StageProgram, ...]:
    """The programs of all stages of a model.

    Args:
      model: stages and boundaries.
      train: whether they are those of a training step, which has a loss.
      kwargs: passed to every stage's ``__call__``; default ``train`` alone.

    Raises:
      TypeError: if an object is not a stage.
      ValueError: if there is not one boundary between each two stages.
    """
    stages, boundaries, n = model.stages, model.boundaries, len(model.stages)
    check_stages(stages)
    if len(boundaries) != n - 1:
        raise ValueError(
            f'{n} stages need a boundary between each two, {n - 1} in all, got {len(boundaries)}'
        )
    cuts, shapes = [None, *boundaries, None], [like(model.x)]
    items = tuple(sorted(({'train': train} if kwargs is None else kwargs).items()))
    loss = model.loss if train else None
    for stage in stages:
        shapes.append(_output(stage, shapes[-1], dict(items)))
    return tuple(
        StageProgram(
            s, stage, cuts[s], cuts[s + 1], shapes[s], shapes[s + 1],
            loss if s == n - 1 else None, items, model.remat, of_stage(model.trained, s),
            s > model.first,
        )
        for s, stage in enumerate(stages)
    )  # fmt: skip


def _output(stage: Stage, x: Like, kwargs: Mapping[str, object]) -> Like:
    def run(x: Array) -> Array:
        keys = {'params': jax.random.key(0), 'dropout': jax.random.key(0)}
        return stage.init_with_output(keys, x, **kwargs)[0]

    return like(jax.eval_shape(run, x))


def shapes(programs: Sequence[StageProgram]) -> list[StageState]:
    """Shapes of all stages' states."""
    return [jax.eval_shape(p.init, jax.random.key(0)) for p in programs]
