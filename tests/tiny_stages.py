"""Three stages that compile at once, for small runs; processes import nothing else of the tests."""

import flax.linen as nn


class TinyStage(nn.Module):
    """What a stage may have: parameters, statistics, a ``train`` switch. Compiles in no time."""

    features: int
    classes: int | None = None

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Conv(self.features, (2, 2), strides=2)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        return x if self.classes is None else nn.Dense(self.classes)(x.mean((1, 2)))


def stages(classes, width):
    return TinyStage(4 * width), TinyStage(4 * width), TinyStage(4 * width, classes)


def build(config, dataset):
    """The same for a process of its own."""
    return stages(dataset.classes, config.model.width)
