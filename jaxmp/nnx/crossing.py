"""`Crossing`: a boundary as a layer of an `nnx.Module`, which keeps the feedback states.

The forward state changes in the forward pass, as BatchNorm's statistics do. The backward state is
made in the backward pass; `jaxmp.boundary` says why it needs a `value_and_grad` that knows of it,
and this module's does the same for the variables of a module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from flax import nnx
from jaxtyping import Array, PyTree

from jaxmp.boundary import Aux, Boundary, FeedbackState
from jaxmp.boundary import value_and_grad as with_feedback
from jaxmp.wire import Ctx, Like

PathParts = tuple[Hashable, ...]  # of a variable: the attributes, keys and numbers to it


class ForwardFeedback(nnx.Variable):
    """The feedback state of a boundary's forward channel, a pair of both ends."""


class BackwardFeedback(nnx.Variable):
    """The feedback state of a boundary's backward channel, a pair of both ends."""


class Crossing(nnx.Module):
    """A layer that sends its input across a boundary.

    Attributes:
      boundary: what it crosses.
      compress: whether it does; without, it is the identity (``model.eval(compress=False)``).
      fwd: state of the forward channel.
      bwd: state of the backward channel.
    """

    def __init__(self, boundary: Boundary, x: Array | Like) -> None:
        """Makes the states of ``boundary`` for a tensor like ``x``, axis 0 the sample.

        Raises:
          TypeError: if ``boundary`` is not a boundary.
        """
        if not isinstance(boundary, Boundary):
            raise TypeError(
                f'Crossing takes a boundary, got an object of type {type(boundary).__name__}; '
                'write jaxmp.boundary(fwd, bwd)'
            )
        self.boundary, self.compress = boundary, True
        state = boundary.init(x)
        self.fwd, self.bwd = ForwardFeedback(state.fwd), BackwardFeedback(state.bwd)

    def __call__(self, x: Array, ctx: Ctx | None = None) -> Array:
        """What the next layer receives; see `jaxmp.Boundary.cross`.

        Args:
          x: the activation, axis 0 the sample.
          ctx: key of a stochastic codec, ids of the examples.

        Raises:
          ValueError: if the states were made for another shape.
          TypeError: if it is differentiated without `value_and_grad`, and has a backward state.
        """
        if not self.compress:
            return x
        state = FeedbackState(self.fwd.get_value(), self.bwd.get_value())
        y, state = self.boundary.cross(x, state, ctx)
        self.fwd.set_value(state.fwd)
        self.bwd.set_value(state.bwd)
        return y


def value_and_grad(
    f: Callable[..., PyTree], *, has_aux: bool = False
) -> Callable[..., tuple[PyTree, nnx.State]]:
    """`nnx.value_and_grad` by the `nnx.Param` of a model that holds crossings.

    All other variables, of the model and of further arguments, are updated in place: feedback
    states of both directions, BatchNorm's statistics, random streams.

    Args:
      f: ``(model, *args) -> scalar``, or ``(scalar, aux)``.
      has_aux: whether ``f`` returns ``aux``.

    Returns:
      ``(model, *args) -> (value, gradients)``, or ``((value, aux), gradients)``.

    >>> import jax.numpy as jnp, jaxmp
    >>> cut = jaxmp.boundary(jaxmp.parse('raw'), jaxmp.parse('ef(top_k(0.5))'))
    >>> linear = nnx.Linear(4, 2, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
    >>> model = nnx.Sequential(linear, Crossing(cut, jnp.ones((1, 2))))
    >>> weighted = lambda model, x: jnp.sum(model(x) * jnp.array([[2.0, 1.0]]))
    >>> value, grads = value_and_grad(weighted)(model, jnp.ones((1, 4)))
    >>> value.item(), grads['layers'][0]['kernel'].get_value()[0].tolist()
    (12.0, [2.0, 0.0])
    >>> model.layers[1].bwd.get_value()[0].tolist()
    [[0.0, 1.0]]
    """

    def run(model: nnx.Module, *args: PyTree, **kwargs: PyTree) -> tuple[PyTree, nnx.State]:
        nodes = model, args, kwargs
        graph, params, bwd, rest = nnx.split(nodes, _own(nnx.Param), _own(BackwardFeedback), ...)

        def loss(
            params: nnx.State, feedback: FeedbackState
        ) -> tuple[Array, tuple[FeedbackState, Aux]]:
            inner = nnx.merge(graph, params, feedback.bwd, rest, copy=True)
            out = f(inner[0], *inner[1], **inner[2])
            value, aux = out if has_aux else (out, None)
            bwd, changed = nnx.state(inner, _own(BackwardFeedback), _changed)
            return value, (FeedbackState((), bwd), (changed, aux))

        step = with_feedback(loss)
        (value, (changed, aux)), grads, feedback = step(params, FeedbackState((), bwd))
        nnx.update(nodes, changed, feedback.bwd)
        return (value, aux) if has_aux else value, grads[0]

    return run


def _own(kind: type[nnx.Variable]) -> Callable[[PathParts, object], bool]:
    """Filter of the model's variables of a kind, among (model, args, kwargs)."""
    return lambda path, value: path[0] == 0 and isinstance(value, kind)


def _changed(path: PathParts, value: object) -> bool:
    """Filter of what ``f`` may change: all of the model but parameters; variables of the rest."""
    return not _own(nnx.Param)(path, value) and (path[0] == 0 or isinstance(value, nnx.Variable))
