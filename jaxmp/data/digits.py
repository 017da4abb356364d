"""Digits, the embedded data set: 1,797 handwritten digits, grey, 8 x 8 pixels.

The data file in this folder is scikit-learn's ``load_digits``, the test part of UCI's "Optical
Recognition of Handwritten Digits"; ``digits.NOTICE`` names its authors and licences. It holds the
published values, 0 to 16, in the published order; they are scaled to bytes without loss.

There is no published split of this part. The split here is not random: of the n examples of a
digit, 36 at equal distances, numbers ``(2 k + 1) n // 72``, are for testing. Both splits keep the
published order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jaxmp.data.types import Dataset, Split

_CLASSES = 10
_TEST_OF_A_CLASS = 36


def load(data_dir: str | None = None, download: bool = False) -> Dataset:
    """The digits: 1,437 for training, 360 for testing (36 of each), images ``(N, 8, 8, 1)``.

    They are part of the package, so both arguments are ignored.

    >>> load().test.y.tolist()[:10]
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    with np.load(Path(__file__).with_name('digits.npz'), allow_pickle=False) as file:
        images, labels = file['images'], file['labels'].astype(np.int32)
    x = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)[..., None]
    is_test = _held_out(labels)
    return Dataset(
        name='digits',
        train=Split(x[~is_test], labels[~is_test]),
        test=Split(x[is_test], labels[is_test]),
        classes=_CLASSES,
        mean=(0.3045,),
        std=(0.3759,),
    )


def _held_out(labels: np.ndarray) -> np.ndarray:
    is_test = np.zeros(len(labels), bool)
    odd = 2 * np.arange(_TEST_OF_A_CLASS) + 1
    for label in range(_CLASSES):
        (where,) = np.nonzero(labels == label)
        is_test[where[odd * len(where) // (2 * _TEST_OF_A_CLASS)]] = True
    return is_test
