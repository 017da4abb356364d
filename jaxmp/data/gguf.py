"""`opened`: entries and tensors of a GGUF file, which the package gguf takes seconds to list."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]  # the entries of a GGUF file, by name
Tensors = dict[str, Any]  # tensors of the package gguf, by name; their ``data`` is mapped


class Contents(NamedTuple):
    """What a GGUF file has.

    Attributes:
      fields: its entries, by name.
      tensors: its tensors, by name.
    """

    fields: Fields
    tensors: Tensors


def opened(file: Path) -> Contents:
    """The contents of a file.

    Raises:
      FileNotFoundError: if there is no such file.
      ImportError: without the package ``gguf``.
      ValueError: if the file is damaged.
    """
    if not file.is_file():
        raise FileNotFoundError(f'there is no file {file}; give a .gguf file, or a folder')
    return _read(file, file.stat().st_mtime_ns)


@functools.lru_cache(1)  # the model and its tokenizer are read from one file
def _read(file: Path, changed: int) -> Contents:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError(
            f'{file} needs the package gguf; pip install "jaxmp[gguf]", or give a folder of '
            'safetensors'
        ) from None
    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ValueError(
            f'{file} is damaged or cut off: {file.stat().st_size:,} bytes ({error}); download the '
            'files again'
        ) from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return Contents(fields, {t.name: t for t in reader.tensors})
