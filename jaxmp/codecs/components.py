"""`Components`: what a file of `jaxmp fit` has of each boundary of a model, and how it is read."""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, UInt8

from jaxmp.codecs import rows
from jaxmp.codecs.rans import TABLES

FORMAT = 'jaxmp components 1'
FINENESS = 16  # steps of 2^(k / 16)
CLASSES = 8  # means, at most


DAMAGED = (
    KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile,
    json.JSONDecodeError,
)  # fmt: skip


class Components(NamedTuple):
    """What a file has of a boundary; C channels, at most `CLASSES` means.

    Attributes:
      means: what is taken from a token: the nearest.
      forward: of a token without its mean, to its components.
      backward: the inverse.
      sizes: mean magnitude of each component, of a token of loudness 1.
      table: of `jaxmp.codecs.rans`, of each component's numbers.
      wide: 1 where a number is of more than a table has, and its last byte is sent as it is.
      step: of a token of loudness 1, in 2^(1 / `FINENESS`).
      words: of a token's message, of 16 bits.
    """

    means: Float[np.ndarray, 'K C']
    forward: Float[np.ndarray, 'C C']
    backward: Float[np.ndarray, 'C C']
    sizes: Float[np.ndarray, ' C']
    table: UInt8[np.ndarray, ' C']
    wide: UInt8[np.ndarray, ' C']
    step: int
    words: int

    @property
    def bytes(self) -> np.ndarray:
        """The components whose last byte is sent as it is."""
        return np.flatnonzero(self.wide)

    @property
    def over(self) -> np.ndarray:
        """What a component's number is over the one that has a table."""
        return np.where(self.wide, 256.0, 1.0)

    @property
    def coded(self) -> int:
        """Words of the stream of a token."""
        return self.words - beside(len(self.bytes))


def beside(wide: int) -> int:
    """Words of a token beside its stream: its step, its state, and the bytes."""
    return 1 + rows.STATE + -(-wide // 2)


ARRAYS = Components._fields[:6]


def write(file: Path, about: Mapping[str, object], cuts: Mapping[int, Components]) -> None:
    """Writes the components of boundaries, by the number of blocks before each."""
    numbers = {str(n): {'step': c.step, 'words': c.words} for n, c in cuts.items()}
    text = json.dumps({'format': FORMAT, 'cuts': numbers, **about})
    arrays = {f'{n}.{name}': getattr(c, name) for n, c in cuts.items() for name in ARRAYS}
    with file.open('wb') as to:
        np.savez(to, about=np.array(text), **arrays)


@functools.lru_cache(maxsize=8)
def _opened(file: Path, changed: int) -> tuple[dict, dict[int, Components]]:
    """What a file says of itself, and its components by boundary."""
    wrong = f'{file} is no file of components; make one with jaxmp fit MODEL --text=FILE'
    if not file.is_file():
        raise ValueError(f'there is no file {file}; make it with jaxmp fit MODEL --text=FILE')
    if not zipfile.is_zipfile(file):
        raise ValueError(wrong)
    try:
        with np.load(file, allow_pickle=False) as found:
            arrays = dict(found)
        about = json.loads(str(arrays.pop('about')))
        if about['format'] != FORMAT:
            raise ValueError(f'{file} has the format {about["format"]!r}, and {FORMAT!r} is read')
        cuts = {int(n): _components(file, n, arrays, c) for n, c in about['cuts'].items()}
    except DAMAGED as error:
        raise ValueError(f'{wrong} ({type(error).__name__})') from None
    if arrays:
        raise ValueError(f'{file} has {", ".join(sorted(arrays))}, which is not known; {wrong}')
    return about, cuts


def _components(
    file: Path, number: str, arrays: dict[str, np.ndarray], about: dict[str, int]
) -> Components:
    """Those of a boundary, which are taken from the arrays."""
    of = [arrays.pop(f'{number}.{name}') for name in ARRAYS]
    found = Components(*of, step=int(about['step']), words=int(about['words']))
    count = found.sizes.size
    shapes = {'means': (len(found.means), count), 'forward': (count, count)}
    shapes |= {'backward': (count, count), 'sizes': (count,), 'table': (count,), 'wide': (count,)}
    for name, shape in shapes.items():
        a = getattr(found, name)
        if a.shape != shape or a.dtype != ('uint8' if name in ('table', 'wide') else 'float32'):
            raise ValueError(f'{file} is damaged: {number}.{name} is {a.dtype}{list(a.shape)}')
        if not np.isfinite(a).all():
            raise ValueError(f'{file} is damaged: {number}.{name} has numbers that are not finite')
    sound = 0 < len(found.means) <= CLASSES and (found.table < TABLES).all() and found.sizes.all()
    if not sound or found.coded < 1:
        raise ValueError(f'{file} is damaged: what it says of boundary {number} cannot be')
    return found


def opened(file: str) -> tuple[dict, dict[int, Components]]:
    """What a file of components says of itself, and its components by boundary.

    Raises:
      ValueError: if there is none, or it is damaged or of another format.
    """
    place = Path(file).expanduser()
    return _opened(place, place.stat().st_mtime_ns if place.is_file() else 0)
