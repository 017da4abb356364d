"""`cut`: a traced backward as two programs, so that a schedule can put work between them.

The first program makes what the stage before waits for, the gradient of the input; the second makes
the rest, the gradients of the parameters (Zero Bubble Pipeline Parallelism, arXiv 2401.10241).
Together they run every equation of the backward once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
from jax.extend import core
from jaxtyping import Array, PyTree

FLAT = 'jit', 'pjit', 'closed_call', 'core_call'  # calls whose equations are taken one by one
Atom = core.Var | core.Literal  # of a traced program


def cut(
    f: Callable[..., tuple[PyTree, PyTree]], *args: PyTree
) -> tuple[PyTree, Callable[..., list[Array]], Sequence[Array]]:
    """The first result of ``f``, and a function that makes the second one, with its arguments.

    An equation inside a loop or a rematerialized block belongs to it, so that a module that scans
    over its layers has all of their backward in the first program.

    Args:
      f: ``(*args) -> (first, second)``, each a pytree.
      *args: arrays, in pytrees.

    Returns:
      ``first``, ``rest`` and ``values``, where ``rest(*values)`` is the leaves of ``second``.

    >>> import jax.numpy as jnp
    >>> first, rest, values = cut(lambda x, w: (x * w, (x * w) @ w), jnp.ones(3), 2 * jnp.ones(3))
    >>> first.tolist(), float(rest(*values)[0]), len(values)
    ([2.0, 2.0, 2.0], 12.0, 2)
    """
    closed, shape = jax.make_jaxpr(f, return_shape=True)(*args)
    leaves = jax.tree.leaves(args)
    flat = functools.partial(_unfolded, closed.jaxpr, closed.consts)
    closed = jax.make_jaxpr(lambda *leaves: flat(leaves))(*leaves)
    jaxpr, count = closed.jaxpr, len(jax.tree.leaves(shape[0]))
    early, late = _sorted(jaxpr, count)
    computed = {v for e in early for v in e.outvars}
    used = _variables([v for e in late for v in e.invars] + jaxpr.outvars[count:])
    inputs = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *leaves], strict=True))
    handed = [v for v in used if v in computed or v in inputs]
    out = _run(early, inputs, jaxpr.outvars[:count] + handed)

    def rest(*values: Array) -> list[Array]:
        return _run(late, dict(zip(handed, values, strict=True)), jaxpr.outvars[count:])

    return jax.tree.unflatten(jax.tree.structure(shape[0]), out[:count]), rest, out[count:]


def _sorted(jaxpr: core.Jaxpr, count: int) -> tuple[list[core.JaxprEqn], list[core.JaxprEqn]]:
    """The equations that the first ``count`` outputs need, and those that only the others need."""
    early = _needed(jaxpr.eqns, jaxpr.outvars[:count])
    ours = {id(e) for e in early}
    return early, _needed([e for e in jaxpr.eqns if id(e) not in ours], jaxpr.outvars[count:])


def _needed(equations: Sequence[core.JaxprEqn], outputs: Sequence[Atom]) -> list[core.JaxprEqn]:
    """The equations that ``outputs`` need, or that do more than compute, in their order."""
    needed, chosen = set(_variables(outputs)), []
    for e in reversed(equations):
        if needed.intersection(e.outvars) or e.effects:
            needed.update(_variables(e.invars))
            chosen.append(e)
    return chosen[::-1]


def _variables(values: Sequence[Atom]) -> list[core.Var]:
    """The variables among atoms of a jaxpr, each once."""
    return list(dict.fromkeys(v for v in values if isinstance(v, core.Var)))


def _unfolded(jaxpr: core.Jaxpr, consts: Sequence[Array], args: Sequence[Array]) -> list[Array]:
    """Evaluates a jaxpr, with the equations of the calls in it as its own."""
    inputs = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    return _run(jaxpr.eqns, inputs, jaxpr.outvars)


def _run(
    equations: Sequence[core.JaxprEqn], inputs: dict[core.Var, Array], wanted: Sequence[Atom]
) -> list[Array]:
    """Evaluates equations, given the values of the variables that none of them makes."""
    env = dict(inputs)
    read = lambda v: v.val if isinstance(v, core.Literal) else env[v]
    for e in equations:
        values, inner = [read(v) for v in e.invars], e.params.get('jaxpr')
        if e.primitive.name in FLAT and inner is not None:
            closed = isinstance(inner, core.ClosedJaxpr)
            out = _unfolded(
                inner.jaxpr if closed else inner, inner.consts if closed else (), values
            )
        else:
            bound = e.primitive.get_bind_params(e.params)  # a pair before JAX 0.10
            functions, params = bound if isinstance(bound, tuple) else ((), bound)
            out = e.primitive.bind(*functions, *values, **params)
            out = out if e.primitive.multiple_results else [out]
        env.update(zip(e.outvars, out, strict=True))
    return [read(v) for v in wanted]
