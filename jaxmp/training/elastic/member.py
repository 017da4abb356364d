"""`Member`: a replica among others that come and go, and gather messages in rounds.

A round belongs to a view of the switch. If a member leaves or another process comes meanwhile, all
send again in the next view. A member that has all messages of a round may have them alone, so it
gives them to those that have not: all agree on whose messages a result is made of. Whoever comes,
or comes back, waits until a member has applied a round and hands over the shared state. At the
start all wait for each other, and those with the most steps decide the state.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from jaxmp.net.address import ProcessGroupError
from jaxmp.net.group import DECISION
from jaxmp.net.peer import Peer
from jaxmp.net.views import View, ViewChangedError

T = TypeVar('T')
Gather = Callable[[bytes], list[bytes]]
Members = tuple[int, ...]


class BehindError(Exception):
    """The others go on without this replica, which has to join again."""


class Welcome(NamedTuple):
    """What a member is told when it joins.

    Attributes:
      step: the step at which it joins.
      state: the shared state; empty if it has that state already.
    """

    step: int
    state: bytes


class Member:
    """The place of one replica in an elastic run.

    Attributes:
      peer: the connection.
      replica: number of the replica.
      views: the members so far with the step of their first round, newest last.
    """

    def __init__(self, peer: Peer) -> None:
        """Has joined nobody yet."""
        self.peer, self.replica = peer, peer.process
        self.views: list[tuple[int, Members]] = []
        self._view, self._since = View(0, (), {}), dict[int, float]()  # who takes part after when
        self._front, self._leader, self._last = 0, self.replica, (0, list[bytes]())

    def join(self, step: int, digest: int, state: Callable[[], bytes]) -> Welcome:
        """Joins the run; returns when a member has sent the shared state, which can take a round.

        Args:
          step: number of steps of this replica's own state.
          digest: of the shared part of that state.
          state: the shared part, for those that lack it.

        Raises:
          ProcessGroupError: if the switch does not answer, or refuses this replica.
        """
        while True:
            with contextlib.suppress(ViewChangedError):
                return self._join(step, digest, state)

    def _join(self, step: int, digest: int, state: Callable[[], bytes]) -> Welcome:
        view = self._ready({'step': step, 'digest': digest})
        rounds, values = _rounds(view), view.values
        if rounds:
            leader, lack = _leader(rounds), {i for i in values if i not in rounds}
        else:
            leader = max(values, key=lambda i: (values[i]['step'], -i))
            lack = {i for i in values if values[i]['digest'] != values[leader]['digest']}
            if self.replica == leader:
                self._hand(view, lack, step, state)
        welcome = Welcome(values[leader].get('step', 0), b'')
        if self.replica in lack:
            head, content = self.peer.receive(view, leader, DECISION, 'state')
            welcome = Welcome(json.loads(bytes(head)), bytes(content))
        self._since = {i: values[i]['since'] if i in rounds else welcome.step for i in values}
        self._front = welcome.step
        self.views.append((welcome.step, view.members))
        return welcome

    def gathering(self, step: int, digest: int, run: Callable[[Members, Gather], T]) -> T:
        """The result of ``run`` with members that do not change while it runs.

        Args:
          step: number of the step after which all members gather.
          digest: of the shared part of what they gather, which must be the same at all members.
          run: ``(members, gather) -> result``, without side effects; it is called again if members
            change. ``gather`` sends a message and returns those of the members, in their order.

        Raises:
          BehindError: if the others go on without this replica.
        """
        while True:
            members = tuple(i for i, since in sorted(self._since.items()) if since < step)
            gather = functools.partial(self._gather, members, (step, digest), itertools.count())
            with contextlib.suppress(ViewChangedError):
                return run(members, gather)

    def _gather(
        self, members: Members, moment: tuple[int, int], calls: Iterator[int], message: bytes
    ) -> list[bytes]:
        (step, digest), tag = moment, f'message {next(calls)} of a round'
        mine, peer, view = json.dumps(digest).encode(), self.peer, self._view
        try:
            for other in members:
                if other != self.replica:
                    peer.send(view, other, step, tag, mine, message)
            one = lambda i: peer.receive(view, i, step, tag)
            rows = [one(i) if i != self.replica else [mine, message] for i in members]
        except ViewChangedError:
            return self._again(step, digest)
        except ProcessGroupError as error:
            raise BehindError(str(error)) from error
        digests = [bytes(row[0]) for row in rows]
        usual = max(digests, key=digests.count)
        if mine != usual:
            raise BehindError('its shared parameters differ from those of the others')
        if any(digest != usual for digest in digests):  # who is odd leaves
            return self._again(step, digest)
        self._last = step, [bytes(row[1]) for row in rows]
        return self._last[1]

    def _again(self, step: int, digest: int) -> list[bytes]:
        """The messages of the round, if others have them; else the round begins again.

        Raises:
          ViewChangedError: in the second case.
        """
        view = self._ready({'round': step, 'since': self._since[self.replica]})
        rounds = _rounds(view)
        self._front, self._leader = max(rounds.values()), _leader(rounds)
        self._since = {i: v['since'] if i in rounds else math.inf for i, v in view.values.items()}
        self.views.append((step, tuple(sorted(rounds))))
        past = lambda r: [i for i in sorted(rounds) if rounds[i] > r and self._since[i] < r]
        try:
            for i, r in rounds.items():
                if past(r)[:1] == [self.replica]:
                    self.peer.send(view, i, r, 'all messages', *self._last[1])
            if past(step):
                return [
                    bytes(m) for m in self.peer.receive(view, past(step)[0], step, 'all messages')
                ]
        except ViewChangedError:
            return self._again(step, digest)
        raise ViewChangedError('the members have changed')

    def applied(self, number: int, step: int, state: Callable[[], bytes]) -> None:
        """Admits those who wait, once all members have applied a round of their view.

        Args:
          number: of the last step.
          step: after which the last round that was applied has begun.
          state: the shared state, which the newcomers get.
        """
        since, view = self._since, self._view
        new = [i for i, s in since.items() if s == math.inf]
        if new and step >= self._front:
            since.update(dict.fromkeys(new, number))
            self.views.append((number, tuple(sorted(since))))
            if self.replica == self._leader:
                with contextlib.suppress(ViewChangedError):
                    self._hand(view, new, number, state)

    def _hand(self, view: View, to: Collection[int], step: int, state: Callable[[], bytes]) -> None:
        content = state() if to else b''
        for other in to:
            self.peer.send(view, other, DECISION, 'state', json.dumps(step).encode(), content)

    def _ready(self, value: dict[str, Any]) -> View:
        try:
            self._view = self.peer.ready(value)
        except ProcessGroupError as error:
            if self.views:
                raise BehindError(str(error)) from error
            raise
        return self._view

    def leave(self) -> None:
        """Leaves the run."""
        self.peer.close()


def _rounds(view: View) -> dict[int, int]:
    """The round in which each member is, newcomers excepted."""
    return {i: value['round'] for i, value in view.values.items() if 'round' in value}


def _leader(rounds: dict[int, int]) -> int:
    """The member that hands over the state: the first of those in the last round."""
    return min(i for i, step in rounds.items() if step == max(rounds.values()))
