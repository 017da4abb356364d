"""`best`: the predicted step of ProtocolNanoGPT, eight stages over slow links, for given messages.

ProtocolNanoGPT is a public speedrun: a GPT of width 1,024 with a block per stage, 524,288 tokens
per step, and a score of steps times seconds. Its meter delays a message in the receiver. A message
begins when it has been sent and the receiver's wire is free, which messages of both directions
share, and takes its bits over the rate and the delay of the link. `RECORDS` are its two published
runs, which test the model: their computing is known from their runs without links, so nothing is
fitted.

References:
  github.com/PluralisResearch/ProtocolNanoGPT: README.md, train_gpt.py and records/, at 0551bc3.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxmp.net.speed import Link
from jaxmp.plan import predict
from jaxmp.plan.choose import Order, actions_of
from jaxmp.plan.predict import Message, Times

STAGES, WIDTH, TOKENS = 8, 1024, 524_288  # tokens per step
SAMPLES, LENGTH = 8, 1024  # of the shape in which bits are counted, the dense record's micro-batch
LINK = '200mbit,50ms'
LINKS = '20mbit,100ms', LINK, '1gbit,10ms', '10gbit,1ms'
ORDERS = tuple(Order(name, n) for name in ('1f1b', 'eager_1f1b') for n in (16, 32, 64, 128))
COPY = 1.6e12  # bytes per second that an H100 copies: half of its memory's 3.35 TB/s


class Way(NamedTuple):
    """The messages of one edge in one step: bytes, and seconds to encode and to decode them."""

    nbytes: float
    encode: float = 0.0
    decode: float = 0.0


class Record(NamedTuple):
    """A published run.

    Attributes:
      name: of the entry.
      nbytes: per token and direction.
      microbatches: per step, under 1F1B.
      alone: seconds of a step without links.
      seconds: of a step over the links.
      steps: until the loss.
    """

    name: str
    nbytes: int
    microbatches: int
    alone: float
    seconds: float
    steps: int

    @property
    def way(self) -> Way:
        """Its messages of a step."""
        return Way(self.nbytes * TOKENS)

    @property
    def computing(self) -> float:
        """Seconds that a stage computes in a step: that without links, less the bubble of 1F1B."""
        return self.alone * self.microbatches / (self.microbatches + STAGES - 1)


DENSE = Record('dense bf16', 2048, 64, 0.539, 100.475, 2925)
SUBSPACE = Record('ReparamSSN, rank 160', 322, 32, 0.655, 19.889, 9125)
RECORDS = DENSE, SUBSPACE


def step(
    link: Link, ways: tuple[Way, Way], order: Order, computing: float = DENSE.computing
) -> float:
    """Predicted seconds of a step.

    Args:
      link: between neighbouring stages.
      ways: forward and backward.
      order: schedule and micro-batches.
      computing: seconds of each stage per step, of which a third is the forward.

    >>> from jaxmp.net.speed import parse
    >>> for r in RECORDS:
    ...     made = step(parse(LINK), (r.way, r.way), Order('1f1b', r.microbatches), r.computing)
    ...     print(f'{r.name}: {made:.1f} s, published {r.seconds:.1f} s')
    dense bf16: 100.7 s, published 100.5 s
    ReparamSSN, rank 160: 20.2 s, published 19.9 s
    """
    n, forward = order.microbatches, computing / order.microbatches / 3

    def message(way: Way) -> Message:
        wire = link.seconds(way.nbytes / n) + link.delay / 1e3
        return Message(way.encode / n, wire, way.decode / n)

    there, back = map(message, ways)
    edges = {(s, s + 1): there for s in range(STAGES - 1)}
    edges |= {(s + 1, s): back for s in range(STAGES - 1)}
    times = [Times(forward, 2 * forward)] * STAGES
    return predict.step(actions_of(order, STAGES), times, edges, 0.0, lambda edge: edge[1])


def best(link: Link, ways: tuple[Way, Way]) -> tuple[float, Order]:
    """Predicted seconds of a step in the best of `ORDERS`, and that order."""
    return min((step(link, ways, order), order) for order in ORDERS)
