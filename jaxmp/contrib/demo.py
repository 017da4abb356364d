"""`demo`: the largest cosine coefficients of a momentum are shared and taken out of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.codecs.dense import bf16
from jaxmp.codecs.indices import elias_fano
from jaxmp.codecs.sparse import check_parts, top_k
from jaxmp.codecs.view import per_chunk
from jaxmp.contrib.dct import dct
from jaxmp.exchange.averages import all_gather
from jaxmp.exchange.collectives import Collectives, Grads
from jaxmp.exchange.layout import Exchange, State, bucketed
from jaxmp.feedback import ef
from jaxmp.wire.words import check_bools, word


@word
def demo(
    fraction: float, decay: float = 0.999, size: int = 64, chunk: int = 4096, sign: bool = True
) -> Exchange:
    r"""DeMo: the largest cosine coefficients of each replica's momentum are shared and taken out.

    .. math:: u_i \leftarrow d\, u_i + g_i,\quad q_i = C(u_i),\quad u_i \leftarrow u_i - q_i,\quad
              y = \mathrm{sign}(\mathrm{mean}\, q_i)

    C keeps the largest of the cosine coefficients of each chunk, as bfloat16. Without the sign it
    is error feedback with a decay: ``bucketed(all_gather(ef(dct(per_chunk(top_k(fraction,
    values=bf16, indices=elias_fano), chunk), size), decay)))``. DeMo transforms matrices in squares
    of 64 x 64, each array by itself; here runs of ``size`` neighbours of all arrays, joined, are
    transformed. The optimizer must have no momentum, and clipping would clip the signs.

    Args:
      fraction: fraction of the coefficients that is sent, in (0, 1].
      decay: d in (0, 1].
      size: elements per transform, a power of two.
      chunk: coefficients per chunk.
      sign: whether the optimizer gets signs, as in the paper, or the mean itself.

    Raises:
      TypeError: if ``sign`` is not a truth value.
      ValueError: if an argument is out of range.

    References:
      DeMo: Decoupled Momentum Optimization, arXiv 2411.19870.
    """
    check_bools('demo', sign=sign)
    check_parts('demo', fraction, top_k(1.0))
    cosines = per_chunk(top_k(fraction, values=bf16, indices=elias_fano), chunk)
    shared = bucketed(all_gather(ef(dct(cosines, size), decay)))

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        y, state = shared.reduce(grads, state, key, via)
        return jax.tree.map(jnp.sign, y) if sign else y, state

    return Exchange(shared.init, reduce, momentum=decay)
