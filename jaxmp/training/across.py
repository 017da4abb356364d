"""`Across`: what a step needs over all stages, where one program holds them or several do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp.exchange.collectives import Grads, Params
from jaxmp.exchange.copies import ENDS, Copies
from jaxmp.exchange.layout import State
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.placement import is_here
from jaxmp.runtimes.types import ByReplica
from jaxmp.training.groups import Groups, Home, copied, equal, is_first, joined, split, summed

Squares = dict[int, list[PyTree]]  # norms of a stage's groups, squared, perhaps by replica
Traffic = dict[str, Any]  # bytes a step by what moves them, as summary.json has them


class Across(NamedTuple):
    """What a step needs across stages, wherever they are.

    Attributes:
      total: sums numbers by stage; of several replicas, an array of their sums.
      tie: ``(gradients, state, key) -> (gradients, state)`` with the sum over all copies of a group
        in each copy.
      share: ``parameters -> parameters`` with equal copies, where two programs may round apart.
      init: the state of ``tie``.
      together: whether one program holds all stages; further copies of a group then follow the
        first, and replicas exchange its gradient once.
    """

    total: Callable[[Squares], Array]
    tie: Callable[[dict[int, Grads], State, Array], tuple[dict[int, Grads], State]]
    share: Callable[[dict[int, Params]], dict[int, Params]] = lambda params: params
    init: Callable[[], State] = tuple
    together: bool = False

    def follows(self, home: Home) -> bool:
        """Whether a group takes here what replicas have exchanged for its first home."""
        return self.together and not is_first(home)


def within(groups: Groups) -> Across:
    """The operations over stages that one program holds."""

    def total(squares: Squares) -> Array:
        return sum((x for row in squares.values() for x in row), jnp.zeros(()))

    def tie(
        gradients: dict[int, Grads], state: State, key: Array
    ) -> tuple[dict[int, Grads], State]:
        return summed(groups, gradients), state

    return Across(total, tie, functools.partial(equal, groups), together=True)


class Between:
    """The operations over stages whose programs are apart, perhaps in several processes."""

    def __init__(
        self, groups: Groups, group: ProcessGroup, columns: Columns, shapes: dict[int, Params]
    ) -> None:
        """Takes the copies of a table that are here.

        Args:
          groups: of the run.
          group: the processes.
          columns: the devices.
          shapes: those of the parameters of all stages.
        """
        self.groups, self.group, self.columns = groups, group, columns
        self.last = columns.devices.shape[1] - 1
        self.ends = dict(zip(ENDS, (0, self.last), strict=True))
        self.tables = self._tables(shapes)
        self.across = Across(self.total, self.tie, init=self.init)

    def _tables(self, shapes: dict[int, Params]) -> dict[int, Copies]:
        """The copies of the token table in the first and in the last stage, by replica."""
        if not (group := copied(self.groups)):
            return {}
        between = group.between
        assert between
        [table] = jax.tree.leaves(split(self.groups, shapes)[group.homes[0], group])
        rows = {r for s in group.homes for r in self.columns.here.get(s, ())}

        def copies(r: int) -> Copies:
            devices = {end: self.columns.devices[r, s] for end, s in self.ends.items()}
            here, swap = {end: d for end, d in devices.items() if is_here(d)}, None
            if len(here) < len(devices):
                index = lambda d: self.group.index if is_here(d) else d.process_index
                processes = [*map(index, devices.values())]
                swap = functools.partial(self.group.swapped, processes, f'table of replica {r},')
            return Copies(between, table, here, swap)

        return {r: copies(r) for r in sorted(rows)}

    def total(self, squares: Squares) -> Array:
        """The sum over all stages of each replica's squared norms, at every process."""
        here = np.zeros((self.columns.replicas, self.last + 1))
        for s, rows in jax.device_get(squares).items():
            for r in self.columns.here[s]:
                here[r, s] = sum(row[r] for row in rows)
        return jnp.asarray(self.group.total(here).sum(1).squeeze(), jnp.result_type(float))

    def init(self) -> State:
        """The state of the exchange between the two copies of the table, by stage."""
        states = {r: copies.init() for r, copies in self.tables.items()}
        return self._by_end(states) if jax.tree.leaves(states) else ()

    def _by_end(self, states: dict[int, State]) -> dict[int, ByReplica]:
        rows = {s: {r: t[e] for r, t in states.items() if e in t} for e, s in self.ends.items()}
        return {s: ByReplica(row) for s, row in rows.items() if row}

    def tie(
        self, grads: dict[int, Grads], before: State, key: Array
    ) -> tuple[dict[int, Grads], State]:
        """Gradients with the sum of both tables' in both end stages; the exchange's next state."""
        after, group = {}, copied(self.groups)
        assert group
        tables = {s: p for (s, g), p in split(self.groups, grads).items() if g == group}
        for r, copies in self.tables.items():
            ends = {e: s for e, s in self.ends.items() if e in copies.here}
            parts = {e: jax.tree.leaves(tables[s][r])[0] for e, s in ends.items()}
            states = {e: before[s][r] for e, s in ends.items()} if before else ()
            totals, after[r] = copies.add(parts, states, key)
            for e, total in totals.items():
                table = tables[ends[e]]
                new = jax.tree.unflatten(jax.tree.structure(table[r]), [total])
                tables[ends[e]] = ByReplica({**table, r: new})
        summed = joined(grads, {(s, group): table for s, table in tables.items()})
        return summed, self._by_end(after) if before else ()

    def traffic(self) -> list[Traffic]:
        """A row of the table of bytes per link, where there is a table."""
        if not self.tables:
            return []
        table = next(iter(self.tables.values())).traffic()
        ways = {'payload': [table['handed']] * 2, 'collectives': [table['compiled']] * 2}
        return [{'boundary': 'token table', **ways}]
