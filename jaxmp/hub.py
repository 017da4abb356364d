"""Files from the Hugging Face hub, fetched only when asked and failing fast without a network."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException

GPT2 = ('config.json', 'model.safetensors*', 'vocab.json', 'merges.txt')
_SECONDS = 5


def fetch(repository: str, files: Sequence[str] = GPT2) -> str:
    """A local directory with files of a model repository.

    What an earlier call left in the hub's cache is used without asking the network.

    Args:
      repository: for example ``'openai-community/gpt2'``.
      files: patterns of the files wanted; by default a GPT-2's weights and tokeniser.

    Raises:
      ConnectionError: if the hub does not answer within seconds.
      ValueError: if it has no such repository.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    wanted = {'repo_id': repository, 'allow_patterns': list(files), 'etag_timeout': _SECONDS}
    try:
        return hub.snapshot_download(**wanted, local_files_only=True)
    except errors.LocalEntryNotFoundError:
        pass  # not fetched before
    except errors.HFValidationError as error:
        raise ValueError(
            f'{repository!r} names no repository ({error}); write owner/name, such as '
            'openai-community/gpt2, or give a local directory'
        ) from error
    instead = f'check the network, or fetch {", ".join(files)} elsewhere and give the directory'
    try:  # once, here: the hub's client would retry for minutes
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
        raise ConnectionError(f'fetching {repository} failed ({error}); {instead}') from error
