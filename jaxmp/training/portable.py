"""`Portable`: a train state by stage and replica, the same under every runtime.

Parameters that are frozen are not saved. A feedback state that both ends share is saved once, at
its sender. Of a group of which two stages
have a copy, the state of the exchange between replicas is saved once, at the first. What one
process saved of its stages, any process can take up: under another runtime, or with other stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.boundary.pipeline import Variables
from jaxmp.exchange.collectives import Tree
from jaxmp.runtimes import trained
from jaxmp.runtimes.types import ModelState
from jaxmp.training.experiment import Experiment, microbatch_like
from jaxmp.training.groups import groups_at, homes, is_first
from jaxmp.training.step import TrainState

LARGE = 2**20  # bytes of an array that is a piece of its own
_PIECE = '__piece__'
SHARED = 'feedback', 'exchange'  # of a part, what a process needs of those beside its own
WAITING = 'waiting'  # that of gradients that move the parameters in later steps
COPIES = 'tied'  # the name in checkpoints of the states of sums of copies
StageTree = dict[str, Tree]  # what a stage has between two steps: 'params', 'feedback', ...
Layout = dict[str, dict[str, str]]  # of each part, dtype and shape of each leaf by its path
Piece = bytes | memoryview


class Portable(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      step: steps done.
      key: words of the run's key.
      parts: by ``'stage.replica'``, of this process or of all: parameters, statistics, states of
        optimizer, exchange, feedback and sums of copies, and gradients that wait, as numpy arrays.
    """

    step: np.ndarray
    key: np.ndarray
    parts: Mapping[str, StageTree]


def name(stage: int, replica: int) -> str:
    """The name of a part.

    >>> name(2, 0)
    '2.0'
    """
    return f'{stage}.{replica}'


def stages_of(state: TrainState, feedback: Mapping[int, Tree]) -> dict[int, StageTree]:
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
            COPIES: state.copies.get(s, ()) if state.copies else (),
            WAITING: state.waiting.get(s, ()),
        }
        for s in model.params
    }


def state_of(
    stages: Mapping[int, StageTree],
    pack: Callable[[dict[int, Tree]], Tree],
    step: Array,
    key: Array,
) -> TrainState:
    """The state whose `stages_of` are ``stages``; ``pack`` is that of the runtime's feedback."""
    by = lambda name: {s: tree[name] for s, tree in stages.items()}
    model = ModelState(by('params'), by('model_state'), pack(by('feedback')))
    copies = {s: tree for s, tree in by(COPIES).items() if jax.tree.leaves(tree)}
    waiting = {s: row for s, row in by(WAITING).items() if row}
    return TrainState(step, model, by('opt_state'), by('exchange'), key, copies or (), waiting)


def export(
    exp: Experiment, rows: Mapping[int, dict[int, StageTree]], state: TrainState
) -> Portable:
    """The parts of this process.

    Args:
      exp: the experiment.
      rows: `stages_of` of each replica here.
      state: with step and key.
    """
    parts = {
        name(s, r): part(s, tree, exp) for r, stages in rows.items() for s, tree in stages.items()
    }
    return Portable(np.asarray(state.step), words_here(state), parts)


def load(
    exp: Experiment, rows: Mapping[int, dict[int, StageTree]], saved: Portable
) -> dict[int, dict[int, StageTree]]:
    """The saved `stages_of` of each replica here, in the form of ``rows``; inverse of `export`."""
    return {
        r: {s: whole((s, r), tree, saved, exp) for s, tree in stages.items()}
        for r, stages in rows.items()
    }


def variables_of(exp: Experiment, saved: Portable, like: Sequence[Tree]) -> Variables:
    """The variables of all stages of replica 0; those that are frozen are made again.

    Args:
      exp: the experiment.
      saved: as read, of all stages.
      like: their shapes, by stage.
    """
    task, key = exp.task, jax.random.fold_in(jax.random.key(exp.config.seed), 0)
    if task.trained is not trained.everything:
        x = jnp.zeros(microbatch_like(exp).shape, microbatch_like(exp).dtype)
        drawn = like if task.read else exp.model.init(key, x, train=True)[0]
        make = task.read or (lambda s, key: task.start(s, drawn[s], key))
        like = [{**v, 'params': make(s, key)['params']} for s, v in enumerate(like)]
    rows = []
    for s, variables in enumerate(like):
        tree, params = saved.parts[name(s, 0)], variables['params']
        select = trained.of_stage(task.trained, s)
        target = {**variables, 'params': trained.part(select, params)}
        read = flax.serialization.from_state_dict(
            target, {'params': tree['params'], **tree['model_state']}
        )
        rows.append({**read, 'params': trained.whole(params, read['params'])})
    return tuple(rows)


def words_here(state: TrainState) -> np.ndarray:
    """The words of the run's key, which each process has."""
    return np.asarray(jax.random.key_data(state.key).addressable_data(0))


def key_here(state: TrainState) -> Array:
    """The run's key on the first device of this process."""
    return jax.random.wrap_key_data(jnp.asarray(words_here(state)))


def part(stage: int, tree: StageTree, exp: Experiment) -> StageTree:
    """A part without the states that another part has.

    Args:
      stage: its number.
      tree: with ``feedback`` and ``exchange`` whole.
      exp: the experiment.
    """
    cuts, feedback = exp.model.boundaries, tree['feedback']
    if stage and cuts[stage - 1].fwd.shared_state:
        feedback = feedback._replace(left_rx=())
    if stage < len(cuts) and cuts[stage].bwd.shared_state:
        feedback = feedback._replace(right_rx=())
    rows = zip(homes(exp.groups, [stage]), tree['exchange'], strict=True)
    exchange = [state if is_first(home) else () for home, state in rows]
    params = trained.part(trained.of_stage(exp.task.trained, stage), tree['params'])
    changed = {'params': params, 'feedback': feedback, 'exchange': exchange}
    return jax.device_get({**tree, **changed})


def whole(place: tuple[int, int], like: StageTree, saved: Portable, exp: Experiment) -> StageTree:
    """The tree of a part, with the states that `part` left out; inverse of `part`.

    Args:
      place: stage and replica.
      like: of its structure, as this runtime holds it.
      saved: as read, of all stages.
      exp: the experiment.
    """
    (s, r), cuts = place, exp.model.boundaries
    tree = saved.parts[name(s, r)]
    data = {**tree, **{k: dict(tree[k]) for k in ('feedback', 'exchange')}}
    if jax.tree.leaves(like['feedback'].left_rx) and cuts[s - 1].fwd.shared_state:
        data['feedback']['left_rx'] = saved.parts[name(s - 1, r)]['feedback']['right_tx']
    if jax.tree.leaves(like['feedback'].right_rx) and cuts[s].bwd.shared_state:
        data['feedback']['right_rx'] = saved.parts[name(s + 1, r)]['feedback']['left_tx']
    for i, home in enumerate(homes(exp.groups, [s])):
        if not is_first(home) and like['exchange'][i] != ():
            first, group = home[1].homes[0], home[1]
            position = groups_at(exp.groups, first).index(group)
            data['exchange'][str(i)] = saved.parts[name(first, r)]['exchange'][str(position)]
    for state in (COPIES, WAITING):  # older checkpoints have none
        if like[state] == ():
            data[state] = {}
    params = like['params']
    read = flax.serialization.from_state_dict(
        {**like, 'params': trained.part(trained.of_stage(exp.task.trained, s), params)}, data
    )
    return {**read, 'params': trained.whole(params, read['params'])}


def needed(saved: Portable, parts: Iterable[str], here: Iterable[str] = ()) -> Portable:
    """What `load` reads for some parts: them, and what their neighbours or the first stage share.

    Args:
      saved: as read, of all stages.
      parts: their names.
      here: those of them that are there already, and left out.
    """
    pairs = [tuple(map(int, part.split('.'))) for part in parts]
    beside = {name(t, r) for s, r in pairs for t in (0, s - 1, s + 1)} - {*parts}
    others = {
        k: {shared: saved.parts[k][shared] for shared in SHARED}
        for k in beside & saved.parts.keys()
    }
    read = {k: saved.parts[k] for k in {*parts} - {*here} & saved.parts.keys()}
    return saved._replace(parts={**read, **others})


def to_pieces(state: Portable) -> list[Piece]:
    """The parts of this process in bytes: a text of all, then each array that is too large for it.

    The large are memory of ``state``, which is not copied.
    """
    pieces: list[Piece] = []

    def place(leaf: Array) -> Tree:
        a = np.asarray(leaf)
        if a.nbytes < LARGE:
            return a
        pieces.append(np.ascontiguousarray(a).reshape(-1).view(np.uint8).data)
        return {_PIECE: len(pieces), 'dtype': a.dtype.name, 'shape': list(a.shape)}

    tree = jax.tree.map(place, flax.serialization.to_state_dict(state._asdict()))
    return [flax.serialization.msgpack_serialize(tree), *pieces]


def from_pieces(rows: Sequence[Sequence[Piece]]) -> Portable:
    """The parts of all processes, as nested dicts; inverse of `to_pieces`."""

    def read(row: Sequence[Piece]) -> Tree:
        def array(leaf: Tree) -> np.ndarray:
            if not is_piece(leaf):
                return leaf
            return np.frombuffer(row[leaf[_PIECE]], jnp.dtype(leaf['dtype'])).reshape(leaf['shape'])

        is_piece = lambda tree: isinstance(tree, dict) and _PIECE in tree
        tree = flax.serialization.msgpack_restore(bytes(row[0]))
        return jax.tree.map(array, tree, is_leaf=is_piece)

    states = [read(row) for row in rows]
    parts = {k: tree for state in states for k, tree in state['parts'].items()}
    return Portable(states[0]['step'], states[0]['key'], parts)


def layout(state: Portable) -> Layout:
    """Shape and dtype of every leaf, by its path, of each part."""

    def one(tree: Tree) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f'{a.dtype}{list(a.shape)}' for path, a in leaves}

    return {k: one(tree) for k, tree in state.parts.items()}
