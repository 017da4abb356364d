"""How an operand travels: a `Way` cuts it into parts, moves their messages, and joins what arrives.

A collective is one way, or two in a row; its transpose is another one. The parts to all devices are
coded in one `jax.vmap`, and their messages travel as one array of bytes, so that a collective of
the program stays one collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, PyTree

from jaxmp.boundary.transport import moved
from jaxmp.feedback import Channel
from jaxmp.feedback.settled import settled
from jaxmp.wire import Ctx, Like, varies, vary, widened

Axes = str | tuple[str, ...]  # names of mesh axes, as `jax.lax` takes them
Key = Array | None
States = PyTree  # of arrays, with a leading axis of parts: what both ends of each part remember
Pair = tuple[int, int]  # from a device, to another


class Route(Protocol):
    """What carries an operand: a `Way`, a `Chain` of two, or `Nowhere`."""

    def states(self, channel: Channel, like: Like) -> States:
        """The states of a channel's ends before the first operand."""
        ...

    def carry(self, channel: Channel, key: Key, x: Array, states: States) -> tuple[Array, States]:
        """What arrives of ``x``, and the states after it."""
        ...


class Way(NamedTuple):
    """One hop.

    Attributes:
      axes: names of the mesh axes along which it goes.
      cut: ``x -> parts (k, ...)``, one for each message that this device sends.
      move: ``bytes (k, b) -> bytes (j, b)``, the collective.
      join: ``parts (j, ...) -> y``.
      numbers: ``() -> (k,), (j,)``, a number for each part sent and each that arrives, the same at
        both ends, from which their random keys are made.
      same: whether JAX knows that all devices receive the same.
    """

    axes: Axes
    cut: Callable[[Array], Array]
    move: Callable[[Array], Array]
    join: Callable[[Array], Array]
    numbers: Callable[[], tuple[Array, Array]]
    same: bool = False

    def states(self, channel: Channel, like: Like) -> States:
        """As `Route.states`: the initial state of each part's ends."""
        tx, rx = channel.init(_sample(shape_of(self.cut, like)))
        sent, arriving = shape_of(self.numbers)

        def rows(state: PyTree, count: Like, same: bool) -> PyTree:
            spread = lambda a: jnp.broadcast_to(a, (*count.shape, *a.shape))
            vary = lambda a: a if same else varying(a, self.axes)
            return jax.tree.map(lambda a: vary(spread(a)), state)

        return rows(tx, sent, False), rows(rx, arriving, self.same)

    def carry(self, channel: Channel, key: Key, x: Array, states: States) -> tuple[Array, States]:
        """As `Route.carry`."""
        part = _sample(shape_of(self.cut, x))
        sent, arriving = self.numbers()
        ctx = lambda number: Ctx() if key is None else Ctx(jax.random.fold_in(key, number))

        def code(x: Array, tx: PyTree) -> tuple[PyTree, PyTree]:
            one = lambda part_x, tx, i: channel.send(part_x.reshape(part.shape), tx, ctx(i))
            return jax.vmap(one)(self.cut(x), tx, sent)

        def decode(messages: PyTree, rx: PyTree) -> tuple[Array, PyTree]:
            one = lambda message, rx, i: channel.recv(message, rx, part, ctx(i))
            parts, rx = jax.vmap(one)(messages, rx, arriving)
            return self.join(parts.reshape(-1, *shape_of(self.cut, x).shape[1:])), rx

        tx, rx = states
        messages, tx_after = automatic(code)(x, tx)
        # So that XLA does not simplify decoding after encoding: what is sent is what is used.
        move = lambda piece: lax.optimization_barrier(self.move(lax.optimization_barrier(piece)))
        y, rx_after = automatic(decode)(moved(move, messages, 1), rx)
        return y, (_kept(channel, tx_after, tx), _kept(channel, rx_after, rx))


class Chain(NamedTuple):
    """Two hops: of `psum`, a sum of everyone's part and then all parts for everyone.

    Attributes:
      first: the first hop.
      second: the second.
      before: what the first carries of an operand.
      after: the result, of what the second brings.
    """

    first: Way
    second: Way
    before: Callable[[Array], Array]
    after: Callable[[Array], Array]

    def states(self, channel: Channel, like: Like) -> States:
        """As `Route.states`."""
        whole = shape_of(self.before, like)
        part = shape_of(lambda x: self.first.join(self.first.cut(x)), whole)
        return self.first.states(channel, whole), self.second.states(channel, part)

    def carry(self, channel: Channel, key: Key, x: Array, states: States) -> tuple[Array, States]:
        """As `Route.carry`; the two hops draw from keys of their own."""
        rows = automatic(self.before)(x)
        part, first = self.first.carry(channel, key, rows, states[0])
        later = None if key is None else jax.random.fold_in(key, 1 << 30)
        y, second = self.second.carry(channel, later, part, states[1])
        return automatic(self.after)(y), (first, second)


class Nowhere(NamedTuple):
    """No message at all, as in the transpose of `psum` where JAX follows what varies."""

    of: Callable[[Array], Array]

    def states(self, channel: Channel, like: Like) -> States:
        """None."""
        return ()

    def carry(self, channel: Channel, key: Key, x: Array, states: States) -> tuple[Array, States]:
        """As `Route.carry`."""
        return self.of(x), ()


def permuting(axis: Axes, pairs: Sequence[Pair]) -> Way:
    """The way of `jax.lax.ppermute`; a device to which nobody sends gets zeros."""
    n = lax.axis_size(axis)
    source = {to: start for start, to in pairs}
    here = lambda table: jnp.asarray(np.array(table))[lax.axis_index(axis)]

    def join(parts: Array) -> Array:
        if len(source) == n:
            return parts[0]
        return jnp.where(here([i in source for i in range(n)]), parts[0], 0)

    def numbers() -> tuple[Array, Array]:
        return lax.axis_index(axis)[None], here([source.get(i, 0) for i in range(n)])[None]

    move = lambda piece: lax.ppermute(piece, axis, pairs)
    return Way(axis, lambda x: x[None], move, join, numbers)


def gathering(axis: Axes, dimension: int, tiled: bool, same: bool = False) -> Way:
    """The way of `jax.lax.all_gather`; with ``same`` JAX knows that all devices have the result."""
    n, to = lax.axis_size(axis), 'invarying' if same else 'varying'
    numbers = lambda: (lax.axis_index(axis)[None], jnp.arange(n))
    move = lambda piece: lax.all_gather(piece[0], axis, to=to)
    return Way(axis, lambda x: x[None], move, partial(_join, dimension, tiled), numbers, same)


def swapping(axis: Axes, split: int, tiled: bool, join: Callable[[Array], Array]) -> Way:
    """The way of `jax.lax.all_to_all`: a part of axis ``split`` to each device."""
    n = lax.axis_size(axis)

    def numbers() -> tuple[Array, Array]:
        i = lax.axis_index(axis)
        return i * n + jnp.arange(n), jnp.arange(n) * n + i

    move = lambda piece: lax.all_to_all(piece, axis, 0, 0, tiled=True)
    return Way(axis, partial(_cut, split, n, tiled), move, join, numbers)


def concatenating(axis: Axes, split: int, concat: int, tiled: bool) -> Way:
    """`swapping` whose parts are joined along an axis."""
    return swapping(axis, split, tiled, partial(_join, concat, tiled))


def scattering(axis: Axes, dimension: int, tiled: bool) -> Way:
    """The way of `jax.lax.psum_scatter`: `swapping`, whose parts are added in order."""

    def add(parts: Array) -> Array:
        return reduce(jnp.add, [*widened(parts)]).astype(parts.dtype)

    return swapping(axis, dimension, tiled, add)


def reducing(axis: Axes, like: Like, scale: float = 1.0) -> Chain:
    """The way of `jax.lax.psum`: every device adds a part of the rows, and gathers the others.

    Rows are along the last axis; a tensor of fewer rows than devices is cut anywhere.
    """
    n, width = lax.axis_size(axis), like.shape[-1]
    if like.size // width < n:
        width = -(-like.size // n)
    more = -like.size % (n * width)
    rows = lambda x: jnp.pad(x.reshape(-1), (0, more)).reshape(-1, width)

    def back(y: Array) -> Array:
        return (y.reshape(-1)[: like.size].reshape(like.shape) * scale).astype(like.dtype)

    return Chain(scattering(axis, 0, True), gathering(axis, 0, True, follows(axis)), rows, back)


# What JAX knows of values inside `jax.shard_map`.


def size(axis: Axes) -> int:
    """The number of devices along axes.

    Raises:
      NameError: if there is no such axis here.
    """
    try:
        return lax.axis_size(axis)
    except NameError:
        mesh = jax.sharding.get_abstract_mesh()
        raise NameError(
            f'no axis {axis!r} here, there are {mesh.manual_axes}; call inside jax.shard_map over '
            'a mesh with that axis, or inside jax.vmap(..., axis_name=...)'
        ) from None


def follows(axis: Axes) -> bool:
    """Whether `jax.shard_map` follows which values vary along an axis (its ``check_vma``)."""
    name = axis if isinstance(axis, str) else axis[0]
    size(axis)
    return name in varies(lax.axis_index(name))


def varying(x: Array, axis: Axes) -> Array:
    """``x``, which JAX then takes to vary along ``axis``."""
    return vary(x, [axis] if isinstance(axis, str) else axis) if follows(axis) else x


def automatic(f: Callable) -> Callable:
    """``f``, in which the compiler decides how arrays lie on Explicit axes that are not manual.

    Codecs reshape, which such axes refuse. What ``f`` returns then lies whole along them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if not axes:
        return f
    automated: Callable = jax.sharding.auto_axes(f, axes=axes, out_sharding=PartitionSpec())
    return automated


def shape_of(f: Callable, *args: Array | Like) -> Any:
    """The shape of what ``f`` returns, without how it lies on the devices of a mesh."""
    plain = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype)
    return jax.tree.map(plain, jax.eval_shape(f, *jax.tree.map(plain, args)))


def _sample(parts: Like) -> Like:
    """What a codec sees of a part; a vector is one sample."""
    shape = parts.shape[1:] if len(parts.shape) > 2 else (1, *parts.shape[1:])
    return jax.ShapeDtypeStruct(shape, parts.dtype)


def _cut(dimension: int, n: int, tiled: bool, x: Array) -> Array:
    size = x.shape[dimension]
    if size % n or (not tiled and size != n):
        need = f'a multiple of {n}' if tiled else f'{n}, or tiled=True'
        raise ValueError(
            f'axis {dimension} of {x.shape} goes to {n} devices; it must have the size {need}'
        )
    if tiled:
        x = x.reshape(*x.shape[:dimension], n, size // n, *x.shape[dimension + 1 :])
    return jnp.moveaxis(x, dimension, 0)


def _join(dimension: int, tiled: bool, parts: Array) -> Array:
    y = jnp.moveaxis(parts, 0, dimension)
    if not tiled:
        return y
    return y.reshape(*y.shape[:dimension], -1, *y.shape[dimension + 2 :])


def _kept(channel: Channel, after: PyTree, before: PyTree) -> PyTree:
    """The states after, each only where it is finite; see `jaxmp.feedback.settled`."""
    if not jax.tree.leaves(after):
        return after
    return jax.vmap(partial(settled, channel))(after, before)
