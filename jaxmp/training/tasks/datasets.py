"""`dataset_of`: the data set that ``config.data`` names: of the package, in files, one's own."""

from __future__ import annotations

from jaxmp import data
from jaxmp.config import KEYS, Config, is_text
from jaxmp.plugins import called


def dataset_of(config: Config) -> data.Dataset:
    """The data set that ``config.data`` names, with images pooled by ``data.pool``.

    Raises:
      ValueError: if it cannot be used, or a function of the user does not return a
        `jaxmp.data.Dataset`; the message names the key.
    """
    name = config.data.name
    if is_text(name, config.data.files):
        return _blocks(config)
    _check(config)
    if ':' not in name:
        dataset = data.load(name, config.data.dir or None, config.data.download)
    else:
        dataset = called('data.name', name, KEYS['data.name'].own, config)
        if not isinstance(dataset, data.Dataset):
            raise ValueError(
                f'config.data.name={name!r} returned {type(dataset).__name__}; it must be '
                f'{KEYS["data.name"].own}'
            )
    return data.pool(dataset, config.data.pool) if config.data.pool > 1 else dataset


def text_of(config: Config) -> data.Dataset:
    """The text that ``config.data`` names, for a model that reads nothing else.

    Args:
      config: with ``data.files``, or a ``data.name`` of a text or of a function of the user.

    Raises:
      ValueError: as `dataset_of`; if the data set is no text.
    """
    from jaxmp.data.tokenizer import tokenizer_of

    if ':' in config.data.name and not config.data.files:
        dataset = dataset_of(config)
        return dataset._replace(tokenizer=dataset.tokenizer or tokenizer_of(config.data.tokenizer))
    return _blocks(config)


def _check(config: Config) -> None:
    """Raises ValueError if the keys of a text in files have values that make no sense."""
    words = config.data
    if words.test_files and not words.files:
        raise ValueError(
            f'config.data.test_files={words.test_files!r} is read with config.data.files alone; '
            'name the files to train on too'
        )
    if not 0 < words.test_share < 1:
        raise ValueError(f'config.data.test_share={words.test_share} is not between 0 and 1')


def _blocks(config: Config) -> data.Dataset:
    """A text of the package, of files or of the hub, as blocks of tokens."""
    from jaxmp.data import documents, hub, text

    _check(config)
    words, length = config.data, config.data.sequence_length
    if words.files or '/' in words.name:
        how = words.field, words.test_share
        if words.files:
            sources = documents.load(words.files, words.test_files, *how, words.dir)
        else:
            sources = hub.load(words.name, *how)
        return text.from_sources(sources, length, words.tokenizer)
    return text.load(words.name, length, words.tokenizer, words.dir or None, words.download)
