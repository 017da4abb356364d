"""A small GPT-2 on Alice's Adventures in Wonderland, byte by byte, in four stages.

python train.py --config=configs/text_gpt2.py
2 CPU cores: under two minutes. Expect 1.76 nats a byte off and 1.77 on (a perplexity of 5.9); with
--config.fwd=raw --config.bwd=raw 1.71. `python -m jaxmp.generate runs/text_gpt2` writes on.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Every key is read; a typo is refused."""
    c = ml_collections.ConfigDict()
    c.name = 'text_gpt2'
    c.seed = 0
    # What is learned from what.
    c.data = 'alice'
    c.data_dir = ''
    c.download = False
    c.tokenizer = 'bytes'  # or the folder of a byte-level BPE
    c.sequence_length = 128
    c.train_examples = 0  # 0: all
    c.model = 'gpt2'
    c.stages = 4
    c.width = 96
    c.blocks = 4
    c.heads = 4
    c.dropout = 0.0
    c.dtype = 'float32'  # of the matrix products; bfloat16
    c.remat = False  # recompute blocks in the backward
    c.init_from = ''  # a folder of weights in Hugging Face's layout, as <workdir>/model
    # What the stages send each other: one text a direction.
    c.fwd = 'block(4)'
    c.bwd = 'block(4)'
    c.tied_exchange = 'mean'  # of the token table's gradient, which runtime=mpmd sends: an exchange
    c.warmup_epochs = 0  # sent raw, priming the feedback states
    c.eval_feedback = 'carry'  # carry, direct, frozen
    # How it runs.
    c.runtime = 'local'  # local: one program; mpmd: a program each stage, see docs/running.md
    c.micro_batches = 1
    c.optimiser = 'adamw'  # the rate falls linearly to 0
    c.epochs = 10
    c.batch_size = 16
    c.lr = 3e-3
    c.clip_norm = 1.0
    # What is kept.
    c.checkpoint_every = 5  # epochs
    return c
