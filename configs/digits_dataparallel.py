"""The thesis's network and recipe on embedded data: two replicas, 1-bit gradients with feedback.

python train.py --config=configs/digits_dataparallel.py
2 CPU cores, shared with other work: 1.5 minutes. Expect 98 % test accuracy.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """The small network; stage boundaries open, gradients compressed between replicas."""
    c = load('common')
    c.name = 'digits_dataparallel'
    c.model.name = 'lenet'
    c.model.width = 10
    c.parallel.replicas = 2
    c.exchange = 'all_gather(ef(one_bit))'
    c.epochs = 40
    c.batch_size = 32  # 16 per replica
    c.optimizer.lr = 0.05
    c.optimizer.momentum = 0.5
    c.checkpoint_every = 10
    return c
