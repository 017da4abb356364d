"""Where the model is cut: the one custom_vjp.

Forward, a boundary sends the activation through one channel; backward, its gradient through
another. The forward state returns as an output. The backward state is made during the backward
pass, so it has to leave through a cotangent, and cotangents of a value used twice are summed.
Therefore the backward state passes through `cross` unchanged, and `value_and_grad` seeds the
cotangent of its output with the current state: each crossing's backward rule takes that cotangent
as its state and emits the next one. The state flows backward through time exactly as gradients do,
also under a scan over micro-batches, where the order is the reverse of the forward one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.feedback import Channel
from jaxmp.transport import Transport, local
from jaxmp.wire import Ctx, Like, Payload, like, nbytes


class Links(NamedTuple):
    """Feedback state of a boundary, a pair ``(tx, rx)`` each direction; of several, tuples of it.

    A step over several boundaries takes theirs out, and joins what comes back:

    >>> links = Links.join([Links(('a', 'b'), ('c', 'd')), Links(('e', 'f'), ('g', 'h'))])
    >>> links.at(1)
    Links(fwd=('e', 'f'), bwd=('g', 'h'))
    """

    fwd: Any
    bwd: Any

    def at(self, number: int) -> Links:
        """The state of one of several boundaries, counted from 0."""
        return Links(self.fwd[number], self.bwd[number])

    @classmethod
    def join(cls, each: Iterable[Links]) -> Links:
        """The states of several boundaries as one."""
        each = list(each)
        return cls(tuple(l.fwd for l in each), tuple(l.bwd for l in each))


@dataclass(frozen=True)
class Boundary:
    """A cut between two stages; see `boundary`."""

    fwd: Channel
    bwd: Channel
    via: Transport

    def init(self, x: Array | Like) -> Links:
        """States of both channels before the first crossing of a tensor like ``x``."""
        return Links(*(self._ends(c, c.init(like(x))) for c in (self.fwd, self.bwd)))

    def cross(self, x: Array, links: Links, ctx: Ctx | None = None) -> tuple[Array, Links]:
        """Sends ``x`` across; its gradient will come back through the backward channel.

        A backward channel with state needs `value_and_grad`; a bare `jax.grad` seeds zeros, that
        is, forgets the state at every step. Backward states are floating arrays. Differentiating
        twice goes silently through the codec; forward-mode differentiation raises.

        Args:
          x: the activation, axis 0 the sample.
          links: the states, from `init` or the last crossing.
          ctx: key, ids; the forward message's support reaches the backward channel by itself.

        Returns:
          What the next stage receives, and the states with the forward ones advanced.

        Raises:
          ValueError: if the states were made for another shape.
        """
        ctx = Ctx() if ctx is None else ctx
        self._check(x, links)

        @jax.custom_vjp
        def cross(x: Array, fwd: Any, bwd: Any, ctx: Ctx) -> Any:
            return forward(x, fwd, bwd, ctx)[0]

        def forward(x: Array, fwd: Any, bwd: Any, ctx: Ctx) -> Any:
            y, state, supports = self._move('fwd', x, fwd, (ctx, ctx))
            return (y, state, bwd), (ctx, supports)

        def backward(res: Any, cotangents: Any) -> Any:
            ctx, (sent, received) = res
            g, _, bwd = cotangents
            # The gradient's sender is the activation's receiver, and knows what that one knows.
            at = tuple(ctx._replace(support=s) for s in (received, sent))
            gx, state, _ = self._move('bwd', g, bwd, at)
            return gx, None, state, None

        cross.defvjp(forward, backward)
        y, fwd, bwd = cross(x, links.fwd, links.bwd, ctx)
        return y, Links(fwd, bwd)

    def send(self, way: str, x: Array, tx: Any, ctx: Ctx) -> tuple[Payload, Any, Array | None]:
        """A direction's sending half: what a stage does that is a program of its own.

        Args:
          way: ``'fwd'`` or ``'bwd'``.
          x: the activation, or its gradient.
          tx: the sender's state.
          ctx: of the crossing, as for `cross`; backward with the ``support`` that `recv` of the
            forward message returned here.

        Returns:
          The message, the next state, and the positions that were sent (None if there are none).
        """
        channel, at = self._half(way, ctx)
        message, tx = channel.send(x, tx, at)
        return message, tx, channel.codec.support(message, like(x), at)

    def recv(
        self, way: str, message: Payload, rx: Any, at: tuple[Like, Ctx]
    ) -> tuple[Array, Any, Array | None]:
        """A direction's receiving half.

        Args:
          way: ``'fwd'`` or ``'bwd'``.
          message: as it arrived.
          rx: the receiver's state.
          at: shape and dtype of what was sent, and the context of the crossing; backward with the
            ``support`` that `send` of the forward message returned here.

        Returns:
          What the stage sees, the next state, and the positions that were sent (or None).
        """
        x, ctx = at
        channel, ctx = self._half(way, ctx)
        y, rx = channel.recv(message, rx, x, ctx)
        return y, rx, channel.codec.support(message, x, ctx)

    def _half(self, way: str, ctx: Ctx) -> tuple[Channel, Ctx]:
        if way == 'fwd':
            return self.fwd, ctx.fold(0)._replace(support=None)
        return self.bwd, ctx.fold(1)

    def bits(self, x: Array | Like) -> tuple[int, int]:
        """Bits of the forward and of the backward message for a tensor like ``x``."""
        forward, backward = self.messages(x)
        return 8 * nbytes(forward), 8 * nbytes(backward)

    def messages(self, x: Array | Like) -> tuple[Payload, Payload]:
        """Shapes of the forward and of the backward message for a tensor like ``x``."""

        def make(x: Array) -> tuple[Payload, Payload]:
            ctx = Ctx(jax.random.key(0), jnp.zeros(x.shape[:1], jnp.int32))
            forward, _, known = self.send('fwd', x, self.fwd.init(like(x))[0], ctx)
            ctx = ctx._replace(support=known)
            return forward, self.send('bwd', x, self.bwd.init(like(x))[0], ctx)[0]

        return jax.eval_shape(make, like(x))

    def _ends(self, channel: Channel, state: tuple[Any, Any]) -> tuple[Any, Any]:
        return (state[0], ()) if self._shares(channel) else state

    def _shares(self, channel: Channel) -> bool:
        return channel.mirrored and self.via.one_place

    def _move(
        self, way: str, x: Array, state: Any, at: tuple[Ctx, Ctx]
    ) -> tuple[Array, Any, tuple[Any, Any]]:
        tx, rx = state
        channel = self.fwd if way == 'fwd' else self.bwd
        message, next_tx, sent = self.send(way, x, tx, at[0])
        arrived = (self.via.forward if way == 'fwd' else self.via.backward)(message)
        rx = tx if self._shares(channel) else rx
        y, next_rx, received = self.recv(way, arrived, rx, (like(x), at[1]))
        return y, self._ends(channel, (next_tx, next_rx)), (sent, received)

    def _check(self, x: Array, links: Links) -> None:
        want = jax.eval_shape(lambda: self.init(x))
        for side in ('fwd', 'bwd'):
            a, b = (jax.tree.map(lambda l: l.shape, getattr(l, side)) for l in (want, links))
            if a != b:
                raise ValueError(
                    f'links.{side} were made for buffers {b}, a tensor of shape {x.shape} needs '
                    f'{a}: buffers are per batch position, so keep the batch size, or make new '
                    'links with init'
                )


def boundary(fwd: Channel, bwd: Channel, via: Transport | None = None) -> Boundary:
    """A cut between two stages: activations go through ``fwd``, their gradients through ``bwd``.

    Args:
      fwd: channel of the activation.
      bwd: channel of its gradient.
      via: how payloads move; default `local`.

    Raises:
      TypeError: if ``fwd`` or ``bwd`` is not a channel.

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
    return Boundary(fwd, bwd, local() if via is None else via)


def init_feedback(boundaries: Sequence[Boundary], shapes: Sequence[Array | Like]) -> Links:
    """States of several boundaries before their first crossings; see `Links`.

    Args:
      boundaries: in the order of the forward pass.
      shapes: of what crosses each of them: arrays, or shapes and dtypes.

    Raises:
      ValueError: if there are not as many shapes as boundaries.

    >>> import jaxmp
    >>> cut = jaxmp.boundary(jaxmp.parse('ef(uniform(4))'), jaxmp.parse('raw'))
    >>> jax.tree.map(jnp.shape, init_feedback([cut, cut], [jnp.ones((2, 3)), jnp.ones((2, 5))]))
    Links(fwd=(((2, 3), ()), ((2, 5), ())), bwd=(((), ()), ((), ())))
    """
    if len(boundaries) != len(shapes):
        raise ValueError(
            f'{len(boundaries)} boundaries got {len(shapes)} shapes; give the shape of what '
            'crosses each'
        )
    return Links.join(b.init(like(x)) for b, x in zip(boundaries, shapes, strict=True))


def value_and_grad(
    loss: Callable[..., tuple[Array, tuple[Links, Any]]],
) -> Callable[..., tuple[tuple[Array, Any], Any, Links]]:
    """`jax.value_and_grad` with the feedback states threaded both ways.

    Args:
      loss: ``(params, links, *args) -> (scalar, (links, aux))``.

    Returns:
      ``(params, links, *args) -> ((scalar, aux), gradients, links)``, the links advanced in both
      directions. A boundary that ``loss`` does not cross keeps its states if ``loss`` returns them.
    """

    def run(params: Any, links: Links, *args: Any) -> tuple[tuple[Array, Any], Any, Links]:
        def g(params: Any, token: Any) -> Any:  # token: only its cotangent matters
            value, (out, aux) = loss(params, Links(links.fwd, token), *args)
            return (value, out.bwd), (out.fwd, aux)

        (value, _), pull, (fwd, aux) = jax.vjp(g, params, links.bwd, has_aux=True)
        grads, bwd = pull((jnp.ones_like(value), links.bwd))
        return (value, aux), grads, Links(fwd, bwd)

    return run
