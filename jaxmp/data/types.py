"""What data are: a data set and its splits, a text before it is cut, and a tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data.chat import Template

Located = tuple[np.ndarray, np.ndarray]  # ids (n,), and (n, 2): where each begins and ends
NO_LOSS = -1  # the target of a token that is not predicted

_TEXTS = 1024  # encoded together: what the library returns beside the ids is far larger


class Tokenizer(NamedTuple):
    """A tokeniser: a map from text to token ids and back.

    Attributes:
      size: number of tokens; ids are 0 to ``size - 1``.
      encode: maps a list of texts to a list of int32 arrays of ids, one per text.
      decode: maps ids to a text.
      save: writes the tokeniser's files to a folder.
      locate: as ``encode``, with the place of each token in its text, in characters.
      begin: the tokens before a document.
      end: the tokens after a document.
      template: how chat messages become a text, or None.
      identity: a text that differs where the tokens of a text may, by which a cache finds them.
    """

    size: int
    encode: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Sequence[int]], str]
    save: Callable[[Path], object] = lambda folder: None
    locate: Callable[[Sequence[str]], list[Located]] | None = None
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    template: Template | None = None
    identity: str = ''


def wrapped(tokenizer: Any, **about: Any) -> Tokenizer:
    """A `Tokenizer` from one of the tokenizers library, with further fields."""

    def encoded(texts: Sequence[str]) -> Iterator[Any]:
        for i in range(0, len(texts), _TEXTS):
            yield from tokenizer.encode_batch(texts[i : i + _TEXTS], add_special_tokens=False)

    def locate(texts: Sequence[str]) -> list[Located]:
        places = lambda e: np.array(e.offsets, np.int32).reshape(-1, 2)
        return [(np.array(e.ids, np.int32), places(e)) for e in encoded(texts)]

    encode = lambda texts: [np.array(e.ids, np.int32) for e in encoded(texts)]
    decode = lambda ids: tokenizer.decode(list(map(int, ids)), skip_special_tokens=False)
    size = 1 + max(tokenizer.get_vocab().values())
    return Tokenizer(size, encode, decode, locate=locate, **about)


class Split(NamedTuple):
    """One split; the position of an example is its id.

    Attributes:
      x: images, uint8 of shape ``(N, H, W, C)``; of a text tokens, int32 of shape ``(N, T)``.
      y: labels, int32 of shape ``(N,)``; of a text the tokens again, or -1 where there is no loss.
    """

    x: np.ndarray
    y: np.ndarray


class Dataset(NamedTuple):
    """A data set: two splits, the number of classes, and constants for normalisation.

    Attributes:
      name: the name that ``load`` takes.
      train: the training split.
      test: the split for evaluation.
      classes: number of classes; labels are 0 to ``classes - 1``.
      mean: mean of ``x / 255`` for each of the C channels.
      std: standard deviation of ``x / 255`` for each of the C channels.
      tokenizer: of a text, whose next tokens a model learns; None if the data set is none.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    tokenizer: Tokenizer | None = None


class Corpus(NamedTuple):
    """A text before it is cut into blocks.

    Attributes:
      name: the name that `jaxmp.data.text.load` takes.
      train: the rows for training.
      test: the rows for validation.
      rows: number of rows that are joined before they are cut into blocks; None means all.
    """

    name: str
    train: Sequence[str]
    test: Sequence[str]
    rows: int | None = None
