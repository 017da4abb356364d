"""`in_pieces`: a function of collectives as compiled programs, between which a host communicates.

`jax.shard_map` needs one JAX world. Replicas of separate worlds run the same function up to its
first collective, move the operands themselves, and go on with the results. The function is traced
once. Its operations are divided by the number of collectives that they depend on: piece d has those
that depend on d collectives, one after the other. Collectives that do not depend on each other
are made together, and nothing is computed twice. A `jax.lax.cond` with collectives in a branch is
decided by the host, which runs that branch in pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jaxtyping import Array, PyTree

from jaxmp.boundary.transport import moved
from jaxmp.exchange.collectives import Collectives, Tree
from jaxmp.wire import Index, Payload

_gathered = core.Primitive('gathered_by_host')
_gathered.def_abstract_eval(lambda a, *, n: a.update(shape=(n, *a.shape)))
Buffer = bytes | memoryview | np.ndarray  # of bytes
Gather = Callable[[Sequence[bytes]], Sequence[Buffer]]
Atom = core.Var | core.Literal  # of a traced program
Value = Array | np.ndarray
Env = dict[core.Var, Value]  # what the variables so far are


def by_host(n: int, index: Index) -> Collectives:
    """The collectives of one of n replicas, inside `in_pieces`."""

    def all_gather(payload: Payload) -> Payload:
        return moved(lambda piece: _gathered.bind(piece, n=n), payload)

    def all_reduce(tree: Tree) -> Tree:
        return jax.tree.map(lambda a: functools.reduce(jnp.add, list(a)), all_gather(tree))

    def all_to_all(payload: Payload) -> Payload:
        return jax.tree.map(lambda a: a[:, index], all_gather(payload))

    return Collectives(n, index, all_reduce, all_gather, all_to_all)


class Pieces(NamedTuple):
    """A function in pieces.

    Attributes:
      run: ``(args of each replica here by its index, gather) -> result of each``. ``gather`` takes
        the bytes of the replicas here, and returns those of all, in their order; it is called once
        per piece but the last.
      private: whether each leaf of the result depends on the index or an argument other than by the
        collectives, so that it may differ between replicas.
    """

    run: Callable[[Mapping[int, tuple], Gather], dict[int, PyTree]]
    private: PyTree


def in_pieces(f: Callable[..., PyTree], n: int, *args: PyTree) -> Pieces:
    """``f`` in pieces.

    Args:
      f: ``(via, *args) -> result``. It calls the collectives ``via`` itself or in a branch of
        `jax.lax.cond` that all replicas take alike, not inside of `jax.lax.scan` or `jax.jit`.
      n: number of replicas.
      args: the arguments, or their shapes. The first one is the same at all replicas.

    >>> f = lambda via, k, x: via.all_reduce(x) * k
    >>> p = in_pieces(f, 2, 3, np.ones(2, np.float32))
    >>> p.run({0: (3, np.ones(2, np.float32))}, lambda rows: [*rows, *rows]), p.private
    ({0: Array([6., 6.], dtype=float32)}, False)
    """
    closed, shape = jax.make_jaxpr(lambda i, *a: f(by_host(n, i), *a), return_shape=True)(0, *args)
    jaxpr, form, count = closed.jaxpr, jax.tree.structure(shape), len(jax.tree.leaves(args[:1]))
    inputs, program = [jaxpr.invars[0], *jaxpr.invars[1 + count :]], _Program.of(closed)

    def run(args: Mapping[int, tuple], gather: Gather) -> dict[int, PyTree]:
        rows = [jax.tree.leaves((i, *values)) for i, values in args.items()]
        results = (map(jnp.asarray, row) for row in program.run(rows, gather))
        return {i: form.unflatten(row) for i, row in zip(args, results, strict=True)}

    return Pieces(run, form.unflatten(_tainted(jaxpr, inputs)))


class _Step(NamedTuple):
    """The operations between two communications, compiled, and what they need and make.

    Attributes:
      gathers: the collectives that follow, which need no other result than those so far.
      branches: likewise conditions with collectives, and a program of each of their branches.
    """

    compiled: Callable[..., Sequence[Value]]
    needs: list[core.Var]
    makes: list[core.Var]
    gathers: list[core.JaxprEqn]
    branches: list[tuple[core.JaxprEqn, list[_Program]]]

    @staticmethod
    def of(jaxpr: core.Jaxpr, depth: dict[core.Var, int], d: int) -> _Step:
        """The operations that depend on d communications."""
        eqns = [e for e in jaxpr.eqns if _depth(depth, e.invars) == d]
        work = [e for e in eqns if not _communicates(e)]
        gathers = [e for e in eqns if e.primitive is _gathered]
        conditions = [e for e in eqns if _communicates(e) and e.primitive is not _gathered]
        inside = {v: None for e in work for v in e.outvars}  # ordered, for caches
        used = {v: None for e in work for v in _vars(e.invars)}
        later = {v for e in jaxpr.eqns if e not in work for v in _vars(e.invars)}
        later |= set(_vars(jaxpr.outvars))
        makes = [v for v in inside if v in later]
        needs = [v for v in used if v not in inside]

        part = jaxpr.replace(constvars=[], invars=needs, outvars=makes, eqns=work)
        run = jax.jit(core.jaxpr_as_fun(core.ClosedJaxpr(part, [])))
        branches = [(e, [_Program.of(b) for b in e.params['branches']]) for e in conditions]
        return _Step(run, needs, makes, gathers, branches)


class _Program(NamedTuple):
    """A traced function in steps."""

    jaxpr: core.Jaxpr
    constants: Env
    steps: list[_Step]

    @staticmethod
    def of(closed: core.ClosedJaxpr) -> _Program:
        """The steps of a function."""
        jaxpr, depth = closed.jaxpr, _depths(closed.jaxpr)
        steps = [_Step.of(jaxpr, depth, d) for d in range(1 + max([0, *depth.values()]))]
        return _Program(jaxpr, dict(zip(jaxpr.constvars, closed.consts, strict=True)), steps)

    def run(self, rows: Sequence[Sequence[Value]], gather: Gather) -> list[list[Value]]:
        """The results of each replica here, given its arguments."""
        inputs = (dict(zip(self.jaxpr.invars, row, strict=True)) for row in rows)
        envs = [{**self.constants, **values} for values in inputs]
        for step in self.steps:
            for env in envs:
                results = step.compiled(*(env[v] for v in step.needs))
                env.update(zip(step.makes, results, strict=True))
            if step.gathers:
                _exchange(step.gathers, envs, gather)
            for eqn, programs in step.branches:
                _branch(eqn, programs, envs, gather)
        return [[_value(env, v) for v in self.jaxpr.outvars] for env in envs]


def _exchange(gathers: Sequence[core.JaxprEqn], envs: Sequence[Env], gather: Gather) -> None:
    """Communicates the operands of collectives as one message, and adds the results to ``envs``."""
    arrays = [[np.ascontiguousarray(_value(env, e.invars[0])) for e in gathers] for env in envs]
    rows = (b''.join(a.reshape(-1).view(np.uint8).tobytes() for a in row) for row in arrays)
    table = np.stack([np.frombuffer(row, np.uint8) for row in gather(list(rows))])
    ends = np.cumsum([a.nbytes for a in arrays[0]])[:-1]
    for e, a, part in zip(gathers, arrays[0], np.split(table, ends, 1), strict=True):
        whole = np.ascontiguousarray(part).view(a.dtype).reshape(len(table), *a.shape)
        for env in envs:
            env[e.outvars[0]] = whole  # the next step's program takes it as it is


def _branch(
    eqn: core.JaxprEqn, programs: Sequence[_Program], envs: Sequence[Env], gather: Gather
) -> None:
    """Runs the branch of a condition that all replicas take, and adds its results to ``envs``."""
    which, *operands = eqn.invars
    rows = [[_value(env, v) for v in operands] for env in envs]
    number = min(max(int(_value(envs[0], which)), 0), len(programs) - 1)  # as `jax.lax.cond` does
    for env, results in zip(envs, programs[number].run(rows, gather), strict=True):
        env.update(zip(eqn.outvars, results, strict=True))


def _communicates(eqn: core.JaxprEqn) -> bool:
    """Whether an operation is a collective, or a condition with one in a branch."""
    branches = eqn.params['branches'] if eqn.primitive.name == 'cond' else ()
    inside = (e for branch in branches for e in branch.jaxpr.eqns)
    return eqn.primitive is _gathered or any(map(_communicates, inside))


def _depths(jaxpr: core.Jaxpr) -> dict[core.Var, int]:
    """On how many communications each variable depends."""
    depth = {}
    for e in jaxpr.eqns:
        depth.update(dict.fromkeys(e.outvars, _depth(depth, e.invars) + _communicates(e)))
    return depth


def _tainted(jaxpr: core.Jaxpr, inputs: Sequence[core.Var]) -> list[bool]:
    """Whether each result depends on the variables ``inputs`` other than by collectives."""
    private = set(inputs)
    for e in jaxpr.eqns:
        if private & set(_vars(e.invars)) and e.primitive is not _gathered:
            private |= set(e.outvars)
    return [not isinstance(v, core.Literal) and v in private for v in jaxpr.outvars]


def _depth(depth: dict[core.Var, int], variables: Sequence[Atom]) -> int:
    return max([0, *(depth.get(v, 0) for v in _vars(variables))])


def _vars(variables: Sequence[Atom]) -> list[core.Var]:
    return [v for v in variables if not isinstance(v, core.Literal)]


def _value(env: Env, v: Atom) -> Value:
    return v.val if isinstance(v, core.Literal) else env[v]
