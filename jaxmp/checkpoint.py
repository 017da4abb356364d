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

import flax.serialization
import jax
import numpy as np
from absl import logging
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp.files import WorkdirError, write_json
from jaxmp.team import Team

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

    def save(self, step: int, state: Any, place: dict[str, Any]) -> None:
        """Writes ``state`` (a pytree of arrays and keys) and ``place`` (JSON) as of ``step``.

        Raises:
          WorkdirError: if the file system refuses.
        """
        args, layout = self._ocp.args, _layout(state)
        if self._team.count > 1:
            state = _rows(self._team, state)
            layout = _layout(state)
        about = {'place': place, 'layout': layout, 'crc32': self._digests(state)}
        both = args.Composite(
            state=args.StandardSave(state), place=args.JsonSave({**about, 'sum': _sum(about)})
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

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest good state, with the shapes and dtypes of ``like``, and its place; or None.

        All processes take the same step. Damaged ones are moved to ``workdir/damaged``.

        Raises:
          WorkdirError: if the checkpoint was made with another model or channel, or all are
            damaged.
        """
        held, self.damaged = like if self._team.count == 1 else _rows(self._team, like), {}
        for step in self._steps():
            with _silent():
                found, problem = self._read(Path(self._manager.directory, str(step)), held)
                if problem:
                    gc.collect()  # what orbax has left half read complains when it goes
            problem = self._all_say(problem)
            if not problem:
                self._set_aside()
                state = found['state'] if held is like else _unrow(found['state'], like)
                return state, found['place']
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

    def _read(self, where: Path, held: Any) -> tuple[dict[str, Any], str]:
        """A checkpoint as this process reads it, without waiting for others; and what is wrong."""
        abstract = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, held)
        try:
            about = self._ocp.JsonCheckpointHandler().restore(where / 'place')
            if about.pop('sum', None) not in (None, _sum(about)):
                return {}, 'its description has changed'
            # Compared first: a restore that orbax refuses halfway leaves its readers behind.
            if about['layout'] != (now := _layout(held)):
                other = sorted({*about['layout'].items()} ^ {*now.items()})[0]
                raise WorkdirError(
                    f'{where} holds the state of another model or channel: it differs at '
                    f'{other[0]} ({about["layout"].get(other[0])}, now {now.get(other[0])}); use '
                    'the configuration that made it or a new --workdir'
                )
            args = self._ocp.args.StandardRestore(abstract)
            state = self._ocp.StandardCheckpointHandler().restore(where / 'state', args=args)
            written, index = about.get('crc32', {}), self._team.index
            wrong = [k for k, n in _crc32(state).items() if written and written[k][index] != n]
        except (WorkdirError, MemoryError):
            raise
        except Exception as error:  # orbax and tensorstore raise nearly anything on damaged files
            return {}, _line(error)
        if wrong:
            return {}, f'{wrong[0]} has another checksum'
        return {'state': state, 'place': about['place']}, ''

    def _digests(self, state: Any) -> dict[str, list[int]]:
        """The checksum of every array in each process."""
        own = _crc32(state)
        rows = self._team.gather(np.array([*own.values()], np.int64))
        return dict(zip(own, rows.T.tolist(), strict=True))

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


def _crc32(state: Any) -> dict[str, int]:
    """A checksum of what this process has of every leaf, by its path.

    4.5 GB/s, a twentieth of the time of writing; blake2b takes 0.9 GB/s.
    """

    def one(a: Any) -> int:
        return zlib.crc32(np.ascontiguousarray(_words(a)).view(np.uint8).data)

    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): one(a) for path, a in leaves}


def _sum(about: dict[str, Any]) -> int:
    """The checksum of a checkpoint's description."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _line(error: Exception) -> str:
    """The first sentence of an error, or its kind."""
    if NO_SPACE in str(error):  # tensorstore tells of every folder on the way
        return NO_SPACE
    first = (str(error).splitlines() or [''])[0].partition('. See full')[0]
    return first[:LONGEST] or type(error).__name__


def _rows(team: Team, state: Any) -> dict[str, jax.Array]:
    """``state`` as this process's row of bytes, its length in front, of an array over all."""
    own = flax.serialization.to_bytes(jax.tree.map(_words, state))
    own = np.frombuffer(len(own).to_bytes(8, 'little') + own, np.uint8)
    width = int(np.max(team.gather(np.array([len(own)]))))
    row = np.zeros((1, width), np.uint8)
    row[0, : len(own)] = own
    devices = [next(d for d in jax.devices() if d.process_index == i) for i in range(team.count)]
    mesh = Mesh(np.array(devices), ('process',), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, P('process'))
    return {'rows': jax.make_array_from_process_local_data(place, row, (team.count, width))}


def _unrow(rows: dict[str, jax.Array], like: Any) -> Any:
    """Inverse of `_rows`, with the shapes, dtypes and devices of ``like``."""
    own = np.asarray(rows['rows'].addressable_data(0))[0].tobytes()
    data = own[8 : 8 + int.from_bytes(own[:8], 'little')]
    found = flax.serialization.from_bytes(jax.tree.map(_words, like), data)
    return jax.tree.map(_back, like, found)


def _is_key(a: Any) -> bool:
    return jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key)


def _words(a: Any) -> np.ndarray:
    """What this process has of ``a``: its rows, or what all have."""
    a = jax.random.key_data(a) if _is_key(a) else a
    if not isinstance(a, jax.Array) or a.is_fully_addressable or a.is_fully_replicated:
        return np.asarray(a)
    own = sorted(a.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([np.asarray(shard.data) for shard in own])


def _back(like: Any, a: Any) -> Any:
    if not isinstance(like, jax.Array):
        return a
    shape = jax.eval_shape(jax.random.key_data, like).shape if _is_key(like) else like.shape
    a = jax.make_array_from_process_local_data(like.sharding, a, shape)
    return jax.random.wrap_key_data(a, impl=jax.random.key_impl(like)) if _is_key(like) else a


def _layout(state: Any) -> dict[str, str]:
    """Shape and dtype of every leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f'{a.dtype}{list(a.shape)}' for path, a in leaves}
