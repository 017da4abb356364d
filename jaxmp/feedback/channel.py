"""`Channel`: the form of a feedback rule, a codec with a state machine at each end of a link."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Literal, NamedTuple

from jaxtyping import Array, PyTree

from jaxmp.wire import Codec, Ctx, Index, Like, Need, Payload
from jaxmp.wire.words import Origin, known

Tx = PyTree  # of arrays: what the sender remembers
Rx = PyTree  # of arrays: what the receiver remembers
EndState = Tx | Rx  # what either end remembers
EndStates = tuple[Tx, Rx]  # of a channel; the second is () where both ends share the first
StateOf = Literal['', 'position', 'example', 'token', 'target', 'channel']
BY_TOKEN = 'token', 'target'  # states that are a table, which `send` and `recv` read themselves


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
      state_of: what a row of a state belongs to: a ``'position'`` of the batch, an ``'example'`` of
        the training set, a ``'token'`` of ``ctx.tokens`` or the one that follows it, its
        ``'target'``, or a ``'channel'`` of the tensor; empty if there is no state. A run is scored
        without compression where a test has no such rows: a rule that says nothing is taken to
        remember positions.
      reads: the fields of the context that the rule itself reads; `needs` has the codec's too.
      mirror: ``tx -> rx``, the receiver's state where the sender knows it; else None.
      slots: where a crossing's state lies in the memory of a channel that keeps many, or None.
      values: ``(state, like) -> arrays``, what a state of an end says about tensors.
      spread: ``(rx, ctx) -> book``, what the receiver of a gradient knows of its components, as
        `jaxmp.klt` has them; None if it knows nothing.
      form: if not None, what the shapes of the states depend on besides the tensor: one of two
        channels of equal form may go on with the states of the other.
      origin: the call that made it, its text and identity (`jaxmp.wire.words`).
    """

    codec: Codec
    init: Callable[[Like], tuple[Tx, Rx]]
    send: Callable[[Array, Tx, Ctx], tuple[Payload, Tx]]
    recv: Callable[[Payload, Rx, Like, Ctx], tuple[Array, Rx]]
    warm_start: Callable[[Array, EndState, Ctx], EndState] = lambda x, state, ctx: state
    shared_state: bool = False
    state_of: StateOf = 'position'
    reads: frozenset[Need] = frozenset()
    mirror: Callable[[Tx], Rx] | None = None
    slots: Slots | None = None
    values: Callable[[EndState, Like], PyTree] = lambda state, like: state
    spread: Callable[[Rx, Ctx], Array] | None = None
    form: Hashable = None
    origin: Origin | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """The fields of the context that a crossing reads, by the rule or by its codec."""
        return self.reads | self.codec.needs

    @property
    def mirrored(self) -> Callable[[Tx], Rx] | None:
        """``tx -> rx`` where the sender knows what the receiver remembers; else None."""
        return self.mirror or (_itself if self.shared_state else None)

    @property
    def is_table(self) -> bool:
        """Whether a state is a table of all examples or tokens, which all micro-batches share."""
        return self.state_of in ('example', *BY_TOKEN)


def _itself(tx: Tx) -> Rx:
    return tx


class Slots(NamedTuple):
    """The place of a crossing's state in a memory of many states.

    Attributes:
      channel: the channel that acts on one state.
      at: where in the memory's first axis the state of a crossing is.
    """

    channel: Channel
    at: Callable[[Ctx], Index]


def check_codec(rule: str, codec: object) -> None:
    """Raises TypeError unless ``codec`` is a Codec."""
    if isinstance(codec, Channel):
        raise TypeError(f'{rule} takes a codec and got a feedback rule; rules do not nest')
    if not isinstance(codec, Codec):
        raise TypeError(f'{rule} takes a codec such as top_k(0.1), got {codec!r}')
