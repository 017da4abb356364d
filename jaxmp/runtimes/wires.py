"""`Wires`: the messages of all links of one direction, moved by few collective-permutes.

Links whose messages have the same dtype and size share a collective-permute, other links have their
own, and no message is padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxmp.boundary.transport import one_piece
from jaxmp.wire import Payload

AXIS = 'stage'
Messages = tuple[Array, ...]  # one flat message per group of links


class Wires:
    """The links of one direction, grouped by the size of their messages."""

    def __init__(self, messages: Sequence[Payload], step: int) -> None:
        """Groups the links.

        Args:
          messages: shapes of each link's message.
          step: 1 forward, -1 backward.
        """
        self._step, self._messages = step, messages
        pieces = [jax.eval_shape(_flat, m) for m in messages]
        keys = [(str(p.dtype), p.size) for p in pieces]
        self._sizes = list(dict.fromkeys(keys))
        self.group = [self._sizes.index(k) for k in keys]

    def empty(self) -> Messages:
        """Zeros in every group."""
        return tuple(jnp.zeros(size, dtype) for dtype, size in self._sizes)

    def write(self, link: int, message: Payload) -> Messages:
        """``message`` of ``link`` in its group, zeros in the others."""
        group = self.group[link]
        return tuple(_flat(message) if i == group else a for i, a in enumerate(self.empty()))

    def read(self, link: int, arrived: Messages) -> Payload:
        """The message of ``link``; inverse of `write`."""
        empty = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), self._messages[link])
        piece, back = one_piece(empty)
        return back(arrived[self.group[link]].reshape(piece.shape))

    def move(self, sent: Messages) -> Messages:
        """The messages that arrive at each device: a collective-permute per group."""
        return tuple(lax.ppermute(a, AXIS, self._pairs(i)) for i, a in enumerate(sent))

    def _pairs(self, group: int) -> list[tuple[int, int]]:
        """Source and target stage of a group's links."""
        ends = [(l, l + 1) for l, g in enumerate(self.group) if g == group]
        return ends if self._step > 0 else [(b, a) for a, b in ends]


def _flat(message: Payload) -> Array:
    return one_piece(message)[0].reshape(-1)
