"""ResNet-18 (width 16) on scikit-learn's digits, Top 10 % both ways: the default.

python train.py
2 CPU cores: about a minute. Expect 97 % test accuracy with compression on.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Every key is read; a typo is refused."""
    c = ml_collections.ConfigDict()
    c.name = 'digits_resnet'
    c.seed = 0
    # What is learned from what.
    c.data = 'digits'
    c.data_dir = ''
    c.download = False
    c.train_examples = 0  # 0: all
    c.test_examples = 0
    c.pool = 1  # side of the squares whose mean is one pixel
    c.augment = 'none'  # none, crop_flip
    c.model = 'resnet18'
    c.width = 16
    # What the stages send each other: one text a direction.
    c.fwd = 'top_k(0.1)'
    c.bwd = 'top_k(0.1)'
    c.warmup_epochs = 0  # sent raw, priming the feedback states
    c.eval_feedback = 'carry'  # carry, direct, frozen
    # How it runs.
    c.runtime = 'local'  # local: one program; mpmd: a program each stage, see docs/running.md
    c.micro_batches = 1  # equal cuts of a batch, each with its slot of the feedback state
    c.replicas = 1  # of the whole model, each on a cut of the batch and a device of its own
    c.exchange = 'mean'  # how replicas share gradients, see jaxmp/exchange
    c.optimiser = 'sgd'  # sgd: cosine by epochs; adamw: linear to 0
    c.epochs = 15
    c.batch_size = 64
    c.lr = 0.02
    c.cosine_epochs = 15
    c.momentum = 0.9
    c.clip_norm = 0.0  # global norm of the gradients; 0: not clipped
    c.weight_decay = 5e-4
    # What is kept.
    c.checkpoint_every = 1  # epochs
    return c
