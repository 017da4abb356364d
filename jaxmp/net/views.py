"""What processes agree on before and while they work: terms and views."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

BEAT = 1.0  # seconds between two signs of life
GRACE = 3.0  # seconds in which a lost connection is made again
LEAVING = 5.0  # seconds to wait for the others at the end


class Terms(NamedTuple):
    """What is the same for all processes of a run; the switch learns it from the first.

    Attributes:
      names: of the processes in messages.
      least: how many make a view: all, or fewer where processes may come and go.
      start: seconds to wait for all at the start.
      silent: seconds without a sign of life, or without any work done, after which a process is
        given up; four times as long as the longest message takes, or longer.
      back: seconds to wait for a process that was given up, or another in its place.
    """

    names: tuple[str, ...]
    least: int
    start: float = 50.0
    silent: float = 60.0
    back: float = 60.0


class View(NamedTuple):
    """Processes that work together until one leaves or joins.

    Attributes:
      number: larger than that of every earlier view.
      members: numbers of the processes, in order.
      values: what each member said when it was ready; JSON.
    """

    number: int
    members: tuple[int, ...]
    values: Mapping[int, Any]


class ViewChangedError(Exception):
    """The view of a message has ended; call `Peer.ready` for the next one."""
