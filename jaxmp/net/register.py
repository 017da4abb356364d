"""`Register`: who is present, who is in the view, and what the switch tells each process.

It has no sockets and no clock. `take` and `look` change it, and what they want to say is in `out`.

A process says `hello` until it is told the state, and whenever it is asked `who` it is; a `beat`
each second with the work that it does; `bye` when it has finished; `fail` with a cause that ends
all. A view begins when all who are present are ready, and ends when one of its members is lost or
begins again. Messages only repeat what is so, so that a lost one does no harm: a switch that was
killed and started again learns view and members from those who were in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jaxmp.net.views import BEAT, Terms, Wait, Work, blamed, clock, listed

GRACE = 3.0  # seconds in which a lost connection is made again
RETURN = 10.0  # seconds in which the members of a view come to a new switch
SUSPENDED = 5.0  # seconds without a look, after which this process was stopped itself

Message = dict[str, Any]


@dataclass
class Seat:
    """A process that is present.

    Attributes:
      identity: of its connection.
      address: at which other processes may reach it directly.
      heard: when it last gave a sign of life.
      work: what it does.
      ready: whether it waits for the next view.
      value: what it says to the others then.
      lost: when its connection was lost.
      rival: another process of the same number, and when it came.
    """

    identity: bytes
    address: str
    heard: float
    work: Work
    ready: bool = False
    value: Any = None
    lost: float | None = None
    rival: tuple[bytes, float] | None = None


class Register:
    """The processes of one run after another.

    Attributes:
      out: identities and messages for them.
      number: of the view, or of the last one.
      on: whether a view is under way.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        """Nobody is present; ``say`` is called with a line for whoever comes or goes."""
        self.say, self.number = say, 0
        self.out: deque[tuple[bytes, Message]] = deque()
        self.failed: dict[bytes, str] = {}
        self.seen = self.told = 0.0
        self._reset()

    def _reset(self) -> None:
        self.on, self.began, self.why = False, False, ''
        self.terms: Terms | None = None
        self.about: Message = {}
        self.seats: dict[int, Seat] = {}
        self.members: dict[int, list[str]] = {}  # identity and address
        self.values: dict[int, Any] = {}
        self.gone: dict[int, str] = {}
        self.left: set[int] = set()
        self.since = 0.0

    # What a process says.

    def take(self, identity: bytes, message: Message, now: float) -> None:
        """Acts on a message of the process that has ``identity``, ``number.once``."""
        if identity in self.failed:
            return self.out.append((identity, {'kind': 'failed', 'why': self.failed[identity]}))
        kind, i = message['kind'], int(identity.split(b'.')[0])
        seat = self.seats.get(i)
        if kind == 'hello':
            return self._greet(i, identity, message, now)
        if seat is None or seat.identity != identity:
            answer = {'kind': 'bye'} if kind == 'bye' else {'kind': 'who'}
            return self.out.append((identity, answer))
        if kind == 'fail':
            return self.fail(f'{self._name(i)}: {message["why"]}')
        if kind == 'bye':
            return self._leave(i, now)
        return self._beat(i, message, now)

    def _beat(self, i: int, message: Message, now: float) -> None:
        seat = self.seats[i]
        seat.heard, seat.lost = now, None
        if seat.rival and now - seat.rival[1] > GRACE / 2:
            two = f'two processes are {self._name(i)}; give each its own number'
            self._refuse(seat.rival[0], two)
            seat.rival = None
        if message['ready'] != seat.ready:
            return self.out.append((seat.identity, {'kind': 'who'}))
        seat.work = _work(message)
        return self._tell(i, full=True) if message['view'] != self.number else None

    def _greet(self, i: int, identity: bytes, hello: Message, now: float) -> None:
        """Gives a process its seat, or says why not."""
        terms = Terms(tuple(hello['terms'][0]), *hello['terms'][1:])
        about = {**hello['about'], **terms._asdict()}
        if self.terms is None:
            self.terms, self.about, self.since = terms, about, now
        if differ := {k for k in {*about, *self.about} if about.get(k) != self.about.get(k)}:
            said = (f'{k}={about.get(k)!r} (first: {self.about.get(k)!r})' for k in sorted(differ))
            return self._refuse(
                identity,
                f'{self._name(i)} was started with {", ".join(said)}; start all with the same '
                'settings',
            )
        seat = self.seats.get(i)
        if seat and seat.identity != identity:
            if seat.lost is None:
                seat.rival = seat.rival or (identity, now)
                return self._tell(i)
            self._remove(i, 'was started again', now)
        rest = hello['ready'], hello['value']
        self.seats[i] = Seat(identity, hello['address'], now, _work(hello), *rest)
        seat, view = self.seats[i], hello['view']
        if hello['members'] and view > self.number:  # this switch is newer than the view
            self.on, self.began, self.since, self.left = True, True, now, set(hello['left'])
            self.members = {int(k): member for k, member in hello['members'].items()}
            self.values = {int(k): value for k, value in hello['values'].items()}
            self.say(f'view {view} goes on at a new switch')
        elif self.on and seat.ready and self._inside(i) and view == self.number:
            self._end(f'{self._name(i)} begins again', now, again=i)
        self.number = max(self.number, view)
        self._begin(now)
        return self._tell(i, full=True)

    def _refuse(self, identity: bytes, why: str) -> None:
        """Turns a process away; before the first view this ends all, as one would be missing."""
        self.failed[identity] = why
        self.out.append((identity, {'kind': 'failed', 'why': why}))
        if not self.began:
            self.fail(why)

    def _leave(self, i: int, now: float) -> None:
        """A process has finished."""
        assert self.terms
        identity, member = self.seats.pop(i).identity, self.on and i in self.members
        self.out.append((identity, {'kind': 'bye'}))
        if not self.seats:
            return self._reset()
        self.left.add(i)
        if member and self.terms.least < len(self.terms.names):
            self._end(f'{self._name(i)} has left', now)
        else:
            self._tell_all()
        return self._begin(now)

    # Views.

    def _begin(self, now: float) -> None:
        """Begins a view if all who are present are ready, and are enough; a newcomer ends one."""
        if new := [i for i in self.seats if self.seats[i].ready and not self._inside(i)]:
            self._end(f'{listed(map(self._name, new))} came', now)
        ready = {i: seat for i, seat in sorted(self.seats.items()) if seat.ready}
        busy = self.members.keys() & self.seats.keys() - ready.keys()
        if self.on or self.terms is None or not ready or busy:
            return
        patient = self.began or now - self.since > self.terms.start
        if len(ready) < (self.terms.least if patient else len(self.terms.names)):
            return
        self.number, self.on, self.began = self.number + 1, True, True
        self.members = {i: [seat.identity.decode(), seat.address] for i, seat in ready.items()}
        self.values = {i: seat.value for i, seat in ready.items()}
        self.left, self.gone = set(), {}
        for seat in ready.values():
            seat.ready = False
        self.say(f'view {self.number}: {listed(map(self._name, ready))}')
        self._tell_all(full=True)

    def _end(self, why: str, now: float, again: int | None = None) -> None:
        """Ends the view; its members, but one who begins ``again``, are not ready for the next."""
        if self.on:
            self.on, self.why, self.since = False, why, now
            for i, seat in self.seats.items():
                seat.ready = seat.ready and (i == again or not self._inside(i))
            self.say(f'view {self.number} has ended: {why}')
            self._tell_all()

    def _remove(self, i: int, why: str, now: float) -> None:
        """Gives a process up."""
        del self.seats[i]
        self.gone[i] = f'{why}, at {clock(0)}'
        if self.on and i in self.members:
            self._end(f'{self._name(i)} {why}', now)
        elif not self.on:
            self.since = now

    def fail(self, why: str) -> None:
        """Ends all with a cause."""
        self.say(f'the run has ended: {why}')
        for seat in self.seats.values():
            self.failed[seat.identity] = why
            self.out.append((seat.identity, {'kind': 'failed', 'why': why}))
        self._reset()

    # Time.

    def look(self, now: float) -> None:
        """Gives up who is lost, silent or does nothing, and begins what can begin."""
        if now - self.seen > SUSPENDED:
            for seat in self.seats.values():
                seat.heard = now
            self.since = now
        self.seen = now
        if self.terms is None:
            return
        for i, seat in list(self.seats.items()):
            if seat.lost is not None and now - seat.lost > GRACE:
                killed = 'it was killed, ran out of memory, or the network failed'
                self._remove(i, f'has lost its connection: {killed}', now)
            elif now - seat.heard > self.terms.silent:
                silent = 'it is suspended, hangs or swaps, or the network failed'
                self._remove(i, f'was silent for {self.terms.silent:g} s: {silent}', now)
        self._watch(now)
        missing = [i for i in self.members if not (self._inside(i) or i in self.left)]
        if self.on and missing and now - self.since > RETURN:  # only where it is older than this
            self._end(f'{listed(map(self._name, missing))} did not come to the new switch', now)
        self._begin(now)
        self._count(now)
        if now - self.told > BEAT:  # which also finds the connections that are lost
            self.told = now
            self._tell_all()

    def _watch(self, now: float) -> None:
        """Gives up those for whom nothing goes on; a line says what they owe."""
        assert self.terms
        work = {i: seat.work for i, seat in self.seats.items() if not seat.ready}
        guilty, why = blamed(work, self.terms.names)
        if len(guilty) > 1:  # each may be waiting for the other
            self.fail(why)
        for i in guilty & self.seats.keys():
            identity = self.seats[i].identity
            self.failed[identity] = why
            self.out.append((identity, {'kind': 'failed', 'why': why}))
            self._remove(i, why.removeprefix(f'{self._name(i)} '), now)

    def _count(self, now: float) -> None:
        """Ends all if those who are absent do not come."""
        if self.on or self.terms is None or not self.seats:
            return
        absent = [i for i in range(len(self.terms.names)) if i not in self.seats]
        names = listed(map(self._name, absent)) if absent else ''
        if len(self.seats) >= self.terms.least:
            return
        if not self.began and now - self.since > self.terms.start:
            self.fail(f'{names} did not connect within {self.terms.start:g} s')
        elif self.began and now - self.since > self.terms.back:
            why = '; '.join(f'{self._name(i)} {why}' for i, why in sorted(self.gone.items()))
            self.fail(f'{why}; nobody came in its place within {self.terms.back:g} s')

    def unreachable(self, identity: bytes, now: float) -> None:
        """Takes down that a connection is lost."""
        for seat in self.seats.values():
            if seat.identity == identity and seat.lost is None:
                seat.lost = now

    # What a process is told.

    def _tell_all(self, full: bool = False) -> None:
        for i in self.seats:
            self._tell(i, full)

    def _tell(self, i: int, full: bool = False) -> None:
        """Tells a process the state, in full where it does not know the view."""
        left: Iterable[int] = sorted(self.left)
        state = {'kind': 'state', 'view': self.number, 'on': self.on, 'why': self.why}
        more = {'members': self.members, 'values': self.values} if full and self.on else {}
        self.out.append((self.seats[i].identity, {**state, 'left': [*left], **more}))

    def _inside(self, i: int) -> bool:
        """Whether a process that is present is a member, and not another one in its place."""
        seat, member = self.seats.get(i), self.members.get(i)
        return bool(seat and member and seat.identity.decode() == member[0])

    def _name(self, i: int) -> str:
        names = self.terms.names if self.terms else ()
        return names[i] if i < len(names) else f'process {i}'


def _work(message: Message) -> Work:
    idle, phase, limit, wait = message['work']
    return Work(idle, phase, limit, wait and Wait(*wait))
