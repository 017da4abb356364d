"""`Portable`: a train state by stage and replica, the same under every runtime.

A feedback state that both ends share is saved once, at its sender, and so is the state of the
exchange of a tied table. What one process saved of its stages, any process can take up: under
another runtime, or with other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.runtimes.types import ModelState
from jaxmp.training.step import TrainState


class Portable(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      step: steps done.
      key: words of the run's key.
      parts: by ``'stage.replica'``, of this process or of all: parameters, statistics, states of
        optimizer, exchange, feedback and tied parameter, as numpy arrays.
    """

    step: Any
    key: Any
    parts: Mapping[str, Any]


def name(stage: int, replica: int) -> str:
    """The name of a part.

    >>> name(2, 0)
    '2.0'
    """
    return f'{stage}.{replica}'


def stages_of(state: TrainState, feedback: Mapping[int, Any]) -> dict[int, dict[str, Any]]:
    """The state of each stage, of one replica or with `ByReplica` leaves.

    Args:
      state: of all stages here.
      feedback: that of ``state`` by stage.
    """
    model = state.model
    return {
        s: {
            'params': model.params[s],
            'model_state': model.model_state[s],
            'opt_state': state.opt_state[s],
            'exchange': state.exchange[s],
            'feedback': feedback[s],
            'tied': state.tied[s] if state.tied and s in state.tied else (),
        }
        for s in model.params
    }


def state_of(
    stages: Mapping[int, dict[str, Any]], pack: Callable[[Any], Any], step: Any, key: Array
) -> TrainState:
    """The state whose `stages_of` are ``stages``; ``pack`` is that of the runtime's feedback."""
    by = lambda name: {s: tree[name] for s, tree in stages.items()}
    model = ModelState(by('params'), by('model_state'), pack(by('feedback')))
    tied = {s: tree for s, tree in by('tied').items() if jax.tree.leaves(tree)}
    return TrainState(step, model, by('opt_state'), by('exchange'), key, tied or ())


def export(cuts: Sequence[Boundary], rows: Mapping[int, Any], state: TrainState) -> Portable:
    """The parts of this process.

    Args:
      cuts: all boundaries.
      rows: `stages_of` of each replica here.
      state: with step and key.
    """
    parts = {
        name(s, r): part(s, tree, cuts) for r, stages in rows.items() for s, tree in stages.items()
    }
    words = jax.random.key_data(state.key).addressable_data(0)
    return Portable(np.asarray(state.step), np.asarray(words), parts)


def load(cuts: Sequence[Boundary], rows: Mapping[int, Any], saved: Portable) -> dict[int, Any]:
    """The saved `stages_of` of each replica here, in the form of ``rows``; inverse of `export`."""
    return {
        r: {s: whole((s, r), tree, saved, cuts) for s, tree in stages.items()}
        for r, stages in rows.items()
    }


def variables_of(saved: Portable, like: Sequence[Any]) -> tuple[Any, ...]:
    """The variables of all stages of replica 0.

    Args:
      saved: as read, of all stages.
      like: their shapes, by stage.
    """
    parts = [saved.parts[name(s, 0)] for s in range(len(like))]
    rows = [{'params': p['params'], **p['model_state']} for p in parts]
    return tuple(map(flax.serialization.from_state_dict, like, rows))


def key_of(saved: Portable) -> Array:
    """The run's key."""
    return jax.random.wrap_key_data(jnp.asarray(saved.key))


def part(stage: int, tree: dict[str, Any], cuts: Sequence[Boundary]) -> dict[str, Any]:
    """A part without the states that another part has.

    Args:
      stage: its number.
      tree: with ``feedback`` and ``exchange`` whole.
      cuts: all boundaries.
    """
    feedback, exchange = tree['feedback'], list(tree['exchange'])
    if stage and cuts[stage - 1].fwd.shared_state:
        feedback = feedback._replace(left_rx=())
    if stage < len(cuts) and cuts[stage].bwd.shared_state:
        feedback = feedback._replace(right_rx=())
    if stage and len(exchange) > 1:
        exchange[0] = ()
    return jax.device_get({**tree, 'feedback': feedback, 'exchange': exchange})


def whole(
    at: tuple[int, int], like: dict[str, Any], saved: Portable, cuts: Sequence[Boundary]
) -> dict[str, Any]:
    """The tree of a part, with the states that `part` left out; inverse of `part`.

    Args:
      at: stage and replica.
      like: of its structure, as this runtime holds it.
      saved: as read, of all stages.
      cuts: all boundaries.
    """
    s, r = at
    tree = saved.parts[name(s, r)]
    data = {**tree, **{k: dict(tree[k]) for k in ('feedback', 'exchange')}}
    if jax.tree.leaves(like['feedback'].left_rx) and cuts[s - 1].fwd.shared_state:
        data['feedback']['left_rx'] = saved.parts[name(s - 1, r)]['feedback']['right_tx']
    if jax.tree.leaves(like['feedback'].right_rx) and cuts[s].bwd.shared_state:
        data['feedback']['right_rx'] = saved.parts[name(s + 1, r)]['feedback']['left_tx']
    if s and len(data['exchange']) > 1 and like['exchange'][0] != ():
        data['exchange']['0'] = saved.parts[name(0, r)]['exchange']['0']
    if like['tied'] == ():
        data['tied'] = {}
    return flax.serialization.from_state_dict(like, data)


def to_bytes(state: Portable) -> bytes:
    """The serialized parts of this process."""
    arrays: Any = jax.tree.map(np.asarray, state._asdict())
    return flax.serialization.to_bytes(arrays)


def from_bytes(rows: Sequence[bytes]) -> Portable:
    """The parts of all processes, as nested dicts."""
    states: list[Any] = [flax.serialization.msgpack_restore(row) for row in rows]
    parts = {k: tree for state in states for k, tree in state['parts'].items()}
    return Portable(states[0]['step'], states[0]['key'], parts)


def layout(state: Portable) -> dict[str, dict[str, str]]:
    """Shape and dtype of every leaf, by its path, of each part."""

    def one(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f'{a.dtype}{list(a.shape)}' for path, a in leaves}

    return {k: one(tree) for k, tree in state.parts.items()}
