"""Writes gpt2.npz: a tiny GPT-2 of torch's transformers, its logits, loss and gradients.

Needs torch and transformers (the extra ``parity``); the tests need neither. Every parameter is
perturbed, the zero biases and unit scales too, else a wrong mapping of names would stay unseen.
Computed in float64 and stored in float32, so the reference carries no rounding of its own; weights
are stored as float16 values exactly. Run: python tests/golden/make_gpt2.py
"""

import pathlib

import numpy as np

SIZES = {'vocab_size': 67, 'n_positions': 16, 'n_embd': 24, 'n_layer': 4, 'n_head': 3}
BATCH, LENGTH, SEED = 2, 13, 0


def model(seed=SEED, **sizes):
    """A GPT-2 without dropout whose every parameter is random, in float64."""
    import torch  # here, so that the tests can look at this file without it
    import transformers

    off = {'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0}
    config = transformers.GPT2Config(
        **{**SIZES, **sizes, **off, 'bos_token_id': 0, 'eos_token_id': 0}
    )
    made = transformers.GPT2LMHeadModel(config).eval().double()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in made.parameters():
            noise = torch.randn(p.shape, generator=random, dtype=torch.float64)
            centre = 1.0 if p.ndim == 1 and p.mean() > 0.5 else 0.0
            p.copy_((centre + 0.2 * noise).half().double())
    return made


def tensors(made):
    """The model's tensors by Hugging Face's names; the tied head is not one of its own."""
    return {n.removeprefix('transformer.'): p for n, p in made.named_parameters()}


def score(made, tokens):
    """Logits and loss; transformers' own loss, the same, rounds the logits to float32 first."""
    import torch

    tokens = torch.tensor(np.asarray(tokens, np.int64))
    out = made(input_ids=tokens, labels=tokens)
    flat = out.logits[:, :-1].reshape(-1, out.logits.shape[-1])
    loss = torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))
    assert abs(loss.item() - out.loss.item()) < 1e-6
    return out.logits, loss


def main():
    made = model()
    random = np.random.default_rng(SEED)
    tokens = random.integers(0, SIZES['vocab_size'], (BATCH, LENGTH))
    logits, loss = score(made, tokens)
    loss.backward()
    arrays = {'tokens': tokens.astype(np.int32), 'loss': np.float64(loss.item())}
    arrays['logits'] = logits.detach().numpy().astype(np.float32)
    for name, p in tensors(made).items():
        arrays[f'weight/{name}'] = p.detach().numpy().astype(np.float16)
        arrays[f'grad/{name}'] = p.grad.numpy().astype(np.float32)
    file = pathlib.Path(__file__).with_name('gpt2.npz')
    np.savez_compressed(file, **arrays)
    print(f'{file.name}: {file.stat().st_size} bytes, loss {arrays["loss"]:.9f}')


if __name__ == '__main__':
    main()
