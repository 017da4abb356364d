"""`Local`: all stages in one program on one device: convergence studies and notebooks.

The boundaries are those of `jaxmp.boundary`, crossed under autodiff: messages are packed and
unpacked, so what a model learns here is what it learns over a real link. Tests compare every other
runtime with this one. Replicas are a mesh axis around the whole step
(`jaxmp.runtimes.replicated`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.boundary import FeedbackState, init_feedback, value_and_grad
from jaxmp.boundary.pipeline import Pipeline, Variables
from jaxmp.exchange import Collectives
from jaxmp.exchange.collectives import Grads, Params, Tree
from jaxmp.runtimes.microbatch import context, cut, loop
from jaxmp.runtimes.state import Collections, Feedback, Means, in_dtypes
from jaxmp.runtimes.trained import of_stage, part, whole
from jaxmp.runtimes.types import Batch, Model, ModelState, StepKeys
from jaxmp.wire import widened


class Local:
    """The runtime of one program; see `jaxmp.runtimes.types.Runtime`."""

    square: Callable[[], Array] | None = None

    def __init__(self, model: Model, train: bool = True, via: Collectives | None = None) -> None:
        """Compiles nothing: the caller compiles the whole step.

        Args:
          model: stages and boundaries.
          train: passed to the stages.
          via: this replica's way to the others, inside `jax.shard_map`.
        """
        self.model, self.train, self.via = model, train, via
        self.pipe = Pipeline(model.stages, model.boundaries)
        self.stages, self.replicas = tuple(range(len(model.stages))), 1
        self.last = len(model.stages) - 1

    def init(self, key: Array, draw: bool = True) -> ModelState:
        """See `Runtime`."""
        x, init = self.model.x, functools.partial(self.pipe.init, train=self.train)
        if draw:
            variables, feedback = init(key, jnp.zeros(x.shape, x.dtype))
            return ModelState(*split(variables), feedback)
        variables, feedback = jax.eval_shape(init, key, x)
        params, rest = split(variables)
        zeros = lambda tree: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), tree)
        likes = self.pipe.likes(variables, x, train=self.train)
        feedback = jax.jit(lambda: init_feedback(self.pipe.boundaries, likes))()
        return ModelState({s: {} for s in params}, zeros(rest), feedback)

    def value_and_grad(
        self, state: ModelState, batch: Batch, key: Array
    ) -> tuple[Means, dict[int, Grads], ModelState]:
        """See `Runtime`."""
        keys = StepKeys.of(key, batch['id'], self.via and self.via.index)
        n, x = self.model.num_microbatches, self.model.prepare(batch['x'], keys.augment)
        trained = {s: part(of_stage(self.model.trained, s), p) for s, p in state.params.items()}

        def loss(
            params: Params, feedback: FeedbackState, model_state: dict[int, PyTree], *one: PyTree
        ) -> tuple[Array, tuple[FeedbackState, PyTree]]:
            m, x, y = one
            params = {s: whole(p, params[s]) for s, p in state.params.items()}
            variables, ctx = join(params, model_state), context(keys.model, m, n)
            out, after, feedback = self.pipe.apply(variables, feedback, x, ctx, train=self.train)
            value, aux = self.model.loss(out, y)
            return value, (feedback, (aux, split(after)[1]))

        def add(carry: PyTree, one: PyTree) -> PyTree:
            model_state, feedback, total = carry
            arguments = trained, feedback, model_state, *one
            (value, (aux, model_state)), grads, feedback = value_and_grad(loss)(*arguments)
            new = (value, aux), grads
            total = jax.tree.map(lambda t, a: t + a.astype(t.dtype), total, new)
            return model_state, feedback, total

        parts = jnp.arange(n), *(cut(a, n) for a in (x, batch['y']))
        first = jax.tree.map(lambda a: a[0], parts)
        shapes = jax.eval_shape(loss, trained, state.feedback, state.model_state, *first)
        value, (_, (aux, _)) = shapes  # without the backward, whose trace takes as long again
        sums = jax.tree.map(jnp.zeros_like, jax.eval_shape(widened, ((value, aux), trained)))
        end = loop(add, (state.model_state, state.feedback, sums), parts)
        model_state, feedback, sums = end
        means, grads = jax.tree.map(lambda a: (a / n).astype(a.dtype), sums)
        grads = in_dtypes(grads, trained)
        return means, grads, ModelState(state.params, model_state, feedback)

    def predict(self, state: ModelState, batch: Batch, key: Array) -> tuple[PyTree, FeedbackState]:
        """See `Runtime`."""
        keys, feedback, rows = StepKeys.of(key, batch['id']), state.feedback, []
        n, x = self.model.num_microbatches, self.model.prepare(batch['x'], None)
        variables = join(state.params, state.model_state)
        for m, x_m in enumerate(cut(x, n)):
            ctx = context(keys.model, m, n)
            out, _, feedback = self.pipe.apply(variables, feedback, x_m, ctx, train=self.train)
            rows.append(out)
        return jnp.concatenate(rows), feedback

    def unpack(self, feedback: FeedbackState) -> dict[int, Feedback]:
        """See `Runtime`; a state that both ends share is at its sender."""
        return {s: _ends(feedback, s) for s in self.stages}

    def pack(self, feedback: Mapping[int, Feedback]) -> FeedbackState:
        """See `Runtime`."""
        pairs = list(itertools.pairwise(feedback[s] for s in self.stages))
        fwd = tuple((a.right_tx, b.left_rx) for a, b in pairs)
        return FeedbackState(fwd, tuple((b.left_tx, a.right_rx) for a, b in pairs))

    def at(
        self, stage: int, f: Callable[..., Tree], *trees: Tree, spent: tuple[int, ...] = ()
    ) -> Tree:
        """See `Runtime`."""
        return f(self.via, *trees)


def _ends(feedback: FeedbackState, s: int) -> Feedback:
    left = right = ((), ())
    if s:
        left = feedback.fwd[s - 1][1], feedback.bwd[s - 1][0]
    if s < len(feedback.fwd):
        right = feedback.fwd[s][0], feedback.bwd[s][1]
    return Feedback(*left, *right)


def split(variables: Variables) -> tuple[Params, dict[int, Collections]]:
    """Parameters, and the other collections, by stage."""
    params = {s: v['params'] for s, v in enumerate(variables)}
    return params, {s: {k: v[k] for k in v if k != 'params'} for s, v in enumerate(variables)}


def join(params: Params, model_state: dict[int, Collections]) -> Variables:
    """Inverse of `split`."""
    return tuple({'params': params[s], **model_state[s]} for s in sorted(params))
