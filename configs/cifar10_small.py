"""The paper's section 3.1 made small: width 16, 20,000 training images, 10 epochs (2,000 steps).

python train.py --config=configs/cifar10_small.py --config.data.dir=DIR --config.name=top10 \
    --config.fwd='top_k(0.1)' --config.bwd='top_k(0.1)'
One CPU core: about 17 minutes. Scored on all 10,000 test images; see results/cifar10_small.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """As the paper's, but small; the cosine keeps its shape (half a period over the run)."""
    c = load('cifar10_resnet18')
    c.name = 'cifar10_small'
    c.model.width = 16
    c.data.train_examples = 20_000
    c.epochs = 10
    c.optimizer.schedule = 'cosine(20)'
    c.checkpoint_every = 5
    return c
