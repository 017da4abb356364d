"""CIFAR-10: 50,000 + 10,000 colour images, 32 x 32 pixels, read from any of its published formats.

The first of these that exists under ``data_dir`` is read:

1. the folder ``cifar-10-batches-py`` (or ``data_dir`` is that folder): the python version;
2. the archive ``cifar-10-python.tar.gz``, without unpacking it;
3. the folder ``cifar-10-batches-bin`` (or ``data_dir`` is that folder): the binary version;
4. the archive ``cifar-10-binary.tar.gz``, without unpacking it;
5. ``cifar10/3.0.2``, prepared by tensorflow-datasets as array_record;
6. if none exists and ``download=True``, the archive of the python version is downloaded there.

All formats give the same arrays: ids are positions in the published order, from ``data_batch_1`` to
``data_batch_5``. (tensorflow-datasets shuffles the examples when it prepares them; the published
position is restored from its ``id`` feature, such as ``train_16399``.)

The python version consists of pickles, and loading a pickle can run arbitrary code. They are read
by an unpickler that builds inert records for numpy's names, and refuses every other name before it
is imported.
"""

from __future__ import annotations

import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data import prepared
from jaxmp.data.fetch import fetch
from jaxmp.data.types import Dataset, Split

_HOME = 'https://www.cs.toronto.edu/~kriz/cifar.html'
_ADDRESS = 'https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz'
_DIGEST = 'md5:c58f30108f718f92721af3b95e74349a'
_TRAIN = tuple(f'data_batch_{i}' for i in range(1, 6))
_CLASSES = 10
_PIXELS = 3 * 32 * 32
_TFDS = ('cifar10', '3.0.2')

_Batch = tuple[np.ndarray, np.ndarray]  # uint8 (N, 3072), channels first; int32 (N,)


def load(data_dir: str | None = None, download: bool = False) -> Dataset:
    """CIFAR-10, images ``(N, 32, 32, 3)``, in the published order; constants are the paper's."""
    if data_dir is None:
        raise ValueError(
            'cifar10 is not part of the package and data_dir is None; pass the folder that holds '
            f'cifar-10-python.tar.gz (from {_HOME}), or one to download into with download=True'
        )
    root = Path(data_dir).expanduser()
    splits = _published(root)
    if splits is None:
        folder = root.joinpath(*_TFDS)
        if not folder.is_dir() and (root.is_file() or not download):
            raise FileNotFoundError(_nothing_in(root))
        if not folder.is_dir():
            fetch(_ADDRESS, root, _DIGEST)
            splits = _published(root)
        splits = splits or prepared.read(folder, _positions, _CLASSES)
    train, test = splits
    return Dataset(
        name='cifar10',
        train=train,
        test=test,
        classes=_CLASSES,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
    )


def _nothing_in(root: Path) -> str:
    if not root.is_dir():
        return f'data_dir {root} is not a folder; pass the folder that holds CIFAR-10'
    forms = [form for layout in _LAYOUTS for form in (layout.folder, layout.archive)]
    return (
        f'no CIFAR-10 in {root}; looked for {", ".join([*forms, "/".join(_TFDS)])}; put '
        f'cifar-10-python.tar.gz from {_HOME} there, or pass download=True'
    )


def _published(root: Path) -> tuple[Split, Split] | None:
    for layout in _LAYOUTS:
        names = [name + layout.suffix for name in (*_TRAIN, 'test_batch')]
        folder, archive = root / layout.folder, root / layout.archive
        if not folder.is_dir() and any((root / name).is_file() for name in names):
            folder = root
        if folder.is_dir():
            return _assemble(folder, _folder_files(folder, names), names, layout)
        if archive.is_file():
            return _assemble(archive, _archive_files(archive, names), names, layout)
    return None


def _folder_files(folder: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    for name in names:
        if (folder / name).is_file():
            yield name, (folder / name).read_bytes()


def _archive_files(archive: Path, names: list[str]) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(archive, 'r|gz') as tar:  # a stream: one pass, whatever the order inside
            for member in tar:
                name, file = PurePosixPath(member.name).name, None
                if name in names and member.isfile():
                    file = tar.extractfile(member)
                if file is not None:
                    yield name, file.read()
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        size = archive.stat().st_size
        problem = f'{archive}: {size:,} bytes that cannot be read as a .tar.gz ({error})'
        raise ValueError(f'{problem}; allowed is the published archive; {_AGAIN}') from error


def _assemble(
    where: Path, files: Iterator[tuple[str, bytes]], names: list[str], layout: _Layout
) -> tuple[Split, Split]:
    batches = {name: layout.decode(raw, f'{where}/{name}') for name, raw in files}
    sizes = {name: len(batches[name][1]) if name in batches else 0 for name in names}
    if len(set(sizes.values())) > 1 or not batches:
        raise ValueError(
            f'{where}: examples found are {sizes}; allowed are six files of one size (10,000 in '
            f'the published set); {_AGAIN}'
        )
    return _split([batches[name] for name in names[:-1]]), _split([batches[names[-1]]])


def _split(parts: list[_Batch]) -> Split:
    y = np.concatenate([labels for _, labels in parts])
    x = np.empty((len(y), 32 * 32, 3), np.uint8)
    start = 0
    for pixels, labels in parts:
        planes = pixels.reshape(-1, 3, 32 * 32)
        for channel in range(3):  # three strided copies are 3 to 9 times as fast as one transpose
            x[start : start + len(labels), :, channel] = planes[:, channel]
        start += len(labels)
    return Split(x.reshape(-1, 32, 32, 3), y)


class _Record:
    """A record in place of numpy's array, dtype and array builder; it keeps its arguments."""

    def __init__(self, *args: Any) -> None:
        self.args, self.state = args, None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler of containers, numbers, text and ``_Record``; it imports nothing else."""

    def find_class(self, module_name: str, global_name: str) -> type[_Record]:
        allowed = {'ndarray', 'dtype'} if module_name == 'numpy' else set()
        if module_name in ('numpy.core.multiarray', 'numpy._core.multiarray'):
            allowed = {'_reconstruct'}
        if global_name not in allowed:
            raise pickle.UnpicklingError(f'it would import {module_name}.{global_name}; refused')
        return _Record


def _from_pickle(raw: bytes, source: str) -> _Batch:
    try:
        batch = _Unpickler(io.BytesIO(raw), encoding='bytes').load()
    except Exception as error:  # a hostile or damaged pickle can raise almost any exception
        raise _not_a_batch(source, raw, str(error)) from error
    if not isinstance(batch, dict):
        raise _not_a_batch(source, raw, f'it holds a {type(batch).__name__}')
    data = batch.get(b'data', batch.get('data'))
    labels = batch.get(b'labels', batch.get('labels'))
    match getattr(data, 'state', None):
        case (_, (int(rows), int(width)), _Record(args=(b'u1' | 'u1', *_)), False, bytes(pixels)):
            shape, whole = (rows, width), rows >= 1 and len(pixels) == rows * width
        case _:
            raise _not_a_batch(source, raw, "its 'data' is not a uint8 array")
    if shape[1] != _PIXELS or not whole:
        raise _not_a_batch(source, raw, f"its 'data' is {len(pixels):,} bytes of shape {shape}")
    if not isinstance(labels, list) or len(labels) != rows:
        raise _not_a_batch(source, raw, f"its 'labels' are not a list of {rows} numbers")
    if not all(type(label) is int and 0 <= label < _CLASSES for label in labels):
        raise _not_a_batch(source, raw, "some of its 'labels' are not 0 to 9")
    return np.frombuffer(pixels, np.uint8).reshape(shape), np.array(labels, np.int32)


def _not_a_batch(source: str, raw: bytes, why: str) -> ValueError:
    return ValueError(
        f'{source}: {len(raw):,} bytes that are not a python batch of CIFAR-10: {why}; allowed is '
        f"a pickled dict of 'data', uint8 (N, {_PIXELS}), and 'labels', N numbers 0 to 9; {_AGAIN}"
    )


def _from_records(raw: bytes, source: str) -> _Batch:
    if not raw or len(raw) % (1 + _PIXELS):
        raise ValueError(
            f'{source}: {len(raw):,} bytes; allowed are whole records of {1 + _PIXELS} bytes, a '
            f'label and the pixels; {_AGAIN}'
        )
    records = np.frombuffer(raw, np.uint8).reshape(-1, 1 + _PIXELS)
    labels = records[:, 0].astype(np.int32)
    if labels.max() >= _CLASSES:
        raise ValueError(
            f'{source}: {len(raw):,} bytes with label {labels.max()}; allowed are 0 to 9; {_AGAIN}'
        )
    return records[:, 1:], labels


class _Layout(NamedTuple):
    folder: str
    archive: str
    suffix: str
    decode: Callable[[bytes, str], _Batch]


_AGAIN = f'download it again from {_HOME}'
_LAYOUTS = (
    _Layout('cifar-10-batches-py', 'cifar-10-python.tar.gz', '', _from_pickle),
    _Layout('cifar-10-batches-bin', 'cifar-10-binary.tar.gz', '.bin', _from_records),
)


def _positions(_: str, columns: prepared.Columns) -> np.ndarray:
    return np.array([int(name.rpartition(b'_')[2]) for name in columns['id']])
