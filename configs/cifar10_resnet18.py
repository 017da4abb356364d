"""The paper's section 3.1: ResNet-18 on CIFAR-10, four stages, three boundaries.

python train.py --config=configs/cifar10_resnet18.py --config.data_dir=DIR \
    --config.fwd='uniform(4)' --config.bwd='uniform(8)'
Uncompressed 93.0 % in the paper (100 epochs, best of five runs). One accelerator; on 2 CPU cores a
step takes about 2 s, so use --config.width=16 --config.train_examples=20000 --config.epochs=10
--config.cosine_epochs=20 there.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The recipe of arXiv 2401.07788; see configs/digits_resnet.py for the keys."""
    c = ml_collections.ConfigDict()
    c.name = 'cifar10_resnet18'
    c.seed = 0
    c.data = 'cifar10'
    c.data_dir = ''
    c.download = False
    c.train_examples = 0
    c.test_examples = 0
    c.pool = 1  # side of the squares whose mean is one pixel
    c.augment = 'crop_flip'
    c.model = 'resnet18'
    c.width = 64
    c.fwd = 'raw'
    c.bwd = 'raw'
    c.warmup_epochs = 0
    c.eval_feedback = 'carry'
    c.runtime = 'local'
    c.micro_batches = 1
    c.replicas = 1  # of the whole model, each on a cut of the batch and a device of its own
    c.exchange = 'mean'  # how replicas share gradients, see jaxmp/exchange
    c.optimiser = 'sgd'
    c.epochs = 100
    c.batch_size = 100
    c.lr = 0.01
    c.cosine_epochs = 200
    c.momentum = 0.9
    c.clip_norm = 0.0  # global norm of the gradients; 0: not clipped
    c.weight_decay = 5e-4
    c.checkpoint_every = 1
    return c
