"""`Group`: parameters that are exchanged, counted in the norm and updated together.

The groups of a run are what is trained of each stage, and perhaps a tied table, of which the first
and the last stage have a copy. Both copies are updated by the sum of both gradients. Where one
program holds both, the second follows the first: it takes the gradient that the replicas have
exchanged for the first.

A parameter that no group selects is frozen. It has no optimizer state, replicas do not exchange its
gradient, and the norm does not count it.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import jax
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxmp.exchange import Exchange
from jaxmp.exchange.collectives import Grads, Params, Tree
from jaxmp.runtimes.trained import Path, Select, everything, of_stage, whole
from jaxmp.runtimes.types import ByReplica, each
from jaxmp.training.optimizer import Optimizer


class Group(NamedTuple):
    """Parameters that are exchanged, counted in the norm and updated together.

    Attributes:
      homes: the stages that hold it; of several, each has a copy. The norm counts the first.
      select: whether it has the parameter of a path, unless an earlier group of the stage has it.
      stream: number of its stream of random keys.
      optimizer: how it is updated; it sees the group alone, or is a `WholeNorm`.
      exchange: how replicas share its gradient.
      between: how its homes share their gradients, where they are apart.
    """

    homes: tuple[int, ...]
    select: Callable[[Path], bool]
    stream: int
    optimizer: Optimizer
    exchange: Exchange
    between: Exchange | None = None

    @property
    def copied(self) -> bool:
        """Whether several stages have a copy."""
        return len(self.homes) > 1


Groups = tuple[Group, ...]
Home = tuple[int, Group]  # a group in one of its stages


def rest(
    stages: int,
    optimizer: Optimizer,
    exchange: Exchange,
    trained: Select = everything,
) -> Groups:
    """One group per stage, of what no earlier group has.

    Args:
      stages: their number.
      optimizer: of each group.
      exchange: of each group.
      trained: the stages and paths that are selected; what is at others is frozen.
    """
    select = functools.partial(of_stage, trained)
    return tuple(Group((s,), select(s), s, optimizer, exchange) for s in range(stages))


def copied(groups: Groups) -> Group | None:
    """The group of which two stages have a copy, if there is one."""
    return next((g for g in groups if g.copied), None)


def groups_at(groups: Groups, stage: int) -> Groups:
    """The groups of a stage, in the order of its states of optimizer and exchange."""
    return tuple(g for g in groups if stage in g.homes)


def homes(groups: Groups, stages: Iterable[int]) -> list[Home]:
    """All groups of some stages, stage by stage."""
    return [(s, g) for s in stages for g in groups_at(groups, s)]


def is_first(home: Home) -> bool:
    """Whether it is the first home of its group."""
    stage, group = home
    return stage == group.homes[0]


# Trees by stage, and by home.


def split(groups: Groups, trees: Mapping[int, Tree]) -> dict[Home, Tree]:
    """What each group has of the stages' parameters, or of trees of the same form.

    Args:
      groups: of the run.
      trees: by stage, of one replica or with `ByReplica` in place of each.

    Raises:
      ValueError: if a stage lacks the parameter of which it is to have a copy.

    >>> table = Group((0, 1), lambda path: path == ('wte',), 2, None, None)
    >>> parts = split((table, *rest(2, None, None)), {0: {'wte': 1, 'h': 2}, 1: {'wte': 1}})
    >>> [(stage, part) for (stage, _), part in parts.items()]
    [(0, {'wte': 1}), (0, {'h': 2}), (1, {'wte': 1}), (1, {})]
    """
    parts: dict[Home, Tree] = {}
    for s, tree in trees.items():
        here = groups_at(groups, s)
        rows = each(functools.partial(_parts, here, s), tree)
        parts |= {(s, g): each(operator.itemgetter(i), rows) for i, g in enumerate(here)}
    return parts


def joined(trees: Mapping[int, Tree], parts: Mapping[Home, Tree]) -> dict[int, Tree]:
    """The trees of the stages with new parts of groups; what is in no part stays."""
    return {
        s: _whole(t, [p for (home, _), p in parts.items() if home == s]) for s, t in trees.items()
    }


def of_groups(groups: Groups, trees: Mapping[int, Params]) -> dict[int, Grads]:
    """The trees of the stages without what is frozen, the form of their gradients."""
    empty = {s: each(lambda tree: {}, t) for s, t in trees.items()}
    return joined(empty, split(groups, trees))


def by_home(groups: Groups, states: Mapping[int, list[Tree]]) -> dict[Home, Tree]:
    """The states that each stage has as a list, one for each of its groups."""
    rows = (state for states_of_stage in states.values() for state in states_of_stage)
    return dict(zip(homes(groups, states), rows, strict=True))


def by_stage(states: Mapping[Home, Tree]) -> dict[int, list[Tree]]:
    """Inverse of `by_home`."""
    lists: dict[int, list[Tree]] = {}
    for (s, _), state in states.items():
        lists.setdefault(s, []).append(state)
    return lists


def _parts(groups: Groups, stage: int, tree: Tree) -> list[Tree]:
    """What each group of a stage has of its tree."""
    if [g.select for g in groups] == [everything]:
        return [tree]
    parts: list[dict[Path, Tree]] = [{} for _ in groups]
    for path, leaf in _flat(tree).items():
        owner = next((part for g, part in zip(groups, parts, strict=True) if g.select(path)), {})
        owner[path] = leaf  # of no group: frozen
    for group, part in zip(groups, parts, strict=True):
        if group.copied and not part:
            raise ValueError(
                f'stages {" and ".join(map(str, group.homes))} are to have a copy each of one '
                f'parameter, and stage {stage} has none at its path, but '
                f'{", ".join(sorted(tree))}; give a path that both stages have, as '
                "Task(tied=TiedParameter(('wte',)))"
            )
    return [unflatten_dict(part) for part in parts]


def _whole(tree: Tree, parts: list[Tree]) -> Tree:
    """``tree`` with the leaves of ``parts`` in their places."""
    if isinstance(tree, ByReplica):
        return ByReplica({r: _whole(t, [p[r] for p in parts]) for r, t in tree.items()})
    return whole(tree, *parts)


_flat = functools.partial(flatten_dict, keep_empty_nodes=True)


# Copies that one program holds.


def summed(groups: Groups, gradients: Mapping[int, Grads]) -> dict[int, Grads]:
    r"""The gradients with the sum over all homes in each copy of a group.

    .. math:: g_{first}, g_{last} \leftarrow g_{first} + g_{last}
    """
    return _copies(groups, gradients, lambda first, last: jax.tree.map(operator.add, first, last))


def equal(groups: Groups, parameters: Mapping[int, Params]) -> dict[int, Params]:
    """The parameters with the first copy of a group in all of its homes."""
    return _copies(groups, parameters, lambda first, last: first)


def _copies(
    groups: Groups, trees: Mapping[int, Tree], join: Callable[[Tree, Tree], Tree]
) -> dict[int, Tree]:
    """The trees with ``join`` of all copies of a group in each of its homes."""
    parts, new = split(groups, trees), {}
    for g in groups:
        if g.copied:
            value = functools.reduce(join, (parts[s, g] for s in g.homes))
            new.update({(s, g): value for s in g.homes})
    return joined(trees, new)


# What replicas exchange.


def exchanged(groups: Groups, shapes: Mapping[int, Params], together: bool) -> list[Params]:
    """The trees that one replica exchanges with the others.

    Args:
      groups: of the run.
      shapes: of the parameters of all stages.
      together: whether one program holds all stages, and exchanges a copied group once.
    """
    parts = split(groups, shapes)
    return [part for home, part in parts.items() if is_first(home) or not together]
