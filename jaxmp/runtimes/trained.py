"""The parameters of a stage that are trained, and those that are frozen.

A predicate of a parameter's path says which are which. Gradients, and sums of them, are trees of
the former alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

Path = tuple[str, ...]
Select = Callable[[Path], bool]


def everything(path: Path) -> bool:
    """True: the parameter of any path is trained."""
    return True


def part(select: Select, tree: Any) -> Any:
    """The leaves of a tree of dicts that ``select`` names by their paths.

    >>> part(lambda path: path[-1] == 'bias', {'a': {'kernel': 1, 'bias': 2}, 'b': {'scale': 3}})
    {'a': {'bias': 2}}
    """
    if select is everything:
        return tree
    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if select(path)})


def whole(tree: Any, *parts: Any) -> Any:
    """``tree`` with the leaves of ``parts`` in their places."""
    if len(parts) == 1 and jax.tree.structure(tree) == jax.tree.structure(parts[0]):
        return parts[0]
    leaves = flatten_dict(tree, keep_empty_nodes=True)
    for some in parts:
        leaves |= flatten_dict(some, keep_empty_nodes=True)
    return unflatten_dict(leaves) if parts else tree
