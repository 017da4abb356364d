"""`read`: the head of a message, which has to have the form of its kind to be read at all."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import zmq

Head = dict[str, Any]
NUMBER = int | float
LARGEST = 1e10  # of a number: a clock still has the time of day so many seconds ago
TERMS = {'names': [str], 'least': int, 'start': NUMBER, 'silent': NUMBER, 'back': NUMBER}
WORK = NUMBER, str, NUMBER, int | None, int, str, NUMBER
VIEW = {'view': int, 'left': [int], 'members': [(int, (str, str, object))]}
HERE = {**VIEW, 'about': TERMS, 'address': str, 'ready': bool, 'value': object, 'work': WORK}
ASK, WHY = {'view': int, 'asked': int}, {'why': str}
MESSAGE = {**ASK, 'number': int, 'step': int, 'tag': str, 'pieces': [int]}
# The forms of messages by kind:
TO_SWITCH = {'here': HERE, 'fail': {**WHY, 'alone': bool}, 'spare': {}, 'bye': {}}
OF_SWITCH = {'state': {**VIEW, **WHY, 'on': bool}, 'failed': WHY, 'wait': WHY, 'bye': {}}
TO_SPARE = {'part': {'process': int | None}}
BETWEEN = {'message': MESSAGE, 'ask': ASK, 'has': {**ASK, 'number': int | None}}


def fits(value: Any, form: Any) -> bool:
    """Whether JSON has a form: a type, ``[form]`` of all items, a tuple of theirs, a dict by key.

    >>> fits([1, 'x'], (int, str)), fits([1, None], [int]), fits({'a': 1, 'b': 2}, {'a': str})
    (True, False, False)
    """
    if isinstance(form, dict):  # beside whose keys there may be others
        has = isinstance(value, dict) and form.keys() <= value.keys()
        return has and all(fits(value[key], form[key]) for key in form)
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, tuple):
        same = isinstance(value, list) and len(value) == len(form)
        return same and all(map(fits, value, form))
    sound = not isinstance(value, NUMBER) or abs(value) < LARGEST  # and no NaN
    return form is object or (isinstance(value, form) and sound)


def read(frames: Sequence[zmq.Frame], forms: Mapping[str, Any]) -> Head:
    """The head of a message, its first frame; ValueError if it has none of the ``forms``."""
    words = json.loads(frames[0].bytes) if frames else {}
    kind = words.get('kind') if isinstance(words, dict) else None
    if isinstance(kind, str) and kind in forms and fits(words, forms[kind]):
        counts = words['pieces'] if kind == 'message' else []
        if not counts or (min(counts) >= 0 and sum(counts) == len(frames) - 1):
            return words
    raise ValueError(f'it is no message of the kinds {", ".join(forms)}')
