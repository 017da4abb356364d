"""Collectives of `jax.lax` whose messages are compressed: ``from jaxmp import lax``.

Each takes what its namesake of `jax.lax` takes, and then

* ``fwd``, ``bwd``: texts or channels of the operand and of the gradient that returns;
* ``state``: from `init`; then the result is ``(y, state)``;
* ``key``: a random key, for a codec that draws.

Without them a call is that of `jax.lax`, unless `codecs` sets others for a program. Integers and
numbers without axes always are. Every other name is `jax.lax`'s own, so that a program changes by
its import alone. All of this works inside `jax.shard_map`, under `jax.jit`, `jax.vmap`,
`jax.lax.scan` and `jax.checkpoint`, with ``check_vma`` and without.

>>> import jax
>>> from jax.sharding import AxisType, PartitionSpec as P
>>> from jaxmp import lax
>>> mesh = jax.make_mesh((1,), ('stage',), axis_types=(AxisType.Auto,))
>>> send = lambda x: lax.ppermute(x, 'stage', [(0, 0)], fwd='block(4)', bwd='mx(8)')
>>> send = jax.jit(jax.shard_map(send, mesh=mesh, in_specs=P('stage'), out_specs=P('stage')))
>>> [round(v, 1) for v in send(jax.numpy.array([[-1.0, -0.5, 0.2, 2.0]]))[0].tolist()]
[-1.0, -0.6, 0.2, 2.0]
"""

from typing import Any

import jax.lax as _theirs

from jaxmp.lax.calls import codecs as codecs
from jaxmp.lax.collectives import all_gather as all_gather
from jaxmp.lax.collectives import all_to_all as all_to_all
from jaxmp.lax.collectives import init as init
from jaxmp.lax.collectives import pmean as pmean
from jaxmp.lax.collectives import ppermute as ppermute
from jaxmp.lax.collectives import psum as psum
from jaxmp.lax.collectives import psum_scatter as psum_scatter
from jaxmp.lax.collectives import pvary as pvary
from jaxmp.lax.islands import reshard as reshard
from jaxmp.lax.islands import roll as roll
from jaxmp.lax.ragged import ragged_all_to_all as ragged_all_to_all

__all__ = [
    'all_gather',
    'all_to_all',
    'codecs',
    'init',
    'pmean',
    'ppermute',
    'psum',
    'psum_scatter',
    'pvary',
    'ragged_all_to_all',
    'reshard',
    'roll',
]


def __getattr__(name: str) -> Any:
    """All other names are `jax.lax`'s."""
    return getattr(_theirs, name)
