"""What a document holds: a text, or chat messages, in the one form that all readers take.

Content with the right keys may still be no text: half a character, null, an image. All of it is
refused here, with the place where it stands.
"""

from __future__ import annotations

import json
import re
from typing import Any

from jaxmp.data.chat import ANSWERS, CALLS, Messages

ROLES = {role: role for role in ('system', 'developer', 'user', 'assistant', 'tool')}
SHAREGPT = {'human': 'user', 'gpt': 'assistant'}  # whose messages are 'from' and 'value'
_MARK = '\ufeff'  # of byte order; files of Windows begin with it, also those that were joined
_CURE = 'mend or remove it'


def decoded(data: bytes, path: object, lines: int = 0) -> str:
    r"""Bytes of a file, after so many lines, as a text without byte order marks.

    Raises:
      ValueError: if they are not UTF-8, or hold NUL bytes, as UTF-16 does.

    >>> decoded(b'\xef\xbb\xbfone\r\ntwo', 'a.txt')
    'one\ntwo'
    """
    wide = data.startswith((b'\xff\xfe', b'\xfe\xff'))
    wrong, place = 'its bytes are those of UTF-16', 0
    if not wide and (place := data.find(b'\0')) >= 0:
        wide, wrong = True, 'a NUL byte, as in UTF-16 or in a file that is no text'
    try:
        if not wide:
            return data.decode('utf-8').replace(_MARK, '').replace('\r\n', '\n')
    except UnicodeDecodeError as error:
        place, wrong = error.start, f'byte {data[error.start]:#04x}, {error.reason}'
    number = lines + 1 + data.count(b'\n', 0, place)
    raise ValueError(
        f'{path}, line {number} is not UTF-8 text ({wrong}); convert it, such as with iconv'
    )


def whole(text: str, where: str) -> str:
    """``text`` without byte order marks.

    Raises:
      ValueError: if it has half of a surrogate pair, as a character that was cut in two leaves it.
    """
    if half := re.search('[\ud800-\udfff]', text):
        raise ValueError(
            f'{where} has {half[0]!a}, half of a character (a surrogate pair), which no UTF-8 '
            f'text can hold; {_CURE}'
        )
    return text.replace(_MARK, '')


def content_of(value: object, where: str, field: str) -> str | Messages:
    """The text or the chat messages of a field.

    Raises:
      ValueError: if it is neither.
    """
    if isinstance(value, str):
        return whole(value, where)
    if isinstance(value, list) and value and all(isinstance(m, dict) for m in value):
        whole(json.dumps(value, ensure_ascii=False), where)  # tool calls hold texts too
        return [
            _message(m, f'{where}: message {i} of {len(value)}') for i, m in enumerate(value, 1)
        ]
    raise ValueError(
        f'{where}: the field {field!r} is neither a text nor chat messages, a list of objects with '
        f'role and content, but {_shown(value)}; mend or remove it, or name another field: '
        'config.data.field'
    )


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    """A message with ``role`` and ``content``, a text; of ShareGPT's form too.

    Raises:
      ValueError: if its role is unknown, or its content no text.
    """
    names = (
        ('from', 'value') if 'from' in message and 'role' not in message else ('role', 'content')
    )
    key, roles = names[0], {**ROLES, **SHAREGPT}
    role = message.get(key)
    if not isinstance(role, str) or role not in roles:
        came = f'the {key} {_shown(role)}' if key in message else f'no {key}, but {_shown(message)}'
        raise ValueError(f'{where} has {came}; allowed are {", ".join(roles)}: {_CURE}')
    value = message.get(names[1])
    if value is None and roles[role] == ANSWERS and any(map(message.get, CALLS)):
        value = ''  # as OpenAI's API writes an answer that calls tools alone
    parts: list[Any] = value if isinstance(value, list) else [{'type': 'text', 'text': value}]
    kinds = [p.get('text') for p in parts if isinstance(p, dict) and p.get('type') == 'text']
    texts = [text for text in kinds if isinstance(text, str)]
    if not texts or len(texts) < len(parts):
        raise ValueError(
            f'{where} has the {names[1]} {_shown(value)}; allowed are a text, parts of the type '
            f'text, and null where an {ANSWERS} has tool_calls: {_CURE}'
        )
    # Arrow gives each message the keys of all others, as null, over which a template may stumble.
    rest = {k: v for k, v in message.items() if k not in names and v is not None}
    return {**rest, 'role': roles[role], 'content': whole(''.join(texts), where)}


def _shown(value: object) -> str:
    """The beginning of a value, as JSON writes it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f'{text[:57]}...'
