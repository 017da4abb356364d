"""`settled`: a message that is not finite leaves the state of an end as it was.

A crossing is a transaction. Without it one NaN would stay in an error or in a buffer for ever, and
a step that the training skips would have changed what the two ends remember.
"""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jaxmp.feedback.channel import BY_TOKEN, Channel, EndState


def settled(channel: Channel, after: EndState, before: EndState) -> EndState:
    r"""The state of an end of ``channel`` after a crossing, all of it or nothing.

    .. math:: s \leftarrow s' \text{ if } s' \text{ is finite, else } s

    Both ends of a channel with a shared state decide alike, since they have the same ``s'``. If the
    state is of examples, each of them decides for itself. A channel with slots or with a table of
    tokens has settled what it stored, and its memory is not read here.

    Args:
      channel: the channel.
      after: the state that its ``send`` or ``recv`` returned.
      before: the state that it was given.

    >>> import jaxmp
    >>> rule, e = jaxmp.ef(jaxmp.top_k(0.5)), jnp.array([[1.0, 2.0]])
    >>> after = rule.send(jnp.array([[jnp.nan, 3.0]]), e, jaxmp.Ctx())[1]
    >>> after.tolist(), settled(rule, after, e).tolist()
    ([[nan, 5.0]], [[1.0, 2.0]])
    """
    if channel.slots or channel.state_of in BY_TOKEN:
        return after
    return kept_if(finite(after, rows=channel.state_of == 'example'), after, before)


def finite(tree: PyTree, rows: bool = False) -> Bool[Array, '...']:
    """Whether all numbers of a tree are finite; with ``rows`` of each row of its arrays.

    A sum of zeros, which takes half the time of reducing `jnp.isfinite` on a CPU.
    """
    floats = [a for a in jax.tree.leaves(tree) if jnp.issubdtype(a.dtype, jnp.inexact)]
    zeros = (jnp.sum(jnp.multiply(a, 0), tuple(range(int(rows), a.ndim))) == 0 for a in floats)
    return functools.reduce(operator.and_, zeros, jnp.array(True))


def kept_if(sound: Bool[Array, '...'], after: PyTree, before: PyTree) -> PyTree:
    """``after``, or ``before`` where it is not sound; that is one truth value, or one per row."""
    shape = lambda a: sound.shape + (1,) * (a.ndim - sound.ndim)
    return jax.tree.map(lambda a, b: jnp.where(sound.reshape(shape(a)), a, b), after, before)
