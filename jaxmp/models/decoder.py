"""One decoder for Llama, Mistral, Qwen and Gemma, as a tuple of stages cut between any two blocks.

Parameters are named as in Hugging Face's files and laid out as there, kernels ``(out, in)``, so
that `jaxmp.models.families` reads them by name. The blocks of a stage are one array per parameter,
with the number of the block first, and one compiled loop runs over them.

A stage with a collection ``cache`` (see `empty_cache`) keeps keys and values, so that a call needs
only the new tokens. `jaxmp.boundary.pipeline.Pipeline.apply` carries it from call to call.

Shapes: B batch, T sequence, C width, H heads, G heads of keys, D width of a head, V vocabulary.

References:
  Llama 2: Open Foundation and Fine-Tuned Chat Models, arXiv 2307.09288.
  Gemma 2: Improving Open Language Models at a Practical Size, arXiv 2408.00118.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jaxmp.models import blocks
from jaxmp.models.blocks import Blocks, times
from jaxmp.models.decoder_config import PROJECTIONS, Config, Kind, Lora
from jaxmp.models.layers import product, spread
from jaxmp.models.rotary import attention, rotate
from jaxmp.models.scores import next_token_scores, scores_of_blocks
from jaxmp.models.tied import TiedParameter

__all__ = [
    'PROJECTIONS', 'TABLE', 'Config', 'Kind', 'Lora', 'Stage', 'decoder', 'empty_cache',
]  # fmt: skip

TABLE = TiedParameter(('embed_tokens', 'weight'))
_ACTIVATIONS = {'silu': nn.silu, 'gelu_pytorch_tanh': lambda x: nn.gelu(x, approximate=True)}
_FAR = 2**30  # a window that sees all


class Cached(NamedTuple):
    """Where the sequences of a call are in a cache.

    Attributes:
      rows: the row of each, ``(B,)``.
      start: the position of the first new token of each, ``(B,)``.
    """

    rows: Array
    start: Array


class Positions(NamedTuple):
    """What all blocks know of the positions of a call.

    Attributes:
      cos: of each kind, ``(kinds, T, D / 2)``; with a cache ``(kinds, B, 1, T, D / 2)``.
      sin: likewise.
      windows: of each kind, ``(kinds,)``; None if none has a window.
      cached: where the sequences are in a cache; None without one.
    """

    cos: Array
    sin: Array
    windows: Array | None
    cached: Cached | None


class Layer(NamedTuple):
    """A block of a stage.

    Attributes:
      kind: number of its kind.
      number: its place in the stage, and in the cache.
    """

    kind: Array
    number: Array


def kernel(module: nn.Module, config: Config, shape: tuple[int, int]) -> Array | Blocks:
    """The parameter ``weight`` of a module, in blocks if the config stores it so."""
    if kinds := dict(config.stored).get(str(module.name)):
        return module.param('weight', lambda key: blocks.empty(shape, kinds))
    return module.param('weight', nn.initializers.normal(0.02), shape)


class Linear(nn.Module):
    """``x W' + b``, the kernel ``(out, in)``, with a low-rank update if the config targets it."""

    features: int
    config: Config
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, '... K']) -> Float[Array, '... N']:
        """Maps ``(..., K)`` to ``(..., features)``."""
        c, K = self.config, x.shape[-1]
        weight = kernel(self, c, (self.features, K))
        dtype = c.dtype or x.dtype
        rows = x.reshape(-1, K).astype(dtype)
        y = times(rows, weight)
        if c.lora and self.name in c.lora.targets:
            # As PEFT begins: A uniform with the variance 1 / 3K, B zero.
            uniform = nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform', 1, 0)
            a = self.param('lora_a', uniform, (c.lora.rank, K))
            b = self.param('lora_b', nn.initializers.zeros, (self.features, c.lora.rank))
            low = product(rows, a.astype(dtype)).astype(dtype)
            y = y + product(low, b.astype(dtype)) * (c.lora.alpha / c.lora.rank)
        if self.bias:
            y = y + self.param('bias', nn.initializers.zeros, (self.features,))
        return y.astype(dtype).reshape(*x.shape[:-1], self.features)


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + epsilon) (offset + w)``, in float32."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, '... C']) -> Float[Array, '... C']:
        """Normalises the last axis."""
        c = self.config
        start = nn.initializers.constant(1 - c.norm_offset)
        weight = self.param('weight', start, (x.shape[-1],)).astype(jnp.float32)
        wide = x.astype(jnp.float32)
        y = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + c.epsilon)
        return (y * (c.norm_offset + weight)).astype(x.dtype)


class Attention(nn.Module):
    """Self-attention with its projections."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, 'B T C'], layer: Layer, positions: Positions) -> Array:
        """Maps ``(B, T, C)`` to ``(B, T, C)``."""
        c, (B, T, _) = self.config, x.shape

        def heads(name: str, count: int) -> Array:
            y = Linear(count * c.head_width, c, c.bias, name=name)(x)
            return y.reshape(B, T, count, c.head_width).transpose(0, 2, 1, 3)

        q, k = heads('q_proj', c.heads), heads('k_proj', c.kv_heads)
        v = heads('v_proj', c.kv_heads)
        if c.head_norms:
            q, k = RMSNorm(c, name='q_norm')(q), RMSNorm(c, name='k_norm')(k)
        q, k = (rotate(a, positions.cos[layer.kind], positions.sin[layer.kind]) for a in (q, k))
        start = None
        if (cached := positions.cached) is not None:
            k = self._remember('keys', k, layer.number, cached)
            v = self._remember('values', v, layer.number, cached)
            start = cached.start
        scale = c.query_scale or c.head_width**-0.5
        window = None if positions.windows is None else positions.windows[layer.kind]
        y = attention(q, k, v, scale, c.attention_cap, window, start)
        y = y.transpose(0, 2, 1, 3).reshape(B, T, c.heads * c.head_width)
        return Linear(c.width, c, name='o_proj')(y)

    def _remember(self, name: str, new: Array, layer: Array, cached: Cached) -> Array:
        """All keys (or values) of the sequences, with new ones from their positions on."""
        cache = self.variable('cache', name, jnp.zeros, ())
        every, new = cache.value, new.astype(cache.value.dtype)
        zero = jnp.zeros((), jnp.int32)  # as all of a corner, also where JAX has 64 bits
        # Slices, since XLA updates them where they are, and copies them faster than it gathers.
        for i, tokens in enumerate(new):
            corner = layer, cached.rows[i], zero, cached.start[i], zero
            every = jax.lax.dynamic_update_slice(every, tokens[None, None], corner)
        cache.value, size = every, (1, 1, *every.shape[2:])
        rows = [
            jax.lax.dynamic_slice(every, (layer, cached.rows[i], zero, zero, zero), size)[0]
            for i in range(len(new))
        ]
        return jnp.concatenate(rows)


class MLP(nn.Module):
    """A gated layer, ``W_down (f(W_gate x) * W_up x)``."""

    config: Config

    @nn.compact
    def __call__(self, x: Float[Array, 'B T C']) -> Float[Array, 'B T C']:
        """Maps ``(B, T, C)`` to ``(B, T, C)``."""
        c = self.config
        gate = _ACTIVATIONS[c.activation](Linear(c.inner, c, name='gate_proj')(x))
        return Linear(c.width, c, name='down_proj')(gate * Linear(c.inner, c, name='up_proj')(x))


class Block(nn.Module):
    """Attention and an MLP, each with a normalised input and added to the residual stream."""

    config: Config

    @nn.compact
    def __call__(
        self, x: Float[Array, 'B T C'], layer: Layer, positions: Positions
    ) -> tuple[Array, None]:
        """Maps ``(B, T, C)`` to ``(B, T, C)``, as the body of a scan."""
        c = self.config
        norm = lambda name, x: RMSNorm(c, name=name)(x)
        # After attention: in a Llama of what follows it, in a Gemma of what it gives.
        after = 'post_attention_layernorm'
        before = 'pre_feedforward_layernorm' if c.post_norms else after
        y = Attention(c, name='self_attn')(norm('input_layernorm', x), layer, positions)
        x = x + (norm(after, y) if c.post_norms else y).astype(x.dtype)
        y = MLP(c, name='mlp')(norm(before, x))
        return x + (norm('post_feedforward_layernorm', y) if c.post_norms else y).astype(
            x.dtype
        ), None


class Table(nn.Module):
    """A token table ``(V, C)``."""

    config: Config

    @nn.compact
    def __call__(self) -> Array | Blocks:
        """The table."""
        return kernel(self, self.config, (self.config.vocabulary, self.config.width))


class Stage(nn.Module):
    """Consecutive blocks; the first stage also has the embedding, the last one the output layer.

    Attributes:
      config: of the whole network.
      layers: the kinds of this stage's blocks.
      embeds: whether the input is tokens instead of activations.
      scores: whether the output is logits instead of activations.
      by_token: whether it is in place of logits the nats of each next token, and 1 where that is
        the likeliest; see `jaxmp.models.scores`. The stage then reads the tokens.
    """

    config: Config
    layers: tuple[int, ...]
    embeds: bool = False
    scores: bool = False
    by_token: bool = False

    @property
    def blocks(self) -> int:
        """Their number."""
        return len(self.layers)

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the tokens beside its input; see `jaxmp.boundary.pipeline.Stage`."""
        return self.scores and self.by_token

    @property
    def with_logits(self) -> Stage:
        """The stage with logits as its output, for generation."""
        return self.clone(by_token=False)

    @nn.compact
    def __call__(
        self, x: Array, train: bool = False, tokens: Int[Array, 'B T'] | None = None
    ) -> Array:
        """Maps activations ``(B, T, C)``, or int tokens ``(B, T)``, to activations or logits.

        By token it gives ``(B, T, 2)``, where the last position, which has no next token, counts
        for the first. There is no dropout, so ``train`` makes no difference.

        Raises:
          ValueError: if tokens are missing.
        """
        c = self.config
        here = self.embeds or (self.scores and c.tied)
        table: PyTree = Table(c, name='embed_tokens')() if here else None
        if self.embeds:
            x = table[x]
            x = (
                x.widened(c.stream or jnp.float32)
                if isinstance(x, Blocks)
                else x.astype(c.stream or x.dtype)
            )
            x = x * jnp.asarray(c.embedding_scale, x.dtype) if c.embedding_scale != 1 else x
        if self.blocks:
            x = self._blocks(x)
        if not self.scores:
            return x
        head = table if c.tied else Table(c, name='lm_head')()
        x = RMSNorm(c, name='norm')(x)
        dtype = c.dtype or x.dtype
        rows = x.reshape(-1, c.width).astype(dtype)
        # A batch's logits would be the largest array of all: scores need few rows at a time.
        if self.by_token:
            if tokens is None and not self.is_initializing():
                raise ValueError('this stage scores the tokens; give them as tokens=')
            tokens = jnp.zeros(x.shape[:2], jnp.int32) if tokens is None else tokens
            targets = jnp.roll(tokens, -1, axis=1).reshape(-1)
            if isinstance(head, Blocks):
                by_token: PyTree = scores_of_blocks(rows, head, targets, c.logits_cap)
            else:
                by_token = next_token_scores(rows, head.astype(dtype), targets, c.logits_cap)
            return by_token.reshape(*x.shape[:2], 2)
        y = blocks.logits(rows, head)
        y = c.logits_cap * jnp.tanh(y / c.logits_cap) if c.logits_cap else y
        return y.reshape(*x.shape[:-1], -1)

    def _blocks(self, x: Float[Array, 'B T C']) -> Float[Array, 'B T C']:
        c, T = self.config, x.shape[1]
        t, cached = jnp.arange(T), None
        if self.has_variable('cache', 'position'):
            position = self.variable('cache', 'position', jnp.zeros, ())
            rows = self.get_variable('cache', 'rows')
            cached = Cached(rows, position.value[rows])
            position.value = position.value.at[rows].set(cached.start + T)
            t = cached.start[:, None, None] + t
        one = (1,) * t.ndim
        frequencies = jnp.array([k.frequencies for k in c.kinds], jnp.float32)
        angles = t[..., None] * frequencies.reshape(len(c.kinds), *one, -1)
        scale = jnp.array([k.scale for k in c.kinds], jnp.float32).reshape(-1, *one, 1)
        windows = [k.window or _FAR for k in c.kinds]
        windows = jnp.array(windows) if min(windows) < _FAR else None
        positions = Positions(jnp.cos(angles) * scale, jnp.sin(angles) * scale, windows, cached)
        block = nn.remat(Block, prevent_cse=False) if c.remat else Block
        # The cache is carried, so that it is updated where it is instead of copied.
        scan = nn.scan(
            block, {'params': 0}, variable_carry='cache', split_rngs={'params': True},
            in_axes=(0, nn.broadcast),  # pyright: ignore[reportArgumentType]: it takes a tree too
            length=self.blocks,
        )  # fmt: skip
        layers = Layer(jnp.array(self.layers, jnp.int32), jnp.arange(self.blocks, dtype=jnp.int32))
        return scan(c, name='layers')(x, layers, positions)[0]


def decoder(
    config: Config, stages: int = 4, cuts: Sequence[int] | None = None, by_token: bool = False
) -> tuple[Stage, ...]:
    """The stages of a decoder, spread evenly or cut after so many blocks; see `spread`.

    Raises:
      ValueError: if there are more stages than blocks, or a stage has no block.

    >>> c = Config(8, 4, 4, 1, 1, 4, kinds=(Kind((1.0, 0.1)),), layers=(0,) * 30)
    >>> [s.blocks for s in decoder(c, stages=4)], [s.blocks for s in decoder(c, cuts=(8, 16, 23))]
    ([8, 8, 7, 7], [8, 8, 7, 7])
    """
    spans = spread('a decoder', config.blocks, stages, cuts)
    parts = [config.layers[a:b] for a, b in spans]
    last = len(parts) - 1
    return tuple(
        Stage(config, part, s == 0, s == last, by_token and s == last)
        for s, part in enumerate(parts)
    )


def empty_cache(
    stage: Stage, batch: int, length: int, dtype: DTypeLike = jnp.float32
) -> dict[str, PyTree]:
    """The collection ``cache`` of a stage for sequences of up to ``length`` positions.

    Add it to the variables, ``{**variables, 'cache': empty_cache(stage, B, 512)}``; each call then
    begins where the last one ended. Its entry ``rows`` says which rows the sequences of a call are:
    replace it to go on with some of them.
    """
    c = stage.config
    shape = (stage.blocks, batch, c.kv_heads, length, c.head_width)
    memory = {'keys': jnp.zeros(shape, dtype), 'values': jnp.zeros(shape, dtype)}
    position, rows = jnp.zeros(batch, jnp.int32), jnp.arange(batch, dtype=jnp.int32)
    return {'position': position, 'rows': rows, 'layers': {'self_attn': memory}}
