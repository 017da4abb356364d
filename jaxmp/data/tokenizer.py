"""Tokenizers: bytes, a BPE learned from the text, one in a folder or in a GGUF file.

A folder is one of Hugging Face's layout, with ``tokenizer.json``, or one of GPT-2's, with
``vocab.json`` and ``merges.txt``.
"""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.data import added_tokens
from jaxmp.data.chat import Template
from jaxmp.data.gguf_tokenizer import from_gguf
from jaxmp.data.types import Tokenizer, wrapped
from jaxmp.data.understood import contents

_END = '<|endoftext|>'
_BESIDE = (*added_tokens.FILES, 'chat_template.jinja')
# Of GPT-2's two files, which have no place for what these say.
_OF_GPT2 = {
    'tokenizer_class': ('GPT2Tokenizer', 'GPT2TokenizerFast', None),
    'add_bos_token': (False, None), 'add_eos_token': (False, None),
}  # fmt: skip


def tokenizer_of(name: str, rows: Iterable[str] = ()) -> Tokenizer:
    """The tokeniser of a given name.

    Args:
      name: ``'bytes'``; ``'bpe-4096'`` to train one of 4,096 tokens; a folder with the files of a
        tokeniser; or a ``.gguf`` file.
      rows: the training text.

    Raises:
      ValueError: if there is no training text, the number of tokens is less than 257, or the files
        are damaged.
      FileNotFoundError: if a file is missing.
      ImportError: if a GGUF file is named and the package gguf is not installed.
    """
    if name == 'bytes':
        return byte_level()
    if size := learned_size(name):
        return learn(rows, size)
    if name.endswith('.gguf'):
        return from_gguf(Path(name).expanduser())
    return from_folder(name)


def learned_size(name: str) -> int:
    """N of ``'bpe-N'``, a tokeniser that is learned from the text; 0 of any other.

    >>> learned_size('bpe-4096'), learned_size('bytes')
    (4096, 0)
    """
    size = name.removeprefix('bpe-')
    return int(size) if size != name and size.isdigit() else 0


def byte_level() -> Tokenizer:
    """The tokeniser of UTF-8 bytes: 256 tokens, no files.

    >>> t = byte_level()
    >>> t.size, t.decode(t.encode(['Alice'])[0])
    (256, 'Alice')
    """
    encode = lambda texts: [np.frombuffer(t.encode(), np.uint8).astype(np.int32) for t in texts]
    decode = lambda ids: bytes(map(int, ids)).decode(errors='replace')
    return Tokenizer(256, encode, decode, identity='bytes')


def learn(rows: Iterable[str], size: int) -> Tokenizer:
    """A byte-level BPE of GPT-2's kind with ``size`` tokens, trained deterministically on a text.

    Raises:
      ValueError: if ``rows`` is empty or ``size`` below 257 (the bytes and the end of a text).

    >>> learn(['the cat, the hat, the mat'], 261).decode([260, 257])
    ' theat'

    References:
      Neural Machine Translation of Rare Words with Subword Units, arXiv 1508.07909.
    """
    from tokenizers import ByteLevelBPETokenizer

    rows = iter(rows)
    first = next(rows, None)
    if first is None or size < 257:
        raise ValueError(
            f'a tokeniser of {size} tokens from {"no" if first is None else "some"} text; give a '
            "text and at least 257 tokens, or the folder of a tokeniser, or tokenizer='bytes'"
        )
    tokenizer = ByteLevelBPETokenizer()
    texts = itertools.chain([first], rows)
    tokenizer.train_from_iterator(texts, size, show_progress=False, special_tokens=[_END])
    return _of_gpt2(tokenizer)


def from_folder(directory: str) -> Tokenizer:
    """The tokenizer in a folder, of ``tokenizer.json`` or of GPT-2's two files.

    Raises:
      FileNotFoundError: if a file is missing.
      ValueError: if the files are damaged or do not belong together.
    """
    root = Path(directory).expanduser()
    if (root / 'tokenizer.json').is_file():
        return from_json(root)
    files = [root / 'vocab.json', root / 'merges.txt']
    missing = [f.name for f in files if not f.is_file()]
    if missing:
        raise FileNotFoundError(
            f'no tokenizer.json, and no {" and no ".join(missing)} in {root}; give a folder with '
            "the first, or with the two files of GPT-2's tokeniser, a .gguf file, or "
            "tokenizer='bytes', which needs none"
        )
    return _bpe(root, _vocabulary(files[0]), files[1])


def from_json(root: Path) -> Tokenizer:
    """The tokenizer of a folder with ``tokenizer.json``, and its chat template, if it has one.

    Raises:
      ValueError: if a file is damaged.
    """
    from tokenizers import Tokenizer as Whole

    file = root / 'tokenizer.json'
    try:
        tokenizer = Whole.from_file(str(file))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(f'{file} is not a tokenizer ({error}); download it again') from error
    tokenizer.no_truncation()  # some files keep the settings of a training
    tokenizer.no_padding()
    about = added_tokens.about_tokens(root)
    plain = tokenizer.get_added_tokens_decoder()
    tokens = added_tokens.add_tokens(root, tokenizer, about)
    added = tokenizer.get_added_tokens_decoder().items()
    more = [(i, t) for i, t in added if repr(t) != repr(plain.get(i))]
    end = tokenizer.token_to_id(tokens.get('eos_token', ''))
    begin, after = _around(tokenizer)
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    source = _template(root, about)
    digest.update(f'{source} {tokens}{more or ""}'.encode())

    def save(folder: Path) -> None:
        shutil.copyfile(file, folder / file.name)
        _copy(root, folder)

    return wrapped(
        tokenizer,
        save=save,
        begin=begin,
        end=after or (() if end is None else (end,)),
        template=Template(source, tuple(sorted(tokens.items()))) if source else None,
        identity=digest.hexdigest(),
    )


def _copy(root: Path, folder: Path) -> None:
    """Copies the files beside a tokenizer."""
    for name in _BESIDE:
        if (root / name).is_file():
            shutil.copyfile(root / name, folder / name)


def _around(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tokens that a tokenizer puts before a text, and those behind it."""
    text = tokenizer.encode('a', add_special_tokens=False).ids
    ids = tokenizer.encode('a').ids
    start = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), None)
    if start is None:
        return (), ()
    return tuple(ids[:start]), tuple(ids[start + len(text) :])


def _template(root: Path, about: dict[str, Any]) -> str:
    """The chat template of a folder; empty if it has none."""
    file = root / 'chat_template.jinja'
    if file.is_file():
        return file.read_text(encoding='utf-8')
    source = about.get('chat_template') or ''
    if isinstance(source, list):  # several, by name
        source = {t['name']: t['template'] for t in source}.get('default', '')
    return source


def _of_gpt2(tokenizer: Any, root: Path | None = None, last: str = _END) -> Tokenizer:
    """A `Tokenizer` that is saved as GPT-2's two files, with those beside them in ``root``."""
    end = tokenizer.token_to_id(last)

    def save(folder: Path) -> None:
        tokenizer.save_model(str(folder))
        if root:
            _copy(root, folder)

    return wrapped(
        tokenizer,
        save=save,
        end=() if end is None else (end,),
        identity=hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest(),
    )


def _bpe(root: Path, vocabulary: dict[str, int], merges: Path) -> Tokenizer:
    from tokenizers import ByteLevelBPETokenizer

    try:
        lines = merges.read_text(encoding='utf-8').splitlines()
        pairs = [
            tuple(line.split(' ')) for line in lines if line and not line.startswith('#version')
        ]
        tokenizer = ByteLevelBPETokenizer(vocabulary, pairs)
    except Exception as error:  # the tokenizers library raises plain Exception
        raise ValueError(
            f'{merges} does not belong to the vocab.json beside it ({error}); download both again'
        ) from error
    if _END in vocabulary:
        tokenizer.add_special_tokens([_END])
    if tokenizer.get_vocab_size() != len(vocabulary):
        raise ValueError(
            f'the tokeniser in {root} has {tokenizer.get_vocab_size()} tokens and its vocab.json '
            f'{len(vocabulary)}; download both files again'
        )
    about = added_tokens.about_tokens(root)
    added_tokens.neutral(root, about, _OF_GPT2)
    named = added_tokens.add_tokens(root, tokenizer._tokenizer, about)
    return _of_gpt2(tokenizer, root, named.get('eos_token', _END))


def _vocabulary(file: Path) -> dict[str, int]:
    vocabulary = contents(file)
    ids = [i for i in vocabulary.values() if type(i) is int]
    if len(ids) != len(vocabulary) or sorted(ids) != list(range(len(ids))):
        raise ValueError(f'{file} does not number its tokens from 0 without gaps; fetch it again')
    return vocabulary
