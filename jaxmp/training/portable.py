"""`Portable`: a train state by stage and replica, the same under every runtime.

A mirrored feedback state is kept once, at its sender, and so is what an exchange remembers of a
tied table. What one process saved of its stages, any process can take up: under another runtime, or
with other stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import flax.serialization
import jax
import numpy as np

from jaxmp.boundary import Boundary, Links
from jaxmp.runtimes.stage import Feedback


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
    """Of a part.

    >>> name(2, 0)
    '2.0'
    """
    return f'{stage}.{replica}'


def part(stage: int, last: int, tree: dict[str, Any], cuts: Sequence[Boundary]) -> dict[str, Any]:
    """A part without what another one holds.

    Args:
      stage: its number.
      last: number of the last stage.
      tree: with ``feedback`` and ``exchange`` whole.
      cuts: all boundaries.
    """
    feedback, held = tree['feedback'], list(tree['exchange'])
    if stage and cuts[stage - 1].fwd.mirrored:
        feedback = feedback._replace(left_rx=())
    if stage < last and cuts[stage].bwd.mirrored:
        feedback = feedback._replace(right_rx=())
    if stage and len(held) > 1:
        held[0] = ()
    return jax.device_get({**tree, 'feedback': feedback, 'exchange': held})


def whole(
    at: tuple[int, int], like: dict[str, Any], found: Portable, cuts: Sequence[Boundary]
) -> dict[str, Any]:
    """A part as `part` was given it; inverse of `part`.

    Args:
      at: stage and replica.
      like: of its structure, as this runtime holds it.
      found: as read, of all stages.
      cuts: all boundaries.
    """
    s, r = at
    own = found.parts[name(s, r)]
    data, held = {**own}, dict(own['exchange'])
    data['feedback'] = dict(own['feedback'])
    if jax.tree.leaves(like['feedback'].left_rx) and cuts[s - 1].fwd.mirrored:
        data['feedback']['left_rx'] = found.parts[name(s - 1, r)]['feedback']['right_tx']
    if jax.tree.leaves(like['feedback'].right_rx) and cuts[s].bwd.mirrored:
        data['feedback']['right_rx'] = found.parts[name(s + 1, r)]['feedback']['left_tx']
    if s and len(held) > 1 and like['exchange'][0] != ():
        held['0'] = found.parts[name(0, r)]['exchange']['0']
    return flax.serialization.from_state_dict(like, {**data, 'exchange': held})


def to_bytes(state: Portable) -> bytes:
    """The parts of this process."""
    found: Any = jax.tree.map(np.asarray, state._asdict())
    return flax.serialization.to_bytes(found)


def from_bytes(rows: Sequence[bytes]) -> Portable:
    """The parts of all processes, as nested dicts."""
    found: list[Any] = [flax.serialization.msgpack_restore(row) for row in rows]
    parts = {k: tree for one in found for k, tree in one['parts'].items()}
    return Portable(found[0]['step'], found[0]['key'], parts)


def layout(state: Portable) -> dict[str, dict[str, str]]:
    """Shape and dtype of every leaf, by its path, of each part."""

    def one(tree: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): f'{a.dtype}{list(a.shape)}' for path, a in leaves}

    return {k: one(tree) for k, tree in state.parts.items()}


def feedback_of(links: Links, s: int) -> Feedback:
    """Stage ``s``'s ends of the one-program runtime's states; mirrored ones at the sender."""
    left = right = ((), ())
    if s:
        left = links.fwd[s - 1][1], links.bwd[s - 1][0]
    if s < len(links.fwd):
        right = links.fwd[s][0], links.bwd[s][1]
    return Feedback(*left, *right)


def links_of(rows: Sequence[Feedback]) -> Links:
    """Inverse of `feedback_of`, given all stages."""
    pairs = list(itertools.pairwise(rows))
    fwd = tuple((a.right_tx, b.left_rx) for a, b in pairs)
    return Links(fwd, tuple((b.left_tx, a.right_rx) for a, b in pairs))
