"""What a user reads in a terminal or a pipe: the typed command, 'did you mean', tables that fit."""

from __future__ import annotations

import difflib
import functools
import hashlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from rich.table import Table

SAID = 'JAXMP_SAID'  # names the folder of a launch with a file per line that a process has said
PIPE = 10_000  # columns where the output is no terminal: nothing wraps
FOLDED = 20  # columns that a cell which may fold needs at least


def command(name: str = '') -> str:
    """What was typed: a script such as ``train.py``, or ``jaxmp NAME``, perhaps by `python -m`."""
    script = Path(sys.argv[0]).name
    if script.endswith('.py') and script != '__main__.py':
        return script
    return ' '.join(['jaxmp', *([name] if name else sys.argv[1:2])])


def first(line: str) -> bool:
    """Whether no other process of the launch that started this one, if one did, has said a line."""
    mark = hashlib.blake2b(line.encode(), digest_size=16).hexdigest()
    try:
        Path(os.environ.get(SAID, os.devnull), mark).touch(exist_ok=False)
    except OSError as error:  # no launch, or one that has ended
        return not isinstance(error, FileExistsError)
    return True


def end(name: str, line: str) -> NoReturn:
    """Ends a command with a line behind its name, which one process of a launch says for all."""
    sys.exit(f'{name}: {line}' if first(line) else 1)


def hint(word: str, words: Iterable[str]) -> str:
    """The question behind a misspelt word; empty where none of ``words`` is near."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f' (did you mean {near[0]}?)' if near else ''


def near_file(path: str) -> str:
    """The question behind a path that is not there, by names that are; else empty."""
    place = Path(path).expanduser()
    near = None if place.exists() else _near(place)
    return f' (did you mean {near}?)' if near else ''


def _near(place: Path) -> Path | None:
    """The path if it exists, or one of which each name that is not there is nearest."""
    if place.exists():
        return place
    parent = _near(place.parent) if place.name else None
    names = {p.name: p for p in parent.glob('*')} if parent else {}
    near = difflib.get_close_matches(place.name, names, n=1)
    return names[near[0]] if near else None


def named_as_on_hub(text: str) -> bool:
    """Whether a text that is no file here is ``owner/name`` of the hub, not a misspelt path."""
    parts = re.fullmatch(r'([\w-][\w.-]*)/[\w-][\w.-]*', text)
    if not parts or text.endswith(('.gguf', '.safetensors')):
        return False
    near = _near(Path(text))  # a path of such a name is not to find a stranger's repository
    return not Path(parts[1]).is_dir() and not (near and near.name == Path(text).name)


def show(*parts: Table | str) -> None:
    """Prints tables and lines to standard output; a pipe gets each line whole.

    Of a table that is wider than the terminal each row is a paragraph with its heads.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else PIPE)
    say = functools.partial(console.print, markup=False, highlight=False)
    natural = console.options.update(width=PIPE)
    for part in parts:
        if isinstance(part, str):
            say(part)
            continue
        title, caption, part.title, part.caption = part.title, part.caption, None, None
        cells = [[str(cell) for cell in column.cells] for column in part.columns]
        folding = (
            c for c, column in zip(cells, part.columns, strict=True) if column.overflow == 'fold'
        )
        spared = sum(max(0, max(map(len, c), default=0) - FOLDED) for c in folding)
        rows: list[Table | str] = [part]
        if console.measure(part, options=natural).maximum - spared > console.width:
            heads = [str(column.header) for column in part.columns]
            pairs = (zip(heads, row, strict=True) for row in zip(*cells, strict=True))
            lines = (', '.join(f'{h} {c}'.strip() for h, c in row if c) for row in pairs)
            rows = [textwrap.fill(text, console.width, subsequent_indent='  ') for text in lines]
        for line in filter(None, (title, *rows, caption)):
            say(line)
