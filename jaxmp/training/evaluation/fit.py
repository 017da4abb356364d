"""Learns the components of a model's boundaries from a text, for `fitted('codec.npz', CUT)`.

    jaxmp fit SmolLM2-135M-Instruct.Q4_1.gguf --text=notes.txt --cuts='8 16 23' --bits=3

It takes some minutes, once for a model, and nothing is trained. The last fifth of each text is not
learned from: it says what the components cost, and how much the gradients should weigh. With
--percent in place of --bits it takes the fewest bits that are predicted to add at most so much to
the perplexity of every text, over all boundaries.
"""

from __future__ import annotations

import argparse
import bisect
import functools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxmp.codecs import raw
from jaxmp.codecs.components import Components, write
from jaxmp.codecs.fitted import codec_of
from jaxmp.feedback import direct
from jaxmp.models.checkpoint import digest
from jaxmp.training.evaluation import perplexity, perplexity_page
from jaxmp.training.evaluation.components import Directions, in_bits, learned
from jaxmp.training.evaluation.crosstest import readable
from jaxmp.training.evaluation.divergence import LABELS, divergence, gradients
from jaxmp.training.evaluation.language_model import LanguageModel, is_run, open_language_model
from jaxmp.training.evaluation.stagewise import UNCOMPRESSED, activations, before_first, context
from jaxmp.training.tasks.task import cuts_of
from jaxmp.training.workdir.progress import tracked
from jaxmp.wire import Codec, Ctx, like

SHARES = 0.3, 0.99  # of the gradients in what an error counts as
HELD_OUT = 5  # one block of so many is not learned from
TRIED = tuple(np.arange(8, 33) / 4)  # bits that --percent may choose
LARGEST = 8.0  # bits

Blocks = Float[np.ndarray, 'N T C']


class Sent(NamedTuple):
    """What is sent at a boundary, and the gradients of `gradients` by it."""

    x: Blocks
    g: Blocks


class Chosen(NamedTuple):
    """The components of each boundary, their bits, and what they are predicted to cost together.

    Of several texts the cost is that of the text that loses most.
    """

    bits: float
    components: list[Components]
    predicted: float


def sent_of(model: LanguageModel, blocks: Int[np.ndarray, 'N T'], batch: int) -> list[Sent]:
    """The activations of a text at each boundary, and the gradients by them."""
    size, start, found = min(batch, len(blocks)), before_first(model), []
    for i in tracked(range(0, len(blocks), size), 'read'):
        tokens = jnp.asarray(blocks[i : i + size], jnp.int32)
        ctx = context(i, tokens)
        x = activations(model, start(tokens), ctx)
        g = gradients(model, x, ctx, jax.random.fold_in(jax.random.key(LABELS), i))
        found.append([Sent(*map(np.asarray, pair)) for pair in zip(x, g, strict=True)])
    columns = zip(*found, strict=True)
    return [Sent(*map(np.concatenate, zip(*column, strict=True))) for column in columns]


def cost(codec: Codec, held: Sequence[Sent], batch: int) -> np.ndarray:
    """The divergence that a codec is predicted to cause at a boundary, by text."""
    crossed = jax.jit(lambda x: codec.decode(codec.encode(x, Ctx()), like(x), Ctx()))

    def of(text: Sent) -> float:
        cuts = range(batch, len(text.x), batch)
        pairs = zip(np.split(text.x, cuts), np.split(text.g, cuts), strict=True)
        lost = [divergence(jnp.asarray(g), crossed(x) - x) for x, g in pairs]
        return float(jnp.concatenate(lost).mean())

    return np.array([of(text) for text in held])


def directions_of(sent: Sent) -> list[Directions]:
    """Components of a boundary, by each of `SHARES`."""
    x, g = (a.reshape(-1, a.shape[-1]) for a in sent)
    return [learned(x, g, share) for share in SHARES]


def best(
    found: Sequence[Directions], held: Sequence[Sent], bits: float, batch: int
) -> tuple[np.ndarray, Components]:
    """The components of a boundary that cost least in so many bits, after their cost by text."""
    coded = [in_bits(each, bits) for each in found]
    costs = [cost(codec_of(each), held, batch) for each in coded]
    return min(zip(costs, coded, strict=True), key=lambda pair: pair[0].sum())


def chosen(
    found: Sequence[Sequence[Directions]], held: Sequence[Sequence[Sent]], args: argparse.Namespace
) -> Chosen:
    """The components of each boundary, in the bits asked for or the fewest within a percentage.

    Args:
      found: by boundary, then by share.
      held: of text that was not learned from, by text, then by boundary.
      args: with ``bits``, or ``percent`` above 0.

    Raises:
      ValueError: if no number of bits is within the percentage on every text.
    """
    tried = TRIED if args.percent else (args.bits,)
    by_cut = list(zip(*held, strict=True))

    @functools.cache
    def at(bits: float) -> Chosen:
        cuts = tracked(list(zip(found, by_cut, strict=True)), f'{bits:g} bits')
        pairs = [best(f, h, bits, args.batch) for f, h in cuts]
        costs = np.sum([costs for costs, _ in pairs], 0)
        return Chosen(bits, [c for _, c in pairs], float(costs.max()))

    most = math.log1p(args.percent / 100) if args.percent else math.inf
    if (last := at(tried[-1])).predicted > most:
        raise ValueError(
            f'{last.bits:g} bits are predicted to add {100 * math.expm1(last.predicted):.2g} % to '
            f'the perplexity, and --percent={args.percent:g} is less; give more'
        )
    first = bisect.bisect_left(tried, True, key=lambda bits: at(bits).predicted <= most)
    return at(tried[first])


def numbers_of(stages: Any) -> list[int]:
    """Blocks before each boundary, of stages that have them."""
    return [int(n) for n in np.cumsum([stage.blocks for stage in stages])[:-1]]


def fit(args: argparse.Namespace) -> None:
    """Learns, tests on the text's rest, and writes the file."""
    cuts = cuts_of(args.cuts)
    run = is_run(Path(args.model).expanduser())
    model = open_language_model(args.model, 0 if cuts or run else 2, cuts, args.tokenizer)
    if len(model.stages) == 1:
        raise ValueError(f"{args.model} in one stage has no boundary; give --cuts='8 16 23'")
    texts = {
        file.name: perplexity.blocks_of(model, file, args.block, args.tokens, args.batch)
        for file in args.text
    }
    learn = np.concatenate([blocks[: -rest(blocks)] for blocks in texts.values()])
    held = {name: blocks[-rest(blocks) :] for name, blocks in texts.items()}
    found = [directions_of(s) for s in tracked(sent_of(model, learn, args.batch), 'learned')]
    sent = [sent_of(model, blocks, args.batch) for blocks in held.values()]
    bits, components, predicted = chosen(found, sent, args)
    numbers = numbers_of(model.stages)
    about = {
        'model': model.name, 'weights': digest(args.model), 'bits': bits, 'text': [*texts],
        'tokens': int(learn.size), 'predicted_kl': predicted,
    }  # fmt: skip
    write(args.out, about, dict(zip(numbers, components, strict=True)))
    _show(model, held, components, args)
    words = '; '.join(f"fitted('{args.out}', {number})" for number in numbers)
    print(f'--config.fwd="{words}"')


def rest(blocks: Int[np.ndarray, 'N T']) -> int:
    """How many blocks of a text are not learned from."""
    return -(-len(blocks) // HELD_OUT)


def _show(
    model: LanguageModel,
    held: dict[str, Int[np.ndarray, 'N T']],
    components: Sequence[Components],
    args: argparse.Namespace,
) -> None:
    """Prints what the components cost on each text, as measured."""
    channels = {UNCOMPRESSED: direct(raw), args.out.name: [direct(codec_of(c)) for c in components]}
    scores = {
        f'{model.name} on {name}': perplexity.scores(model, blocks, channels, args.batch)
        for name, blocks in held.items()
    }
    perplexity_page.show(scores, 'on tokens that were not learned from')


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog='jaxmp fit', description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument('model', help='a folder, a GGUF file, a name of the hub, or a run')
    arguments.add_argument(
        '--text', type=Path, nargs='+', required=True, help='files of plain text to learn from'
    )
    arguments.add_argument('--cuts', default='', help="blocks before each boundary, '8 16 23'")
    amount = arguments.add_mutually_exclusive_group(required=True)
    amount.add_argument('--bits', type=float, default=0.0, help='of an element of a message')
    amount.add_argument(
        '--percent', type=float, default=0.0, help='of perplexity, over all boundaries; 1 is usual'
    )
    arguments.add_argument('--out', type=Path, default=Path('codec.npz'), help='codec.npz')
    arguments.add_argument('--tokenizer', default='', help="in place of a checkpoint's own")
    arguments.add_argument('--tokens', type=int, default=15360, help='first tokens of each text')
    arguments.add_argument('--block', type=int, default=256, help='tokens of a block')
    arguments.add_argument('--batch', type=int, default=4, help='blocks at a time')
    return arguments


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments; raises ValueError if one is out of range, before a model is read."""
    if args.percent < 0 or not 0 <= args.bits <= LARGEST or not args.percent + args.bits:
        raise ValueError(
            f'--bits={args.bits:g} --percent={args.percent:g}: give bits above 0 and at most '
            f'{LARGEST:g}, or a percentage above 0'
        )
    if args.block < 2 or args.batch < 1:
        raise ValueError(f'--block={args.block} --batch={args.batch}: give 2 or more and 1 or more')
    if args.out.suffix != '.npz' or not args.out.resolve().parent.is_dir():
        raise ValueError(
            f'--out={args.out}: give a file that ends in .npz, in a folder that is there'
        )
    for file in args.text:
        readable('--text', file)
    return args


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    try:
        fit(checked(parser().parse_args(argv)))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f'jaxmp fit: {error}')


if __name__ == '__main__':
    main()
