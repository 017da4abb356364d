"""What `slow_network.py` trains: two networks as stages, each on a task of the embedded digits.

**mlp**: a stack of residual MLP blocks that predicts every pixel of a digit, one of 17 greys, from
the 20 pixels before it in reading order and its row and column; a sample is an image, (64 pixels,
32 channels) at a cut, so 512 images are a message of 4.19 MB in float32.
Blocks are 32 wide, inside too (``expand`` 1): they cost about 21 ms a step, where wider ones would
hide the wire (64 channels, 128 inside: 64 ms for messages of the same size).

**resnet**: ResNet-18 of width 8 on the digits doubled to 16 x 16, cut after layer1, where 256
images are 2.1 MB. XLA's convolutions take about 100 ms a step on two cores even so narrow, and more
for as many bytes at every other width tried (4, 16): here compute does hide a fast wire, and the
table shows it.

Batches are drawn anew every epoch; all codecs see the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxmp import data
from jaxmp.models import resnet18

BEFORE, GREYS, CHANNELS, WIDTH = 20, 17, 32, 8


class Stage(nn.Module):
    """Residual blocks ``x + W2 gelu(W1 norm(x))``, which keep the shape."""

    blocks: int
    expand: int = 2

    @nn.compact
    def __call__(self, x_BC: Float[Array, 'B C']) -> Float[Array, 'B C']:
        """Maps ``(B, C)`` to ``(B, C)``."""
        channels = x_BC.shape[-1]
        for _ in range(self.blocks):
            h = nn.Dense(self.expand * channels)(nn.LayerNorm()(x_BC))
            x_BC = x_BC + nn.Dense(channels)(jax.nn.gelu(h))
        return x_BC


class Head(nn.Module):
    """The classifier."""

    classes: int

    @nn.compact
    def __call__(self, x_BC: Float[Array, 'B C']) -> Float[Array, 'B classes']:
        """Maps ``(B, C)`` to logits ``(B, classes)``."""
        return nn.Dense(self.classes)(nn.LayerNorm()(x_BC))


class Chain(nn.Module):
    """One stage made of several modules; ``train`` goes to those that know it."""

    parts: tuple[nn.Module, ...]
    train: bool = False

    @nn.compact
    def __call__(self, x: Any) -> Any:
        """Maps the first part's input to the last one's output."""
        for part in self.parts:
            x = part(x, train=True) if self.train else part(x)
        return x


class Task(NamedTuple):
    """A network cut into stages, its data and its optimizer."""

    stages: tuple[nn.Module, ...]
    x: np.ndarray
    y: np.ndarray
    batch: int
    optimizer: optax.GradientTransformation


def pixels() -> tuple[np.ndarray, np.ndarray]:
    """For every pixel of every training image: what comes before it and where it is; its grey."""
    images = data.load('digits').train.x.reshape(-1, 64)
    y = np.rint(images / 255 * 16).astype(np.int32)
    padded = np.pad(y, ((0, 0), (BEFORE, 0))) / 16
    before = np.stack([padded[:, i : i + 64] for i in range(BEFORE)], -1)
    row, column = np.divmod(np.arange(64), 8)
    where = np.concatenate([np.eye(8)[row], np.eye(8)[column]], -1)
    x = np.concatenate([before, np.broadcast_to(where, (len(y), 64, 16))], -1)
    return x.astype(np.float32), y


def mlp_task(stages: int) -> Task:
    """Residual MLP blocks, one a stage."""
    parts: list[tuple[nn.Module, ...]] = [(Stage(1, expand=1),)] * stages
    parts[0] = nn.Dense(CHANNELS), *parts[0]
    parts[-1] = *parts[-1], Head(GREYS)
    return Task(tuple(Chain(p) for p in parts), *pixels(), 512, optax.adam(3e-3))


def resnet_task(stages: int) -> Task:
    """ResNet-18, cut after layer1, or after every layer."""
    images = data.load('digits').train
    x = (images.x / 255 - 0.3045) / 0.3759
    x = x.repeat(2, axis=1).repeat(2, axis=2).astype(np.float32)
    layers = tuple(resnet18(10, WIDTH))
    cuts = {2: [0, 1], 4: [0, 1, 2, 3]}[stages]
    parts = [layers[a:b] for a, b in zip(cuts, [*cuts[1:], 4], strict=True)]
    return Task(tuple(Chain(p, train=True) for p in parts), x, images.y, 256, optax.adam(3e-4))


TASKS: dict[str, Callable[[int], Task]] = {'mlp': mlp_task, 'resnet': resnet_task}

_TOP = 'ef21(top_k(0.1, indices=bitmap))'

# Forward and backward channel: first the usual ones, then some that pay more.
CODECS = {
    'raw': ('raw', 'raw'),
    'bf16': ('bf16', 'bf16'),
    '8-bit': ('uniform(8)', 'uniform(8)'),
    'fw4-bw8': ('uniform(4)', 'uniform(8)'),
    'fw2-bw4': ('uniform(2)', 'uniform(4)'),
    'ef21-top10': (_TOP, _TOP),
    'block4-bw2': ('block(4, size=128)', 'uniform(2, stochastic)'),
    'aqsgd3-bw3': ('aqsgd(block(3, size=128), examples)', 'block(3, size=128)'),
    'aqsgd3-bw2': ('aqsgd(block(3, size=128), examples)', 'block(2, size=64)'),
    'aqsgd2-bw2': ('aqsgd(block(2, size=64), examples)', 'block(2, size=64)'),
}


def loss(y: Any, target: Any) -> Any:
    """Cross-entropy, mean over whatever is predicted; nothing besides."""
    return optax.softmax_cross_entropy_with_integer_labels(y, target).mean(), None


def positions(task: Task, step: int) -> np.ndarray:
    """Which examples the batch of a step holds; the rest of an epoch is dropped."""
    epoch, at = divmod(step, len(task.x) // task.batch)
    order = np.random.default_rng(epoch).permutation(len(task.x))
    return order[at * task.batch : (at + 1) * task.batch].astype(np.int32)
