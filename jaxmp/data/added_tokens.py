"""Tokens that are added to a tokenizer: what its folder says, read as transformers 5 does."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jaxmp.data.understood import AGAIN, contents, keys, understood

CONFIG, NAMES, ADDED = FILES = (
    'tokenizer_config.json', 'special_tokens_map.json', 'added_tokens.json'
)  # fmt: skip
_WHERE = f'in {CONFIG} or {NAMES}'
_CURE = f'write it into tokenizer.json, or remove it from {CONFIG}'
# Published files have endless keys that change no token, so those that change some are refused,
# and not all that nobody reads.
_NEUTRAL = {
    'split_special_tokens': (False, None), 'do_lower_case': (False, None),
    'fix_mistral_regex': (False, None),
}  # fmt: skip
_ROLES = keys('bos_token eos_token unk_token sep_token pad_token cls_token mask_token')
_FLAGS = keys('content single_word lstrip rstrip normalized special id __type')
_TABLES = 'model_specific_special_tokens', 'extra_special_tokens'  # of names and their tokens
_PREFIX = rb'"add_prefix_space":true|"prepend_scheme":"(always|first)"|"type":"Prepend"'


def about_tokens(root: Path) -> dict[str, Any]:
    """What the files beside a tokenizer say.

    Raises:
      ValueError: if a file is damaged.
    """
    config, names, added = (contents(root / f) if (root / f).is_file() else {} for f in FILES)
    if 'added_tokens_decoder' in config:  # which is all: the older files are not read
        return config
    return {**config, **names, ADDED: added}


def neutral(root: Path, about: Mapping[str, Any], allowed: Mapping[str, Collection[Any]]) -> None:
    """Raises ValueError unless these keys have values that change no token."""
    understood(root / CONFIG, {k: about.get(k) for k in allowed}, (), allowed, _CURE)


def add_tokens(root: Path, tokenizer: Any, about: Mapping[str, Any]) -> dict[str, str]:
    """Adds the tokens that a folder is said to have to its tokenizer; returns those with a role.

    Raises:
      ValueError: if a key would change the tokens otherwise, a token is none, or the tokenizer has
        it not or under another id.
    """
    state = b''.join(p.__getstate__() for p in (tokenizer.normalizer, tokenizer.pre_tokenizer) if p)
    neutral(root, about, {**_NEUTRAL, 'add_prefix_space': (bool(re.search(_PREFIX, state)), None)})
    numbered, named, listed = _entries(root, about)
    marks = [*named.values(), *listed]
    words = {token.content for _, token in numbered}
    for token in marks:
        if token.content not in words and tokenizer.token_to_id(token.content) is None:
            raise ValueError(
                f'{root} has the token {token.content!r} {_WHERE}, which its tokenizer lacks; '
                f'correct it there, or add it to tokenizer.json and to the model'
            )
    known = {t.content: t for t in tokenizer.get_added_tokens_decoder().values()}
    fixed = {*known} if ADDED in about else set()  # the older files alter no token
    rows = [
        t for _, t in numbered if t.content not in fixed and repr(t) != repr(known.get(t.content))
    ]
    new = {t.content: t for t in reversed(marks) if t.content not in {*known, *words}}
    tokenizer.add_tokens([*rows, *new.values()])
    for i, token in numbered:
        if str(now := tokenizer.token_to_id(token.content)) != str(i):
            raise ValueError(
                f'{root} has the token {token.content!r} as {i} in {CONFIG} or {ADDED}, and as '
                f'{now} in its tokenizer; {AGAIN}'
            )
    return {k: token.content for k, token in named.items()}


def _entries(root: Path, about: Mapping[str, Any]) -> tuple[list, dict[str, Any], list]:
    """The added tokens with their ids, those with a role, and those without both."""
    from tokenizers import AddedToken

    is_role = lambda k, v: k in _ROLES or (k.endswith('_token') and isinstance(v, str | dict))
    named = {k: v for k, v in about.items() if is_role(k, v)}
    for key in _TABLES:
        named |= about[key] if isinstance(about.get(key), dict) else {}
    named = {k: _token(root, k, v) for k, v in named.items() if v}
    # A list of the new name takes the place of that of the old.
    extra = about.get('extra_special_tokens')
    key = 'additional_special_tokens' if not extra or isinstance(extra, dict) else _TABLES[1]
    listed = [_token(root, key, v) for v in _of_type(root, key, about.get(key), list)]

    key = 'added_tokens_decoder'
    rows = _of_type(root, key, about.get(key), dict).items()
    numbered = [(i, _token(root, key, v, special=False)) for i, v in rows]
    special = {token.content for token in (*named.values(), *listed)}
    numbered += [
        (i, AddedToken(word, normalized=word not in special, special=word in special))
        for word, i in _of_type(root, ADDED, about.get(ADDED), dict).items()
    ]
    # By their numbers, whether numbers, texts of them or neither, which no tokenizer has.
    numbered.sort(key=lambda row: (len(str(row[0])), str(row[0])))
    return numbered, named, listed


def _of_type(root: Path, key: str, value: Any, kind: type) -> Any:
    """A value, or an empty one in place of null."""
    if value is not None and not isinstance(value, kind):
        raise ValueError(
            f'{root} has {key}={value!r} {_WHERE}, and allowed is a {kind.__name__}: {AGAIN}'
        )
    return value or kind()


def _token(root: Path, key: str, value: Any, special: bool = True) -> Any:
    """An added token, special if it is to be or says so."""
    from tokenizers import AddedToken

    flags = value if isinstance(value, dict) else {'content': value}
    understood(f'{root}: {key}', flags, _FLAGS, {}, AGAIN)
    flags = {k: v for k, v in flags.items() if k not in ('__type', 'id')}
    flags |= {'special': True} if special else {}
    try:
        if flags.get('content'):
            return AddedToken(**flags)
    except TypeError:  # a flag is no bool, or the content no text
        pass
    raise ValueError(f'{root} has {key}={value!r} {_WHERE}, which is not a token; {AGAIN}')
