"""MNIST: 60,000 + 10,000 handwritten digits, grey, 28 x 28 pixels, read from either of its formats.

1. The four published files, ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``,
   ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``, are read from ``data_dir`` or its
   folder ``mnist``, each unpacked or as ``.gz``.
2. If none of them exists, ``mnist/3.0.1`` is read, prepared by tensorflow-datasets as array_record.

Ids are positions in the published files, and the contents are checked against the published ones in
both cases. (tensorflow-datasets stores the examples by the MD5 digest of split and position.)
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np

from jaxmp.data import prepared
from jaxmp.data.fetch import fetch
from jaxmp.data.types import Dataset, Split

_CLASSES = 10
_SIDE = 28
_TFDS = '3.0.1'
_HOME = 'http://yann.lecun.com/exdb/mnist/'
_ADDRESS = 'https://storage.googleapis.com/cvdf-datasets/mnist'  # its mirror

# sha256 of the published files, unpacked, and md5 as they are published, packed.
_FILES = {
    'train-images-idx3-ubyte': (
        'ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db',
        'f68b3c2dcbeaaa9fbdd348bbdeb94873',
    ),
    'train-labels-idx1-ubyte': (
        '65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5',
        'd53e105ee54ea40749a09fcbcd1e9432',
    ),
    't10k-images-idx3-ubyte': (
        '0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7',
        '9fb629c4189551a2d022fa330f9573f3',
    ),
    't10k-labels-idx1-ubyte': (
        'ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2',
        'ec29112dd5afa0611ce80d1b7f02629c',
    ),
}


def load(data_dir: str | None = None, download: bool = False) -> Dataset:
    """MNIST, images ``(N, 28, 28, 1)``, labels 0 to 9, in the published order.

    Raises:
      ValueError: if ``data_dir`` is None, or a file is not the published one.
      FileNotFoundError: if a file is missing.
    """
    if data_dir is None:
        raise ValueError(
            'mnist is not part of the package and data_dir is None; pass the folder that holds its '
            f'four files (from {_HOME})'
        )
    root = Path(data_dir).expanduser()
    root = root / 'mnist' if (root / 'mnist').is_dir() else root
    if (root / _TFDS).is_dir() and not any(root.glob('*-ubyte*')):
        train, test = _prepared(root / _TFDS)
    else:
        if download and not root.is_file() and not any((root / name).exists() for name in _FILES):
            for name, (_, packed) in _FILES.items():
                fetch(f'{_ADDRESS}/{name}.gz', root, f'md5:{packed}')
        train, test = _published(root)
    return Dataset('mnist', train, test, classes=_CLASSES, mean=(0.1307,), std=(0.3081,))


def _prepared(folder: Path) -> tuple[Split, Split]:
    splits = prepared.read(folder, _positions, _CLASSES)
    names = iter(_FILES)
    for x, y in splits:
        heads = struct.pack('>4I', 2051, *x.shape[:3]), struct.pack('>2I', 2049, len(y))
        _check(heads[0] + x.tobytes(), next(names), folder)
        _check(heads[1] + y.astype(np.uint8).tobytes(), next(names), folder)
    return splits


def _positions(split: str, columns: prepared.Columns) -> np.ndarray:
    digest = lambda i: hashlib.md5(f'{split}{i}'.encode()).digest()
    return np.array(sorted(range(len(columns['label'])), key=digest))


def _published(root: Path) -> tuple[Split, Split]:
    parts = [_array(root, name) for name in _FILES]
    train, test = (
        Split(x.reshape(-1, _SIDE, _SIDE, 1), y.astype(np.int32))
        for x, y in zip(parts[::2], parts[1::2], strict=True)
    )
    return train, test


def _array(root: Path, name: str) -> np.ndarray:
    """The bytes after the header of an idx file."""
    path = next((p for p in (root / name, root / f'{name}.gz') if p.is_file()), None)
    if path is None:
        raise FileNotFoundError(
            f'no {name} and no {name}.gz in {root}; put the four files of MNIST (from {_HOME}) '
            'there and pass the folder as data_dir'
        )
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'{path} cannot be unpacked ({error}); download it again') from error
    _check(content, name, path)
    return np.frombuffer(content, np.uint8, offset=16 if 'images' in name else 8)


def _check(content: bytes, name: str, path: Path) -> None:
    """Raises unless ``content`` is that of the published file ``name``."""
    if (digest := hashlib.sha256(content).hexdigest()) != _FILES[name][0]:
        raise ValueError(
            f'{path} is not the published {name}: sha256 {digest}, allowed is {_FILES[name][0]}; '
            'download it again'
        )
