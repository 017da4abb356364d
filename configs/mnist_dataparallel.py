"""A thesis's data-parallel run: MNIST, two replicas, any exchange of gradients by one text.

python train.py --config=configs/mnist_dataparallel.py --config.data.dir=DIR --config.name=NAME \
    --config.exchange='all_gather(ef(one_bit))'
One CPU core: about 2 minutes. Expect 98.5 %; see results/mnist_dataparallel.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """The thesis's recipe: batch 64 on each of 2 replicas, lr 0.01 x 2, momentum 0.5."""
    c = load('common')
    c.name = 'mnist_dataparallel'
    c.data.name = 'mnist'
    c.model.name = 'lenet'
    c.model.width = 10
    c.parallel.replicas = 2
    c.epochs = 10
    c.batch_size = 128  # 64 per replica
    c.optimizer.momentum = 0.5
    return c
