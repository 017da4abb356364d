"""Text of a data set that the package datasets loads: by its name on the hub, or from a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxmp.data.content import content_of
from jaxmp.data.documents import Document, Pieces, Place, Source
from jaxmp.terminal import named_as_on_hub, near_file

_ROWS = 1000  # that are read at once
_TESTS = ('validation', 'valid', 'dev', 'test')  # names of splits, the first of which is the test


def load(name: str, field: str, share: float) -> tuple[Source, Source]:
    """The documents of a data set, ``owner/name`` or ``owner/name/configuration``, or of a folder.

    The test is a split of its own, or else the last ``share`` of the rows of ``train``.

    Raises:
      ImportError: if the package datasets is not installed.
      FileNotFoundError: if there is no such folder.
      OSError: if the hub does not answer, or has no such data set.
      ValueError: if it has no split ``train``, or no such field.
    """
    splits = _splits(name)
    if 'train' not in splits:
        raise ValueError(
            f"config.data.name={name!r} has the splits {', '.join(splits)} and no 'train'; name a "
            'data set with one'
        )
    train = splits['train']
    if field not in train.column_names:
        raise ValueError(
            f'config.data.name={name!r} has no field {field!r}, but '
            f'{", ".join(train.column_names)}; name it: config.data.field'
        )
    test = next((splits[k] for k in _TESTS if k in splits), None)
    if test is None:
        border = len(train) - int(len(train) * share)
        train, test = train.select(range(border)), train.select(range(border, len(train)))
    return _source(f'{name}, train', train, field), _source(f'{name}, test', test, field)


def _splits(name: str) -> Any:
    """The splits by name."""
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f'config.data.name={name!r} is read by the package datasets, which is not installed; '
            "pip install 'jaxmp[datasets]'"
        ) from error
    folder = Path(name).expanduser()
    if folder.is_file():
        raise ValueError(
            f'config.data.name={name!r} is a file; give it as config.data.files={name!r}'
        )
    owner, repository, *configuration = name.split('/', 2)
    parts = [str(folder)] if folder.is_dir() else [f'{owner}/{repository}', *configuration]
    if not folder.is_dir() and not named_as_on_hub(f'{owner}/{repository}'):
        raise FileNotFoundError(
            f'config.data.name={name!r} is no folder{near_file(name)}; give one with text that the '
            'package datasets can load, or owner/name of a data set on the hub'
        )
    load: Any = datasets.load_dataset  # whose overloads differ in what further arguments mean
    once = datasets.DownloadConfig(max_retries=1)
    try:
        return load(*parts, download_config=once)
    except OSError as error:  # of the network, or there is no such data set
        raise OSError(
            f'config.data.name={name!r} cannot be loaded ({_line(error)}); check the name and the '
            'network, or give a folder'
        ) from error
    except Exception as error:  # a builder raises almost any exception
        raise ValueError(
            f'config.data.name={name!r} cannot be loaded ({type(error).__name__}: {_line(error)})'
        ) from error


def _line(error: BaseException) -> str:
    return ' '.join(str(error).split())[:300]


def _source(name: str, rows: Any, field: str) -> Source:
    def read(place: Place) -> Pieces:
        for start in range(place[1], len(rows), _ROWS):
            stop = min(start + _ROWS, len(rows))
            # A table has null where a row has nothing.
            contents = (
                (i, c) for i, c in enumerate(rows[start:stop][field], start) if c is not None
            )
            where = lambda i: f'{name}, row {i}'
            yield (
                [Document(content_of(c, where(i), field), where(i)) for i, c in contents],
                (0, stop),
            )

    return Source(name, read, len(rows), lambda place: place[1], f'{rows._fingerprint} {field}')
