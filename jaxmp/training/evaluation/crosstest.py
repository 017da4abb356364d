"""`jaxmp evaluate PATH_OR_RUN ...`: models tested with other codecs than they were trained with.

The table has each run's test metric with a column per codec, at all boundaries of the test. With
``--batchnorm`` a second row has BatchNorm's statistics estimated again, on training batches that
cross open boundaries; a training with compression leaves those of compressed activations. With
``--moments`` a further row gives open boundaries the mean and deviation per channel that compressed
ones have; see `jaxmp.training.evaluation.moments`.

With ``--text=FILE`` the table has the perplexity of a text instead, by language models: runs, or
checkpoints (a folder, a GGUF file, a name of the hub) in ``--stages`` or ``--cuts``; with the nats
that each codec loses, the divergence (kl) of the next token from that without compression, and
their standard errors over blocks of the text; see `perplexity` in this room. With ``--predict``
codecs of many kinds stand beside them, each predicted from one backward pass, and the one of the
fewest bits within 1 % of perplexity is named; see `divergence`.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array

from jaxmp import terminal
from jaxmp.boundary import Boundary, boundary
from jaxmp.codecs import raw
from jaxmp.data.content import decoded
from jaxmp.exchange.collectives import Tree
from jaxmp.feedback import direct
from jaxmp.grammar import channel_of, check_channels, own_words
from jaxmp.metrics import PERCENT, Metric
from jaxmp.models.huggingface import local
from jaxmp.pictures import style
from jaxmp.pictures.compare import picture
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.types import Batch, ModelState
from jaxmp.training.evaluate import means, model_of, sums, totals
from jaxmp.training.evaluation import perplexity, perplexity_page
from jaxmp.training.evaluation.language_model import is_run
from jaxmp.training.evaluation.moments import matched, normalised_again, opened_with
from jaxmp.training.evaluation.saved import Run, config_of, load
from jaxmp.training.experiment import Experiment
from jaxmp.training.step import TrainState
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import WorkdirError, check_writable, write_json
from jaxmp.training.workdir.progress import tracked


def named(runs: Sequence[Run], folders: Sequence[Path]) -> list[Run]:
    """The runs with names of their own: where two folders have one name, their paths."""
    count = Counter(run.name for run in runs)
    pairs = zip(runs, folders, strict=True)
    return [r._replace(name=str(f)) if count[r.name] > 1 else r for r, f in pairs]


def same_metric(runs: Sequence[Run]) -> Metric:
    """The metric of all runs.

    Raises:
      ValueError: if they have several.
    """
    names = {run.exp.task.metric.name: run.name for run in runs}
    if len(names) > 1:
        listed = ', '.join(f'{run} has {name}' for name, run in names.items())
        raise ValueError(f'one table shows one metric, and {listed}; give runs of one task')
    return runs[0].exp.task.metric


def trained_with(run: Run) -> list[str]:
    """The codecs of the forward channels of a run's training, as texts."""
    return [str(cut.fwd.codec) for cut in run.exp.model.boundaries]


def same(exp: Experiment, text: str) -> tuple[Boundary, ...]:
    """Boundaries with one codec, without feedback.

    Raises:
      ValueError: if ``text`` is not a channel.
    """
    names = {'examples': len(exp.data.train.y), **own_words(exp.config.codecs)}
    codec = channel_of(text, names).codec
    return (boundary(direct(codec), direct(raw)),) * len(exp.model.boundaries)


def scorer(exp: Experiment, cuts: tuple[Boundary, ...]) -> Callable[[TrainState], dict[str, float]]:
    """The mean scores on the test split over boundaries without feedback."""
    local = Local(model_of(exp, cuts), train=False)
    feedback = jax.eval_shape(local.init, jax.random.key(0)).feedback  # holds no array

    @jax.jit
    def predict(state: ModelState, batch: Batch, key: Array) -> tuple[Array, Tree]:
        output, after = local.predict(state, batch, key)
        return sums(exp, output, batch), after

    def score(state: TrainState) -> dict[str, float]:
        start = state.model._replace(feedback=feedback)
        return means(exp, totals(exp, start, state.key, predict))

    return score


Scored = tuple[str, list[dict[str, float]]]


def rows_of(run: Run, texts: Sequence[str], again: bool, moments: bool) -> Iterator[Scored]:
    """The scores of a run by codec.

    Args:
      run: the run.
      texts: the codecs; `raw` is first.
      again: whether to score `normalised_again` too.
      moments: whether to score open boundaries with the maps of `matched` too, which have no codec.
    """
    scorers = [scorer(run.exp, same(run.exp, text)) for text in texts]
    yield run.name, [score(run.state) for score in tracked(scorers, run.name)]
    if again:
        model = normalised_again(run.exp, run.state.model, run.state.key)
        state = run.state.replace(model=model)
        name = f'{run.name}, statistics again'
        yield name, [score(state) for score in tracked(scorers, name)]
    if moments:
        maps = matched(run.exp, run.state.model, run.state.key)
        yield (
            f'{run.name}, moments matched',
            [scorer(run.exp, tuple(map(opened_with, maps)))(run.state)],
        )


def show(rows: Sequence[Scored], texts: Sequence[str], metric: Metric) -> None:
    """Prints the rows as a table."""
    from rich.table import Table

    table = Table(title=f'test {metric.name} by the codec in the test, without feedback')
    table.add_column('run', overflow='fold')
    for text in texts:
        table.add_column(text, justify='right', overflow='fold')
    for name, scores in rows:
        table.add_row(name, *map(metric.format, scores))  # a row may have the first codecs alone
    terminal.show(table)


def draw(path: Path, rows: Sequence[Scored], texts: Sequence[str], metric: Metric) -> None:
    """The rows as a grid of coloured numbers, the better the darker."""
    values = np.full((len(rows), len(texts)), np.nan)  # white: not tested
    for i, (_, scores) in enumerate(rows):
        values[i, : len(scores)] = [metric.rank(s) for s in scores]
    with style.style():
        figure = style.figure(2.6 + 1.1 * len(texts), 1.8 + 0.4 * len(rows))
        axis = figure.subplots()
        axis.imshow(values, cmap='Blues', aspect='auto')
        axis.grid(visible=False)
        middle = (np.nanmin(values) + np.nanmax(values)) / 2
        for i, (_, scores) in enumerate(rows):
            for j, s in enumerate(scores):
                color = 'white' if values[i, j] > middle else 'black'
                axis.text(j, i, metric.format(s), ha='center', va='center', color=color)
        names = style.apart([style.exchange(t) for t in texts], texts)
        axis.set_xticks(range(len(texts)), names, rotation=30, ha='right')
        axis.set_yticks(range(len(rows)), [name for name, _ in rows])
        axis.set(xlabel='codec in the test', ylabel='run', title=f'test {metric.name}')
        style.caption(figure, 'n = 1 run per row, so no intervals')
        style.save(figure, path)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    arguments = argparse.ArgumentParser(
        prog='jaxmp evaluate', description=(__doc__ or '').partition('\n\n')[2]
    )
    arguments.add_argument(
        'run', type=Path, nargs='+', metavar='PATH_OR_RUN',
        help='workdirs of runs with a checkpoint; with --text also folders, GGUF files or names of '
        'the hub',
    )  # fmt: skip
    arguments.add_argument(
        '--codec', nargs='+', action='extend', default=[], metavar='CODEC',
        help='codecs of the test, or own.py:mine(2), besides none and those of the training; of a '
        'text also one per boundary, with ; between them',
    )  # fmt: skip
    arguments.add_argument(
        '--batchnorm', action='store_true', help='also with statistics estimated again'
    )
    arguments.add_argument(
        '--moments', action='store_true', help='also open, with the moments of the compressed'
    )
    arguments.add_argument(
        '--out', type=picture, help='a picture, as PNG and as SVG, and the scores as JSON'
    )
    text = arguments.add_argument_group('perplexity of a text')
    text.add_argument('--text', type=Path, help='a file of plain text')
    text.add_argument('--stages', type=int, default=0, help='of a checkpoint; default 2')
    text.add_argument(
        '--cuts', default='', help="blocks before each boundary, such as '8 16 23', or every"
    )
    text.add_argument(
        '--predict', type=int, nargs='?', const=2048, default=0, metavar='TOKENS',
        help='also predict, from one backward pass over the first tokens (2048), what codecs of '
        'many kinds cost at each boundary; without --codec nothing else',
    )  # fmt: skip
    text.add_argument('--tokenizer', default='', help="in place of a checkpoint's own")
    text.add_argument('--tokens', type=int, default=16384, help='first tokens of the text')
    text.add_argument('--block', type=int, default=256, help='tokens of a block')
    text.add_argument('--batch', type=int, default=4, help='blocks of a message')
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    args = parser().parse_args(argv)
    try:
        _by_text(args) if args.text else _by_test(args)
    except (OSError, ValueError, ImportError, WorkdirError) as error:
        sys.exit(f'jaxmp evaluate: {error}')


def _by_test(args: argparse.Namespace) -> None:
    """Scores on the runs' own test splits."""
    if args.stages or args.cuts or args.tokenizer or args.predict:
        raise ValueError(
            '--stages, --cuts, --tokenizer and --predict are of a text; give --text=FILE'
        )
    for path in args.run:  # of all before one is loaded
        check_channels(args.codec, own_words(config_of(path)['codecs']))
    if args.out:
        check_writable(args.out.parent, '--out')
    runs = named([load(path) for path in args.run], args.run)
    codecs = itertools.chain.from_iterable(map(trained_with, runs))
    texts = list(dict.fromkeys(['raw', *codecs, *args.codec]))
    metric = same_metric(runs)
    rows = [row for run in runs for row in rows_of(run, texts, args.batchnorm, args.moments)]
    show(rows, texts, metric)
    if args.out:
        draw(args.out, rows, texts, metric)
        scores = {
            name: dict(zip(texts, scores_of_run, strict=False)) for name, scores_of_run in rows
        }
        trained = {run.name: run.trained for run in runs}
        write_json(args.out.with_suffix('.json'), provenance() | {'runs': trained, 'test': scores})
        print(*(args.out.with_suffix(s) for s in ('.png', '.svg', '.json')))


def readable(flag: str, file: Path) -> None:
    """Raises ValueError if a file, that a flag names, is not there or is no text in UTF-8."""
    if file.is_dir() or not file.exists():
        raise ValueError(f'{flag}={file} is not there, or no file; give a text in UTF-8')
    decoded(file.read_bytes(), file)


def _by_text(args: argparse.Namespace) -> None:
    """Perplexities of a text."""
    if args.batchnorm or args.moments:
        raise ValueError('--batchnorm and --moments are of a test split; leave --text out')
    if args.predict < 0:
        raise ValueError(f'--predict={args.predict}: give a number of tokens')
    if args.block < 2 or args.batch < 1:
        raise ValueError(
            f'--block={args.block} --batch={args.batch}: give blocks of 2 tokens or more, and a '
            'batch of 1 or more'
        )
    readable('--text', args.text)
    check_channels(part for text in args.codec for part in text.split(';'))
    if args.out:
        check_writable(args.out.parent, '--out')
    for path in map(str, args.run):
        if not is_run(Path(path).expanduser()):
            local(path)
    scores_of, about = {}, {}
    for path in args.run:
        model, blocks, measured, predicted = perplexity.prepared(str(path), args)
        name = str(path) if model.name in scores_of else model.name
        scores = perplexity.scores(model, blocks, measured, args.batch) if measured else {}
        if predicted:
            count = min(len(blocks), max(args.predict // args.block, 2))
            some = blocks[: count - count % min(args.batch, count)]
            scores = perplexity.predicted_too(scores, model, some, predicted, args.batch)
        scores_of[name] = scores
        about[name] = {'stages': len(model.stages), 'blocks': len(blocks)}
    title = f'{args.text.name} in blocks of {args.block} tokens, by the codec of its activations'
    perplexity_page.show(scores_of, title)
    for name, scores in scores_of.items() if args.predict or args.codec else ():
        print(f'{name}, {about[name]["stages"]} stages. {perplexity_page.fewest(scores, PERCENT)}')
    if args.out:
        perplexity_page.draw(args.out, scores_of, title)
        text = {'file': args.text.name, 'block': args.block, 'batch': args.batch}
        scores = {'text': text, 'models': about, 'scores': perplexity_page.record(scores_of)}
        write_json(args.out.with_suffix('.json'), provenance() | scores)
        print(*(args.out.with_suffix(s) for s in ('.png', '.svg', '.json')))


if __name__ == '__main__':
    main()
