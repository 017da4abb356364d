"""Data sets that tensorflow-datasets prepared as array_record; TensorFlow is not needed to read.

It stores the examples of a split shuffled. A data set says at which position each was published.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.data.types import Split

Columns = dict[str, np.ndarray]  # by feature, a row per example
_READ_AT_ONCE = 4096


def read(
    folder: Path, positions: Callable[[str, Columns], np.ndarray], classes: int
) -> tuple[Split, Split]:
    """The splits ``train`` and ``test`` of a prepared data set, in the published order.

    Args:
      folder: ``NAME/VERSION`` below the folder that tensorflow-datasets calls ``data_dir``.
      positions: ``(split, columns) -> int (N,)``: the published position of each stored example,
        from the columns ``image``, ``label`` and others.
      classes: number of classes.

    Raises:
      ValueError: if the folder cannot be read, or examples are missing.
    """
    import tensorflow_datasets as tfds

    try:
        builder: Any = tfds.builder_from_directory(str(folder))
        train, test = (
            _ordered(columns, positions(name, columns), classes)
            for name in ('train', 'test')
            for columns in [_columns(builder.as_data_source(split=name))]
        )
    except Exception as error:  # tensorflow-datasets and array_record raise almost any exception
        raise ValueError(
            f'{folder}: {error}; allowed is {folder.parent.name} prepared with '
            "file_format='array_record'; `tfds convert_format --out_file_format=array_record "
            f'--dataset_version_dir={folder}` converts another format; otherwise remove the folder '
            'and prepare it again'
        ) from error
    return train, test


def _columns(source: Any) -> Columns:
    """All examples, in the order in which they are stored."""
    parts = []
    for start in range(0, len(source), _READ_AT_ONCE):
        rows = source.__getitems__(list(range(start, min(start + _READ_AT_ONCE, len(source)))))
        parts.append({name: np.stack([row[name] for row in rows]) for name in rows[0]})
    if not parts:
        raise ValueError('0 examples')
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _ordered(columns: Columns, places: np.ndarray, classes: int) -> Split:
    y = columns['label'].astype(np.int32)
    if not np.array_equal(np.sort(places), np.arange(len(y))) or y.min() < 0 or y.max() >= classes:
        raise ValueError(
            f'{len(y)} examples, whose positions are not 0 to {len(y) - 1} or labels not 0 to '
            f'{classes - 1}'
        )
    order = np.argsort(places)
    return Split(columns['image'][order], y[order])
