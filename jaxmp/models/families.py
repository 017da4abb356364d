"""The families of decoders: what each adds to a Llama, by the keys of Hugging Face's config.json.

Tensors have the same names in all families, and stages name their parameters likewise, so that no
table of tensors is needed: ``layers/self_attn/q_proj/weight`` of a stage is a stack of
``model.layers.N.self_attn.q_proj.weight``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data.understood import AGAIN, EITHER, keys, number, understood
from jaxmp.models.decoder import Config, Kind
from jaxmp.models.described import IDLE, OFF, UNSAID, Described
from jaxmp.models.rotary import Rope, frequencies

_NONE: Described = MappingProxyType({})


class Family(NamedTuple):
    """What a family has that a Llama has not.

    Attributes:
      architecture: transformers' class.
      defaults: values of keys that a config.json may leave out.
      switches: of `jaxmp.models.decoder.Config`.
      keys: of its config.json beside those of a Llama.
    """

    architecture: str
    defaults: Described = _NONE
    switches: Described = _NONE
    keys: Collection[str] = ()


_GEMMA = {
    'head_dim': 256, 'tie_word_embeddings': True, 'sliding_window': 4096,
    'query_pre_attn_scalar': 256, 'hidden_activation': 'gelu_pytorch_tanh',
}  # fmt: skip
_GEMMA_SWITCHES = {'norm_offset': 1.0, 'post_norms': True}
_GEMMA_KEYS = keys(
    """attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar rope_local_base_freq
    sliding_window sliding_window_pattern _sliding_window_pattern sliding_window_size"""
)
_QWEN_KEYS = keys('sliding_window use_sliding_window max_window_layers')
FAMILIES: Mapping[str, Family] = {
    'llama': Family('LlamaForCausalLM'),
    'mistral': Family('MistralForCausalLM', {'sliding_window': 4096}, keys=('sliding_window',)),
    'qwen2': Family('Qwen2ForCausalLM', switches={'bias': True}, keys=_QWEN_KEYS),
    'qwen3': Family('Qwen3ForCausalLM', {'head_dim': 128}, {'head_norms': True}, _QWEN_KEYS),
    'gemma2': Family(
        'Gemma2ForCausalLM',
        {**_GEMMA, 'attn_logit_softcapping': 50.0, 'final_logit_softcapping': 30.0},
        _GEMMA_SWITCHES,
        _GEMMA_KEYS,
    ),
    'gemma3_text': Family(
        'Gemma3ForCausalLM', {**_GEMMA, 'rope_theta': 1e6},
        {**_GEMMA_SWITCHES, 'head_norms': True}, _GEMMA_KEYS,
    ),
}  # fmt: skip
_SIZES = {
    'vocabulary': 'vocab_size', 'width': 'hidden_size', 'inner': 'intermediate_size',
    'heads': 'num_attention_heads',
}  # fmt: skip
_READ = IDLE | keys(
    """vocab_size hidden_size intermediate_size num_attention_heads num_hidden_layers head_dim
    num_key_value_heads rms_norm_eps max_position_embeddings max_sequence_length layer_types
    tie_word_embeddings rope_theta rope_scaling rope_parameters is_llama_config"""
)
_GROUPS = 'num_key_value_heads'
_SWITCHES: dict[str, Any] = {'tie_word_embeddings': EITHER, 'use_sliding_window': EITHER}
_TYPES = ('full_attention', 'sliding_attention')
_WHOLE = keys(  # where they are said
    """head_dim num_key_value_heads max_position_embeddings sliding_window sliding_window_pattern
    _sliding_window_pattern"""
)
_ABOVE_0 = keys(
    """attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar rope_theta
    rope_local_base_freq"""
)
_GATES = ('silu', 'gelu_pytorch_tanh')
_NEUTRAL = OFF | {  # what is read, and parts that no published checkpoint of these families has
    'hidden_act': _GATES, 'hidden_activation': _GATES, 'bias': (False, None),
    'attention_bias': (False, None), 'attention_dropout': (0, None), 'mlp_bias': (False, None),
    'partial_rotary_factor': (1, None), 'rope_interleaved': (False, None),
    'use_bidirectional_attention': (False, None), 'use_mrope': (False, None),
}  # fmt: skip


def config_of(described: Described, place: str = 'config.json') -> Config:
    """The decoder that a ``config.json`` describes; ``place`` is where it is, for messages.

    Raises:
      ValueError: if the architecture or one of its parts is unknown, or a size is missing or wrong.

    >>> config_of({'model_type': 'bert'})
    Traceback (most recent call last):
      ...
    ValueError: config.json has model_type='bert'; known are gemma2, gemma3_text, llama, mistral, \
qwen2, qwen3 and gpt2; give a checkpoint of one of them
    """
    name = str(described.get('model_type'))
    if name not in FAMILIES:
        names = ', '.join(sorted(FAMILIES))
        raise ValueError(
            f'{place} has model_type={name!r}; known are {names} and gpt2; give a checkpoint of '
            'one of them'
        )
    family = FAMILIES[name]
    understood(place, described, _READ.union(family.keys), _NEUTRAL, UNSAID)
    d = {'hidden_act': 'silu', 'rms_norm_eps': 1e-6, **family.defaults, **described}
    _check_values(d, place)
    sizes = {ours: number(place, d, theirs, whole=True) for ours, theirs in _SIZES.items()}
    heads, blocks = sizes['heads'], number(place, d, 'num_hidden_layers', whole=True)
    kv_heads = d.get(_GROUPS) or heads
    if heads % kv_heads:
        raise ValueError(
            f'{place} has {heads} heads, which {kv_heads} key/value heads do not divide'
        )
    depth = d.get('head_dim') or sizes['width'] // heads
    if depth < 2 or depth % 2:
        raise ValueError(
            f'{place} has heads of width {depth}, by head_dim or else hidden_size / '
            f'num_attention_heads; allowed is an even number from 2; {AGAIN}'
        )
    scalar = d.get('query_pre_attn_scalar')
    kinds, layers = _kinds(name, d, depth, blocks, place)
    return Config(
        **sizes, kv_heads=kv_heads, head_width=depth, kinds=kinds, layers=layers,
        epsilon=number(place, d, 'rms_norm_eps'),
        activation=d.get('hidden_activation') or d['hidden_act'],
        tied=bool(d.get('tie_word_embeddings', False)),
        query_scale=scalar**-0.5 if scalar else 0.0,
        attention_cap=d.get('attn_logit_softcapping') or 0.0,
        logits_cap=d.get('final_logit_softcapping') or 0.0,
        embedding_scale=float(np.float32(sizes['width'] ** 0.5)) if name in GEMMAS else 1.0,
        **family.switches,
    )  # fmt: skip


GEMMAS = ('gemma2', 'gemma3_text')


def _check_values(d: Described, place: str) -> None:
    """Raises ValueError for a value of another type than its key has, which may also be null."""
    understood(place, {k: d[k] for k in _SWITCHES if k in d}, (), _SWITCHES, AGAIN)
    for key in (k for k in (*_WHOLE, *_ABOVE_0) if d.get(k) is not None):
        number(place, d, key, whole=key in _WHOLE)
    if d.get('max_window_layers') is not None:
        number(place, d, 'max_window_layers', above=-1, whole=True)


def _kinds(
    name: str, d: Described, depth: int, blocks: int, place: str
) -> tuple[tuple[Kind, ...], tuple[int, ...]]:
    """The kinds of blocks, and the number of each block's kind."""
    types = d.get('layer_types')
    if types is None:
        types = _layer_types(name, d, blocks)
    if not isinstance(types, list) or len(types) != blocks or any(t not in _TYPES for t in types):
        raise ValueError(
            f'{place} has layer_types={reprlib.repr(types)}; allowed is a list of {blocks}, each '
            f'{" or ".join(_TYPES)}; {AGAIN}'
        )
    names = list(dict.fromkeys(types))
    window = {'full_attention': 0, 'sliding_attention': d.get('sliding_window') or 0}
    ropes = {t: _rope(name, d, t, place) for t in names}
    kinds = (Kind(*frequencies(depth, ropes[t], place), window=window[t]) for t in names)
    return tuple(kinds), tuple(map(names.index, types))


def _layer_types(name: str, d: Described, blocks: int) -> list[str]:
    """Which blocks have a window, where config.json does not list them."""
    if name == 'mistral':
        sliding = [bool(d.get('sliding_window'))] * blocks
    elif name in GEMMAS:  # every second, every sixth block sees all
        named = d.get('sliding_window_pattern') or d.get('_sliding_window_pattern')
        period = named or (2 if name == 'gemma2' else 6)
        sliding = [bool((i + 1) % period) for i in range(blocks)]
    else:
        first = d.get('max_window_layers', 28) if d.get('use_sliding_window') else blocks
        sliding = [name.startswith('qwen') and i >= first for i in range(blocks)]
    return ['sliding_attention' if s else 'full_attention' for s in sliding]


def _rope(name: str, d: Described, layer_type: str, place: str) -> Rope:
    """Rotary positions of a kind of blocks, as transformers 5 writes them or as 4 did."""
    rope = _words(d, 'rope_parameters', place)
    rope = _words(rope, layer_type, place) if layer_type in rope else rope
    theta = d.get('rope_theta') or 10000.0
    if name == 'gemma3_text' and layer_type == 'sliding_attention':
        return {'rope_theta': d.get('rope_local_base_freq') or 10000.0, **rope}
    positions = {'original_max_position_embeddings': d.get('max_position_embeddings')}
    return {'rope_theta': theta, **positions, **_words(d, 'rope_scaling', place), **rope}


def _words(d: Described, key: str, place: str) -> Rope:
    """The object under a key; null and none are an empty one."""
    value = {} if d.get(key) is None else d[key]
    if not isinstance(value, dict):
        raise ValueError(
            f'{place} has {key}={reprlib.repr(value)}; allowed is an object or null; {AGAIN}'
        )
    return value
