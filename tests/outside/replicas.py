"""Replicas that share gradients by an exchange of one's own, over a mesh of one's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from jaxmp import exchange


def largest(fraction: float = 0.5) -> exchange.Rule:
    """The mean of the replicas' large elements; the others are added to the next gradient."""

    def init(grads, n):
        return [jnp.zeros_like(g) for g in grads]

    def reduce(grads, errors, key, via):
        sums = [g + e for g, e in zip(grads, errors, strict=True)]
        least = [jnp.quantile(jnp.abs(s), 1 - fraction) for s in sums]
        sent = [jnp.where(jnp.abs(s) >= t, s, 0) for s, t in zip(sums, least, strict=True)]
        means = [m / via.size for m in via.all_reduce(sent)]
        return means, [s - m for s, m in zip(sums, sent, strict=True)]

    return exchange.Rule(init, reduce)


n = 2
rule = exchange.parse('largest(0.25)', {'largest': largest})
optimizer = optax.chain(exchange.transform(rule, axis='data', replicas=n), optax.adam(1e-2))
model = nn.Sequential([nn.Dense(32), nn.tanh, nn.Dense(32), nn.tanh, nn.Dense(1)])


def loss(params, x):
    return ((model.apply(params, x) - jnp.sin(3 * x[:, :1])) ** 2).mean()


def step(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, jax.lax.pmean(value, 'data')


each, same = jax.P('data'), jax.P()
mesh = jax.make_mesh((n,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))
specs = {'in_specs': (same, (each, same), each), 'out_specs': (same, (each, same), same)}
step = jax.jit(jax.shard_map(step, mesh=mesh, **specs, check_vma=False))

params = model.init(jax.random.key(0), jnp.zeros((1, 2)))
state, losses = optimizer.init(params), []
for i in range(100):
    params, state, value = step(params, state, jax.random.normal(jax.random.key(i), (64, 2)))
    losses.append(float(value))
size = exchange.bytes_of(rule, jax.tree.leaves(params), n)
print(losses[0], losses[-1], size)
