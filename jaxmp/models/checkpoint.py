"""`Checkpoint`: a pretrained model's description and its tensors, which are read by name.

A folder in Hugging Face's layout has ``config.json`` and ``model.safetensors``, or an index and the
files that it names. A GGUF file has all in one (`jaxmp.models.gguf_file`). Opening reads names and
shapes only. Loading a safetensors file, unlike a pickle, cannot run code.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data.understood import AGAIN, contents, keys

FILE = 'model.safetensors'
INDEX = f'{FILE}.index.json'
Described = Mapping[str, Any]  # the contents of a config.json
# Keys of any config.json that change no logit: names, what a call returns, how one generates.
IDLE = keys(
    """architectures auto_map bos_token_id dtype eos_token_id finetuning_task id2label
    initializer_range label2id model_type pad_token_id prefix problem_type sep_token_id
    task_specific_params tokenizer_class torch_dtype transformers.js_config transformers_version
    unsloth_fixed unsloth_version use_cache _attn_implementation _attn_implementation_autoset
    _commit_hash _name_or_path _num_labels attn_implementation cache_implementation
    chunk_size_feed_forward gradient_checkpointing is_decoder num_labels output_attentions
    output_hidden_states output_past pretraining_tp return_dict tf_legacy_loss torchscript
    use_bfloat16 bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty
    do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores
    remove_invalid_values repetition_penalty return_dict_in_generate suppress_tokens temperature
    top_k top_p typical_p eos_token_ids"""
)
OFF: dict[str, tuple[Any, ...]] = {  # parts that no decoder here has, and their values then
    'add_cross_attention': (False, None), 'is_encoder_decoder': (False, None),
    'pruned_heads': ({}, None), 'tie_encoder_decoder': (False, None),
}  # fmt: skip
UNSAID = 'give another checkpoint, or remove the key if it changes no logit'
_DTYPES = ('F64', 'F32', 'F16', 'BF16')  # as safetensors names them; others need a scale beside


class Checkpoint(NamedTuple):
    """A pretrained model on disk.

    Attributes:
      place: folder or file.
      described: contents of its ``config.json``.
      shapes: of all tensors, by name.
      read: the tensor of a name, in the file's dtype.
    """

    place: Path
    described: Described
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint in a folder, or in a GGUF file.

    Raises:
      FileNotFoundError: if there is none, or a file that its index names is missing.
      ValueError: if a file is damaged or cut off.
    """
    place = Path(path).expanduser()
    if place.is_file() and place.suffix == '.gguf':
        from jaxmp.models.gguf_file import open_gguf

        return open_gguf(place)
    if not place.is_dir():
        raise FileNotFoundError(f'{place} is no folder and no GGUF file; {wanted()}')
    if not (place / 'config.json').is_file():
        raise FileNotFoundError(f'no config.json in {place}; {wanted()}')
    shapes, read = open_tensors(_files(place))
    index = _indexed(place)
    if missing := sorted(index.keys() - shapes):
        raise ValueError(
            f'{place / index[missing[0]]} lacks {missing[0]}, which {INDEX} lists; {AGAIN}'
        )
    return Checkpoint(place, contents(place / 'config.json'), shapes, read)


@functools.cache
def digest(path: str) -> str:
    """The SHA-256 of a file, or of a folder's ``*.safetensors``: 12 digits; ``''`` without any."""
    place = Path(path).expanduser() if path else Path()
    files = [place] if place.is_file() else sorted(place.glob('*.safetensors')) if path else []
    total = hashlib.sha256()
    for file in files:
        with file.open('rb') as stream:
            while part := stream.read(2**24):
                total.update(part)
    return total.hexdigest()[:12] if files else ''


def open_tensors(
    files: Sequence[Path],
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], np.ndarray]]:
    """The shapes of all tensors of some safetensors files, and a function that reads one.

    Raises:
      ValueError: if a file is damaged or cut off; the function, if a tensor is quantised.
    """
    shapes, where = {}, {}
    for file in files:
        tensors = _open(file)
        for name in tensors.keys():  # noqa: SIM118 - not a dict
            shapes[name], where[name] = tuple(tensors.get_slice(name).get_shape()), (tensors, file)

    def read(name: str) -> np.ndarray:
        tensors, file = where[name]
        if (dtype := tensors.get_slice(name).get_dtype()) not in _DTYPES:
            raise ValueError(
                f'{name} in {file} is {dtype}, and tensors of {", ".join(_DTYPES)} are read; give '
                'a checkpoint that is not quantised, or a GGUF file'
            )
        return tensors.get_tensor(name)

    return shapes, read


def wanted() -> str:
    """What a path may be."""
    return (
        f'give a folder with config.json and {FILE} (or {INDEX} and its files), a GGUF file, or '
        'owner/name of the Hugging Face hub'
    )


def lacking(place: Path) -> list[str]:
    """The files that a folder in Hugging Face's layout lacks; a download may have been cut off."""
    if not (place / 'config.json').is_file():
        return ['config.json']
    if (place / FILE).is_file():
        return []
    if not (place / INDEX).is_file():
        return [FILE]
    names = sorted(set(_indexed(place).values()))
    return [name for name in names if not (place / name).is_file()]


def _indexed(place: Path) -> dict[str, str]:
    """The file of each tensor, by the index; empty without one."""
    if (place / FILE).is_file() or not (place / INDEX).is_file():
        return {}
    where = contents(place / INDEX).get('weight_map')
    if not isinstance(where, dict) or not where:
        raise ValueError(f'{place / INDEX} has no weight_map; {AGAIN}')
    return {str(name): str(file) for name, file in where.items()}


def _files(place: Path) -> list[Path]:
    if (place / FILE).is_file():
        return [place / FILE]
    names = sorted(set(_indexed(place).values()))
    if not names:
        other = sorted(p.name for p in place.glob('*.bin'))
        have = f' (only {", ".join(other)}; pickles are not read)' if other else ''
        raise FileNotFoundError(f'no weights in {place}{have}; {wanted()}')
    for name in names:
        if Path(name).name != name or not (place / name).is_file():
            raise FileNotFoundError(f'{place / INDEX} names {name}, which is missing; {AGAIN}')
    return [place / name for name in names]


def notes(file: Path) -> dict[str, str]:
    """What a safetensors file says of itself."""
    return dict(_open(file).metadata() or {})


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, 'numpy')
    except (SafetensorError, OSError) as error:
        size = file.stat().st_size
        whole = f' of {full:,}' if (full := _full_size(file)) else ''
        raise ValueError(
            f'{file} is damaged or cut off: {size:,} bytes{whole} ({error}); {AGAIN}'
        ) from error


def _full_size(file: Path) -> int:
    """The bytes that a safetensors file has by its header; 0 if that is damaged too."""
    with file.open('rb') as stream:
        length = int.from_bytes(stream.read(8), 'little')
        try:
            header = json.loads(stream.read(min(length, 10**8)))
            ends = [v['data_offsets'][1] for k, v in header.items() if k != '__metadata__']
        except (ValueError, KeyError, TypeError, AttributeError):
            return 0
    return 8 + length + max(ends, default=0)
