"""The tokenizer in a GGUF file: a byte-level BPE or one of SentencePiece, and its template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxmp.data.chat import Template
from jaxmp.data.gguf import opened
from jaxmp.data.types import Tokenizer, wrapped
from jaxmp.data.understood import keys, understood

# Kinds of tokens: the special are one token wherever their text stands, the unused in no text.
_NORMAL, _UNKNOWN, _CONTROL, _ADDED, _UNUSED, _BYTE = _KINDS = 1, 2, 3, 4, 5, 6
_READ = keys(  # and what changes no token of a text
    """model pre tokens token_type merges bos_token_id eos_token_id add_bos_token add_eos_token
    eot_token_id eom_token_id unknown_token_id padding_token_id seperator_token_id mask_token_id
    cls_token_id prefix_token_id suffix_token_id middle_token_id fim_pre_token_id fim_suf_token_id
    fim_mid_token_id fim_pad_token_id fim_rep_token_id fim_sep_token_id scores token_type_count"""
)
_NEUTRAL = {
    'add_sep_token': (False,), 'add_space_prefix': (False,), 'normalizer.lowercase': (False,),
    'normalizer.strip_accents': (False,), 'remove_extra_whitespaces': (False,),
    'suppress_tokens': ([],),
}  # fmt: skip
_OF_SCORES = {  # llama.cpp's defaults
    'bos_token_id': 1, 'eos_token_id': 2, 'unknown_token_id': 0, 'add_bos_token': True,
    'add_space_prefix': True,
}  # fmt: skip
_FOLDER = "give config.data.tokenizer the folder of the original's tokenizer.json"
_WORDS = (  # of Llama 3; runs of up to {} digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{}"
    r'| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


def _splits(name: str) -> list[Any]:
    """What cuts a text into words, by the name that llama.cpp gives it; empty if unknown."""
    from tokenizers import Regex, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = lambda digits: pre_tokenizers.Split(Regex(_WORDS.format(digits)), 'isolated')
    return {
        'gpt-2': [level],
        'smollm': [pre_tokenizers.Digits(individual_digits=True), level],
        'llama-bpe': [words('{1,3}'), bytes_only],
        'qwen2': [words(''), bytes_only],
    }.get(name, [])


def from_gguf(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file.

    Raises:
      FileNotFoundError: if there is no such file.
      ImportError: if the package gguf is not installed.
      ValueError: if the file has none, or one of another kind.
    """
    from tokenizers import AddedToken, processors

    fields, _ = opened(path)
    head = 'tokenizer.ggml.'
    said = {k.removeprefix(head): v for k, v in fields.items() if k.startswith(head)}
    kind, name = said.get('model'), said.get('pre')
    scored = kind == 'llama'
    said = _OF_SCORES | said if scored else said
    known = scored or (kind == 'gpt2' and _splits(str(name)))
    needed = 'tokens', 'scores' if scored else 'merges'
    if not known or not all(isinstance(said.get(k), list) for k in needed):
        raise ValueError(
            f'{path} has a tokenizer of the kind {kind}, {name}; of a GGUF file gpt2 is read, with '
            'tokens, merges, and gpt-2, smollm, llama-bpe or qwen2, and llama is, with tokens and '
            f'scores: {_FOLDER}'
        )
    prefix = {'add_space_prefix': (True, False)} if scored else {}
    understood(path, said, _READ, _NEUTRAL | prefix, _FOLDER)
    words: list[str] = said['tokens']
    vocabulary = {word: i for i, word in enumerate(words)}
    ids = _ids(path, said, len(words))
    kinds = _kinds(path, said, words, ids)
    by_words = name == 'llama-bpe'  # a word that is a token is one, whatever merges make of it
    whole = _of_scores(path, said, kinds) if scored else _of_merges(path, said, str(name), by_words)
    of_kind = lambda *wanted: [w for w, k in zip(words, kinds, strict=True) if k in wanted]
    whole.add_special_tokens([AddedToken(w, special=True) for w in of_kind(_UNKNOWN, _CONTROL)])
    # SentencePiece looks for them where spaces are marked, which may be a part of them.
    marked = scored and not said['add_space_prefix']
    whole.add_tokens([AddedToken(w, normalized=marked) for w in of_kind(_ADDED)])

    tokens = {k: words[ids[k]] for k in ('bos_token', 'eos_token') if k in ids}
    # What a file does not say is as in llama.cpp.
    defaults = {'bos_token': (by_words or scored) and 'bos_token' in tokens, 'eos_token': False}
    adds = [k for k, default in defaults.items() if said.get(f'add_{k}', default)]
    if lacks := {*adds} - tokens.keys():
        raise ValueError(f'{path} has add_{min(lacks)}=True and no {min(lacks)}_id: {_FOLDER}')
    before, after = ([tokens[k]] if k in adds else [] for k in defaults)
    if adds:
        whole.post_processor = processors.TemplateProcessing(
            single=[*before, '$A', *after],
            special_tokens=[(word, vocabulary[word]) for word in (*before, *after)],
        )
    source = fields.get('tokenizer.chat_template')
    template = Template(source, tuple(sorted(tokens.items()))) if source else None
    text = f'{whole.to_str()} {kinds} {adds} {source}'
    return wrapped(
        whole,
        save=lambda folder: _save(whole, folder, tokens, source),
        begin=tuple(vocabulary[word] for word in before),
        end=(ids['eos_token'],) if 'eos_token' in tokens else (),
        template=template,
        identity=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )


def _kinds(
    path: Path, said: Mapping[str, Any], words: Sequence[str], ids: Mapping[str, int]
) -> list[int]:
    """The kind of each token; one with a role is a control token whatever the file says."""
    kinds = np.atleast_1d(said.get('token_type', [_NORMAL] * len(words))).tolist()
    known = _KINDS if said['model'] == 'llama' else _KINDS[:-1]  # of others no token is a byte
    for kind in {*kinds}:
        understood(path, {'token_type': kind}, (), {'token_type': known}, _FOLDER)
    if not len(kinds) == len(words) == len({*words}):
        raise ValueError(
            f'{path} has {len(words)} tokens, {len({*words})} of them different, and '
            f'{len(kinds)} kinds of tokens; allowed are as many of each: {_FOLDER}'
        )
    # A letter, such as '!', has a role for want of another.
    whole_words = {i for i in ids.values() if kinds[i] == _NORMAL and len(words[i]) > 1}
    return [_CONTROL if i in whole_words else kind for i, kind in enumerate(kinds)]


def _of_merges(path: Path, said: Mapping[str, Any], name: str, by_words: bool) -> Any:
    """The byte-level BPE of a file's tokens and merges; the file only names its other parts."""
    from tokenizers import Tokenizer as Whole
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    vocabulary = {word: i for i, word in enumerate(said['tokens'])}
    pairs: list[Any] = [tuple(str(pair).split(' ')) for pair in said['merges']]
    try:
        whole = Whole(models.BPE(vocabulary, pairs, ignore_merges=by_words))
    except Exception as error:  # the tokenizers library raises plain Exception
        odd = next((' '.join(pair) for pair in pairs if len(pair) != 2), str(error))
        raise ValueError(
            f'{path} has merges that are not of two of its tokens each ({odd}): {_FOLDER}'
        ) from error
    if name == 'qwen2':
        whole.normalizer = normalizers.NFC()
    whole.pre_tokenizer = pre_tokenizers.Sequence(_splits(name))
    whole.decoder = decoders.ByteLevel()
    return whole


def _of_scores(path: Path, said: Mapping[str, Any], kinds: Sequence[int]) -> Any:
    """SentencePiece's BPE: of all pairs that make a token, that of the highest score is joined."""
    from tokenizers import Tokenizer as Whole
    from tokenizers import decoders, models, normalizers

    words, scores, space = said['tokens'], said['scores'], '\u2581'
    normal = {w: -s for w, s, k in zip(words, scores, kinds, strict=False) if k == _NORMAL}
    if len(scores) != len(words) or len({*normal.values()}) < min(len(normal), 2):
        raise ValueError(
            f'{path} has {len(words)} tokens and {len(scores)} scores, {len({*scores})} of them '
            f'different; allowed is a score for each, by which they are joined: {_FOLDER}'
        )
    vocabulary = {word: i for i, word in enumerate(words)}
    model = models.BPE(
        vocabulary, _pairs(normal, vocabulary), unk_token=words[said['unknown_token_id']],
        fuse_unk=True, byte_fallback=_BYTE in kinds,
    )  # fmt: skip
    whole = Whole(model)
    marks = [normalizers.Prepend(space), normalizers.Replace(' ', space)]
    parts = [decoders.Replace(space, ' '), decoders.ByteFallback(), decoders.Fuse()]
    if said['add_space_prefix']:  # also behind a special token, as llama.cpp does
        parts.append(decoders.Strip(' ', 1, 0))
    whole.normalizer = normalizers.Sequence(marks if said['add_space_prefix'] else marks[1:])
    whole.decoder = decoders.Sequence(parts)
    return whole


def _pairs(ranks: Mapping[str, float], ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of tokens that make a token, the lowest rank first, then the lowest ids.

    >>> _pairs({'a': 0, 'b': 0, 'ab': 2, 'ba': 1, 'aba': 3}, {'a': 0, 'b': 1, 'ab': 2, 'ba': 3})
    [('b', 'a'), ('a', 'b'), ('a', 'ba'), ('ab', 'a')]
    """
    pairs = (
        (rank, ids[word[:i]], ids[word[i:]], word[:i], word[i:])
        for word, rank in ranks.items()
        for i in range(1, len(word))
        if word[:i] in ranks and word[i:] in ranks
    )
    return [(left, right) for *_, left, right in sorted(pairs)]


def _ids(path: Path, said: Mapping[str, Any], size: int) -> dict[str, int]:
    """The ids of the tokens with a role, such as ``eos_token``."""
    ids = {k.removesuffix('_id'): i for k, i in said.items() if k.endswith('_token_id')}
    for role, i in ids.items():
        if type(i) is not int or i not in range(size):
            raise ValueError(f'{path} has {role}_id={i!r}; allowed is 0 to {size - 1}: {_FOLDER}')
    return ids


def _save(whole: Any, folder: Path, tokens: dict[str, str], template: str | None) -> None:
    """Writes the files that transformers reads."""
    whole.save(str(folder / 'tokenizer.json'))
    marks = {role: word for role, word in tokens.items() if len(word) > 1}  # as `from_gguf`
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', **marks}
    about |= {'chat_template': template} if template else {}
    (folder / 'tokenizer_config.json').write_text(json.dumps(about, indent=1), encoding='utf-8')
