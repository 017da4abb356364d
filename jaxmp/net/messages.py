"""`read`: the head of a message, once it has the form of its kind; what has not is dropped.

A thread that serves all processes must not end by what one of them sends, as one of another version
may.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import zmq

Head = dict[str, Any]
LARGEST = 1e10  # of a number: a clock still has the time of day so many seconds ago
NUMBER = int | float
PLACES = [(int, (str, str, object))]  # numbers of members, and the name, address and value of each
TERMS = {'names': [str], 'least': int, 'start': NUMBER, 'silent': NUMBER, 'back': NUMBER}
WORK = NUMBER, str, NUMBER, int | None, int, str, NUMBER
HERE = {'about': TERMS, 'address': str, 'ready': bool, 'value': object, 'work': WORK}
VIEW = {'view': int, 'left': [int], 'members': PLACES}
ASK = {'view': int, 'asked': int}
TO_SWITCH = {'here': {**HERE, **VIEW}, 'fail': {'why': str, 'alone': bool}, 'spare': {}, 'bye': {}}
OF_SWITCH = {
    'state': {**VIEW, 'on': bool, 'why': str}, 'failed': {'why': str}, 'wait': {'why': str},
    'bye': {},
}  # fmt: skip
TO_SPARE = {'part': {'process': int | None}}
BETWEEN = {
    'message': {**ASK, 'number': int, 'step': int, 'tag': str, 'pieces': [int]},
    'ask': ASK, 'has': {**ASK, 'number': int | None},
}  # fmt: skip


class UnreadableError(ValueError):
    """A message that is not of its kind's form."""


def fits(value: Any, form: Any) -> bool:
    """Whether JSON has a form.

    Args:
      value: of the JSON.
      form: a type; ``[form]``, of each item; a tuple of the items' forms; or a dict by key, beside
        which there may be other keys.

    >>> fits([1, 'x'], (int, str)), fits([1, None], [int]), fits({'a': 1, 'b': 2}, {'a': str})
    (True, False, False)
    """
    if isinstance(form, dict):
        known = isinstance(value, dict) and form.keys() <= value.keys()
        return known and all(fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        return isinstance(value, list) and len(value) == len(form) and all(map(fits, value, form))
    sound = not isinstance(value, NUMBER) or abs(value) < LARGEST  # and no NaN
    return form is object or (isinstance(value, form) and sound)


def read(frames: Sequence[zmq.Frame], forms: Mapping[str, Any]) -> Head:
    """The head of a message, its first frame.

    Args:
      frames: of the message.
      forms: of the kinds that may come, by name.

    Raises:
      UnreadableError: if it is none of these.
    """
    text = frames[0].bytes if frames else b''
    try:
        words = json.loads(text)
    except (ValueError, RecursionError):
        words = None
    kind = words.get('kind') if isinstance(words, dict) else None
    sound = isinstance(kind, str) and kind in forms and fits(words, forms[kind])
    counts = words.get('pieces', []) if sound else []
    if not sound or (counts and (min(counts) < 0 or sum(counts) != len(frames) - 1)):
        kinds = ', '.join(forms)
        raise UnreadableError(f'dropped {text[:60]!r}, which is no message of the kinds {kinds}')
    return words


def number_of(name: str) -> int:
    """The number of the process that has a connection with a name, ``number.once``.

    Raises:
      UnreadableError: if the name has none.
    """
    try:
        return int(name.partition('.')[0])
    except ValueError:
        raise UnreadableError(f'dropped what {name[:40]!r} has sent, which is no process') from None


def complain(line: str) -> None:
    """Says a line on the standard error."""
    print(f'jaxmp: {line}', file=sys.stderr, flush=True)


def once(say: Callable[[str], object] = complain) -> Callable[[str], None]:
    """``say`` for the first line alone."""
    lines = list[str]()

    def first(line: str) -> None:
        if not lines:
            say(line)
        lines[:] = [line]

    return first
