"""`Group`: what the processes of a view decide together, by small messages."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jaxmp.net.peer import Peer
from jaxmp.net.views import View

DECISION = -1  # the step of what all decide: whoever waits for it has done its other work


class Group:
    """The members of a view, seen from one of them; all must make the same calls.

    Attributes:
      peer: the connection.
      view: the members.
      index: number of this process.
      count: number of members.
      names: of all processes in messages.
    """

    def __init__(self, peer: Peer, view: View) -> None:
        """The members of ``view``."""
        self.peer, self.view = peer, view
        self.index, self.count, self.names = peer.process, len(view.members), peer.terms.names
        self._calls = 0

    def gathered(self, content: bytes) -> list[bytes]:
        """The bytes of all members, in their order.

        The first member gathers them, so that n members send 2 (n - 1) messages.
        """
        peer, view, (first, *others) = self.peer, self.view, self.view.members
        tag, self._calls = f'gather {self._calls}', self._calls + 1
        if self.index != first:
            peer.send(view, first, DECISION, tag, content)
            return [bytes(row) for row in peer.receive(view, first, DECISION, tag)]
        came = [peer.receive(view, other, DECISION, tag) for other in others]
        rows = [content, *(bytes(row) for [row] in came)]
        for other in others:
            peer.send(view, other, DECISION, tag, *rows)
        return rows

    def share(self, value: Any) -> list[Any]:
        """The JSON values of all members, in their order."""
        return [json.loads(row) for row in self.gathered(json.dumps(value).encode())]

    def gather(self, values: np.ndarray) -> np.ndarray:
        """The values of all members, ``(n, ...)``, the same in all.

        Args:
          values: a small array of the same shape and dtype in all.
        """
        rows = self.gathered(values.tobytes())
        return np.stack([np.frombuffer(row, values.dtype).reshape(values.shape) for row in rows])

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values of all members, in their order."""
        return np.sum(self.gather(values), 0)

    def barrier(self) -> None:
        """Waits until all members have come here."""
        self.gathered(b'')

    def any(self, asked: bool) -> bool:
        """Whether any member was asked, such as to stop."""
        return any(self.share(bool(asked)))

    def fail(self, cause: str) -> None:
        """Ends all members with ``cause``."""
        self.peer.fail(cause)

    def close(self) -> None:
        """Waits for all members, and leaves."""
        self.barrier()
        self.peer.close()
