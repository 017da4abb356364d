"""`spikes`: the largest elements sent apart, so that they do not set the range of the others."""

from __future__ import annotations

import jax
from jaxtyping import Array

from jaxmp.codecs import select
from jaxmp.codecs.dense import raw
from jaxmp.codecs.indices import packed
from jaxmp.wire import Codec, Ctx, Like, Payload, Samples, elements, samples
from jaxmp.wire.words import check_whole, word


def _without(rows: Array, place: Array) -> Array:
    """The rows with zeros at some places."""
    return jax.vmap(lambda row, s: row.at[s].set(0, unique_indices=True))(rows, place)


@word
def spikes(codec: Codec, count: int, values: Codec = raw) -> Codec:
    r"""Sends the largest magnitudes of each sample with their positions, the rest by ``codec``.

    .. math:: C(x)_i = x_i \text{ for } i \in S,\quad C(x)_i = C'(x_{\bar S})_i \text{ otherwise}

    S has the ``count`` largest magnitudes of a sample, all of it if it has no more elements.
    :math:`x_{\bar S}` is x with zeros at S. NaN and infinities count as the largest; if they are no
    more than ``count``, ``codec`` gets finite numbers only. Positions are `packed`: S takes
    ``count (w + ceil(log2 D))`` bits per sample of D elements for values of w bits.

    Args:
      codec: codec of the rest.
      count: number of elements sent apart, per sample.
      values: codec of the ``(B, count)`` values; `raw` sends them exactly.

    Raises:
      TypeError: if ``codec`` or ``values`` is not a codec.
      ValueError: if ``count`` is not a positive integer or the tensor has no axis besides the
        samples.

    >>> import jax.numpy as jnp, jaxmp
    >>> C, x = spikes(jaxmp.uniform(1), 1), jnp.array([[0.0, 900.5, 3.0, 1.0]])
    >>> C.decode(C.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx()).tolist()
    [[0.0, 900.5, 3.0, 0.0]]

    References:
      FlashCommunication V2: Bit Splitting and Spike Reserving for Any Bit Communication,
      arXiv 2508.03760.
    """
    for name, argument in (('codec', codec), ('values', values)):
        if not isinstance(argument, Codec):
            raise TypeError(f'spikes {name} must be a codec such as uniform(4), got {argument!r}')
    check_whole('spikes count', count, 'a positive integer: spikes(uniform(2), 8)')

    def apart(like: Array | Like) -> Like:
        return jax.ShapeDtypeStruct((like.shape[0], min(count, elements(like))), like.dtype)

    def part(ctx: Ctx) -> Ctx:  # the codec of the rest draws from the key itself
        return ctx.fold(1)._replace(indices=None)

    def encode(x: Array, ctx: Ctx) -> dict[str, Payload]:
        flat = samples(x)
        k, n = apart(x).shape[1], flat.shape[1]
        few = k <= select.FEW
        if few:
            place = select.few_largest(flat, k)
        else:
            place = select.positions(select.k_largest(flat, k), k)
        rest = select.without_few(flat, place) if few else _without(flat, place)
        return {
            'rest': codec.encode(rest.reshape(x.shape), ctx),
            'positions': packed.encode(select.bitmap(place, n), place, n),
            'values': values.encode(select.gather(flat, place), part(ctx)),
        }

    def decode(m: dict[str, Payload], like: Like, ctx: Ctx) -> Array:
        few = apart(like)
        place = packed.decode(m['positions'], elements(like), few.shape[1])
        rest = codec.decode(m['rest'], like, ctx).reshape(like.shape[0], -1)
        spiked = values.decode(m['values'], few, part(ctx))
        set_ = lambda row, s, v: row.at[s].set(v, unique_indices=True)
        return jax.vmap(set_)(rest, place, spiked).reshape(like.shape)

    joined: Samples = max(
        codec.samples, values.samples
    )  # the order of letters is that of `Samples`
    return Codec(encode, decode, samples=joined, needs=codec.needs | values.needs)
