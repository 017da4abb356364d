"""What a micro-batch is: its cut of the batch, its randomness, its slot of the feedback state.

A step takes M equal cuts of its batch, in order. Gradients and loss are means over them; statistics
(BatchNorm) are normalised within a micro-batch and move from one to the next. A feedback buffer
belongs to a position in the batch, so each micro-batch has a slot of its own and no schedule
changes a number; M = 1 is the paper's global buffer. A channel with a state per example has one
table, which all micro-batches read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.boundary import Boundary, Links
from jaxmp.feedback import Channel
from jaxmp.wire import Ctx

Index = Any  # an int, or one that the program computes


def cut(a: Array, micros: int) -> Array:
    """``(B, ...)`` as ``(M, B / M, ...)``.

    Raises:
      ValueError: if M does not divide B.

    >>> cut(jnp.arange(6), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    if len(a) % micros:
        raise ValueError(
            f'a batch of {len(a)} does not divide into {micros} micro-batches; make the batch a '
            'multiple of their number'
        )
    return a.reshape(micros, -1, *a.shape[1:])


def context(ctx: Ctx, m: Index, micros: int) -> Ctx:
    """The context of micro-batch ``m``: sub-stream m of the step's key, and its cut of the ids.

    >>> context(Ctx(ids=jnp.arange(6)), 1, 3).ids.tolist()
    [2, 3]
    """
    ids = None if ctx.ids is None else cut(ctx.ids, micros)[m]
    return ctx.fold(m)._replace(ids=ids, microbatch=m)


def slots(channel: Channel, state: Any, micros: int) -> Any:
    """``state`` once a micro-batch, under a leading axis M; a state per example as it is."""
    if channel.per_example:
        return state
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (micros, *a.shape)), state)


def take(channel: Channel, kept: Any, m: Index) -> Any:
    """The state for micro-batch ``m`` of what `slots` made."""
    return kept if channel.per_example else jax.tree.map(lambda a: a[m], kept)


def put(channel: Channel, kept: Any, m: Index, state: Any) -> Any:
    """``kept`` with ``state`` for micro-batch ``m``."""
    if channel.per_example:
        return state
    return jax.tree.map(lambda a, b: a.at[m].set(b), kept, state)


def loop(body: Callable[[Any, Any], Any], carry: Any, parts: Any) -> Any:
    """The last carry of ``carry = body(carry, parts[m])`` over the leading axis M of ``parts``.

    A scan, except on CPU: there XLA brings only convolutions outside loops, even outside unrolled
    ones, into the form that is fast (ResNet-18 of width 8 steps 14 times faster so).

    >>> loop(lambda total, x: total + x, jnp.zeros(()), jnp.arange(4.0)).item()
    6.0
    """
    if jax.default_backend() != 'cpu':
        return jax.lax.scan(lambda carry, at: (body(carry, at), None), carry, parts)[0]
    for m in range(len(jax.tree.leaves(parts)[0])):
        carry = body(carry, jax.tree.map(lambda a: a[m], parts))  # noqa: B023
    return carry


def link_slots(cuts: Sequence[Boundary], links: Links, micros: int) -> Links:
    """`slots` of every boundary's states, both ways."""
    return _each(cuts, links, lambda c, state: slots(c, state, micros))


def take_links(cuts: Sequence[Boundary], kept: Links, m: Index) -> Links:
    """`take` of every boundary's states, both ways."""
    return _each(cuts, kept, lambda c, state: take(c, state, m))


def put_links(cuts: Sequence[Boundary], kept: Links, m: Index, links: Links) -> Links:
    """`put` of every boundary's states, both ways."""
    return _each(cuts, kept, lambda c, old, new: put(c, old, m, new), links)


def _each(cuts: Sequence[Boundary], links: Links, f: Any, *others: Links) -> Links:
    def side(name: str) -> tuple:
        columns = (getattr(l, name) for l in (links, *others))
        return tuple(f(getattr(c, name), *row) for c, *row in zip(cuts, *columns, strict=True))

    return Links(side('fwd'), side('bwd'))
