"""The tokenizer in a GGUF file: a byte-level BPE and its chat template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from jaxmp.data.chat import Template
from jaxmp.data.gguf import opened
from jaxmp.data.tokenizer import Tokenizer, wrapped

_SPECIAL = 3  # of `tokenizer.ggml.token_type`: a token that no text is split into
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
      ValueError: if the file has none, or one of another kind than a byte-level BPE.
    """
    from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Whole

    fields = opened(path).fields
    kind, name = (fields.get(f'tokenizer.ggml.{k}') for k in ('model', 'pre'))
    splits = _splits(str(name)) if kind == 'gpt2' else []
    if not splits:
        raise ValueError(
            f'{path} has a tokenizer of the kind {kind}, {name}; of a GGUF file gpt2 is read, with '
            'gpt-2, smollm, llama-bpe or qwen2: give config.data.tokenizer the folder of the '
            "original's tokenizer.json"
        )
    # The file has the tokens and merges of a tokenizer.json, and of its other parts the name alone.
    words, kinds = (fields[f'tokenizer.ggml.{k}'] for k in ('tokens', 'token_type'))
    merges = [tuple(pair.split(' ')) for pair in fields['tokenizer.ggml.merges']]
    whole = Whole(models.BPE({word: i for i, word in enumerate(words)}, merges))
    if name == 'qwen2':
        whole.normalizer = normalizers.NFC()
    whole.pre_tokenizer = pre_tokenizers.Sequence(splits)
    whole.decoder = decoders.ByteLevel()
    special = (w for w, k in zip(words, kinds, strict=True) if k == _SPECIAL)
    whole.add_special_tokens([AddedToken(w, special=True) for w in special])

    named = {k: fields.get(f'tokenizer.ggml.{k}_token_id') for k in ('bos', 'eos')}
    tokens = {f'{k}_token': words[i] for k, i in named.items() if i is not None}
    source = fields.get('tokenizer.chat_template')
    begins = fields.get('tokenizer.ggml.add_bos_token') and named['bos'] is not None
    if begins:  # for whoever reads the files that are saved
        first = tokens['bos_token']
        whole.post_processor = processors.TemplateProcessing(
            single=f'{first} $A', special_tokens=[(first, named['bos'])]
        )
    template = Template(source, tuple(sorted(tokens.items()))) if source else None
    text = f'{kind} {name} {words} {merges} {source}'
    return wrapped(
        whole,
        save=lambda folder: _save(whole, folder, tokens, source),
        begin=(named['bos'],) if begins else (),
        end=() if named['eos'] is None else (named['eos'],),
        template=template,
        identity=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
    )


def _save(whole: Any, folder: Path, tokens: dict[str, str], template: str | None) -> None:
    """Writes the files that transformers reads."""
    whole.save(str(folder / 'tokenizer.json'))
    about = {'tokenizer_class': 'PreTrainedTokenizerFast', **tokens}
    about |= {'chat_template': template} if template else {}
    (folder / 'tokenizer_config.json').write_text(json.dumps(about, indent=1), encoding='utf-8')
