"""Tokens that continue prompts, one for each prompt per step, with a cache or a window.

A `Reader` is a model that has read some tokens. A decoder's keeps keys and values, so that a step
computes one position. Those of stages without a cache compute all tokens again, or a window.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import Boundary, boundary, init_feedback
from jaxmp.boundary.pipeline import Pipeline
from jaxmp.codecs import raw
from jaxmp.feedback import direct
from jaxmp.models import decoder
from jaxmp.training.evaluation.language_model import LanguageModel
from jaxmp.wire import Ctx

COLD = 1e-5  # a temperature at which logits that differ in float32 are far apart, or overflow
State = Any
Tokens = Int[Array, 'B n']
Event = tuple[int, int | None]  # number of a prompt, and its next token, or None at its end
Variables = tuple[dict[str, Any], ...]  # of the stages


class Reader(NamedTuple):
    """A model that reads tokens and says what follows.

    Attributes:
      start: ``(batch, length) -> state`` for sequences of up to ``length`` tokens.
      read: ``(state, tokens, key) -> state``.
      score: ``(state, tokens, key) -> (logits after the last token, state)``.
    """

    start: Callable[[int, int], State]
    read: Callable[[State, Tokens, Array], State]
    score: Callable[[State, Tokens, Array], tuple[Float[Array, 'B V'], State]]


def reader_of(model: LanguageModel, cuts: tuple[Boundary, ...] | None = None) -> Reader:
    """The reader of a model whose boundaries are ``cuts``, which have no state; None: open."""
    if model.cached:
        return cached(model, cuts)
    return windowed(model, cuts) if model.before else again(model)


def cached(model: LanguageModel, cuts: tuple[Boundary, ...] | None = None) -> Reader:
    """The reader of a decoder: a message has the new tokens only."""
    pipe, variables = _pipeline(model, cuts)

    def start(batch: int, length: int) -> State:
        decoders = [stage for stage in pipe.stages if isinstance(stage, decoder.Stage)]
        return tuple(decoder.empty_cache(stage, batch, length) for stage in decoders)

    def run(variables: Variables, cache: State, tokens: Tokens, key: Array) -> tuple[Array, State]:
        whole = tuple({**v, 'cache': c} for v, c in zip(variables, cache, strict=True))
        logits, after = _apply(pipe, whole, tokens, key, cuts is not None)
        return logits[:, -1], tuple(v['cache'] for v in after)

    # Without its logits the compiler leaves the output layer out.
    read = jax.jit(lambda *arguments: run(*arguments)[1], donate_argnums=1)
    score = jax.jit(run, donate_argnums=1)
    return Reader(start, functools.partial(read, variables), functools.partial(score, variables))


def windowed(model: LanguageModel, cuts: tuple[Boundary, ...] | None = None) -> Reader:
    """The reader of stages without a cache: each step computes a whole window again.

    Before the prompt the window is filled with ``model.before``, so that a codec compresses tensors
    of the shape and kind that it was trained on (TopK per sample chooses among the whole window).
    """
    pipe, variables = _pipeline(model, cuts)

    @jax.jit
    def scores(variables: Variables, window: Tokens, key: Array) -> Array:
        return _apply(pipe, variables, window, key, cuts is not None)[0][:, -1]

    def start(batch: int, length: int) -> State:
        return jnp.tile(jnp.asarray(model.before, jnp.int32), (batch, 1))

    def read(window: State, tokens: Tokens, key: Array) -> State:
        return jnp.concatenate([window, tokens], 1)[:, -window.shape[1] :]

    def score(window: State, tokens: Tokens, key: Array) -> tuple[Array, State]:
        window = read(window, tokens, key)
        return scores(variables, window, key), window

    return Reader(start, read, score)


def again(model: LanguageModel) -> Reader:
    """The reader of a checkpoint without a cache: each step computes the whole text again.

    All texts stand at the start of rows of one length, so that one program is compiled. A token
    sees only those before it, so what fills the rest makes no difference.
    """
    pipe, variables = _pipeline(model, None)

    @jax.jit
    def scores(variables: Variables, rows: Tokens, last: Array, key: Array) -> Array:
        logits, _ = _apply(pipe, variables, rows, key, False)
        return jax.lax.dynamic_index_in_dim(logits, last, 1, keepdims=False)

    def start(batch: int, length: int) -> State:
        return jnp.zeros((batch, length), jnp.int32), 0

    def read(state: State, tokens: Tokens, key: Array) -> State:
        rows, count = state
        rows = jax.lax.dynamic_update_slice_in_dim(rows, tokens, count, 1)
        return rows, count + tokens.shape[1]

    def score(state: State, tokens: Tokens, key: Array) -> tuple[Array, State]:
        rows, count = read(state, tokens, key)
        return scores(variables, rows, jnp.int32(count - 1), key), (rows, count)

    return Reader(start, read, score)


def _pipeline(
    model: LanguageModel, cuts: tuple[Boundary, ...] | None
) -> tuple[Pipeline, Variables]:
    stages = tuple(getattr(stage, 'with_logits', stage) for stage in model.stages)
    opened = (boundary(direct(raw), direct(raw)),) * (len(stages) - 1)
    return Pipeline(stages, opened if cuts is None else cuts), model.variables


def _apply(
    pipe: Pipeline, variables: Variables, tokens: Tokens, key: Array, compressed: bool
) -> tuple[Array, Variables]:
    feedback = None
    if compressed:
        likes = pipe.likes(variables, tokens, train=False)
        feedback = init_feedback(pipe.boundaries, likes)
    logits, after, _ = pipe.apply(variables, feedback, tokens, Ctx(key), train=False)
    return logits, after


def nucleus(logits: Float[Array, '... V'], p: float) -> Float[Array, '... V']:
    """The logits of the fewest tokens whose probabilities sum to ``p``; those of others are -inf.

    >>> nucleus(jnp.log(jnp.array([0.1, 0.6, 0.3])), 0.8) > -jnp.inf
    Array([False,  True,  True], dtype=bool)

    References:
      The Curious Case of Neural Text Degeneration, arXiv 1904.09751.
    """
    ordered = jnp.sort(logits, axis=-1, descending=True)
    shares = jax.nn.softmax(ordered, axis=-1)
    before = jnp.cumsum(shares, axis=-1) - shares  # of all that are likelier
    least = jnp.min(jnp.where(before < p, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= least, logits, -jnp.inf)


@functools.partial(jax.jit, static_argnames=('temperature', 'top_p'))
def choose(
    logits: Float[Array, 'B V'],
    key: Array,
    temperature: float,
    top_p: float = 1.0,
    first: int | Int[Array, ''] = 0,
) -> Int[Array, ' B']:
    """A token of each row, drawn from ``softmax(logits / temperature)``; near 0 the likeliest.

    Args:
      logits: of the tokens.
      key: each row has a stream of its own.
      temperature: divisor.
      top_p: probability of the likeliest tokens among which is drawn.
      first: number of the first row.
    """
    if temperature < COLD:
        return jnp.argmax(logits, -1)
    scaled = logits.astype(jnp.float32) / temperature
    scaled = nucleus(scaled, top_p) if top_p < 1 else scaled
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, first + jnp.arange(len(logits)))
    return jax.vmap(jax.random.categorical)(keys, scaled)


def continuations(
    reader: Reader,
    prompts: Sequence[Sequence[int]],
    count: int,
    chosen: Callable[[Array, Array], Array],
    stops: frozenset[int] = frozenset(),
    seed: int = 0,
) -> Iterator[Event]:
    """Yields ``(number of the prompt, its next token)``, and None where it has ended.

    All prompts are read together up to the end of the shortest one. What is left of the others is
    read a token at a time beside what follows the ended ones, so no prompt is padded.

    Args:
      reader: the model.
      prompts: tokens, at least one each.
      count: number of tokens after each prompt.
      chosen: ``(logits, key) -> tokens``, such as `choose`.
      stops: tokens that end a text; they are not yielded.
      seed: of the random numbers.
    """
    rows, left = [list(p) for p in prompts], [count] * len(prompts)
    key, first = jax.random.key(seed), min(map(len, prompts)) - 1
    state = reader.start(len(rows), max(map(len, prompts)) + count)
    if first:
        head = jnp.asarray([row[:first] for row in rows], jnp.int32)
        state = reader.read(state, head, jax.random.fold_in(key, 0))
    for t in itertools.count(first):
        if not any(left):
            return
        position_key = jax.random.fold_in(key, t)
        column = jnp.asarray([[row[t]] for row in rows], jnp.int32)
        logits, state = reader.score(state, column, position_key)
        for i, token in enumerate(np.asarray(chosen(logits, position_key)).tolist()):
            if len(rows[i]) > t + 1:
                continue  # its prompt goes on
            rows[i].append(token)
            if not left[i]:
                continue
            left[i], shown = counted(token, left[i], stops)
            for event in shown:
                yield i, event


def counted(token: int, left: int, stops: frozenset[int]) -> tuple[int, list[int | None]]:
    """How many tokens may follow one that was drawn, and what is shown of it: None at the end.

    >>> counted(7, 2, {9}), counted(7, 1, {9}), counted(9, 2, {9})
    ((1, [7]), (0, [7, None]), (0, [None]))
    """
    if token in stops:
        return 0, [None]
    return left - 1, [token, *([] if left > 1 else [None])]
