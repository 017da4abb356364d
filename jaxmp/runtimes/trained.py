"""The parameters of a stage that are trained, and those that are frozen.

A predicate of a stage's number and of a parameter's path in it says which are which. Gradients, and
sums of them, are trees of the former alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp.exchange.collectives import Tree

Path = tuple[str, ...]
Select = Callable[[int, Path], bool]


def everything(stage: int, path: Path) -> bool:
    """True: the parameter of any path in any stage is trained."""
    return True


def of_stage(select: Select, stage: int) -> Callable[[Path], bool]:
    """The predicate of the paths in one stage."""
    return all_paths if select is everything else functools.partial(select, stage)


def all_paths(path: Path) -> bool:
    """True."""
    return True


def part(select: Callable[[Path], bool], tree: Tree) -> Tree:
    """The leaves of a tree of dicts that ``select`` names by their paths.

    >>> part(lambda path: path[-1] == 'bias', {'a': {'kernel': 1, 'bias': 2}, 'b': {'scale': 3}})
    {'a': {'bias': 2}}
    """
    if select is all_paths:
        return tree
    flat = flatten_dict(tree, keep_empty_nodes=True)
    return unflatten_dict({path: leaf for path, leaf in flat.items() if select(path)})


def whole(tree: Tree, *parts: Tree) -> Tree:
    """``tree`` with the leaves of ``parts`` in their places."""
    if len(parts) == 1 and jax.tree.structure(tree) == jax.tree.structure(parts[0]):
        return parts[0]
    leaves = flatten_dict(tree, keep_empty_nodes=True)
    for some in parts:
        leaves |= flatten_dict(some, keep_empty_nodes=True)
    return unflatten_dict(leaves) if parts else tree
