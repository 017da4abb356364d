"""A thesis's data-parallel run: MNIST, two replicas, any exchange of gradients by one text.

python train.py --config=configs/mnist_dataparallel.py --config.data_dir=DIR --config.name=NAME \
    --config.exchange='all_gather(ef(one_bit))'
One CPU core: about 2 minutes. Expect 98.5 %; see results/mnist_dataparallel.
"""

import ml_collections

from configs import digits_resnet


def get_config() -> ml_collections.ConfigDict:
    """The thesis's recipe: batch 64 on each of 2 replicas, lr 0.01 x 2, momentum 0.5."""
    c = digits_resnet.get_config()
    c.name = 'mnist_dataparallel'
    c.data = 'mnist'
    c.model = 'lenet'
    c.width = 10
    c.fwd = 'raw'
    c.bwd = 'raw'
    c.replicas = 2
    c.exchange = 'mean'
    c.epochs = 10
    c.batch_size = 128  # 64 a replica
    c.lr = 0.02
    c.cosine_epochs = 0  # a constant rate
    c.momentum = 0.5
    c.weight_decay = 0.0
    return c
