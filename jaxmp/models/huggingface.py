"""Download of model files from the Hugging Face hub, which fails fast without a network."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException

GPT2 = ('config.json', 'model.safetensors*', 'vocab.json', 'merges.txt')
_SECONDS = 5


def fetch(repository: str, files: Sequence[str] = GPT2) -> str:
    """A local directory with files of a model repository.

    Files that are in the hub's cache are used without network access.

    Args:
      repository: name of the repository, for example ``'openai-community/gpt2'``.
      files: patterns of the files; default a GPT-2's weights and tokeniser.

    Raises:
      ConnectionError: if the hub does not answer within seconds.
      ValueError: if the hub has no such repository.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    wanted = {'repo_id': repository, 'allow_patterns': list(files), 'etag_timeout': _SECONDS}
    try:
        return hub.snapshot_download(**wanted, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        pass  # not in the cache
    except errors.HFValidationError as error:
        raise ValueError(
            f'{repository!r} is not the name of a repository ({error}); write owner/name, such as '
            'openai-community/gpt2, or give a local directory'
        ) from error
    instead = f'check the network, or download {", ".join(files)} elsewhere and give the directory'
    try:  # one request: the hub's client would retry for minutes
        request = urllib.request.Request(constants.ENDPOINT, method='HEAD')
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, HTTPException) as error:
        raise ConnectionError(
            f'{constants.ENDPOINT} does not answer ({error}); {instead}'
        ) from error
    try:
        return hub.snapshot_download(**wanted)
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f'{constants.ENDPOINT} has no model {repository!r}; write owner/name, such as '
            'openai-community/gpt2, or give a local directory'
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        raise ConnectionError(f'download of {repository} failed ({error}); {instead}') from error
