"""GPT-2 as a tuple of stages, from tokens to logits, which can be cut between any two blocks.

The arithmetic is that of Hugging Face's ``GPT2LMHeadModel``, so its weights can be read and written
(`jaxmp.models.pretrained`). Parameters are float32. ``dtype`` is the precision of the products; the
residual stream, which stages send to each other, has the precision of the parameters.

The first and the last stage both have the token table, unless `Config.tied` is False;
`jaxmp.models.tied` keeps the copies equal.

Shapes: B batch, T sequence, C width, H heads, D = C / H, V vocabulary.

References:
  Language Models are Unsupervised Multitask Learners, Radford et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxmp.models.layers import Dense, Dropout, attention, product, spread

_normal = nn.initializers.normal


@dataclass(frozen=True)
class Config:
    """Sizes of a GPT-2; the defaults are those of the published small model, without dropout.

    Attributes:
      vocabulary: rows of the token table, V.
      positions: rows of the position table, the length of the longest sequence.
      width: width of the residual stream, C.
      blocks: number of blocks.
      heads: number of attention heads, H; must divide ``width``.
      inner: width inside the MLP; None means ``4 * width``.
      epsilon: added to the variance in layer normalisation.
      dropout: rates of the embeddings, the attention weights and the residual branches.
      dtype: dtype of the matrix products, such as ``jnp.bfloat16``; None means the parameters'.
      tied: whether the token table that embeds also scores; else the output layer has its own.
      remat: recompute each block in the backward pass instead of storing its activations.
    """

    vocabulary: int = 50257
    positions: int = 1024
    width: int = 768
    blocks: int = 12
    heads: int = 12
    inner: int | None = None
    epsilon: float = 1e-5
    dropout: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tied: bool = True
    dtype: DTypeLike | None = None
    remat: bool = False

    @property
    def deviation(self) -> float:
        """Standard deviation of initial weights: 0.02 at the small model's width, as published.

        It is proportional to ``1 / sqrt(width)``, so that the variance of a product does not depend
        on the width. With 0.02 at width 96 a byte-level model learns nothing beyond pairs of bytes
        for hundreds of steps.
        """
        return 0.02 * math.sqrt(768 / self.width)

    def __post_init__(self) -> None:
        sizes = ('vocabulary', 'positions', 'width', 'blocks', 'heads')
        for name in sizes:
            if getattr(self, name) < 1:
                raise ValueError(f'GPT-2 with {name}={getattr(self, name)}; give 1 or more')
        if self.width % self.heads:
            raise ValueError(
                f'{self.heads} heads do not divide width {self.width}; each head gets an equal '
                f'part of it, so give a width that is a multiple of {self.heads}'
            )
        if len(self.dropout) != 3 or not all(0 <= rate < 1 for rate in self.dropout):
            raise ValueError(
                f'dropout={self.dropout} is not three rates in [0, 1): of the embeddings, the '
                'attention weights and the residual branches'
            )


class Attention(nn.Module):
    """Causal self-attention with its projections."""

    config: Config

    @nn.compact
    def __call__(self, x_BTC: Float[Array, 'B T C'], train: bool) -> Float[Array, 'B T C']:
        """Maps ``(B, T, C)`` to ``(B, T, C)``."""
        c, (B, T, C) = self.config, x_BTC.shape
        qkv = Dense(3 * C, c.deviation, c.dtype, name='c_attn')(x_BTC)
        heads = qkv.reshape(B, T, 3, c.heads, C // c.heads).transpose(2, 0, 3, 1, 4)
        drop = Dropout(c.dropout[1])
        y = attention(heads[0], heads[1], heads[2], lambda w: drop(w, train))
        return _projection(c, C)(y.transpose(0, 2, 1, 3).reshape(B, T, C))


class MLP(nn.Module):
    """Two dense layers around the tanh form of GELU."""

    config: Config

    @nn.compact
    def __call__(self, x_BTC: Float[Array, 'B T C']) -> Float[Array, 'B T C']:
        """Maps ``(B, T, C)`` to ``(B, T, C)``."""
        c, C = self.config, x_BTC.shape[-1]
        inner = c.inner or 4 * C
        h = Dense(inner, c.deviation, c.dtype, name='c_fc')(x_BTC)
        return _projection(c, C)(jax.nn.gelu(h, approximate=True))


class Block(nn.Module):
    """Attention and an MLP, each with a normalised input and added to the residual stream."""

    config: Config

    @nn.compact
    def __call__(self, x_BTC: Float[Array, 'B T C'], train: bool) -> Float[Array, 'B T C']:
        """Maps ``(B, T, C)`` to ``(B, T, C)``."""
        c = self.config
        y = Attention(c, name='attn')(_norm(c, 'ln_1')(x_BTC), train)
        x_BTC = x_BTC + Dropout(c.dropout[2])(y, train).astype(x_BTC.dtype)
        y = MLP(c, name='mlp')(_norm(c, 'ln_2')(x_BTC))
        return x_BTC + Dropout(c.dropout[2])(y, train).astype(x_BTC.dtype)


def _norm(c: Config, name: str) -> nn.LayerNorm:
    # The variance is not E[x^2] - E[x]^2, which is no faster here and loses digits.
    return nn.LayerNorm(epsilon=c.epsilon, use_fast_variance=False, name=name)


def _projection(c: Config, width: int) -> Dense:
    """A layer that adds to the residual stream; the more such layers, the smaller their weights."""
    return Dense(width, c.deviation / math.sqrt(2 * c.blocks), c.dtype, name='c_proj')


class Stage(nn.Module):
    """Consecutive blocks; the first stage also has the embedding, the last one the output layer.

    Blocks are numbered from 0 in each stage, so that stages with as many blocks are equal modules.

    Attributes:
      config: sizes of the whole network.
      blocks: number of blocks in this stage.
      embeds: whether the input is tokens instead of activations.
      scores: whether the output is logits instead of activations.
    """

    config: Config
    blocks: int
    embeds: bool = False
    scores: bool = False

    @nn.compact
    def __call__(self, x: Array, train: bool = False) -> Array:
        """Maps activations ``(B, T, C)``, or int tokens ``(B, T)``, to activations or logits.

        ``train`` enables dropout, which needs the rng ``dropout``.

        Raises:
          ValueError: if the sequence is longer than the position table.
        """
        c = self.config
        embeds = self.embeds or (self.scores and c.tied)
        shape, normal = (c.vocabulary, c.width), _normal(c.deviation)
        wte: Any = self.param('wte', normal, shape) if embeds else None
        if self.embeds:
            x = Dropout(c.dropout[0])(self._embed(wte, x), train)
        block = nn.remat(Block, static_argnums=(2,)) if c.remat else Block
        for i in range(self.blocks):
            x = block(c, name=f'h_{i}')(x, train)
        if not self.scores:
            return x
        return self._score(wte if c.tied else self.param('lm_head', normal, shape), x)

    def _embed(self, wte: Float[Array, 'V C'], tokens: Int[Array, 'B T']) -> Float[Array, 'B T C']:
        c, length = self.config, tokens.shape[1]
        if length > c.positions:
            raise ValueError(
                f'a sequence of {length} tokens is too long for a GPT-2 with {c.positions} '
                f'positions; cut the text into blocks of at most {c.positions}'
            )
        wpe = self.param('wpe', _normal(c.deviation), (c.positions, c.width))
        return wte[tokens] + wpe[:length]

    def _score(self, table: Float[Array, 'V C'], x: Float[Array, 'B T C']) -> Float[Array, 'B T V']:
        x = _norm(self.config, 'ln_f')(x)
        dtype = self.config.dtype or jnp.result_type(x, table)
        y = product(x.reshape(-1, x.shape[-1]).astype(dtype), table.astype(dtype))
        return y.reshape(*x.shape[:-1], -1)


def gpt2(config: Config, stages: int = 4, cuts: Sequence[int] | None = None) -> tuple[Stage, ...]:
    """The stages of a GPT-2, spread evenly or cut after so many blocks; see `spread`.

    Returns:
      Modules with ``__call__(x, train=False)``; the first takes int tokens ``(B, T)``, the last
      gives logits ``(B, T, V)``.

    Raises:
      ValueError: if there are more stages than blocks, or a stage has no block.

    >>> [s.blocks for s in gpt2(Config(blocks=10), stages=4)]
    [3, 3, 2, 2]
    >>> gpt2(Config(), cuts=(3, 6, 9)) == gpt2(Config(), stages=4)
    True
    """
    spans = spread('a GPT-2', config.blocks, stages, cuts)
    last = len(spans) - 1
    return tuple(Stage(config, b - a, s == 0, s == last) for s, (a, b) in enumerate(spans))
