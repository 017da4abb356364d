"""Text as blocks of tokens: the cutting into blocks, an embedded book, own documents in a cache.

An example is a block of ``length`` tokens, and its id is its number. Targets are the same tokens,
which the loss shifts by one: a block gives ``length - 1`` predictions, as in Hugging Face's
fine-tuning script. That script tokenises the text row by row, joins the tokens of each 1,000 rows,
cuts them into blocks and drops the rest. `blocks` does the same if ``rows=1000``.

The embedded text is Alice's Adventures in Wonderland (``alice.NOTICE``): chapters I to X are for
training, XI and XII for validation.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxmp.data import Dataset, Split, readable, wikitext
from jaxmp.data.documents import Source
from jaxmp.data.packed import FORMAT, alone, packed
from jaxmp.data.tokenizer import Tokenizer, learned_size, tokenizer_of
from jaxmp.data.types import Corpus

_LAST_CHAPTERS = 'CHAPTER XI\n'
CACHE = f'{os.environ.get("XDG_CACHE_HOME") or "~/.cache"}/jaxmp/text'


def load(
    name: str,
    length: int,
    tokenizer: str = 'bytes',
    data_dir: str | None = None,
    download: bool = False,
) -> Dataset:
    """Reads a text into memory, tokenises it and cuts it into blocks.

    Args:
      name: ``'alice'`` (embedded in the package), ``'wikitext-2'`` or ``'wikitext-2-raw'``.
      length: number of tokens per block, T.
      tokenizer: name of the tokeniser, as for `tokenizer_of`; it is trained on the training text.
      data_dir: folder of the text; not needed for ``'alice'``.
      download: download the text into ``data_dir`` if it is not there.

    Returns:
      The data set. ``x`` and ``y`` of a split are the same int32 array ``(N, T)``, ``classes`` is
      the size of the vocabulary, ``mean`` and ``std`` are empty.

    Raises:
      ValueError: if the name is unknown, or the text is shorter than one block.
      FileNotFoundError: if the files of the text or the tokeniser do not exist.

    >>> load('alice', length=128).train.x.shape
    (982, 128)
    """
    if name not in _CORPORA:
        raise ValueError(f'no text {name!r}; allowed are {", ".join(sorted(_CORPORA))}')
    with readable(name, data_dir):
        corpus = _CORPORA[name](data_dir, download)
        chosen = tokenizer_of(tokenizer, corpus.train)
    splits = []
    for part, rows in (('train', corpus.train), ('test', corpus.test)):
        x = blocks(chosen.encode(rows), length, corpus.rows, f'{name}, {part}')
        splits.append(Split(x, x))
    return Dataset(name, *splits, classes=chosen.size, mean=(), std=(), tokenizer=chosen)


def from_sources(
    sources: tuple[Source, Source], length: int, tokenizer: str = 'bytes', cache: str = CACHE
) -> Dataset:
    """Documents as a data set whose blocks are in files, which are written once.

    In the folder ``cache`` they have one that is named for documents, tokeniser and length.

    Returns:
      The data set. ``x`` of a split is an int32 array ``(N, T)`` that is read where it is indexed,
      and so is ``y``: the same array, or for chat messages one with -1 where there is no loss.
    """
    chosen = None if learned_size(tokenizer) else tokenizer_of(tokenizer)
    identity = chosen.identity if chosen else tokenizer
    about = json.dumps([FORMAT, *(s.identity for s in sources), identity, length])
    digest = hashlib.blake2b(about.encode(), digest_size=16).hexdigest()
    folder = Path(cache).expanduser() / digest
    chosen = chosen or _learned(folder, tokenizer, sources[0])
    train, test = packed(folder, sources, chosen, length)
    return Dataset(
        sources[0].name, train, test, classes=chosen.size, mean=(), std=(), tokenizer=chosen
    )


def _learned(folder: Path, name: str, source: Source) -> Tokenizer:
    """The tokeniser that is learned from a source, once."""
    files = folder / 'tokenizer'
    with alone(folder):
        if not files.is_dir():
            pieces = (documents for documents, _ in source.read((0, 0)))
            texts = (d.content for piece in pieces for d in piece if isinstance(d.content, str))
            tokenizer, new = tokenizer_of(name, texts), folder / 'new'
            new.mkdir(exist_ok=True)
            tokenizer.save(new)
            new.rename(files)
    return tokenizer_of(str(files))


def alice(data_dir: str | None = None, download: bool = False) -> Corpus:
    """The embedded text, whatever is asked: 10 chapters for training, 2 for validation.

    >>> len(alice().train[0]), len(alice().test[0])
    (125802, 22679)
    """
    text = Path(__file__).with_name('alice.txt').read_text(encoding='ascii')
    border = text.rindex('\n', 0, text.index(_LAST_CHAPTERS)) + 1
    return Corpus('alice', [text[:border]], [text[border:]])


def blocks(
    tokens: Sequence[np.ndarray], length: int, rows: int | None = None, what: str = 'the text'
) -> np.ndarray:
    """Joins all rows of tokens, or so many at a time; cuts them into blocks, and drops the rest.

    Raises:
      ValueError: if there are fewer tokens than one block.

    >>> blocks([np.arange(4), np.arange(4, 7)], length=3).tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> blocks([np.arange(4), np.arange(4, 7)], length=3, rows=1).tolist()
    [[0, 1, 2], [4, 5, 6]]
    """
    if length < 2:
        raise ValueError(f'blocks of {length} tokens have no prediction; give 2 or more')
    step = rows or max(len(tokens), 1)
    parts, longest = [], 0
    for start in range(0, len(tokens), step):
        joined = np.concatenate(tokens[start : start + step]).astype(np.int32)
        longest = max(longest, len(joined))
        parts.append(joined[: len(joined) // length * length].reshape(-1, length))
    if not any(map(len, parts)):
        at_a_time = f' in every {rows} rows' if rows else ''
        raise ValueError(
            f'{what} has {longest} tokens{at_a_time}, less than one block of {length}; shorten '
            'the blocks (the sequence length) or give a longer text'
        )
    return np.concatenate(parts)


_CORPORA = {'alice': alice, 'wikitext-2': wikitext.tokens, 'wikitext-2-raw': wikitext.raw}
