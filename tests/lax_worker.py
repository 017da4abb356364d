"""A process of two: a ring and a sum through codecs. python tests/lax_worker.py PORT PROCESS"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmp import lax
from jaxmp.exchange.hlo import operands


def step(x):
    def loss(x):
        h = lax.ppermute(jnp.tanh(x), 'i', [(0, 1), (1, 0)], fwd='nvfp4', bwd='mx(8)')
        total = lax.psum(h, 'i', fwd='block(8)')
        return jnp.mean(total**2), total

    (_, total), gradient = jax.value_and_grad(loss, has_aux=True)(x)
    return total, gradient


def main(port, process):
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(f'127.0.0.1:{port}', 2, int(process))
    mesh = jax.make_mesh((2,), ('i',), axis_types=(AxisType.Auto,))
    numbers = np.random.default_rng(0).standard_normal((4, 8, 64)).astype(np.float32)
    x = jax.make_array_from_callback(
        numbers.shape, NamedSharding(mesh, P('i')), lambda index: numbers[index]
    )
    ran = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P('i'), out_specs=(P(), P('i'))))
    total, gradient = (np.asarray(a.addressable_shards[0].data) for a in ran(x))
    sent = operands(ran.lower(x).compile().as_text())
    print(total.tobytes().hex(), np.abs(gradient).max() > 0, sent['collective-permute'], flush=True)


if __name__ == '__main__':
    main(*sys.argv[1:])
