"""Data sets: loading by name, shuffling, batches.

A split is two arrays: images as bytes, and labels; or twice the tokens of a text. Those of the
package are in memory, and a text of one's own is a file that is mapped into it. An epoch is a
permutation of the examples, and a batch is an indexed selection. No iterator has a hidden state, so
that resuming at (epoch, step) is exact. The id of an example is its position in the split, whatever
file it was read from; feedback rules with a state per example (AQ-SGD) depend on that. Augmentation
and scaling run on the device.

To add a data set, write a file with ``load(data_dir, download) -> Dataset`` and add a line to
``_LOADERS``.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxmp.data import cifar10, digits, mnist
from jaxmp.data.types import NO_LOSS, Dataset, Split

PART = 2**24  # bytes of an array that are read at once, where all of it is
_LOADERS = {'digits': digits.load, 'cifar10': cifar10.load, 'mnist': mnist.load}


def load(name: str, data_dir: str | None = None, download: bool = False) -> Dataset:
    """Reads a data set into memory.

    Args:
      name: ``'digits'`` (embedded in the package), ``'cifar10'`` or ``'mnist'`` (files under
        ``data_dir``).
      data_dir: folder of the files; the module of each data set lists the names and their order.
      download: download the data set into ``data_dir`` if it is not there.

    Returns:
      The data set, images as uint8 of shape ``(N, H, W, C)``.

    Raises:
      ValueError: if the name is unknown, or the files are not those of the data set.
      FileNotFoundError: if the files do not exist.
      OSError: if the files cannot be read or downloaded.

    >>> load('digits').train.x.shape
    (1437, 8, 8, 1)
    """
    if name not in _LOADERS:
        raise ValueError(f'no data set {name!r}; allowed are {", ".join(sorted(_LOADERS))}')
    with readable(name, data_dir):
        return _LOADERS[name](data_dir, download)


def check(dataset: Dataset, tokens: bool) -> None:
    """Raises ValueError if a label, or a token of the input, is not one of the classes.

    JAX would read a negative number from the end of the classes, and one beyond them as NaN.

    Args:
      dataset: of ``classes`` classes; with 0, as for a regression, nothing is checked.
      tokens: whether ``x`` has tokens.

    >>> two = Split(np.zeros((2, 1), np.float32), np.array([1, 2]))
    >>> check(Dataset('two', two, two, classes=2, mean=(), std=()), tokens=False)
    Traceback (most recent call last):
      ...
    ValueError: two: y of the train split has 1 to 2, and classes=2 allows 0 to 1; number them \
from 0, or give the Dataset as many classes (0 if y is read by a score of your own)
    """
    if not dataset.classes:
        return
    for part, split in (('train', dataset.train), ('test', dataset.test)):
        arrays = {'x': split.x} if tokens else {}
        arrays |= {} if tokens and split.y is split.x else {'y': split.y}
        for name, a in arrays.items():
            least = NO_LOSS if name == 'y' and dataset.tokenizer else 0
            low, high = extremes(a)
            if low < least or high >= dataset.classes:
                raise ValueError(
                    f'{dataset.name}: {name} of the {part} split has {low} to {high}, and '
                    f'classes={dataset.classes} allows {least} to {dataset.classes - 1}; number '
                    'them from 0, or give the Dataset as many classes (0 if y is read by a score '
                    'of your own)'
                )


def extremes(a: np.ndarray) -> tuple[int, int]:
    """The least and the largest of integers, read in parts; 0 and 0 if there are none.

    >>> extremes(np.array([[3, -1], [2, 5]]))
    (-1, 5)
    """
    a = np.asarray(a)
    if not (a.size and np.issubdtype(a.dtype, np.integer)):
        return 0, 0
    ends = [(int(p.min()), int(p.max())) for p in parts(a)]
    return min(low for low, _ in ends), max(high for _, high in ends)


def parts(a: np.ndarray) -> Iterator[np.ndarray]:
    """Runs of rows of an array, about 16 MB each; of a mapped file only one is in memory.

    >>> [len(part) for part in parts(np.zeros((9, 2**20), np.float32))]
    [4, 4, 1]
    """
    rows = max(1, PART * len(a) // max(1, a.nbytes))
    for start in range(0, len(a), rows):
        yield a[start : start + rows]
        release(a)


def release(a: np.ndarray) -> None:
    """Gives back the memory of what was read, if the array is a file that is mapped into memory."""
    base: Any = a
    while isinstance(base, np.ndarray):
        base = base.base
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


@contextmanager
def readable(name: str, data_dir: str | None) -> Iterator[None]:
    """A context that adds the data set and its folder to errors of the operating system."""
    try:
        yield
    except (FileNotFoundError, ConnectionError):
        raise  # raised by a loader; the message is complete
    except OSError as error:
        raise OSError(
            f'cannot read {name} in data_dir {data_dir}: {error}; make it readable, or give '
            'another data_dir'
        ) from error


def order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The permutation of an epoch, int32 ``(examples,)``: a pure function of its arguments.

    It sorts raw Philox words, because numpy guarantees that stream across versions, but not that of
    ``permutation``. A run that is resumed elsewhere therefore gets the same batches.

    >>> order(seed=0, epoch=1, examples=5).tolist()
    [3, 2, 4, 1, 0]
    """
    if seed < 0 or epoch < 0 or examples < 1:
        raise ValueError(
            f'order got seed {seed}, epoch {epoch}, examples {examples}; allowed are seeds and '
            'epochs from 0 and at least one example'
        )
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(examples)
    return np.argsort(words, kind='stable').astype(np.int32)


def take(split: Split, examples: int) -> Split:
    """The first ``examples`` examples of a split; they keep their ids."""
    if not 1 <= examples <= len(split.y):
        raise ValueError(
            f'cannot take {examples} examples of a split that has {len(split.y)}; '
            f'give 1 to {len(split.y)}'
        )
    x = split.x[:examples]
    return Split(x, x if split.y is split.x else split.y[:examples])


def pool(dataset: Dataset, side: int) -> Dataset:
    """Images made ``side`` times smaller: the mean of each ``side x side`` square, rounded.

    Raises:
      ValueError: if ``side`` does not divide H and W.

    >>> pool(load('digits'), 2).train.x.shape
    (1437, 4, 4, 1)
    """
    _, height, width, channels = dataset.train.x.shape
    if side < 1 or height % side or width % side:
        raise ValueError(
            f'pool {side} does not divide images of {height} x {width}; 1 leaves them unchanged'
        )
    if side == 1:
        return dataset

    def smaller(split: Split) -> Split:
        x = split.x.reshape(-1, height // side, side, width // side, side, channels)
        mean = x.mean((2, 4), dtype=np.float32)
        return Split((np.rint(mean) if x.dtype == np.uint8 else mean).astype(x.dtype), split.y)

    return dataset._replace(train=smaller(dataset.train), test=smaller(dataset.test))


def batches(
    split: Split, batch_size: int, order: np.ndarray | None = None, pad: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Cuts a split into batches of one size.

    Training drops an incomplete last batch. Evaluation (``pad=True``) uses all examples: the last
    batch is padded with example 0, which has mask 0.

    Args:
      split: ``x`` of shape ``(N, H, W, C)`` and ``y`` of shape ``(N,)``.
      batch_size: number of examples per batch, B.
      order: ids in the order in which they are used, as from ``order(...)``; default 0 to N - 1.
      pad: keep an incomplete last batch, padded.

    Returns:
      An iterator over ``{'x': uint8 (B, H, W, C), 'y': int32 (B,), 'id': int32 (B,)}``, and with
      ``pad`` also ``'mask'``, float32 ``(B,)``, 1 for a real example.
    """
    size = len(split.y)
    ids = np.arange(size) if order is None else np.asarray(order)
    whole = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in 'iu'
    if not whole or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f'order, {ids.dtype} of shape {ids.shape}, does not list ids of a split of {size} '
            f'examples; pass ids 0 to {size - 1}, e.g. order(seed, epoch, {size})'
        )
    if batch_size < 1 or (batch_size > ids.size and not pad):
        raise ValueError(
            f'batch_size {batch_size} leaves no full batch of {ids.size} examples; '
            f'pass 1 to {ids.size}, or pad=True for evaluation'
        )
    return _cut(split, batch_size, ids.astype(np.int32), pad)


def _cut(
    split: Split, batch_size: int, ids: np.ndarray, pad: bool
) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, len(ids) if pad else len(ids) - batch_size + 1, batch_size):
        rows = ids[start : start + batch_size]
        real = len(rows)
        rows = np.pad(rows, (0, batch_size - real))
        batch = {'x': split.x[rows], 'y': split.y[rows], 'id': rows}
        release(split.x)
        if pad:
            batch['mask'] = (np.arange(batch_size) < real).astype(np.float32)
        yield batch
