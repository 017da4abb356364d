"""`in_pieces`: a function of collectives as compiled programs, between which a host communicates.

`jax.shard_map` needs one JAX world. Replicas of separate worlds run the same function up to its
first collective, move the operands themselves, and go on with the results. The function is traced
once. Its operations are divided by the number of collectives that they depend on: piece d has those
that depend on d collectives, one after the other. Collectives that do not depend on each other
are made together, and nothing is computed twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxmp.exchange.collectives import Collectives
from jaxmp.transport import one_piece
from jaxmp.wire import Payload

_gathered = core.Primitive('gathered_by_host')
_gathered.def_abstract_eval(lambda a, *, n: a.update(shape=(n, *a.shape)))
Gather = Callable[[bytes], list[bytes]]


def by_host(n: int, index: Any) -> Collectives:
    """The collectives of one of n replicas, inside `in_pieces`."""

    def all_gather(payload: Payload) -> Payload:
        if not jax.tree.leaves(payload):
            return payload
        piece, back = one_piece(payload)
        return back(_gathered.bind(piece, n=n))

    def all_reduce(tree: Any) -> Any:
        return jax.tree.map(lambda a: functools.reduce(jnp.add, list(a)), all_gather(tree))

    def all_to_all(payload: Payload) -> Payload:
        return jax.tree.map(lambda a: a[:, index], all_gather(payload))

    return Collectives(n, index, all_reduce, all_gather, all_to_all)


class Pieces(NamedTuple):
    """A function in pieces.

    Attributes:
      run: ``(index, args, gather) -> result`` at replica ``index``. ``gather`` sends bytes and
        returns those of all replicas, in their order; it is called once per piece but the last.
      private: whether each leaf of the result depends on ``index`` or an argument other than by the
        collectives, so that it may differ between replicas.
    """

    run: Callable[[Any, tuple, Gather], Any]
    private: Any


def in_pieces(f: Callable[..., Any], n: int, *args: Any) -> Pieces:
    """``f`` in pieces.

    Args:
      f: ``(via, *args) -> result``. It calls the collectives ``via`` itself, not inside of
        `jax.lax.cond`, `jax.lax.scan` or `jax.jit`.
      n: number of replicas.
      args: the arguments, or their shapes. The first one is the same at all replicas.

    >>> f = lambda via, k, x: via.all_reduce(x) * k
    >>> p = in_pieces(f, 2, 3, np.ones(2, np.float32))
    >>> p.run(0, (3, np.ones(2, np.float32)), lambda row: [row, row]), p.private
    (Array([6., 6.], dtype=float32), False)
    """
    closed, shape = jax.make_jaxpr(lambda i, *a: f(by_host(n, i), *a), return_shape=True)(0, *args)
    jaxpr, form = closed.jaxpr, jax.tree.structure(shape)
    public = jax.tree.leaves(args[:1])
    own = [jaxpr.invars[0], *jaxpr.invars[1 + len(public) :]]
    marks, depth = _depths(jaxpr)
    steps = [_Step.of(jaxpr, depth, d) for d in range(1 + max([0, *depth.values()]))]
    constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))

    def run(index: Any, values: tuple, gather: Gather) -> Any:
        leaves = jax.tree.leaves((index, *values))
        env = {**constants, **dict(zip(jaxpr.invars, leaves, strict=True))}
        for step in steps:
            env.update(zip(step.makes, step.compiled(*(env[v] for v in step.needs)), strict=True))
            if step.sends:
                _exchange(step, env, gather)
        return form.unflatten([jnp.asarray(_value(env, v)) for v in jaxpr.outvars])

    return Pieces(run, form.unflatten(_tainted(jaxpr, own, marks)))


class _Step(NamedTuple):
    """The operations between two communications, compiled, and what they need, make and send."""

    compiled: Callable[..., Sequence[Any]]
    needs: list[Any]
    makes: list[Any]
    sends: list[Any]

    @staticmethod
    def of(jaxpr: Any, depth: dict[Any, int], d: int) -> _Step:
        """The operations that depend on d communications."""
        eqns = [e for e in jaxpr.eqns if _depth(depth, e.invars) == d]
        work = [e for e in eqns if e.primitive is not _gathered]
        sends = [e for e in eqns if e.primitive is _gathered]
        inside = {v: None for e in work for v in e.outvars}  # ordered, for caches
        used = {v: None for e in work for v in _vars(e.invars)}
        later = {v for e in jaxpr.eqns if e not in work for v in _vars(e.invars)}
        later |= set(_vars(jaxpr.outvars))
        makes = [v for v in inside if v in later]
        needs = [v for v in used if v not in inside]

        part = jaxpr.replace(constvars=[], invars=needs, outvars=makes, eqns=work)
        run = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(part, [])))
        return _Step(run, needs, makes, sends)


def _exchange(step: _Step, env: dict[Any, Any], gather: Gather) -> None:
    """Communicates the operands of a step, as one message, and adds the results to ``env``."""
    arrays = [np.ascontiguousarray(_value(env, e.invars[0])) for e in step.sends]
    rows = gather(b''.join(a.reshape(-1).view(np.uint8).tobytes() for a in arrays))
    table = np.stack([np.frombuffer(row, np.uint8) for row in rows])
    ends = np.cumsum([a.nbytes for a in arrays])[:-1]
    for e, a, part in zip(step.sends, arrays, np.split(table, ends, 1), strict=True):
        whole = np.ascontiguousarray(part).view(a.dtype).reshape(len(rows), *a.shape)
        env[e.outvars[0]] = whole  # the next step's program takes it as it is


def _depths(jaxpr: Any) -> tuple[set[Any], dict[Any, int]]:
    """The results of communications, and on how many communications each variable depends."""
    marks, depth = set(), {}
    for e in jaxpr.eqns:
        here = e.primitive is _gathered
        marks |= set(e.outvars) if here else set()
        depth.update(dict.fromkeys(e.outvars, _depth(depth, e.invars) + here))
    return marks, depth


def _tainted(jaxpr: Any, own: Sequence[Any], marks: set[Any]) -> list[bool]:
    """Whether each result depends on the variables ``own`` other than by ``marks``."""
    private = set(own)
    for e in jaxpr.eqns:
        if private & set(_vars(e.invars)):
            private |= set(e.outvars) - marks
    return [not isinstance(v, core.Literal) and v in private for v in jaxpr.outvars]


def _depth(depth: dict[Any, int], variables: Sequence[Any]) -> int:
    return max([0, *(depth.get(v, 0) for v in _vars(variables))])


def _vars(variables: Sequence[Any]) -> list[Any]:
    return [v for v in variables if not isinstance(v, core.Literal)]


def _value(env: dict[Any, Any], v: Any) -> Any:
    return v.val if isinstance(v, core.Literal) else env[v]
