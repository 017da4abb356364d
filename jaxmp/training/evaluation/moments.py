r"""Two numbers per channel: what an open boundary must send to look like a compressed one.

A network that was trained with compression has only seen compressed activations. Per channel c of a
boundary, let :math:`\mu, \sigma` be the mean and the deviation of what arrives there in training,
and :math:`\mu_0, \sigma_0` those of the same boundary left open. The map

.. math:: x_c \mapsto \frac{\sigma}{\sigma_0} (x_c - \mu_0) + \mu

gives the open activation the moments that the next stage knows. Nothing is trained.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp import data
from jaxmp.boundary import Boundary, FeedbackState, boundary
from jaxmp.boundary.pipeline import Pipeline
from jaxmp.codecs import raw
from jaxmp.exchange.collectives import Tree
from jaxmp.feedback import direct
from jaxmp.runtimes.local import Local, join, split
from jaxmp.runtimes.types import Batch, ModelState
from jaxmp.training.evaluate import evaluation_key, model_of
from jaxmp.training.experiment import Experiment
from jaxmp.wire import Codec, Ctx, Like, Payload

BATCHES = 40  # of training examples, from which moments are estimated
PASSES = 100  # after which BatchNorm's running means have forgotten where they began
LEAST = 1e-6  # deviation at which a channel is a constant, and is only shifted


class Affine(NamedTuple):
    """``x * scale + shift`` by channel, the map of a boundary."""

    scale: Float[Array, ' C']
    shift: Float[Array, ' C']

    def after(self, codec: Codec) -> Codec:
        """``codec`` whose decoded tensor passes the map, as at the entrance of the next stage."""

        def decode(message: Payload, like: Like, ctx: Ctx) -> Array:
            x = codec.decode(message, like, ctx)
            return (x * self.scale + self.shift).astype(x.dtype)

        return codec._replace(decode=decode)


class Arrived(nn.Module):
    """A last stage that returns what has arrived."""

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        """Returns ``x``."""
        return x


def matched(exp: Experiment, trained: ModelState, key: Array) -> list[Affine]:
    """The map of each boundary, measured with the maps of those before it in place.

    Args:
      exp: the experiment of a run.
      trained: its state; the feedback states go on from there.
      key: of the run.
    """
    maps: list[Affine] = []
    nothing = (((), ()),) * len(exp.model.boundaries)  # what open boundaries remember
    forgetful = trained._replace(feedback=FeedbackState(nothing, nothing))
    for i in range(len(exp.model.boundaries)):
        wanted = moments(exp, trained, key, exp.model.boundaries[: i + 1])
        opened = *map(opened_with, maps), boundary(direct(raw), direct(raw))
        maps.append(affine(wanted, moments(exp, forgetful, key, opened)))
    return maps


def normalised_again(exp: Experiment, trained: ModelState, key: Array) -> ModelState:
    """The state with BatchNorm's statistics of training batches that cross open boundaries.

    Forward passes in the training mode, over whole epochs and at least `PASSES` batches. The
    statistics are the means of the running ones over the second half. Parameters do not change.

    Args:
      exp: the experiment of a run.
      trained: its state.
      key: of the run.
    """
    pipe = Pipeline(exp.task.stages, exp.model.boundaries)

    @jax.jit
    def step(state: Tree, x: Array, key: Array) -> Tree:
        x = exp.task.prepare(x, jax.random.fold_in(key, 0))
        return split(pipe.apply(join(trained.params, state), None, x, Ctx(key), train=True)[1])[1]

    state, statistics, epochs = trained.model_state, [], math.ceil(PASSES / exp.epoch_steps)
    for epoch in range(epochs):
        order = data.order(exp.config.seed, epoch, len(exp.data.train.y))
        for batch in data.batches(exp.data.train, exp.config.batch_size, order):
            state = step(state, batch['x'], jax.random.fold_in(key, len(statistics)))
            statistics.append(jax.device_get(state))
    real = lambda a: np.issubdtype(a.dtype, np.floating)  # a count of steps has no mean
    mean_of = lambda *a: np.mean(a, 0).astype(a[0].dtype) if real(a[0]) else a[-1]
    mean = jax.tree.map(mean_of, *statistics[len(statistics) // 2 :])
    return trained._replace(model_state=mean)


Moments = tuple[Float[Array, ' C'], Float[Array, ' C']]  # mean and deviation by channel


def affine(wanted: Moments, present: Moments) -> Affine:
    """The map that turns channels with the moments ``present`` into channels with ``wanted``."""
    (mean, deviation), (mean0, deviation0) = wanted, present
    scale = jnp.where(deviation0 > LEAST, deviation / jnp.maximum(deviation0, LEAST), 1.0)
    return Affine(scale, mean - scale * mean0)


def opened_with(affine: Affine) -> Boundary:
    """An open boundary with a map."""
    return boundary(direct(affine.after(raw)), direct(raw))


def moments(
    exp: Experiment, trained: ModelState, key: Array, cuts: tuple[Boundary, ...]
) -> Moments:
    """The moments of what arrives at the last of the first boundaries, ``cuts``."""
    axes = lambda x: tuple(range(x.ndim - 1))
    of = lambda x: jnp.stack([x.mean(axes(x)), (x**2).mean(axes(x))])
    mean, square = averages(exp, trained, key, cuts, of)
    return mean, jnp.sqrt(jnp.maximum(square - mean**2, 0.0))


def averages(
    exp: Experiment,
    trained: ModelState,
    key: Array,
    cuts: tuple[Boundary, ...],
    of: Callable[[Array], Array],
) -> Array:
    """The average of ``of`` (what arrives in a batch at the last of the first boundaries).

    Over `BATCHES` batches of training examples, in the order of the first epoch.
    """
    n = len(cuts)
    model = model_of(exp, cuts)
    local = Local(model._replace(stages=(*model.stages[:n], Arrived())), train=False)
    first = lambda by_stage: {**{s: by_stage[s] for s in range(n)}, n: {}}
    feedback = FeedbackState(trained.feedback.fwd[:n], trained.feedback.bwd[:n])
    state = ModelState(first(trained.params), first(trained.model_state), feedback)

    @jax.jit
    def step(state: ModelState, batch: Batch, key: Array) -> tuple[Array, FeedbackState]:
        x, after = local.predict(state, batch, key)
        return of(x.astype(jnp.float32)), after

    rows = []
    order = data.order(exp.config.seed, 0, len(exp.data.train.y))
    batches = data.batches(exp.data.train, exp.config.batch_size, order)
    for i, batch in enumerate(itertools.islice(batches, BATCHES)):
        row, after = step(state, batch, evaluation_key(key, i))
        state = state._replace(feedback=after)
        rows.append(row)
    return jnp.mean(jnp.stack(rows), 0)
