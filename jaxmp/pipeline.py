"""Stages and boundaries in one program: the runtime of convergence studies and notebooks.

The stages are ordinary Flax modules that know nothing of compression. On one device the payloads
are still packed and unpacked, so what a model learns here is what it would learn over a real wire.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
from jaxtyping import Array

from jaxmp.boundary import Boundary, Links, boundary, init_feedback
from jaxmp.feedback import Channel
from jaxmp.transport import Transport
from jaxmp.wire import Ctx, Like, like

Variables = tuple[Any, ...]


@dataclass(frozen=True)
class Pipeline:
    """Stages with a boundary between each two; see `pipeline`."""

    stages: tuple[nn.Module, ...]
    boundaries: tuple[Boundary, ...]

    def init(self, key: Array, x: Array, **kwargs: Any) -> tuple[Variables, Links]:
        """Variables of every stage and the states of every boundary.

        Args:
          key: randomness of the initial parameters.
          x: an input of the training batch's shape (feedback buffers are per batch position).
          **kwargs: passed to every stage's ``__call__``.

        Returns:
          A tuple of Flax variable dicts, one a stage, and `Links` of tuples, one entry a boundary.
        """
        variables = _start(self.stages, tuple(sorted(kwargs.items())), key, x)

        @jax.jit
        def links() -> Links:
            likes = self.likes(variables, x, **kwargs)
            return init_feedback(self.boundaries, likes)

        return variables, links()

    def apply(
        self,
        variables: Variables,
        links: Links | None,
        x: Array,
        ctx: Ctx | None = None,
        **kwargs: Any,
    ) -> tuple[Array, Variables, Any]:
        """Runs the stages; ``links=None`` leaves the boundaries open (no compression).

        Args:
          variables: from `init`; collections other than ``params`` are updated.
          links: states of the boundaries, or None.
          x: input, axis 0 the sample.
          ctx: key (dropout, stochastic codecs) and ids of this step.
          **kwargs: passed to every stage's ``__call__``, for example ``train=True``.

        Returns:
          The output, the variables with updated statistics, and the states (forward ones advanced;
          backward ones advance in `value_and_grad`).
        """
        ctx = Ctx() if ctx is None else ctx
        updated, crossed = [], []
        for i, (stage, own) in enumerate(zip(self.stages, variables, strict=True)):
            if i and links is not None:
                x, at = self.boundaries[i - 1].cross(x, links.at(i - 1), ctx.fold(2 * i))
                crossed.append(at)
            x, own = _run(stage, own, x, ctx.fold(2 * i + 1), kwargs)
            updated.append(own)
        return x, tuple(updated), None if links is None else Links.join(crossed)

    def likes(self, variables: Variables, x: Array | Like, **kwargs: Any) -> list[Like]:
        """Shape and dtype of what crosses each boundary, for an input like ``x``."""
        found = []

        def trace(variables: Variables, x: Array) -> None:
            for stage, own in zip(self.stages[:-1], variables, strict=False):
                x, _ = _run(stage, own, x, Ctx(jax.random.key(0)), kwargs)
                found.append(like(x))

        jax.eval_shape(trace, variables, x)
        return found


@functools.partial(jax.jit, static_argnames=('stages', 'kwargs'))
def _start(
    stages: tuple[nn.Module, ...], kwargs: tuple[tuple[str, Any], ...], key: Array, x: Array
) -> Variables:
    # Compiled once for all seeds and channels: it takes longer than the step.
    made = []
    for i, stage in enumerate(stages):
        keys = {'params': jax.random.fold_in(key, i), 'dropout': key}
        x, variables = stage.init_with_output(keys, x, **dict(kwargs))
        made.append(dict(variables))
    return tuple(made)


def _run(stage: nn.Module, variables: dict, x: Array, ctx: Ctx, kwargs: dict) -> tuple[Array, dict]:
    mutable = [name for name in variables if name != 'params']
    rngs = {} if ctx.key is None else {'dropout': ctx.key}
    x, changed = stage.apply(variables, x, mutable=mutable, rngs=rngs, **kwargs)
    keep = lambda old, new: new.astype(old.dtype)  # a scan, and a checkpoint, keep dtypes
    old = {name: variables[name] for name in mutable}
    return x, {**variables, **jax.tree.map(keep, old, {**old, **changed})}


def pipeline(
    stages: Sequence[nn.Module],
    fwd: Channel | Sequence[Channel],
    bwd: Channel | Sequence[Channel],
    via: Transport | None = None,
) -> Pipeline:
    """A model cut into stages; activations go through ``fwd``, their gradients through ``bwd``.

    Args:
      stages: Flax modules, each taking the last one's output.
      fwd: one channel for all boundaries, or one a boundary.
      bwd: likewise.
      via: how payloads move; default `local`.

    Raises:
      ValueError: if there is no stage, or the number of channels is not that of the boundaries.
    """
    if not stages:
        raise ValueError('a pipeline needs at least one stage')
    n = len(stages) - 1
    pairs = zip(_each('fwd', fwd, n), _each('bwd', bwd, n), strict=True)
    return Pipeline(tuple(stages), tuple(boundary(f, b, via) for f, b in pairs))


def _each(name: str, channel: Channel | Sequence[Channel], n: int) -> list[Channel]:
    if isinstance(channel, Channel):
        return [channel] * n
    if len(channel) != n:
        raise ValueError(
            f'{n + 1} stages have {n} boundaries, and {name} has {len(channel)} channels; give '
            'one for all or one a boundary'
        )
    return list(channel)
