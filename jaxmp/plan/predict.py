"""`step`: the predicted time of one training step of a schedule over a slow link."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

from jaxmp.runtimes.schedule import Action

Edge = tuple[int, int]  # the stage that sends, the stage that receives


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


class Line(NamedTuple):
    """Seconds by the bytes of a message, ``fixed + a_byte * nbytes``.

    >>> Line(1.0, 0.5)(4)
    3.0
    """

    fixed: float = 0.0
    a_byte: float = 0.0

    def __call__(self, nbytes: float) -> float:
        """The seconds of a message of so many bytes."""
        return self.fixed + self.a_byte * nbytes


class Message(NamedTuple):
    """Seconds that the message of a micro-batch takes: in its sender, on the link, and after it.

    Where both stages are on one machine there is no link: ``wire`` is None.
    """

    encode: float
    wire: float | None
    decode: float


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
