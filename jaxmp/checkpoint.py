"""Saving and restoring a run: the whole train state, its configuration, its place in the data."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp.files import WorkdirError, write_json
from jaxmp.team import Team
from jaxmp.training import portable
from jaxmp.training.portable import Portable

SEEN = 4  # checkpoints that processes compare, more than are ever kept
LONGEST = 240  # of a reason
LEAST_ROOM = 2**20  # bytes on the disk, for any checkpoint
NO_SPACE = 'No space left on device'


class Checkpoints:
    """The checkpoints of a workdir, the newest two kept.

    A team writes one checkpoint together: each process's part is a row of bytes of one array over
    all processes, so that a kill in mid-save leaves every stage at the same older step. They need
    a file system that all of them see. A checkpoint holds a CRC-32 of every array, and is passed
    over where a process reads another one.

    Attributes:
      damaged: what `restore` has passed over, a reason for each step.
    """

    def __init__(
        self, workdir: Path, team: Team | None = None, config: dict[str, Any] | None = None
    ) -> None:
        """Opens ``workdir/checkpoints``.

        Args:
          workdir: the run's folder.
          team: the processes; default this one alone.
          config: left as ``workdir/config.json`` with the first checkpoint.

        Raises:
          WorkdirError: if there can be no such folder.
        """
        import orbax.checkpoint as ocp  # seconds of import

        self._ocp, self._team, self._workdir, self._config = ocp, team or Team(), workdir, config
        self.damaged: dict[int, str] = {}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, cleanup_tmp_directories=True
        )
        folder = (workdir / 'checkpoints').absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)  # orbax would find out after an epoch
        except OSError as error:
            raise WorkdirError(
                f'cannot keep checkpoints in {folder}: {error}; give a --workdir where that is a '
                'folder, or nothing'
            ) from error
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, step: int, state: Portable, place: dict[str, Any]) -> None:
        """Writes ``state``, this process's part, and ``place`` (JSON) as of ``step``.

        Raises:
          WorkdirError: if the file system refuses.
        """
        args, own = self._ocp.args, portable.to_bytes(state)
        rows = self._rows(own)
        layouts = self._team.share(portable.layout(state))
        about = {
            'place': place,
            'layout': {k: v for one in layouts for k, v in one.items()},
            'bytes': self._team.gather(np.array([len(own)]))[:, 0].tolist(),
            'crc32': self._team.gather(np.array([zlib.crc32(own)]))[:, 0].tolist(),
        }
        both = args.Composite(
            state=args.StandardSave({'rows': rows}),
            place=args.JsonSave({**about, 'sum': _sum(about)}),
        )
        if not (problem := self._no_room()):
            problem = self._write(step, both)
        if problem:
            raise WorkdirError(
                f'cannot write the checkpoint of step {step} to {self._manager.directory}: '
                f'{problem}; make room there and give the same command again'
            )
        if self._config is not None:
            write_json(self._workdir / 'config.json', self._config)
            self._config = None

    def _no_room(self) -> str:
        """Whether there is less room than the last checkpoint took: orbax would find out loudly."""
        folder, last = self._manager.directory, self._manager.latest_step()
        files = [] if last is None else Path(folder, str(last)).rglob('*')
        needed = max(LEAST_ROOM, sum(512 * p.stat().st_blocks for p in files))
        free = shutil.disk_usage(folder).free
        return '' if free > needed else f'{needed:,} bytes must be free, and {free:,} are'

    def _write(self, step: int, args: Any) -> str:
        """Writes a checkpoint; returns what was wrong."""
        try:
            with _silent():
                self._manager.save(step, args=args, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            logging.set_verbosity(logging.FATAL)  # what orbax has left behind complains later
            return _line(error)
        return ''

    def restore(self, like: Portable) -> tuple[Portable, dict[str, Any]] | None:
        """The newest good state of all stages, and its place; or None.

        All processes take the same step. Damaged ones are moved to ``workdir/damaged``.

        Args:
          like: this process's part of such a state.

        Raises:
          WorkdirError: if the checkpoint was made with another model or channel, or all are
            damaged.
        """
        self.damaged = {}
        for step in self._steps():
            with _silent():
                found, problem = self._read(Path(self._manager.directory, str(step)), like)
                if problem:
                    gc.collect()  # what orbax has left half read complains when it goes
            problem = self._all_say(problem)
            if not problem:
                self._set_aside()
                return found['state'], found['place']
            self.damaged[step] = problem
        if self.damaged:
            said = '; '.join(f'step {step}: {why}' for step, why in self.damaged.items())
            raise WorkdirError(
                f'no checkpoint in {self._manager.directory} can be read ({said}); give a new '
                '--workdir, or remove that folder to begin again'
            )
        return None

    def _steps(self) -> list[int]:
        """The checkpoints that all processes see, newest first."""
        own = sorted(self._manager.all_steps(), reverse=True)
        rows = self._team.gather(np.array([*own, *[-1] * SEEN][:SEEN]))
        common = set.intersection(*(set(row.tolist()) for row in rows)) - {-1}
        return sorted(common, reverse=True)

    def _read(self, where: Path, like: Portable) -> tuple[dict[str, Any], str]:
        """A checkpoint as this process reads it, without waiting for others; and what is wrong."""
        try:
            about = self._ocp.JsonCheckpointHandler().restore(where / 'place')
            if about.pop('sum', None) != _sum(about):
                return {}, 'its description has changed'
            _check_layout(where, about['layout'], portable.layout(like))
            kind = self._ocp.RestoreArgs(restore_type=np.ndarray)
            args = self._ocp.args.PyTreeRestore(restore_args={'rows': kind})
            found = self._ocp.PyTreeCheckpointHandler().restore(where / 'state', args=args)
        except (WorkdirError, MemoryError):
            raise
        except Exception as error:  # orbax and tensorstore raise nearly anything on damaged files
            return {}, _line(error)
        rows = zip(found['rows'], about['bytes'], strict=True)
        rows = [row[:size].tobytes() for row, size in rows]
        for i, (row, digest) in enumerate(zip(rows, about['crc32'], strict=True)):
            if zlib.crc32(row) != digest:
                return {}, f'the part of process {i} has another checksum'
        return {'state': portable.from_bytes(rows), 'place': about['place']}, ''

    def _rows(self, own: bytes) -> Any:
        """This process's bytes as a row of an array over all."""
        width = int(np.max(self._team.gather(np.array([len(own)]))))
        row = np.zeros((1, width), np.uint8)
        row[0, : len(own)] = np.frombuffer(own, np.uint8)
        n = self._team.count
        if n == 1:
            return row
        devices = [next(d for d in jax.devices() if d.process_index == i) for i in range(n)]
        mesh = Mesh(np.array(devices), ('process',), axis_types=(AxisType.Auto,))
        place = NamedSharding(mesh, P('process'))
        return jax.make_array_from_process_local_data(place, row, (n, width))

    def _all_say(self, problem: str) -> str:
        """What is wrong in any process; the same everywhere."""
        own = problem.encode()[:LONGEST].ljust(LONGEST, b'\0')
        rows = self._team.gather(np.frombuffer(own, np.uint32))
        said = [row.tobytes().rstrip(b'\0').decode(errors='ignore') for row in rows]
        if self._team.count == 1:
            return said[0]
        return ', '.join(f'process {i}: {text}' for i, text in enumerate(said) if text)

    def _set_aside(self) -> None:
        """Moves what is damaged out of the way of the checkpoints to come."""
        if not self.damaged:
            return
        for step in self.damaged if self._team.index == 0 else ():
            to = self._workdir / 'damaged' / str(step)
            shutil.rmtree(to, ignore_errors=True)
            to.parent.mkdir(exist_ok=True)
            (self._manager.directory / str(step)).rename(to)
        self._team.gather(np.zeros(1))  # the others wait for it
        self._manager.reload()

    def close(self) -> None:
        """Ends pending work."""
        self._manager.close()


@contextmanager
def _silent() -> Iterator[None]:
    """Without orbax's own complaints of what is told in a line."""
    level, hook = logging.get_verbosity(), sys.unraisablehook
    logging.set_verbosity(logging.FATAL)
    sys.unraisablehook = lambda args: hook(args) if args.exc_type is MemoryError else None
    try:
        yield
    finally:
        logging.set_verbosity(level)
        sys.unraisablehook = hook


def _check_layout(where: Path, written: dict[str, Any], own: dict[str, Any]) -> None:
    """Raises WorkdirError unless a checkpoint has this process's parts as they are."""
    for part, leaves in own.items():
        found = written.get(part, {})
        if found != leaves:
            path, _ = sorted({*found.items()} ^ {*leaves.items()})[0]
            raise WorkdirError(
                f'{where} holds the state of another model or channel: stage {part} differs at '
                f'{path} ({found.get(path)}, now {leaves.get(path)}); use the configuration that '
                'made it or a new --workdir'
            )


def _sum(about: dict[str, Any]) -> int:
    """The checksum of a checkpoint's description."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _line(error: Exception) -> str:
    """The first sentence of an error, or its kind."""
    if NO_SPACE in str(error):  # tensorstore tells of every folder on the way
        return NO_SPACE
    first = (str(error).splitlines() or [''])[0].partition('. See full')[0]
    return first[:LONGEST] or type(error).__name__
