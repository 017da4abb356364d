"""`understood`: what a file says beside its tensors is read, is neutral, or is refused by name.

A key that nobody reads would be skipped in silence, and the numbers be others than its writer's.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from typing import Any


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

    >>> understood('config.json', {'width': 8, 'cap': 0, 'new': None}, {'width'}, {'cap': (0,)}, '')
    >>> understood('config.json', {'cap': 3}, (), {'cap': (0, None)}, 'give one without')
    Traceback (most recent call last):
      ...
    ValueError: config.json has cap=3; allowed is 0 or None: give one without
    """
    for key, value in said.items():
        allowed = neutral.get(key, (None,))
        same = (value == a and isinstance(value, bool) == isinstance(a, bool) for a in allowed)
        if key not in read and not any(same):
            values = ' or '.join(map(repr, allowed)) if key in neutral else 'no such key'
            raise ValueError(
                f'{place} has {key}={reprlib.repr(value)}; allowed is {values}: {cure}'
            )
