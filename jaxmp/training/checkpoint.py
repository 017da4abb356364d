"""`Checkpoints`: saved states of a run, with its configuration and its position in the data."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from jaxmp.config import Config
from jaxmp.net.group import ProcessGroup
from jaxmp.training import portable
from jaxmp.training.portable import Layout, Piece, Portable
from jaxmp.training.workdir.locks import WorkdirError, write_json

Place = dict[str, Any]  # since the last test: the steps, those that this process missed, sums over
# the others; and the seconds of the run
Description = dict[str, Any]  # of a checkpoint, the JSON beside its state
LONGEST = 240  # most letters of a reason
LEAST_ROOM = 2**20  # bytes that must be free on the disk for any checkpoint
NO_SPACE = 'No space left on device'


class Checkpoints:
    """The checkpoints of a workdir, of which the newest two are kept.

    The workdir is that of the first process, to which the others send their states, as one
    checkpoint of them all; each gets from it what it needs to go on. A checkpoint has the CRC-32 of
    each process's part; one with a wrong CRC-32 is skipped.

    Attributes:
      damaged: the checkpoints that `restore` has skipped, with a reason for each step.
    """

    def __init__(
        self,
        workdir: Path,
        group: ProcessGroup | None = None,
        config: Config | None = None,
        inputs: Mapping[str, str] | None = None,
        memory: dict[int, list[bytes]] | None = None,
    ) -> None:
        """Opens ``workdir/checkpoints`` in the first process.

        Args:
          workdir: folder of the run.
          group: the processes; default a single process.
          config: configuration that is saved as ``workdir/config.json`` with the first checkpoint.
          inputs: digests of what the run reads, which a checkpoint that is restored must have too.
          memory: where this process keeps what it saved last, by its step, and from which it goes
            on after another one was lost; default nowhere.

        Raises:
          WorkdirError: if the folder cannot be created.
        """
        import orbax.checkpoint as ocp  # the import takes seconds

        self._ocp, self._group = ocp, group or ProcessGroup()
        self._workdir, self._config, self._inputs = workdir, config, dict(inputs or {})
        self.damaged: dict[int, str] = {}
        self._memory = memory
        if self._group.index:
            return
        alone = ocp.options.MultiprocessingOptions(active_processes={0})
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2,
            enable_async_checkpointing=False,
            cleanup_tmp_directories=True,
            create=False,
            multiprocessing_options=alone,
        )
        handlers = {  # a state of floats gets 8 % smaller by compression, in twice the time
            'state': ocp.PyTreeCheckpointHandler(
                save_device_host_concurrent_gb=1, use_compression=False,
                multiprocessing_options=alone,
            ),
            'place': ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        }  # fmt: skip
        folder = (workdir / 'checkpoints').absolute()
        try:
            folder.mkdir(parents=True, exist_ok=True)  # orbax would fail only after an epoch
        except OSError as error:
            raise WorkdirError(
                f'cannot keep checkpoints in {folder}: {error}; give a --workdir in which that is '
                'a folder or does not exist'
            ) from error
        self._manager = ocp.CheckpointManager(folder, options=options, item_handlers=handlers)

    def save(self, step: int, state: Portable, place: Place) -> None:
        """Writes the checkpoint of ``step``: the states of all processes, and ``place`` (JSON).

        It stays as it is if it is there already, as where a run is resumed to end at its step.

        Raises:
          WorkdirError: in the first process, if writing fails.
        """
        newest = None if self._group.index else self._manager.latest_step()
        if step == self._group.share(newest)[0]:
            return
        pieces = portable.to_pieces(state)
        rows = self._group.to_first(pieces)
        layouts = self._group.share(portable.layout(state))
        if rows:
            about = {
                'place': place,
                'inputs': self._inputs,
                'layout': {k: v for one in layouts for k, v in one.items()},
                'bytes': [len(row[0]) for row in rows],
                'crc32': [zlib.crc32(row[0]) for row in rows],
                'large': [list(map(zlib.crc32, row[1:])) for row in rows],
            }
            self._write(step, rows, about)
        self._group.barrier()
        if self._memory is not None:
            self._memory.clear()
            self._memory[step] = list(map(bytes, pieces))  # steps take the memory of arrays

    def _write(self, step: int, rows: Sequence[Sequence[Piece]], about: Description) -> None:
        """Writes a checkpoint, or raises WorkdirError."""
        # For arrays of JAX's, orbax takes a seventh of the time and half the memory.
        large = {
            f'{i}.{k}': jax.device_put(np.frombuffer(piece, np.uint8), may_alias=True)
            for i, row in enumerate(rows)
            for k, piece in enumerate(row[1:])
        }
        state = {'rows': joined([row[0] for row in rows])} | ({'large': large} if large else {})
        args, size = self._ocp.args, sum(about['bytes']) + sum(a.nbytes for a in large.values())
        items = args.Composite(
            state=args.PyTreeSave(state), place=args.JsonSave({**about, 'sum': _sum(about)})
        )
        if problem := self._no_room(size) or self._problem(step, items):
            raise WorkdirError(
                f'cannot write the checkpoint of step {step} to {self._manager.directory}: '
                f'{problem}; free space there and run the same command again'
            )
        if self._config is not None:
            write_json(self._workdir / 'config.json', self._config)
            self._config = None

    def _no_room(self, size: int) -> str:
        """A message if less than ``size`` bytes are free, else empty.

        Without this check orbax would print a long traceback.
        """
        needed, free = max(LEAST_ROOM, size), shutil.disk_usage(self._manager.directory).free
        return '' if free > needed else f'{needed:,} bytes must be free, and {free:,} are'

    def _problem(self, step: int, args: Any) -> str:
        """Writes a checkpoint; returns the problem, or an empty text."""
        try:
            with _silent():
                self._manager.save(step, args=args, force=True)
        except (OSError, ValueError, RuntimeError) as error:
            logging.set_verbosity(logging.FATAL)  # objects that orbax has left would log errors
            return _line(error)
        return ''

    def restore(self, like: Portable) -> tuple[Portable, Place] | None:
        """The newest valid state and its place; None if there is no checkpoint.

        All processes use the same step, of which each gets what it needs and does not have in
        memory. Damaged checkpoints are moved to ``workdir/damaged``.

        Args:
          like: a state of this process with the same structure.

        Raises:
          WorkdirError: in the first process, if the checkpoint is of another model, channel or
            input, or all are damaged.
        """
        memory, saved = self._memory or {}, None
        shared = self._group.share([portable.layout(like), [*memory]])
        layouts, steps_in_memory = zip(*shared, strict=True)
        if self._group.index == 0:
            saved = self._restore({k: v for one in layouts for k, v in one.items()})
        if self._group.count == 1:
            return saved
        place = self._group.share(saved and [int(saved[0].step), saved[1]])[0]
        if place is None:
            return None
        rows = [
            portable.to_pieces(portable.needed(saved[0], parts, parts if place[0] in steps else ()))
            for parts, steps in zip(layouts, steps_in_memory, strict=True)
            if saved
        ]
        came = self._group.from_first(rows or None)
        here = [memory[place[0]]] if place[0] in memory else []
        return portable.from_pieces([*here, came]), place[1]

    def _restore(self, layout: Layout) -> tuple[Portable, Place] | None:
        """The newest valid state of all processes, and its place."""
        self.damaged = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            with _silent():
                content, problem = self._read(Path(self._manager.directory, str(step)), layout)
                if problem:
                    gc.collect()  # half-read objects of orbax log errors when they are freed
            if not problem:
                self._set_aside()
                return content['state'], content['place']
            self.damaged[step] = problem
        if self.damaged:
            reasons = '; '.join(f'step {step}: {why}' for step, why in self.damaged.items())
            raise WorkdirError(
                f'no checkpoint in {self._manager.directory} can be read ({reasons}); give a new '
                '--workdir, or remove that folder to start again'
            )
        return None

    def newest(self, layout: Layout) -> Portable:
        """What all processes have saved last, in the first process.

        Args:
          layout: `portable.layout` of a state of this process.

        Raises:
          WorkdirError: if it cannot be read.
        """
        folder = Path(self._manager.directory, str(self._manager.latest_step()))
        content, problem = self._read(folder, layout)
        if problem:
            raise WorkdirError(f'cannot read {folder} again ({problem}); give the command again')
        return content['state']

    def _read(self, where: Path, layout: Layout) -> tuple[dict[str, Any], str]:
        """The content of a checkpoint and its problem."""
        try:
            about = self._ocp.JsonCheckpointHandler().restore(where / 'place')
            if about.pop('sum', None) != _sum(about):
                return {}, 'its description has changed'
            _check_layout(where, about['layout'], layout)
            check_inputs(where, about.get('inputs', {}), self._inputs)
            kind = self._ocp.RestoreArgs(restore_type=np.ndarray)
            pieces = about.get('large') or [[]] * len(about['bytes'])
            names = [[f'{i}.{k}' for k in range(len(row))] for i, row in enumerate(pieces)]
            large = dict.fromkeys(itertools.chain(*names), kind)
            wanted = {'rows': kind} | ({'large': large} if large else {})
            args = self._ocp.args.PyTreeRestore(restore_args=wanted)
            state = self._ocp.PyTreeCheckpointHandler().restore(where / 'state', args=args)
        except (WorkdirError, MemoryError):
            raise
        except Exception as error:  # for damaged files orbax raises almost any exception
            return {}, _line(error)
        rows = [row[:size] for row, size in zip(state['rows'], about['bytes'], strict=True)]
        rows = [
            [row, *(state['large'][name] for name in row_names)]
            for row, row_names in zip(rows, names, strict=True)
        ]
        for i, row in enumerate(rows):
            if list(map(zlib.crc32, row)) != [about['crc32'][i], *pieces[i]]:
                return {}, f'the part of process {i} has another checksum'
        return {'state': portable.from_pieces(rows), 'place': about['place']}, ''

    def _set_aside(self) -> None:
        """Moves damaged checkpoints to ``workdir/damaged``, to free their names for later ones."""
        if not self.damaged:
            return
        for step in self.damaged:
            to = self._workdir / 'damaged' / str(step)
            shutil.rmtree(to, ignore_errors=True)
            to.parent.mkdir(exist_ok=True)
            (self._manager.directory / str(step)).rename(to)
        self._manager.reload()

    def close(self) -> None:
        """Closes the checkpoint manager."""
        if self._group.index == 0:
            self._manager.close()


def joined(rows: Sequence[Piece]) -> np.ndarray:
    """Bytes as rows of an array, with zeros after those that are shorter."""
    width = max(map(len, rows))
    if len(rows) == 1:  # a state of gigabytes is not copied
        return np.frombuffer(rows[0], np.uint8)[None]
    whole = np.zeros((len(rows), width), np.uint8)
    for i, row in enumerate(rows):
        whole[i, : len(row)] = np.frombuffer(row, np.uint8)
    return whole


@contextmanager
def _silent() -> Iterator[None]:
    """A context without orbax's log messages, because errors are reported in one line."""
    level, hook = logging.get_verbosity(), sys.unraisablehook
    logging.set_verbosity(logging.FATAL)
    sys.unraisablehook = lambda args: hook(args) if args.exc_type is MemoryError else None
    try:
        yield
    finally:
        logging.set_verbosity(level)
        sys.unraisablehook = hook


def _check_layout(where: Path, written: Layout, expected: Layout) -> None:
    """Raises WorkdirError unless a checkpoint has this process's parts with the same layout.

    States of the sums of copies are left where there are none, as in one program.
    """
    for part, leaves in expected.items():
        saved, copies = written.get(part, {}), f"['{portable.COPIES}']"
        if not any(path.startswith(copies) for path in leaves):
            saved = {path: leaf for path, leaf in saved.items() if not path.startswith(copies)}
        if saved != leaves:
            path, _ = sorted({*saved.items()} ^ {*leaves.items()})[0]
            raise WorkdirError(
                f'{where} has the state of another model or channel: stage {part} differs at '
                f'{path} ({saved.get(path)}, now {leaves.get(path)}); use the configuration of '
                'that run, or give a new --workdir'
            )


def inputs_of(workdir: Path) -> tuple[Path, dict[str, str]]:
    """The newest checkpoint of a run and what it says that the run read; nothing without one."""
    files = (workdir / 'checkpoints').glob('[0-9]*/place/metadata')
    newest = max(files, key=lambda file: int(file.parts[-3]), default=workdir)
    try:
        return newest.parents[1], json.loads(newest.read_text()).get('inputs', {})
    except (OSError, ValueError, AttributeError):  # there is none, or it is damaged
        return workdir, {}


def check_inputs(where: Path, written: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Checks that a run reads what it was trained on; older checkpoints do not say.

    Whoever reads a run asks this: to train on, to test it, to write text with it.

    Raises:
      WorkdirError: if it does not.
    """
    changed = [name for name in expected if written.get(name, expected[name]) != expected[name]]
    if changed:
        raise WorkdirError(
            f'{where} is of a run on other data or weights: '
            + ', '.join(f'{name} {written[name]} (now {expected[name]})' for name in changed)
            + '; give the files of that run, or a new --workdir to train on these'
        )


def _sum(about: Description) -> int:
    """The CRC-32 of a checkpoint's description."""
    return zlib.crc32(json.dumps(about, sort_keys=True).encode())


def _line(error: Exception) -> str:
    """The first sentence of an error, or the name of its class."""
    if NO_SPACE in str(error):  # tensorstore's message lists all parent folders
        return NO_SPACE
    first = (str(error).splitlines() or [''])[0].partition('. See full')[0]
    return first[:LONGEST] or type(error).__name__
