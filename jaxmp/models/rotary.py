"""Rotary positions, their scalings to longer texts, and attention with grouped heads and a window.

Shapes: B batch, H query heads, G key heads, T queries, S keys, D width of a head.

References:
  RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv 2104.09864.
  YaRN: Efficient Context Window Extension of Large Language Models, arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.data.understood import AGAIN, EITHER, keys, number, understood
from jaxmp.models.described import UNSAID

_ROWS = 128  # queries that are computed together; see `jaxmp.models.layers.attention`
Rope = Mapping[str, Any]  # ``rope_parameters`` of a config.json, with ``rope_theta``
_NEEDS = {
    'default': (), 'linear': ('factor',), 'yarn': ('factor', 'original_max_position_embeddings'),
    'llama3': ('factor', 'original_max_position_embeddings', 'low_freq_factor', 'high_freq_factor'),
}  # fmt: skip
KINDS = tuple(sorted(_NEEDS))
_NUMBERS = keys(  # a kind leaves out what belongs to another, as transformers does
    """factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast beta_slow
    attention_factor mscale mscale_all_dim"""
)
_NEUTRAL = {
    'rope_type': KINDS, 'type': KINDS, 'partial_rotary_factor': (1, None),
    'attn_factor': (1, None), 'extrapolation_factor': (1, None), 'truncate': EITHER,
    'finetuned': EITHER,
}  # fmt: skip


def frequencies(
    depth: int, rope: Rope, place: object = 'config.json'
) -> tuple[tuple[float, ...], float]:
    r"""The ``D / 2`` frequencies of rotary positions, and what cosine and sine are scaled by.

    .. math:: f_i = \theta^{-2 i / D}, \text{ scaled as } rope\_type \text{ says}

    Args:
      depth: width of a head, D.
      rope: ``rope_theta``, ``rope_type`` (one of `KINDS`) and the numbers that it needs, as
        ``rope_parameters`` of Hugging Face's ``config.json``.
      place: the file, for messages.

    Raises:
      ValueError: if the type is unknown, or a number that it needs is missing or wrong.

    >>> frequencies(4, {'rope_theta': 100.0, 'rope_type': 'linear', 'factor': 2.0})
    ((0.5, 0.05000000074505806), 1.0)
    """
    place = f'rope_parameters of {place}'
    understood(place, rope, {'rope_theta', *_NUMBERS}, _NEUTRAL, UNSAID)
    rope = {key: value for key, value in rope.items() if value is not None}
    named = {rope[key] for key in ('rope_type', 'type') if key in rope}
    if len(named) > 1 or (not named and 'factor' in rope):
        came = f'the types {" and ".join(sorted(named))}' if named else 'a factor and no rope_type'
        raise ValueError(f'{place} has {came}; allowed is one of {", ".join(KINDS)}; {AGAIN}')
    kind = next(iter(named), 'default')
    for key in (k for k in _NUMBERS if k in rope or k in _NEEDS[kind]):
        number(place, rope, key)
    theta, scale = number(place, rope, 'rope_theta', above=1), 1.0
    f = (1 / theta ** (np.arange(0, depth, 2, dtype=np.float32) / depth)).astype(np.float32)
    if kind == 'linear':
        f = f / rope['factor']
    elif kind == 'llama3':
        number(place, rope, 'high_freq_factor', above=rope['low_freq_factor'])
        f = _llama3(f, rope)
    elif kind == 'yarn':
        f, scale = _yarn(f, depth, rope)
    return tuple(np.asarray(f, np.float32).tolist()), scale


def _llama3(f: np.ndarray, rope: Rope) -> np.ndarray:
    """Divides slow frequencies by the factor; between ``low`` and ``high`` turns, a part of it."""
    low, high = rope['low_freq_factor'], rope['high_freq_factor']
    turns = rope['original_max_position_embeddings'] * f / (2 * math.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * f / rope['factor'] + smooth * f


def _yarn(f: np.ndarray, depth: int, rope: Rope) -> tuple[np.ndarray, float]:
    """Divides slow frequencies by the factor, and scales the logits of attention."""
    factor, positions = rope['factor'], rope['original_max_position_embeddings']

    def index(turns: float) -> float:  # of the frequency that turns so often in `positions`
        return depth * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def growth(by: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * by * math.log(factor) + 1

    theta = rope['rope_theta']
    low, high = index(rope.get('beta_fast') or 32), index(rope.get('beta_slow') or 1)
    if rope.get('truncate', True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, depth - 1)
    high += 0.001 * (low == high)
    slow = np.clip((np.arange(depth // 2, dtype=np.float32) - low) / (high - low), 0, 1)
    scale, one, all_dim = (rope.get(k) for k in ('attention_factor', 'mscale', 'mscale_all_dim'))
    if scale is None:
        scale = growth(one) / growth(all_dim) if one and all_dim else growth(1)
    return f / factor * slow + f * (1 - slow), float(scale)


def rotate(
    x_BHTD: Float[Array, 'B H T D'], cos_TD: Float[Array, 'T D/2'], sin_TD: Float[Array, 'T D/2']
) -> Float[Array, 'B H T D']:
    """Each half of a head's width with the other as a complex number, turned by its angle."""
    a, b = jnp.split(x_BHTD.astype(jnp.float32), 2, -1)
    turned = jnp.concatenate([a * cos_TD - b * sin_TD, b * cos_TD + a * sin_TD], -1)
    return turned.astype(x_BHTD.dtype)


def attention(
    q_BHTD: Float[Array, 'B H T D'],
    k_BGSD: Float[Array, 'B G S D'],
    v_BGSD: Float[Array, 'B G S D'],
    scale: float,
    cap: float = 0.0,
    window: Array | int | None = None,
    position: Array | int | None = None,
) -> Float[Array, 'B H T D']:
    r"""Causal attention of ``H`` query heads to ``G`` heads of keys and values.

    .. math:: softmax(c \tanh(s q k' / c)) v \text{ over keys } t - window < u \le t

    Args:
      q_BHTD: queries.
      k_BGSD: keys; ``G`` divides ``H``.
      v_BGSD: values.
      scale: of the logits, s.
      cap: c; 0 leaves the logits as they are.
      window: number of the last positions that a query sees, also a traced one; None: all.
      position: that of the first query, one for all or ``(B,)``, where keys are a cache that begins
        at 0; None: 0, and there are as many keys as queries.

    Returns:
      ``(B, H, T, D)``, in the values' dtype.
    """
    B, H, T, D = q_BHTD.shape
    G, S = k_BGSD.shape[1:3]
    wide = jnp.promote_types(q_BHTD.dtype, jnp.float32)
    q_all = q_BHTD.reshape(B, G, H // G, T, D) * jnp.asarray(scale, q_BHTD.dtype)
    out = []
    for start in range(0, T, _ROWS):
        end = min(start + _ROWS, T)
        last = end if position is None else S  # of the keys that a query may see
        q, k, v = q_all[:, :, :, start:end], k_BGSD[:, :, :last], v_BGSD[:, :, :last]
        w = jnp.einsum('bghtd,bgsd->bghts', q, k, preferred_element_type=wide)
        w = cap * jnp.tanh(w / cap) if cap else w
        back = jnp.arange(start, end)[:, None] - jnp.arange(last)
        if position is not None:
            back = back + jnp.reshape(position, (-1, 1, 1, 1, 1))
        seen = back >= 0 if window is None else (back >= 0) & (back < window)
        w = jnp.where(seen, w, -jnp.inf)
        w = jnp.exp(w - jax.lax.stop_gradient(w.max(-1, keepdims=True)))
        total = w.sum(-1, keepdims=True)
        y = jnp.einsum('bghts,bgsd->bghtd', w.astype(v.dtype), v, preferred_element_type=wide)
        out.append((y / total).astype(v.dtype))
    return jnp.concatenate(out, axis=3).reshape(B, H, T, D)
