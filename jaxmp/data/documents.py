"""Documents of text files: a ``.txt`` file is one, and so is each line of a ``.jsonl`` file.

Files are read in pieces of 256 KiB, so that none has to fit into memory. The place after each piece
is known, so that reading can go on there.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

from jaxmp.data.chat import Messages
from jaxmp.data.content import content_of, decoded

PIECE = 2**18  # bytes that are read, and tokenised, at once
_ENDS = (
    re.compile(rb'\n(?=\S)'),
    re.compile(rb'(?<=\S)(?= \S)'),
    re.compile(rb'.(?=[^\x80-\xbf\n])', re.S),  # nor within the line end of Windows
)


class Document(NamedTuple):
    """A text or a conversation, or a part of a text.

    Attributes:
      content: the text, or chat messages.
      where: where it stands, for messages about it.
      first: whether it is the beginning of a document.
      last: whether it is the end of one.
    """

    content: str | Messages
    where: str
    first: bool = True
    last: bool = True


Place = tuple[int, int]  # the number of a file, or of a row's group, and the position in it
Pieces = Iterator[tuple[list[Document], Place]]


class Source(NamedTuple):
    """Documents in their order.

    Attributes:
      name: for messages.
      read: ``place -> (documents, the place after them), ...``: those from a place on.
      size: of all that is read, in bytes or rows.
      before: ``place -> the size of what is before it``.
      identity: a text that differs where the documents do.
    """

    name: str
    read: Callable[[Place], Pieces]
    size: int
    before: Callable[[Place], int]
    identity: str


class Span(NamedTuple):
    """The bytes of a file from ``start`` to before ``stop``, and a digest of all of the file."""

    path: Path
    start: int
    stop: int
    digest: str


def matching(pattern: str, folder: str = '', key: str = 'data.files') -> list[Path]:
    """The text files of a glob, sorted; ``key`` of the configuration has it.

    Raises:
      FileNotFoundError: if there are none.
      ValueError: if one is neither ``.txt`` nor ``.jsonl``, or all are empty.
    """
    root = Path(folder).expanduser() / Path(pattern).expanduser()
    paths = sorted(Path(p) for p in glob.glob(str(root), recursive=True) if Path(p).is_file())
    if not paths:
        raise FileNotFoundError(
            f'config.{key}={pattern!r} matches no file in {Path(folder or ".").absolute()}; give '
            "the path of a .txt or .jsonl file, or a pattern in quotes such as 'notes/*.txt'"
        )
    for path in paths:
        if path.suffix not in ('.txt', '.jsonl'):
            raise ValueError(
                f'config.{key}={pattern!r} matches {path}, and text is read from .txt and .jsonl '
                'files; give a narrower pattern'
            )
    if not any(path.stat().st_size for path in paths):
        raise ValueError(f'config.{key}={pattern!r}: all of its {len(paths)} files are empty')
    return paths


def divided(path: Path, share: float) -> tuple[Span, Span]:
    """A file but for its end, and its end: about ``share`` of its bytes, from a line's start on."""
    size = path.stat().st_size
    with path.open('rb') as file:
        border = _line(file, size - int(size * share), size, path.suffix == '.jsonl')
    whole = all_of(path)
    return whole._replace(stop=border), whole._replace(start=border)


def all_of(path: Path) -> Span:
    """A whole file."""
    return Span(path, 0, path.stat().st_size, digest(path))


def digest(path: Path) -> str:
    """Of the content of a file, which is read again if size or time have changed."""
    about = path.stat()
    return _digest(path, about.st_size, about.st_mtime_ns)


@functools.cache  # of an own model the data set is made again to count its stages
def _digest(path: Path, size: int, changed: int) -> str:
    with path.open('rb') as file:
        return hashlib.file_digest(file, 'sha256').hexdigest()


def load(
    pattern: str, tests: str, field: str, share: float, folder: str = ''
) -> tuple[Source, Source]:
    """The documents of globs of files for training and for the test.

    What is tested is not trained on. Without ``tests`` it is the last ``share`` of each file.

    Raises:
      FileNotFoundError: if a glob matches no file.
      ValueError: if a file is no text, or nothing is left for the training or the test.
    """
    paths = matching(pattern, folder)
    if tests:
        test = [all_of(p) for p in matching(tests, folder, 'data.test_files')]
        digests = {span.digest for span in test}
        train = [span for span in map(all_of, paths) if span.digest not in digests]
    else:
        train, test = (list(part) for part in zip(*(divided(p, share) for p in paths), strict=True))
    if not train:
        raise ValueError(
            f'config.data.files={pattern!r} matches only files of config.data.test_files='
            f'{tests!r}; give files that are not tested on'
        )
    name = f'data.files={pattern}'
    tested = f'data.test_files={tests}' if tests else name
    return of_files(name, train, field), of_files(tested, test, field)


def of_files(name: str, spans: Sequence[Span], field: str) -> Source:
    """The documents of spans of ``.txt`` and ``.jsonl`` files, which begin lines."""
    sizes = [s.stop - s.start for s in spans]
    parts = [f'{s.path.suffix} {s.start} {s.stop} {s.digest}' for s in spans]

    def read(place: Place) -> Pieces:
        number, position = place
        for i in range(number, len(spans)):
            kind = _lines if spans[i].path.suffix == '.jsonl' else _text
            for documents, after in kind(spans[i], position, field):
                yield documents, (i, after)
            position = 0

    before = lambda place: sum(sizes[: place[0]]) + place[1]
    return Source(name, read, sum(sizes), before, f'{field} {parts}')


def _text(span: Span, position: int, field: str) -> Iterator[tuple[list[Document], int]]:
    """The pieces of a file that is one document, and the position after each."""
    size = span.path.stat().st_size
    with span.path.open('rb') as file:
        lines = _count_lines(file, span.start + position)
        for start, stop in _cuts(file, span, position, whole_lines=False):
            file.seek(start)
            text = decoded(part := file.read(stop - start), span.path, lines)
            lines += part.count(b'\n')
            yield [Document(text, str(span.path), start == 0, stop == size)], stop - span.start


def _lines(span: Span, position: int, field: str) -> Iterator[tuple[list[Document], int]]:
    """The documents of some lines of a ``.jsonl`` file, and the position after them."""
    with span.path.open('rb') as file:
        number = _count_lines(file, span.start + position)
        for start, stop in _cuts(file, span, position, whole_lines=True):
            file.seek(start)
            text = decoded(part := file.read(stop - start), span.path, number)
            lines = enumerate(text.replace('\r', '\n').split('\n'), number + 1)
            number += part.count(b'\n')
            documents = [
                _document(line, f'{span.path}, line {i}', field)
                for i, line in lines
                if line.strip()
            ]
            yield documents, stop - span.start


def _document(line: str, where: str, field: str) -> Document:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f'{where} is not JSON ({error}); mend or remove the line') from error
    if not isinstance(entry, dict) or field not in entry:
        fields = ', '.join(entry) if isinstance(entry, dict) else f'a {type(entry).__name__}'
        raise ValueError(
            f'{where} has no field {field!r}, but {fields}; name it: config.data.field'
        )
    return Document(content_of(entry[field], where, field), where)


def _cuts(
    file: BinaryIO, span: Span, position: int, whole_lines: bool
) -> Iterator[tuple[int, int]]:
    """Starts and stops of pieces of a span, which begin lines, from a position in it on."""
    start = span.start + position
    while start < span.stop:
        stop = min(_line(file, start + PIECE, span.stop, whole_lines), span.stop)
        yield start, stop
        start = stop


def _line(file: BinaryIO, position: int, stop: int, whole_lines: bool) -> int:
    """The start of a line, at ``position`` or after it and at most at ``stop``.

    Without ``whole_lines``, after a line end that no tokenizer joins with what follows it; where
    lines are very long, before a word, or at a character.
    """
    if position <= 0 or position >= stop:
        return max(0, min(position, stop))
    file.seek(position - 1)
    if whole_lines:
        file.readline()
        return min(file.tell(), stop)
    window = file.read(PIECE // 4)
    match = next(filter(None, (end.search(window) for end in _ENDS)), None)
    return min(position - 1 + (match.end() if match else len(window)), stop)


def _count_lines(file: BinaryIO, stop: int) -> int:
    """The number of line ends before a position."""
    file.seek(0)
    count, left = 0, stop
    while left and (part := file.read(min(left, PIECE))):
        count, left = count + part.count(b'\n'), left - len(part)
    return count
