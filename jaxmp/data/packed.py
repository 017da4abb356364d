"""Documents as blocks of tokens in a file that is mapped into memory.

The file of a split has a row per example: ``length`` int32 tokens, and for chat messages as many
targets, which are the tokens again, or -1 where there is no loss. It is written once, piece by
piece, under another name, beside a note of the place of the next piece. A process that is killed
leaves both, and the next one goes on from there. Nothing but a piece is in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from jaxmp.data import NO_LOSS, Split
from jaxmp.data.chat import Messages, answers
from jaxmp.data.documents import Document, Place, Source
from jaxmp.data.tokenizer import Tokenizer

FORMAT = 2  # of the files; another one is another entry of the cache
_SECONDS = 5.0  # between two lines about progress


class Note(NamedTuple):
    """What is in an unfinished file, and where its source is to be read on."""

    place: Place
    rows: int
    rest: tuple[tuple[int, ...], ...]  # tokens (and targets) after the last whole block


def tokens_of(documents: Sequence[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Tokens and targets of documents, int32 ``(2, n)``; a target is the token, or `NO_LOSS`.

    The targets of chat messages are their answers. A text is given the tokenizer's tokens for a
    beginning and an end; a chat template has its own.

    Raises:
      ValueError: if there are chat messages, and the tokenizer has no template.
    """
    texts = [d for d in documents if isinstance(d.content, str)]
    chats = [(d.content, d.where) for d in documents if not isinstance(d.content, str)]
    encoded = iter(tokenizer.encode([str(d.content) for d in texts]) if texts else ())
    talks = iter(_conversations(chats, tokenizer) if chats else ())
    parts = []
    for d in documents:
        if isinstance(d.content, str):
            begin, end = tokenizer.begin * d.first, tokenizer.end * d.last
            ids = np.concatenate([begin, next(encoded), end], dtype=np.int32, casting='unsafe')
            parts.append(np.stack([ids, ids]))
        else:
            parts.append(next(talks))
    return np.concatenate([np.zeros((2, 0), np.int32), *parts], axis=1)


def _conversations(
    chats: Sequence[tuple[Messages, str]], tokenizer: Tokenizer
) -> Iterator[np.ndarray]:
    template, locate = tokenizer.template, tokenizer.locate
    if template is None or locate is None:
        raise ValueError(
            f'{chats[0][1]} holds chat messages, and the tokenizer has no chat template; give '
            'config.data.tokenizer the folder, or .gguf file, of a model that was trained on chats'
        )
    rendered = []
    for messages, where in chats:
        try:
            rendered.append(answers(template, messages))
        except ValueError as error:
            raise ValueError(f'{where}: {error}') from error
    for (ids, places), (_, spans) in zip(locate([t for t, _ in rendered]), rendered, strict=True):
        learnt = np.zeros(len(ids), bool)
        for start, stop in spans:
            learnt |= (places[:, 0] < stop) & (start < places[:, 1])
        yield np.stack([ids, np.where(learnt, ids, np.int32(NO_LOSS))])


def packed(
    folder: Path,
    sources: tuple[Source, Source],
    tokenizer: Tokenizer,
    length: int,
) -> tuple[Split, Split]:
    """The splits for training and test, whose blocks are in files; those are made if missing.

    A document of the training that equals one of the test is left out. The folder is of these
    sources, this tokenizer and length alone; several processes may share it.

    Raises:
      ValueError: if a source has less than a block.
      OSError: if the files cannot be written.
    """
    files = folder / 'train.blocks', folder / 'test.blocks'
    if not all(f.is_file() for f in files):
        with alone(folder):
            missing = [i for i in (1, 0) if not files[i].is_file()]
            chats = bool(missing) and any(map(_has_chats, sources))
            for i in missing:
                seen = _digests(sources[1]) if i == 0 else frozenset()
                _write(files[i], sources[i], seen, chats, tokenizer, length)
    train, test = (_mapped(f, length) for f in files)
    return train, test


def _mapped(file: Path, length: int) -> Split:
    """The rows of a finished file, which are read from it where they are indexed."""
    about = json.loads(file.with_suffix('.json').read_text())
    columns = about['columns']
    if file.stat().st_size != (wanted := about['blocks'] * columns * length * 4):
        raise ValueError(
            f'{file} has {file.stat().st_size:,} bytes, and {wanted:,} were written; delete its '
            'folder, which is made again'
        )
    a = np.memmap(file, np.int32, 'r').view(np.ndarray).reshape(-1, columns, length)
    x = a[:, 0]
    return Split(x, a[:, 1] if columns == 2 else x)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """A context in which one process at a time writes to a folder, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / 'lock').open('w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _has_chats(source: Source) -> bool:
    first = (d for documents, _ in source.read((0, 0)) for d in documents)
    return not isinstance(next(first, Document('', '')).content, str)


def _digest(d: Document) -> bytes:
    text = d.content if isinstance(d.content, str) else json.dumps(d.content)
    return hashlib.blake2b(text.strip().encode(), digest_size=8).digest()


def _left_out(d: Document, seen: frozenset[bytes]) -> bool:
    """Whether a document is blank, or one of those that were seen."""
    whole = d.first and d.last
    return whole and (d.content == '' or str(d.content).isspace() or _digest(d) in seen)


def _digests(source: Source) -> frozenset[bytes]:
    """Of all whole documents."""
    pieces = (documents for documents, _ in source.read((0, 0)))
    return frozenset(_digest(d) for p in pieces for d in p if d.first and d.last)


def _write(
    file: Path,
    source: Source,
    seen: frozenset[bytes],
    chats: bool,
    tokenizer: Tokenizer,
    length: int,
) -> None:
    """Writes the blocks of a source, from the place on where another process ended."""
    part, noted = file.with_suffix('.part'), file.with_suffix('.note')
    columns = 2 if chats else 1
    note = _resume(part, noted, columns, length)
    shown = Progress(f'{source.name}, {file.stem}', source, note.place)
    left_out = 0
    with part.open('ab') as out:
        rest = np.array(note.rest, np.int32).reshape(2, -1)
        for documents, place in source.read(note.place):
            new = [d for d in documents if not _left_out(d, seen)]
            left_out += len(documents) - len(new)
            if not chats and (odd := [d for d in new if not isinstance(d.content, str)]):
                raise ValueError(
                    f'{odd[0].where} holds chat messages, and the first document is a text; give '
                    'them as two data sets'
                )
            tokens = np.concatenate([rest, tokens_of(new, tokenizer)], axis=1)
            count = tokens.shape[1] // length
            blocks, rest = tokens[:, : count * length], tokens[:, count * length :]
            blocks = blocks.reshape(2, count, length).swapaxes(0, 1)
            # A block without a target would be a step without a gradient.
            blocks = blocks[(blocks[:, 1, 1:] != NO_LOSS).any(1), :columns]
            out.write(np.ascontiguousarray(blocks).data)
            note = Note(place, note.rows + len(blocks), tuple(map(tuple, rest.tolist())))
            _save(out, noted, note)
            shown(place, note.rows * length)
    if not note.rows:
        equal = ' or as one of the test' if seen else ''
        reason = f' (documents left out as blank{equal}: {left_out:,})' if left_out else ''
        raise ValueError(
            f'{source.name}: the {file.stem} text has {len(rest[0]):,} tokens that are in no block '
            f'of {length}, and no block{reason}; shorten config.data.sequence_length, or give a '
            'longer text, config.data.test_files or config.data.test_share'
        )
    file.with_suffix('.json').write_text(json.dumps({'columns': columns, 'blocks': note.rows}))
    part.rename(file)
    noted.unlink()


def _resume(part: Path, noted: Path, columns: int, length: int) -> Note:
    """The note of an unfinished file, which is cut to what the note says."""
    note = Note((0, 0), 0, ((), ()))
    if noted.is_file() and part.is_file():
        place, rows, rest = json.loads(noted.read_text())
        note = Note(tuple(place), rows, rest)
    with part.open('ab') as file:
        file.truncate(note.rows * columns * length * 4)
    return note


def _save(out: IO[bytes], noted: Path, note: Note) -> None:
    """Notes what is on the disk, in one step."""
    out.flush()
    os.fsync(out.fileno())
    new = noted.with_suffix('.new')
    new.write_text(json.dumps(note))
    new.rename(noted)


class Progress:
    """Lines about how much of a source is tokenised, every few seconds."""

    def __init__(self, name: str, source: Source, place: Place) -> None:
        """Begins at a place of the source."""
        self.name, self.source = name, source
        self.done = source.before(place)
        self.start = self.shown = time.monotonic()

    def __call__(self, place: Place, tokens: int) -> None:
        """Tells where reading is."""
        now, before = time.monotonic(), self.source.before(place)
        if now - self.shown < _SECONDS or before <= self.done:
            return
        self.shown = now
        left = (now - self.start) * (self.source.size - before) / (before - self.done)
        share = before / self.source.size
        line = f'{self.name}: {share:.0%} tokenised, {tokens:,} tokens, {left:,.0f} s left'
        print(line, file=sys.stderr, flush=True)
