r"""An error at a boundary, weighed by what it does to the loss.

The squared error of a message says how large the error is, not whether it matters: where a sink
arrives well and all other tokens are lost, it is small. With g the gradient that came back in a
training step, an error e of activations x counts as

.. math:: E = \frac{\sum_{t, c} g_{tc}^2 e_{tc}^2}{\sum_{t, c} g_{tc}^2 m_t^2}

with :math:`m_t^2` the mean square of token t, at most that of the median token: white noise of the
relative squared error E costs as much to second order. A pretrained language model's errors are
predicted in nats too, by `jaxmp.training.evaluation.divergence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.plan.choose import Candidate
from jaxmp.plan.predict import Edge
from jaxmp.plan.steps import Trained
from jaxmp.runtimes.microbatch import cut
from jaxmp.training.evaluation.divergence import divergence, gradients
from jaxmp.training.evaluation.language_model import LanguageModel
from jaxmp.training.evaluation.stagewise import activations, before_first, context
from jaxmp.training.experiment import Experiment


def weighed(x: Sequence[Array], arrived: Mapping[int, Array], g: Sequence[Array]) -> float:
    """The error of what arrived, weighed by the gradients that came back; see above.

    Args:
      x: what was sent, by snapshot.
      arrived: what the receiver saw of some snapshots.
      g: the gradients, by snapshot.

    >>> x, g = jnp.ones((1, 2, 2)), jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> weighed([x], {0: x.at[0, 0, 1].set(9.0)}, [g]), weighed([x], {0: 0.5 * x}, [g])
    (0.0, 0.25)
    """

    def one(i: int, y: Array) -> float:
        mean = jnp.mean(x[i].astype(jnp.float32) ** 2, -1, keepdims=True)
        noise = jnp.sum(g[i] ** 2 * jnp.minimum(mean, jnp.median(mean)))
        return float(jnp.sum((g[i] * (y - x[i])) ** 2) / jnp.where(noise > 0, noise, 1))

    return _finite(np.mean([one(i, y) for i, y in arrived.items()]))


def _finite(error: np.floating) -> float:
    """An error, infinite where something was no number."""
    return float(error) if np.isfinite(error) else np.inf


def label_gradients(exp: Experiment, trained: Trained) -> dict[Edge, list[Array]]:
    """The gradients of drawn labels by what each forward edge sent, of each snapshot's batch.

    Args:
      exp: of the probe, of a language model.
      trained: its training steps.
    """
    tokenizer = exp.data.tokenizer
    assert tokenizer is not None, 'it is of a text'
    model = LanguageModel('', exp.task.stages, tuple(trained.variables), tokenizer)
    found: dict[Edge, list[Array]] = {(s, s + 1): [] for s in range(len(exp.task.stages) - 1)}
    for i, batch in enumerate(trained.batches):
        n = exp.config.parallel.num_microbatches
        tokens = exp.task.prepare(cut(jnp.asarray(batch['x']), n)[0], None)
        ctx = context(i, tokens)
        sent = activations(model, before_first(model)(tokens), ctx)
        for edge, g in zip(found, gradients(model, sent, ctx, jax.random.key(i)), strict=True):
            found[edge].append(g)
    return found


def nats(x: Sequence[Array], arrived: Mapping[int, Array], g: Sequence[Array]) -> float:
    """The predicted divergence, from some snapshots of what was sent and what arrived."""
    return _finite(np.mean([divergence(g[i], y - x[i]).mean() for i, y in arrived.items()]))


def within(
    crossings: Mapping[Edge, Sequence[Candidate]], percent: float
) -> dict[Edge, list[Candidate]]:
    """The candidates with which all forward edges together add at most so much of perplexity.

    Of the word of the fewest bits that holds at all edges, each edge's part of the sum is the bound
    there of all others. Without such a word only raw is left.
    """
    most = np.log1p(percent / 100)
    forward = [edge for edge in crossings if edge[0] < edge[1]]
    by_text: dict[str, list[Candidate]] = {}
    for edge in forward:
        for c in crossings[edge]:
            by_text.setdefault(c.text, []).append(c)
    whole = [row for row in by_text.values() if len(row) == len(forward)]
    hold = [row for row in whole if 0 < sum(c.nats for c in row) <= most]
    bounds = dict.fromkeys(forward, 0.0)
    if hold:
        fewest = min(hold, key=lambda row: sum(c.bits for c in row))
        scale = most / sum(c.nats for c in fewest)
        bounds = {e: scale * c.nats for e, c in zip(forward, fewest, strict=True)}
    fits = lambda e, c: e not in bounds or c.nats <= bounds[e]
    return {e: [c for c in rows if fits(e, c)] for e, rows in crossings.items()}
