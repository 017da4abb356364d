"""`Register`: who is present, who is in the view, and what the switch tells each process.

It has no sockets and no clock. `take` and `look` change it, and what they want to say is in `out`.

A process says each second that it is `here`, and what it does; `bye` when it has finished; `fail`
with a cause that ends all. A `spare` process asks for the number of one that does not come back. A
view begins when all who are present are ready, and ends when a member is lost or begins again, or
another process comes. After each message and each look, all are told what has changed. Each message
says all that is so, so that a lost one does no harm: a switch that was killed and started again
learns the view from its members.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jaxmp.net.blame import LOST, Work, blamed, clock, listed, nobody
from jaxmp.net.views import BEAT, GRACE, Terms

RETURN = 10.0  # seconds in which the members of a view come to a new switch
OFFER = 10.0  # seconds in which a spare process has to take the part that it was told
SUSPENDED = 5.0  # seconds without a look, after which this process was stopped itself
HANGS = 'it is suspended, hangs or swaps, or the network failed'

Message = dict[str, Any]


@dataclass
class Seat:
    """A process that is present.

    Attributes:
      name: of its connection, ``number.once``.
      last: its last message.
      heard: when that came.
      lost: when its connection was lost.
      rivals: other processes of the same number, and when each came.
      told: the state that it was told last, and when.
    """

    name: str
    last: Message
    heard: float
    lost: float | None = None
    rivals: dict[str, float] = field(default_factory=dict)
    told: tuple[Message, float] = {}, 0.0


class Register:
    """The processes of one run after another.

    Attributes:
      out: names and messages for them.
      number: of the view, or of the last one.
      on: whether a view is under way.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        """Nobody is present; ``say`` is called with a line for whatever happens."""
        self.say, self.number, self.seen = say, 0, 0.0
        self.out = deque[tuple[str, Message]]()
        self.failed = dict[str, str]()
        self._reset()

    def _reset(self) -> None:
        self.on, self.began, self.why, self.since = False, False, '', 0.0
        self.terms, self.about = Terms((), 0), Message()  # of the first that has come
        self.seats, self.left = dict[int, Seat](), set[int]()
        self.members = dict[int, list[Any]]()  # name, address and value
        self.gone, self.offered = dict[int, str](), dict[int, float]()  # to a spare process, when

    # What a process says.

    def take(self, name: str, message: Message, now: float) -> None:
        """Acts on a message of the process of that name."""
        kind, i = message['kind'], int(name.split('.')[0])
        if kind == 'here' and not 0 <= i < len(message['about']['names']):
            raise ValueError('the run has no process of this number')
        seated = i in self.seats and self.seats[i].name == name
        if name in self.failed:
            self.out.append((name, {'kind': 'failed', 'why': self.failed[name]}))
        elif kind == 'here':
            self._here(i, name, message, now)
        elif kind == 'fail' and seated and message['alone'] and self.began:
            self._remove(i, message['why'].removeprefix(f'{self._called(i)} '), now)
            self.fail(message['why'], name)
        elif kind == 'fail' and seated:
            self.fail(f'{self._called(i)}: {message["why"]}')
        elif kind == 'spare':
            self.out.append((name, {'kind': 'part', 'process': self._vacant(now)}))
        elif kind == 'bye':
            self.out.append((name, {'kind': 'bye'}))
            if seated:
                self._leave(i, now)
        self._settle(now)

    def _here(self, i: int, name: str, message: Message, now: float) -> None:
        """Gives a process its seat, or says why not."""
        about = message['about']
        if not self.about:
            self.terms = Terms(*(about[term] for term in Terms._fields))
            self.about, self.since = about, now
        if differ := {k for k in {*about, *self.about} if about.get(k) != self.about.get(k)}:
            pairs = (f'{k}={about.get(k)!r} (first: {self.about.get(k)!r})' for k in sorted(differ))
            why = f'was started with {", ".join(pairs)}; start all with the same settings'
            return self.fail(f'{self._called(i)} {why}', name)
        seat = self.seats.setdefault(i, Seat(name, message, now))
        if seat.name != name:
            first = seat.rivals.setdefault(name, now)
            if seat.lost is None and seat.heard > first + GRACE / 2:
                why = f'two processes are {self._called(i)}; give each its own number'
                return self.fail(why, name)
            seat.told = {}, 0.0  # to tell it something shows whether it is reachable
            if seat.lost is None:
                if now > first + GRACE:  # the other one says nothing, and may be dead
                    when = f'is given up, in {self.terms.silent - now + seat.heard:.0f} s'
                    why = f'this process waits until another one, {self._called(i)}, {when}'
                    self.out.append((name, {'kind': 'wait', 'why': f'{why}, and takes its place'}))
                return None
            self._remove(i, 'was started again', now)
            seat = self.seats[i] = Seat(name, message, now)
        seat.last, seat.heard, seat.lost = message, now, None
        if message['members'] and message['view'] > self.number:  # of a switch before this one
            self.on, self.began, self.since, self.left = True, True, now, set(message['left'])
            self.members = dict(message['members'])
            self.say(f'view {message["view"]} goes on at a new switch')
        self.number = max(self.number, message['view'])
        return None

    def _leave(self, i: int, now: float) -> None:
        """A process has finished."""
        member = self._inside(i)
        del self.seats[i]
        self.left.add(i)
        if not self.seats:
            self._reset()
        elif member and self.terms.least < len(self.terms.names):
            self._end(f'{self._called(i)} has left', now)

    # Views.

    def _ready(self, i: int) -> bool:
        """Whether a process waits for the view after the last one."""
        last = self.seats[i].last
        return last['ready'] and (last['view'] == self.number or not self._inside(i))

    def _begin(self, now: float) -> None:
        """Ends a view for whoever waits for the next; begins it if all present wait, and enough."""
        ready = sorted(filter(self._ready, self.seats))
        if not ready:
            return
        self._end(f'{listed(map(self._called, ready))} asks for the next view', now)
        patient = self.began or now - self.since > self.terms.start
        enough = self.terms.least if patient else len(self.terms.names)
        if len(ready) < enough or {i for i in self.seats if self._inside(i)} - {*ready}:
            return
        self.number, self.on, self.began = self.number + 1, True, True
        self.left, self.gone, self.offered = set(), {}, {}
        rows = ((i, self.seats[i]) for i in ready)
        self.members = {i: [s.name, s.last['address'], s.last['value']] for i, s in rows}
        self.say(f'view {self.number}: {listed(map(self._called, ready))}')

    def _end(self, why: str, now: float) -> None:
        """Ends the view, if one is under way."""
        if self.on:
            self.on, self.why, self.since = False, why, now
            self.say(f'view {self.number} has ended: {why}')

    def _remove(self, i: int, why: str, now: float) -> None:
        """Gives a process up."""
        member = self._inside(i)
        del self.seats[i]
        self.gone[i], self.since = f'{self._called(i)} {why}, at {clock(0)}', now
        if member:
            self._end(f'{self._called(i)} {why}', now)

    def _vacant(self, now: float) -> int | None:
        """A process that was not back in half of the time, if none is about to take its part."""
        late = not self.on and self.began and now - self.since > self.terms.back / 2
        waits = {i for i, since in self.offered.items() if now - since < OFFER}
        absent = sorted(self.gone.keys() - self.seats.keys() - waits) if late else []
        self.offered.update(dict.fromkeys(absent[:1], now))
        return absent[0] if absent else None

    def fail(self, why: str, only: str = '') -> None:
        """Ends all with a cause, or one process; before the first view one is as needed as all."""
        names = {only}
        if not (only and self.began):
            self.say(f'the run has ended: {why}')
            names |= {seat.name for seat in self.seats.values()}
            self._reset()
        for name in names - {''}:
            self.failed[name] = why
            self.out.append((name, {'kind': 'failed', 'why': why}))

    # Time.

    def look(self, now: float) -> None:
        """Gives up who is lost, is silent or does nothing."""
        if now - self.seen > SUSPENDED:
            for seat in self.seats.values():
                seat.heard = now
            self.since = now
        self.seen, silent = now, self.terms.silent
        for i, seat in list(self.seats.items()):
            if seat.lost is not None and now - seat.lost > GRACE:
                self._remove(i, LOST, now)
            elif now - seat.heard > silent:
                self._remove(i, f'was silent for {silent:g} s: {HANGS}', now)
        missing = [i for i in self.members if not (self._inside(i) or i in self.left)]
        if missing and now - self.since > RETURN:
            self._end(f'{listed(map(self._called, missing))} did not come to the new switch', now)
        self._watch(now)
        self._settle(now)

    def _watch(self, now: float) -> None:
        """Gives up those for whom nothing goes on; a line says what they owe."""
        working = {i: s.last['work'] for i, s in self.seats.items() if not s.last['ready']}
        work = {i: Work(*words) for i, words in working.items()}
        guilty, why = blamed(work, self.terms.names)
        if len(guilty) > 1:  # each may be waiting for the other
            self.fail(why)
        for i in guilty & self.seats.keys():
            name = self.seats[i].name
            self._remove(i, why.removeprefix(f'{self._called(i)} '), now)
            self.fail(why, name)

    def _count(self, now: float) -> None:
        """Ends all if those who are absent do not come."""
        if self.on or not 0 < len(self.seats) < self.terms.least:
            return
        absent = (self._called(i) for i in range(len(self.terms.names)) if i not in self.seats)
        gone, seconds = '; '.join(self.gone.values()), now - self.since
        if not self.began and seconds > self.terms.start:
            late = f'{listed(absent)} did not connect within {self.terms.start:g} s'
            self.fail(f'{late}; start all, or give all a longer --start-timeout')
        elif self.began and seconds >= self.terms.back:
            self.fail(gone + nobody(self.terms.back))

    def unreachable(self, name: str, now: float) -> None:
        """Takes down that a connection is lost."""
        for seat in self.seats.values():
            if seat.name == name and seat.lost is None:
                seat.lost = now

    # What a process is told.

    def _settle(self, now: float) -> None:
        """Begins what can begin, ends what cannot; tells all who do not know it yet."""
        self._begin(now)
        self._count(now)
        words = {'kind': 'state', 'view': self.number, 'on': self.on, 'why': self.why}
        state = {**words, 'left': sorted(self.left)}
        for seat in self.seats.values():
            last, when = seat.told
            if state != last or now - when > BEAT:  # which also finds connections that are lost
                seat.told, current = (state, now), seat.last['view'] == self.number
                members = [*self.members.items()] if self.on and not current else []
                self.out.append((seat.name, {**state, 'members': members}))

    def _inside(self, i: int) -> bool:
        """Whether a process that is present is a member, and not another one in its place."""
        return i in self.seats and self.seats[i].name == self.members.get(i, [''])[0]

    def _called(self, i: int) -> str:
        """The name of a process in messages."""
        return self.terms.names[i] if i < len(self.terms.names) else f'process {i}'
