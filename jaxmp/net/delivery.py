"""`Delivery`: messages between two processes, each kept until the other one says that it has it.

A message goes by the first of several paths that works. libzmq makes a lost connection again and
does not say what was lost with it. So a path is asked from time to time: its answer comes after
all that went before on the same path, and what is not there then was lost, and goes again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import zmq

from jaxmp.net.sockets import Head, put


@dataclass
class Path:
    """A way to a process.

    Attributes:
      name: ``'link'`` for a connection to it, ``'back'`` for one that it has made, or ``'switch'``.
      socket: by which messages leave.
      prefix: frames that say where they go.
      up: whether the process has answered on it, and does so in time.
      asked: number of questions so far.
      since: when the oldest question without an answer was asked.
    """

    name: str
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
    """The messages to and from one process, which are numbered anew in each view.

    Attributes:
      paths: the ways to the process, the best first; the last is never given up.
      sent: what is not confirmed, by number.
    """

    def __init__(self, this: str, other: str, last: Path) -> None:
        """Nothing is sent yet.

        Args:
          this: identity of this process.
          other: identity of the other one.
          last: the path by way of the switch.
        """
        self._words, self.paths = {'from': this, 'to': other}, [last]
        self._arrivals = Arrivals(0)
        self.begin(0)

    def begin(self, view: int) -> None:
        """Forgets what was sent in an earlier view."""
        self.sent, self._count = dict[int, Sent](), 0
        self._words = {**self._words, 'view': view}

    def send(self, words: Head, buffers: Sequence[Any]) -> None:
        """Sends a message."""
        self._put({**words, **self._words, 'kind': 'message', 'number': self._count}, buffers)
        self._count += 1

    def _put(self, words: Head, buffers: Sequence[Any]) -> None:
        sent = lambda path: put(path.socket, *path.prefix, words, *buffers)
        last = self.paths[-1]  # if a message is lost there too, an answer will tell
        path = next(p for p in self.paths if (p.up and sent(p)) or p is last)
        self.sent[words['number']] = Sent(words, buffers, path, path.asked)

    def _again(self, lost: Callable[[Sent], bool]) -> None:
        for sent in filter(lost, list(self.sent.values())):
            self._put(sent.words, sent.buffers)

    def confirm(self, answer: Head) -> None:
        """Forgets what has arrived; sends again what was lost.

        Args:
          answer: of `answer`, with the name of a path and how often it had been asked.
        """
        if answer['view'] != self._words['view']:
            return
        for number in [n for n in self.sent if n < answer['below'] or n in answer['and']]:
            del self.sent[number]
        for path in self.paths:
            if path.name == answer['path']:
                path.up, path.since = True, None
                self._again(lambda s, path=path: s.path is path and s.asked < answer['asked'])

    def look(self, now: float, patience: float) -> None:
        """Asks the paths that are not up, or by which something is under way."""
        *others, last = self.paths
        for path in others:
            if path.since is not None and now - path.since > patience:
                path.up, path.since = False, None
        self._again(lambda sent: not sent.path.up)
        for path in self.paths:
            if not path.up or any(sent.path is path for sent in self.sent.values()):
                path.asked += 1
                ask = {'kind': 'ask', 'path': path.name, 'asked': path.asked, **self._words}
                if put(path.socket, *path.prefix, ask):
                    path.since = path.since or now
                else:
                    path.up = path is last

    def answer(self, path: Path, words: Head) -> bool:
        """Says on ``path`` what has arrived, to a question or a message; whether that is new."""
        view, kind = words['view'], words['kind']
        if view > self._arrivals.view:
            self._arrivals = Arrivals(view)
        came = self._arrivals
        new = kind == 'message' and view == came.view and came.new(words['number'])
        asked = {'path': words.get('path'), 'asked': words.get('asked'), 'view': came.view}
        put(path.socket, *path.prefix, {**self._words, 'kind': 'has', **asked, **came.has()})
        return new


class Arrivals:
    """The numbers of the messages that came from one process in one view."""

    def __init__(self, view: int) -> None:
        """None yet."""
        self.view, self.below, self.others = view, 0, set[int]()

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

        >>> arrivals = Arrivals(1)
        >>> [arrivals.new(n) for n in (0, 2, 0)], arrivals.has()
        ([True, True, False], {'below': 1, 'and': [2]})
        """
        return {'below': self.below, 'and': sorted(self.others)}
