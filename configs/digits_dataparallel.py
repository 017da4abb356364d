"""The thesis's network and recipe on embedded data: two replicas, 1-bit gradients with feedback.

python train.py --config=configs/digits_dataparallel.py
2 CPU cores, shared with other work: 1.5 minutes. Expect 98 % test accuracy.
"""

import ml_collections

from configs import digits_resnet


def get_config() -> ml_collections.ConfigDict:
    """The small network; stage boundaries open, gradients compressed between replicas."""
    c = digits_resnet.get_config()
    c.name = 'digits_dataparallel'
    c.model = 'lenet'
    c.width = 10
    c.fwd = 'raw'
    c.bwd = 'raw'
    c.replicas = 2
    c.exchange = 'all_gather(ef(one_bit))'
    c.epochs = 40
    c.batch_size = 32  # 16 a replica
    c.lr = 0.05
    c.cosine_epochs = 0  # a constant rate
    c.momentum = 0.5
    c.weight_decay = 0.0
    c.checkpoint_every = 10
    return c
