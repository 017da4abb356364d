"""`FeedbackMemory`: the feedback states of unequal stages as tables of rows, one row per sample.

Each of the four ends of a stage has a table. A micro-batch reads its rows before its pass and
writes them back after it, so that no table of AQ-SGD is copied: rows by example where the state is
per example, otherwise the rows of its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.feedback.channel import BY_TOKEN
from jaxmp.runtimes.packing import Packing, Vectors
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import Feedback

Rows = dict[str, Vectors]  # by the name of an end of a stage: vectors, axis 0 the row


class Crossing(NamedTuple):
    """A micro-batch at a stage.

    Attributes:
      stage: the stage's number, known when the program runs.
      microbatch: its number within the step.
      active: False in an idle tick, which reads and writes no row.
      ids: of its examples, or None.
    """

    stage: Array
    microbatch: Array
    active: Array
    ids: Array | None


class FeedbackMemory:
    """The layout of all stages' feedback states, and the rows of a crossing."""

    def __init__(self, programs: Sequence[StageProgram], one_slot: Sequence[Feedback]) -> None:
        """Compares the states of all stages.

        Args:
          programs: of all stages.
          one_slot: shapes of each stage's states of a single crossing.

        Raises:
          ValueError: if a state has no row per sample.
        """
        cuts = [[c for b in (p.left, p.right) for c in ((b.fwd, b.bwd) if b else (b, b))]
                for p in programs]  # fmt: skip
        for c in (c for row in cuts for c in row if c is not None and c.state_of in BY_TOKEN):
            raise ValueError(
                f'{c} keeps a table per token, and runtime spmd moves a row per sample; use mpmd '
                'or local'
            )
        self._one_slot, self._samples = one_slot, programs[0].x.shape[0]
        self._whole = [jax.eval_shape(p.init_feedback) for p in programs]
        self._packings = {
            end: Packing([getattr(f, end) for f in one_slot], lead=1) for end in Feedback._fields
        }
        self._rows = {
            end: [self._count(s, end) for s in range(len(programs))] for end in Feedback._fields
        }
        self._most = {end: max(rows) for end, rows in self._rows.items()}
        kinds = np.array(
            [[c is not None and c.state_of == 'example' for c in row] for row in cuts]
        ).T
        self._per_example = dict(zip(Feedback._fields, kinds, strict=True))

    def _count(self, s: int, end: str) -> int:
        """Rows of an end of stage ``s``."""
        count = 0
        trees = getattr(self._whole[s], end), getattr(self._one_slot[s], end)
        for whole, one in zip(*map(jax.tree.leaves, trees), strict=True):
            if one.ndim == 0 or len(one) != self._samples:
                raise ValueError(
                    f'a feedback state of shape {one.shape} has not a row per sample '
                    f'({self._samples}), which runtime spmd needs; use mpmd or local'
                )
            count = whole.size // (one.size // len(one))
        return count

    def pack(self, s: int, feedback: Feedback) -> Rows:
        """Stage ``s``'s states as rows, padded to the most rows of all stages."""
        packed = {}
        for end, packing in self._packings.items():
            flat = jax.tree.map(
                lambda a, like: a.reshape(-1, *like.shape[1:]),
                getattr(feedback, end), getattr(self._one_slot[s], end),
            )  # fmt: skip
            count = self._rows[end][s]
            short = self._most[end] - count
            rows = packing.pack(s, flat, (count,))
            packed[end] = jax.tree.map(lambda a: jnp.pad(a, ((0, short), (0, 0))), rows)  # noqa: B023
        return packed

    def unpack(self, s: int, rows: Rows) -> Feedback:
        """Stage ``s``'s states; inverse of `pack`."""
        trees = {}
        for end, packing in self._packings.items():
            count = self._rows[end][s]
            tree = packing.unpack(s, jax.tree.map(lambda a: a[:count], rows[end]))  # noqa: B023
            shaped = lambda a, like: a.reshape(like.shape)
            trees[end] = jax.tree.map(shaped, tree, getattr(self._whole[s], end))
        return Feedback(**trees)

    def read(self, s: int, rows: Rows) -> Feedback:
        """Stage ``s``'s states of one crossing, at the ends that ``rows`` has."""
        return Feedback(**{end: self._packings[end].unpack(s, a) for end, a in rows.items()})

    def write(self, s: int, feedback: Feedback, rows: Rows) -> Rows:
        """``rows`` with the states of one crossing; inverse of `read`."""
        pack = lambda end: self._packings[end].pack(s, getattr(feedback, end), (self._samples,))
        return {end: pack(end) if self._most[end] else a for end, a in rows.items()}

    def take(self, tables: Rows, ends: Sequence[str], at: Crossing) -> Rows:
        """The rows of a crossing at some ends; a row out of range is NaN."""
        row = lambda end: lambda a: a.at[self._index(end, at)].get(mode='fill')
        get = lambda end: jax.tree.map(row(end), tables[end])
        return {end: get(end) if self._most[end] else tables[end] for end in ends}

    def put(self, tables: Rows, rows: Rows, at: Crossing) -> Rows:
        """All tables with the rows of a crossing replaced."""
        after = dict(tables)
        for end, new in rows.items():
            if self._most[end]:
                i = self._index(end, at)
                put = lambda a, b: a.at[i].set(b, mode='drop')  # noqa: B023
                after[end] = jax.tree.map(put, tables[end], new)
        return after

    def _index(self, end: str, at: Crossing) -> Array:
        """The rows of a crossing; beyond the last one in an idle tick."""
        rows = at.microbatch * self._samples + jnp.arange(self._samples)
        if self._per_example[end].any():
            if at.ids is None:
                raise ValueError("aqsgd needs ctx.ids; the data pipeline must yield 'id'")
            known = (at.ids >= 0) & (at.ids < jnp.asarray(self._rows[end])[at.stage])
            ids = jnp.where(known, at.ids, self._most[end])
            rows = jnp.where(jnp.asarray(self._per_example[end])[at.stage], ids, rows)
        return jnp.where(at.active, rows, self._most[end])
