"""`Peer`: the connection of one process to all others, by the switch and directly where it can.

One thread has all sockets. Messages are addressed by view, step and tag, so that their order does
not matter; each address is used once. A process only has to reach the port of the switch. It also
listens at a port of its own, and messages take the shorter way as soon as that has answered.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import zmq

from jaxmp.net.address import ProcessGroupError, reach
from jaxmp.net.delivery import Delivery, Path
from jaxmp.net.keys import Keys
from jaxmp.net.sockets import DATA, Frames, Head, Sockets, address_of, endpoint, put
from jaxmp.net.views import (
    BEAT,
    GRACE,
    LOST,
    WORKING,
    Terms,
    View,
    ViewChangedError,
    clock,
    nobody,
    stepped,
)

LEAVING = 5.0  # seconds to wait for the others at the end
ANSWER = 15.0  # seconds in which a switch that listens answers the first time
CUT = 4  # a path is given up after this part of the time after which a process is
T = TypeVar('T')
Address = tuple[int, int, int, str]  # view, source, step and tag of a message


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
            own, host = (end()[0] for end in (trial.getsockname, trial.getpeername))
        self.host, self.process, self.terms, self._end = own, process, terms, end
        self._inside_of, self._identity = inside, f'{process}.{secrets.token_hex(8)}'
        self._switch = inside or f'the switch at {endpoint(*switch)}'
        self._sockets, name = Sockets(keys), self._identity.encode()
        place = endpoint(host, switch[1]), keys.switch.public
        self._listener = self._sockets.listening(keys.listener, own) if direct else None
        self._control = self._sockets.calling(*place, name, terms.silent)
        self._data = self._sockets.calling(*place, name + DATA, terms.silent)
        address = address_of(self._listener) if self._listener else ''
        self._about: Head = {'terms': terms, 'about': dict(about), 'address': address}
        self._tasks, self._changed = deque[Callable[[], Any]](), threading.Condition()
        self._view, self._inside, self._why = View(0, (), {}), False, ''
        self._places = dict[int, list[Any]]()  # identity, address and value of each member
        self._left = set[int]()
        self._seen, self._ready, self._value = 0, False, None
        self._phase, self._limit = WORKING, terms.silent
        self._waits, self._ids = dict[int, tuple[int, int, str, float]](), itertools.count()
        self._error, self._closing = '', False
        self._mail = dict[Address, Frames]()
        self._deliveries = dict[str, Delivery]()  # by the identity of the other end
        self._worked = self._heard = self._looked = self._reached = time.monotonic()
        self._known, self._hurry = False, 0.0  # until when paths are asked more often
        self._closed = threading.Event()
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

    def send(self, view: View, to: int, step: int, tag: str, *buffers: Any) -> None:
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

        def deliver() -> None:
            if self._inside and view.number == self._view.number:
                identity, address, _ = self._places[to]
                self._delivery(identity, address).send({'step': step, 'tag': tag}, buffers)

        self._do(deliver)
        self.progress()

    def receive(self, view: View, source: int, step: int, tag: str) -> list[memoryview]:
        """The buffers of a message, when they are there; they are not copied.

        Raises:
          ViewChangedError: if the view has ended.
          ProcessGroupError: if the run has ended, or the process has left.
        """

        def arrived() -> Frames | None:
            self._check(view)
            frames = self._mail.pop((view.number, source, step, tag), None)
            if frames is None and source in self._left:
                owed = f'has left, and owes {tag!r} of {stepped(step)}'
                raise ProcessGroupError(f'{self.terms.names[source]} {owed}')
            return frames

        with self.waiting(step, source, tag):
            frames = self._wait(arrived)
        self.progress()
        return [memoryview(frame.buffer) for frame in frames]

    def progress(self) -> None:
        """Says that the work of this process goes on; messages say so too."""
        self._worked = time.monotonic()

    def announce(self, phase: str, seconds: float) -> None:
        """Says what this process does from now on, in which work has to go on in some seconds.

        Args:
          phase: such as compiling, saving, testing.
          seconds: at least those of the terms count.
        """
        self.progress()
        if phase != self._phase:
            self._phase, self._limit = phase, max(seconds, self.terms.silent)
            self._do(self._say)

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float) -> Iterator[None]:
        """Announces what is done within a context."""
        before = self._phase, self._limit
        self.announce(name, seconds)
        try:
            yield
        finally:
            self.announce(*before)

    @contextlib.contextmanager
    def waiting(self, step: int, source: int, tag: str) -> Iterator[None]:
        """Says what this thread waits for, such as a message that another thread receives."""
        number = next(self._ids)
        self._waits[number] = step, source, tag, time.monotonic()
        try:
            yield
        finally:
            del self._waits[number]

    def fail(self, why: str, follows: bool = False) -> None:
        """Ends the run for all, with the cause; returns when they are told.

        Args:
          why: the cause.
          follows: whether that may follow from another process's end, which is then the cause.
        """
        with self._changed:
            first = lambda: self._error or (self._inside and not follows)
            self._changed.wait_for(first, GRACE + 2 * BEAT)
        self._do(lambda: put(self._control, {'kind': 'fail', 'why': why}))
        with self._changed:
            self._changed.wait_for(lambda: self._error, LEAVING)

    def close(self) -> None:
        """Leaves when the others have all that was sent to them, or after some seconds."""
        under_way = lambda: self._tasks or any(d.sent for d in list(self._deliveries.values()))
        end = time.monotonic() + LEAVING
        while self._thread.is_alive() and under_way() and time.monotonic() < end:
            self._closed.wait(0.01)
        self._closing = True
        self._do(lambda: put(self._control, {'kind': 'bye'}))
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

    def _wait(self, found: Callable[[], T | None]) -> T:
        """What ``found`` gives, as soon as that is not None."""
        with self._changed:
            while (result := found()) is None:
                if self._error:
                    raise ProcessGroupError(self._error)
                self._changed.wait()
            return result

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
                pause = BEAT if self._known and now > self._hurry else BEAT / 20
                if now - self._looked >= pause:
                    self._look(now)
                for socket, frames in self._sockets.arrived(min(pause, BEAT / 4)):
                    self._take(socket, frames)
                while self._tasks:
                    self._tasks.popleft()()
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
        self._looked, quiet, back = now, now - self._heard, bool(self._inside_of) * self.terms.back
        known = self.terms.silent + back
        if quiet > (limit := known if self._known else min(ANSWER, self.terms.start)):
            stopped, other = 'is stopped, swaps, or the network failed', 'has another token'
            cause = stopped if self._known else f'{other}, is stopped, or is no switch of this run'
            since = f'since {clock(quiet)} ({limit:g} s)'
            self._stop(f'{self._switch} has not answered {since}: it {cause}')
        if self._say() or not self._inside_of:
            self._reached = now
        elif now - self._reached > (back or GRACE) and self._reached - self._heard < GRACE:
            self._stop(f'{self._switch} {LOST}, at {clock(now - self._reached)}{nobody(back)}')
        for delivery in self._deliveries.values():
            delivery.look(now, self.terms.silent / CUT)

    def _say(self) -> bool:
        """Tells the switch all that it may have to know; False if there is no connection."""
        now, wait = time.monotonic(), min(self._waits.copy().values(), default=None)
        wait = wait and (*wait[:3], now - wait[3])
        work = now - self._worked, self._phase, self._limit, wait
        words = {'view': self._seen, 'ready': self._ready, 'value': self._value, 'work': work}
        members, left = [*self._places.items()] if self._inside else [], sorted(self._left)
        words |= {'kind': 'here', 'members': members, 'left': left, **self._about}
        return self._closing or put(self._control, words)

    def _take(self, socket: zmq.Socket, frames: Frames) -> None:
        """Acts on a message of the switch or of another process."""
        prefix = ()
        if socket in (self._listener, self._data):  # the first frame says from whom
            prefix, frames = (frames[0].bytes,), frames[1:]
        words = json.loads(frames[0].bytes)
        if socket is self._control:
            self._obey(words)
        elif words['to'] == self._identity:  # and not another process, which had its port before
            self._accept(Path('back', socket, prefix), words, frames[1:])

    def _accept(self, path: Path, words: Head, buffers: Frames) -> None:
        """Takes a message, a question what has arrived, or the answer to one."""
        delivery, view = self._delivery(words['from']), words['view']
        if words['kind'] == 'has':
            delivery.confirm(words)
        elif view >= self._view.number:
            if path.socket is self._listener and path.name not in (p.name for p in delivery.paths):
                delivery.paths.insert(-1, path)
            if delivery.answer(path, words):
                source = int(words['from'].partition('.')[0])
                with self._changed:
                    self._mail[view, source, words['step'], words['tag']] = buffers
                    self._changed.notify_all()

    def _obey(self, state: Head) -> None:
        """Acts on what the switch says: ends, or enters or leaves a view."""
        self._heard = time.monotonic()
        if state['kind'] == 'failed':
            return self._stop(state['why'])
        if state['kind'] == 'bye':
            return self._closed.set()
        members = dict(state.get('members', ()))
        with self._changed:
            self._known, self._left = True, set(state['left'])
            if self._inside and not (state['on'] and state['view'] == self._view.number):
                self._inside, self._why = False, state['why']
                self.progress()
            if members.get(self.process, [''])[0] == self._identity and self._ready:
                if state['view'] > self._view.number:
                    self._enter(state['view'], members)
            elif not state['on']:
                self._seen = state['view']
            for identity in [m[0] for i, m in self._places.items() if i in self._left]:
                self._delivery(identity).sent.clear()
            return self._changed.notify_all()

    def _enter(self, number: int, members: dict[int, list[Any]]) -> None:
        """Begins a view."""
        values = {i: value for i, (_, _, value) in members.items()}
        self._view, self._seen = View(number, tuple(sorted(members)), values), number
        self._inside, self._ready = True, False
        self.progress()
        self._places = members
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= number}
        for identity in self._deliveries.keys() - {identity for identity, *_ in members.values()}:
            for path in self._deliveries.pop(identity).paths:
                if path.name == 'link':
                    self._sockets.drop(path.socket)
        for delivery in self._deliveries.values():
            delivery.begin(number)

    def _delivery(self, identity: str, address: str = '') -> Delivery:
        """The messages to and from a process, to which this one connects if it has an address."""
        if identity not in self._deliveries:
            last = Path('switch', self._data, (identity.encode() + DATA,), True)
            self._deliveries[identity] = Delivery(self._identity, identity, last)
            self._deliveries[identity].begin(self._view.number)
        delivery = self._deliveries[identity]
        if address and delivery.paths[0].name != 'link':
            key, name = self._sockets.keys.listener.public, self._identity.encode()
            link = self._sockets.calling(address, key, name, self.terms.silent / CUT)
            delivery.paths.insert(0, Path('link', link))
            self._hurry = time.monotonic() + BEAT
        return delivery
