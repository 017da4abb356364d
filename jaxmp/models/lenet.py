"""LeNet: a small convolutional network for digits in two stages.

The network has two convolutions of 5 x 5 with max-pooling, then two dense layers, with dropout of
whole channels after the second convolution and of elements before the last layer. At width 10 and
28 x 28 pixels it has 21,840 parameters. Initial weights are uniform with variance 1 / (3 fan_in),
initial biases are zero.

Shapes: B batch, H W height and width, C channels.
"""

from __future__ import annotations

from functools import partial

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.models.convolution import convolve

SMALLEST = 16  # pixels per side that two convolutions of 5 x 5 with pooling need
start = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')


def pool(x: Float[Array, 'B H W C']) -> Float[Array, 'B h w C']:
    """The largest of each 2 x 2 pixels; its gradient is cheaper on CPU than that of a window."""
    B, H, W, C = x.shape
    return jnp.max(x.reshape(B, H // 2, 2, W // 2, 2, C), (2, 4))


class Convolutions(nn.Module):
    """The convolutions; images below 16 pixels per side are first enlarged three times."""

    width: int
    dropout: float = 0.5

    @nn.compact
    def __call__(self, x: Float[Array, 'B H W C'], train: bool = False) -> Float[Array, 'B h w c']:
        """Maps ``(B, 28, 28, 1)`` to ``(B, 4, 4, 2 width)``."""
        if min(x.shape[1:3]) < SMALLEST:
            x = jnp.repeat(jnp.repeat(x, 3, 1), 3, 2)
        conv = partial(
            nn.Conv,
            kernel_size=(5, 5),
            padding='VALID',
            kernel_init=start,
            conv_general_dilated=convolve,
        )
        x = nn.relu(pool(conv(self.width)(x)))
        x = conv(2 * self.width)(x)
        x = nn.Dropout(self.dropout, broadcast_dims=(1, 2), deterministic=not train)(x)
        return nn.relu(pool(x))


class Classifier(nn.Module):
    """The dense layers, from feature maps to logits."""

    width: int
    classes: int
    dropout: float = 0.5

    @nn.compact
    def __call__(self, x: Float[Array, 'B h w c'], train: bool = False) -> Float[Array, 'B K']:
        """Maps ``(B, h, w, c)`` to ``(B, classes)``."""
        x = nn.relu(nn.Dense(self.width, kernel_init=start)(x.reshape(len(x), -1)))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(self.classes, kernel_init=start)(x)


def lenet(classes: int = 10, width: int = 10) -> tuple[Convolutions, Classifier]:
    """The network as two stages: ``width`` and ``2 width`` channels, then ``5 width`` units.

    Args:
      classes: number of logits.
      width: channels of the first convolution; with 10 the network has 21,840 parameters.

    Raises:
      ValueError: if ``width`` is not positive.

    >>> [type(stage).__name__ for stage in lenet()]
    ['Convolutions', 'Classifier']
    """
    if width < 1:
        raise ValueError(f'lenet needs a positive width, got {width}; the published one is 10')
    return Convolutions(width), Classifier(5 * width, classes)
