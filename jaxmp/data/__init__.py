"""Data sets in memory: load one by name, shuffle it, cut it into batches.

A data set is two arrays a split, images as bytes and labels, so an epoch is a permutation and a
batch is an indexing: nothing has a hidden state, and resuming at (epoch, step) is exact. The
position of an example in its split is its id, the same whatever file it was read from; feedback
rules with a memory per example (AQ-SGD) rely on it. Augmentation and scaling belong on the device.

A new data set is a file with ``load(data_dir, download) -> Dataset`` and a line in ``_loaders``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np


class Split(NamedTuple):
    """One split in memory; the position of an example is its stable id.

    Attributes:
      x: images, uint8 of shape ``(N, H, W, C)``.
      y: labels, int32 of shape ``(N,)``.
    """

    x: np.ndarray
    y: np.ndarray


class Dataset(NamedTuple):
    """A data set: two splits and what a model must know about them.

    Attributes:
      name: the word that ``load`` knows it by.
      train: the training split.
      test: the split that is only evaluated.
      classes: how many labels there are, 0 to ``classes - 1``.
      mean: mean of ``x / 255`` for each of the C channels.
      std: standard deviation of ``x / 255`` for each of the C channels.
    """

    name: str
    train: Split
    test: Split
    classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def _loaders() -> dict[str, Callable[[str | None, bool], Dataset]]:
    from jaxmp.data import cifar10, digits, mnist  # they import the types above

    return {'digits': digits.load, 'cifar10': cifar10.load, 'mnist': mnist.load}


def load(name: str, data_dir: str | None = None, download: bool = False) -> Dataset:
    """Reads a data set into memory.

    Args:
      name: ``'digits'`` (embedded in the package), ``'cifar10'`` or ``'mnist'`` (files under
        ``data_dir``).
      data_dir: folder to look in; each data set's module says for what, and in which order.
      download: fetch the data set into ``data_dir`` if it is not there.

    Returns:
      The data set, images as uint8 of shape ``(N, H, W, C)``.

    Raises:
      ValueError: if the name is unknown, or the files are not those of the data set.
      FileNotFoundError: if they are not there.
      OSError: if they cannot be read, or not be fetched.

    >>> load('digits').train.x.shape
    (1437, 8, 8, 1)
    """
    loaders = _loaders()
    if name not in loaders:
        raise ValueError(f'no data set {name!r}; known are {", ".join(sorted(loaders))}')
    with readable(name, data_dir):
        return loaders[name](data_dir, download)


@contextmanager
def readable(name: str, data_dir: str | None) -> Iterator[None]:
    """Says what was to be read where the operating system refuses.

    Args:
      name: of the data set.
      data_dir: folder of it.

    Raises:
      OSError: instead of one that names neither.
    """
    try:
        yield
    except (FileNotFoundError, ConnectionError):
        raise  # ours, which say it
    except OSError as error:
        raise OSError(
            f'cannot read {name} in data_dir {data_dir}: {error}; mend what it names, or give '
            'another data_dir'
        ) from error


def order(seed: int, epoch: int, examples: int) -> np.ndarray:
    """The permutation of an epoch, ``(examples,)`` of int32: a pure function of its arguments.

    It sorts raw Philox words, a stream that numpy guarantees (that of ``permutation`` it does not),
    so a run resumed elsewhere sees the same batches.

    Args:
      seed: the run's seed, at least 0.
      epoch: which epoch, at least 0.
      examples: size of the training split, at least 1.

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
    """The first ``examples`` examples of a split; their ids stay what they were.

    Args:
      split: ``x`` of shape ``(N, H, W, C)`` and ``y`` of shape ``(N,)``.
      examples: how many to keep, 1 to N.
    """
    if not 1 <= examples <= len(split.y):
        raise ValueError(
            f'cannot take {examples} examples of a split that has {len(split.y)}; '
            f'ask for 1 to {len(split.y)}'
        )
    return Split(split.x[:examples], split.y[:examples])


def pool(found: Dataset, side: int) -> Dataset:
    """Images made ``side`` times smaller: the mean of each ``side x side`` square, rounded.

    Args:
      found: splits with ``x`` of shape ``(N, H, W, C)``.
      side: divides H and W; 1 leaves the images as they are.

    Raises:
      ValueError: if it does not divide them.

    >>> pool(load('digits'), 2).train.x.shape
    (1437, 4, 4, 1)
    """
    _, height, width, channels = found.train.x.shape
    if side < 1 or height % side or width % side:
        raise ValueError(
            f'pool {side} does not divide images of {height} x {width}; 1 leaves them as they are'
        )
    if side == 1:
        return found

    def smaller(split: Split) -> Split:
        x = split.x.reshape(-1, height // side, side, width // side, side, channels)
        return Split(np.rint(x.mean((2, 4), dtype=np.float32)).astype(np.uint8), split.y)

    return found._replace(train=smaller(found.train), test=smaller(found.test))


def batches(
    split: Split, batch_size: int, order: np.ndarray | None = None, pad: bool = False
) -> Iterator[dict[str, np.ndarray]]:
    """Cuts a split into batches of one size.

    Training drops a ragged last batch; evaluation (``pad=True``) sees every example, the last batch
    being filled up with example 0 under mask 0.

    Args:
      split: ``x`` of shape ``(N, H, W, C)`` and ``y`` of shape ``(N,)``.
      batch_size: examples a batch, B.
      order: ids in the order of visit, as ``order(...)`` gives them; by default 0 to N - 1.
      pad: keep the ragged last batch, padded.

    Returns:
      An iterator over ``{'x': uint8 (B, H, W, C), 'y': int32 (B,), 'id': int32 (B,)}``, and with
      ``pad`` also ``'mask'``, float32 ``(B,)``, 1 for a real example.
    """
    size = len(split.y)
    ids = np.arange(size) if order is None else np.asarray(order)
    whole = ids.ndim == 1 and ids.size > 0 and ids.dtype.kind in 'iu'
    if not whole or ids.min() < 0 or ids.max() >= size:
        raise ValueError(
            f'order, {ids.dtype} of shape {ids.shape}, does not name examples of a split that has '
            f'{size}; pass ids 0 to {size - 1}, e.g. order(seed, epoch, {size})'
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
        if pad:
            batch['mask'] = (np.arange(batch_size) < real).astype(np.float32)
        yield batch
