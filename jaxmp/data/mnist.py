"""MNIST: 60,000 + 10,000 handwritten digits, grey, 28 x 28 pixels, from the published files.

Under ``data_dir``, or its folder ``mnist``, stand the four files ``train-images-idx3-ubyte``,
``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, each as it
is or as ``.gz``. Their contents are checked against the published ones. Ids are positions in them.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import numpy as np

from jaxmp.data import Dataset, Split

_CLASSES = 10
_SIDE = 28
_HOME = 'http://yann.lecun.com/exdb/mnist/'

# sha256 of the published files, unpacked.
_FILES = {
    'train-images-idx3-ubyte': 'ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db',
    'train-labels-idx1-ubyte': '65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5',
    't10k-images-idx3-ubyte': '0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7',
    't10k-labels-idx1-ubyte': 'ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2',
}


def load(data_dir: str | None = None, download: bool = False) -> Dataset:
    """MNIST, images ``(N, 28, 28, 1)``, labels 0 to 9, in the published order.

    Args:
      data_dir: folder to look in, see the module's docstring.
      download: not offered; the four files are 12 MB.

    Raises:
      ValueError: if ``data_dir`` is None, or a file is not the published one.
      FileNotFoundError: if a file is missing.
    """
    del download
    if data_dir is None:
        raise ValueError(
            'mnist is not part of the package and data_dir is None; pass the folder that holds its '
            f'four files (from {_HOME})'
        )
    root = Path(data_dir).expanduser()
    root = root / 'mnist' if (root / 'mnist').is_dir() else root
    parts = [_array(root, name) for name in _FILES]
    splits = [
        Split(x.reshape(-1, _SIDE, _SIDE, 1), y.astype(np.int32))
        for x, y in zip(parts[::2], parts[1::2], strict=True)
    ]
    return Dataset('mnist', *splits, classes=_CLASSES, mean=(0.1307,), std=(0.3081,))


def _array(root: Path, name: str) -> np.ndarray:
    """The bytes behind the header of an idx file."""
    path = next((p for p in (root / name, root / f'{name}.gz') if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f'no {name} and no {name}.gz in {root}; put the four files of MNIST (from {_HOME}) '
            'there and pass the folder as data_dir'
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'{path} cannot be unpacked ({error}); fetch it again') from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != _FILES[name]:
        raise ValueError(
            f'{path} is not the published file: sha256 {digest}, allowed is {_FILES[name]}; fetch '
            'it again'
        )
    return np.frombuffer(content, np.uint8, offset=16 if 'images' in name else 8)
