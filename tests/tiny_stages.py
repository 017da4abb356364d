"""Three stages that compile at once, for small runs; processes import nothing else of the tests."""

import time

import flax.linen as nn
import jax

CALLS = []


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


class Stuck(TinyStage):
    """A stage that hangs in a forward of step 10, of two micro-batches a step."""

    def __call__(self, x, train=False):
        if train:
            jax.debug.callback(wait, x[0, 0, 0, 0])
        return super().__call__(x, train)


def wait(_):
    """Does nothing, and the 20th time it does so for longer than a test lasts."""
    CALLS.append(1)
    time.sleep(600 * (len(CALLS) == 20))


def stuck(config, dataset):
    """The same with a middle stage that hangs."""
    first, middle, last = build(config, dataset)
    return first, Stuck(middle.features), last
