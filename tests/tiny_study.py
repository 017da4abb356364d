"""The paper's tables with a network of two stages that compiles at once: for test_sweep.py."""

import flax.linen as nn

from jaxmp import plugins
from jaxmp.config import files

paper_tables = plugins.module(files.find('paper_tables'))


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


def build(config, dataset):
    """The network, for ``config.model.name``."""
    return First(), Second(dataset.classes)


TINY = 'tests.tiny_study:build'


def get_study(scale, tables=(1, 2, 3, 4)):
    study = paper_tables.get_study(scale, tables)
    for _, c in study:
        if c.model.name != 'gpt2':
            c.model.name = TINY
    if tables == (1,):  # a second seed
        again = paper_tables.get_study(scale, tables)
        for _, c in again:
            c.update(model={'name': TINY}, seed=1)
        study += [(1, c) for _, c in again]
    return study
