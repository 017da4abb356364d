"""A small GPT-2 on Alice's Adventures in Wonderland, byte by byte, in four stages.

python train.py --config=configs/text_gpt2.py
2 CPU cores: under two minutes. Expect 1.71 nats per byte off and on (a perplexity of 5.5), as with
--config.fwd=raw --config.bwd=raw. `jaxmp generate runs/text_gpt2-uniform_8` writes on.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """What differs from configs/common.py."""
    c = load('common')
    c.name = 'text_gpt2'
    c.data.name = 'alice'
    c.model.name = 'gpt2'
    c.model.width = 96
    c.fwd = 'uniform(8)'
    c.bwd = 'uniform(8)'
    c.optimizer.name = 'adamw'
    c.optimizer.schedule = 'linear'
    c.optimizer.lr = 3e-3
    c.optimizer.clip_norm = 1.0
    c.epochs = 10
    c.batch_size = 16
    c.checkpoint_every = 5
    return c
