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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import zmq

from jaxmp.distributed.address import reach
from jaxmp.distributed.monitor import ProcessGroupError
from jaxmp.net.delivery import Arrivals, Delivery, Path
from jaxmp.net.keys import Keys
from jaxmp.net.sockets import Frames, Head, Sockets, address_of, endpoint, head, put, words_of
from jaxmp.net.switch import DATA
from jaxmp.net.views import (
    BEAT,
    WORKING,
    Terms,
    View,
    ViewChangedError,
    clock,
    stepped,
)

GRACE = 5.0  # seconds to wait for the others at the end
CUT = 4  # a path is given up after this part of the time after which a process is
T = TypeVar('T')
Address = tuple[int, int, int, str]  # view, source, step and tag of a message


class Peer:
    """A process of a run, as itself and the others see it.

    Attributes:
      process: its number.
      terms: what is the same for all.
    """

    def __init__(
        self,
        switch: tuple[str, int],
        keys: Keys,
        process: int,
        terms: Terms,
        about: dict[str, Any] | None = None,
        end: Callable[[str], None] = lambda why: None,
        direct: bool = True,
    ) -> None:
        """Connects to the switch.

        Args:
          switch: its host and port.
          keys: of the run.
          process: number of this process.
          terms: what is the same for all.
          about: settings that must be the same in all processes; JSON.
          end: called in another thread with the cause, when the run or this process is ended.
          direct: whether others may connect to this process, at a port that the system chooses.

        Raises:
          ProcessGroupError: if nobody listens at the port for as long as the start may take.
        """
        self.process, self.terms = process, terms
        self._end, self._about = end, json.loads(json.dumps(about or {}))
        advice = 'check that the switch runs, and that its port is open'
        with reach(switch, terms.start, 'nobody answers', advice) as trial:
            own, host = trial.getsockname()[0], trial.getpeername()[0]
        self._where = f'{switch[0]}:{switch[1]}'
        self._sockets, self._once = Sockets(keys), f'{process}.{secrets.token_hex(8)}'
        self._listener = self._sockets.listening(keys.listener, own) if direct else None
        self._address = address_of(self._listener) if self._listener else ''
        call = lambda identity: self._sockets.calling(
            endpoint(host, switch[1]), keys.switch.public, identity, terms.silent
        )
        self._control, self._data = call(self._once.encode()), call(self._once.encode() + DATA)
        self._woken = self._sockets.inside('tasks', zmq.PULL)
        self._waker = self._sockets.inside('tasks', zmq.PUSH)
        self._tasks: deque[Callable[[], Any]] = deque()
        self._lock, self._changed = threading.Lock(), threading.Condition()
        self._view, self._inside, self._why = View(0, (), {}), False, ''
        self._places: dict[int, list[str]] = {}  # identity and address of each member
        self._left: set[int] = set()
        self._ready, self._value = False, None
        self._worked, self._phase, self._limit = time.monotonic(), WORKING, terms.silent
        self._waits: dict[int, tuple[int, int, str, float]] = {}
        self._error, self._closing, self._closed = '', False, threading.Event()
        self._mail: dict[Address, Frames] = {}
        self._arrivals: dict[tuple[int, int], Arrivals] = {}
        self._deliveries: dict[int, Delivery] = {}
        self._paths: dict[tuple[str, int], Path] = {}
        self._heard, self._looked, self._known = time.monotonic(), time.monotonic(), False
        self._hurry = 0.0  # until when paths are asked more often
        self._ids = itertools.count()
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

        def begin() -> None:
            with self._changed:  # other threads may wait for messages of the last view
                self._inside, self._ready, self._value = False, True, value
                self._why = f'{self._name(self.process)} begins again'
                self._changed.notify_all()
            self._hello()

        last = self._view.number
        self._do(begin)
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
          ViewChangedError: if the view has ended.
          ProcessGroupError: if the run has ended.
        """
        self._check(view)
        words = {'kind': 'message', 'view': view.number, 'from': self.process}

        def deliver() -> None:
            if self._inside and view.number == self._view.number:
                self._delivery(to).send({**words, 'step': step, 'tag': tag}, buffers)

        self._do(deliver)
        self.progress()

    def receive(self, view: View, source: int, step: int, tag: str) -> list[memoryview]:
        """The buffers of a message, when they are there; they are not copied.

        Raises:
          ViewChangedError: if the view has ended.
          ProcessGroupError: if the run has ended, or the process has left.
        """
        address = view.number, source, step, tag

        def arrived() -> Frames | None:
            self._check(view)
            frames = self._mail.pop(address, None)
            if frames is None and source in self._left:
                owed = f'{tag!r} of {stepped(step)}'
                raise ProcessGroupError(f'{self._name(source)} has left, and owes {owed}')
            return frames

        with self.waiting(step, source, tag):
            frames = self._wait(arrived)
        self.progress()
        return [memoryview(frame.buffer) for frame in frames]

    def progress(self) -> None:
        """Says that the work of this process goes on; messages say so too."""
        self._worked = time.monotonic()

    @contextlib.contextmanager
    def phase(self, name: str, seconds: float) -> Iterator[None]:
        """Announces work that may take so many seconds, such as compiling, saving, evaluating."""
        before = self._phase, self._limit
        self._phase, self._limit = name, max(seconds, self.terms.silent)
        self._do(self._beat)
        try:
            yield
        finally:
            self._phase, self._limit = before
            self.progress()

    @contextlib.contextmanager
    def waiting(self, step: int, source: int, tag: str) -> Iterator[None]:
        """Says what this thread waits for, such as a message that another thread receives."""
        number = next(self._ids)
        self._waits[number] = step, source, tag, time.monotonic()
        try:
            yield
        finally:
            del self._waits[number]

    def fail(self, why: str) -> None:
        """Ends the run for all, with the cause; returns when they are told."""
        self._do(lambda: put(self._control, head(kind='fail', why=why)))
        with self._changed:
            self._changed.wait_for(lambda: self._error, GRACE)

    def close(self) -> None:
        """Leaves when the others have all that was sent to them, or after some seconds."""
        if not self._thread.is_alive():
            return
        end = time.monotonic() + GRACE
        while self._under_way() and time.monotonic() < end and not self._error:
            time.sleep(0.01)
        self._do(self._bye)
        self._closed.wait(GRACE)
        self._closed.set()
        self._do(lambda: None)
        self._thread.join(GRACE)

    def _under_way(self) -> bool:
        return bool(self._tasks) or any(d.sent for d in list(self._deliveries.values()))

    def _bye(self) -> None:
        self._closing = True
        put(self._control, head(kind='bye'))

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
        with self._lock:
            self._tasks.append(task)
            if not self._waker.closed:
                put(self._waker, b'')

    def _name(self, process: int) -> str:
        return self.terms.names[process]

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
            self._stop(f'{self._name(self.process)}: its network thread failed: {error!r}')
        with self._lock:
            self._sockets.close()

    def _stop(self, why: str) -> None:
        """Ends all waiting of this process."""
        with self._changed:
            if self._error or self._closing:
                return
            self._error = why
            self._changed.notify_all()
        self._closed.set()
        self._end(why)

    def _look(self, now: float) -> None:
        """Each second: a sign of life, and a look at who gives none."""
        if now - self._looked > 2 * BEAT:  # this process was suspended itself
            self._heard = now
            self.progress()
        self._looked = now
        quiet, limit = now - self._heard, self.terms.silent if self._known else self.terms.start
        if quiet > limit:
            key = 'it is stopped, swaps, or the network failed'
            key = key if self._known else 'it has another token, or is no switch of this run'
            since = f'since {clock(quiet)} ({limit:g} s)'
            return self._stop(f'the switch at {self._where} has not answered {since}: {key}')
        self._beat() if self._known else self._hello()
        for delivery in self._deliveries.values():
            delivery.look(now, self.terms.silent / CUT)
        return None

    def _hello(self) -> None:
        inside = self._inside
        place = {'members': self._places, 'values': self._view.values} if inside else {}
        self._say('hello', terms=self.terms, about=self._about, address=self._address,
                  value=self._value, left=sorted(self._left),
                  **{'members': {}, 'values': {}, **place})  # fmt: skip

    def _beat(self) -> None:
        if not self._closing:
            self._say('beat')

    def _say(self, kind: str, **words: Any) -> None:
        """Sends what the switch is always told, and more."""
        now, wait = time.monotonic(), min(self._waits.copy().values(), default=None)
        wait = wait and (*wait[:3], now - wait[3])
        work = now - self._worked, self._phase, self._limit, wait
        state = {'view': self._view.number, 'ready': self._ready}
        put(self._control, head(kind=kind, work=work, **state, **words))

    def _take(self, socket: zmq.Socket, frames: Frames) -> None:
        """Acts on a message of the switch or of another process."""
        if socket is self._woken:
            return None
        if socket is self._control:
            return self._obey(words_of(frames[0]))
        if socket in (self._listener, self._data):  # the first frame says from whom
            prefix, frames = (frames[0].bytes,), frames[1:]
        else:
            prefix = ()
        words = words_of(frames[0])
        kind, view, source = words['kind'], words['view'], words['from']
        if kind == 'has':
            if view == self._view.number and source in self._deliveries:
                self._deliveries[source].confirm(words)
            return None
        if view < self._view.number or (kind == 'ask' and words['to'] != self._once):
            return None
        arrivals = self._arrivals.setdefault((view, source), Arrivals())
        if kind == 'message' and arrivals.new(words['number']):
            address = view, source, words['step'], words['tag']
            with self._changed:
                self._mail[address] = frames[1:]
                self._changed.notify_all()
        if kind == 'ask' and socket is self._listener and words['path'] == 'link':
            back = self._paths.setdefault(('back', source), Path(socket, prefix))
            back.prefix = prefix
        answer = {'kind': 'has', 'view': view, 'from': self.process, 'path': words.get('path')}
        put(socket, *prefix, head(**answer, asked=words.get('asked'), **arrivals.has()))
        return None

    def _obey(self, words: Head) -> None:
        """Acts on what the switch says."""
        self._heard, kind = time.monotonic(), words['kind']
        if kind == 'failed':
            self._stop(words['why'])
        elif kind == 'bye':
            self._closed.set()
        elif kind == 'who' and not self._closing:
            self._hello()
        elif kind == 'state':
            self._known = True
            self._see(words)

    def _see(self, state: Head) -> None:
        """Enters or leaves a view, as the switch says it is."""
        with self._changed:
            self._left = set(state['left'])
            if self._inside and not (state['on'] and state['view'] == self._view.number):
                self._inside, self._why = False, state['why'] or 'the switch has begun another view'
                self.progress()
            elif self._ready and self._once in _newer(state, self._view.number):
                self._enter(state)
            for process in self._left & self._deliveries.keys():
                self._deliveries[process].sent.clear()
            self._changed.notify_all()

    def _enter(self, state: Head) -> None:
        """Begins a view."""
        number, members = state['view'], {int(k): place for k, place in state['members'].items()}
        values = {int(k): value for k, value in state['values'].items()}
        self._view = View(number, tuple(sorted(members)), values)
        self._inside, self._ready = True, False
        self.progress()
        for name, process in list(self._paths):
            if self._places.get(process) != members.get(process):
                path = self._paths.pop((name, process))
                if name == 'link':
                    self._sockets.drop(path.socket)
        self._places, self._deliveries = members, {}
        self._mail = {key: mail for key, mail in self._mail.items() if key[0] >= number}
        self._arrivals = {key: a for key, a in self._arrivals.items() if key[0] >= number}

    def _delivery(self, to: int) -> Delivery:
        """The messages to a process, and the ways by which they go."""
        if to not in self._deliveries:
            identity, address = self._places[to]
            self._hurry = time.monotonic() + BEAT
            if address and ('link', to) not in self._paths:
                key, own = self._sockets.keys.listener.public, self._once.encode()
                link = self._sockets.calling(address, key, own, self.terms.silent / CUT)
                self._paths['link', to] = Path(link)
            self._paths.setdefault(
                ('switch', to), Path(self._data, (identity.encode() + DATA,), up=True)
            )
            names = 'link', 'back', 'switch'
            paths = lambda: {n: self._paths[n, to] for n in names if (n, to) in self._paths}
            words = {'view': self._view.number, 'from': self.process, 'to': identity}
            self._deliveries[to] = Delivery(paths, words)
        return self._deliveries[to]


def _newer(state: Head, number: int) -> Sequence[str]:
    """The identities of the members of a view later than ``number``, if such a view is on."""
    members = state.get('members', {}) if state['on'] and state['view'] > number else {}
    return [identity for identity, _ in members.values()]
