"""`Runtime`: what a trainer asks of the way in which stages run; `ModelState` and `StepKeys`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol, TypeVar

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp.boundary import Boundary
from jaxmp.boundary.pipeline import Stage
from jaxmp.exchange.collectives import Grads, KeyWords, Params, Tree
from jaxmp.exchange.layout import Exchange
from jaxmp.exchange.traffic import Bytes
from jaxmp.runtimes.state import Loss, Means, StageState
from jaxmp.runtimes.trained import Select, everything
from jaxmp.wire import Ctx, Index, Like

Batch = Mapping[str, PyTree]  # arrays: x, y and id of a step's examples, axis 0 the example
Memory = PyTree  # the feedback states of all boundaries, in a runtime's own layout
FeedbackByStage = dict[int, PyTree]  # a `Feedback` (of each replica, `ByReplica`) by stage
StepState = PyTree  # what a step carries to the next one: a trainer's state, with a `ModelState`
Values = PyTree  # the numbers that a step says of itself, such as its loss
Then = Callable[[PyTree, Batch], PyTree]  # of a model's outputs, such as their scores
T = TypeVar('T')


class ByReplica(dict):
    """What the replicas of a stage that are in this process hold, by their number; a pytree."""


jax.tree_util.register_pytree_with_keys(
    ByReplica,
    lambda d: ([(jax.tree_util.DictKey(r), d[r]) for r in sorted(d)], tuple(sorted(d))),
    lambda keys, values: ByReplica(zip(keys, values, strict=True)),
)


def each(f: Callable[[Tree], PyTree], tree: Tree) -> PyTree:
    """``f`` of a tree, or of that of every replica; only for what computes nothing."""
    if isinstance(tree, ByReplica):
        return ByReplica({r: f(t) for r, t in tree.items()})
    return f(tree)


def is_by_replica(tree: Tree) -> bool:
    """Whether ``tree`` is a `ByReplica`."""
    return isinstance(tree, ByReplica)


def of_replica(tree: Tree, r: int) -> Tree:
    """A tree with each `ByReplica` in it replaced by the entry of replica ``r``."""
    return jax.tree.map(lambda t: t[r], tree, is_leaf=is_by_replica)


def by_replica(like: Tree, rows: Mapping[int, Tree]) -> Tree:
    """The tree whose `of_replica` are ``rows``, with a `ByReplica` where ``like`` has one."""
    join = lambda _, *trees: ByReplica(zip(rows, trees, strict=True))
    return jax.tree.map(join, like, *rows.values(), is_leaf=is_by_replica)


class Model(NamedTuple):
    """A model cut into stages, as every runtime takes it.

    Attributes:
      stages: Linen modules with ``__call__(x, train)``, or `jaxmp.nnx.stage` of nnx modules; each
        takes the last one's output.
      boundaries: one between each two; their channels keep a state per micro-batch or example.
      prepare: ``(x of the batch, key or None) -> input``; with a key it may augment.
      loss: ``(output, y) -> (mean over the micro-batch, further means)``.
      x: shape and dtype of a micro-batch of the input, of one replica.
      num_microbatches: M.
      remat: whether the backward runs each stage again instead of reading its residuals.
      trained: whether the parameter of a stage and of a path in it has a gradient.
      first: number of the first stage with such parameters; those before it run no backward.
      kept: number of the training examples, if what the stage ``first`` receives of each never
        changes (`jaxmp.runtimes.kept`); 0 where it does, or is to be sent each time.
      normed: whether the norm over all stages of the gradients, as they come, is used.
      delays: steps that the gradients of a batch come later, by stage; none where none do.
    """

    stages: tuple[Stage, ...]
    boundaries: tuple[Boundary, ...]
    prepare: Callable[[Array, Array | None], Array]
    loss: Loss
    x: Like
    num_microbatches: int = 1
    remat: bool = False
    trained: Select = everything
    first: int = 0
    kept: int = 0
    normed: bool = False
    delays: tuple[int, ...] = ()


class ModelState(NamedTuple):
    """What the two passes of a step read and change.

    Attributes:
      params: of each stage of this process, by its number.
      model_state: other Flax collections (BatchNorm's statistics), likewise.
      feedback: states of the boundaries, in the runtime's own layout.
    """

    params: Params
    model_state: dict[int, PyTree]
    feedback: Memory


class Stages(Protocol):
    """What is per stage is opaque to the caller but for `at`.

    Attributes:
      last: number of the last stage, of any process.
      replicas: R; each takes an equal cut of the batch.
    """

    last: int
    replicas: int

    def init(self, key: Array, draw: bool = True) -> ModelState:
        """The state before the first step; every process passes the same key.

        Without ``draw`` no parameters are drawn, and there are none.
        """
        ...

    def at(
        self, stage: int, f: Callable[..., Tree], *trees: Tree, spent: tuple[int, ...] = ()
    ) -> Tree:
        """``f(collectives, *trees)`` of one replica of a stage, run by all of them at their place.

        ``collectives`` are those of `jaxmp.exchange`, or None without replicas; ``f`` is compiled
        once, so it must be one function and no new closure at every call. Where the call is a
        program of its own, the results take the memory of the trees whose numbers are ``spent``.
        """
        ...


class Runtime(Stages, Protocol):
    """How stages run, as a step sees it.

    Attributes:
      stages: numbers of the stages of this process.
      square: gives the squared norm of the gradients that came last, where stages have told each
        other before; else None.
    """

    stages: tuple[int, ...]
    square: Callable[[], Array] | None

    def value_and_grad(
        self, state: ModelState, batch: Batch, key: Array
    ) -> tuple[Means, dict[int, Grads], ModelState]:
        """Means of each replica (perhaps none here), gradients per stage, and the next state.

        Gradients are those of the parameters that are trained. Where a pipeline stays full, they
        are those of an earlier batch, and a stage has none before the first.
        """
        ...


class PlacedRuntime(Stages, Protocol):
    """A runtime over the devices of a process, as a trainer sees it.

    Attributes:
      together: whether one program holds all stages of a replica, and compiles the whole step.
    """

    together: bool

    def put(self, stage: int, tree: Tree) -> Tree:
        """The same tree at every replica of a stage that is here."""
        ...

    def bind(self, step: Step, each: PyTree) -> BoundStep:
        """``step(runtime, state, batch) -> (state, values)`` over this runtime.

        Args:
          step: a pure function; where one program holds all stages, the whole of it is compiled,
            and takes the buffers of ``state``.
          each: booleans in place of parts of ``state``: whether it differs by replica.
        """
        ...

    def drain(self, state: ModelState) -> tuple[dict[int, tuple[Grads, ...]], ModelState]:
        """By stage the gradients that have not come, the oldest first; the state after."""
        ...

    def again(self) -> None:
        """Begins anew with the compiled programs; forgets what is under way."""
        ...

    def predict(
        self, state: ModelState, batch: Batch, key: Array, then: Then = ...
    ) -> tuple[PyTree, Memory]:
        """``then(outputs, batch)`` (None where the last stage is not), and the feedback after.

        Every replica takes the whole batch; the outputs are those of the first one here.
        """
        ...

    def unpack(self, feedback: Memory) -> FeedbackByStage:
        """The feedback states as a `jaxmp.runtimes.state.Feedback` per stage (or `ByReplica`)."""
        ...

    def pack(self, feedback: FeedbackByStage) -> Memory:
        """The feedback states in the runtime's own layout; inverse of `unpack`."""
        ...

    def rows(self, tree: Tree) -> dict[int, Tree]:
        """A tree that is per replica as those of the replicas here, by their number."""
        ...

    def join(self, stage: int, like: Tree, rows: Mapping[int, Tree]) -> Tree:
        """The tree of a stage whose `rows` are given, in the form of ``like``, on its devices."""
        ...

    def numbered(self, step: Index, words: KeyWords) -> tuple[Array | np.ndarray, Array]:
        """A step's number and the run's key, given its words, where this runtime has them."""
        ...

    def shapes(self) -> list[StageState]:
        """Shapes of all stages' `jaxmp.runtimes.state.StageState`."""
        ...

    def bytes_of(self, exchange: Exchange, params: Params) -> Bytes:
        """Bytes a step that one replica hands to the collectives of an exchange of gradients."""
        ...


Step = Callable[[Runtime, StepState, Batch], tuple[StepState, Values]]
BoundStep = Callable[[StepState, Batch], tuple[StepState, Values]]  # over a runtime


def output(outputs: T, batch: Batch) -> T:
    """The outputs themselves: what follows a prediction where nothing does."""
    return outputs


class StepKeys(NamedTuple):
    """Randomness of a step: two streams that share no key, and with them no number."""

    augment: Array
    model: Ctx

    @classmethod
    def of(cls, key: Array, ids: Array, replica: Index | None = None) -> StepKeys:
        """The streams of a step's key; each replica has its own.

        Args:
          key: of the step.
          ids: of the examples.
          replica: number of the replica, or None if there is one.
        """
        augment, ctx = jax.random.fold_in(key, 0), Ctx(jax.random.fold_in(key, 1), ids)
        if replica is None:
            return cls(augment, ctx)
        return cls(jax.random.fold_in(augment, replica), ctx.fold(replica))


def one_replica(batch: Batch, r: int, n: int) -> dict[str, PyTree]:
    """The r-th of n equal cuts of a batch."""
    size = len(batch['id']) // n
    return {k: a[r * size : (r + 1) * size] for k, a in batch.items()}
