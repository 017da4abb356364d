"""`Peer`: the connection of one process to all others, by the switch and directly where it can.

One thread has all sockets. Messages are addressed by view, step and tag, so that their order does
not matter; each address is used once. A process only has to reach the port of the switch. It also
listens at a port of its own, and messages take the shorter way as soon as that is open.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import zmq

from jaxmp.net.address import ProcessGroupError, reach, tell
from jaxmp.net.blame import LOST, Work, clock, nobody, stepped
from jaxmp.net.delivery import Delivery
from jaxmp.net.keys import Keys
from jaxmp.net.messages import BETWEEN, OF_SWITCH, Head, read
from jaxmp.net.sockets import SWITCH, Buffer, Line, Sockets, address_of, joined, pieces, put, url
from jaxmp.net.switch import DATA
from jaxmp.net.views import BEAT, GRACE, LEAVING, Terms, View, ViewChangedError

ANSWER = 15.0  # seconds in which a switch that listens answers the first time
CUT = 4  # a way is given up after this part of the time after which a process is
T = TypeVar('T')
Place = tuple[str, str, Any]  # of a member: its name and address, and its value in the view


class Peer:
    """A process of a run, as itself and the others see it.

    Attributes:
      process: its number.
      terms: what is the same for all.
      host: the address at which others reach this machine.
    """

    def __init__(
        self, switch: tuple[str, int], keys: Keys, process: int, terms: Terms,
        about: Mapping[str, Any] = {}, end: Callable[[str], Any] = lambda why: None,
        direct: bool = True, inside: str = '',
    ) -> None:  # fmt: skip
        """Connects to the switch.

        Args:
          switch: its host and port.
          keys: of the run.
          process: number of this process.
          terms: what is the same for all.
          about: settings that must be the same in all processes; JSON.
          end: called in another thread with the cause, when the run or this process is ended.
          direct: whether others may connect to this process, at a port that the system chooses.
          inside: name of the process in which the switch runs, and with which it is lost.

        Raises:
          ProcessGroupError: if nobody listens at the port for as long as the start may take.
        """
        advice = 'check that the switch runs, and that its port is open'
        with reach(switch, terms.start, 'nobody answers', advice) as trial:
            self.host, host = trial.getsockname()[0], trial.getpeername()[0]
        self.process, self.terms, self._end, self._inside_of = process, terms, end, inside
        self._switch = inside or f'the switch at {url(*switch)}'
        self._name, self._sockets = f'{process}.{secrets.token_hex(8)}', Sockets(keys)
        self._control = self._sockets.calling(self._name, terms.silent)
        # Messages have connections of their own: a sign of life must not wait behind a long one.
        self._caller = self._sockets.calling(self._name + DATA, terms.silent)
        where, sockets = (SWITCH, url(host, switch[1]), terms.silent), (self._control, self._caller)
        self._lines, self._place = [Line(socket, *where) for socket in sockets], switch
        self._links = dict[tuple[str, str], Line]()  # by name and address of a process
        self._door = self._sockets.listening(self._name, self.host, patience=terms.silent / CUT)
        address = address_of(self._door) if direct else ''
        self._about: Head = {'about': {**about, **terms._asdict()}, 'address': address}
        self._tasks, self._changed = deque[Callable[[], Any]](), threading.Condition()
        self._view, self._inside, self._why = View(0, (), {}), False, ''
        self._places, self._left = dict[int, Place](), set[int]()
        self._seen, self._ready, self._value = 0, False, None
        self._phase, self._limit = 'working', terms.silent
        self._waits = set[tuple[int, int, str, float]]()  # step, source, tag, and since when
        self._error, self._closing, self._closed = '', False, threading.Event()
        self._mail = dict[tuple[int, int, int, str], list[list[zmq.Frame]]]()  # by view to tag
        self._deliveries = dict[str, Delivery]()  # by the name of the other process
        self._worked = self._heard = self._looked = time.monotonic()
        self._answered, self._cut = False, False
        self._hurry = 0.0  # until when ways are asked more often
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # What a process does; from any of its threads.

    def ready(self, value: Any = None) -> View:
        """Waits for the next view, which begins when all who are present are ready.

        Args:
          value: what all members are told, such as the steps of which there are snapshots; JSON.

        Raises:
          ProcessGroupError: if the run has ended; the message names who owes what since when.
        """
        with self._changed:  # other threads may wait for messages of the last view
            last, self._why = self._view.number, 'this process asks for the next view'
            self._inside, self._ready, self._value = False, True, value
            self._changed.notify_all()
        self._do(self._say)
        return self._wait(lambda: self._view if self._view.number > last else None)

    def send(self, view: View, to: int, step: int, tag: str, *buffers: Buffer) -> None:
        """Sends buffers, which must not change until they have arrived; does not wait.

        Args:
          view: in which the message belongs.
          to: number of the process.
          step: by which messages are ordered.
          tag: name of the message, once per step and process.
          *buffers: bytes, memoryviews and other contiguous buffers.

        Raises:
          ValueError: if the process is not another member.
          ViewChangedError: if the view has ended.
          ProcessGroupError: if the run has ended.
        """
        self._check(view)
        if to == self.process or to not in view.members:
            others = [i for i in view.members if i != self.process]
            raise ValueError(f'process {to} is not in the view; send to one of {others}')
        cut = [pieces(b) for b in buffers]
        words = {'step': step, 'tag': tag, 'pieces': [*map(len, cut)]}

        def deliver() -> None:
            if self._inside and view.number == self._view.number:
                self._delivery(self._places[to][0]).send(words, [*itertools.chain(*cut)])

        self._do(deliver)
        self.progress()

    def receive(self, view: View, source: int, step: int, tag: str) -> list[memoryview]:
        """The buffers of a message, when they are there.

        Raises:
          ViewChangedError: if the view has ended.
          ProcessGroupError: if the run has ended, or the process has left.
        """

        def arrived() -> list[list[zmq.Frame]] | None:
            self._check(view)
            frames = self._mail.pop((view.number, source, step, tag), None)
            if frames is None and source in self._left:
                owed = f'has left, and owes {tag!r} of {stepped(step)}'
                raise ProcessGroupError(f'{self.terms.names[source]} {owed}')
            return frames

        wait = step, source, tag, time.monotonic()
        self._waits.add(wait)
        try:
            frames = self._wait(arrived)
        finally:
            self._waits.discard(wait)
        self.progress()
        return [*map(joined, frames)]

    def progress(self) -> None:
        """Says that the work of this process goes on; messages say so too."""
        self._worked = time.monotonic()

    def announce(self, phase: str, seconds: float) -> tuple[str, float]:
        """Says what this process does from now on, in which work has to go on in some seconds.

        Args:
          phase: such as compiling, saving, testing.
          seconds: at least those of the terms count.

        Returns:
          Phase and seconds until now.
        """
        before = self._phase, self._limit
        self.progress()
        if phase != self._phase:
            self._phase, self._limit = phase, max(seconds, self.terms.silent)
            self._do(self._say)
        return before

    def fail(self, why: str, follows: bool = False, alone: bool = False) -> None:
        """Ends the run for all, with the cause; returns when they are told.

        Args:
          why: the cause.
          follows: whether that may follow from another process's end, which is then the cause.
          alone: whether the others may wait for another process in the place of this one.
        """
        with self._changed:
            first = lambda: self._error or (self._inside and not follows)
            self._changed.wait_for(first, GRACE + 2 * BEAT)
        words = {'kind': 'fail', 'why': why[:10_000], 'alone': alone}
        self._do(lambda: put(self._control, SWITCH, words))
        with self._changed:
            self._changed.wait_for(lambda: self._error, LEAVING)

    def close(self) -> None:
        """Leaves when the others have all that was sent to them, or after some seconds."""
        under_way = lambda: self._tasks or any(d.sent for d in list(self._deliveries.values()))
        end = time.monotonic() + LEAVING
        while self._thread.is_alive() and under_way() and time.monotonic() < end:
            self._closed.wait(0.01)
        self._closing = True
        self._do(lambda: put(self._control, SWITCH, {'kind': 'bye'}))
        self._closed.wait(LEAVING)
        self._closed.set()
        self._thread.join(LEAVING)
        with self._changed:  # other threads may wait
            self._error = self._error or f'{self.terms.names[self.process]} has left'
            self._changed.notify_all()

    def _check(self, view: View) -> None:
        """Raises if a view has ended, or the run."""
        if self._error:
            raise ProcessGroupError(self._error)
        if not self._inside or view.number != self._view.number:
            raise ViewChangedError(self._why)

    def _wait(self, result: Callable[[], T | None]) -> T:
        """The result, as soon as that is not None."""
        with self._changed:
            while (value := result()) is None:
                if self._error:
                    raise ProcessGroupError(self._error)
                self._changed.wait()
            return value

    def _do(self, task: Callable[[], Any]) -> None:
        """Runs ``task`` in the thread of the sockets."""
        with self._changed:
            self._tasks.append(task)
            self._sockets.ring()

    # The thread of the sockets.

    def _run(self) -> None:
        try:
            while not (self._closing and self._closed.is_set()):
                now = time.monotonic()
                pause = BEAT if self._answered and now > self._hurry else BEAT / 20
                if now - self._looked >= pause:
                    self._look(now)
                self._sockets.serve(min(pause, BEAT / 4), self._take)
                while self._tasks:
                    self._tasks[0]()  # it is under way until it is done: `close` waits for it
                    self._tasks.popleft()
        except Exception as error:  # or all who wait would wait for ever
            self._stop(f'{self.terms.names[self.process]}: its network thread failed: {error!r}')
        with self._changed:
            self._tasks.clear()
            self._sockets.close()

    def _stop(self, why: str) -> None:
        """Ends all waiting of this process."""
        if self._error or self._closing:
            return
        self._end(why)  # which may end the process, before its other threads say the same
        with self._changed:
            self._error = why
            self._changed.notify_all()
        self._closed.set()

    def _look(self, now: float) -> None:
        """Each second: a sign of life, and a look at who gives none."""
        if now - self._looked > 2 * BEAT:  # this process was suspended itself
            self._heard = self._worked = now
        self._looked, quiet = now, now - self._heard
        # A switch that is lost with its process was there a moment ago, and may return with it.
        if (lost := not self._say()) and self._answered and quiet > BEAT:
            threading.Thread(target=self._seek, daemon=True).start()  # it may take long
        self._cut = lost and (self._cut or quiet < GRACE)
        back = self.terms.back if self._inside_of else 0.0
        if self._cut and self._inside_of and self._answered:
            limit, what = (back or GRACE) + BEAT, f'{LOST}, at {clock(quiet)}{nobody(back)}'
        else:
            limit, cause = self.terms.silent + back, 'is stopped, swaps, or the network failed'
            if not self._answered:
                limit = min(ANSWER, self.terms.start)
                cause = 'has another token, is stopped, or is no switch of this run'
            what = f'has not answered since {clock(quiet)} ({limit:g} s): it {cause}'
        if quiet > limit:
            self._stop(f'{self._switch} {what}')
        for delivery in self._deliveries.values():
            delivery.look()
        for line in (*self._lines, *self._links.values()):
            line.look(now)

    def _seek(self) -> None:
        """Looks where the switch is reached now: its name may lead elsewhere than before."""
        with contextlib.suppress(ProcessGroupError), reach(self._place, 0.0, '', '') as trial:
            for line in self._lines:
                line.address = url(trial.getpeername()[0], self._place[1])

    def _say(self) -> bool:
        """Tells the switch all that it may have to know; False if there is no connection."""
        now = time.monotonic()
        work = Work(now - self._worked, self._phase, self._limit)
        for step, source, tag, since in sorted(self._waits.copy())[:1]:
            work = work._replace(step=step, source=source, tag=tag, seconds=now - since)
        words = {'view': self._seen, 'ready': self._ready, 'value': self._value, 'work': work}
        members, left = [*self._places.items()] if self._inside else [], sorted(self._left)
        words |= {'kind': 'here', 'members': members, 'left': left, **self._about}
        return self._closing or put(self._control, SWITCH, words)

    def _take(self, socket: zmq.Socket, name: str, frames: list[zmq.Frame]) -> None:
        """Takes a message of another process, a question what has arrived, or the answer to one."""
        if socket is self._control:
            return self._obey(read(frames, OF_SWITCH))
        way = socket, name
        if name == SWITCH:  # which says from whom
            name, frames = frames[0].bytes.decode(), frames[1:]
            way = *way, name
        name, words = name.removesuffix(DATA), read(frames, BETWEEN)
        source, delivery = int(name.partition('.')[0]), self._delivery(name)
        if words['kind'] == 'has':
            return delivery.confirm(way, words)
        if delivery.answer(way, words):
            address = words['view'], source, words['step'], words['tag']
            rest = iter(frames[1:])
            with self._changed:
                self._mail[address] = [[*itertools.islice(rest, n)] for n in words['pieces']]
                self._changed.notify_all()
        return None

    def _obey(self, state: Head) -> None:
        """Acts on what the switch says: ends, or enters or leaves a view."""
        self._heard = time.monotonic()
        if state['kind'] == 'failed':
            return self._stop(state['why'])
        if state['kind'] == 'bye':
            return self._closed.set()
        if state['kind'] == 'wait':
            if not self._answered:
                tell(state['why'])
            self._answered = True
            return None
        number, members = state['view'], dict(state['members'])
        called = members.get(self.process, [''])[0] == self._name
        with self._changed:
            self._answered, self._left = True, set(state['left'])
            if self._inside and not (state['on'] and number == self._view.number):
                self._inside, self._why = False, state['why']
                self.progress()
            if not state['on']:
                self._seen = number
            elif called and self._ready and number > self._view.number:
                self._enter(number, members)
            for i in self._left & self._places.keys():
                self._delivery(self._places[i][0]).sent.clear()
            return self._changed.notify_all()

    def _enter(self, number: int, members: dict[int, Place]) -> None:
        """Begins a view."""
        values = {i: value for i, (_, _, value) in members.items()}
        self._view, self._seen = View(number, tuple(sorted(members)), values), number
        self._inside, self._ready, self._hurry = True, False, time.monotonic() + BEAT
        self.progress()
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= number}
        ends = {(n, place) for i, (n, place, _) in members.items() if place and i != self.process}
        for end in self._links.keys() - ends:
            self._links.pop(end).cut()
        for end in ends - self._links.keys():
            self._links[end] = Line(self._caller, *end, self.terms.silent / CUT)
        self._places = members
        names = {name for name, _, _ in members.values()}
        self._deliveries = {n: d for n, d in self._deliveries.items() if n in names}
        for delivery in self._deliveries.values():
            delivery.begin(number)

    def _delivery(self, name: str) -> Delivery:
        """The messages to and from a process: directly, as it has come, or by the switch."""
        if name not in self._deliveries:
            data = name + DATA
            ways = (self._caller, name), (self._door, data), (self._caller, SWITCH, data)
            self._deliveries[name] = Delivery(ways, self._view.number)
        return self._deliveries[name]
