"""Files of safetensors, alone or in a folder of Hugging Face's layout: read by name, and written.

A folder has ``config.json`` and ``model.safetensors``, or an index and the files that it names.
Opening reads names and shapes only. Loading such a file, unlike a pickle, cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.data.understood import AGAIN, contents
from jaxmp.models.described import Checkpoint

FILE = 'model.safetensors'
INDEX = f'{FILE}.index.json'
WANTED = (  # of a path
    f'give a folder with config.json and {FILE} (or {INDEX} and its files), a GGUF file, or '
    'owner/name of the Hugging Face hub'
)
_DTYPES = ('F64', 'F32', 'F16', 'BF16')  # as safetensors names them; others need a scale beside


def open_folder(place: Path) -> Checkpoint:
    """The checkpoint in a folder.

    Raises:
      FileNotFoundError: if there is none, or a file that its index names is missing.
      ValueError: if a file is damaged or cut off.
    """
    if not place.is_dir():
        raise FileNotFoundError(f'{place} is no folder and no GGUF file; {WANTED}')
    if not (place / 'config.json').is_file():
        raise FileNotFoundError(f'no config.json in {place}; {WANTED}')
    shapes, read = open_tensors(_files(place))
    index = _indexed(place)
    if missing := sorted(index.keys() - shapes):
        raise ValueError(
            f'{place / index[missing[0]]} lacks {missing[0]}, which {INDEX} lists; {AGAIN}'
        )
    return Checkpoint(place, contents(place / 'config.json'), shapes, read)


def open_tensors(
    files: Sequence[Path],
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """The shapes of all tensors of some safetensors files, and a function that reads one.

    Raises:
      ValueError: if a file is damaged or cut off; the function, if a tensor is quantised.
    """
    shapes, where = {}, {}
    for file in files:
        tensors = _open(file)
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            shapes[name], where[name] = tuple(tensors.get_slice(name).get_shape()), (tensors, file)

    def read(name: str) -> np.ndarray:
        tensors, file = where[name]
        if (dtype := tensors.get_slice(name).get_dtype()) not in _DTYPES:
            raise ValueError(
                f'{name} in {file} is {dtype}, and tensors of {", ".join(_DTYPES)} are read; give '
                'a checkpoint that is not quantised, or a GGUF file'
            )
        return tensors.get_tensor(name)

    return shapes, read


def lacking(place: Path) -> list[str]:
    """The files that a folder in Hugging Face's layout lacks; a download may have been cut off."""
    if not (place / 'config.json').is_file():
        return ['config.json']
    return [name for name in _names(place) or [FILE] if not (place / name).is_file()]


def _names(place: Path) -> list[str]:
    """The files that hold a folder's weights; empty if it has none."""
    return [FILE] if (place / FILE).is_file() else sorted({*_indexed(place).values()})


def _indexed(place: Path) -> dict[str, str]:
    """The file of each tensor, by the index; empty without one."""
    if (place / FILE).is_file() or not (place / INDEX).is_file():
        return {}
    where = contents(place / INDEX).get('weight_map')
    if not isinstance(where, dict) or not where:
        raise ValueError(f'{place / INDEX} has no weight_map; {AGAIN}')
    return {str(name): str(file) for name, file in where.items()}


def _files(place: Path) -> list[Path]:
    names = _names(place)
    if not names:
        other = sorted(p.name for p in place.glob('*.bin'))
        have = f' (only {", ".join(other)}; pickles are not read)' if other else ''
        raise FileNotFoundError(f'no weights in {place}{have}; {WANTED}')
    for name in names:
        if Path(name).name != name or not (place / name).is_file():
            raise FileNotFoundError(f'{place / INDEX} names {name}, which is missing; {AGAIN}')
    return [place / name for name in names]


def notes(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    return dict(_open(file).metadata() or {})


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, 'numpy')
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        whole = f' of {full:,}' if (full := _full_size(file)) else ''
        raise ValueError(
            f'{file} is damaged or cut off: {size:,} bytes{whole} ({error}); {AGAIN}'
        ) from error


def _full_size(file: Path) -> int:
    """The bytes that a safetensors file has by its header; 0 if that is damaged too."""
    with file.open('rb') as stream:
        length = int.from_bytes(stream.read(8), 'little')
        try:
            header = json.loads(stream.read(min(length, 10**8)))
            ends = [v['data_offsets'][1] for k, v in header.items() if k != '__metadata__']
        except (ValueError, KeyError, TypeError, AttributeError):
            return 0
    return 8 + length + max(ends, default=0)


def save(tensors: dict[str, np.ndarray], file: Path, **notes: str) -> None:
    """Writes a safetensors file, with notes of what it is."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, file, metadata={'format': 'pt', **notes})
    except SafetensorError as error:  # safetensors raises it for a full disk too
        raise OSError(f'cannot write {file} ({error}); free space there') from error
    if notes:
        _sort_notes(file)


def _sort_notes(file: Path) -> None:
    """Puts the notes of a safetensors file in order, which the library writes as they are hashed.

    The same tensors and notes are then the same bytes.
    """
    with file.open('r+b') as opened:
        size = int.from_bytes(opened.read(8), 'little')
        header = json.loads(opened.read(size))
        header['__metadata__'] = dict(sorted(header['__metadata__'].items()))
        opened.seek(8)
        opened.write(json.dumps(header, separators=(',', ':')).encode().ljust(size))


def dump(value: object, file: Path) -> None:
    """Writes a JSON file."""
    file.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')
