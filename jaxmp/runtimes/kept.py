"""`Kept`: messages of activations that never change, sent once and kept on the receiver's disk.

Where nothing before a boundary is trained, nothing there is random, and what a codec makes of an
example is the same beside any others, an example crosses the boundary as the same bits in every
epoch. `varies` and `draws` say where that is not so.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval
from jaxtyping import Array, PyTree

from jaxmp.boundary import Boundary
from jaxmp.wire import Ctx, Like, Payload, nbytes


class Kept:
    """The messages of a boundary by example; each process notes which have been sent.

    Attributes:
      seen: of each example, whether its message has crossed.
    """

    def __init__(self, examples: int, rows: int, like: Payload | None) -> None:
        """Keeps nothing yet.

        Args:
          examples: their number.
          rows: examples of a message.
          like: shapes of a message, where it is received.
        """
        self.seen, self._rows, self._like = np.zeros(examples, bool), rows, like
        if like is not None:
            size = nbytes(like) // rows
            with tempfile.TemporaryFile() as file:  # the array holds it when it is closed
                file.truncate(examples * size)
                self._table = np.memmap(file, np.uint8, 'r+', shape=(examples, size))

    def known(self, ids: np.ndarray) -> frozenset[int]:
        """The micro-batches, of the examples ``ids`` of a step, whose messages have all crossed."""
        rows = self.seen[ids].reshape(-1, self._rows)
        return frozenset(np.flatnonzero(rows.all(1)).tolist())

    def put(self, ids: np.ndarray, message: Payload) -> None:
        """Keeps a message that was received."""
        leaves = [np.asarray(a).reshape(self._rows, -1) for a in jax.tree.leaves(message)]
        parts = [np.ascontiguousarray(a).view(np.uint8) for a in leaves]
        self._table[ids] = np.concatenate(parts, 1)

    def take(self, ids: np.ndarray) -> Payload:
        """The message of examples that have crossed."""
        leaves, form = jax.tree.flatten(self._like)
        widths = [math.prod(a.shape) * a.dtype.itemsize // self._rows for a in leaves]
        parts = np.split(self._table[ids], np.cumsum(widths)[:-1], axis=1)
        arrays = [
            np.ascontiguousarray(part).view(a.dtype).reshape(a.shape)
            for part, a in zip(parts, leaves, strict=True)
        ]
        return jax.tree.unflatten(form, arrays)


def varies(cut: Boundary, x: Like) -> str:
    """Why the message of an example differs from time to time; empty if it never does.

    Args:
      cut: the boundary; its forward channel is tried on random tensors.
      x: shape and dtype of a tensor that crosses it.
    """
    state, _ = cut.fwd.init(x)
    if jax.tree.leaves(state):
        return f'{cut.fwd} has a state'
    if cut.fwd.needs - {'key'}:
        return f'{cut.fwd} reads {", ".join(sorted(cut.fwd.needs - {"key"}))} beside the activation'
    send = jax.jit(lambda x, key: cut.send('fwd', x, state, Ctx(key))[0])
    key, other = jax.random.key(0), jax.random.key(1)
    draw = lambda i: jax.random.normal(jax.random.key(i), x.shape, x.dtype)
    a, b = draw(2), draw(3) * 5
    mixed = jnp.concatenate([a[:1], b[1:]])
    rows = lambda x, key: [_by_row(leaf, len(x)) for leaf in jax.tree.leaves(send(x, key))]
    if not _equal(rows(a, key), rows(a, other)):
        return f'{cut.fwd} is random'
    of_a, of_b, of_both = (rows(x, key) for x in (a, b, mixed))
    if any(r is None for r in of_a) or not (
        _equal([r[:1] for r in of_a], [r[:1] for r in of_both])
        and _equal([r[1:] for r in of_b], [r[1:] for r in of_both])
    ):
        return (
            f'what {cut.fwd} makes of an example depends on the others of its micro-batch; '
            f'per_sample({cut.fwd}) would not'
        )
    return ''


def draws(f: Callable[..., PyTree], key: Array, *args: PyTree) -> bool:
    """Whether the result of ``f(key, *args)`` depends on the key, as its trace says."""
    traced = jax.make_jaxpr(f)(key, *args).jaxpr
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return used[0]


def _by_row(leaf: Array, rows: int) -> Any:
    """An array of a message with an axis of examples first, or None if it has none."""
    if leaf.size % rows:
        return None
    return np.asarray(leaf).reshape(rows, -1)


def _equal(a: Sequence[np.ndarray], b: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
