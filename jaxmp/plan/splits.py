"""`best`: which machine computes which part of a model, by measured speeds and memories.

Parts are the blocks of a language model, and the stages of any other one. Each machine has some
neighbouring parts. All ways to divide them are tried, in all orders of the machines, and of those
that fit the one of the least predicted step is taken, with 1F1B and messages of 4 bits an element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jaxmp.config import Config
from jaxmp.net.speed import Link
from jaxmp.plan.between import Between
from jaxmp.plan.choose import Order, actions_of
from jaxmp.plan.predict import Message, Times, step
from jaxmp.training.experiment import Experiment

BITS = 4  # of an element of a message


class Machine(NamedTuple):
    """A machine.

    Attributes:
      forward: seconds of each part for a micro-batch.
      backward: likewise, both gradients.
      memory: bytes.
    """

    forward: Sequence[float]
    backward: Sequence[float]
    memory: int

    @property
    def seconds(self) -> float:
        """Of the whole model for a micro-batch."""
        return sum(self.forward) + sum(self.backward)


class Parts(NamedTuple):
    """What a model is divided into.

    Attributes:
      blocks: whether they are blocks, between any two of which ``model.cuts`` may cut.
      weights: bytes of each: parameters, gradients, optimizer.
      residuals: bytes that each keeps of a micro-batch from its forward to its backward.
      sent: bytes of a micro-batch's message after each part but the last.
      microbatches: of a step.
    """

    blocks: bool
    weights: Sequence[float]
    residuals: Sequence[float]
    sent: Sequence[float]
    microbatches: int


class Split(NamedTuple):
    """A way to divide the parts.

    Attributes:
      place: the machine of each part.
      seconds: predicted for a step.
      needs: bytes of each machine, at least.
    """

    place: tuple[int, ...]
    seconds: float
    needs: tuple[float, ...]


def best(parts: Parts, machines: Sequence[Machine], link: Link) -> Split:
    """The split of the least predicted step of those that fit.

    Args:
      parts: of the model.
      machines: two or more.
      link: between any two of them; forward from a machine to one of a larger number.

    Raises:
      ValueError: if there are fewer parts than machines, or no split fits.

    >>> fast, slow = (Machine([t] * 4, [2 * t] * 4, 100) for t in (1.0, 3.0))
    >>> parts = Parts(True, [10] * 4, [1] * 4, [0] * 3, 8)
    >>> best(parts, [slow, fast], Link(1000)).place
    (0, 1, 1, 1)
    >>> best(parts, [slow, fast._replace(memory=25)], Link(1000)).place
    (0, 0, 1, 1)
    """
    if len(parts.weights) < len(machines):
        what = 'blocks' if parts.blocks else 'stages'
        raise ValueError(
            f'a model of {len(parts.weights)} {what} cannot be divided among {len(machines)} '
            'machines; give a model of more'
        )
    rows = [of(place, parts, machines, link) for place in places(len(parts.weights), len(machines))]
    memory = [m.memory for m in machines]
    fit = [s for s in rows if all(n <= m for n, m in zip(s.needs, memory, strict=True))]
    if fit:
        return min(fit, key=lambda s: s.seconds)
    nearest = min(rows, key=lambda s: max(n / m for n, m in zip(s.needs, memory, strict=True)))
    gib = lambda sizes: ' and '.join(f'{n / 2**30:.2f}' for n in sizes)
    raise ValueError(
        f'no split fits: the machines have {gib(memory)} GiB, and the one that comes nearest needs '
        f"at least {gib(nearest.needs)}; take --config.model.train='lora(8)', "
        '--config.parallel.remat=True, or a smaller --config.batch_size'
    )


def places(parts: int, machines: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each machine some neighbouring parts.

    >>> list(places(3, 2))
    [(0, 1, 1), (0, 0, 1), (1, 0, 0), (1, 1, 0)]
    """
    for order in itertools.permutations(range(machines)):
        for cuts in itertools.combinations(range(1, parts), machines - 1):
            edges = itertools.pairwise([0, *cuts, parts])
            yield tuple(m for m, (a, b) in zip(order, edges, strict=True) for _ in range(a, b))


def of(place: tuple[int, ...], parts: Parts, machines: Sequence[Machine], link: Link) -> Split:
    """A split, with its step and the memory that each machine needs."""
    runs = [(m, list(run)) for m, run in itertools.groupby(range(len(place)), place.__getitem__)]
    order, n = [m for m, _ in runs], parts.microbatches
    total = lambda values, run: sum(values[i] for i in run)
    times = [
        Times(total(machines[m].forward, run), total(machines[m].backward, run)) for m, run in runs
    ]
    messages: dict[tuple[int, int], Message] = {}
    for s, (_, run) in enumerate(runs[:-1]):
        for a, b in ((s, s + 1), (s + 1, s)):
            wire = link.seconds(parts.sent[run[-1]], back=order[a] > order[b])
            messages[a, b] = Message(0.0, wire, 0.0)
    actions = actions_of(Order('1f1b', n), len(runs))
    needs = {
        m: total(parts.weights, run) + min(n, len(runs) - s) * total(parts.residuals, run)
        for s, (m, run) in enumerate(runs)
    }
    seconds = step(actions, times, messages, link.delay / 1e3)
    return Split(place, seconds, tuple(needs[m] for m in sorted(needs)))


def values_of(split: Split, parts: Parts) -> dict[str, str]:
    """The keys of a configuration that a split sets.

    >>> values_of(Split((1, 1, 0), 1.0, ()), Parts(True, (), (), (), 4))
    {'model.cuts': '2', 'parallel.place': '1 0'}
    >>> values_of(Split((0, 1, 1), 1.0, ()), Parts(False, (), (), (), 4))
    {'parallel.place': '0 1 1'}
    """
    place = split.place
    if not parts.blocks:
        return {'parallel.place': ' '.join(map(str, place))}
    cuts = [i for i in range(1, len(place)) if place[i] != place[i - 1]]
    order = [place[i] for i in (0, *cuts)]
    words = lambda numbers: ' '.join(map(str, numbers))
    return {'model.cuts': words(cuts), 'parallel.place': words(order)}


# Of a model.


def in_parts(config: Config) -> tuple[Any, int]:
    """The configuration whose stages tell of all parts, and the number of the parts.

    Blocks are alike: of many the first stage has one, the last one has one, and one between them
    has the rest.
    """
    from jaxmp.training.experiment import experiment_of

    stages = experiment_of(config).task.stages
    if config.model.name not in ('gpt2', 'pretrained'):
        return config, len(stages)
    count, c = sum(s.blocks for s in stages), config.copy_and_resolve_references()  # pyright: ignore
    c.model.cuts = ' '.join(map(str, sorted({1, count - 1} - {0, count})))
    c.model.stages = 1 if count == 1 else c.model.stages
    return c, count


def spread(values: Sequence[float], count: int) -> list[float]:
    """Values of ``count`` parts, given those of the stages of `in_parts`.

    >>> spread([5.0, 6.0, 7.0], 5), spread([5.0, 6.0], 2)
    ([5.0, 2.0, 2.0, 2.0, 7.0], [5.0, 6.0])
    """
    if len(values) == count:
        return list(values)
    first, middle, last = values
    return [first, *[middle / (count - 2)] * (count - 2), last]


def parts_of(exp: Experiment, count: int) -> Parts:
    """The parts of the model of an experiment as `in_parts` has it."""
    from jaxmp.training.footprint import footprint
    from jaxmp.training.sizes import likes, residual_rows

    needs = [footprint(exp, [s]) for s in range(len(exp.task.stages))]
    weights = [sum(v for k, v in row.items() if k != 'activations') for row in needs]
    sent = [x.size * BITS / 8 for x in likes(exp)]
    return Parts(
        exp.config.model.name in ('gpt2', 'pretrained'),
        spread(weights, count),
        spread([size for size, _ in residual_rows(exp)], count),
        sent if len(sent) == count - 1 else sent[:1] * (count - 1),
        exp.config.parallel.num_microbatches,
    )


def oriented(between: Between) -> Link:
    """The link from machine 0, which listens, to machine 1, as the latter measured it."""
    return Link(between.back, between.delay, between.there)
