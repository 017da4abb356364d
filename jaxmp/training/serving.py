"""Generation over processes, each of which has some stages and their keys and values.

A stream is some prompts that are continued together. Process 0 sends tokens through the stages, and
the last process draws what follows and returns it, which is a few bytes. As many streams are under
way as there are processes, so that all of them compute. Every message says what it is of, so that
the processes between do as they are told.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.boundary import Boundary
from jaxmp.models import decoder
from jaxmp.net.arrays import buffers, filled
from jaxmp.net.connect import owners
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.link import Link
from jaxmp.pipeline import run_stage
from jaxmp.training.language_model import LanguageModel
from jaxmp.training.sampling import Reader, continuations
from jaxmp.wire import Ctx, Like, like

ToTokens = Callable[[Array, Array, int], Array]  # logits, key, number of the first row


class Word(NamedTuple):
    """What a message says of itself.

    Attributes:
      stream: its number; -1 ends the work.
      first: number of the stream's first prompt.
      size: batch and length of the stream, and tokens of the message.
      key: words of the random key of this position.
      draw: whether the next tokens are wanted.
    """

    stream: int
    first: int = 0
    size: tuple[int, int, int] = (0, 0, 0)
    key: tuple[int, ...] = ()
    draw: bool = False


END = Word(-1)


class Part:
    """The stages of one process, and the keys and values of all streams."""

    def __init__(
        self, model: LanguageModel, cuts: Sequence[Boundary], own: range, choose: ToTokens
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: with the variables of its own stages at least.
          cuts: all boundaries, whose forward channels have no state.
          own: numbers of the stages.
          choose: draws tokens.
        """
        stages: Any = [getattr(s, 'with_logits', s) for s in model.stages]
        self.stages, self.cuts, self.own, self.choose = stages, cuts, own, choose
        self.variables = [model.variables[s] for s in own]
        self.streams: dict[int, Any] = {}
        self.last = own.stop == len(stages)
        self._program = jax.jit(self._run, static_argnums=(0, 1), donate_argnums=3)

    def arrives(self, size: tuple[int, int, int]) -> tuple[Like, Any]:
        """Shape and dtype of the tensor that comes to this process, and those of its message."""
        (batch, _, count), c = size, self.stages[0].config
        x = jax.ShapeDtypeStruct((batch, count, c.width), c.stream or jnp.float32)
        return x, jax.eval_shape(lambda x: self._sent(self.own.start - 1, x, Ctx.example(x)), x)

    def run(self, word: Word, arrived: Any) -> Any:
        """The message to the next process; from the last one tokens, or None where none are drawn.

        Args:
          word: of the message.
          arrived: tokens in the first process, and a message in the others.
        """
        batch, length, _ = word.size
        if word.stream not in self.streams:
            caches = [decoder.empty_cache(self.stages[s], batch, length) for s in self.own]
            self.streams[word.stream] = caches
        key = jax.random.wrap_key_data(jnp.asarray(word.key, jnp.uint32))
        x = self.arrives(word.size)[0] if self.own.start else None
        caches = self.streams[word.stream]
        out, self.streams[word.stream] = self._program(
            word.draw, x, self.variables, caches, arrived, key
        )
        if not self.last:
            return out
        return np.asarray(self.choose(out, key, word.first), np.int32) if word.draw else None

    def _run(
        self, draw: bool, shape: Like | None, variables: Any, caches: Any, x: Any, key: Array
    ) -> Any:
        after, ctx = [], Ctx(key)
        if shape is not None:
            x = self._decoded(self.own.start - 1, x, shape, ctx)
        for s, own, cache in zip(self.own, variables, caches, strict=True):
            if s > self.own.start:
                x = self._decoded(s - 1, self._sent(s - 1, x, ctx), like(x), ctx)
            x, changed = run_stage(
                self.stages[s], {**own, 'cache': cache}, x, ctx.fold(2 * s + 1), {'train': False}
            )
            after.append(changed['cache'])
        if not self.last:
            return self._sent(self.own.stop - 1, x, ctx), after
        # Without its logits the compiler leaves the output layer out.
        return x[:, -1] if draw else (), after

    def _sent(self, boundary: int, x: Array, ctx: Ctx) -> Any:
        cut = self.cuts[boundary]
        return cut.send('fwd', x, cut.fwd.init(like(x))[0], ctx.fold(2 * boundary + 2))[0]

    def _decoded(self, boundary: int, message: Any, x: Like, ctx: Ctx) -> Array:
        cut = self.cuts[boundary]
        at = x, ctx.fold(2 * boundary + 2)
        return cut.recv('fwd', message, cut.fwd.init(x)[1], at)[0]


class Ends:
    """The messages of a process from the one before it and to the next one, in their order."""

    def __init__(self, group: ProcessGroup, part: Part, link: Link | None = None) -> None:
        """Sends nothing yet; ``link`` is emulated, between processes of one machine."""
        self.group, self.part, self.link, self._free = group, part, link, 0.0

    def send(self, word: Word, message: Any) -> None:
        """Sends a message to the next process."""
        to = self.group.index + 1
        head = json.dumps([time.monotonic(), *word]).encode()
        self.group.send(
            to, self.group.address(f'to process {to},'), head, *buffers(jax.tree.leaves(message))
        )

    def receive(self) -> tuple[Word, Any]:
        """The next message from the process before."""
        head, *rest = self.group.receive(
            self.group.index - 1, self.group.address(f'to process {self.group.index},')
        )
        sent, stream, first, size, key, draw = json.loads(bytes(head))
        word = Word(stream, first, tuple(size), tuple(key), draw)
        if stream < 0:
            return word, None
        self._delay(sent, sum(b.nbytes for b in rest))
        _, shapes = self.part.arrives(word.size)
        arrays = filled(rest, jax.tree.leaves(shapes))
        return word, jax.tree.unflatten(jax.tree.structure(shapes), arrays)

    def _delay(self, sent: float, nbytes: int) -> None:
        if self.link:
            self._free = max(self._free, sent) + self.link.seconds(nbytes)
            time.sleep(max(0.0, self._free + self.link.delay / 1e3 - time.monotonic()))

    def answer(self, stream: int, tokens: np.ndarray) -> None:
        """Returns tokens to process 0."""
        head = json.dumps(time.monotonic()).encode()
        self.group.send(0, self.group.address(f'tokens {stream},'), head, *buffers([tokens]))

    def answered(self, stream: int, batch: int) -> np.ndarray:
        """The tokens that the last process drew for a stream."""
        source = self.group.count - 1
        head, *rest = self.group.receive(source, self.group.address(f'tokens {stream},'))
        if self.link:
            time.sleep(max(0.0, json.loads(bytes(head)) + self.link.delay / 1e3 - time.monotonic()))
        return filled(rest, [np.zeros(batch, np.int32)])[0]


def serve(part: Part, ends: Ends) -> None:
    """What a process after the first does: as it is told, until the work ends."""
    with ends.group.phase('writing', LONG):
        while (found := ends.receive())[0].stream >= 0:
            word, message = found
            out = part.run(word, message)
            if not part.last:
                ends.send(word, out)
            elif word.draw:
                ends.answer(word.stream, out)
        if not part.last:
            ends.send(END, None)


def written(
    part: Part, ends: Ends, prompts: Sequence[Sequence[int]], count: int, stops: frozenset[int],
    seed: int = 0,
) -> Iterator[tuple[int, int | None]]:  # fmt: skip
    """In process 0, the events of `jaxmp.training.sampling.continuations` over all processes.

    Args:
      part: its stages.
      ends: its messages.
      prompts: tokens, at least one each.
      count: number of tokens after each prompt.
      stops: tokens that end a text.
      seed: of the random numbers.
    """
    events: SimpleQueue[Any] = SimpleQueue()
    turn = threading.Lock()
    streams = owners(len(prompts), min(len(prompts), ends.group.count), 'prompt')

    def follow(stream: int) -> None:
        first = streams.index(stream)
        own = [p for p, s in zip(prompts, streams, strict=True) if s == stream]
        reader = _reader(part, ends, turn, (stream, first))
        try:
            for i, token in continuations(reader, own, count, lambda t, key: t, stops, seed):
                events.put((first + i, token))
        except BaseException as error:  # whoever waits for the events gets it
            events.put(error)

    with ends.group.phase('writing', LONG), ThreadPoolExecutor(len(set(streams))) as threads:
        for stream in sorted(set(streams)):
            threads.submit(follow, stream)
        for _ in range(len(prompts)):
            while True:
                if isinstance(event := events.get(), BaseException):
                    raise event
                yield event
                if event[1] is None:
                    break
        ends.send(END, None)


def _reader(part: Part, ends: Ends, turn: threading.Lock, stream: tuple[int, int]) -> Reader:
    """A reader whose scores are the tokens that the last process drew."""
    number, first = stream

    def passed(size: Any, tokens: Array, key: Array, draw: bool) -> None:
        words = tuple(np.asarray(jax.random.key_data(key)).tolist())
        word = Word(number, first, (*size, tokens.shape[1]), words, draw)
        with turn:
            ends.send(word, part.run(word, tokens))

    def read(size: Any, tokens: Array, key: Array) -> Any:
        passed(size, tokens, key, False)
        return size

    def score(size: Any, tokens: Array, key: Array) -> tuple[Any, Any]:
        passed(size, tokens, key, True)
        return ends.answered(number, size[0]), size

    return Reader(lambda batch, length: (batch, length), read, score)


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
                'outliers(rotate(lloyd(4), 64), causal=True)'
            )
