"""`with_masters`: an optimizer of parameters in 16 bits, which keeps float32 copies of them.

An update of a parameter is often smaller than the distance to the next number of 8 bits, and would
be lost. So the optimizer changes a copy in float32, and the parameter is the copy rounded.

References:
  Mixed Precision Training, arXiv 1710.03740.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath
from jax.typing import DTypeLike
from jaxtyping import Array

from jaxmp.exchange.collectives import Grads, Params
from jaxmp.training.clipping import OptState


class Masters(NamedTuple):
    """The state of an optimizer with master weights.

    Attributes:
      masters: the parameters of fewer bits in float32, by their paths.
      state: of the optimizer that changes them.
    """

    masters: dict[str, Array]
    state: OptState


def with_masters(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    r"""``optimizer`` over float32 copies :math:`m` of the parameters :math:`p`.

    .. math:: m \leftarrow m + u(g, m), \qquad p \leftarrow \mathrm{round}(m)

    Where something else has changed a parameter since, such as an exchange of replicas, its copy
    begins again at the parameter.

    >>> bf16 = {'w': jnp.ones(1, jnp.bfloat16)}
    >>> optimizer = with_masters(optax.sgd(1.0))
    >>> params, state = bf16, optimizer.init(bf16)
    >>> for _ in range(4):
    ...     updates, state = optimizer.update({'w': -jnp.full(1, 2**-9)}, state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> float(state.masters["['w']"][0]), float(params['w'][0]), float(bf16['w'][0] + 2**-9)
    (1.0078125, 1.0078125, 1.0)
    """

    def init(params: Params) -> Masters:
        wide = jax.tree.map(_wide, params)
        return Masters(_narrow(wide, params), optimizer.init(wide))

    def update(updates: Grads, state: OptState, params: Params = None) -> tuple[Grads, Masters]:
        def before(path: KeyPath, p: Array) -> Array:
            master = state.masters.get(jax.tree_util.keystr(path), p)
            return jnp.where(_rounded(master, p.dtype) == p, master, _wide(p))

        wide = jax.tree.map_with_path(before, params)
        updates, inner = optimizer.update(jax.tree.map(_wide, updates), state.state, wide)
        after = optax.apply_updates(wide, updates)

        def moved(update: Array, master: Array, p: Array) -> Array:  # p + this is the rounded copy
            return update if master.dtype == p.dtype else _rounded(master, p.dtype) - _wide(p)

        updates = jax.tree.map(moved, updates, after, params)
        return updates, Masters(_narrow(after, params), inner)

    return optax.GradientTransformation(init, update)


def _narrow(wide: Params, params: Params) -> dict[str, Array]:
    """The leaves of ``wide`` whose parameter has fewer bits, by their paths."""
    pairs = zip(jax.tree.leaves_with_path(wide), jax.tree.leaves(params), strict=True)
    return {jax.tree_util.keystr(path): m for (path, m), p in pairs if m.dtype != p.dtype}


def _wide(a: Array) -> Array:
    return a.astype(jnp.promote_types(a.dtype, jnp.float32))


def _rounded(a: Array, dtype: DTypeLike) -> Array:
    """``a`` rounded to the numbers of ``dtype``.

    A compiler may leave out a conversion to 16 bits and back, but not this.
    """
    about = jnp.finfo(dtype)
    return jax.lax.reduce_precision(a, about.nexp, about.nmant)
