"""GGUF, llama.cpp's format, as a `Checkpoint`, described in the words of config.json.

Quantised tensors are read as float32. The rows of a Llama's q and k are reordered: llama.cpp pairs
neighbouring rows for the rotation, Hugging Face's layout the halves of a head. Norms of Gemma have
1 added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data import release
from jaxmp.data.gguf import Fields, Tensors, opened
from jaxmp.data.understood import AGAIN, keys, number, understood
from jaxmp.models.described import Checkpoint, Described
from jaxmp.models.families import FAMILIES
from jaxmp.models.rotary import frequencies


class Architecture(NamedTuple):
    """What a file has that one of a Llama has not.

    Attributes:
      family: its ``model_type`` in config.json.
      inside: tensors of a block.
      read: its keys, with those of config.json and llama.cpp's defaults; 0: it need not say.
      largest: blocks of the model whose queries are scaled by width / heads (27B); 0: none.
    """

    family: str
    inside: Mapping[str, str] = {}
    read: Mapping[str, tuple[str, float | None]] = {}
    largest: int = 0


_GEMMA = {
    'post_attention_norm': 'post_attention_layernorm', 'ffn_norm': 'pre_feedforward_layernorm',
    'post_ffw_norm': 'post_feedforward_layernorm',
}  # fmt: skip
_FOLDER = 'give a folder of safetensors'
_WINDOW, _PERIOD = 'attention.sliding_window', 'attention.sliding_window_pattern'
ARCHITECTURES = {name: Architecture(name) for name in ('llama', 'qwen2', 'qwen3')} | {
    'gemma2': Architecture('gemma2', _GEMMA, {
        'attn_logit_softcapping': ('attn_logit_softcapping', 50.0),
        'final_logit_softcapping': ('final_logit_softcapping', 30.0),
        _WINDOW: ('sliding_window', 4096), _PERIOD: ('sliding_window_pattern', 2),
    }, 46),
    'gemma3': Architecture('gemma3_text', _GEMMA, {
        'final_logit_softcapping': ('final_logit_softcapping', 0),
        'rope.freq_base_swa': ('rope_local_base_freq', 10000.0),
        _WINDOW: ('sliding_window', None), _PERIOD: ('sliding_window_pattern', 6),
    }, 62),
}  # fmt: skip
_OUTSIDE = {'token_embd': 'embed_tokens', 'output_norm': 'norm', 'output': 'lm_head'}
_INSIDE = {
    'attn_q': 'self_attn.q_proj', 'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj', 'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm', 'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj', 'attn_norm': 'input_layernorm',
    'ffn_norm': 'post_attention_layernorm',
}  # fmt: skip
_ROPE = 'rope_freqs.weight'  # Llama 3's scaling, as divisors of the frequencies
_MARKS = ('bos', 'eos', 'eot', 'eom')  # the last three end what is generated
_READ = keys(  # and what changes no logit
    """context_length embedding_length block_count feed_forward_length attention.head_count
    attention.head_count_kv attention.key_length attention.layer_norm_rms_epsilon rope.freq_base
    rope.scale_linear rope.scaling.factor rope.scaling.finetuned
    rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_beta_fast
    rope.scaling.yarn_beta_slow tensor_data_layout vocab_size"""
)
_NEUTRAL = {
    'attention.causal': (True,), 'attention.clamp_kqv': (0,), 'attention.max_alibi_bias': (0,),
    'attention.scale': (0,), 'attention.sliding_window': (0,), 'attn_logit_softcapping': (0,),
    'embedding_scale': (1,), 'expert_count': (0,), 'expert_used_count': (0,),
    'final_logit_softcapping': (0,), 'general.type': ('model',), 'logit_scale': (1,),
    'pooling_type': (0,), 'residual_scale': (1,), 'rope.scaling.attn_factor': (1,),
    'rope.scaling.yarn_ext_factor': (1,), 'rope.scaling.yarn_log_multiplier': (0,),
    'split.count': (0, 1), 'use_parallel_residual': (False,),
}  # fmt: skip


def open_gguf(file: Path) -> Checkpoint:
    """The checkpoint in a GGUF file.

    Raises:
      ImportError: without the package ``gguf``.
      ValueError: if the file is damaged, or of another architecture.
    """
    fields, tensors = opened(file)
    described = _described(file, fields, tensors)
    arch = ARCHITECTURES[fields['general.architecture']]
    names = {_name(name, {**_INSIDE, **arch.inside}): name for name in tensors if name != _ROPE}
    offset = np.float32(FAMILIES[arch.family].switches.get('norm_offset', 0.0))

    def ordered(name: str, array: np.ndarray) -> np.ndarray:
        for part, heads in (('q', 'num_attention_heads'), ('k', 'num_key_value_heads')):
            if described['model_type'] == 'llama' and f'.{part}_proj.' in name:
                array = by_halves(array, described[heads])
        return array

    def read(name: str) -> np.ndarray:
        from gguf import dequantize

        tensor = tensors[names[name]]
        array = np.array(dequantize(tensor.data, tensor.tensor_type), copy=None)
        release(tensor.data)
        array = ordered(name, array)
        return array - offset if name.endswith('norm.weight') else array

    def read_bytes(name: str) -> np.ndarray:
        return ordered(name, tensors[names[name]].data.view(np.uint8))

    shapes = {name: tuple(map(int, tensors[theirs].shape[::-1])) for name, theirs in names.items()}
    kinds = {name: tensors[theirs].tensor_type.name for name, theirs in names.items()}
    return Checkpoint(file, described, shapes, read, kinds, read_bytes)


def by_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k with the pairs of each rotation in the two halves of a head.

    >>> by_halves(np.arange(4)[:, None], 1).ravel().tolist()
    [0, 2, 1, 3]
    """
    rows = weight.shape[0]
    paired = weight.reshape(heads, rows // heads // 2, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _name(name: str, inside: Mapping[str, str]) -> str:
    """A tensor's name in Hugging Face's files."""
    words = name.split('.')
    if words[0] == 'blk' and words[2] in inside:
        return f'model.layers.{words[1]}.{inside[words[2]]}.{words[3]}'
    if words[0] in _OUTSIDE:
        room = '' if words[0] == 'output' else 'model.'
        return f'{room}{_OUTSIDE[words[0]]}.{words[1]}'
    return name


def _described(file: Path, fields: Fields, tensors: Tensors) -> Described:
    """What ``config.json`` would say."""
    kind = fields.get('general.architecture')
    if kind not in ARCHITECTURES:
        raise ValueError(
            f'{file} has the architecture {kind!r}; of GGUF files {", ".join(ARCHITECTURES)} are '
            'read: give a folder of safetensors'
        )

    arch = ARCHITECTURES[kind]
    # The tokenizer's words are read with it; of others, such as general.name, all are names.
    said = {
        k.removeprefix(f'{kind}.'): v for k, v in fields.items()
        if k.startswith(f'{kind}.') or k in _NEUTRAL
    }  # fmt: skip

    def get(name: str, default: Any = None) -> Any:
        value = said.get(name, default)
        if value is None or isinstance(value, list):
            came = 'does not say its' if value is None else 'has a number for each block as'
            raise ValueError(f'{file} {came} {kind}.{name}; one number is read: {AGAIN}')
        return value

    # What older files leave out has a default.
    whole = ('attention.head_count', 'embedding_length')
    heads, width = (number(f'{file}: {kind}', said, key, whole=True) for key in whole)
    said = {'attention.key_length': width // heads, **said}
    depth = number(f'{file}: {kind}', said, 'attention.key_length', whole=True)
    of_head = {'rope.dimension_count': (depth,), 'attention.value_length': (depth,)}
    understood(file, said, _READ.union(arch.read), _NEUTRAL | of_head, _FOLDER)
    described = {
        'architectures': [FAMILIES[arch.family].architecture],
        'model_type': arch.family,
        'vocab_size': int(tensors['token_embd.weight'].shape[1]),
        'hidden_size': width,
        'intermediate_size': get('feed_forward_length'),
        'num_hidden_layers': get('block_count'),
        'num_attention_heads': heads,
        'num_key_value_heads': get('attention.head_count_kv', heads),
        'head_dim': depth,
        'hidden_act': FAMILIES[arch.family].defaults.get('hidden_activation', 'silu'),
        'rms_norm_eps': get('attention.layer_norm_rms_epsilon'),
        'max_position_embeddings': get('context_length', 2048),
        'tie_word_embeddings': 'output.weight' not in tensors,
        'rope_theta': get('rope.freq_base', 10000.0),
    }
    beside = {ours: get(theirs, default) for theirs, (ours, default) in arch.read.items()}
    described |= {key: value for key, value in beside.items() if value != 0}
    if arch.largest:
        largest = described['num_hidden_layers'] == arch.largest
        described['query_pre_attn_scalar'] = width // heads if largest else depth
    if scaling := _scaling(file, get, described, tensors):
        described['rope_scaling'] = scaling
    begin, *stops = (fields.get(f'tokenizer.ggml.{k}_token_id') for k in _MARKS)
    ends = sorted({stop for stop in stops if stop is not None})
    marks = {'bos_token_id': begin, 'eos_token_id': ends if ends[1:] else next(iter(ends), None)}
    return described | {key: value for key, value in marks.items() if value is not None}


def _scaling(
    file: Path, get: Callable[..., Any], described: Described, tensors: Tensors
) -> dict[str, Any]:
    """How the rotary positions are scaled; empty if not."""
    # As in llama.cpp a factor alone is linear, and files of 2023 have another word for it.
    older = get('rope.scale_linear', 0.0)
    kind = get('rope.scaling.type', 'linear' if get('rope.scaling.factor', older) else 'none')
    if _ROPE in tensors:  # the file has the quotients; the published Llamas differ in the factor
        divisors = np.array(tensors[_ROPE].data, np.float32)
        scaling = {
            'rope_type': 'llama3', 'factor': float(divisors.max()), 'low_freq_factor': 1.0,
            'high_freq_factor': 4.0, 'original_max_position_embeddings': 8192,
        }  # fmt: skip
        depth, theta = described['head_dim'], {'rope_theta': described['rope_theta']}
        plain, scaled = (frequencies(depth, theta | s, file)[0] for s in ({}, scaling))
        if kind != 'none' or not np.allclose(np.divide(plain, divisors), scaled, rtol=1e-3):
            raise ValueError(
                f'{file} scales its rotary positions as no published Llama 3 does; give a folder '
                'of safetensors'
            )
        return scaling
    if kind == 'none':
        return {}
    return {
        'rope_type': kind,
        'factor': get('rope.scaling.factor', older or None),
        'original_max_position_embeddings': get(
            'rope.scaling.original_context_length', described['max_position_embeddings']
        ),
        'beta_fast': get('rope.scaling.yarn_beta_fast', 32.0),
        'beta_slow': get('rope.scaling.yarn_beta_slow', 1.0),
    }
