"""The paper's section 3.1 made small: width 16, 20,000 training images, 10 epochs (2,000 steps).

python train.py --config=configs/cifar10_small.py --config.data_dir=DIR --config.name=top10 \
    --config.fwd='top_k(0.1)' --config.bwd='top_k(0.1)'
One CPU core: about 17 minutes. Scored on all 10,000 test images; see results/cifar10_small.
"""

import ml_collections

from configs import cifar10_resnet18


def get_config() -> ml_collections.ConfigDict:
    """As the paper's, but small; the cosine keeps its shape (half a period over the run)."""
    c = cifar10_resnet18.get_config()
    c.name = 'cifar10_small'
    c.width = 16
    c.train_examples = 20_000
    c.epochs = 10
    c.cosine_epochs = 20
    c.checkpoint_every = 5
    return c
