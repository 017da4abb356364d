"""WikiText-2: two million words of Wikipedia articles, in two versions with different perplexities.

In ``wikitext-2`` (v1) rare words are replaced by ``<unk>``; ``wikitext-2-raw`` has all words. The
first of these that exists under ``data_dir`` is read:

1. the folder ``wikitext-2`` (``wikitext-2-raw``), or ``data_dir`` itself, with
   ``wiki.train.tokens`` and ``wiki.valid.tokens`` (``.raw``);
2. the archive ``wikitext-2-v1.zip`` (``wikitext-2-raw-v1.zip``), without unpacking it;
3. if neither exists and ``download=True``, the archive is downloaded into ``data_dir``.

A row is a line with its line end, and a blank line is an empty row, as in Hugging Face's data set.
Hugging Face's fine-tuning script joins the tokens of each 1,000 rows and cuts them into blocks
(`jaxmp.data.text.blocks`). Evaluation uses the validation split.

References:
  Pointer Sentinel Mixture Models, arXiv 1609.07843; the text is CC BY-SA 3.0.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from jaxmp.data.fetch import fetch
from jaxmp.data.types import Corpus

_HOME = 'https://wikitext.smerity.com'
_ROWS = 1000


def tokens(data_dir: str | None = None, download: bool = False) -> Corpus:
    """WikiText-2 v1, with rare words replaced by ``<unk>``."""
    return _load('wikitext-2', 'wikitext-2-v1.zip', '.tokens', (data_dir, download))


def raw(data_dir: str | None = None, download: bool = False) -> Corpus:
    """WikiText-2 raw, with all words."""
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
    texts = _folder(root, name, names) or _zipped(root / archive, names)
    if not texts and download:
        fetch(f'{_HOME}/{archive}', root)
        texts = _zipped(root / archive, names)
    if not texts:
        raise FileNotFoundError(
            f'no {name} in {root}; looked for {name}/{names[0]}, {names[0]} and {archive}; put '
            f'{archive} from {_HOME} there, or pass download=True'
        )
    return Corpus(name, *(_rows(file, *texts[file]) for file in names), rows=_ROWS)


def _folder(root: Path, name: str, names: list[str]) -> dict[str, tuple[str, bytes]]:
    """Path and bytes of each file; empty if there is no folder with one of them."""
    for folder in (root / name, root):
        there = [n for n in names if (folder / n).is_file()]
        if there:
            missing = [n for n in names if n not in there]
            if missing:
                raise FileNotFoundError(
                    f'{folder} has {there[0]} and no {missing[0]}; {name} needs both, for training '
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
            f'{archive}: {size:,} bytes that are not an archive with {" and ".join(names)} '
            f'({error}); download it again from {_HOME}'
        ) from error


def _rows(name: str, place: str, content: bytes) -> list[str]:
    try:
        text = content.decode('utf-8')
    except UnicodeDecodeError as error:
        raise ValueError(f'{place} is not UTF-8 text ({error}); download {name} again') from error
    lines = io.StringIO(text, newline='\n')  # str.splitlines would also cut at other characters
    return [line if line.strip() else '' for line in lines]
