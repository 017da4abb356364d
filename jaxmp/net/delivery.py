"""`Delivery`: messages to one process, each kept until that process says that it has it.

A message goes by the first of several paths that works. libzmq makes a lost connection again and
does not say what was lost with it. So a path is asked from time to time: its answer comes after
all that went before on the same path, and what is not there then was lost, and goes again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from jaxmp.net.sockets import Head, put


@dataclass
class Path:
    """A way to a process.

    Attributes:
      socket: by which messages leave.
      prefix: frames that say where they go.
      up: whether the process has answered on it, and does so in time.
      asked: number of questions so far.
      since: when the oldest question without an answer was asked.
    """

    socket: zmq.Socket
    prefix: tuple[bytes, ...] = ()
    up: bool = False
    asked: int = 0
    since: float | None = None


class Sent(NamedTuple):
    """A message that is not confirmed: its parts, its path, and how often that had been asked."""

    words: Head
    buffers: Sequence[Any]
    path: Path
    asked: int


class Delivery:
    """The messages to one process in one view."""

    def __init__(self, paths: Callable[[], Mapping[str, Path]], words: Head) -> None:
        """Nothing is sent yet.

        Args:
          paths: the ways to the process by name, the best first; the last is never given up.
          words: what the head of each question has to say.
        """
        self.paths, self._words = paths, words
        self.sent: dict[int, Sent] = {}
        self._count = 0

    def send(self, words: Head, buffers: Sequence[Any]) -> None:
        """Sends a message."""
        self._put({**words, 'number': self._count}, buffers)
        self._count += 1

    def _put(self, words: Head, buffers: Sequence[Any]) -> None:
        *others, last = self.paths().values()
        sent = lambda path: put(path.socket, *path.prefix, words, *buffers)
        path = next((path for path in others if path.up and sent(path)), None)
        if path is None:  # if this is lost too, an answer will tell
            path, _ = last, sent(last)
        self.sent[words['number']] = Sent(words, buffers, path, path.asked)

    def _again(self, lost: Callable[[Sent], bool]) -> None:
        for sent in filter(lost, list(self.sent.values())):
            self._put(sent.words, sent.buffers)

    def confirm(self, answer: Head) -> None:
        """Forgets what has arrived; sends again what was lost.

        Args:
          answer: of `Arrivals.has`, and for a question its path and number.
        """
        for number in [n for n in self.sent if n < answer['below'] or n in answer['and']]:
            del self.sent[number]
        if path := self.paths().get(answer['path']):
            path.up, path.since = True, None
            self._again(lambda sent: sent.path is path and sent.asked < answer['asked'])

    def look(self, now: float, patience: float) -> None:
        """Asks the paths that are not up, or by which something is under way."""
        *others, last = self.paths().items()
        for _, path in others:
            if path.since is not None and now - path.since > patience:
                path.up, path.since = False, None
        self._again(lambda sent: not sent.path.up)
        for name, path in (*others, last):
            if not path.up or any(sent.path is path for sent in self.sent.values()):
                path.asked += 1
                ask = {'kind': 'ask', 'path': name, 'asked': path.asked, **self._words}
                if put(path.socket, *path.prefix, ask):
                    path.since = path.since or now
                elif name != last[0]:
                    path.up = False


class Arrivals:
    """The numbers of the messages that came from one process in one view."""

    def __init__(self) -> None:
        """None yet."""
        self.below, self.others = 0, set[int]()

    def new(self, number: int) -> bool:
        """Whether a message has not come before; it has now."""
        if number < self.below or number in self.others:
            return False
        self.others.add(number)
        while self.below in self.others:
            self.others.remove(self.below)
            self.below += 1
        return True

    def has(self) -> Head:
        """What has come: all below a number, and others.

        >>> arrivals = Arrivals()
        >>> [arrivals.new(n) for n in (0, 2, 0)], arrivals.has()
        ([True, True, False], {'below': 1, 'and': [2]})
        """
        return {'below': self.below, 'and': sorted(self.others)}
