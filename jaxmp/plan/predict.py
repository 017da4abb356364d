"""`step`: the predicted time of one training step of a schedule over a slow link."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from jaxmp.runtimes.schedule import Action

Edge = tuple[int, int]  # the stage that sends, the stage that receives
FORM = re.compile(r'(\d+(?:\.\d+)?)([kmg])bit(?:,(\d+(?:\.\d+)?)ms)?', re.IGNORECASE)
MEGABITS = {'k': 1e-3, 'm': 1.0, 'g': 1e3}


class Link(NamedTuple):
    """A link between two stages.

    Attributes:
      rate: Mbit/s.
      delay: ms from the last byte's departure to its arrival.
      back: Mbit/s from the later stage to the earlier one; 0: as ``rate``.
    """

    rate: float
    delay: float = 0.0
    back: float = 0.0

    def seconds(self, nbytes: float, back: bool = False) -> float:
        """How long a message occupies the link, or that of the way back."""
        return 8 * nbytes / (1e6 * ((back and self.back) or self.rate))

    def turned(self) -> Link:
        """The link whose first stage is the second one of this.

        >>> Link(100, 5, back=10).turned()
        Link(rate=10, delay=5, back=100)
        """
        return Link(self.back or self.rate, self.delay, self.back and self.rate)


class Times(NamedTuple):
    """Seconds that a stage computes, without codecs.

    Attributes:
      forward: of a micro-batch.
      backward: of a micro-batch, both gradients.
      halves: of a micro-batch, the gradient of the input and that of the weights as programs of
        their own; empty where they were not measured.
      update: once per step, after the last backward: clipping, the optimizer.
    """

    forward: float
    backward: float
    halves: tuple[float, ...] = ()
    update: float = 0.0


class Message(NamedTuple):
    """Seconds that the message of a micro-batch takes: in its sender, on the link, and after it.

    Where both stages are on one machine there is no link: ``wire`` is None.
    """

    encode: float
    wire: float | None
    decode: float


def parse(text: str) -> Link:
    """The link that a text names.

    Raises:
      ValueError: if the text is no link.

    >>> parse('100mbit,50ms'), parse('1gbit')
    (Link(rate=100.0, delay=50.0, back=0.0), Link(rate=1000.0, delay=0.0, back=0.0))
    """
    found = FORM.fullmatch(text.strip())
    if not found or not float(found[1]):
        raise ValueError(
            f'--link={text}: not a rate above 0, and perhaps a delay; write a number with kbit, '
            'mbit or gbit (per second), and ms, such as --link=100mbit,50ms or --link=1gbit'
        )
    return Link(float(found[1]) * MEGABITS[found[2].lower()], float(found[3] or 0))


def step(
    actions: Sequence[Action],
    stages: Sequence[Times],
    messages: Mapping[Edge, Message],
    delay: float,
    wire: Callable[[Edge], Hashable] = lambda edge: edge,
) -> float:
    """Seconds of a step: each device runs its actions in order, each as early as it can.

    An action takes the time of its stage and of the codecs that its program runs. The messages on
    a wire follow each other, beside compute, in the order in which their receivers take them: each
    occupies the wire, and arrives a delay later.

    Args:
      actions: a schedule, whose order counts and whose times do not.
      stages: times of each stage.
      messages: those of every edge between neighbours, in both directions.
      delay: of every message, seconds.
      wire: names the wire of an edge, which edges of the same name share; default one per edge.

    >>> from jaxmp.runtimes.schedules import gpipe
    >>> edges = {(0, 1): Message(0.0, 4.0, 0.0), (1, 0): Message(0.0, 2.0, 0.0)}
    >>> step(gpipe(2, 1), [Times(1.0, 2.0)] * 2, edges, delay=0.5)
    13.0
    """
    split = {(a.stage, a.microbatch) for a in actions if a.kind == 'W'}
    free: dict[int, float] = {}  # devices
    wires: dict[Hashable, float] = {}
    sent: dict[tuple[str, int, int], float] = {}  # when the input of an action was sent
    for a in actions:
        own, to = stages[a.stage], a.stage + {'F': 1, 'B': -1, 'W': len(stages)}[a.kind]
        source, start = a.stage - (to - a.stage), free.get(a.device, 0.0)
        seconds = {'F': own.forward, 'B': own.backward, 'W': 0.0}[a.kind]
        if a.kind != 'F' and (a.stage, a.microbatch) in split:
            seconds = own.halves[a.kind == 'W']
        if coming := messages.get((source, a.stage)):
            name, at = wire((source, a.stage)), sent[a.kind, a.stage, a.microbatch]
            if coming.wire is not None:
                wires[name] = max(wires.get(name, 0.0), at) + coming.wire
                at = wires[name] + delay
            start, seconds = max(start, at), seconds + coming.decode
        if going := messages.get((a.stage, to)):
            seconds += going.encode
        free[a.device] = sent[a.kind, to, a.microbatch] = start + seconds
    for device, stage in {(a.device, a.stage) for a in actions}:
        free[device] += stages[stage].update
    return max(free.values())
