"""Saving and restoring a run: the whole train state, its configuration, its place in the data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp.team import Team

# Keys that may differ between a run and its continuation: none changes a number already computed.
DEFAULTS = {'tied_exchange': 'mean'}  # of keys that runs still going on may lack
FREE = ('name', 'epochs', 'data_dir', 'download', 'checkpoint_every', 'tensorboard')


class WorkdirError(RuntimeError):
    """A workdir that cannot be used; the message says what to do."""


class Checkpoints:
    """The checkpoints of a workdir, the newest two kept.

    A team writes one checkpoint together: each process's part is a row of bytes of one array over
    all processes, so that a kill in mid-save leaves every stage at the same older step. They need
    a file system that all of them see.
    """

    def __init__(self, workdir: Path, team: Team | None = None) -> None:
        """Opens ``workdir/checkpoints``."""
        import orbax.checkpoint as ocp  # seconds of import

        self._ocp, self._team = ocp, team or Team()
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager((workdir / 'checkpoints').absolute(), options=options)

    def save(self, step: int, state: Any, place: dict[str, Any]) -> None:
        """Writes ``state`` (a pytree of arrays and keys) and ``place`` (JSON) as of ``step``."""
        args, about = self._ocp.args, {'place': place, 'layout': _layout(state)}
        if self._team.count > 1:
            state = _rows(self._team, state)
            about['layout'] = _layout(state)
        both = args.Composite(state=args.StandardSave(state), place=args.JsonSave(about))
        self._manager.save(step, args=both, force=True)

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state, with the shapes and dtypes of ``like``, and its place; or None.

        Raises:
          WorkdirError: if the checkpoint was made with another model or channel.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        args = self._ocp.args
        held = like if self._team.count == 1 else _rows(self._team, like)
        abstract = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, held)
        where = self._manager.directory / str(step)
        cure = 'use the configuration that made it or a new --workdir'
        try:
            about = self._manager.restore(step, args=args.Composite(place=args.JsonRestore()))[
                'place'
            ]
            # Compared first: a restore that orbax refuses halfway leaves its readers behind.
            if about['layout'] != (now := _layout(held)):
                other = sorted({*about['layout'].items()} ^ {*now.items()})[0]
                raise WorkdirError(
                    f'{where} holds the state of another model or channel: it differs at '
                    f'{other[0]} ({about["layout"].get(other[0])}, now {now.get(other[0])}); {cure}'
                )
            found = self._manager.restore(
                step, args=args.Composite(state=args.StandardRestore(abstract))
            )
            state = found['state'] if held is like else _unrow(found['state'], like)
        except (ValueError, KeyError, TypeError, OSError) as error:
            reason = str(error).splitlines()[0]
            raise WorkdirError(f'{where} is damaged: {reason}; {cure}') from error
        return state, about['place']

    def close(self) -> None:
        """Ends pending work."""
        self._manager.close()


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
        old, now = {**DEFAULTS, **old}, {**DEFAULTS, **config}
        clash = [k for k in {**old, **now} if k not in FREE and old.get(k) != now.get(k)]
        if clash:
            raise WorkdirError(
                f'{workdir} holds a run with other settings: '
                + ', '.join(f'{k}={old.get(k)!r} (now {now.get(k)!r})' for k in clash)
                + '; repeat those settings to go on with it, or give a new --workdir'
            )
        path.write_text(json.dumps(config, indent=1) + '\n')
    except (OSError, json.JSONDecodeError) as error:
        raise WorkdirError(
            f'cannot use the workdir {workdir}: {error}; give a --workdir that is a writable folder'
        ) from error
