"""Download of model files from the Hugging Face hub, which fails fast without a network.

The hub's client keeps files in its cache (``HF_HOME``), shows progress, and goes on with a download
where it was cut off.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPException
from pathlib import Path

from jaxmp.models.safetensors_file import lacking
from jaxmp.terminal import named_as_on_hub, near_file

COMPANIONS = (  # files of a tokenizer and of generation, which go with the weights
    'tokenizer*', 'vocab.json', 'merges.txt', 'special_tokens_map.json', 'added_tokens.json',
    'chat_template*', 'generation_config.json',
)  # fmt: skip
FILES = ['config.json', 'model*.safetensors', 'model.safetensors.index.json', *COMPANIONS]
_SECONDS = 5


def local(path: str) -> Path:
    """The folder or file of a checkpoint; ``owner/name`` is looked up on the hub.

    Raises:
      FileNotFoundError: if it is none of them.
      ConnectionError: as `fetch`.
      ValueError: as `fetch`.
    """
    place = Path(path).expanduser()
    if place.exists():
        return place
    if not named_as_on_hub(path):
        raise FileNotFoundError(
            f'there is no {path}{near_file(path)}; give a folder with config.json and weights, a '
            'GGUF file, or owner/name of the Hugging Face hub'
        )
    return Path(fetch(path))


def fetch(repository: str) -> str:
    """A local directory with the weights of a repository, their description and the tokenizer.

    Files that are in the hub's cache are used without network access.

    Raises:
      ConnectionError: if the hub does not answer within seconds.
      ValueError: if the hub has no such repository, or its licence has to be accepted first.
    """
    import huggingface_hub as hub
    from huggingface_hub import constants, errors

    wanted = {'repo_id': repository, 'allow_patterns': FILES, 'etag_timeout': _SECONDS}
    missing = 'its config.json, tokenizer and safetensors'
    try:
        cached = hub.snapshot_download(**wanted, local_files_only=True)
        if not (rest := lacking(Path(cached))):
            return cached
        missing = ', '.join(rest)  # a download was cut off
    except errors.LocalEntryNotFoundError:
        pass  # not in the cache
    except errors.HFValidationError as error:
        raise ValueError(
            f'{repository!r} is not the name of a repository ({error}); write owner/name, such as '
            'openai-community/gpt2, or give a local directory'
        ) from error
    page = f'{constants.ENDPOINT}/{repository}'
    instead = f'check the network, or download {missing} elsewhere and give the directory'
    where = f'there is no folder {repository}, and its files are not all in the cache'
    _check_answer(constants.ENDPOINT, where, instead, constants.HF_HUB_OFFLINE)
    try:
        return hub.snapshot_download(**wanted)
    except errors.GatedRepoError as error:
        raise ValueError(
            f'{repository} is given to those who accept its licence; accept it at {page}, then run '
            '`hf auth login`, or set HF_TOKEN to a token of that account'
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f'{constants.ENDPOINT} has no model {repository!r}, or it is private and needs a token '
            '(HF_TOKEN); write owner/name, such as openai-community/gpt2, or give a local directory'
        ) from error
    except (OSError, errors.HfHubHTTPError) as error:
        raise ConnectionError(
            f'download of {repository} failed ({error}); run it again to go on, or {instead}'
        ) from error


def _check_answer(address: str, where: str, instead: str, offline: bool) -> None:
    """Raises ConnectionError unless the hub answers; its client would retry for minutes."""
    if offline:
        raise ConnectionError(f'{where}; HF_HUB_OFFLINE is set: {instead}')
    try:
        request = urllib.request.Request(address, method='HEAD')
        urllib.request.urlopen(request, timeout=_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # it answers
    except (OSError, HTTPException) as error:
        line = f'{where}; {address} does not answer ({error}): {instead}'
        raise ConnectionError(line) from error
