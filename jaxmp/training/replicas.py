"""Replicas of a stage: their mean, and the check that they are equal; functions of one replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jaxtyping import Array, PyTree, UInt32

from jaxmp.exchange import Collectives, Exchange
from jaxmp.exchange.collectives import Params, Tree
from jaxmp.runtimes.mirrors import checksums
from jaxmp.runtimes.types import each
from jaxmp.training.across import Traffic
from jaxmp.training.experiment import Experiment
from jaxmp.training.step import TrainState


class DriftError(RuntimeError):
    """Replicas that must be equal are not."""


def mean(via: Collectives | None, tree: Tree) -> Tree:
    """The replicas' mean; equal numbers are their own."""
    if via is None or not jax.tree.leaves(tree):
        return tree
    return via.mean(tree)


def gathered_checksums(via: Collectives | None, tree: Tree) -> UInt32[Array, 'n leaves']:
    """`checksums` of all replicas, at each of them."""
    sums = checksums(tree)
    return sums[None] if via is None else via.all_gather(sums)


def alike(exchange: Exchange, state: TrainState, delay: int = 0) -> dict[int, Tree]:
    """By stage what must be equal in all replicas now, perhaps nothing between two averages."""
    if exchange.shared:
        some = lambda states: [x for x in states if x != ()]  # a group that follows has no state
        trees = {s: [each(exchange.shared, x) for x in some(t)] for s, t in state.exchange.items()}
    else:
        trees = state.model.params if (int(state.step) - delay) % exchange.period == 0 else {}
    return {s: tree for s, tree in trees.items() if jax.tree.leaves(tree)}


def compare(rows: np.ndarray, params: Params, step: int, where: str = '') -> None:
    """Compares the checksums of the replicas.

    Args:
      rows: from `gathered_checksums`.
      params: their parameters, for the names.
      step: of the state.
      where: of the model, for the message.

    Raises:
      DriftError: if they differ; the message names the replicas and the parameter.
    """
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(params)]
    alike = [tuple(r) for r in rows]
    usual = max(alike, key=alike.count)
    odd = [i for i, row in enumerate(alike) if row != usual]
    if odd:
        leaf = f'{where}{paths[int(np.argmax(rows[odd[0]] != usual))]}'
        who = f'replica {", ".join(map(str, odd))} differ from the others of {len(rows)}'
        if 2 * alike.count(usual) <= len(rows):
            who = f'the {len(rows)} replicas differ, and none has a majority'
        raise DriftError(
            f'after step {step} the parameters of {who}, first at {leaf}: a device or its memory '
            'has changed a number that was not exchanged; the last checkpoint is from before, give '
            'the same command to go on from it'
        )


def traffic(
    exp: Experiment, params: Sequence[Params], bytes_of: Callable[[Exchange, Params], Traffic]
) -> Traffic:
    """Bytes a step that one replica hands to the collectives of all its stages, after any warm-up.

    Args:
      exp: the experiment.
      params: shapes of what is exchanged, group by group.
      bytes_of: of an exchange and parameters: a report of numbers, perhaps by kind.

    Returns:
      The sums of the reports, and ``text`` and ``replicas``.
    """
    last = exp.exchange.by_epoch[-1] if exp.exchange.by_epoch else exp.exchange
    total: Traffic = {}
    for tree in params:
        total = _sum(total, bytes_of(last, tree))
    return {'text': str(exp.config.exchange), 'replicas': exp.replicas, **total}


def _sum(a: Traffic, b: Traffic) -> Traffic:
    def one(x: PyTree, y: PyTree) -> PyTree:
        return _sum(x or {}, y or {}) if isinstance(x or y, dict) else (x or 0) + (y or 0)

    return {k: one(a.get(k), b.get(k)) for k in {**a, **b}}
