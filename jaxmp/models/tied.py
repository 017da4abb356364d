"""`TiedParameter`: one parameter in two stages, such as GPT-2's token table in embedding and head.

The two stages are different programs, so each has a copy. Three operations keep the copies equal:
`TiedParameter.share` makes them equal at the start; `TiedParameter.add` gives both the sum of both
gradients before the optimizer's update; `global_norm` counts that sum once. In one program these
take the tuples of all stages. The compiler may round two equal updates differently, so call `share`
on the parameters after the step too, which makes the copies equal to the bit.

If the stages are separate processes, they exchange three things. Once, they send the first stage's
copy (or both ends compute it by `table`). At each step, after the last micro-batch, they send both
gradients, and each end computes ``first + last``. For clipping they send one number, the squared
norm of all other gradients. The copies stay equal to the bit if both ends update them by the same
small program of copy, summed gradient and optimizer state. Both gradients are sent uncompressed,
not through a boundary, unless ``config.tied_exchange`` names an exchange that compresses them
(`jaxmp.exchange.copies`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, PyTree

_flat = functools.partial(flatten_dict, keep_empty_nodes=True)


class TiedParameter(NamedTuple):
    """A parameter of the first stage of which the last stage has a copy.

    Attributes:
      path: keys of the parameter in the parameters of either stage.
    """

    path: tuple[str, ...]

    def get(self, tree: PyTree) -> PyTree:
        """The parameter (or its gradient) in the tree of the first or the last stage."""
        for key in self.path:
            tree = tree[key]
        return tree

    def put(self, tree: PyTree, value: PyTree) -> PyTree:
        """The tree of the first or the last stage with ``value`` in place of the parameter."""
        return unflatten_dict({**_flat(tree), self.path: value})

    def selects(self, path: tuple[str, ...]) -> bool:
        """Whether the path is that of the parameter."""
        return path == self.path

    def without(self, tree: PyTree) -> PyTree:
        """The tree without the parameter."""
        return unflatten_dict({k: v for k, v in _flat(tree).items() if k != self.path})

    def share(self, params: Sequence[PyTree]) -> tuple[PyTree, ...]:
        """The parameters of all stages, with the first stage's copy also in the last.

        >>> WTE.share([{'wte': 1}, {}, {'wte': 2}])
        ({'wte': 1}, {}, {'wte': 1})
        """
        return self._set(params, self._copies(params)[0])

    def add(self, grads: Sequence[PyTree]) -> tuple[PyTree, ...]:
        r"""The gradients of all stages, with the sum of both copies' gradients in both ends.

        .. math:: g_{first}, g_{last} \leftarrow g_{first} + g_{last}

        An optimizer that updates elements independently (SGD, Adam) then keeps the copies equal, up
        to the rounding of its programs. A single stage has one copy, whose gradient is the sum.

        >>> WTE.add([{'wte': 1}, {}, {'wte': 2}])
        ({'wte': 3}, {}, {'wte': 3})
        """
        copies = self._copies(grads)
        return tuple(grads) if len(copies) == 1 else self._set(grads, copies[0] + copies[1])

    def global_norm(self, grads: Sequence[PyTree]) -> Array:
        """Norm of the gradients of all stages after `add`, with the shared parameter counted once.

        Clipping must divide by it to equal clipping by the global norm in a model of one stage.

        >>> one = jnp.ones(4)
        >>> round(float(WTE.global_norm([{'wte': one}, {'h': 2 * one}, {'wte': one}])) ** 2, 3)
        20.0
        """
        single = len(self._copies(grads)) == 1
        once = [*grads[:-1], grads[-1] if single else self.without(grads[-1])]
        wide = lambda g: jnp.asarray(g, jnp.promote_types(g.dtype, jnp.float32))
        return jnp.sqrt(sum(jnp.sum(jnp.square(wide(g))) for g in jax.tree.leaves(once)))

    def _copies(self, trees: Sequence[PyTree]) -> list[PyTree]:
        ends = trees[:1] if len(trees) == 1 else (trees[0], trees[-1])
        try:
            return [self.get(tree) for tree in ends]
        except (KeyError, TypeError):
            raise ValueError(
                f'the first and the last stage must have the tied parameter {"/".join(self.path)}, '
                f'and it is missing in {len(trees)} stages; give the params (or their gradients) '
                'of all stages in order'
            ) from None

    def _set(self, trees: Sequence[PyTree], value: PyTree) -> tuple[PyTree, ...]:
        ends = (0, len(trees) - 1)
        return tuple(self.put(t, value) if s in ends else t for s, t in enumerate(trees))


WTE = TiedParameter(('wte',))  # GPT-2's token table


def table(first: nn.Module, key: Array) -> Float[Array, 'V C']:
    """The token table that ``first`` gets from ``key``, in a program that computes only the table.

    All processes that call it get equal bits; a compiled ``init`` of the whole stage may round
    differently.
    """
    variables: PyTree = first.init({'params': key}, jnp.zeros((1, 1), jnp.int32))
    return WTE.get(variables['params'])
