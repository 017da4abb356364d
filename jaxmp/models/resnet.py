"""ResNet-18 for small images, as four stages cut after layer1, layer2 and layer3.

This is the form for CIFAR: a 3x3 stem without pooling, then four layers of two basic blocks, of
which the last three halve the image. Arrays are NHWC. Initialisation is that of the reference
implementation (PyTorch's defaults), so that curves are comparable. BatchNorm has eps 1e-5 and a
running average with decay 0.9. Like Flax it averages the biased batch variance; PyTorch averages
the unbiased one. For 100 x 32 x 32 values the relative difference is 1e-5.

Every convolution is followed by a normaliser (`NORMS`): BatchNorm; GroupNorm in four groups, which
has no running statistics; or none, that is a bias alone.

Shapes: B batch, H and W image, C channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp.models.convolution import convolve

# U(-1/sqrt(fan_in), 1/sqrt(fan_in)): PyTorch's default for kernels.
_kernel_init = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
_conv = functools.partial(
    nn.Conv, use_bias=False, kernel_init=_kernel_init, conv_general_dilated=convolve
)


class Bias(nn.Module):
    """Adds a number per channel, 0 at first: what is left of a normaliser that does not."""

    @nn.compact
    def __call__(self, x_BHWC: Float[Array, 'B H W C']) -> Float[Array, 'B H W C']:
        """Maps ``(B, H, W, C)`` to the same shape."""
        return x_BHWC + self.param('bias', nn.initializers.zeros, x_BHWC.shape[-1:])


NORMS: dict[str, Callable[[int, bool], nn.Module]] = {
    'batch': lambda channels, train: nn.BatchNorm(not train, momentum=0.9, epsilon=1e-5),
    'group': lambda channels, train: nn.GroupNorm(math.gcd(channels, 4), epsilon=1e-5),
    'none': lambda channels, train: Bias(),
}


class Block(nn.Module):
    """Basic residual block: two 3x3 convolutions and a shortcut."""

    channels: int
    stride: int
    norm: str = 'batch'

    @nn.compact
    def __call__(self, x_BHWC: Float[Array, 'B H W C'], train: bool) -> Float[Array, 'B h w c']:
        """Maps ``(B, H, W, C)`` to ``(B, H/stride, W/stride, channels)``."""
        norm = functools.partial(NORMS[self.norm], self.channels, train)
        y = _conv(self.channels, (3, 3), self.stride, padding=1)(x_BHWC)
        y = nn.relu(norm()(y))
        y = _conv(self.channels, (3, 3), padding=1)(y)
        y = norm()(y)
        if x_BHWC.shape != y.shape:
            x_BHWC = _conv(self.channels, (1, 1), self.stride)(x_BHWC)
            x_BHWC = norm()(x_BHWC)
        return nn.relu(y + x_BHWC)


class Stage(nn.Module):
    """One layer of two blocks; the first stage also has the stem, the last one the classifier."""

    channels: int
    stride: int
    stem: bool = False
    classes: int | None = None
    norm: str = 'batch'

    @nn.compact
    def __call__(self, x_BHWC: Float[Array, 'B H W C'], train: bool = False) -> Array:
        """Maps activations to activations, or to logits ``(B, classes)`` in the last stage."""
        x = x_BHWC
        if self.stem:
            x = _conv(self.channels, (3, 3), padding=1)(x)
            x = nn.relu(NORMS[self.norm](self.channels, train)(x))
        x = Block(self.channels, self.stride, self.norm)(x, train)
        x = Block(self.channels, 1, self.norm)(x, train)
        if self.classes is None:
            return x
        x = jnp.mean(x, axis=(1, 2))
        bound = x.shape[-1] ** -0.5
        bias_init = lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)
        return nn.Dense(self.classes, kernel_init=_kernel_init, bias_init=bias_init)(x)


def resnet18(classes: int = 10, width: int = 64, norm: str = 'batch') -> Sequence[nn.Module]:
    """The four stages of ResNet-18; ``width`` channels in the first, 8 times as many in the last.

    Args:
      classes: number of classes.
      width: channels of layer1; 64 is the published network.
      norm: what follows each convolution, of `NORMS`; ``'batch'`` is the published network.

    Raises:
      ValueError: if ``width`` or ``classes`` is not positive, or there is no such ``norm``.

    References:
      Deep Residual Learning for Image Recognition, arXiv 1512.03385; Group Normalization,
      arXiv 1803.08494.
    """
    if width < 1 or classes < 1:
        raise ValueError(f'resnet18 needs positive width and classes, got {width} and {classes}')
    if norm not in NORMS:
        raise ValueError(f'resnet18 norm {norm!r} is not one of {", ".join(NORMS)}')
    stage = functools.partial(Stage, norm=norm)
    return (
        stage(width, 1, stem=True),
        stage(2 * width, 2),
        stage(4 * width, 2),
        stage(8 * width, 2, classes=classes),
    )
