"""`measured`: rate both ways and delay of the link between two machines, through one port.

One machine listens, the other one calls. They meet as the processes of a run do: encrypted, at a
switch in the machine that listens, and by the shorter way where there is one. So the rate is what
messages of a training get, and the delay what they wait.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from jaxmp.net.address import ProcessGroupError, reach, token_of
from jaxmp.net.group import ProcessGroup
from jaxmp.net.keys import keys_of
from jaxmp.net.peer import Peer
from jaxmp.net.switch import Switch
from jaxmp.net.views import Terms, ViewChangedError

NAMES = 'the machine that listens', 'the machine that calls'
PATIENCE = 5.0  # seconds in which the caller finds somebody who listens
DAY = 86400.0  # for which the other one waits for a call
TRIPS, TRIPPING = 9, 1.0  # round trips of a byte, and the seconds after which three are enough
FIRST, MOST = 2**10, 2**24  # bytes of the messages whose rate is measured
LONG = 0.8  # seconds of a message that is long enough
REPEATS = 3  # of that message; the best counts, since both ends may wait for a core
MOST_SECONDS = 4.0  # of each way, at whose end no further message begins


class Between(NamedTuple):
    """A link as one of its ends sees it.

    Attributes:
      there: Mbit/s to the other machine.
      back: Mbit/s from it.
      delay: ms from the departure of a message's last byte to its arrival, half a round trip.
    """

    there: float
    back: float
    delay: float


class CallEndedError(ProcessGroupError):
    """The other machine has left, or it has another secret or other settings."""


@contextlib.contextmanager
def met(
    address: tuple[str, int], listens: bool, about: Mapping[str, Any], token_file: str | None = None
) -> Iterator[ProcessGroup]:
    """The group of two machines, of which the one that listens is process 0.

    Args:
      address: host and port of the machine that listens, by which the other one reaches it.
      listens: whether this one does.
      about: settings that must be the same on both; JSON.
      token_file: file with the secret that both have; default the environment variable.

    Raises:
      CallEndedError: if the other one leaves, or has another secret or other settings.
      ProcessGroupError: if nobody listens, the port is in use, or there is no secret.
    """
    host, port = address
    keys = keys_of(token_of(token_file, host))
    if not listens:
        command = f'start `jaxmp pays --listen={host}:{port}` there, with the same configuration'
        reach(address, PATIENCE, 'nobody listens', command).close()
    switch = Switch(keys, host, port) if listens else None
    try:
        peer = Peer(
            address, keys, 0 if listens else 1, Terms(NAMES, 2, DAY, back=0.0), about,
            inside=NAMES[0],
        )  # fmt: skip
        try:
            yield ProcessGroup(peer, peer.ready())
        finally:
            peer.close()
    except (ProcessGroupError, ViewChangedError) as error:
        raise CallEndedError(str(error)) from error
    finally:
        if switch:
            switch.close()


def measured(group: ProcessGroup) -> Between:
    """The link between two processes, which both call it; takes less than 10 s above 20 kbit/s.

    Raises:
      ProcessGroupError: if the other one has left.
    """
    own = (0.0, 0.0)
    for sender in (0, 1):
        if group.index == sender:
            own = sent(group)
        else:
            echo(group)
    rows = group.share(own)
    (_, there), (_, back) = rows[group.index], rows[1 - group.index]
    return Between(there, back, 1e3 * min(trip for trip, _ in rows) / 2)


def sent(group: ProcessGroup) -> tuple[float, float]:
    """Seconds of a round trip, and Mbit/s of a message without it; the other one calls `echo`.

    Messages grow until one is `LONG`, so that a fast link is filled, and a slow one not for long.
    """
    started, trips = time.monotonic(), []
    while len(trips) < (3 if time.monotonic() - started > TRIPPING else TRIPS):
        trips.append(trip(group, 1))
    bare, size, rates = min(trips), FIRST, list[float]()  # waiting for a core is no part of a link
    while len(rates) < REPEATS and not (rates and time.monotonic() - started > MOST_SECONDS):
        seconds = trip(group, size)
        if seconds > LONG / 2 or size == MOST:
            rates.append(8e-6 * size / max(seconds - bare, 1e-9))
        else:
            size = min(MOST, int(size * min(8.0, LONG / seconds)))
    trip(group, 0)
    return bare, max(rates)


def trip(group: ProcessGroup, size: int) -> float:
    """Seconds from sending so many bytes until the other one says that it has them."""
    other, address = 1 - group.index, group.address('sent')
    content = bytes(size)
    start = time.monotonic()
    group.send(other, address, content)
    group.receive(other, group.address('echo'))
    return time.monotonic() - start


def echo(group: ProcessGroup) -> None:
    """Says of each message that it is there, up to an empty one."""
    other, size = 1 - group.index, 1
    while size:
        [content] = group.receive(other, group.address('sent'))
        size = content.nbytes
        group.send(other, group.address('echo'), b'')
