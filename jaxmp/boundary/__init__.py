"""`Boundary`: the cut between two stages; `crossing`, the `jax.custom_vjp` of all that is sent.

In the forward pass a boundary sends the activation through one channel, and in the backward pass
its gradient through another. The forward state is returned as an output. The backward state is
computed during the backward pass, so it can be returned only as a cotangent, and JAX sums the
cotangents of a value that is used twice. Therefore a crossing returns the backward state unchanged,
and `value_and_grad` sets the cotangent of that output to the current state: the backward rule of
each crossing takes this cotangent as its state and returns the next state as the cotangent of its
input. The state thus passes from crossing to crossing in the order of the backward pass, also in a
scan over micro-batches, where that order is the reverse of the forward one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxmp.boundary.transport import laid_out
from jaxmp.feedback import Channel
from jaxmp.feedback.channel import EndStates, Rx, Tx
from jaxmp.feedback.gradient import by_value_and_grad
from jaxmp.feedback.settled import settled
from jaxmp.wire import Ctx, Like, Payload, like, nbytes

Positions = tuple[Array | None, Array | None]  # as the sender and the receiver know them
Aux = PyTree  # what comes with a loss: further means


class FeedbackState(NamedTuple):
    """Feedback state of a boundary, a pair ``(tx, rx)`` per direction; of several, tuples of them.

    A step over several boundaries uses `at` and `join`:

    >>> first, second = FeedbackState(('a', 'b'), ('c', 'd')), FeedbackState(('e', 'f'), ('g', 'h'))
    >>> FeedbackState.join([first, second]).at(1)
    FeedbackState(fwd=('e', 'f'), bwd=('g', 'h'))
    """

    fwd: PyTree
    bwd: PyTree

    def at(self, number: int) -> FeedbackState:
        """The state of one of several boundaries, counted from 0."""
        return FeedbackState(self.fwd[number], self.bwd[number])

    @classmethod
    def join(cls, each: Iterable[FeedbackState]) -> FeedbackState:
        """The states of several boundaries as one."""
        each = list(each)
        return cls(tuple(l.fwd for l in each), tuple(l.bwd for l in each))


def crossing(
    there: Callable[..., tuple[Array, PyTree, PyTree]],
    back: Callable[..., tuple[Array, PyTree]],
    x: Array,
    states: FeedbackState,
    ctx: PyTree,
) -> tuple[Array, FeedbackState]:
    """What arrives of ``x``, and the states; its gradient returns by ``back``.

    Args:
      there: ``(x, states, ctx) -> (y, forward state, positions)``.
      back: ``(gradient of y, backward state, ctx, positions) -> (gradient of x, state)``.
      x: an array.
      states: of both directions.
      ctx: arrays without a gradient.
    """

    @jax.custom_vjp
    def cross(x: Array, states: FeedbackState, ctx: PyTree) -> tuple:
        return forward(x, states, ctx)[0]

    def forward(x: Array, states: FeedbackState, ctx: PyTree) -> tuple:
        y, fwd, positions = there(x, states, ctx)
        return (y, states._replace(fwd=fwd)), (ctx, positions)

    def backward(res: tuple, cotangents: tuple) -> tuple:
        gx, bwd = back(cotangents[0], cotangents[1].bwd, *res)
        return gx, FeedbackState(None, bwd), None

    cross.defvjp(forward, backward)
    return cross(by_value_and_grad(x, states.bwd), states, ctx)


@dataclass(frozen=True)
class Boundary:
    """A cut between two stages; see `boundary`."""

    fwd: Channel
    bwd: Channel

    def init(self, x: Array | Like) -> FeedbackState:
        """Initial states of both channels for tensors like ``x``."""
        return FeedbackState(*(_ends(c, c.init(like(x))) for c in (self.fwd, self.bwd)))

    def cross(
        self, x: Array, feedback: FeedbackState, ctx: Ctx | None = None
    ) -> tuple[Array, FeedbackState]:
        """Sends ``x`` to the next stage; its gradient returns through the backward channel.

        A backward channel with state needs `value_and_grad`. Backward states must be floating-point
        arrays. Second derivatives differentiate through the codec without a warning; forward-mode
        differentiation raises.

        Args:
          x: the activation; axis 0 is the sample.
          feedback: the states from `init` or from the last crossing.
          ctx: key and ids. The backward channel gets the indices of the forward message.

        Returns:
          The tensor that the next stage receives, and the states, with the forward ones updated.

        Raises:
          TypeError: if the backward channel has a state, and another function than `value_and_grad`
            differentiates, such as `jax.grad`.
          ValueError: if the states were made for another shape.
        """
        ctx = Ctx() if ctx is None else ctx
        self._check(x, feedback)

        def there(x: Array, states: FeedbackState, ctx: Ctx) -> tuple:
            contexts = self.informed(ctx, states.bwd[1]), ctx
            return laid_out(partial(self._move, 'fwd'), x, states.fwd, contexts)

        def back(g: Array, state: EndStates, ctx: Ctx, positions: Positions) -> tuple:
            # The sender of the gradient is the receiver of the activation, so it has its indices.
            contexts = tuple(ctx._replace(indices=i) for i in reversed(positions))
            return laid_out(partial(self._move, 'bwd'), g, state, contexts)[:2]

        return crossing(there, back, x, feedback, ctx)

    def informed(self, ctx: Ctx, rx: Rx) -> Ctx:
        """The context in which a stage sends an activation.

        Args:
          ctx: context of the crossing.
          rx: the state of the same stage as the receiver of gradients.
        """
        if 'spread' not in self.fwd.needs or self.bwd.spread is None:
            return ctx
        return ctx._replace(spread=self.bwd.spread(rx, ctx))

    def send(self, way: str, x: Array, tx: Tx, ctx: Ctx) -> tuple[Payload, Tx, Array | None]:
        """The sender's part of a crossing, for stages that are separate programs.

        Args:
          way: ``'fwd'`` or ``'bwd'``.
          x: the activation, or its gradient.
          tx: the sender's state.
          ctx: context of the crossing, as for `cross`; for ``'bwd'`` with the ``indices`` that
            `recv` of the forward message returned in this program.

        Returns:
          The message, the next state, and the positions that were sent (None if there are none).
        """
        channel, ctx = self._half(way, ctx)
        message, after = channel.send(x, tx, ctx)
        return message, settled(channel, after, tx), channel.codec.indices(message, like(x), ctx)

    def recv(
        self, way: str, message: Payload, rx: Rx, at: tuple[Like, Ctx]
    ) -> tuple[Array, Rx, Array | None]:
        """The receiver's part of a crossing.

        Args:
          way: ``'fwd'`` or ``'bwd'``.
          message: the received message.
          rx: the receiver's state.
          at: shape and dtype of the tensor that was sent, and the context of the crossing; for
            ``'bwd'`` with the ``indices`` that `send` of the forward message returned in this
            program.

        Returns:
          The decoded tensor, the next state, and the positions that were sent (or None).
        """
        x, ctx = at
        channel, ctx = self._half(way, ctx)
        y, after = channel.recv(message, rx, x, ctx)
        return y, settled(channel, after, rx), channel.codec.indices(message, x, ctx)

    def _half(self, way: str, ctx: Ctx) -> tuple[Channel, Ctx]:
        if way == 'fwd':
            return self.fwd, ctx.fold(0)._replace(indices=None)
        return self.bwd, ctx.fold(1)

    def bits(self, x: Array | Like) -> tuple[int, int]:
        """Bits of the forward and of the backward message for a tensor like ``x``."""
        forward, backward = self.messages(x)
        return 8 * nbytes(forward), 8 * nbytes(backward)

    def messages(self, x: Array | Like) -> tuple[Payload, Payload]:
        """Shapes of the forward and of the backward message for a tensor like ``x``."""

        def make(x: Array) -> tuple[Payload, Payload]:
            ctx = Ctx.example(x)
            tx, rx = self.bwd.init(like(x))
            informed = self.informed(ctx, rx)
            forward, _, indices = self.send('fwd', x, self.fwd.init(like(x))[0], informed)
            return forward, self.send('bwd', x, tx, ctx._replace(indices=indices))[0]

        return jax.eval_shape(make, like(x))

    def _move(
        self, way: str, x: Array, state: EndStates, contexts: tuple[Ctx, Ctx]
    ) -> tuple[Array, EndStates, Positions]:
        tx, rx = state
        channel = self.fwd if way == 'fwd' else self.bwd
        message, next_tx, sent = self.send(way, x, tx, contexts[0])
        # So that XLA does not simplify decoding after encoding: what is sent is what is used.
        arrived = jax.lax.optimization_barrier(message)
        rx = tx if channel.shared_state else rx
        y, next_rx, received = self.recv(way, arrived, rx, (like(x), contexts[1]))
        return y, _ends(channel, (next_tx, next_rx)), (sent, received)

    def _check(self, x: Array, feedback: FeedbackState) -> None:
        want = jax.eval_shape(lambda: self.init(x))
        for side in ('fwd', 'bwd'):
            a, b = (jax.tree.map(lambda l: l.shape, getattr(l, side)) for l in (want, feedback))
            if a != b:
                raise ValueError(
                    f'feedback.{side} has buffers {b}, a tensor of shape {x.shape} needs '
                    f'{a}: buffers are per batch position, so keep the batch size, or create new '
                    'states with init'
                )


def _ends(channel: Channel, state: EndStates) -> EndStates:
    """The states of both ends, of which one program keeps a single copy where they are equal."""
    return (state[0], ()) if channel.shared_state else state


def boundary(fwd: Channel, bwd: Channel) -> Boundary:
    """A cut between two stages: activations go through ``fwd``, their gradients through ``bwd``.

    Both ends are in one program. Between devices, see `jaxmp.lax` and the runtimes.

    Args:
      fwd: channel of the activation.
      bwd: channel of its gradient.

    Raises:
      TypeError: if ``fwd`` or ``bwd`` is not a channel.
      ValueError: if ``fwd`` needs to know of the gradient what ``bwd`` does not say.

    >>> import jax, jaxmp
    >>> b = jaxmp.boundary(jaxmp.parse('top_k(0.5)'), jaxmp.parse('same_support()'))
    >>> x = jnp.array([[1.0, -4.0, 3.0, 2.0]])
    >>> jax.grad(lambda x: jnp.sum(b.cross(x, b.init(x))[0] * 2))(x).tolist()
    [[0.0, 2.0, 2.0, 0.0]]
    """
    for name, channel in (('fwd', fwd), ('bwd', bwd)):
        if not isinstance(channel, Channel):
            raise TypeError(
                f'boundary {name} must be a channel, got {channel!r}; write direct(codec) or '
                "parse('...')"
            )
    if 'spread' in bwd.needs or ('spread' in fwd.needs and bwd.spread is None):
        raise ValueError(
            f'boundary fwd {fwd}, bwd {bwd}: by_gradient is for an activation whose gradient '
            'returns through klt; write fwd klt(2, by_gradient=0.3), bwd klt(2)'
        )
    return Boundary(fwd, bwd)


def init_feedback(boundaries: Sequence[Boundary], shapes: Sequence[Array | Like]) -> FeedbackState:
    """Initial states of several boundaries; see `FeedbackState`.

    Args:
      boundaries: boundaries in the order of the forward pass.
      shapes: the tensor that crosses each of them, or its shape and dtype.

    Raises:
      ValueError: if there are not as many shapes as boundaries.

    >>> import jaxmp
    >>> cut = jaxmp.boundary(jaxmp.parse('ef(uniform(4))'), jaxmp.parse('raw'))
    >>> jax.tree.map(jnp.shape, init_feedback([cut, cut], [jnp.ones((2, 3)), jnp.ones((2, 5))]))
    FeedbackState(fwd=(((2, 3), ()), ((2, 5), ())), bwd=(((), ()), ((), ())))
    """
    if len(boundaries) != len(shapes):
        raise ValueError(
            f'{len(boundaries)} boundaries got {len(shapes)} shapes; give one shape per boundary'
        )
    return FeedbackState.join(b.init(like(x)) for b, x in zip(boundaries, shapes, strict=True))


def value_and_grad(
    loss: Callable[..., tuple[Array, tuple[FeedbackState, Aux]]],
) -> Callable[..., tuple[tuple[Array, Aux], PyTree, FeedbackState]]:
    """`jax.value_and_grad` that also updates the feedback states of both directions.

    Args:
      loss: ``(params, feedback, *args) -> (scalar, (feedback, aux))``.

    Returns:
      ``(params, feedback, *args) -> ((scalar, aux), gradients, feedback)``, with the states updated
      in both directions. A boundary that ``loss`` does not cross keeps its states if ``loss``
      returns them.
    """

    def run(
        params: PyTree, feedback: FeedbackState, *args: PyTree
    ) -> tuple[tuple[Array, Aux], PyTree, FeedbackState]:
        def g(params: PyTree, token: PyTree) -> tuple[PyTree, PyTree]:
            # Of `token` only the cotangent matters.
            value, (out, aux) = loss(params, FeedbackState(feedback.fwd, token), *args)
            return (value, out.bwd), (out.fwd, aux)

        (value, _), pull, (fwd, aux) = jax.vjp(g, params, feedback.bwd, has_aux=True)
        grads, bwd = pull((jnp.ones_like(value), feedback.bwd))
        return (value, aux), grads, FeedbackState(fwd, bwd)

    return run
