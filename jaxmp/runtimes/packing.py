"""`Packing`: trees of unequal stages as vectors of equal length, so that one program holds any.

The leaves of a tree are flattened and joined, a vector per dtype, and each vector is padded with
zeros to the longest of all stages. Nothing is converted, so that unpacking gives the same bits; a
random key travels as its words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.exchange.collectives import Tree

Vectors = dict[str, Array]


class Packing:
    """The common layout of one tree per stage; those of alike trees are equal.

    Args:
      trees: shapes and dtypes of each stage's tree.
      lead: leading axes that every leaf keeps (equal in all leaves of a stage).

    >>> trees = [{'a': jnp.ones(2)}, {'b': jnp.ones((2, 2)), 'c': jnp.ones((), int)}]
    >>> packing = Packing(trees)
    >>> packing.pack(0, trees[0])['float32'].tolist()
    [1.0, 1.0, 0.0, 0.0]
    >>> packing.unpack(0, packing.pack(0, trees[0]))['a'].tolist()
    [1.0, 1.0]
    """

    def __init__(self, trees: Sequence[Tree], lead: int = 0) -> None:
        """Finds the longest vector of each dtype."""
        self._keys = [[_is_key(a) for a in jax.tree.leaves(t)] for t in trees]
        self._leaves = [jax.eval_shape(_words, jax.tree.leaves(t)) for t in trees]
        self._forms = [jax.tree.structure(t) for t in trees]
        self._lead = lead
        names = sorted({str(a.dtype) for leaves in self._leaves for a in leaves})
        self.widths = {n: max(self._width(s, n) for s in range(len(trees))) for n in names}
        shapes = tuple((a.shape, str(a.dtype)) for leaves in self._leaves for a in leaves)
        self._layout = lead, tuple(self._forms), shapes, tuple(map(tuple, self._keys))

    def __eq__(self, other: object) -> bool:
        """Whether ``other`` packs the same trees alike, so that compiled programs are shared."""
        return isinstance(other, Packing) and self._layout == other._layout

    def __hash__(self) -> int:
        """Equal for equal ones."""
        return hash(self._layout)

    def _size(self, leaf: Array) -> int:
        return math.prod(leaf.shape[self._lead :])

    def _width(self, s: int, dtype: str) -> int:
        return sum(self._size(a) for a in self._leaves[s] if str(a.dtype) == dtype)

    def zeros(self) -> Vectors:
        """Vectors of zeros."""
        return {name: jnp.zeros(width, name) for name, width in self.widths.items()}

    def pack(self, s: int, tree: Tree, lead: tuple[int, ...] = (), wide: bool = False) -> Vectors:
        """Stage ``s``'s tree as vectors ``(*lead, width)``.

        Args:
          s: the stage.
          tree: of its structure.
          lead: the leading axes.
          wide: whether the numbers are sums, which stay in float32 or wider.
        """
        vectors: Vectors = {}
        leaves = list(zip(_words(jax.tree.leaves(tree)), self._leaves[s], strict=True))
        for name, width in self.widths.items():
            same_dtype = [(a, like) for a, like in leaves if str(like.dtype) == name]
            dtype = jnp.promote_types(name, jnp.float32) if wide else name
            rows = [a.astype(dtype).reshape(*lead, -1) for a, _ in same_dtype]
            joined = jnp.concatenate(rows, -1) if rows else jnp.zeros((*lead, 0), dtype)
            short = width - joined.shape[-1]
            vectors[name] = jnp.pad(joined, [(0, 0)] * len(lead) + [(0, short)])
        return vectors

    def unpack(self, s: int, vectors: Vectors) -> Tree:
        """Stage ``s``'s tree out of its vectors; inverse of `pack`."""
        start, leaves = dict.fromkeys(vectors, 0), []
        for a, is_key in zip(self._leaves[s], self._keys[s], strict=True):
            name, size = str(a.dtype), self._size(a)
            part = vectors[name][..., start[name] : start[name] + size]
            leaf = part.reshape(*part.shape[:-1], *a.shape[self._lead :])
            leaves.append(jax.random.wrap_key_data(leaf) if is_key else leaf)
            start[name] += size
        return jax.tree.unflatten(self._forms[s], leaves)


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaves: list[Array]) -> list[Array]:
    return [jax.random.key_data(a) if _is_key(a) else a for a in leaves]
