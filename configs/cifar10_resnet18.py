"""The paper's section 3.1: ResNet-18 on CIFAR-10, four stages, three boundaries.

python train.py --config=configs/cifar10_resnet18.py --config.data.dir=DIR \
    --config.fwd='uniform(4)' --config.bwd='uniform(8)'
Uncompressed 93.0 % in the paper (100 epochs, best of five runs). One accelerator; on 2 CPU cores a
step takes about 2 s, so use --config.model.width=16 --config.data.train_examples=20000
--config.epochs=10 --config.optimizer.schedule='cosine(20)' there.
"""

from jaxmp.config import Config, load


def get_config() -> Config:
    """The recipe of arXiv 2401.07788."""
    c = load('common')
    c.name = 'cifar10_resnet18'
    c.data.name = 'cifar10'
    c.data.augment = 'crop_flip'
    c.model.width = 64
    c.epochs = 100
    c.batch_size = 100
    c.optimizer.lr = 0.01
    c.optimizer.schedule = 'cosine(200)'
    c.optimizer.momentum = 0.9
    c.optimizer.weight_decay = 5e-4
    return c
