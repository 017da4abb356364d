"""`Norms`: squared norms by stage, which stages tell each other long before they are needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.links import Arrived, Lane, remote_move
from jaxmp.runtimes.placement import Device, is_here


class Batch(NamedTuple):
    """A batch whose gradients are not used yet.

    Attributes:
      step: in which it began.
      number: since the pipeline was last empty.
    """

    step: int
    number: int


class Norms:
    """The squared norms of the stages' gradients, batch by batch; no process waits to tell one."""

    def __init__(self, devices: Sequence[Device], group: ProcessGroup) -> None:
        """Tells nothing yet.

        Args:
          devices: of the stages.
          group: the processes.
        """
        process = lambda d: group.index if is_here(d) else d.process_index
        firsts = {process(d): d for d in reversed(devices)}  # one device of each process
        like = jax.ShapeDtypeStruct((), jnp.result_type(float))
        self._here: dict[tuple[int, Batch], Array] = {}
        self._coming: dict[Batch, dict[int, Arrived]] = {}
        self._lanes: dict[tuple[int, int], Lane] = {}  # by stage, and the process that is told
        for s, device in enumerate(devices):
            for other, target in firsts.items():
                if other != process(device) and group.index in (other, process(device)):
                    tag = f'norm of stage {s},'
                    move = remote_move(group, (device, target), like)
                    self._lanes[s, other] = Lane(
                        move, address=functools.partial(group.address, tag)
                    )
        self._group, self._index, self._count = group, group.index, len(devices)

    @property
    def step(self) -> int:
        """The step that has begun."""
        return self._group.step

    def again(self) -> None:
        """Forgets what was told and not used."""
        self._here.clear()
        self._coming.clear()

    def tell(self, stage: int, square: Array, batch: Batch) -> None:
        """Sends the squared norm of a stage here to all other processes."""
        self._here[stage, batch] = square
        for (s, other), lane in self._lanes.items():
            if s == stage and other != self._index:
                message: Future[Array] = Future()
                message.set_result(square)
                lane.carry(message, batch)

    def coming(self, batch: Batch, first: int) -> dict[int, Arrived]:
        """What other processes tell of their stages from ``first``, once it is there."""
        if batch not in self._coming:
            elsewhere = [s for s, to in self._lanes if to == self._index and s >= first]
            lanes = {s: self._lanes[s, self._index] for s in elsewhere}
            self._coming[batch] = {s: lane.carry(None, batch) for s, lane in lanes.items()}
        return self._coming[batch]

    def total(self, batch: Batch, first: int) -> Callable[[], Array]:
        """What gives the sum of what `coming` tells and the stages here have told."""
        coming = self.coming(batch, first)
        self._coming.pop(batch, None)
        here = {s: self._here.pop((s, b)) for s, b in list(self._here) if b == batch}

        def summed() -> Array:
            squares = here | {s: arrived.result()[0] for s, arrived in coming.items()}
            row = [float(squares.get(s, 0.0)) for s in range(self._count)]
            return jnp.asarray(np.sum(row), jnp.result_type(float))

        return summed
