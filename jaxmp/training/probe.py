"""`prober`: the error of compression at each boundary, measured on one fixed batch.

A training step does not show what a sender hands over beside what its receiver sees. The probe runs
both passes once more, in one program under every runtime, over channels whose ends also keep these
two tensors. It starts from the feedback states of the training and changes none of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp import data
from jaxmp.boundary import Boundary, FeedbackState
from jaxmp.exchange.collectives import Tree
from jaxmp.feedback.channel import BY_TOKEN, Channel
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.state import Feedback
from jaxmp.runtimes.types import Batch, ModelState
from jaxmp.training import portable
from jaxmp.training.evaluate import STREAM, evaluation_key, model_of
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.training.portable import Portable
from jaxmp.training.sizes import likes
from jaxmp.wire import Ctx, Like, Payload

Ends = tuple[Tree, Tree]  # the states (tx, rx) of a channel; rx is () where both ends share one
Probed = dict[str, str | float]  # what is measured of one boundary and direction


class Kept(NamedTuple):
    """The state of one end of a channel, and the tensor of its last crossing."""

    state: Tree
    tensor: Array


def prober(exp: Experiment) -> Callable[[Portable], list[Probed]]:
    """The probe of an experiment, a function of a train state; its first call compiles it.

    The batch is micro-batch 0 of replica 0, of the same training examples in every epoch. With x
    what the sender hands over (an activation, or its gradient) and y what the receiver sees, a row
    holds ``boundary`` (from 1), ``direction`` (``'forward'`` or ``'backward'``), the ``loss`` of
    the batch, ``error = ||y - x|| / ||x||``, ``feedback``, the norm of the feedback state (over all
    micro-batches or examples; a state that both ends share counts once), and ``bits`` per element.

    Args:
      exp: the experiment; its boundaries are those after the warm-up.
    """
    cuts, size = exp.model.boundaries, microbatch_like(exp).shape[0]
    order = data.order(0, 0, len(exp.data.train.y))[:size]
    [batch] = data.batches(exp.data.train, size, order)
    sent = likes(exp)
    cross = jax.jit(crossing(exp, sent))
    bits = [[n / x.size for n in b.bits(x)] for b, x in zip(cuts, sent, strict=True)]

    def probe(state_here: Portable) -> list[Probed]:
        parts = [state_here.parts[portable.name(s, 0)] for s in range(len(cuts) + 1)]
        # States are by stage: a boundary has the right end of one and the left end of the next.
        end_states = ends(cuts, [part['feedback'] for part in parts])
        params, rest = ({s: p[k] for s, p in enumerate(parts)} for k in ('params', 'model_state'))
        state = ModelState(params, rest, slots(cuts, end_states, batch['id']))
        key = evaluation_key(jax.random.wrap_key_data(jnp.asarray(state_here.key)), STREAM)
        loss, norms = jax.device_get(cross(state, batch, key))
        return [
            {
                'boundary': i + 1,
                'direction': ('forward', 'backward')[way],
                'loss': float(loss),
                'error': ratio(*map(float, norms[way][i])),
                'feedback': norm(
                    values((cuts[i].fwd, cuts[i].bwd)[way], end_states[way][i], sent[i])
                ),
                'bits': bits[i][way],
            }
            for i in range(len(cuts))
            for way in (0, 1)
        ]

    return probe


def crossing(
    exp: Experiment, likes: Sequence[Like]
) -> Callable[[ModelState, Batch, Array], tuple[Array, Tree]]:
    """``(state, batch, key) -> (loss, norms)``, both passes of one micro-batch.

    The norms are ``(||y - x||, ||x||)``, by direction and boundary.

    Args:
      exp: the experiment.
      likes: shape and dtype of what crosses each boundary.
    """
    cuts = tuple(Boundary(keeping(b.fwd), keeping(b.bwd)) for b in exp.model.boundaries)
    local = Local(model_of(exp, cuts)._replace(boundaries=cuts, num_microbatches=1))

    def run(state: ModelState, batch: Batch, key: Array) -> tuple[Array, Tree]:
        empty = [jnp.zeros(x.shape, x.dtype) for x in likes]
        with_tensors = lambda pairs: tuple(
            tuple(Kept(end, zero) for end in pair) for pair, zero in zip(pairs, empty, strict=True)
        )
        feedback = FeedbackState(*map(with_tensors, state.feedback))
        (loss, _), _, after = local.value_and_grad(state._replace(feedback=feedback), batch, key)
        return loss, [[norms(*pair) for pair in pairs] for pairs in after.feedback]

    return run


def norms(sent: Kept, seen: Kept) -> tuple[Array, Array]:
    """Norms of the error and of what was sent."""
    x, y = (jnp.ravel(end.tensor.astype(jnp.float32)) for end in (sent, seen))
    return jnp.linalg.norm(y - x), jnp.linalg.norm(x)


def keeping(channel: Channel) -> Channel:
    """The channel of a single crossing, whose ends also keep the tensor that crossed."""
    one = channel.slots.channel if channel.slots else channel

    def init(x: Like) -> tuple[Kept, Kept]:
        tx, rx = (Kept(state, jnp.zeros(x.shape, x.dtype)) for state in one.init(x))
        return tx, rx

    def send(x: Array, tx: Kept, ctx: Ctx) -> tuple[Payload, Kept]:
        message, state = one.send(x, tx.state, ctx)
        return message, Kept(state, x)

    def recv(message: Payload, rx: Kept, x: Like, ctx: Ctx) -> tuple[Array, Kept]:
        y, state = one.recv(message, rx.state, x, ctx)
        return y, Kept(state, y)

    spread = one.spread and (lambda rx, ctx: one.spread(rx.state, ctx))  # pyright: ignore
    return one._replace(
        init=init, send=send, recv=recv, shared_state=False, spread=spread,
        state_of=one.state_of or 'position',
    )  # fmt: skip


def ends(cuts: Sequence[Boundary], stages: Sequence[Feedback]) -> tuple[list[Ends], list[Ends]]:
    """The states of each boundary, forward and backward, given those of each stage."""
    pairs = list(itertools.pairwise(stages))
    links = [(a.right_tx, b.left_rx) for a, b in pairs], [(b.left_tx, a.right_rx) for a, b in pairs]
    channels = [b.fwd for b in cuts], [b.bwd for b in cuts]
    alone = lambda channel, pair: (pair[0], ()) if channel.shared_state else pair
    fwd, bwd = (list(map(alone, *way)) for way in zip(channels, links, strict=True))
    return fwd, bwd


def slots(cuts: Sequence[Boundary], states: Sequence[list[Ends]], ids: np.ndarray) -> FeedbackState:
    """The states with which micro-batch 0, the examples ``ids``, crosses."""

    def one(channel: Channel, pair: Ends) -> Ends:
        by_token, by_example = channel.state_of in BY_TOKEN, channel.state_of == 'example'
        of_slot = lambda a: a if by_token else a[ids if by_example else 0]
        tx, rx = jax.tree.map(of_slot, pair)
        return tx, tx if channel.shared_state else rx

    channels = [b.fwd for b in cuts], [b.bwd for b in cuts]
    return FeedbackState(*(tuple(map(one, *way)) for way in zip(channels, states, strict=True)))


def values(channel: Channel, pair: Ends, x: Like) -> list[Tree]:
    """The values of the states of a boundary in a direction, for tensors like ``x``."""
    return [channel.values(state, x) for state in pair if jax.tree.leaves(state)]


def norm(tree: Tree) -> float:
    """The Euclidean norm over all arrays of a tree.

    >>> norm((np.array([3.0]), (np.array([[4.0]]), ())))
    5.0
    """
    return math.hypot(*(float(np.linalg.norm(np.ravel(a))) for a in jax.tree.leaves(tree)))


def ratio(error: float, size: float) -> float:
    """``error / size``; where nothing was sent and nothing was seen there is no error.

    >>> ratio(1.0, 4.0), ratio(0.0, 0.0), ratio(1.0, 0.0)
    (0.25, 0.0, inf)
    """
    return error / size if size else math.inf if error else 0.0
