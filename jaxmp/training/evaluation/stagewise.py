r"""A language model stage by stage: what crosses its boundaries, and what that costs.

Each stage and each boundary is a program of its own, so that any number of codecs shares the
stages. With p and q the distributions of the next token without and with a codec, a position loses

.. math:: KL(p, q) = \sum_v p_v (\log p_v - \log q_v)

which needs no token of the text, so that its error is a fraction of that of the nats lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import Boundary, FeedbackState, boundary, init_feedback
from jaxmp.boundary.pipeline import Stage, StageVariables, run_stage
from jaxmp.codecs import raw
from jaxmp.feedback import Channel, direct
from jaxmp.models.layers import next_token_nats
from jaxmp.training.evaluation.language_model import LanguageModel
from jaxmp.wire import Ctx

UNCOMPRESSED = 'raw'


@functools.partial(jax.jit, static_argnums=0)
def ran(stage: Stage, variables: StageVariables, x: Array, ctx: Ctx) -> Array:
    """The output of a stage."""
    return run_stage(stage, variables, x, ctx, {'train': False})[0]


@functools.partial(jax.jit, static_argnums=0)
def crossed(cut: Boundary, x: Array, state: FeedbackState, ctx: Ctx) -> tuple[Array, FeedbackState]:
    """What arrives behind a boundary, and its next state."""
    return cut.cross(x, state, ctx)


def context(first: int, tokens: Int[Array, 'B T']) -> Ctx:
    """The context of a batch whose first block has the number ``first``."""
    key = jax.random.fold_in(jax.random.key(0), first)
    return Ctx(key, jnp.arange(first, first + len(tokens)), tokens=tokens)


def of_cut(ctx: Ctx, number: int) -> Ctx:
    """The context of a crossing, as `jaxmp.boundary.pipeline.Pipeline` has it."""
    return ctx.fold(2 * number + 2)


def before_first(model: LanguageModel) -> Callable[[Array], Array]:
    """What computes, from a batch of tokens, what is sent at the first boundary."""
    return lambda tokens: ran(model.stages[0], model.variables[0], tokens, Ctx(tokens=tokens))


def activations(model: LanguageModel, x: Array, ctx: Ctx) -> list[Array]:
    """What is sent at each boundary where nothing is compressed, given that of the first."""
    sent = [x]
    for stage, variables in zip(model.stages[1:-1], model.variables[1:-1], strict=True):
        sent.append(ran(stage, variables, sent[-1], ctx))
    return sent


def cuts_with(
    model: LanguageModel, channel: Channel | Sequence[Channel], backward: Channel | None = None
) -> tuple[Boundary, ...]:
    """The boundaries of a model.

    Args:
      model: with stages.
      channel: forward, of all boundaries or of each.
      backward: whose state a forward channel reads; default none.
    """
    count = len(model.stages) - 1
    each = [channel] * count if isinstance(channel, Channel) else channel
    return tuple(boundary(forward, backward or direct(raw)) for forward in each)


def initial(cuts: Sequence[Boundary], x: Array) -> FeedbackState:
    """The states of boundaries; blocks leave shape and dtype of the residual stream as they are."""
    return init_feedback(cuts, [x] * len(cuts))


def through(
    model: LanguageModel, cuts: Sequence[Boundary], states: FeedbackState, x: Array, ctx: Ctx
) -> tuple[Array, FeedbackState]:
    """What arrives at the last stage, given what is sent at the first boundary, and the states."""
    after = []
    for i, cut in enumerate(cuts):
        x = ran(model.stages[i], model.variables[i], x, ctx) if i else x
        x, state = crossed(cut, x, states.at(i), of_cut(ctx, i))
        after.append(state)
    return x, FeedbackState.join(after)


def last_nats(model: LanguageModel, x: Array, ctx: Ctx) -> Float[Array, 'B T1']:
    """The nats of the next tokens of a text, given what arrives at the last stage."""
    last = model.stages[-1]
    y = ran(last, model.variables[-1], x, ctx)
    if getattr(last, 'by_token', False):
        return y[:, :-1, 0]
    assert ctx.tokens is not None, 'they are the text'
    return next_token_nats(y, ctx.tokens)


class Judged(NamedTuple):
    """Means over the positions of each block, the last one left out, in nats.

    Attributes:
      nats: of the text's next token.
      kl: divergence of its distribution from that without compression.
    """

    nats: Float[np.ndarray, ' B']
    kl: Float[np.ndarray, ' B']


def joined(parts: Sequence[Judged]) -> Judged:
    """The blocks of several batches."""
    return Judged(*map(np.concatenate, zip(*parts, strict=True)))


def judged(model: LanguageModel, arrived: Mapping[str, Array], ctx: Ctx) -> dict[str, Judged]:
    """What the last stage makes of what arrives by each codec, compared with `UNCOMPRESSED`."""
    last, variables = with_logits(model.stages[-1]), model.variables[-1]
    rows: dict[str, list[tuple[Array, Array]]] = {name: [] for name in arrived}
    # A block at a time, whose logits all codecs are compared with: a batch's would be the largest
    # array of all.
    for b in range(len(arrived[UNCOMPRESSED])):
        ctx_b = of_block(ctx, b)
        logits = ran(last, variables, arrived[UNCOMPRESSED][b : b + 1], ctx_b)
        for name, y in arrived.items():
            rows[name].append(_compared(last, variables, y[b : b + 1], (logits, ctx_b)))
    columns = {name: map(jnp.stack, zip(*pairs, strict=True)) for name, pairs in rows.items()}
    return {name: Judged(*(np.asarray(c, np.float64) for c in p)) for name, p in columns.items()}


@functools.partial(jax.jit, static_argnums=0)
def _compared(
    last: Stage, variables: StageVariables, x: Array, against: tuple[Array, Ctx]
) -> tuple[Array, Array]:
    """The mean nats of a block's tokens, and the divergence from its uncompressed logits."""
    uncompressed, ctx = against
    y = run_stage(last, variables, x, ctx, {'train': False})[0]
    log_p, log_q = (jax.nn.log_softmax(a[0, :-1], axis=-1) for a in (uncompressed, y))
    assert ctx.tokens is not None, 'they are the text'
    own = jnp.take_along_axis(log_q, ctx.tokens[0, 1:, None], axis=-1)
    return -jnp.mean(own), jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))


def with_logits(last: Stage) -> Stage:
    """The last stage with logits as its output, for which it may have a form of its own."""
    return getattr(last, 'with_logits', last)


def of_block(ctx: Ctx, b: int) -> Ctx:
    """The context of one block of a batch."""
    part = lambda a: None if a is None else a[b : b + 1]
    return ctx._replace(ids=part(ctx.ids), tokens=part(ctx.tokens))
