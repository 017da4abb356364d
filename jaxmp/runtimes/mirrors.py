"""`compared`: what both ends of a boundary remember is compared, and sent afresh where they differ.

Under EF21, AQ-SGD, anchors and klt the sender knows what the receiver remembers: both compute it
from the same messages. If their programs round apart, or a number changes in memory, the error
stays and grows without a word. So both ends compare checksums every `EVERY` steps, and the
receiver takes what the sender knows if they differ.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt32

from jaxmp.boundary import Boundary
from jaxmp.exchange.collectives import Tree
from jaxmp.feedback import Channel
from jaxmp.feedback.channel import EndState, Rx, Tx
from jaxmp.net.arrays import buffers, filled
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.placement import is_here
from jaxmp.runtimes.types import ByReplica

EVERY = 100  # steps between two comparisons
Feedback = Mapping[int, ByReplica]  # by stage; see `jaxmp.runtimes.state.Feedback`


class Way(NamedTuple):
    """One direction of a boundary.

    Attributes:
      name: in messages.
      channel: of which the sender knows what the receiver remembers.
      tx: stage that sends, and the name of its end.
      rx: stage that receives, likewise.
    """

    name: str
    channel: Channel
    tx: tuple[int, str]
    rx: tuple[int, str]


def ways(cuts: tuple[Boundary, ...]) -> list[Way]:
    """The directions in which both ends remember something alike."""
    rows = []
    for s, cut in enumerate(cuts):
        left, right = (s, 'right_tx'), (s + 1, 'left_rx')
        rows.append(Way(f'boundary {s + 1} forward', cut.fwd, left, right))
        left, right = (s + 1, 'left_tx'), (s, 'right_rx')
        rows.append(Way(f'boundary {s + 1} backward', cut.bwd, left, right))
    return [way for way in rows if way.channel.mirrored]


def compared(
    cuts: tuple[Boundary, ...],
    columns: Columns,
    feedback: Feedback,
    step: int,
    say: Callable[[str], object],
) -> Feedback:
    """The feedback states, in which what ends remember alike is equal; all processes must call it.

    Args:
      cuts: the boundaries.
      columns: the devices.
      feedback: of the stages here.
      step: of the states.
      say: is told the boundaries at which the ends had parted.
    """
    directions = ways(cuts)
    sums = np.zeros((len(directions), columns.replicas, 2), np.int64)
    for k, way in enumerate(directions):
        for e, (stage, name) in enumerate((way.tx, way.rx)):
            for r, states in feedback.get(stage, {}).items():
                sums[k, r, e] = _checksum(way.channel, e == 0, getattr(states, name))
    total = columns.group.total(sums)
    for k, r in np.argwhere(total[..., 0] != total[..., 1]).tolist():
        way, replica = directions[k], f' of replica {r}' * (columns.replicas > 1)
        say(
            f'{way.name}{replica}: after step {step} its two ends remember different numbers: '
            'their programs round apart, or a number has changed in memory; the receiver goes on '
            'with what the sender knows'
        )
        feedback = _sent_afresh(columns, feedback, way, r)
    return feedback


def _sent_afresh(columns: Columns, feedback: Feedback, way: Way, r: int) -> Feedback:
    """The states of which the receiver's end of a direction is what the sender knows."""
    (a, _), (b, name) = way.tx, way.rx
    source, target = columns.devices[r, a], columns.devices[r, b]
    address = columns.group.address(f'mirror of {way.name} of replica {r},')
    if is_here(source):
        mirrored = _known(way.channel)(getattr(feedback[a][r], way.tx[1]))
        leaves = [np.array(x) for x in jax.tree.leaves(mirrored)]  # a step may take their memory
        if not is_here(target):
            columns.group.send(target.process_index, address, *buffers(leaves))
            return feedback
    else:
        like = jax.tree.leaves(getattr(feedback[b][r], name))
        leaves = filled(columns.group.receive(source.process_index, address), like)
    before = feedback[b][r]
    new = jax.tree.unflatten(jax.tree.structure(getattr(before, name)), leaves)
    after = before._replace(**{name: jax.tree.map(jnp.copy, jax.device_put(new, target))})
    return {**feedback, b: ByReplica({**feedback[b], r: after})}


def _checksum(channel: Channel, sends: bool, state: EndState) -> int:
    """A number for all bits of what an end remembers as the other one does."""
    rows = _sum(_known(channel)(state) if sends else state)
    return zlib.crc32(np.asarray(rows).tobytes())


@functools.lru_cache(maxsize=64)
def _known(channel: Channel) -> Callable[[Tx], Rx]:
    """``tx -> rx``; a shared state needs no program."""
    assert channel.mirrored
    return jax.jit(channel.mirror) if channel.mirror else channel.mirrored


def checksums(tree: Tree) -> UInt32[Array, ' leaves']:
    """Of every leaf a sum of its bits; equal replicas have equal sums.

    Words are weighted by their position, so that exchanged ones are seen, too.
    """

    def one(a: Array) -> Array:
        word = {1: jnp.uint8, 2: jnp.uint16}.get(a.dtype.itemsize, jnp.uint32)
        row = lax.bitcast_convert_type(a, word).reshape(-1).astype(jnp.uint32)
        weights = 2 * jnp.arange(row.shape[0], dtype=jnp.uint32) + 1
        return jnp.sum(row * weights, dtype=jnp.uint32)

    return jnp.stack([one(a) for a in jax.tree.leaves(tree)])


_sum = jax.jit(checksums)
