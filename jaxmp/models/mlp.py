"""A stack of residual MLP blocks: an embedding, equal stages and a head.

Each block is ``x + W2 gelu(W1 norm(x))``. All stages map ``(B, C)`` to ``(B, C)``, so that one
program can run them on all devices. The embedding before them and the head after them differ.

Shapes: B batch, C channels.
"""

from __future__ import annotations

import flax.linen as nn
import jax
from jaxtyping import Array, Float


class Embed(nn.Module):
    """One linear map of the flattened input."""

    channels: int

    @nn.compact
    def __call__(self, x: Float[Array, 'B ...']) -> Float[Array, 'B C']:
        """Maps ``(B, ...)`` to ``(B, channels)``."""
        return nn.Dense(self.channels)(x.reshape(len(x), -1))


class Stage(nn.Module):
    """Residual blocks that keep the shape."""

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


def mlp(
    stages: int, channels: int, classes: int, blocks: int = 1
) -> tuple[Embed, tuple[Stage, ...], Head]:
    """An embedding, ``stages`` equal stages of ``blocks`` residual blocks, and a classifier.

    Args:
      stages: number of equal stages.
      channels: width of the activations between stages, ``(B, channels)``.
      classes: number of logits.
      blocks: number of residual blocks per stage.

    Raises:
      ValueError: if ``stages`` is not positive.

    >>> first, equal, last = mlp(4, channels=16, classes=10)
    >>> len(equal), equal[0] == equal[3]
    (4, True)
    """
    if stages < 1:
        raise ValueError(f'mlp needs at least one stage, got {stages}')
    return Embed(channels), (Stage(blocks),) * stages, Head(classes)
