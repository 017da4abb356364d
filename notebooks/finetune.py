# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Fine-tune a checkpoint in stages
#
# A checkpoint of a Llama is trained in two stages, by low-rank updates alone, and the stages send
# each other 4.5-bit messages. What comes out is an adapter in PEFT's layout.

# %% [markdown]
# Open this file in the folder `notebooks/` of a clone, or upload it to Colab. The next cell
# installs jaxmp where it is missing: `SOURCE` is the clone, or `git+` and the repository's address.

# %%
import importlib.util
import subprocess
import sys

SOURCE = '..'
if importlib.util.find_spec('jaxmp') is None:
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', SOURCE], check=True)

# %%
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
from safetensors.numpy import load_file

import jaxmp
from jaxmp.models import decoder, families, pretrained

home = Path(tempfile.mkdtemp(prefix='finetune-'))

# %% [markdown]
# ## The checkpoint
#
# `CHECKPOINT = 'HuggingFaceTB/SmolLM2-135M'` downloads a real model, which takes minutes instead of
# seconds. Empty, the next cell writes a tiny random one, whose tokens are bytes.

# %%
CHECKPOINT = ''


def tiny(folder):
    """A random Llama in a folder as transformers writes it."""
    described = {
        'model_type': 'llama', 'vocab_size': 256, 'hidden_size': 32, 'intermediate_size': 64,
        'num_hidden_layers': 4, 'num_attention_heads': 4, 'tie_word_embeddings': True,
    }  # fmt: skip
    [stage] = decoder.decoder(families.config_of(described), stages=1)
    variables = stage.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
    pretrained.write(folder, described, [stage], [variables])
    return str(folder)


path = CHECKPOINT or tiny(home / 'tiny')

# %% [markdown]
# ## The training
#
# The keys are those of `jaxmp train --config=finetune`. The text is a book of the package;
# `'data': {'files': 'notes/*.txt'}` names your own.

# %%
config = {
    'model': {'name': 'pretrained', 'path': path, 'stages': 2, 'train': 'lora(4)'},
    'data': {'name': 'alice', 'sequence_length': 64, 'test_examples': 16},
    'fwd': 'nvfp4', 'bwd': 'nvfp4', 'steps': 8, 'batch_size': 4,
    'optimizer': {'name': 'adamw', 'schedule': 'linear', 'lr': 2e-3, 'clip_norm': 1.0},
}  # fmt: skip
summary = jaxmp.train_and_evaluate(config, home / 'run', quiet=True, draw=False)
for mode in ('off', 'on'):
    print(f'test loss, compression {mode}: {summary["test"][mode]["last"]["loss"]:.3f} nats')

# %% [markdown]
# ## What crossed the boundary
#
# Bytes per step, of activations and of their gradients. The frozen parameters, the token table
# among them, are not sent at all.

# %%
for row in summary['bytes']:
    full, sent = 2 * row['uncompressed'], row['forward'] + row['backward']
    print(f'boundary {row["boundary"]}: {sent:,} of {full:,} bytes, {full / sent:.1f} times fewer')

# %% [markdown]
# ## What was written

# %%
model = home / 'run' / 'model'
adapter = json.loads((model / 'adapter_config.json').read_text())
tensors = load_file(model / 'adapter_model.safetensors')
count = sum(a.size for a in tensors.values())
print(f'rank {adapter["r"]}, {len(tensors)} tensors, {count:,} numbers')
print(next(iter(tensors)))

# %% [markdown]
# `jaxmp generate` and `jaxmp evaluate --text` take the folder of the run. What may be trained, own
# text, two machines, memory: [Fine-tune a pretrained model](../docs/finetune.md).
