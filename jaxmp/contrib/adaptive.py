"""`adaptive`: two codecs of different widths, chosen per sample under a fixed total of bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs import select
from jaxmp.codecs.extremes import span
from jaxmp.codecs.view import each
from jaxmp.wire import Codec, Ctx, Like, Payload, samples, wide
from jaxmp.wire.words import word


@word
def adaptive(low: Codec, high: Codec, fraction: float = 0.5) -> Codec:
    r"""Sends the samples with the widest ranges by ``high`` and the others by ``low``.

    .. math:: C(x)_b = \text{high}(x)_b \text{ if } \max x_b - \min x_b
              \text{ is among the K largest of B, else } \text{low}(x)_b

    One bit per sample says which. The choice is among the samples of a tensor, so put it inside
    `per_chunk` or `per_token` for a choice among blocks or tokens:
    ``per_chunk(adaptive(lloyd(3), lloyd(4)), 64)`` takes 3.5 bits per element, and 17 per block for
    the choice and the scale. A sample that holds NaN or an infinity has the widest range.

    Args:
      low: codec of each of the B - K samples of narrow range.
      high: codec of each of the K others; both get no ids.
      fraction: K / B in (0, 1), rounded such that K is at least 1.

    Raises:
      TypeError: if ``low`` or ``high`` is not a codec, or ``fraction`` is not a number.
      ValueError: if ``fraction`` is out of range or the tensor has no axis besides the samples.

    >>> import jaxmp
    >>> C = adaptive(jaxmp.lloyd(1), jaxmp.lloyd(5))
    >>> x = jnp.array([[1.0, -1.0, 1.0], [8.0, -8.0, 8.0]])
    >>> m = C.encode(x, jaxmp.Ctx())
    >>> m['low']['codes'].shape, m['high']['codes'].shape, m['wide'].tolist()
    ((1, 1), (1, 5), [2])

    References:
      TAH-QUANT: Effective Activation Quantization in Pipeline Parallelism over Slow Network,
      arXiv 2506.01352.
    """
    for name, part in (('low', low), ('high', high)):
        if not isinstance(part, Codec):
            raise TypeError(f'adaptive {name} must be a codec such as lloyd(3), got {part!r}')
    if isinstance(fraction, bool) or not isinstance(fraction, int | float):
        raise TypeError(f'adaptive fraction must be a number in (0, 1), got {fraction!r}')
    if not 0 < fraction < 1:
        raise ValueError(f'adaptive fraction {fraction} is not in (0, 1); for half write 0.5')
    low, high = each(low), each(high)

    def parts(words: Array, rows: int, ctx: Ctx) -> list[tuple[str, Codec, Array, Ctx]]:
        """The parts that have samples: the name of each, its codec, their numbers, its context."""
        k = select.count(rows, fraction)
        ctx = ctx._replace(ids=None, tokens=None, indices=None)
        # Ids, tokens and indices are of all samples, so no part gets them; each draws by itself.
        pair = ('high', high, words, k, ctx), ('low', low, ~words, rows - k, ctx.fold(1))
        rows_of = lambda w, n: select.positions(w[None], n)[0]
        return [(name, codec, rows_of(w, n), c) for name, codec, w, n, c in pair if n]

    def encode(x: Array, ctx: Ctx) -> dict[str, Payload]:
        lo, hi = span(wide(samples(x)), 1)
        words = select.k_largest((hi / 2 - lo / 2)[None], select.count(len(x), fraction))[0]
        sent = {name: codec.encode(x[i], c) for name, codec, i, c in parts(words, len(x), ctx)}
        return {'wide': words, **sent}

    def decode(m: dict[str, Payload], like: Like, ctx: Ctx) -> Array:
        y = jnp.zeros(like.shape, like.dtype)
        for name, codec, i, c in parts(m['wide'], len(y), ctx):
            some = jax.ShapeDtypeStruct((i.size, *like.shape[1:]), like.dtype)
            y = y.at[i].set(codec.decode(m[name], some, c), unique_indices=True)
        return y

    return Codec(encode, decode, samples='compared', needs=low.needs | high.needs)
