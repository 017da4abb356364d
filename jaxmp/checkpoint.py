"""Saving and restoring a run: the whole train state, its configuration, its place in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmp.team import Team

# Keys that may differ between a run and its continuation: none changes a number already computed.
FREE = ('name', 'epochs', 'data_dir', 'download', 'checkpoint_every', 'tensorboard')


class WorkdirError(RuntimeError):
    """A workdir that cannot be used; the message says what to do."""


class Checkpoints:
    """The checkpoints of a workdir, the newest two kept.

    Each process of a team saves what it holds in a folder of its own. They go on from the newest
    step that all of them have, so that a kill between two saves leaves every stage at one step.
    """

    def __init__(self, workdir: Path, team: Team) -> None:
        """Opens ``workdir/checkpoints``, of several processes ``.../process_<i>`` in it."""
        import orbax.checkpoint as ocp  # seconds of import

        self._ocp, self._team = ocp, team
        folder, alone = (workdir / 'checkpoints').absolute(), {}
        if team.count > 1:
            folder /= f'process_{team.index}'
            folder.mkdir(parents=True, exist_ok=True)
            own = ocp.options.MultiprocessingOptions(
                primary_host=team.index,
                active_processes={team.index},
                barrier_sync_key_prefix=f'process_{team.index}',
            )
            alone = {'multiprocessing_options': own, 'create': False}
        options = ocp.CheckpointManagerOptions(
            max_to_keep=2, enable_async_checkpointing=False, **alone
        )
        self._manager = ocp.CheckpointManager(folder, options=options)

    def save(self, step: int, state: Any, place: dict[str, Any]) -> None:
        """Writes ``state`` (a pytree of arrays and keys) and ``place`` (JSON) as of ``step``."""
        args = self._ocp.args
        about = {'place': place, 'layout': _layout(state)}
        both = args.Composite(state=args.StandardSave(state), place=args.JsonSave(about))
        self._manager.save(step, args=both, force=True)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state, with the shapes and dtypes of ``like``, and its place; or None.

        Raises:
          WorkdirError: if the checkpoint was made with another model or channel.
        """
        step = self._common_step()
        if step is None:
            return None
        args = self._ocp.args
        abstract = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, like)
        where = self._manager.directory / str(step)
        cure = 'use the configuration that made it or a new --workdir'
        try:
            about = self._manager.restore(step, args=args.Composite(place=args.JsonRestore()))[
                'place'
            ]
            # Compared first: a restore that orbax refuses halfway leaves its readers behind.
            if about['layout'] != (now := _layout(like)):
                other = sorted({*about['layout'].items()} ^ {*now.items()})[0]
                raise WorkdirError(
                    f'{where} holds the state of another model or channel: it differs at '
                    f'{other[0]} ({about["layout"].get(other[0])}, now {now.get(other[0])}); {cure}'
                )
            found = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(abstract))
            )
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise WorkdirError(f'{where} is damaged: {reason}; {cure}') from error
        return found['state'], about['place']

    def _common_step(self) -> int | None:
        """The newest step that every process has; what is newer somewhere is deleted."""
        found = sorted(self._manager.all_steps())
        own = np.full(4, -1)
        own[: len(found[-4:])] = found[-4:]
        rows = [{int(n) for n in row if n >= 0} for row in self._team.gather(own)]
        common = set.intersection(*rows)
        if not common and max(map(len, rows)) > 1:  # a kill in the first save leaves at most one
            lost = [i for i, row in enumerate(rows) if not row]
            raise WorkdirError(
                f'{self._manager.directory} and its neighbours have no step in common: '
                f'{[sorted(row) for row in rows]}, nothing of processes {lost}; bring the missing '
                'folders back or use a new --workdir'
            )
        step = max(common, default=None)
        for newer in found:
            if step is None or newer > step:
                self._manager.delete(newer)
        return step

    def close(self) -> None:
        """Ends pending work."""
        self._manager.close()


def _layout(state: Any) -> dict[str, str]:
    """Shape and dtype of every leaf, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {jax.tree_util.keystr(path): f'{a.dtype}{list(a.shape)}' for path, a in leaves}


def claim(workdir: Path, config: dict[str, Any]) -> None:
    """Makes ``workdir``, or checks that what it holds is a run of the same configuration.

    Writes ``config.json``. Keys in `FREE` may change.

    Args:
      workdir: the run's folder.
      config: the resolved configuration, and what else must not change.

    Raises:
      WorkdirError: if the folder cannot be written or holds a run of another configuration.
    """
    path = workdir / 'config.json'
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text()) if path.exists() else config
        clash = [k for k in {**old, **config} if k not in FREE and old.get(k) != config.get(k)]
        if clash:
            raise WorkdirError(
                f'{workdir} holds a run with other settings: '
                + ', '.join(f'{k}={old.get(k)!r} (now {config.get(k)!r})' for k in clash)
                + '; repeat those settings to go on with it, or give a new --workdir'
            )
        path.write_text(json.dumps(config, indent=1) + '\n')
    except (OSError, json.JSONDecodeError) as error:
        raise WorkdirError(
            f'cannot use the workdir {workdir}: {error}; give a --workdir that is a writable folder'
        ) from error
