"""`StageState` and `Residuals`: what a stage keeps between steps, and between two actions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.boundary import Aux
from jaxmp.exchange.collectives import Grads, Params, Tree
from jaxmp.feedback.channel import Rx, Tx
from jaxmp.runtimes.halves import cut
from jaxmp.wire import Ctx, widened

Collections = dict[str, PyTree]  # Flax's besides `params`, by name: BatchNorm's statistics
Input = PyTree  # of the first stage: an array, axis 0 the example
Target = PyTree  # of the loss: an array, axis 0 the example
Loss = Callable[[Array, Target], tuple[Array, Aux]]  # of the output; a mean, and further means
Means = PyTree  # a step's loss and what comes with it, of each replica
Form = Any  # the structure of a tree, which is no static type
Static = tuple[Form, tuple[int | None, ...]]  # of a `Pullback`: its form and its places


class Feedback(NamedTuple):
    """Feedback states at a stage's ends of its boundaries; ``()`` where there is no boundary.

    Attributes:
      left_rx: of the receiver of activations.
      left_tx: of the sender of gradients.
      right_tx: of the sender of activations.
      right_rx: of the receiver of gradients.
    """

    left_rx: Rx = ()
    left_tx: Tx = ()
    right_tx: Tx = ()
    right_rx: Rx = ()


class StageState(NamedTuple):
    """What a stage keeps between steps.

    Attributes:
      params: parameters; only the optimizer changes them.
      model_state: other Flax collections (BatchNorm's statistics), changed by the forward.
      feedback: states of its ends of the boundaries.
    """

    params: Params
    model_state: Collections
    feedback: Feedback


class MicroBatch(NamedTuple):
    """A micro-batch as a stage sees it.

    Attributes:
      x: input, in the first stage.
      y: targets, in the last.
      ctx: its key, ids and number.
    """

    x: Input
    y: Target
    ctx: Ctx


class Accumulator(NamedTuple):
    """Sums over micro-batches: loss and what comes with it (in the last stage), gradients.

    They are in float32 or wider, whatever the parameters are.
    """

    loss: Array
    aux: Aux
    grads: Grads

    def add(self, grads: Grads, *means: PyTree) -> Accumulator:
        """These sums and another micro-batch's gradients, and in the last stage loss and aux."""
        plus = lambda t, a: t + a.astype(t.dtype)
        before = (self.grads, self.loss, self.aux) if means else (self.grads,)
        grads, *new = jax.tree.map(plus, before, (grads, *means))
        loss, aux = new or (self.loss, self.aux)
        return Accumulator(loss, aux, grads)


def in_dtypes(tree: Tree, like: Tree) -> Tree:
    """``tree`` in the dtypes of ``like``, which for most models it has."""
    return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), tree, like)


def squared_norm(tree: Tree) -> Array:
    """The sum of all squares, in float32 or wider."""
    return sum((jnp.vdot(g, g) for g in jax.tree.leaves(widened(tree))), jnp.zeros(()))


class Residuals(NamedTuple):
    """What the forward of a micro-batch leaves for its backward.

    Attributes:
      kept: a `Linear`; with ``remat`` the module's input and its collections before.
      received: indices of the message from the stage before, for index reuse.
      sent: indices of the message to the stage after.
    """

    kept: PyTree
    received: Array | None
    sent: Array | None


class Linear(NamedTuple):
    """A module at its input: the map from a gradient of its output to gradients.

    Attributes:
      pull: that map's residuals but for the parameters, which the stage has already.
      means: loss and what comes with it, in the last stage.
    """

    pull: Pullback
    means: tuple[PyTree, ...]


@jax.tree_util.register_pytree_node_class
class Pullback:
    """The result of `jax.vjp` of a function of parameters and input, stored without parameters."""

    def __init__(self, kept: Sequence[Array], form: Form, places: tuple[int | None, ...]) -> None:
        """Leaves of a pytree ``form``, in which ``places`` names the parameter of each or None."""
        self.kept, self.form, self.places = kept, form, places

    @classmethod
    def of(cls, pull: PyTree, params: Params, before: Sequence[Array] = ()) -> Pullback:
        """Stores ``pull``, which `jax.vjp` gave at ``params``, without the arrays ``before``."""
        leaves, form = jax.tree.flatten(pull)
        number = {id(a): i for i, a in enumerate([*jax.tree.leaves(params), *before])}
        places = tuple(number.get(id(a)) for a in leaves)
        return cls([a for a, i in zip(leaves, places, strict=True) if i is None], form, places)

    def joined(self, params: Params, before: Sequence[Array]) -> Pullback:
        """The same with the arrays ``before``, which `of` left out."""
        leaves, n = iter(self.kept), len(jax.tree.leaves(params))
        of_params = [i is not None and i < n for i in self.places]
        rows = zip(self.places, of_params, strict=True)
        saved = [next(leaves) if i is None else before[i - n] for i, param in rows if not param]
        places = [i if param else None for i, param in zip(self.places, of_params, strict=True)]
        return Pullback(saved, self.form, tuple(places))

    def __call__(self, params: Params, *gradient: Grads) -> PyTree:
        """What the function gives: gradients of the parameters and of the input."""
        of_params, others = jax.tree.leaves(params), iter(self.kept)
        leaves = [next(others) if i is None else of_params[i] for i in self.places]
        return jax.tree.unflatten(self.form, leaves)(*gradient)

    def halves(
        self, params: Params, gradient: Grads, before: Sequence[Array]
    ) -> tuple[list[Array], Pullback]:
        """Gradient of the input, if the function has it, and the map to the parameters' leaves.

        See `jaxmp.runtimes.halves.cut`; the second result is called with the parameters alone, once
        it is `joined` with ``before``, which it leaves out: a program would copy what it only
        hands on.
        """

        def gradients(saved: list[Array], params: Params, g: Grads) -> tuple[PyTree, Grads]:
            of_params, *of_input = Pullback(saved, self.form, self.places)(params, g)
            return of_input, of_params

        gx, rest, values = cut(gradients, self.kept, params, gradient)
        return gx, Pullback.of(jax.tree_util.Partial(rest, *values), params, before)

    def tree_flatten(self) -> tuple[tuple[list[Array]], Static]:
        """Children and static part, for JAX."""
        return (list(self.kept),), (self.form, self.places)

    @classmethod
    def tree_unflatten(cls, static: Static, children: tuple[list[Array]]) -> Pullback:
        """Inverse of `tree_flatten`."""
        return cls(children[0], *static)
