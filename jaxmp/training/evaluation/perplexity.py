r"""Nats per token of a text, by the codec of what crosses the boundaries of a language model.

Nothing is trained. A block b of the text loses

.. math:: d_b = \frac{1}{T} \sum_t [\log p(t) - \log p_{codec}(t)]

and a codec the mean of :math:`d_b`, whose standard error is :math:`\sigma(d_b) / \sqrt{n}` over n
blocks. Blocks differ much more than codecs do, so that the differences are paired. The divergence
of `jaxmp.training.evaluation.stagewise` stands beside it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmp.boundary import FeedbackState
from jaxmp.data.content import decoded
from jaxmp.feedback import Channel
from jaxmp.grammar import channel_of
from jaxmp.models.pretrained import EVERY, check_length
from jaxmp.training.evaluation.divergence import Channels, predictions
from jaxmp.training.evaluation.language_model import LanguageModel, is_run, open_language_model
from jaxmp.training.evaluation.stagewise import (
    UNCOMPRESSED,
    Judged,
    before_first,
    context,
    cuts_with,
    initial,
    joined,
    judged,
    through,
)
from jaxmp.training.tasks.task import cuts_of
from jaxmp.training.workdir.progress import tracked
from jaxmp.wire import Like, bits, like

CANDIDATES = (  # whose divergence is predicted, by bits
    'outliers(rotate(uniform(8), 64), causal=True)',
    'mx(8)',
    'outliers(asinh(8), channels=4, causal=True)',
    'per_token(uniform(8))',
    'per_token(asinh(8))',
    'outliers(asinh(7), channels=4, causal=True)',
    'outliers(rotate(uniform(6), 64), causal=True)',
    'mx(6)',
    'outliers(asinh(6), channels=4, causal=True)',
    'per_token(asinh(6))',
    'outliers(rotate(lloyd(5), 64), causal=True)',
    'outliers(nvfp4, channels=16, causal=True)',
    'outliers(asinh(5), channels=4, causal=True)',
    'outliers(rotate(lloyd(4), 64), channels=16, causal=True)',
    'outliers(asinh(4), channels=16, causal=True)',
    'nvfp4',
    'block(4)',
    'outliers(rotate(lloyd(4), 64), causal=True)',
    'per_token(rotate(lloyd(4), 64))',
    'outliers(rotate(lloyd(3), 64), causal=True)',
)
EVERY_BLOCK = 'every'  # of --cuts: a boundary behind each block
Record = dict[str, float | list[float] | None]  # of a codec, as JSON has it


def prepared(
    path: str, args: Namespace
) -> tuple[LanguageModel, Int[np.ndarray, 'N T'], dict[str, Channels], dict[str, Channels]]:
    """A model, the blocks of a text, the channels that are measured and those predicted.

    Args:
      path: of a checkpoint or a run.
      args: of `jaxmp.training.evaluation.crosstest.parser`.

    Raises:
      FileNotFoundError: if there is no such model or text.
      ValueError: if the model has no boundary, or a codec is none.
    """
    every = args.cuts == EVERY_BLOCK or (args.predict and not (args.cuts or args.stages))
    cuts, count = () if every else cuts_of(args.cuts), args.stages
    default = 0 if cuts or is_run(Path(path).expanduser()) else EVERY if every else 2
    of_text = []

    def before(model: LanguageModel) -> None:
        if len(model.stages) == 1:
            raise ValueError(f'{path} in one stage has no boundary; give --stages=2 or more')
        of_text.append(blocks_of(model, args.text, args.block, args.tokens, args.batch))

    model = open_language_model(path, count or default, cuts, args.tokenizer, before=before)
    [blocks] = of_text
    asked = [*(str(b.fwd) for b in model.boundaries or ()), *args.codec]
    numbers = {'examples': len(blocks), 'vocabulary': model.tokenizer.size}
    named = lambda texts: {text: _channels_of(text, numbers) for text in dict.fromkeys(texts)}
    predicted = [*asked, *CANDIDATES] if args.predict else []
    measured = [UNCOMPRESSED, *asked] if asked or not args.predict else []
    return model, blocks, named(measured), named(predicted)


def _channels_of(text: str, numbers: dict[str, int]) -> Channels:
    """The channel of a text, or one per boundary between ``;``."""
    each = [channel_of(part, numbers) for part in text.split(';')]
    return each if len(each) > 1 else each[0]


class Mean(NamedTuple):
    """A mean over blocks; NaN where nothing was measured, and its error for a single block."""

    value: float = np.nan
    error: float = np.nan

    @property
    def percent(self) -> float:
        """Of perplexity, that so many nats add."""
        return 100 * float(np.expm1(min(self.value, 700.0)))


def mean_of(blocks: Float[np.ndarray, ' N']) -> Mean:
    """The mean, with its standard error."""
    error = np.std(blocks, ddof=1) / np.sqrt(len(blocks)) if len(blocks) > 1 else np.nan
    return Mean(float(np.mean(blocks)), float(error))


class Score(NamedTuple):
    """A text by a codec.

    Attributes:
      bits: per element of a message.
      nats: of a token, the mean of each block; empty if they are only predicted.
      lost: nats over those without compression.
      kl: divergence of the next token from that without compression.
      predicted: the same by `stagewise.divergence`, summed over the boundaries.
      by_cut: of each boundary.
    """

    bits: float
    nats: Float[np.ndarray, ' N']
    lost: Mean = Mean()
    kl: Mean = Mean()
    predicted: Mean = Mean()
    by_cut: tuple[float, ...] = ()

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean nats."""
        return float(np.exp(min(np.mean(self.nats), 700.0)))

    @property
    def added(self) -> Mean:
        """The divergence as it was measured, or else predicted."""
        return self.predicted if np.isnan(self.kl.value) else self.kl

    def record(self) -> Record:
        """The numbers as JSON has them."""
        numbers: dict[str, float] = {'bits': self.bits}
        if len(self.nats):
            numbers |= {
                'perplexity': self.perplexity, 'nats': float(np.mean(self.nats)),
                'nats_lost': self.lost.value, 'standard_error': self.lost.error,
                'kl': self.kl.value, 'kl_error': self.kl.error,
            }  # fmt: skip
        numbers['percent'] = self.added.percent
        if self.by_cut:
            numbers |= {
                'predicted_kl': self.predicted.value, 'predicted_error': self.predicted.error,
            }  # fmt: skip
        by_cut = {'predicted_by_cut': list(self.by_cut)} if self.by_cut else {}
        return {k: None if np.isnan(v) else v for k, v in numbers.items()} | by_cut


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
    channels: Mapping[str, Channels],
    batch: int,
) -> dict[str, Score]:
    """The scores of a text by codec.

    What stands before the first boundary is computed once for all codecs. What a rule remembers
    passes from batch to batch.

    Args:
      model: stages with variables.
      blocks: from `blocks_of`.
      channels: forward, of all boundaries or of each; ``'raw'`` is among them.
      batch: blocks that cross the boundaries together.
    """
    size = min(batch, len(blocks))
    start = before_first(model)
    cuts = {text: cuts_with(model, channel) for text, channel in channels.items()}
    by_codec: dict[str, list[Judged]] = {text: [] for text in channels}
    states: dict[str, FeedbackState] = {}
    message: Like | None = None
    for i in tracked(range(0, len(blocks), size), 'text'):
        tokens = jnp.asarray(blocks[i : i + size], jnp.int32)
        x, ctx = start(tokens), context(i, tokens)
        message, arrived = like(x), {}
        # All codecs on one batch, so that what its first stage gave need not be kept.
        for text, ours in cuts.items():
            before = states[text] if i else initial(ours, x)
            arrived[text], states[text] = through(model, ours, before, x, ctx)
        for text, found in judged(model, arrived, ctx).items():
            by_codec[text].append(found)
    assert message is not None, 'there are blocks'
    found = {text: joined(parts) for text, parts in by_codec.items()}
    return {
        text: score_of(_bits(channels[text], message), own, found[UNCOMPRESSED].nats)
        for text, own in found.items()
    }


def _bits(channels: Channels, message: Like) -> float:
    """Bits of an element, the mean over boundaries."""
    each = [channels] if isinstance(channels, Channel) else channels
    return float(np.mean([bits(channel, message) / message.size for channel in each]))


def predicted_too(
    scores: Mapping[str, Score],
    model: LanguageModel,
    blocks: Int[np.ndarray, 'N T'],
    channels: Mapping[str, Channels],
    batch: int,
) -> dict[str, Score]:
    """The scores, and beside them the predictions of `jaxmp.training.evaluation.divergence`.

    Args:
      scores: of what was measured.
      model: stages with variables.
      blocks: from which it is predicted.
      channels: forward, of all boundaries or of each.
      batch: blocks that cross the boundaries together.
    """
    sent = jax.eval_shape(before_first(model), blocks[:batch])
    found = dict(scores)
    for text, rows in predictions(model, blocks, channels, batch).items():
        known = found.get(text, Score(_bits(channels[text], sent), np.zeros(0)))
        found[text] = known._replace(
            predicted=mean_of(rows.sum(1)), by_cut=tuple(rows.mean(0).tolist())
        )
    return found


def score_of(bits: float, found: Judged, uncompressed: Float[np.ndarray, ' N']) -> Score:
    """The score of a codec, from its means by block and the nats without compression."""
    return Score(bits, found.nats, mean_of(found.nats - uncompressed), mean_of(found.kl))
