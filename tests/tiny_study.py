"""The paper's tables with a network of two stages that compiles at once: for test_sweep.py."""

import flax.linen as nn

from configs import paper_tables
from jaxmp import task


class First(nn.Module):
    """What the digits become before the one boundary."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.relu(nn.Conv(8, (2, 2), strides=2)(x))


class Second(nn.Module):
    """The classifier."""

    classes: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


task.MODELS['tiny'] = lambda classes=10, width=64: (First(), Second(classes))


def get_study(scale, tables=(1, 2, 3, 4)):
    study = paper_tables.get_study(scale, tables)
    for _, config in study:
        if 'sequence_length' not in config:
            config.model = 'tiny'
    if tables == (1,):  # a second seed
        again = paper_tables.get_study(scale, tables)
        for _, config in again:
            config.update(model='tiny', seed=1)
        study += [(1, config) for _, config in again]
    return study
