"""Text as blocks of tokens: tokenisers, the cutting into blocks, and an embedded book.

An example is a block of ``length`` tokens, and its id is its number. Targets are the same tokens,
which the loss shifts by one: a block gives ``length - 1`` predictions, as in Hugging Face's
fine-tuning script. That script tokenises the text row by row, joins the tokens of each 1,000 rows,
cuts them into blocks and drops the rest. `blocks` does the same if ``rows=1000``.

The embedded text is Alice's Adventures in Wonderland (``alice.NOTICE``): chapters I to X are for
training, XI and XII for validation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data import Dataset, Split, readable

_LAST_CHAPTERS = 'CHAPTER XI\n'
_END = '<|endoftext|>'


class Tokenizer(NamedTuple):
    """A tokeniser: a map from text to token ids and back.

    Attributes:
      size: number of tokens; ids are 0 to ``size - 1``.
      encode: maps a list of texts to a list of int32 arrays of ids, one per text.
      decode: maps ids to a text.
      save: writes the tokeniser's files to a folder.
    """

    size: int
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    save: Callable[[Path], object] = lambda folder: None


class Corpus(NamedTuple):
    """A text before it is cut into blocks.

    Attributes:
      name: the name that `load` takes.
      train: the rows for training.
      test: the rows for validation.
      rows: number of rows that are joined before they are cut into blocks; None means all.
    """

    name: str
    train: Sequence[str]
    test: Sequence[str]
    rows: int | None = None


def _corpora() -> dict[str, Callable[[str | None, bool], Corpus]]:
    from jaxmp.data import wikitext  # it imports the types above

    return {'alice': alice, 'wikitext-2': wikitext.tokens, 'wikitext-2-raw': wikitext.raw}


def load(
    name: str,
    length: int,
    tokenizer: str = 'bytes',
    data_dir: str | None = None,
    download: bool = False,
) -> tuple[Dataset, Tokenizer]:
    """Reads a text, tokenises it and cuts it into blocks.

    Args:
      name: ``'alice'`` (embedded in the package), ``'wikitext-2'`` or ``'wikitext-2-raw'``.
      length: number of tokens per block, T.
      tokenizer: name of the tokeniser, as for `tokenizer_of`; it is trained on the training text.
      data_dir: folder of the text; not needed for ``'alice'``.
      download: download the text into ``data_dir`` if it is not there.

    Returns:
      The data set and its tokeniser. ``x`` and ``y`` of a split are the same int32 array
      ``(N, T)``, ``classes`` is the size of the vocabulary, ``mean`` and ``std`` are empty.

    Raises:
      ValueError: if the name is unknown, or the text is shorter than one block.
      FileNotFoundError: if the files of the text or the tokeniser do not exist.

    >>> load('alice', length=128)[0].train.x.shape
    (982, 128)
    """
    corpora = _corpora()
    if name not in corpora:
        raise ValueError(f'no text {name!r}; allowed are {", ".join(sorted(corpora))}')
    with readable(name, data_dir):
        corpus = corpora[name](data_dir, download)
        chosen = tokenizer_of(tokenizer, corpus.train)
    splits = []
    for part, rows in (('train', corpus.train), ('test', corpus.test)):
        x = blocks(chosen.encode(rows), length, corpus.rows, f'{name}, {part}')
        splits.append(Split(x, x))
    return Dataset(name, *splits, classes=chosen.size, mean=(), std=()), chosen


def alice(data_dir: str | None = None, download: bool = False) -> Corpus:
    """The embedded text: 10 chapters for training, 2 for validation, one row per chapter.

    Args:
      data_dir: ignored, because the text is part of the package.
      download: ignored.

    >>> len(alice().train[0]), len(alice().test[0])
    (125802, 22679)
    """
    text = Path(__file__).with_name('alice.txt').read_text(encoding='ascii')
    at = text.rindex('\n', 0, text.index(_LAST_CHAPTERS)) + 1
    return Corpus('alice', [text[:at]], [text[at:]])


def blocks(
    tokens: Sequence[np.ndarray], length: int, rows: int | None = None, what: str = 'the text'
) -> np.ndarray:
    """Joins rows of tokens, cuts them into blocks and drops the rest.

    Args:
      tokens: the ids of each row.
      length: number of tokens per block, T.
      rows: number of rows that are joined at a time; None joins all.
      what: name of the text in an error message.

    Returns:
      int32 ``(N, T)``.

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
    found, longest = [], 0
    for start in range(0, len(tokens), step):
        joined = np.concatenate(tokens[start : start + step]).astype(np.int32)
        longest = max(longest, len(joined))
        found.append(joined[: len(joined) // length * length].reshape(-1, length))
    if not any(map(len, found)):
        at_a_time = f' in every {rows} rows' if rows else ''
        raise ValueError(
            f'{what} has {longest} tokens{at_a_time}, less than one block of {length}; shorten '
            'the blocks (the sequence length) or give a longer text'
        )
    return np.concatenate(found)


def tokenizer_of(name: str, rows: Sequence[str] = ()) -> Tokenizer:
    """The tokeniser of a given name.

    Args:
      name: ``'bytes'``; ``'bpe-4096'`` to train one of 4,096 tokens; or a directory for `bpe`.
      rows: the training text.

    Raises:
      ValueError: if there is no training text, or the number of tokens is less than 257.
      FileNotFoundError: if the directory lacks a file, as in `bpe`.
    """
    if name == 'bytes':
        return byte_level()
    kind, _, size = name.partition('-')
    return learn(rows, int(size)) if kind == 'bpe' and size.isdigit() else bpe(name)


def learn(rows: Sequence[str], size: int) -> Tokenizer:
    """A byte-level BPE of GPT-2's kind with ``size`` tokens, trained deterministically on a text.

    Raises:
      ValueError: if ``rows`` is empty or ``size`` below 257 (the bytes and the end of a text).

    >>> learn(['the cat, the hat, the mat'], 261).decode([260, 257])
    ' theat'

    References:
      Neural Machine Translation of Rare Words with Subword Units, arXiv 1508.07909.
    """
    from tokenizers import ByteLevelBPETokenizer

    if not rows or size < 257:
        raise ValueError(
            f'a tokeniser of {size} tokens from {len(rows)} rows of text; give a text and at least '
            "257 tokens, or the folder of a tokeniser, or tokenizer='bytes'"
        )
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(rows, size, show_progress=False, special_tokens=[_END])
    return _wrapped(made)


def byte_level() -> Tokenizer:
    """The tokeniser of UTF-8 bytes: 256 tokens, no files.

    >>> t = byte_level()
    >>> t.size, t.decode(t.encode(['Alice'])[0])
    (256, 'Alice')
    """
    encode = lambda texts: [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]
    return Tokenizer(256, encode, lambda ids: bytes(map(int, ids)).decode(errors='replace'))


def bpe(directory: str) -> Tokenizer:
    """GPT-2's byte-level BPE from local files.

    Args:
      directory: folder with ``vocab.json`` and ``merges.txt``, as published with GPT-2's weights,
        or with the ``tokenizer.json`` of any tokenizer that transformers saved.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if the files are damaged or do not belong together.

    References:
      Neural Machine Translation of Rare Words with Subword Units, arXiv 1508.07909.
    """
    root = Path(directory).expanduser()
    files = [root / 'vocab.json', root / 'merges.txt']
    if (root / 'tokenizer.json').is_file() and not files[0].is_file():
        return pretrained(root)
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise FileNotFoundError(
            f'no {" and no ".join(missing)} in {root}; give a directory with the two files of '
            "GPT-2's tokeniser, or tokenizer='bytes', which needs none"
        )
    return _bpe(root, _vocabulary(files[0]), files[1])


def pretrained(root: Path) -> Tokenizer:
    """Any tokenizer that transformers saved: a folder with ``tokenizer.json``.

    Raises:
      ValueError: if transformers cannot read it.
    """
    os.environ.setdefault('TRANSFORMERS_NO_ADVISORY_WARNINGS', '1')  # about a missing torch
    from transformers import AutoTokenizer

    try:
        auto: Any = AutoTokenizer.from_pretrained(str(root), local_files_only=True)
    except Exception as error:  # transformers raises almost any exception
        raise ValueError(
            f'{root} is not a tokenizer that transformers can read ({error}); download it again'
        ) from error
    tokens = lambda texts: auto(list(texts), add_special_tokens=False, verbose=False)['input_ids']
    encode = lambda texts: [np.array(ids, np.int32) for ids in tokens(texts)]
    decode = lambda ids: auto.decode(list(map(int, ids)))
    return Tokenizer(len(auto), encode, decode, lambda to: auto.save_pretrained(str(to)))


def _bpe(root: Path, vocabulary: dict[str, int], merges: Path) -> Tokenizer:
    from tokenizers import ByteLevelBPETokenizer

    try:
        lines = merges.read_text(encoding='utf-8').splitlines()
        pairs = [
            tuple(line.split(' ')) for line in lines if line and not line.startswith('#version')
        ]
        made = ByteLevelBPETokenizer(vocabulary, pairs)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f'{merges} does not belong to the vocab.json beside it ({error}); download both again'
        ) from error
    if _END in vocabulary:
        made.add_special_tokens([_END])
    if made.get_vocab_size() != len(vocabulary):
        raise ValueError(
            f'the tokeniser in {root} has {made.get_vocab_size()} tokens and its vocab.json '
            f'{len(vocabulary)}; download both files again'
        )
    return _wrapped(made)


def _wrapped(made: Any) -> Tokenizer:
    """A `Tokenizer` from one of the tokenizers library."""
    encode = lambda texts: [np.array(e.ids, np.int32) for e in made.encode_batch(list(texts))]
    decode = lambda ids: made.decode(list(map(int, ids)), False)
    return Tokenizer(made.get_vocab_size(), encode, decode, lambda to: made.save_model(str(to)))


def _vocabulary(file: Path) -> dict[str, int]:
    try:
        found = json.loads(file.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{file} is not JSON ({error}); download it again') from error
    ids = [i for i in found.values() if type(i) is int] if isinstance(found, dict) else []
    if len(ids) != len(found) or sorted(ids) != list(range(len(ids))):
        raise ValueError(f'{file} does not number its tokens from 0 without gaps; fetch it again')
    return found
