r"""What a codec costs at a boundary, predicted without running it through the model.

Draw a label of each position from what the model predicts, and let g be the gradient of the sum of
their nats by what is sent at a boundary. The mean squares of g are the diagonal of the Fisher
information, so that a small error e raises the divergence of the next token by

.. math:: \frac{1}{2 N} \sum g^2 e^2

nats for each of N positions, and boundaries add. One backward pass serves all of them, and all
codecs; nothing is fitted. docs/depth.md has where this holds.

References:
  Martens, New Insights and Perspectives on the Natural Gradient Method, arXiv 1412.1193.
  LeCun et al., Optimal Brain Damage, 1989.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import FeedbackState
from jaxmp.boundary.pipeline import Stage, StageVariables, run_stage
from jaxmp.feedback import Channel
from jaxmp.training.evaluation.language_model import LanguageModel
from jaxmp.training.evaluation.stagewise import (
    activations,
    before_first,
    context,
    crossed,
    cuts_with,
    initial,
    of_block,
    of_cut,
    with_logits,
)
from jaxmp.training.workdir.progress import tracked
from jaxmp.wire import Ctx

Channels = Channel | Sequence[Channel]  # of all boundaries, or of each
LABELS = 7  # seed of the labels


def predictions(
    model: LanguageModel,
    blocks: Int[np.ndarray, 'N T'],
    channels: Mapping[str, Channels],
    batch: int,
) -> dict[str, Float[np.ndarray, 'N L']]:
    """The predicted divergence of each codec, by block and boundary.

    Args:
      model: stages with variables.
      blocks: of a text.
      channels: forward, of all boundaries or of each, by itself: what one loses does not arrive at
        the next.
      batch: blocks that cross together.
    """
    size, start = min(batch, len(blocks)), before_first(model)
    cuts = {text: cuts_with(model, channel) for text, channel in channels.items()}
    states: dict[str, FeedbackState] = {}
    found: dict[str, list[np.ndarray]] = {text: [] for text in channels}
    for i in tracked(range(0, len(blocks), size), 'predicted'):
        tokens = jnp.asarray(blocks[i : i + size], jnp.int32)
        ctx = context(i, tokens)
        sent = activations(model, start(tokens), ctx)
        g = gradients(model, sent, ctx, jax.random.fold_in(jax.random.key(LABELS), i))
        for text, ours in cuts.items():
            before = states[text] if i else initial(ours, sent[0])
            rows, after = [], []
            for number, cut in enumerate(ours):
                y, state = crossed(cut, sent[number], before.at(number), of_cut(ctx, number))
                rows.append(divergence(g[number], y - sent[number]))
                after.append(state)
            states[text] = FeedbackState.join(after)
            found[text].append(np.asarray(jnp.stack(rows, 1), np.float64))
    return {text: np.concatenate(parts) for text, parts in found.items()}


def gradients(model: LanguageModel, sent: Sequence[Array], ctx: Ctx, key: Array) -> list[Array]:
    """The gradient by what is sent at each boundary, of the nats of labels drawn from the model.

    Args:
      model: stages with variables.
      sent: of `activations`.
      ctx: of the batch.
      key: of the labels.
    """
    last, x = with_logits(model.stages[-1]), sent[-1]
    blocks = [
        _by_label(
            last, model.variables[-1], x[b : b + 1], (of_block(ctx, b), jax.random.fold_in(key, b))
        )
        for b in range(len(x))
    ]
    found = [jnp.concatenate(blocks)]
    inner = zip(model.stages[1:-1], model.variables[1:-1], sent[:-1], strict=True)
    for stage, variables, x in reversed(list(inner)):
        found.insert(0, _pulled(stage, variables, x, ctx, found[0]))
    return found


@functools.partial(jax.jit, static_argnums=0)
def _by_label(last: Stage, variables: StageVariables, x: Array, about: tuple[Ctx, Array]) -> Array:
    """The gradient by a block at the last stage, of the nats of labels drawn from its logits."""
    ctx, key = about

    def nats(x: Array) -> Array:
        y = run_stage(last, variables, x, ctx, {'train': False})[0][:, :-1]
        labels = jax.random.categorical(key, jax.lax.stop_gradient(y))
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(y), labels[..., None], axis=-1))

    return jax.grad(nats)(x)


@functools.partial(jax.jit, static_argnums=0)
def _pulled(stage: Stage, variables: StageVariables, x: Array, ctx: Ctx, g: Array) -> Array:
    """The gradient by a stage's input, given that by its output."""
    run = lambda x: run_stage(stage, variables, x, ctx, {'train': False})[0]
    return jax.vjp(run, x)[1](g)[0]


def divergence(g: Float[Array, 'B T C'], error: Float[Array, 'B T C']) -> Float[Array, ' B']:
    r"""The divergence that an error at a boundary is predicted to cause, by block.

    .. math:: \frac{1}{2 (T - 1)} \sum_{t, c} g_{tc}^2 e_{tc}^2

    Args:
      g: of `gradients`.
      error: what arrives less what is sent.

    >>> print(divergence(jnp.full((1, 3, 2), 2.0), jnp.full((1, 3, 2), 0.1)).round(3))
    [0.06]
    """
    return jnp.sum((g * error) ** 2, axis=(1, 2)) / (2 * (g.shape[1] - 1))
