"""`Parallel`: where the replicas and stages of a run are, and all that follows from it.

``config.parallel.runtime`` names one of three, and nothing else in the package asks which it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax

from jaxmp.config import KEYS, Config
from jaxmp.exchange import AXIS
from jaxmp.net.connect import owners
from jaxmp.net.group import ProcessGroup
from jaxmp.plugins import called
from jaxmp.runtimes import schedule
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.placement import device_mesh, open_links, place
from jaxmp.runtimes.replicated import Replicated
from jaxmp.runtimes.schedule import Action
from jaxmp.runtimes.schedules import most_kept, named
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.types import Model, PlacedRuntime
from jaxmp.runtimes.wires import AXIS as STAGE

Build = Callable[[Model, bool], PlacedRuntime]  # of a model, and whether it is trained


@dataclass(frozen=True)
class Parallel:
    """One program of all stages by each replica.

    Attributes:
      config: of the run.
      stages: their number S.
      apart: whether stages are on devices of their own.
      skips: whether stages below all that is trained run no backward.
      joined: whether several processes are one JAX; else each has one of its own.
      keeps: whether what never changes is sent once.
      part: what processes divide among themselves.
    """

    config: Config
    stages: int

    apart: ClassVar[bool] = False
    skips: ClassVar[bool] = True
    joined: ClassVar[bool] = True
    keeps: ClassVar[bool] = False
    part: ClassVar[str] = 'replica'

    @property
    def replicas(self) -> int:
        """R."""
        return self.config.parallel.replicas

    def devices(self, processes: int) -> int:
        """How many devices each of some processes needs."""
        return max(1, self.replicas // processes)

    def parts(self) -> list[int]:
        """The place of each part that processes divide; one or none for a single process."""
        return list(range(self.replicas))

    def stages_of_process(self, index: int, count: int) -> list[int]:
        """The stages of a process of ``count``, once for each replica that it has."""
        return list(range(self.stages)) * owners(self.replicas, count).count(index)

    def builder(self, group: ProcessGroup) -> Build:
        """Takes the devices of the run; what it returns makes runtimes over them.

        One that does not train is of the first replica alone.

        Args:
          group: the processes.

        Raises:
          ValueError: if there are too few devices, or processes cannot divide the parts.
        """
        mesh = device_mesh(**{AXIS: self.replicas}) if self.replicas > 1 else None
        if mesh and jax.process_count() > 1:
            open_links(mesh)
        here = not mesh or mesh.devices[0].process_index == jax.process_index()
        test = lambda model: Replicated(model, train=False, here=here)
        return lambda model, train: Replicated(model, mesh) if train else test(model)

    def feedback_bytes(self, ends: Sequence[Sequence[int]]) -> int:
        """Bytes of the feedback states of one replica, given those of the ends of each boundary."""
        return sum(map(sum, ends))

    def residuals(self, sizes: Sequence[int], delays: Sequence[int] = ()) -> list[tuple[int, int]]:
        """For each stage the bytes of a micro-batch's residuals, and how many it keeps at once.

        Args:
          sizes: bytes of the residuals of each stage.
          delays: steps that its gradients are late.
        """
        return [(size, 1) for size in sizes]


class OverMesh(Parallel):
    """One program over a mesh of replicas and stages; a device is as large as the largest stage."""

    apart = True
    skips = False
    part = 'stage'

    def devices(self, processes: int) -> int:
        """See `Parallel`."""
        return max(1, self.replicas * self.stages // processes)

    def parts(self) -> list[int]:
        """See `Parallel`."""
        return list(range(self.replicas * self.stages))

    def stages_of_process(self, index: int, count: int) -> list[int]:
        """See `Parallel`."""
        places = owners(self.replicas * self.stages, count)
        return [i % self.stages for i, owner in enumerate(places) if owner == index]

    def builder(self, group: ProcessGroup) -> Build:
        """See `Parallel`."""
        mesh = device_mesh(**{AXIS: self.replicas, STAGE: self.stages})
        if jax.process_count() > 1:
            open_links(mesh)
        columns, first = Columns(mesh.devices), Columns(mesh.devices[:1])
        return lambda model, train: Spmd(model, columns if train else first, train=train)

    def feedback_bytes(self, ends: Sequence[Sequence[int]]) -> int:
        """See `Parallel`."""
        return self.stages * sum(max(column) for column in zip(*ends, strict=True))

    def residuals(self, sizes: Sequence[int], delays: Sequence[int] = ()) -> list[tuple[int, int]]:
        """See `Parallel`."""
        slots = min(self.config.parallel.num_microbatches, 2 * self.stages - 1)
        return [(max(sizes), slots)] * self.stages


class ByStage(Parallel):
    """A program per stage, in the order of a schedule."""

    apart = True
    joined = False
    keeps = True
    part = 'stage'

    @property
    def actions(self) -> tuple[Action, ...]:
        """The schedule."""
        return actions_of(self.config, self.stages)

    def places(self) -> list[int]:
        """The number of what stays together, of each stage of a replica: by default its device.

        Raises:
          ValueError: if ``config.parallel.place`` is not one of these stages and this schedule.
        """
        homes = schedule.place(self.actions)
        return list(homes) if not (text := self.config.parallel.place) else placed(text, homes)

    def parts(self) -> list[int]:
        """See `Parallel`."""
        places = self.places()
        return [r * (1 + max(places)) + p for r in range(self.replicas) for p in places]

    def stages_of_process(self, index: int, count: int) -> list[int]:
        """See `Parallel`."""
        places = self.parts()
        owner = owners(1 + max(places), count)
        return [i % self.stages for i, place in enumerate(places) if owner[place] == index]

    def builder(self, group: ProcessGroup) -> Build:
        """See `Parallel`."""
        actions, c = self.actions, self.config.parallel
        homes = schedule.place(actions)
        by_device = dict(zip(homes, self.places(), strict=True))
        width = 1 + max(by_device.values())
        parts = [r * width + by_device[d] for r in range(self.replicas) for d in sorted(by_device)]
        rows = place(self.replicas, 1 + max(homes), group=group, parts=parts)
        columns = Columns([[row[d] for d in homes] for row in rows], group=group)
        first = Columns(columns.devices[:1], group=group)

        def build(model: Model, train: bool) -> PlacedRuntime:
            emulated = (c.link_rate, c.link_delay) if train else (0.0, 0.0)
            over = columns if train else first
            return Mpmd(model, over, actions, train=train, emulated=emulated)

        return build

    def residuals(self, sizes: Sequence[int], delays: Sequence[int] = ()) -> list[tuple[int, int]]:
        """See `Parallel`."""
        if delays:
            most = most_kept(self.config.parallel.num_microbatches, delays)
        else:
            most = schedule.most_kept(self.actions)
        return list(zip(sizes, most, strict=True))


def placed(text: str, homes: Sequence[int]) -> list[int]:
    """The numbers of ``config.parallel.place``.

    Args:
      text: the process of each stage.
      homes: the device of each stage.

    Raises:
      ValueError: if it has another number of stages, leaves a process out, or divides a device.

    >>> placed('0 0 1', (0, 1, 2)), placed('1, 0', (0, 1))
    ([0, 0, 1], [1, 0])
    """
    words = text.replace(',', ' ').split()
    numbers = [int(word) if word.isdecimal() else -1 for word in words]
    process_of = dict(zip(homes, numbers, strict=False))
    if (
        len(numbers) != len(homes)
        or {*numbers} != {*range(1 + max(numbers))}
        or any(process_of[d] != n for d, n in zip(homes, numbers, strict=True))
    ):
        raise ValueError(
            f'config.parallel.place={text!r} is not the process of each of {len(homes)} stages, '
            "each process at least once and stages of a device in the same one; give it as '0 0 1'"
        )
    return numbers


RUNTIMES = {'local': Parallel, 'spmd': OverMesh, 'mpmd': ByStage}


def apart(config: Config) -> bool:
    """Whether the runtime of a configuration has stages on devices of their own."""
    return RUNTIMES[config.parallel.runtime].apart


def parallel_of(config: Config, stages: int) -> Parallel:
    """The placement that ``config.parallel`` names."""
    return RUNTIMES[config.parallel.runtime](config, stages)


def actions_of(config: Config, stages: int) -> tuple[Action, ...]:
    """The schedule that ``config.parallel.schedule`` names.

    Raises:
      ValueError: if the schedule is broken, of another size, or not one of so many stages.
    """
    name, count = config.parallel.schedule, config.parallel.num_microbatches
    if make := named(name):
        try:
            return make(stages, count)
        except ValueError as error:
            raise ValueError(f'config.parallel.schedule={name!r}: {error}') from None
    wanted = KEYS['parallel.schedule'].own
    actions = tuple(called('parallel.schedule', name, wanted, stages, count))
    schedule.check(actions)
    if schedule.size(actions)[:2] != (stages, count):
        raise ValueError(
            f'config.parallel.schedule={name!r} is of {schedule.size(actions)[:2]} stages and '
            f'micro-batches, and there are {stages} and {count}'
        )
    return actions
