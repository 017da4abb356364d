"""`put`: a key of a configuration changed by a text, as a command line has it."""

from __future__ import annotations

from jaxmp.config import KEYS, KINDS, Config, flat, instead_of


def put(config: Config, text: str) -> None:
    """Writes ``key=value`` to ``config``, with the value in the type of the one that it replaces.

    Raises:
      ValueError: if there is no such key, or the value does not have this type.

    >>> from jaxmp.config import default
    >>> c = default()
    >>> for text in ('optimizer.lr=0.5', 'data.download=True', 'eval_every=9 steps'):
    ...     put(c, text)
    >>> c.optimizer.lr, c.data.download, c.eval_every
    (0.5, True, '9 steps')
    """
    key, _, value = text.partition('=')
    values = flat(config.to_dict())
    if key not in values:
        near = instead_of(key, values)
        raise ValueError(f'--set {text}: no key {key!r}{near}; allowed are {", ".join(values)}')
    kind = str if key in KEYS and KEYS[key].length else type(values[key])
    try:
        read = {'True': True, 'False': False}[value] if kind is bool else kind(value)
    except (KeyError, ValueError):
        raise ValueError(f'--set {text}: {key} is {KINDS[kind]}, such as {values[key]!r}') from None
    config.update_from_flattened_dict({key: read})
