"""Writes decoders.npz: tiny decoders of transformers' own classes, with their logits.

Needs torch and transformers (the extra ``parity``); the tests need neither. Every parameter is
random, the biases and the scales of norms too, else a wrong mapping of names would stay unseen.
Computed in float64 where transformers does not say float32, stored in float32; weights are stored
as float16 values exactly. Run: python tests/golden/make_decoders.py
"""

import json
import pathlib

import numpy as np

SIZES = {
    'vocab_size': 37, 'hidden_size': 16, 'intermediate_size': 20, 'num_hidden_layers': 3,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'max_position_embeddings': 64,
}  # fmt: skip
TYPES = ['sliding_attention', 'full_attention', 'sliding_attention']
LLAMA3 = {
    'rope_type': 'llama3', 'rope_theta': 100.0, 'factor': 4.0, 'low_freq_factor': 1.0,
    'high_freq_factor': 4.0, 'original_max_position_embeddings': 16,
}  # fmt: skip
YARN = {
    'rope_type': 'yarn', 'rope_theta': 100.0, 'factor': 4.0, 'original_max_position_embeddings': 16
}  # fmt: skip
LINEAR = {'rope_type': 'linear', 'rope_theta': 100.0, 'factor': 2.0}
TWO = {
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 50.0},
    'full_attention': {'rope_type': 'linear', 'rope_theta': 1000.0, 'factor': 8.0},
}
CASES = {  # model_type, what differs
    'llama': ('llama', {'num_key_value_heads': 4, 'tie_word_embeddings': True}),
    'llama3': ('llama', {'rope_parameters': LLAMA3, 'head_dim': 8}),
    'llama_linear': ('llama', {'rope_parameters': LINEAR}),
    'mistral': ('mistral', {'sliding_window': 4, 'head_dim': 8}),
    'qwen2': ('qwen2', {'tie_word_embeddings': True, 'rope_parameters': YARN}),
    'qwen3': (
        'qwen3',
        {'head_dim': 8, 'use_sliding_window': True, 'sliding_window': 5, 'layer_types': TYPES},
    ),
    'gemma2': (
        'gemma2',
        {'head_dim': 8, 'sliding_window': 4, 'query_pre_attn_scalar': 10, 'layer_types': TYPES,
         'attn_logit_softcapping': 3.0, 'final_logit_softcapping': 4.0},
    ),
    'gemma3': (
        'gemma3_text',
        {'head_dim': 8, 'sliding_window': 4, 'query_pre_attn_scalar': 10, 'layer_types': TYPES,
         'rope_parameters': TWO},
    ),
}  # fmt: skip
BATCH, LENGTH, SEED = 2, 13, 0


def model(case, seed=SEED):
    """A model of a case whose every parameter is random, in float64."""
    import torch  # here, so that the tests can look at this file without it
    import transformers

    kind, changes = CASES[case]
    config = transformers.AutoConfig.for_model(
        kind, **{**SIZES, 'bos_token_id': 0, 'eos_token_id': 0, 'pad_token_id': None, **changes}
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager')
    made = made.eval().double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in made.named_parameters():
            noise = torch.randn(p.shape, generator=random, dtype=torch.float64)
            centre = 1.0 if p.ndim == 1 and p.mean() > 0.5 else 0.0
            wide = 0.3 if p.ndim == 1 or 'embed' in name or 'lm_head' in name else 0.4
            p.copy_((centre + wide * noise).half().double())
    return made


def score(made, tokens):
    """The logits of tokens."""
    import torch

    with torch.no_grad():
        return made(input_ids=torch.tensor(np.asarray(tokens, np.int64))).logits.numpy()


def main():
    tokens = np.random.default_rng(SEED).integers(0, SIZES['vocab_size'], (BATCH, LENGTH))
    arrays = {'tokens': tokens.astype(np.int32)}
    for case in CASES:
        made = model(case)
        described = made.config.to_dict() | {'dtype': 'float32'}
        arrays[f'{case}/config'] = np.array(json.dumps(described))
        arrays[f'{case}/logits'] = score(made, tokens).astype(np.float32)
        for name, p in made.named_parameters():
            arrays[f'{case}/weight/{name}'] = p.detach().numpy().astype(np.float16)
    np.savez_compressed(pathlib.Path(__file__).with_name('decoders.npz'), **arrays)


if __name__ == '__main__':
    main()
