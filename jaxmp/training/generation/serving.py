"""Generation over processes, each of which has some stages and their keys and values.

Process 0 sends the tokens of prompts through the stages. The last process draws what follows and
returns it, which is a few bytes. Prompts that wait at a process go through it as one batch, so that
its weights are read once. Every message says what it is of, so that the processes between do as
they are told.

A prompt crosses a boundary by itself, so that its text is the same whatever others there are. In
one process (`sampling`) prompts cross as one message, in which a codec that draws,
such as `rotate`, draws others for all but the first: their texts are as good, but not the same.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import Boundary
from jaxmp.boundary.pipeline import run_stage
from jaxmp.models import decoder
from jaxmp.net.arrays import buffers, filled
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.speed import Link
from jaxmp.training.evaluation.language_model import LanguageModel
from jaxmp.training.generation.sampling import Event, Variables, counted
from jaxmp.wire import Ctx, Like, Payload, like

ToTokens = Callable[[Float[Array, 'B V'], Array, Int[Array, ' ']], Int[Array, ' B']]
Cache = dict[str, Any]  # of `jaxmp.models.decoder.empty_cache`
GROWTH = 4  # of the sizes of batches: two rows take as long as four, as XLA multiplies matrices


class Word(NamedTuple):
    """What a message says of the tokens of one prompt.

    Attributes:
      prompt: its number.
      position: of the first token in the text, which has a random key of its own.
      tokens: their number.
      draw: whether the next token is wanted.
    """

    prompt: int
    position: int
    tokens: int
    draw: bool


class Message(NamedTuple):
    """Tensors of some prompts, of equal counts of tokens; without a prompt it ends the work.

    Attributes:
      words: one of each prompt.
      arrays: tokens or a payload, with the prompts along axis 0.
    """

    words: tuple[Word, ...]
    arrays: Payload


END = Message((), ())


class Part:
    """The stages of one process, and the keys and values of all prompts."""

    def __init__(
        self, model: LanguageModel, cuts: Sequence[Boundary], places: range, choose: ToTokens,
        size: tuple[int, int], seed: int = 0,
    ) -> None:  # fmt: skip
        """Compiles nothing yet.

        Args:
          model: with the variables of its own stages at least.
          cuts: all boundaries, whose forward channels have no state.
          places: numbers of the stages.
          choose: draws tokens, given logits, a key, and the number of the first row.
          size: number of prompts, and the length of the longest text.
          seed: of the random numbers.
        """
        # A run's or checkpoint's last stage scores tokens; here it gives logits.
        stages = [s.with_logits for s in model.stages if isinstance(s, decoder.Stage)]
        self.stages, self.cuts, self.places, self.choose = stages, cuts, places, choose
        self.variables = tuple(model.variables[s] for s in places)
        (self.prompts, length), self.key = size, jax.random.key(seed)
        # One row more than prompts, for what fills a batch.
        self.caches = [decoder.empty_cache(stages[s], self.prompts + 1, length) for s in places]
        self.last = places.stop == len(stages)
        self._program = jax.jit(self._run, static_argnums=(0, 1), donate_argnums=3)
        self.shapes = functools.cache(self._shapes)  # a trace takes longer than a token

    def _shapes(self, size: int, count: int) -> Payload:
        """Shapes and dtypes of what comes to this process: ``count`` tokens of ``size`` prompts."""
        if not self.places.start:
            return jax.ShapeDtypeStruct((size, count), jnp.int32)
        one = self._activations(count)
        x = jax.ShapeDtypeStruct((size, *one.shape[1:]), one.dtype)
        keys = jax.eval_shape(lambda: jax.random.split(self.key, size))
        return jax.eval_shape(lambda x, keys: self._sent(self.places.start - 1, x, keys), x, keys)

    def compile(self) -> None:
        """Compiles the programs of a token of some prompts, so that no text stops for it later."""
        for size in sizes(self.prompts):
            zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self.shapes(size, 1))
            self.run(Message((Word(self.prompts, 0, 1, True),) * size, zeros))

    def run(self, message: Message) -> Message:
        """What goes to the next process; from the last one the tokens that are drawn."""
        words, (_, _, count, draw) = message.words, message.words[0]
        size = next(n for n in sizes(self.prompts) if n >= len(words))
        filler = (Word(self.prompts, 0, count, draw),) * (size - len(words))
        rows, positions = np.array([word[:2] for word in words + filler], np.int32).T

        def whole(a: np.ndarray) -> np.ndarray:
            return np.pad(a, [(0, len(filler))] + [(0, 0)] * (a.ndim - 1)) if filler else a

        arrays, self.caches = self._program(
            count, draw, self.variables, self.caches, rows, positions,
            jax.tree.map(whole, message.arrays),
        )  # fmt: skip
        return Message(words, jax.tree.map(lambda a: np.asarray(a)[: len(words)], arrays))

    def _run(
        self, count: int, draw: bool, variables: Variables, caches: list[Cache],
        rows: Int[Array, ' B'], positions: Int[Array, ' B'], x: Payload,
    ) -> tuple[Payload, list[Cache]]:  # fmt: skip
        keys, after = jax.vmap(jax.random.fold_in, (None, 0))(self.key, positions), []
        for s, weights, cache in zip(self.places, variables, caches, strict=True):
            if s:
                # Within a process too, so that the numbers do not depend on the processes.
                message = self._sent(s - 1, x, keys) if s > self.places.start else x
                x = self._decoded(s - 1, message, count, keys)
            state = {**weights, 'cache': {**cache, 'rows': rows}}
            x, changed = run_stage(self.stages[s], state, x, Ctx(), {'train': False})
            after.append({**changed['cache'], 'rows': cache['rows']})
        if not self.last:
            return self._sent(self.places.stop - 1, x, keys), after
        if not draw:  # without its logits the compiler leaves the output layer out
            return (), after
        drawn = lambda logits, key, row: self.choose(logits[None], key, row)[0]
        return jax.vmap(drawn)(x[:, -1], keys, rows).astype(jnp.int32), after

    # Each prompt crosses by itself, so that its bits do not depend on the others of its batch.

    def _sent(self, boundary: int, x: Float[Array, 'B T C'], keys: Array) -> Payload:
        cut = self.cuts[boundary]

        def one(x: Float[Array, 'T C'], key: Array) -> Payload:
            sender, ctx = cut.fwd.init(like(x[None]))[0], Ctx(key).fold(2 * boundary + 2)
            return cut.send('fwd', x[None], sender, ctx)[0]

        return jax.vmap(one)(x, keys)

    def _decoded(self, boundary: int, message: Payload, count: int, keys: Array) -> Array:
        cut, x = self.cuts[boundary], self._activations(count)

        def one(message: Payload, key: Array) -> Float[Array, 'T C']:
            ctx = Ctx(key).fold(2 * boundary + 2)
            return cut.recv('fwd', message, cut.fwd.init(x)[1], (x, ctx))[0][0]

        return jax.vmap(one)(message, keys)

    def _activations(self, count: int) -> Like:
        """Shape and dtype of what one prompt sends over a boundary."""
        config = self.stages[0].config
        return jax.ShapeDtypeStruct((1, count, config.width), config.stream or jnp.float32)


def sizes(prompts: int) -> list[int]:
    """The sizes of batches for which programs are compiled; what is smaller is filled.

    >>> sizes(1), sizes(4), sizes(6)
    ([1], [1, 4], [1, 4, 6])
    """
    size, smaller = 1, []
    while size < prompts:
        smaller.append(size)
        size *= GROWTH
    return [*smaller, prompts]


def joined(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages as they are run: the starts of prompts one by one, then the other tokens at once.

    The start of a prompt is not drawn from, has a length of its own, and is read before the rest.

    >>> step = lambda *prompts: Message(
    ...     tuple(Word(i, 5, 1, True) for i in prompts), np.ones((len(prompts), 1))
    ... )
    >>> [message] = joined([step(2), step(0, 1)])
    >>> [word.prompt for word in message.words], message.arrays.shape
    ([2, 0, 1], (3, 1))
    """
    yield from (message for message in messages if not message.words[0].draw)
    steps = [message for message in messages if message.words[0].draw]
    if steps:
        words = tuple(word for message in steps for word in message.words)
        yield Message(words, jax.tree.map(lambda *a: np.concatenate(a), *(m.arrays for m in steps)))


class Ends:
    """The messages of a process from the one before it and to the next one, in a ring."""

    def __init__(self, group: ProcessGroup, part: Part, link: Link | None = None) -> None:
        """Sends nothing yet; ``link`` is emulated, between processes of one machine."""
        self.group, self.part, self.link, self._free = group, part, link, 0.0

    def send(self, message: Message) -> None:
        """Sends a message to the next process; the last one sends tokens to process 0."""
        to = (self.group.index + 1) % self.group.count
        head = json.dumps([time.monotonic(), message.words]).encode()
        address = self.group.address(f'to process {to},')
        self.group.send(to, address, head, *buffers(jax.tree.leaves(message.arrays)))

    def receive(self) -> Message:
        """The next message from the process before; in process 0 what the last one drew."""
        index, count = self.group.index, self.group.count
        address = self.group.address(f'to process {index},')
        head, *rest = self.group.receive((index - 1) % count, address)
        sent, words = json.loads(bytes(head))
        self._delay(sent, sum(buffer.nbytes for buffer in rest))
        if not words:
            return END
        drawn = jax.ShapeDtypeStruct((len(words),), jnp.int32)
        words = tuple(Word(*word) for word in words)
        shapes = self.part.shapes(len(words), words[0].tokens) if index else drawn
        arrays = filled(rest, jax.tree.leaves(shapes))
        return Message(words, jax.tree.unflatten(jax.tree.structure(shapes), arrays))

    def _delay(self, sent: float, nbytes: int) -> None:
        if self.link:
            self._free = max(self._free, sent) + self.link.seconds(nbytes)
            time.sleep(max(0.0, self._free + self.link.delay / 1e3 - time.monotonic()))


class Inbox:
    """What has come to a process, by a thread that receives while the process computes."""

    def __init__(self, ends: Ends) -> None:
        """Receives from now on, until the message that ends the work."""
        self._queue: SimpleQueue[Message | BaseException] = SimpleQueue()
        self._ends = ends
        threading.Thread(target=self._receive, daemon=True).start()

    def _receive(self) -> None:
        try:
            while (message := self._ends.receive()).words:
                self._queue.put(message)
            self._queue.put(END)
        except BaseException as error:  # whoever waits for a message gets it
            self._queue.put(error)

    def take(self) -> list[Message]:
        """All messages that have come, and at least one."""
        messages = []
        while not messages or not self._queue.empty():
            message = self._queue.get()
            if isinstance(message, BaseException):
                raise message
            messages.append(message)
        return messages


def serve(part: Part, ends: Ends) -> None:
    """What a process after the first does: as it is told, until the work ends."""
    with ends.group.phase('writing', LONG):
        part.compile()
        inbox, ended = Inbox(ends), False
        while not ended:
            messages = inbox.take()
            ended = messages[-1] is END
            for message in joined(messages[:-1] if ended else messages):
                result = part.run(message)
                if message.words[0].draw or not part.last:
                    ends.send(result)
        ends.send(END)


def written(
    part: Part, ends: Ends, prompts: Sequence[Sequence[int]], count: int, stops: frozenset[int],
    together: bool = False,
) -> Iterator[Event]:  # fmt: skip
    """In process 0, the events of `sampling.continuations` over all processes.

    Args:
      part: its stages.
      ends: its messages.
      prompts: tokens, at least one each.
      count: number of tokens after each prompt.
      stops: tokens that end a text.
      together: whether prompts begin as one batch, which is faster where the processes share the
        memory of a machine. Else each begins by itself, and all processes compute.
    """
    left = [count] * len(prompts)
    with ends.group.phase('writing', LONG):
        part.compile()
        inbox = Inbox(ends)
        first = started(prompts)
        for message in joined([*first]) if together else first:
            ends.send(part.run(message))
        while any(left):
            events, following = [], []
            for answer in inbox.take():
                for word, token in zip(answer.words, answer.arrays.tolist(), strict=True):
                    left[word.prompt], shown = counted(token, left[word.prompt], stops)
                    events += [(word.prompt, event) for event in shown]
                    if left[word.prompt]:
                        following.append(step(word.prompt, word.position + 1, token))
            for message in joined(following):
                ends.send(part.run(message))
            yield from events  # while the others compute
        ends.send(END)
        inbox.take()  # it has gone round


def started(prompts: Sequence[Sequence[int]]) -> Iterator[Message]:
    """The messages that read prompts: all tokens but the last one, then that."""
    for i, tokens in enumerate(prompts):
        if before := len(tokens) - 1:
            yield Message((Word(i, 0, before, False),), np.asarray([tokens[:-1]], np.int32))
        yield step(i, before, tokens[-1])


def step(prompt: int, position: int, token: int) -> Message:
    """The message of one token, from which the next one is drawn."""
    return Message((Word(prompt, position, 1, True),), np.asarray([[token]], np.int32))


def check_by_token(cuts: Sequence[Boundary], width: int) -> None:
    """Checks that a token's message depends on this token and those before it alone.

    Raises:
      ValueError: if a channel has a state, or codes tokens together.
    """
    x = jax.random.normal(jax.random.key(0), (2, 6, width))
    later = x.at[0, 3:].multiply(50).at[1].multiply(50)
    for cut in dict.fromkeys(cuts):
        if jax.tree.leaves(cut.fwd.init(like(x))):
            raise ValueError(
                f'fwd {cut.fwd} remembers what it sent, and in serving a token crosses once; give '
                'a codec by itself'
            )

        def crossed(x: Array, cut: Boundary = cut) -> Array:
            ctx = Ctx(jax.random.key(1))
            message, *_ = cut.send('fwd', x, cut.fwd.init(like(x))[0], ctx)
            return cut.recv('fwd', message, cut.fwd.init(like(x))[1], (like(x), ctx))[0]

        run = jax.jit(crossed)
        if not jnp.array_equal(run(x)[0, :3], run(later)[0, :3]):
            raise ValueError(
                f'fwd {cut.fwd} codes tokens together with later ones, which in serving are not '
                'there yet; give a codec by token, such as '
                'outliers(asinh(8), channels=4, causal=True), or per_token(...) around this one'
            )
