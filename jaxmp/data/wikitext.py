"""WikiText-2: two million words of Wikipedia articles, in its two forms, which do not compare.

``wikitext-2`` (v1) has rare words replaced by ``<unk>``, ``wikitext-2-raw`` has none replaced.
Under ``data_dir`` these are looked for, and the first one found is read:

1. the folder ``wikitext-2`` (``wikitext-2-raw``), or ``data_dir`` itself, with
   ``wiki.train.tokens`` and ``wiki.valid.tokens`` (``.raw``);
2. the archive ``wikitext-2-v1.zip`` (``wikitext-2-raw-v1.zip``), read as it is;
3. nothing of these and ``download=True``: the archive is fetched into ``data_dir``.

A row is a line with its line end, and a blank line is an empty row, as in Hugging Face's data set;
its fine-tuning script cuts every 1,000 rows by themselves (`jaxmp.data.text.blocks`). Evaluation is
on the validation split.

References:
  Pointer Sentinel Mixture Models, arXiv 1609.07843; the text is CC BY-SA 3.0.
"""

from __future__ import annotations

import io
import shutil
import urllib.request
import zipfile
import zlib
from http.client import HTTPException
from pathlib import Path, PurePosixPath

from jaxmp.data.text import Corpus

_HOME = 'https://wikitext.smerity.com'
_ROWS = 1000
_SECONDS = 5


def tokens(data_dir: str | None = None, download: bool = False) -> Corpus:
    """WikiText-2 v1, rare words being ``<unk>``.

    Args:
      data_dir: folder to look in, see the module's docstring.
      download: fetch the archive into ``data_dir`` if nothing is found there.
    """
    return _load('wikitext-2', 'wikitext-2-v1.zip', '.tokens', (data_dir, download))


def raw(data_dir: str | None = None, download: bool = False) -> Corpus:
    """WikiText-2 raw, with all words.

    Args:
      data_dir: folder to look in, see the module's docstring.
      download: fetch the archive into ``data_dir`` if nothing is found there.
    """
    return _load('wikitext-2-raw', 'wikitext-2-raw-v1.zip', '.raw', (data_dir, download))


def _load(name: str, archive: str, suffix: str, where: tuple[str | None, bool]) -> Corpus:
    data_dir, download = where
    if data_dir is None:
        raise ValueError(
            f'{name} is not part of the package and data_dir is None; pass the folder that holds '
            f'{archive} (from {_HOME}), or one to download into with download=True'
        )
    root, names = Path(data_dir).expanduser(), [f'wiki.{s}{suffix}' for s in ('train', 'valid')]
    if not root.is_dir() and (root.exists() or not download):
        raise FileNotFoundError(f'data_dir {root} is not a folder; pass the folder of {name}')
    found = _folder(root, name, names) or _zipped(root / archive, names)
    if not found and download:
        _fetch(f'{_HOME}/{archive}', root / archive)
        found = _zipped(root / archive, names)
    if not found:
        raise FileNotFoundError(
            f'no {name} in {root}; looked for {name}/{names[0]}, {names[0]} and {archive}; put '
            f'{archive} from {_HOME} there, or pass download=True'
        )
    return Corpus(name, *(_rows(file, *found[file]) for file in names), rows=_ROWS)


def _folder(root: Path, name: str, names: list[str]) -> dict[str, tuple[str, bytes]]:
    """Each file's place and bytes; empty if there is no folder with one of them."""
    for folder in (root / name, root):
        there = [n for n in names if (folder / n).is_file()]
        if there:
            missing = [n for n in names if n not in there]
            if missing:
                raise FileNotFoundError(
                    f'{folder} has {there[0]} and no {missing[0]}; {name} is both, for training '
                    f'and validation: add the file (the archives are at {_HOME})'
                )
            return {n: (str(folder / n), (folder / n).read_bytes()) for n in names}
    return {}


def _zipped(archive: Path, names: list[str]) -> dict[str, tuple[str, bytes]]:
    if not archive.is_file():
        return {}
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = {PurePosixPath(n).name: n for n in zipped.namelist()}
            return {n: (f'{archive}/{n}', zipped.read(members[n])) for n in names}
    except (zipfile.BadZipFile, KeyError, EOFError, zlib.error) as error:
        size = archive.stat().st_size
        raise ValueError(
            f'{archive}: {size:,} bytes that are no archive with {" and ".join(names)} ({error}); '
            f'fetch it again from {_HOME}'
        ) from error


def _rows(name: str, place: str, content: bytes) -> list[str]:
    try:
        text = content.decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{place} is no UTF-8 text ({error}); fetch {name} again') from error
    lines = io.StringIO(text, newline='\n')  # str.splitlines would also cut at other characters
    return [line if line.strip() else '' for line in lines]


def _fetch(address: str, archive: Path) -> None:
    part = archive.with_suffix('.part')
    try:
        reply = urllib.request.urlopen(address, timeout=_SECONDS)
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f'download=True, but {address} does not answer ({error}); check the network, or put '
            f'{archive.name} into {archive.parent}'
        ) from error
    try:
        archive.parent.mkdir(parents=True, exist_ok=True)
        with reply, part.open('wb') as file:
            shutil.copyfileobj(reply, file)
    except (OSError, HTTPException) as error:
        part.unlink(missing_ok=True)
        raise ConnectionError(
            f'download=True, but {address} did not come into {archive.parent} ({error}); check the '
            f'network and the room there, or put {archive.name} there'
        ) from error
    part.rename(archive)
