"""`Channel`: the form of a feedback rule, a codec with a state machine at each end of a link."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from jaxtyping import Array

from jaxmp.wire import Codec, Ctx, Like, Payload
from jaxmp.words import Origin, known

Tx = Any
Rx = Any


@known
class Channel(NamedTuple):
    """A feedback rule over a codec: what is sent, and what both ends remember.

    Attributes:
      codec: the codec that makes the messages.
      init: ``like -> (tx, rx)``, the states of the two ends.
      send: ``(x, tx, ctx) -> (payload, tx)``.
      recv: ``(payload, rx, like, ctx) -> (y, rx)``.
      warm_start: ``(x, state, ctx) -> state``, that of either end after `warm` sent ``x``.
      shared_state: whether the two ends always hold equal states.
      per_token: 'input' or 'target', the tokens of ``ctx.tokens`` or those that follow, whose table
        the state is; all micro-batches share it. Empty: it is none.
      by_row: whether row i of a state says what was sent of example i alone, so that a message that
        is not finite leaves only its own row as it was (`jaxmp.feedback.settled`).
      slots: where a crossing's state lies in the memory of a channel that keeps many, or None.
      values: ``(state, like) -> arrays``, what a state of an end says about tensors.
      by_gradient: whether the sender of an activation reads ``ctx.spread``.
      spread: ``(rx, ctx) -> book``, what the receiver of a gradient knows of its components, as
        `jaxmp.klt` has them; None if it knows nothing.
      form: if not None, what the shapes of the states depend on besides the tensor: one of two
        channels of equal form may go on with the states of the other.
      origin: the call that made it, its text and identity (`jaxmp.words`).
    """

    codec: Codec
    init: Callable[[Like], tuple[Tx, Rx]]
    send: Callable[[Array, Tx, Ctx], tuple[Payload, Tx]]
    recv: Callable[[Payload, Rx, Like, Ctx], tuple[Array, Rx]]
    warm_start: Callable[[Array, Any, Ctx], Any] = lambda x, state, ctx: state
    shared_state: bool = False
    per_token: str = ''
    by_row: bool = False
    slots: Slots | None = None
    values: Callable[[Any, Like], Any] = lambda state, like: state
    by_gradient: bool = False
    spread: Callable[[Any, Ctx], Array] | None = None
    form: Hashable = None
    origin: Origin | None = None

    @property
    def per_example(self) -> bool:
        """Whether the state is indexed by ``ctx.ids`` (unseen examples have none)."""
        return self.slots is not None and self.slots.per_example


class Slots(NamedTuple):
    """The place of a crossing's state in a memory of many states.

    Attributes:
      channel: the channel that acts on one state.
      at: where in the memory's first axis the state of a crossing is.
      per_example: whether that depends on ``ctx.ids``.
    """

    channel: Channel
    at: Callable[[Ctx], Any]
    per_example: bool


def check_codec(rule: str, codec: object) -> None:
    """Raises TypeError unless ``codec`` is a Codec."""
    if isinstance(codec, Channel):
        raise TypeError(f'{rule} takes a codec and got a feedback rule; rules do not nest')
    if not isinstance(codec, Codec):
        raise TypeError(f'{rule} takes a codec such as top_k(0.1), got {codec!r}')
