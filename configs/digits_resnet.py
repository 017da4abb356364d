"""ResNet-18 (width 16) on scikit-learn's digits, Top 10 % both ways: the default.

python train.py
2 CPU cores: half a minute. Expect 98 % test accuracy with compression on.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """What differs from configs/common.py."""
    c = load('common')
    c.name = 'digits_resnet'
    c.fwd = 'top_k(0.1)'
    c.bwd = 'top_k(0.1)'
    c.optimizer.schedule = 'cosine(15)'
    c.optimizer.momentum = 0.9
    c.optimizer.weight_decay = 5e-4
    return c
