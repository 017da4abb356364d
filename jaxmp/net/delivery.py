"""`Delivery`: messages between two processes, each kept until the other one says that it has it.

A message goes by the first of several ways that is open. libzmq makes a lost connection again and
does not say what was lost with it. So each way is asked from time to time: its answer comes after
all that went before on the same way, and what has no answer then was lost, and goes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jaxmp.net.messages import Head
from jaxmp.net.sockets import Buffer, put

Way = tuple[Any, ...]  # a socket, and the names that lead from there to the other process


class Sent(NamedTuple):
    """A message that is not confirmed: its parts and its way; None where none was open."""

    words: Head
    buffers: Sequence[Buffer]
    way: Way | None


class Delivery:
    """The messages to and from one process, which are numbered anew in each view.

    Attributes:
      ways: to the process, the best first.
      sent: what is not confirmed, by number.
    """

    def __init__(self, ways: Sequence[Way], view: int) -> None:
        """Nothing is sent yet."""
        self.ways, self._asked, self._arrivals = ways, 0, Arrivals(view)
        self.begin(view)

    def begin(self, view: int) -> None:
        """Forgets what was sent in an earlier view."""
        self.sent, self._count, self._view = dict[int, Sent](), 0, view

    def send(self, words: Head, buffers: Sequence[Buffer]) -> None:
        """Sends a message."""
        self._put({**words, 'kind': 'message', 'view': self._view, 'number': self._count}, buffers)
        self._count += 1

    def _put(self, words: Head, buffers: Sequence[Buffer]) -> None:
        words = {**words, 'asked': self._asked}
        way = next((way for way in self.ways if put(*way, words, *buffers)), None)
        self.sent[words['number']] = Sent(words, buffers, way)

    def _again(self, lost: Callable[[Sent], bool]) -> None:
        for sent in filter(lost, list(self.sent.values())):
            self._put(sent.words, sent.buffers)

    def look(self) -> None:
        """Asks the ways by which something is under way; what is on a closed one goes again."""
        self._asked += 1
        question = {'kind': 'ask', 'view': self._view, 'asked': self._asked}
        ways = {sent.way for sent in self.sent.values() if sent.way}
        answering = {way for way in ways if put(*way, question)}
        self._again(lambda sent: sent.way not in answering)

    def confirm(self, way: Way, answer: Head) -> None:
        """Forgets what has arrived by ``way``, and sends again what was lost there before."""
        if answer['view'] == self._view:
            self.sent.pop(answer['number'], None)
            self._again(lambda s: s.way == way and s.words['asked'] < answer['asked'])

    def answer(self, way: Way, words: Head) -> bool:
        """Says by ``way`` that a message or a question has come; whether it is a new message."""
        number = words.get('number')
        echo = {'view': words['view'], 'number': number, 'asked': words['asked']}
        put(*way, {'kind': 'has', **echo})
        if words['view'] > self._arrivals.view:
            self._arrivals = Arrivals(words['view'])
        current = words['view'] == self._arrivals.view
        return number is not None and current and self._arrivals.new(number)


class Arrivals:
    """The numbers of the messages that came from one process in one view.

    >>> arrivals = Arrivals(view=1)
    >>> [arrivals.new(number) for number in (0, 2, 0, 1, 2)]
    [True, True, False, True, False]
    """

    def __init__(self, view: int) -> None:
        """None yet."""
        self.view, self._below, self._later = view, 0, set[int]()

    def new(self, number: int) -> bool:
        """Whether a message has not come before; it has now."""
        if number < self._below or number in self._later:
            return False
        self._later.add(number)
        while self._below in self._later:
            self._later.remove(self._below)
            self._below += 1
        return True
