"""`Hub`: the place where the replicas of an elastic run meet, which may come and go.

Each member is a process with a JAX of its own, connected to the hub. The hub needs no JAX. It keeps
the *view*, which is the list of the members present. In a gathering each member sends a message and
receives those of all others, in the order of the view. A gathering belongs to one view: if a member
leaves or joins meanwhile, the hub announces the next view and all members send again, so that they
always agree on whose messages a result is made of.

A member leaves when its connection closes, when it is silent (no heartbeat), when it is late for a
gathering, or when its shared parameters differ from those of the others. Whoever comes, or comes
back, waits until a member sends the shared state, and is in the next view. At the start the hub
waits for all, and those with the most steps decide the state.

A connection has no effect until its first frame contains the secret of the run.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from jaxmp.distributed.frames import FrameServer, Header, Line
from jaxmp.net.address import (
    TOKEN,
    ProcessGroupError,
    host_and_port,
    listen,
    matches,
    own_address,
    token_of,
)


class Patience(NamedTuple):
    """Times in seconds.

    Attributes:
      start: how long the hub waits for all replicas at the start.
      silent: how long after its last sign of life a member has left.
      late: how long after the first message of a gathering a member that is alive has left.
    """

    start: float = 60.0
    silent: float = 10.0
    late: float = 120.0


PATIENCE = Patience()
TIMES = {
    'start': 'seconds to wait for all replicas at the start',
    'silent': 'seconds without a sign of life after which a replica has left',
    'late': 'seconds after the first message of a round after which a replica has left',
}


class Hub(FrameServer):
    """The hub of one run; see `FrameServer` for `serve` and `stop`."""

    def __init__(
        self,
        server: socket.socket,
        count: int,
        token: str = '',
        patience: Patience = PATIENCE,
        say: Callable[[str], None] = print,
    ) -> None:
        """Takes a socket that listens.

        Args:
          server: the socket.
          count: number of replicas.
          token: the secret of the run; empty admits everyone who reaches the socket.
          patience: how long the hub waits.
          say: called with a line for every member that leaves or joins.
        """
        super().__init__(server)
        self.count, self.token, self.patience, self.say = count, token, patience, say
        self.members: dict[int, Line] = {}
        self.newcomers: dict[int, Line] = {}
        self.view, self.step = 0, 0
        self.asked: int | None = None
        self.gathering: dict[int, bytes] = {}
        self.at, self.since, self.first, self.seen = (0, 0), 0.0, 0.0, time.monotonic()
        self.final: tuple[int, bytes] | None = None
        self.about: Any = None

    def lost(self, line: Line, why: str, behind: bool = False) -> None:
        """Closes the connection of a member, newcomer or stranger; the others go on."""
        if behind:
            self.send(line, {'kind': 'behind', 'why': why})
        self.close(line)
        self._leave(line, f'left after step {self.step}: {why}')

    def _leave(self, line: Line, how: str) -> None:
        """Takes a member out of the view, or a newcomer out of the queue."""
        replica = line.replica
        if self.newcomers.get(replica) is line:  # pyright: ignore
            del self.newcomers[replica]  # pyright: ignore
        if self.members.get(replica) is line:  # pyright: ignore
            del self.members[replica]  # pyright: ignore
            goes = 'goes on' if len(self.members) == 1 else 'go on'
            rest = f'{_named(self.members)} {goes}' if self.members else 'none is left'
            self.say(f'replica {replica} {how}; {rest}')
            self._next_view()

    # Members.

    def take(self, line: Line, header: Header, content: bytes) -> None:
        """Acts on a frame."""
        kind, replica = header['kind'], line.replica
        if replica is None:
            self._greet(line, header)
        elif kind == 'end':
            self.send(line, {'kind': 'bye', 'state': header['finished'] and not self.final})
            self._leave(line, 'has finished' if header['finished'] else 'has stopped and saved')
        elif kind == 'final':
            self.final = header['step'], content
            self.close(line)
        elif kind == 'state' and self.members.get(replica) is line:
            self._enter(self.newcomers, header, content)
        elif kind == 'send' and self.members.get(replica) is line:
            self._gather(line, header, content)

    def _greet(self, line: Line, hello: Header) -> None:
        """Takes a newcomer in, or answers why not."""
        replica, step, about = (hello[k] for k in ('replica', 'step', 'about'))
        if not matches(hello['token'], self.token):
            problem = 'the hub has another token; give all processes the same token'
        elif type(replica) is not int or type(step) is not int or not 0 <= replica < self.count:
            problem = f'there is no replica {replica!r:.40} of {self.count}'
        else:
            self.about = about if self.about is None else self.about
            keys = sorted(k for k in {**self.about, **about} if self.about.get(k) != about.get(k))
            own = ', '.join(f'{k}={about.get(k)!r} (there: {self.about.get(k)!r})' for k in keys)
            problem = f'this replica has {own}; start all with the same settings' if own else ''
        if problem:
            self.send(line, {'kind': 'refused', 'why': problem})
            return self.close(line)
        for group in (self.members, self.newcomers):
            if replica in group:
                self.lost(group[replica], 'it has come again')
        line.hello = {k: hello[k] for k in ('replica', 'step', 'digest')}
        self.first = self.first if self.newcomers else time.monotonic()
        self.newcomers[replica] = line
        return None

    def _enter(self, replicas: Iterable[int], about: Header, content: bytes = b'') -> None:
        """Makes newcomers members, with the shared state of ``about`` and its bytes."""
        replicas, self.asked = sorted(replicas), None
        lines = {r: self.newcomers.pop(r) for r in replicas}
        if not lines:  # they have gone meanwhile
            return
        began = not self.members
        self.members |= lines
        self._next_view()
        for line in lines.values():
            own = b'' if line.hello['digest'] == about['digest'] else content
            place = {'view': self.view, 'members': sorted(self.members), 'step': about['step']}
            provide = began and bool(self.newcomers) and line is lines[replicas[0]]
            answer = {'kind': 'welcome', **place, 'state': len(own), 'provide': provide}
            self.send(line, answer, own)
        said = f'{"begin" if began else "joined"} at step {about["step"]}'
        self.say(f'{_named(lines)} {said}; there are {_named(self.members)}')

    def _next_view(self) -> None:
        """Announces the members; all send again."""
        self.view += 1
        self.gathering.clear()
        for line in self.members.values():
            self.send(line, {'kind': 'view', 'view': self.view, 'members': sorted(self.members)})

    def _gather(self, line: Line, header: Header, content: bytes) -> None:
        """Takes a message; the last one completes the gathering."""
        replica, at = line.hello['replica'], (header['step'], header['call'])
        if header['view'] != self.view:
            return None
        if not self.gathering:
            self.at, self.since = at, time.monotonic()
        if at != self.at:
            return self.lost(line, f'it is at step {at[0]}, the others at {self.at[0]}', True)
        line.hello['digest'] = header['digest']
        self.gathering[replica] = content
        return self._share() if self.gathering.keys() == self.members.keys() else None

    def _share(self) -> None:
        """Sends every member the messages of all others."""
        lines = dict(sorted(self.members.items()))
        digests = [line.hello['digest'] for line in lines.values()]
        usual = max(digests, key=digests.count)
        odd = [line for line in lines.values() if line.hello['digest'] != usual]
        for line in odd:
            self.lost(line, 'its shared parameters differ from those of the others', True)
        if odd:
            return
        (step, call), rows = self.at, dict(self.gathering)
        self.gathering.clear()
        self.step = step
        for replica, line in lines.items():
            others = b''.join(rows[other] for other in lines if other != replica)
            self.send(line, {'kind': 'all', 'view': self.view, 'step': step, 'call': call}, others)

    # Time.

    def look(self, now: float) -> None:
        """Removes who is silent or late, and brings newcomers in."""
        if now - self.seen > self.patience.silent / 2:  # this process was suspended itself
            for line in self.lines.values():
                line.heard = now
        self.seen = now
        for line in list(self.lines.values()):
            if now - line.heard > self.patience.silent:
                self.lost(line, f'no sign of life for {self.patience.silent:g} s', True)
        if self.gathering and now - self.since > self.patience.late:
            for replica in self.members.keys() - self.gathering.keys():
                why = f'it is {self.patience.late:g} s later than the first'
                self.lost(self.members[replica], why, True)
        if self.newcomers:
            self._invite(now)

    def _invite(self, now: float) -> None:
        """Finds the shared state for the newcomers, or a member to ask for it."""
        if self.final:
            step, content = self.final
            for line in self.newcomers.values():
                place = {'view': self.view, 'members': [], 'step': step}
                answer = {'kind': 'welcome', **place, 'state': len(content), 'provide': False}
                self.send(line, answer, content)
            self.newcomers.clear()
        elif self.members:
            if self.asked not in self.members:
                self.asked = min(self.members)
                self.send(self.members[self.asked], {'kind': 'ask'})
        elif len(self.newcomers) == self.count or now - self.first > self.patience.start:
            hellos = {r: line.hello for r, line in self.newcomers.items()}
            most = max(hellos, key=lambda r: (hellos[r]['step'], -r))
            state = hellos[most]
            self._enter([r for r in hellos if hellos[r]['digest'] == state['digest']], state)
            if self.newcomers:
                self.asked = min(self.members)


def _named(replicas: Iterable[int]) -> str:
    """The names of replicas.

    >>> _named([2]), _named({1, 0})
    ('replica 2', 'replicas 0, 1')
    """
    numbers = sorted(replicas)
    return f'replica{"s" * (len(numbers) > 1)} {", ".join(map(str, numbers))}'


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `jaxmp hub`; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='jaxmp hub', description='The hub of an elastic run; it needs no accelerator.'
    )
    parser.add_argument('--address', required=True, help='host:port, what --coordinator is told')
    parser.add_argument('--replicas', type=int, required=True, help='number of replicas')
    parser.add_argument('--token_file', help=f'file with the secret; default ${TOKEN}')
    for name, value in PATIENCE._asdict().items():
        parser.add_argument(f'--{name}', type=float, default=value, help=TIMES[name])
    args = parser.parse_args(argv)
    try:
        host, port = host_and_port(args.address)
        token = token_of(args.token_file, host)
        patience = Patience(args.start, args.silent, args.late)
        server = listen(own_address(host), port)
        Hub(server, args.replicas, token, patience, lambda text: print(text, flush=True)).serve()
    except (ProcessGroupError, ValueError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == '__main__':
    sys.exit(main())
