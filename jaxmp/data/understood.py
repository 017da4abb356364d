"""`understood`: what a file says beside its tensors is read, is neutral, or is refused by name."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

AGAIN = 'download the files again'
EITHER = (True, False, None)  # the values of a switch


def keys(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def understood(
    place: object,
    said: Mapping[str, Any],
    read: Collection[str],
    neutral: Mapping[str, Collection[Any]],
    cure: str,
) -> None:
    """Raises ValueError for a key of a file that is neither read nor neutral.

    Args:
      place: the file, for the message.
      said: its entries; null says nothing, except where ``neutral`` has the key.
      read: keys that the reader uses, and those that change no number whatever they hold.
      neutral: the values of other keys under which they change no number.
      cure: what to do.

    >>> understood('config.json', {'width': 8, 'cap': 3}, {'width'}, {'cap': (0, None)}, 'no cap')
    Traceback (most recent call last):
      ...
    ValueError: config.json has cap=3; allowed is 0 or None: no cap
    """
    for key, value in said.items():
        allowed = neutral.get(key, (None,))
        same = (value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        if key not in read and not any(same):
            values = ' or '.join(map(repr, allowed)) if key in neutral else 'no such key'
            raise ValueError(
                f'{place} has {key}={reprlib.repr(value)}; allowed is {values}: {cure}'
            )


def number(
    place: object, said: Mapping[str, Any], key: str, above: float = 0, whole: bool = False
) -> Any:
    """A number of a file.

    Raises:
      ValueError: if the entry is none above ``above``, or no whole one.
    """
    value: Any = said.get(key)
    if not (type(value) in ((int,) if whole else (int, float)) and above < value < 2**63):
        wanted = f'a whole number from {above + 1}' if whole else f'a number above {above}'
        raise ValueError(f'{place} has {key}={reprlib.repr(value)}, which is not {wanted}; {AGAIN}')
    return value


def contents(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: if there is none.
    """
    try:
        value = json.loads(file.read_text(encoding='utf-8'))
    except ValueError as error:
        raise ValueError(f'{file} is not JSON ({error}); {AGAIN}') from error
    if not isinstance(value, dict):
        raise ValueError(f'{file} holds a {type(value).__name__}, not an object; {AGAIN}')
    return value
