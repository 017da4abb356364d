"""`choose`: the plan of the least predicted step whose codecs stay within an error budget.

The search starts from the candidates whose encoder, message and decoder take the least time in all,
and from each candidate at all crossings that it is allowed at. From each start it takes the best
schedule, then at each crossing the candidate with which the whole step is shortest. Schedules are
compared with messages that come `LATE`. Of the shortest step that was found, each crossing gets the
candidate of the least error for which the step is still `ALIKE`: where messages are hidden, behind
compute or behind other messages, a codec gains nothing.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmp.net.speed import Link
from jaxmp.plan.predict import Edge, Line, Message, Times, step
from jaxmp.runtimes.schedule import Action, saved_inputs
from jaxmp.runtimes.schedules import named

LINES = '1f1b', 'gpipe', 'eager_1f1b', 'zb_h1', 'zb_h2'  # one stage per device
AHEAD = 3, 4, 6, 10  # micro-batches per later stage, of eager_1f1b and zb_h2
LAST = 1, 2, 3, 4, 6, 10, 14  # micro-batches with backwards in two halves, of zb_h2
ALIKE = 1.01  # steps whose ratio is less are alike, since a machine's speed varies by more
LATE = 0.1  # of the mean action: messages so late must not make the chosen schedule slow
ROUNDS = 3  # of schedule, then codecs


class Candidate(NamedTuple):
    """A channel as it was measured at one crossing; times and bytes are those of a whole batch.

    Attributes:
      text: of the algebra.
      bits: per element.
      error: relative squared error, ``||y - x||^2 / ||x||^2``.
      encode: seconds.
      decode: seconds.
      nbytes: of the messages.
      nats: the divergence of the next token that it is predicted to cause, of a pretrained language
        model's activations; 0 where it was not asked for.
    """

    text: str
    bits: float
    error: float
    encode: float
    decode: float
    nbytes: float
    nats: float = 0.0


Codecs = Mapping[Edge, Candidate]
Allowed = Mapping[Edge, Sequence[Candidate]]


class Probed(NamedTuple):
    """What the probe measured.

    Attributes:
      stages: times of each stage, by the number of micro-batches.
      crossings: candidates by edge.
      handover: seconds of a message besides the link, from thread to thread.
      busy: seconds by which sending and receiving a message hold up the computing of both ends.
      place: the machine of each stage; empty where each has one of its own.
      normed: whether the stages wait for the norm of all gradients: those of `jaxmp.runtimes.norms`
        are told beside the work.
      table: bytes that the first and the last stage send each other for a tied table; 0 without.
    """

    stages: Mapping[int, Sequence[Times]]
    crossings: Allowed
    handover: Line = Line()
    busy: Line = Line()
    place: tuple[int, ...] = ()
    normed: bool = False
    table: float = 0.0

    @property
    def machines(self) -> int:
        """Their number."""
        return len({*self.place}) or len(next(iter(self.stages.values())))

    def on(self, place: Sequence[int], slower: Sequence[float]) -> Probed:
        """The stages on unlike machines.

        Args:
          place: the machine of each stage.
          slower: how many times as long each machine takes as that of the probe.
        """
        s = [slower[machine] for machine in place]
        scaled = lambda t, f: Times(
            f * t.forward, f * t.backward, tuple(f * h for h in t.halves), f * t.update
        )
        stages = {
            n: [scaled(t, f) for t, f in zip(row, s, strict=True)] for n, row in self.stages.items()
        }
        crossings = {
            (a, b): [c._replace(encode=s[a] * c.encode, decode=s[b] * c.decode) for c in own]
            for (a, b), own in self.crossings.items()
        }
        return self._replace(stages=stages, crossings=crossings, place=tuple(place))


class Order(NamedTuple):
    """A schedule, as ``config.parallel.schedule`` names it, and micro-batches per step."""

    schedule: str
    microbatches: int

    @property
    def line(self) -> str:
        """The schedule as tables show it."""
        return f'{self.schedule}, {self.microbatches} micro-batches'


class Choice(NamedTuple):
    """What a table's row is made of: an order, a candidate per edge, the predicted seconds."""

    order: Order
    codecs: Codecs
    seconds: float

    @property
    def error(self) -> float:
        """The largest of all crossings."""
        return max(c.error for c in self.codecs.values())


@functools.cache
def actions_of(order: Order, stages: int, place: tuple[int, ...] = ()) -> tuple[Action, ...]:
    """The schedule of an order, whose devices are the machines of a place where there is one."""
    make = named(order.schedule)
    assert make, order.schedule
    actions = make(stages, order.microbatches)
    return tuple(a._replace(device=place[a.stage]) for a in actions) if place else actions


@functools.cache
def kept_of(order: Order, stages: int) -> int:
    """The most micro-batches that a device keeps in an order."""
    return max(saved_inputs(actions_of(order, stages)))


def choose(probed: Probed, link: Link, budget: float) -> Choice:
    """The plan.

    Args:
      probed: every crossing has a candidate without error.
      link: between neighbouring stages.
      budget: largest relative squared error of a crossing.
    """
    allowed = {e: [c for c in own if c.error <= budget] for e, own in probed.crossings.items()}
    cost = lambda c, e: (c.encode + link.seconds(c.nbytes, e[0] > e[1]) + c.decode, c.error)
    fastest = {e: min(own, key=lambda c, e=e: cost(c, e)) for e, own in allowed.items()}
    texts = dict.fromkeys(c.text for own in allowed.values() for c in own)
    everywhere = (
        {e: next((c for c in own if c.text == t), fastest[e]) for e, own in allowed.items()}
        for t in texts
    )
    found = [searched(probed, link, start, allowed) for start in (fastest, *everywhere)]
    return careful(probed, link, min(found, key=lambda choice: choice.seconds), allowed)


def searched(probed: Probed, link: Link, start: Codecs, allowed: Allowed) -> Choice:
    """The best schedule and the best codecs in turn, until nothing changes."""
    choice = ordered(probed, link, start)
    for _ in range(ROUNDS):
        codecs = improved(probed, link, choice, allowed)
        if codecs == choice.codecs:
            break
        choice = ordered(probed, link, codecs)
    return choice


def ordered(probed: Probed, link: Link, codecs: Codecs, schedule: str | None = None) -> Choice:
    """The order of the least step for given codecs with messages that are `LATE`.

    Of orders that are `ALIKE` it is the one that keeps the fewest examples. Of a ``schedule`` only
    the number of micro-batches is left to choose.
    """
    found = []
    for order in orders(probed):
        if schedule and order.schedule != schedule:
            continue
        stages = probed.stages[order.microbatches]
        late = LATE * statistics.mean((t.forward + t.backward) / 2 for t in stages)
        kept = kept_of(order, len(stages)) / order.microbatches
        found.append((predicted(probed, link, codecs, order, late), kept, order))
    least = min(slow for slow, *_ in found)
    fast = [row for row in found if row[0] <= ALIKE * least]
    order = min(fast, key=lambda row: (row[1], row[2].microbatches, row[0]))[2]
    return Choice(order, codecs, predicted(probed, link, codecs, order))


def improved(probed: Probed, link: Link, choice: Choice, allowed: Allowed) -> dict[Edge, Candidate]:
    """Codecs changed one after the other where the whole step gains."""
    codecs = dict(choice.codecs)
    for edge, own in allowed.items():
        cost = lambda c, edge=edge: (
            predicted(probed, link, {**codecs, edge: c}, choice.order),
            c.error,
        )
        codecs[edge] = min(own, key=cost)
    return codecs


def careful(probed: Probed, link: Link, choice: Choice, allowed: Allowed) -> Choice:
    """Codecs of less error with a step that is `ALIKE`, where the error is largest first."""
    codecs, most = dict(choice.codecs), ALIKE * choice.seconds
    for edge in sorted(codecs, key=lambda e: -codecs[e].error):
        for c in sorted(allowed[edge], key=lambda c: (c.error, c.encode + c.decode)):
            if predicted(probed, link, {**codecs, edge: c}, choice.order) <= most:
                codecs[edge] = c
                break
    return Choice(choice.order, codecs, predicted(probed, link, codecs, choice.order))


def orders(probed: Probed) -> Iterator[Order]:
    """The orders that are tried; those that split backwards, where both halves were measured."""
    for count, times in probed.stages.items():
        halves = all(t.halves for t in times)
        wide = [n for n in AHEAD if n < count]
        names = [*LINES, *(f'{name}({n})' for name in ('eager_1f1b', 'zb_h2') for n in wide)]
        names += [f'zb_h2({n}, {k})' for n in (1, 2, *wide) for k in LAST if k < count]
        yield from (Order(name, count) for name in names if halves or not name.startswith('zb'))


def predicted(probed: Probed, link: Link, codecs: Codecs, order: Order, late: float = 0.0) -> float:
    """Predicted seconds of a step, whose messages arrive so many seconds ``late``."""
    stages = probed.stages[order.microbatches]
    messages = messages_of(probed, link, codecs, order.microbatches)
    actions = actions_of(order, len(stages), probed.place)
    return step(actions, stages, messages, link.delay / 1e3 + late) + meetings(probed, link)


def messages_of(probed: Probed, link: Link, codecs: Codecs, count: int) -> dict[Edge, Message]:
    """What the message of one of ``count`` micro-batches takes at each crossing."""
    place, messages = probed.place, {}
    for (a, b), c in codecs.items():
        here, nbytes = bool(place) and place[a] == place[b], c.nbytes / count
        wire = None if here else link.seconds(nbytes, a > b) + probed.handover(nbytes)
        end = 0.0 if here else probed.busy(nbytes) / 2
        messages[a, b] = Message(c.encode / count + end, wire, c.decode / count + end)
    return messages


def meetings(probed: Probed, link: Link) -> float:
    """Seconds in which stages on several machines wait for each other after their gradients.

    First for the gradient of a tied table, then for the norm of all gradients.

    >>> own = Probed({1: [Times(1, 1)] * 2}, {}, normed=True, table=1e6)
    >>> meetings(own, Link(8, 40)), meetings(own._replace(table=0), Link(8, 40))
    (1.08, 0.04)
    >>> meetings(own._replace(place=(0, 0)), Link(8, 40))
    0.0
    """
    message = lambda nbytes: link.delay / 1e3 + probed.handover(nbytes)
    place, seconds = probed.place, message(0) * (probed.normed and probed.machines > 1)
    if not probed.table or (place and place[0] == place[-1]):
        return seconds
    wire = max(link.seconds(probed.table, back) for back in (False, True))
    return seconds + message(probed.table) + wire


def uniform(
    probed: Probed, link: Link, fwd: str, bwd: str, schedule: str | None = None
) -> Choice | None:
    """One channel forward and one backward everywhere, in its best order; None if not measured.

    With a ``schedule``, in that one with its best number of micro-batches.
    """
    codecs = {}
    for (a, b), own in probed.crossings.items():
        named = {c.text: c for c in own}
        if (text := fwd if a < b else bwd) not in named:
            return None
        codecs[a, b] = named[text]
    return ordered(probed, link, codecs, schedule)
