"""`Checkpoint`: a pretrained model's description and its tensors, which are read by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxmp.data.understood import keys

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


class Checkpoint(NamedTuple):
    """A pretrained model on disk.

    Attributes:
      place: folder or file.
      described: contents of its ``config.json``.
      shapes: of all tensors, by name.
      read: the tensor of a name, in the file's dtype.
      kinds: of the blocks of a GGUF file's tensors, by name; see `jaxmp.models.blocks`.
      read_bytes: those blocks, of a name, row by row; they may be mapped, see `jaxmp.data.release`.
    """

    place: Path
    described: Described
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    kinds: Mapping[str, str] = MappingProxyType({})
    read_bytes: Callable[[str], np.ndarray] | None = None
