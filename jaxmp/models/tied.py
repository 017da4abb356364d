"""One token table in two stages: the embedding of the first, the scores of the last.

The first stage and the last are different programs, so each has a copy, ``wte``, and three
functions keep the two one parameter: `share` makes them equal at the start, `tie` gives both the
sum of both gradients before the optimiser, so that they stay equal, and `global_norm` counts that
sum once. In one program these take the tuples of all stages; as the compiler may round two equal
updates in two ways, `share` the parameters after the step too, which makes the copies equal to the
bit.

Where stages are processes, what must be exchanged is: once, the first stage's table, to the last
(or both ends make it by `table`); every step, after the last micro-batch, the two gradients
``(V, C)``, each end computing ``first + last``; for clipping, one number, the squared norm of all
other gradients. The ends stay equal to the bit if the table's update is one small program of table,
summed gradient and state, the same at both; else the last receives the table now and then. No
boundary is involved: both gradients travel whole, unless ``config.tied_exchange`` names an exchange
that compresses them (`jaxmp.exchange.copies`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def share(params: Sequence[Any]) -> tuple[Any, ...]:
    """The parameters of all stages with the first stage's table also in the last.

    Args:
      params: of each stage, or anything of that form (an average of them, for example).

    >>> share([{'wte': 1}, {}, {'wte': 2}])
    ({'wte': 1}, {}, {'wte': 1})
    """
    return _set_tables(params, _tables(params)[0])


def tie(grads: Sequence[Any]) -> tuple[Any, ...]:
    r"""The gradients of all stages, with the sum of both tables' gradients in both.

    .. math:: g_{first}, g_{last} \leftarrow g_{first} + g_{last}

    An optimiser that treats elements alone (SGD, Adam) then keeps the copies equal, up to how its
    programs round. A single stage has one table, and its gradient is already the sum.

    Args:
      grads: of each stage.

    >>> tie([{'wte': 1}, {}, {'wte': 2}])
    ({'wte': 3}, {}, {'wte': 3})
    """
    tables = _tables(grads)
    return tuple(grads) if len(tables) == 1 else _set_tables(grads, tables[0] + tables[1])


def global_norm(grads: Sequence[Any]) -> Array:
    """Norm of the gradients of all stages after `tie`, the shared table counted once.

    What clipping by the global norm must divide by to be that of the uncut model.

    Args:
      grads: of each stage.

    >>> one = jnp.ones(4)
    >>> round(float(global_norm([{'wte': one}, {'h': 2 * one}, {'wte': one}])) ** 2, 3)
    20.0
    """
    tables = _tables(grads)
    once = [*grads[:-1], {k: v for k, v in grads[-1].items() if k != 'wte' or len(tables) == 1}]
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(once)))


def table(first: nn.Module, key: Array) -> Float[Array, 'V C']:
    """The table that ``first`` gets from ``key``; compiled, nothing else of the stage is made.

    Equal to the bit among processes that all call this; a compiled ``init`` of the whole stage may
    round otherwise.

    Args:
      first: the stage that embeds.
      key: as the rng ``params`` of its ``init``.
    """
    made: Any = first.init({'params': key}, jnp.zeros((1, 1), jnp.int32))
    return made['params']['wte']


def _tables(trees: Sequence[Any]) -> list[Any]:
    if len(trees) == 1:
        return [trees[0]['wte']]
    if 'wte' not in trees[0] or 'wte' not in trees[-1]:
        raise ValueError(
            'the first and the last stage of a GPT-2 hold the table wte, and it is missing in '
            f'{len(trees)} stages; give the params (or their gradients) of all stages in order'
        )
    return [trees[0]['wte'], trees[-1]['wte']]


def _set_tables(trees: Sequence[Any], value: Any) -> tuple[Any, ...]:
    ends = (0, len(trees) - 1)
    return tuple({**t, 'wte': value} if s in ends else t for s, t in enumerate(trees))
