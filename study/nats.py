"""`python -m study nats MODEL --text=FILE --study=NAME --out=DIR`: nats lost by codec, in rows.

A study is a Python file with ``get_rows()``, such as configs/pretrained_codecs.py. A finished row
is saved as ``OUT/NAME.json`` and is not computed again. What stands before the first boundary is
computed once for all rows, and kept in a folder. A rule may learn from another text first.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmp.boundary import Boundary, FeedbackState, value_and_grad
from jaxmp.boundary.pipeline import Variables
from jaxmp.config.files import find
from jaxmp.feedback import Channel
from jaxmp.grammar import check_channels
from jaxmp.models.checkpoint import digest
from jaxmp.plugins import module
from jaxmp.spec import parse
from jaxmp.terminal import hint
from jaxmp.training.evaluation.crosstest import readable
from jaxmp.training.evaluation.language_model import LanguageModel, open_language_model
from jaxmp.training.evaluation.perplexity import blocks_of, score_of
from jaxmp.training.evaluation.stagewise import (
    UNCOMPRESSED,
    activations,
    before_first,
    context,
    cuts_with,
    initial,
    joined,
    judged,
    last_nats,
    through,
)
from jaxmp.training.summary import provenance
from jaxmp.training.workdir.locks import check_writable, locked, replacing, write
from jaxmp.training.workdir.progress import duration, tracked
from jaxmp.wire import Ctx, bits, like

NONE = 'none'  # the row that the others are compared with
Blocks = Int[np.ndarray, 'N T']
Lesson = Callable[[FeedbackState, Array, Ctx], FeedbackState]
Result = dict[str, Any]  # of a row, as its file has it


class Row(NamedTuple):
    """A row of the table.

    Attributes:
      name: of its result file.
      fwd: forward channel of all boundaries, or of each with ``;`` between them.
      learn: the channel whose state, after the text to learn from, ``fwd`` begins with; behind
        ``|`` that of the gradients, if it learns from them too; empty: none.
      cuts: numbers of blocks before each boundary.
      tokens: of the text that is scored.
      learned_tokens: of the text to learn from.
    """

    name: str
    fwd: str
    learn: str = ''
    cuts: tuple[int, ...] = (16,)
    tokens: int = 51_200
    learned_tokens: int = 0


class Setting(NamedTuple):
    """What all rows have in common.

    Attributes:
      study: the file of the rows, or its name.
      path: of the checkpoint.
      tokenizer: in place of the checkpoint's own; empty: that.
      text: the file that is scored.
      before: the file that rules learn from.
      block: tokens of a block.
      batch: blocks of a message.
      work: folder of what stands before the first boundary.
    """

    study: str
    path: str
    tokenizer: str
    text: Path
    before: Path | None
    block: int
    batch: int
    work: Path


def rows_of(study: str, names: Sequence[str] = ()) -> list[Row]:
    """The rows of a study, or those of some names.

    Raises:
      ValueError: if the file is no study, two rows share a name, or there is no row of a name.
    """
    file = Path(find(study))
    if not file.is_file():
        raise ValueError(f'there is no such Python file: {file}; give one with get_rows()')
    study_module = module(str(file))
    if not hasattr(study_module, 'get_rows'):
        raise ValueError(f'{study} has no get_rows(); see configs/pretrained_codecs.py')
    rows: list[Row] = study_module.get_rows()
    defined = [row.name for row in rows]
    if twice := sorted({n for n in defined if defined.count(n) > 1}):
        raise ValueError(f'{study} has two rows {twice[0]}; give each a name of its own')
    if defined[:1] != [NONE]:
        raise ValueError(
            f'the first row of {study} is not {NONE!r}, which others are compared with'
        )
    if unknown := [n for n in names if n not in defined]:
        near = hint(unknown[0], defined)
        raise ValueError(f'no row {unknown[0]!r}{near}; allowed are {", ".join(defined)}')
    return [row for row in rows if not names or row.name in names]


def check(rows: Sequence[Row], setting: Setting, out: Path) -> None:
    """Raises ValueError where a row could not be computed, before the model is read."""
    if NONE not in [row.name for row in rows]:
        _uncompressed(out, 1)
    for row in rows:
        texts = f'{row.fwd};{row.learn.replace("|", ";")}'.split(';')
        check_channels([text.strip() for text in texts if text.strip()])
        if row.learn and setting.before is None:
            raise ValueError(f'{row.name} learns from a text first; give --before=FILE')


def run(rows: Sequence[Row], setting: Setting, out: Path) -> None:
    """Computes the rows that are not finished, and prints each with the time left.

    Several processes may share the work.

    Raises:
      ValueError: if a finished row was made with another setting, or `NONE` is not finished.
    """
    done = [result for row in rows if (result := finished(row, setting, out))]
    for number, row in enumerate(rows, 1):
        with locked(setting.work / 'rows' / row.name) as mine:
            if not mine or finished(row, setting, out):
                continue
            result = record(row, setting, out) | {'command': command(setting, row), **provenance()}
            out.mkdir(parents=True, exist_ok=True)
            lines = (f' {json.dumps(k)}: {json.dumps(v)}' for k, v in result.items())
            write(out / f'{row.name}.json', '{\n' + ',\n'.join(lines) + '\n}\n')
        done.append(result)
        lost = f'{result["nats_lost"]:+.4f} +- {result["standard_error"]:.4f}'
        todo = [r for r in rows[number:] if not (out / f'{r.name}.json').is_file()]
        print(
            f'[{number}/{len(rows)}] {row.name}  {result["bits"]:.3f} bits  {lost} nats  '
            f'{duration(result["seconds"])}; {len(todo)} to do, about {left(todo, done)} left',
            flush=True,
        )


def command(setting: Setting, row: Row) -> str:
    """The command that computes a row, without the folders of a machine."""
    before = f' --before={setting.before.name}' if row.learn and setting.before else ''
    study = Path(setting.study).stem
    return (
        f'python -m study nats {Path(setting.path).name} --text={setting.text.name}{before} '
        f'--study={study} --rows={row.name} --block={setting.block} --batch={setting.batch} '
        f'--out=results/{study}'
    )


def left(todo: Sequence[Row], done: Sequence[Result]) -> str:
    """The estimated time of some rows, from the median time a token of those done."""
    seconds = statistics.median(d['seconds'] / d['tokens'] for d in done)
    return duration(seconds * sum(row.tokens for row in todo))


def finished(row: Row, setting: Setting, out: Path) -> Result | None:
    """The result of a row, or None if it is not finished.

    Raises:
      ValueError: if it was made with another setting.
    """
    path = out / f'{row.name}.json'
    if not path.is_file():
        return None
    result = json.loads(path.read_text())
    want = json.loads(json.dumps(described(row, setting)))
    if clash := [k for k in want if result.get(k) != want[k]]:
        raise ValueError(
            f'{path} was made with other settings: '
            + ', '.join(f'{k}={result.get(k)!r} (now {want[k]!r})' for k in clash)
            + '; move it away or give another --out'
        )
    return result


def described(row: Row, setting: Setting) -> Result:
    """The settings of a row, as its result has them."""
    before = setting.before.name if row.learn and setting.before else ''
    return row._asdict() | {
        'model': Path(setting.path).name,
        'weights': digest(setting.path),
        'text': setting.text.name,
        'block': setting.block,
        'batch': setting.batch,
        'learned_from': before,
    }


def record(row: Row, setting: Setting, out: Path) -> Result:
    """The result of a row: its settings, bits, nats, and nats lost with a standard error.

    Raises:
      ValueError: if `NONE` is not finished, or has less blocks.
    """
    start = time.perf_counter()
    model = opened(setting.path, setting.tokenizer, row.cuts)
    blocks = blocks_of(model, setting.text, setting.block, row.tokens, setting.batch)
    channels, _ = _sides(row.fwd, model, blocks)
    cuts = cuts_with(model, channels, _sides(row.learn or 'raw', model, blocks)[1])
    state = learned(row.cuts, row.learn, row.learned_tokens, setting) if row.learn else None
    parts, sizes = [], []
    for ctx, x in arrivals(model, blocks, setting, row.cuts, row.name):
        state = initial(cuts, x) if state is None else state
        y, state = through(model, cuts, state, x, ctx)
        arrived = {UNCOMPRESSED: activations(model, x, ctx)[-1], row.name: y}
        parts.append(judged(model, arrived, ctx)[row.name])
        sizes = [bits(c, like(x)) / x.size for c in channels]
    found = joined(parts)
    nats = found.nats
    uncompressed = nats if row.name == NONE else _uncompressed(out, len(nats))
    score = score_of(float(np.mean(sizes)), found, uncompressed)
    return {
        **described(row, setting), 'blocks': len(nats), **score.record(), 'bits_by_cut': sizes,
        'seconds': round(time.perf_counter() - start, 1),
        'nats_by_block': [round(float(v), 6) for v in nats],
    }  # fmt: skip


def _sides(text: str, model: LanguageModel, blocks: Blocks) -> tuple[list[Channel], Channel | None]:
    """A forward channel per boundary, and the backward one behind ``|``, if any."""
    numbers = {'examples': len(blocks), 'vocabulary': model.tokenizer.size}
    forward, _, backward = text.partition('|')
    rules = [parse(part.strip(), numbers) for part in forward.split(';')]
    each = rules * (len(model.stages) - 1) if len(rules) == 1 else rules
    return each, parse(backward.strip(), numbers) if backward else None


def _uncompressed(out: Path, count: int) -> Float[np.ndarray, ' N']:
    path = out / f'{NONE}.json'
    nats = json.loads(path.read_text())['nats_by_block'] if path.is_file() else []
    if len(nats) < count:
        raise ValueError(
            f'{path} has {len(nats)} blocks, and {count} are compared; run {NONE} first'
        )
    return np.array(nats[:count])


@functools.lru_cache(1)
def opened(path: str, tokenizer: str, cuts: tuple[int, ...]) -> LanguageModel:
    """A checkpoint in stages; the last one is kept for the next row."""
    return open_language_model(path, 0, cuts, tokenizer)


def arrivals(
    model: LanguageModel, blocks: Blocks, setting: Setting, cuts: tuple[int, ...], name: str
) -> Iterator[tuple[Ctx, Array]]:
    """What arrives at the first boundary, batch by batch, kept as files by their tokens.

    A loop over them is shown by ``name``.
    """
    folder, size = setting.work / f'{digest(setting.path)}-{cuts[0]}', setting.batch
    folder.mkdir(parents=True, exist_ok=True)
    start = before_first(model)
    for i in tracked(range(0, len(blocks), size), name):
        tokens = jnp.asarray(blocks[i : i + size], jnp.int32)
        file = folder / f'{hashlib.sha256(np.asarray(tokens).tobytes()).hexdigest()[:16]}.npy'
        if not file.is_file():
            with replacing(file) as part, part.open('wb') as stream:
                np.save(stream, np.asarray(start(tokens)))
        yield context(i, tokens), jnp.asarray(np.load(file))


@functools.lru_cache(2)
def learned(cuts: tuple[int, ...], text: str, tokens: int, setting: Setting) -> FeedbackState:
    """The states of channels after the text to learn from.

    Raises:
      ValueError: if there is no such text.
    """
    model = opened(setting.path, setting.tokenizer, cuts)
    assert setting.before is not None, 'see check'
    blocks = blocks_of(model, setting.before, setting.block, tokens, setting.batch)
    forward, backward = _sides(text, model, blocks)
    boundaries = cuts_with(model, forward, backward)
    forward_only = lambda states, x, ctx: through(model, boundaries, states, x, ctx)[1]
    step = lesson(model, boundaries) if backward else forward_only
    states = None
    for ctx, x in arrivals(model, blocks, setting, cuts, 'text to learn from'):
        states = step(initial(boundaries, x) if states is None else states, x, ctx)
    assert states is not None, 'there are blocks'
    return states


def lesson(model: LanguageModel, cuts: Sequence[Boundary]) -> Lesson:
    """The states of boundaries after a batch, whose gradients return through them."""

    @jax.jit
    def both_ways(variables: Variables, states: FeedbackState, x: Array, ctx: Ctx) -> FeedbackState:
        here = model._replace(variables=variables)

        def loss(_: Array, states: FeedbackState) -> tuple[Array, tuple[FeedbackState, None]]:
            y, after = through(here, cuts, states, x, ctx)
            return jnp.sum(last_nats(here, y, ctx)), (after, None)

        return value_and_grad(loss)(jnp.zeros(()), states)[2]

    return functools.partial(both_ways, model.variables)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog='python -m study nats', description=(__doc__ or '').partition('\n\n')[2]
    )
    parser.add_argument('model', help='a folder, a GGUF file, a name of the hub, or a workdir')
    parser.add_argument('--text', type=Path, required=True, help='a file of plain text')
    parser.add_argument('--study', default='pretrained_codecs', help='a file with get_rows()')
    parser.add_argument('--rows', default='', help='names of rows, with commas; default all')
    parser.add_argument('--before', type=Path, help='a text from which rules learn before --text')
    parser.add_argument('--tokenizer', default='', help="in place of the checkpoint's own")
    parser.add_argument('--block', type=int, default=256, help='tokens of a block')
    parser.add_argument('--batch', type=int, default=4, help='blocks of a message')
    parser.add_argument('--out', type=Path, required=True, help='folder of the results')
    parser.add_argument(
        '--work', type=Path, default=Path('runs/nats'),
        help='folder of what stands before the first boundary, which is computed once',
    )  # fmt: skip
    args = parser.parse_args(argv)
    try:
        for flag, file in ('--text', args.text), ('--before', args.before):
            if file:
                readable(flag, file)
        check_writable(args.out, '--out')
        rows = rows_of(args.study, [n for n in args.rows.split(',') if n])
        setting = Setting(
            args.study, args.model, args.tokenizer, args.text, args.before, args.block,
            args.batch, args.work,
        )  # fmt: skip
        check(rows, setting, args.out)
        run(rows, setting, args.out)
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f'study nats: {error}')
