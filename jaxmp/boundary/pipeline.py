"""`Pipeline`: stages and boundaries in one program, for convergence studies and notebooks.

The stages are ordinary Flax modules that do not depend on compression: Linen modules, or nnx
modules by `jaxmp.nnx.stage`. Payloads are packed and unpacked also on one device, so that a model
trains here exactly as it would over a network.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, PyTree

from jaxmp.boundary import Boundary, FeedbackState, boundary, init_feedback
from jaxmp.feedback import Channel
from jaxmp.wire import Ctx, Like, like

StageVariables = dict[str, PyTree]  # of a stage: `params` and other collections, by name
Variables = tuple[StageVariables, ...]  # of all stages
Rngs = dict[str, Array]  # random keys by name: `params`, `dropout`


@runtime_checkable
class Stage(Protocol):
    """The interface of a stage: a Linen module, or `jaxmp.nnx.stage` of an nnx module.

    A stage with an attribute ``reads_tokens`` that is true is applied with the keyword ``tokens``,
    the ids of the model's input, which every stage has anyway; `init` has to do without.
    """

    def init(self, rngs: Rngs, *args: PyTree, **kwargs: Any) -> PyTree:
        """The initial variables; ``rngs`` has the keys ``params`` and ``dropout``."""
        ...

    def init_with_output(self, rngs: Rngs, *args: PyTree, **kwargs: Any) -> PyTree:
        """The output and the variables."""
        ...

    def apply(self, variables: StageVariables, *args: PyTree, **kwargs: Any) -> PyTree:
        """The output; with ``mutable=[names]`` also these collections, updated."""
        ...


def inputs(stage: Stage, ctx: Ctx, kwargs: Mapping[str, object]) -> dict[str, object]:
    """The keywords that ``stage`` is applied with: ``kwargs``, and the tokens if it reads them.

    Raises:
      ValueError: if it reads them and there are none.
    """
    if not getattr(stage, 'reads_tokens', False):
        return dict(kwargs)
    if ctx.tokens is None:
        raise ValueError(
            f"{type(stage).__name__} reads the tokens of the model's input, and this input is no "
            'integers; give token ids to the first stage'
        )
    return {**kwargs, 'tokens': ctx.tokens}


def check_stages(stages: Sequence[Stage]) -> None:
    """Checks that all objects are stages.

    Raises:
      TypeError: if an object is not a stage.
    """
    for i, stage in enumerate(stages):
        is_class = isinstance(stage, type)
        if is_class or not isinstance(stage, Stage):
            kind = f'the class {stage.__name__}' if is_class else f'a {type(stage).__name__}'
            raise TypeError(
                f'stage {i} is {kind}; a stage is a Flax Linen module such as nn.Dense(8), or '
                'jaxmp.nnx.stage(Module, ...) of an nnx module'
            )


@dataclass(frozen=True)
class Pipeline:
    """Stages with a boundary between each neighbouring pair; see `pipeline`."""

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]

    def __post_init__(self) -> None:
        check_stages(self.stages)

    def init(self, key: Array, x: Array, **kwargs: object) -> tuple[Variables, FeedbackState]:
        """Initial variables of all stages and states of all boundaries.

        Args:
          key: random key of the initial parameters.
          x: an input of the training batch's shape (feedback buffers are per batch position).
          **kwargs: passed to ``__call__`` of each stage.

        Returns:
          A tuple of Flax variable dicts, one per stage, and the states, one per boundary.
        """
        variables = _start(self.stages, tuple(sorted(kwargs.items())), key, x)

        @jax.jit
        def feedback() -> FeedbackState:
            likes = self.likes(variables, x, **kwargs)
            return init_feedback(self.boundaries, likes)

        return variables, feedback()

    def apply(
        self,
        variables: Variables,
        feedback: FeedbackState | None,
        x: Array,
        ctx: Ctx | None = None,
        **kwargs: object,
    ) -> tuple[Array, Variables, PyTree]:
        """Runs the stages; ``feedback=None`` leaves the boundaries open (no compression).

        Args:
          variables: variables from `init`; collections other than ``params`` are updated.
          feedback: states of the boundaries, or None.
          x: input; axis 0 is the sample.
          ctx: key (for dropout and stochastic codecs) and ids of this step; its tokens are ``x``
            if that has integers.
          **kwargs: passed to ``__call__`` of each stage, for example ``train=True``.

        Returns:
          The output, the variables with updated statistics, and the states. Forward states are
          updated; backward states are updated in `value_and_grad`.
        """
        ctx = (Ctx() if ctx is None else ctx).reading(x)
        updated, crossed = [], []
        for i, (stage, before) in enumerate(zip(self.stages, variables, strict=True)):
            if i and feedback is not None:
                x, state = self.boundaries[i - 1].cross(x, feedback.at(i - 1), ctx.fold(2 * i))
                crossed.append(state)
            x, after = run_stage(stage, before, x, ctx.fold(2 * i + 1), kwargs)
            updated.append(after)
        return x, tuple(updated), None if feedback is None else FeedbackState.join(crossed)

    def likes(self, variables: Variables, x: Array | Like, **kwargs: object) -> list[Like]:
        """Shape and dtype of the tensor that crosses each boundary, for an input like ``x``."""
        crossing = []

        def trace(variables: Variables, x: Array) -> None:
            ctx = Ctx(jax.random.key(0)).reading(x)
            for stage, of_stage in zip(self.stages[:-1], variables, strict=False):
                x, _ = run_stage(stage, of_stage, x, ctx, kwargs)
                crossing.append(like(x))

        jax.eval_shape(trace, variables, x)
        return crossing


@functools.partial(jax.jit, static_argnames=('stages', 'kwargs'))
def _start(
    stages: tuple[Stage, ...], kwargs: tuple[tuple[str, object], ...], key: Array, x: Array
) -> Variables:
    # It is compiled once for all seeds and channels, because that takes longer than the step.
    initial = []
    for i, stage in enumerate(stages):
        keys = {'params': jax.random.fold_in(key, i), 'dropout': key}
        x, variables = stage.init_with_output(keys, x, **dict(kwargs))
        # Linen's has no `params` where there are no parameters.
        initial.append({'params': {}, **variables})
    return tuple(initial)


def run_stage(
    stage: Stage, variables: StageVariables, x: Array, ctx: Ctx, kwargs: Mapping[str, object]
) -> tuple[Array, StageVariables]:
    """The output of a stage, and its variables with collections other than ``params`` updated."""
    mutable = [name for name in variables if name != 'params']
    rngs = {} if ctx.key is None else {'dropout': ctx.key}
    x, changed = stage.apply(variables, x, mutable=mutable, rngs=rngs, **inputs(stage, ctx, kwargs))
    keep = lambda old, new: new.astype(old.dtype)  # scans and checkpoints need constant dtypes
    old = {name: variables[name] for name in mutable}
    return x, {**variables, **jax.tree.map(keep, old, {**old, **changed})}


def pipeline(
    stages: Sequence[Stage],
    fwd: Channel | Sequence[Channel],
    bwd: Channel | Sequence[Channel],
) -> Pipeline:
    """A model cut into stages; activations go through ``fwd``, their gradients through ``bwd``.

    Args:
      stages: Linen modules, or nnx modules by `jaxmp.nnx.stage`; each takes the output of the
        previous one.
      fwd: one channel for all boundaries, or one per boundary.
      bwd: likewise for gradients.

    Raises:
      TypeError: if an object is not a stage.
      ValueError: if there is no stage, or the number of channels is not that of the boundaries.
    """
    if not stages:
        raise ValueError('a pipeline needs at least one stage')
    n = len(stages) - 1
    pairs = zip(_each('fwd', fwd, n), _each('bwd', bwd, n), strict=True)
    return Pipeline(tuple(stages), tuple(boundary(f, b) for f, b in pairs))


def _each(name: str, channel: Channel | Sequence[Channel], n: int) -> list[Channel]:
    if isinstance(channel, Channel):
        return [channel] * n
    if len(channel) != n:
        raise ValueError(
            f'{n + 1} stages have {n} boundaries, and {name} has {len(channel)} channels; give '
            'one for all or one per boundary'
        )
    return list(channel)
