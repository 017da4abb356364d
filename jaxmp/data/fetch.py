"""`fetch`: download of a published file, with progress and a check of its digest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

SECONDS = 5  # timeout for an answer of the server


def fetch(address: str, folder: Path, digest: str | None = None) -> Path:
    """Downloads a file into ``folder`` and returns its path; an existing file is only checked.

    A download that fails, or has another digest (``'md5:...'``), leaves no file.

    Raises:
      ConnectionError: if the file cannot be downloaded; the message says what to do instead.
    """
    import pooch

    name = address.rpartition('/')[2]
    pooch.get_logger().setLevel('WARNING')
    get: Any = pooch.HTTPDownloader(timeout=SECONDS, progressbar=sys.stderr.isatty())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Path(pooch.retrieve(address, digest, fname=name, path=folder, downloader=get))
    except (OSError, ValueError) as error:  # errors of requests are OSErrors
        raise ConnectionError(
            f'download=True, but {address} could not be fetched into {folder} ({error}); check the '
            f'network and the free space there, or put {name} there'
        ) from error
