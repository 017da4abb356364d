"""The collectives themselves: each is a pair of routes, of an operand and of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jaxtyping import Array, PyTree

from jaxmp.boundary import FeedbackState
from jaxmp.feedback import Channel
from jaxmp.lax import calls, ways
from jaxmp.lax.ways import Axes
from jaxmp.wire import Like

How = str | Channel | None
State = FeedbackState | None


def ppermute(
    x: PyTree, axis_name: Axes, perm: Sequence[tuple[int, int]], *,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None,
) -> Any:  # fmt: skip
    """`jax.lax.ppermute`: sends ``x`` to another device; gradients return the other way.

    Args:
      x: arrays.
      axis_name: of the mesh.
      perm: pairs of a device and that to which it sends.
      fwd: channel of ``x``.
      bwd: channel of the gradient.
      state: of this call, from `init`.
      key: for a codec that draws.
    """
    there, back = list(perm), [(to, start) for start, to in perm]

    def routes(like: Like) -> calls.Routes:
        return ways.permuting(axis_name, there), ways.permuting(axis_name, back)

    plain = lambda x: lax.ppermute(x, axis_name, there)
    return calls.call(x, axis_name, routes, plain, calls.How(fwd, bwd, state, key))


def all_gather(
    x: PyTree, axis_name: Axes, *, axis: int = 0, tiled: bool = False,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`jax.lax.all_gather`: everyone's ``x`` for everyone; gradients return as by `psum_scatter`.

    Args:
      x: arrays.
      axis_name: of the mesh.
      axis: of the result, along which the parts lie.
      tiled: whether parts are joined along an axis that is there.
      fwd: channel of ``x``, of which each device sends one message.
      bwd: channel of the gradients, of which each device sends one message to each.
      state: of this call, from `init`.
      key: for a codec that draws.
      **more: of `jax.lax.all_gather`; a call that has some is that of `jax.lax`.
    """
    plain = lambda x: lax.all_gather(x, axis_name, axis=axis, tiled=tiled, **more)

    def routes(like: Like) -> calls.Routes:
        dimension = counted('axis', axis, len(like.shape) + (not tiled))
        there = ways.gathering(axis_name, dimension, tiled)
        return there, ways.scattering(axis_name, dimension, tiled)

    return calls.call(x, axis_name, routes, plain, calls.How(fwd, bwd, state, key, bool(more)))


def psum_scatter(
    x: PyTree, axis_name: Axes, *, scatter_dimension: int = 0, tiled: bool = False,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`jax.lax.psum_scatter`: the sum of all ``x``, of which each device gets a part.

    Args:
      x: arrays.
      axis_name: of the mesh.
      scatter_dimension: the axis that is cut.
      tiled: whether the axis stays.
      fwd: channel of the parts, of which each device sends one message to each.
      bwd: channel of the gradient, which returns as by `all_gather`.
      state: of this call, from `init`.
      key: for a codec that draws.
      **more: of `jax.lax.psum_scatter`; a call that has some is that of `jax.lax`.
    """
    how = {'scatter_dimension': scatter_dimension, 'tiled': tiled, **more}
    plain = lambda x: lax.psum_scatter(x, axis_name, **how)

    def routes(like: Like) -> calls.Routes:
        dimension = counted('scatter_dimension', scatter_dimension, len(like.shape))
        there = ways.scattering(axis_name, dimension, tiled)
        return there, ways.gathering(axis_name, dimension, tiled)

    return calls.call(x, axis_name, routes, plain, calls.How(fwd, bwd, state, key, bool(more)))


def all_to_all(
    x: PyTree, axis_name: Axes, split_axis: int, concat_axis: int, *, tiled: bool = False,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`jax.lax.all_to_all`: a part of ``x`` to each device, as experts are sent their tokens.

    Args:
      x: arrays.
      axis_name: of the mesh.
      split_axis: the axis that is cut.
      concat_axis: the axis along which what arrives is joined.
      tiled: whether the axes stay.
      fwd: channel of the parts, of which each device sends one message to each.
      bwd: channel of the gradients, which return the same way.
      state: of this call, from `init`.
      key: for a codec that draws.
      **more: of `jax.lax.all_to_all`; a call that has some is that of `jax.lax`.
    """
    plain = lambda x: lax.all_to_all(x, axis_name, split_axis, concat_axis, tiled=tiled, **more)

    def routes(like: Like) -> calls.Routes:
        split = counted('split_axis', split_axis, len(like.shape))
        concat = counted('concat_axis', concat_axis, len(like.shape))
        one = lambda a, b: ways.concatenating(axis_name, a, b, tiled)
        return one(split, concat), one(concat, split)

    return calls.call(x, axis_name, routes, plain, calls.How(fwd, bwd, state, key, bool(more)))


def psum(
    x: PyTree, axis_name: Axes, *,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`jax.lax.psum`: the sum of all ``x``, in two hops, the same bits on all devices.

    Every device adds one part, coded by ``fwd``, and sends the sum of it, coded by ``fwd`` again.
    Under ``check_vma`` the transpose sends nothing and ``bwd`` is not used: the gradient of what
    all devices have is summed where it was made to vary, by `pvary`.

    Args:
      x: arrays.
      axis_name: of the mesh.
      fwd: channel of both hops.
      bwd: channel of both hops of the gradient.
      state: of this call, from `init`.
      key: for a codec that draws.
      **more: of `jax.lax.psum`; a call that has some is that of `jax.lax`.
    """
    plain = lambda x: lax.psum(x, axis_name, **more)
    return _reduced(x, axis_name, plain, 1.0, calls.How(fwd, bwd, state, key, bool(more)))


def pmean(
    x: PyTree, axis_name: Axes, *,
    fwd: How = None, bwd: How = None, state: State = None, key: Array | None = None, **more: Any,
) -> Any:  # fmt: skip
    """`jax.lax.pmean`: the mean of all ``x``, with the arguments of `psum`."""
    plain = lambda x: lax.pmean(x, axis_name, **more)
    scale = 1 / ways.size(axis_name)
    return _reduced(x, axis_name, plain, scale, calls.How(fwd, bwd, state, key, bool(more)))


def pvary(
    x: PyTree, axis_name: Axes, *, bwd: How = None, state: State = None, key: Array | None = None
) -> Any:
    """``x`` as varying along an axis, for which nothing is sent; its gradients are summed.

    Under ``check_vma`` JAX does this by itself where parameters that all devices have meet data
    that differ. Those are all the bytes of plain data parallelism, and no import reaches them;
    ``w = lax.pvary(w, 'batch', bwd='mx(8)')`` before the first use does.

    Args:
      x: arrays.
      axis_name: of the mesh.
      bwd: channel of the two hops of the sum; see `psum`.
      state: of this call, from `init`.
      key: for a codec that draws.

    Raises:
      ValueError: if a codec is given and ``check_vma`` is off, under which nothing is summed.
    """
    plain = lambda x: jax.tree.map(lambda a: ways.varying(a, axis_name), x)
    if not ways.follows(axis_name):
        if bwd is not None:
            raise ValueError(
                'pvary sums gradients under check_vma alone; without it sum them yourself, by '
                'lax.pmean(gradients, ..., fwd=...)'
            )
        return x if state is None else (x, state)

    def routes(like: Like) -> calls.Routes:
        return ways.Nowhere(plain), ways.reducing(axis_name, like)

    return calls.call(x, axis_name, routes, plain, calls.How('raw', bwd, state, key, enter=False))


def init(collective: Callable[..., Any], x: Array | Like, *args: Any, **how: Any) -> FeedbackState:
    """The states of a call before its first operand, for use inside `jax.shard_map`.

    Every state has a leading axis of this device's parts: ``PartitionSpec(axis)`` is the spec of
    all of them.

    Args:
      collective: of this module.
      x: an operand, or its shape.
      *args: those of the call.
      **how: those of the call.
    """
    return collective(x, *args, **how, state=calls.FIRST)


def counted(name: str, axis: int, count: int) -> int:
    """An axis counted from 0; raises ValueError if there is none."""
    if not -count <= axis < count:
        raise ValueError(f'{name}={axis} of an array of {count} axes')
    return axis % count


def _reduced(x: PyTree, axis: Axes, plain: Callable, scale: float, how: calls.How) -> Any:
    def routes(like: Like) -> calls.Routes:
        there = ways.reducing(axis, like, scale)
        if not ways.follows(axis):
            return there, there
        return there, ways.Nowhere(lambda g: ways.varying(g * scale, axis))

    return calls.call(x, axis, routes, plain, how)
