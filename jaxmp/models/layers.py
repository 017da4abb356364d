"""Parts of a transformer in forms that are fast on CPU, and its blocks spread over stages.

Shapes: M, N, K any sizes; B batch, H heads, T queries, S keys, D width of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

_ROWS = 128  # queries that are computed together; see `attention`


@jax.custom_vjp
def product(x_MK: Float[Array, 'M K'], w_NK: Float[Array, 'N K']) -> Float[Array, 'M N']:
    """``x w'``, accumulated in float32 or better; the backward pass fixes the order of products.

    The derivative by JAX transposes a gradient instead of a result. XLA:CPU then stores each
    gradient of the residual stream only in transposed form, and computes the stream again in each
    block from all later blocks, which takes a fifth of the step with 8 blocks.
    """
    return contract(x_MK, w_NK, 1, 1)


def contract(a: Array, b: Array, i: int, j: int) -> Array:
    """The sum over axis ``i`` of a matrix and ``j`` of another, in float32 or wider."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jax.lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=wide)


def _product_backward(saved: tuple[Array, Array], g_MN: Array) -> tuple[Array, Array]:
    x_MK, w_NK = saved
    g_MN = g_MN.astype(x_MK.dtype)
    gx, gw = contract(g_MN, w_NK, 1, 0), contract(g_MN, x_MK, 0, 0)
    return gx.astype(x_MK.dtype), gw.astype(w_NK.dtype)


product.defvjp(lambda x, w: (product(x, w), (x, w)), _product_backward)


class Dense(nn.Module):
    """``x W + b``, the kernel ``(in, out)``.

    Attributes:
      features: width of the output.
      scale: standard deviation of the initial weights.
      dtype: dtype of the product; None means that of the parameters.
    """

    features: int
    scale: float
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Float[Array, '... K']) -> Float[Array, '... N']:
        """Maps ``(..., K)`` to ``(..., features)``."""
        kernel = self.param(
            'kernel', nn.initializers.normal(self.scale), (x.shape[-1], self.features)
        )
        bias = self.param('bias', nn.initializers.zeros, (self.features,))
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = product(x.reshape(-1, x.shape[-1]), kernel.T).astype(x.dtype) + bias
        return y.reshape(*x.shape[:-1], self.features)


class Dropout(nn.Module):
    """Zeroes elements with probability ``rate`` and scales the rest to keep the mean.

    The rate is rounded to a multiple of 2^-16: each 32-bit random word is used for two elements,
    which halves the cost of the mask.
    """

    rate: float

    @nn.compact
    def __call__(self, x: Float[Array, '...'], train: bool) -> Float[Array, '...']:
        """Applies dropout if ``train``, else returns ``x``; the shape is unchanged."""
        dropped = round(self.rate * 2**16)
        if not (train and dropped):
            return x
        words = jax.random.bits(self.make_rng('dropout'), (-(-x.size // 2),), jnp.uint32)
        halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[: x.size]
        keep = halves.reshape(x.shape) >= dropped
        return jnp.where(keep, x * (2**16 / (2**16 - dropped)), 0).astype(x.dtype)


def attention(
    q_BHTD: Float[Array, 'B H T D'],
    k_BHSD: Float[Array, 'B H S D'],
    v_BHSD: Float[Array, 'B H S D'],
    drop: Callable[[Array], Array] = lambda w: w,
) -> Float[Array, 'B H T D']:
    """Causal attention, ``softmax(q k' / sqrt(D)) v`` over the keys up to the query's position.

    Queries are processed in runs of 128, each with only the keys up to its last position, which
    halves the work. The product with ``v`` is divided by the sum of the softmax, instead of the
    weights. On a CPU forward and backward pass together take a quarter to a half of the time of
    ``jax.nn.dot_product_attention``. The softmax is computed in float32 or better.
    """
    T, D = q_BHTD.shape[2:]
    wide = jnp.promote_types(q_BHTD.dtype, jnp.float32)
    out = []
    for start in range(0, T, _ROWS):
        end = min(start + _ROWS, T)
        q = q_BHTD[:, :, start:end] * jnp.asarray(D**-0.5, q_BHTD.dtype)
        w = jnp.einsum('bhtd,bhsd->bhts', q, k_BHSD[:, :, :end], preferred_element_type=wide)
        seen = jnp.arange(end) <= jnp.arange(start, end)[:, None]
        w = jnp.where(seen, w, -jnp.inf)
        w = jnp.exp(w - jax.lax.stop_gradient(w.max(-1, keepdims=True)))
        total = w.sum(-1, keepdims=True)
        y = jnp.einsum(
            'bhts,bhsd->bhtd', drop(w).astype(v_BHSD.dtype), v_BHSD[:, :, :end],
            preferred_element_type=wide,
        )  # fmt: skip
        out.append((y / total).astype(v_BHSD.dtype))
    return jnp.concatenate(out, axis=2)


def next_token_nats(
    logits_BTV: Float[Array, 'B T V'], tokens_BT: Int[Array, 'B T']
) -> Float[Array, 'B T1']:
    r"""Nats of each predicted token; position ``t`` predicts token ``t + 1``, the last one nothing.

    .. math:: -\log p(token_{t+1} | token_{\le t})

    Their mean is the loss of ``GPT2LMHeadModel`` with ``labels=input_ids``. Those of a token -1
    have no meaning.

    Raises:
      ValueError: if a sequence has only one token.

    >>> nats = next_token_nats(jnp.zeros((1, 3, 4)), jnp.zeros((1, 3), int))  # ln 4
    >>> nats.shape, round(float(nats.mean()), 4)
    ((1, 2), 1.3863)
    """
    if tokens_BT.shape[1] < 2:
        raise ValueError('a sequence of one token has nothing to predict; give two or more')
    # All T positions are computed, the last one is dropped at the end, and the token is chosen by a
    # masked sum: slicing the logits, and the scatter in the gradient of an indexing, would each
    # cost a pass over the logits, the largest array.
    targets = jnp.roll(tokens_BT, -1, axis=1)[..., None]
    here = jnp.arange(logits_BTV.shape[-1], dtype=targets.dtype) == targets
    true = jnp.where(here, logits_BTV, 0).sum(-1)
    return (jax.nn.logsumexp(logits_BTV, axis=-1) - true)[:, :-1]


def mean_of_targets(
    values: Float[Array, 'B T1'], tokens_BT: Int[Array, 'B T']
) -> Float[Array, ' B']:
    """Means over the positions whose next token is not -1; 0 where there is none.

    >>> mean_of_targets(jnp.array([[1.0, 2.0, 6.0]]), jnp.array([[0, 1, 1, -1]])).tolist()
    [1.5]
    """
    predicted = tokens_BT[:, 1:] >= 0
    count = jnp.maximum(predicted.sum(-1), 1).astype(values.dtype)
    return jnp.where(predicted, values, 0).sum(-1) / count


def spread(
    network: str, blocks: int, stages: int, cuts: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """The first block of each stage, and the one after its last.

    Args:
      network: what has the blocks, for messages.
      blocks: their number.
      stages: over which they are distributed evenly, the first ones with one more if they must.
      cuts: numbers of blocks before each boundary, in place of ``stages``.

    Raises:
      ValueError: if there are more stages than blocks, or the cuts do not ascend within them.

    >>> spread('a decoder', 10, 4)
    [(0, 3), (3, 6), (6, 8), (8, 10)]
    """
    if cuts:
        if any(a >= b for a, b in itertools.pairwise((0, *cuts, blocks))):
            raise ValueError(
                f'cuts={tuple(cuts)} of {network} with {blocks} blocks; cuts must ascend strictly '
                f'within 1 to {blocks - 1}'
            )
    elif not 1 <= stages <= blocks:
        raise ValueError(
            f'{stages} stages of {network} with {blocks} blocks; each stage needs a block, so give '
            f'1 to {blocks}'
        )
    else:
        each, more = divmod(blocks, stages)
        cuts = [each * s + min(s, more) for s in range(1, stages)]
    return list(itertools.pairwise((0, *cuts, blocks)))
