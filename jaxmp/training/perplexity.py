r"""Nats per token of a text, by the codec of what crosses the boundaries of a language model.

Nothing is trained. A block b of the text loses

.. math:: d_b = \frac{1}{T} \sum_t [\log p(t) - \log p_{codec}(t)]

and a codec the mean of :math:`d_b`, whose standard error is :math:`\sigma(d_b) / \sqrt{n}` over n
blocks. Blocks differ much more than codecs do, so that the differences are paired.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import FeedbackState, init_feedback
from jaxmp.boundary.pipeline import Variables, pipeline, run_stage
from jaxmp.codecs import raw
from jaxmp.data.content import decoded
from jaxmp.feedback import Channel, direct
from jaxmp.grammar import channel_of
from jaxmp.models.layers import next_token_nats
from jaxmp.models.pretrained import check_length
from jaxmp.training.language_model import LanguageModel, is_run, open_language_model
from jaxmp.training.moments import Arrived
from jaxmp.training.progress import tracked
from jaxmp.training.task import cuts_of
from jaxmp.wire import Ctx, Like, bits, like


def prepared(
    path: str, args: Namespace
) -> tuple[LanguageModel, Int[np.ndarray, 'N T'], dict[str, Channel]]:
    """A model, the blocks of a text and the channels of a test.

    Args:
      path: of a checkpoint or a run.
      args: of `jaxmp.training.crosstest.parser`.

    Raises:
      FileNotFoundError: if there is no such model or text.
      ValueError: if the model has no boundary, or a codec is none.
    """
    cuts, count = cuts_of(args.cuts), args.stages
    default = 0 if cuts or is_run(Path(path).expanduser()) else 2
    of_text = []

    def before(model: LanguageModel) -> None:
        if len(model.stages) == 1:
            raise ValueError(f'{path} in one stage has no boundary; give --stages=2 or more')
        of_text.append(blocks_of(model, args.text, args.block, args.tokens, args.batch))

    model = open_language_model(path, count or default, cuts, args.tokenizer, before=before)
    [blocks] = of_text
    trained = [str(b.fwd) for b in model.boundaries or ()]
    numbers = {'examples': len(blocks), 'vocabulary': model.tokenizer.size}
    texts = dict.fromkeys(['raw', *trained, *args.codec])
    return model, blocks, {text: channel_of(text, numbers) for text in texts}


class Score(NamedTuple):
    """A text by a codec.

    Attributes:
      bits: per element of a message.
      nats: of a token, the mean of each block.
      lost: mean nats over those without compression.
      error: its standard error; not a number of one block.
    """

    bits: float
    nats: Float[np.ndarray, ' N']
    lost: float
    error: float

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean nats."""
        return float(np.exp(min(np.mean(self.nats), 700.0)))

    def record(self) -> dict[str, float | None]:
        """The numbers as JSON has them."""
        error = None if np.isnan(self.error) else self.error
        return {
            'bits': self.bits, 'perplexity': self.perplexity, 'nats': float(np.mean(self.nats)),
            'nats_lost': self.lost, 'standard_error': error,
        }  # fmt: skip


def blocks_of(
    model: LanguageModel, file: Path, length: int, tokens: int, batch: int
) -> Int[np.ndarray, 'N T']:
    """The first blocks of a text, in whole batches, each without what is before it.

    Where the tokenizer begins a text with a token, so does each block.

    Raises:
      ValueError: if the file is no text or has less than two blocks, or blocks are longer than the
        model's sequences.
      OSError: if it cannot be read.
    """
    check_length(length, model.positions, '--block', model.name)
    text = decoded(file.read_bytes(), file)
    begin = np.asarray(model.tokenizer.begin, np.int32)
    [ids] = model.tokenizer.encode([text])
    room = max(1, length - len(begin))
    count = min(len(ids), tokens) // room
    count -= count % min(batch, max(count, 1))
    if count < 2:
        raise ValueError(
            f'{file} has {len(ids):,} tokens, of which --tokens={tokens} and --block={length} make '
            f'{count} blocks, and a standard error takes two; give a longer text, more tokens or '
            'shorter blocks'
        )
    blocks = ids[: count * room].reshape(count, room)
    return np.concatenate([np.tile(begin, (count, 1)), blocks], 1)


def scores(
    model: LanguageModel,
    blocks: Int[np.ndarray, 'N T'],
    channels: Mapping[str, Channel],
    batch: int,
) -> dict[str, Score]:
    """The scores of a text by codec.

    What stands before the first boundary is computed once for all codecs. What a rule remembers
    passes from batch to batch.

    Args:
      model: stages with variables.
      blocks: from `blocks_of`.
      channels: forward channels of all boundaries; ``'raw'`` is among them.
      batch: blocks that cross the boundaries together.
    """
    size = min(batch, len(blocks))
    start = before_first(model)
    tails = {text: tail(model, channel) for text, channel in channels.items()}
    by_codec: dict[str, list[np.ndarray]] = {text: [] for text in channels}
    memory: dict[str, FeedbackState] = {}
    message: Like | None = None
    for i in tracked(range(0, len(blocks), size), 'text'):
        tokens = jnp.asarray(blocks[i : i + size], jnp.int32)
        x, ctx = start(tokens), context(i, tokens)
        message = like(x)
        # All codecs on one batch, so that what its first stage gave need not be kept.
        for text, (initial, run) in tails.items():
            before = memory[text] if i else initial(x)
            nats, memory[text] = run(model.variables[1:], before, x, ctx)
            by_codec[text].append(np.asarray(nats, np.float64).mean(1))
    assert message is not None, 'there are blocks'
    means = {text: np.concatenate(parts) for text, parts in by_codec.items()}
    return {
        text: score_of(bits(channels[text], message) / message.size, nats, means['raw'])
        for text, nats in means.items()
    }


def before_first(model: LanguageModel) -> Callable[[Array], Array]:
    """What computes, from a batch of tokens, what arrives at the first boundary."""
    first, variables = model.stages[0], model.variables[0]
    run = jax.jit(lambda v, x: run_stage(first, v, x, Ctx().reading(x), {'train': False})[0])
    return lambda tokens: run(variables, tokens)


def context(first: int, tokens: Int[Array, 'B T']) -> Ctx:
    """The context of a batch whose first block has the number ``first``."""
    key = jax.random.fold_in(jax.random.key(0), first)
    return Ctx(key, jnp.arange(first, first + len(tokens)), tokens=tokens)


def score_of(bits: float, nats: np.ndarray, uncompressed: np.ndarray) -> Score:
    """The score of a codec, from nats by block with it and without."""
    lost = nats - uncompressed
    error = np.std(lost, ddof=1) / np.sqrt(len(lost)) if len(lost) > 1 else np.nan
    return Score(bits, nats, float(np.mean(lost)), float(error))


Initial = Callable[[Array], FeedbackState]
Nats = tuple[Float[Array, 'B T1'], FeedbackState]  # of a batch, and the states after it
Scorer = Callable[[Variables, FeedbackState, Array, Ctx], Nats]


def tail(
    model: LanguageModel, channel: Channel | Sequence[Channel], backward: Channel | None = None
) -> tuple[Initial, Scorer]:
    """What begins at the first boundary: initial states, and the nats of a batch with the next.

    Args:
      model: stages with variables.
      channel: forward, of all boundaries or of each.
      backward: whose state a forward channel reads; nothing is sent by it.
    """
    stages = (Arrived(), *model.stages[1:])
    pipe = pipeline(stages, channel, backward or direct(raw))
    last = model.stages[-1]

    def initial(x: Array) -> FeedbackState:
        # Blocks leave shape and dtype of the residual stream as they are.
        return init_feedback(pipe.boundaries, [x] * len(pipe.boundaries))

    @jax.jit
    def run(variables: Variables, feedback: FeedbackState, x: Array, ctx: Ctx) -> Nats:
        y, _, after = pipe.apply(({}, *variables), feedback, x, ctx, train=False)
        if getattr(last, 'by_token', False):
            return y[:, :-1, 0], after
        assert ctx.tokens is not None, 'the first stage reads them'
        return next_token_nats(y, ctx.tokens), after

    return initial, run
