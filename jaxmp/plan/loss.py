r"""`Losses`: an error at a boundary, weighed by what it does to the loss.

The squared error of a message says how large the error is, not whether it matters: where a sink
arrives well and all other tokens are lost, it is small. So the rest of the model runs once on what
the receiver sees. If the loss rises by d, and by d' with white noise of the relative squared error
n in the median token, the error counts as

.. math:: E = n \, d / d'

the relative squared error of white noise that costs as much. Of d the first-order part is chance,
with which the loss rises as often as it falls; only what is beyond it changes an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.boundary.pipeline import run_stage
from jaxmp.plan.predict import Edge
from jaxmp.plan.steps import Trained
from jaxmp.runtimes.microbatch import cut
from jaxmp.training.evaluate import model_of
from jaxmp.training.experiment import Experiment
from jaxmp.wire import Ctx

NOISE = 0.05  # relative squared error of the white noise
DOUBT = 2.0  # times what chance does: less does not change an error
LEAST = 0.25  # of its own relative squared error: an error counts as no less

Loss = Callable[[int, Array], float]  # of snapshot i, whose tensor arrives as given


class Losses(NamedTuple):
    """What errors at one boundary do to the loss.

    Attributes:
      loss: of a snapshot, given what arrives.
      exact: the loss of each snapshot where nothing is lost.
      per_error: rise of the loss by white noise, over its relative squared error.
      chance: what the loss of one snapshot moves by chance, over the root of that error.
    """

    loss: Loss
    exact: Sequence[float]
    per_error: float
    chance: float

    def weighed(self, error: float, arrived: Mapping[int, Array]) -> float:
        """The relative squared error of white noise that costs as much.

        Args:
          error: the relative squared error itself.
          arrived: what the receiver saw of some snapshots.
        """
        if error == 0 or not self.per_error > 0:
            return error
        rise = np.mean([self.loss(i, y) - self.exact[i] for i, y in arrived.items()])
        if not np.isfinite(rise):
            return float('inf')
        doubt = DOUBT * self.chance * np.sqrt(error / len(arrived))
        beyond = rise - self.per_error * error
        known = np.sign(beyond) * max(abs(beyond) - doubt, 0.0)
        return max(error + float(known) / self.per_error, LEAST * error)


def losses(exp: Experiment, trained: Trained, edge: Edge) -> Losses:
    """The losses of the boundary of a forward edge; compiles the rest of the model.

    Args:
      exp: of the probe.
      trained: its training steps.
      edge: whose activations arrive.
    """
    tensors, loss = trained.tensors[edge], loss_behind(exp, trained, edge[1])
    exact = np.array([loss(i, x) for i, x in enumerate(tensors)])
    noise = [noise_for(x, jax.random.key(i)) for i, x in enumerate(tensors)]
    pairs = enumerate(zip(tensors, noise, strict=True))
    rises = np.array([[loss(i, x + e), loss(i, x - e)] for i, (x, e) in pairs]) - exact[:, None]
    chance = np.sqrt(np.mean((rises[:, 0] - rises[:, 1]) ** 2)) / 2  # the odd part: of first order
    return Losses(loss, exact.tolist(), float(rises.mean()) / NOISE, float(chance / np.sqrt(NOISE)))


def noise_for(x: Array, key: Array) -> Array:
    """White noise of the relative squared error `NOISE` in the median token, along the last axis.

    A heavier token has as much, not more: the noise of a sink would cost more than all others'.
    """
    square = jnp.mean(x.astype(jnp.float32) ** 2, -1, keepdims=True)
    square = NOISE * jnp.minimum(square, jnp.median(square))
    return (jax.random.normal(key, x.shape) * jnp.sqrt(square)).astype(x.dtype)


def loss_behind(exp: Experiment, trained: Trained, first: int) -> Loss:
    """The loss of a snapshot's micro-batch 0, given what arrives at the stage ``first``."""
    model = model_of(exp, exp.model.boundaries)
    stages = exp.task.stages[first:]
    variables = list(trained.variables[first:])

    @jax.jit
    def run(variables: Any, x: Array, y: Any, ctx: Ctx) -> Array:
        for stage, own in zip(stages, variables, strict=True):
            x = run_stage(stage, own, x, ctx, {'train': True})[0]
        return model.loss(x, y)[0]

    def loss(i: int, x: Array) -> float:
        batch, n = trained.batches[i], exp.config.parallel.num_microbatches
        own = model.prepare(cut(batch['x'], n)[0], None)
        y = jax.tree.map(lambda a: cut(a, n)[0], batch['y'])
        return float(run(variables, x, y, Ctx(jax.random.key(i), microbatch=0).reading(own)))

    return loss
