"""`ProcessGroup`: what the processes of a run send each other and decide together."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxmp.net.peer import Peer
from jaxmp.net.sockets import Buffer
from jaxmp.net.views import View, ViewChangedError

DECISION = -1  # the step of what all decide: whoever waits for it has done its other work
LONG = 1800.0  # seconds in which work other than steps has to go on
ALONE = View(0, (0,), {})
Address = tuple[View, int, str]  # view, step and tag of a message


class ProcessGroup:
    """The processes of a view, seen from one of them; all must make the same calls.

    Attributes:
      peer: the connection; None for a single process.
      view: the members.
      index: number of this process.
      count: number of processes.
      names: of all processes in messages.
      step: the step that has begun.
      after: called when this process has left.
    """

    def __init__(self, peer: Peer | None = None, view: View = ALONE) -> None:
        """The members of ``view``; by default this process alone."""
        self.peer, self.view, self.after = peer, view, list[Callable[[], object]]()
        self.index, self.count = peer.process if peer else 0, len(view.members)
        self.names = peer.terms.names if peer else ('this process',)
        self._decisions = 0
        self.begin(0)

    # Messages.

    def begin(self, step: int) -> None:
        """Says that what follows belongs to a step; all begin the same steps."""
        self.step, self._calls = step, Counter[str]()

    def again(self) -> None:
        """Waits for the next view, in which all make their calls from the first one on.

        Raises:
          ProcessGroupError: if the run has ended, as where a process that is lost does not return.
        """
        assert self.peer
        self.view, self._decisions = self.peer.ready('again'), 0
        self.begin(0)

    def address(self, tag: str, place: tuple[int, int] | None = None) -> Address:
        """The address of the next message under ``tag``, which both its ends count.

        Args:
          tag: says what is sent.
          place: step and number of a message that both its ends know by them; it is not counted.
        """
        if place:
            return self.view, place[0], f'{tag} micro-batch {place[1]}'
        self._calls[tag] += 1
        return self.view, self.step, f'{tag} {self._calls[tag]}'

    def send(self, to: int, address: Address, *buffers: Buffer) -> None:
        """Sends buffers, which must not change until they have arrived; does not wait."""
        assert self.peer
        view, step, tag = address
        self.peer.send(view, to, step, tag, *buffers)

    def receive(self, source: int, address: Address) -> list[memoryview]:
        """The buffers of a message, when they are there."""
        assert self.peer
        view, step, tag = address
        return self.peer.receive(view, source, step, tag)

    def swapped(self, members: Sequence[int], tag: str, content: bytes) -> list[memoryview]:
        """The bytes of some members, of which this process is one, in their order.

        Each sends its own to each other one.
        """
        address = self.address(tag)
        for other in members:
            if other != self.index:
                self.send(other, address, content)
        one = lambda i: memoryview(content) if i == self.index else self.receive(i, address)[0]
        return [one(i) for i in members]

    # Decisions.

    def to_first(self, pieces: Sequence[Buffer]) -> list[Sequence[Buffer]] | None:
        """The pieces of all members at the first one; None at the others."""
        (first, *others), address = self.view.members, self._decision()
        if self.index == first:
            return [pieces, *(self.receive(i, address) for i in others)]
        self.send(first, address, *pieces)
        return None

    def from_first(self, rows: Sequence[Sequence[Buffer]] | None) -> Sequence[Buffer]:
        """The pieces, of those by member that the first one has, that are for this process."""
        (first, *others), address = self.view.members, self._decision()
        if rows is None:
            return self.receive(first, address)
        for other, pieces in zip(others, rows[1:], strict=True):
            self.send(other, address, *pieces)
        return rows[0]

    def _decision(self) -> Address:
        self._decisions += 1
        return self.view, DECISION, f'decision {self._decisions}'

    def asked(self, content: bytes) -> Callable[[], list[bytes]]:
        """What gives the bytes of all members, in their order, once it is called; nothing waits.

        The first member gathers them, so that n members send 2 (n - 1) messages.
        """
        (first, *others), up, down = self.view.members, self._decision(), self._decision()
        if self.index != first:
            self.send(first, up, content)
            return lambda: list(map(bytes, self.receive(first, down)))

        def gather() -> list[bytes]:
            rows = [content, *(bytes(self.receive(i, up)[0]) for i in others)]
            for other in others:
                self.send(other, down, *rows)
            return rows

        return gather

    def gathered(self, content: bytes) -> list[bytes]:
        """The bytes of all members, in their order."""
        return self.asked(content)()

    def share(self, value: Any) -> list[Any]:
        """The JSON values of all members, in their order."""
        return [json.loads(row) for row in self.gathered(json.dumps(value).encode())]

    def total(self, values: np.ndarray) -> np.ndarray:
        """The sum of the values of all members, in their order.

        Args:
          values: a small array of the same shape and dtype in all.
        """
        return self.totalled(values)()

    def totalled(self, values: np.ndarray) -> Callable[[], np.ndarray]:
        """What gives `total` once it is called; nothing waits."""
        rows = self.asked(values.tobytes())
        of = lambda row: np.frombuffer(row, values.dtype).reshape(values.shape)
        return lambda: np.sum([of(row) for row in rows()], 0)

    def barrier(self) -> None:
        """Waits until all members have come here."""
        self.gathered(b'')

    # Ends.

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float = LONG) -> Iterator[None]:
        """Announces what is done within a context; see `Peer.announce`."""
        before = self.peer.announce(name, seconds) if self.peer else None
        try:
            yield
        finally:
            if self.peer and before:
                self.peer.announce(*before)

    def fail(self, cause: str, follows: bool = False) -> None:
        """Ends all members with ``cause``; see `Peer.fail`. It does nothing in a single process."""
        if self.peer:
            self.peer.fail(cause, follows)

    def close(self) -> None:
        """Waits for all members that are still there, and leaves."""
        if self.peer:
            with contextlib.suppress(ViewChangedError):
                self.barrier()
            self.peer.close()
            for end in self.after:
                end()
