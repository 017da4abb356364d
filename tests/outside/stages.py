"""A Flax model with two boundaries and a codec of one's own, in an optax loop of one's own."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmp
from jaxmp.wire import samples


def pooled(size: int) -> jaxmp.Codec:
    """The mean of every ``size`` neighbouring features, as a float16."""

    def encode(x, ctx):
        rows = samples(x)
        return {'means': rows.reshape(len(rows), -1, size).mean(2).astype(jnp.float16)}

    def decode(message, like, ctx):
        rows = jnp.repeat(message['means'].astype(like.dtype), size, axis=1)
        return rows.reshape(like.shape)

    return jaxmp.Codec(encode, decode)


class Network(nn.Module):
    cuts: tuple

    @nn.compact
    def __call__(self, x, feedback=None):
        states = []
        for i, cut in enumerate(self.cuts):
            x = nn.relu(nn.Dense(32)(x))
            if feedback is not None:
                x, state = cut.cross(x, feedback.at(i))
                states.append(state)
        return nn.Dense(2)(x), states and jaxmp.FeedbackState.join(states)


parse = lambda text: jaxmp.parse(text, {'pooled': pooled})
cuts = (
    jaxmp.boundary(parse('ef21(pooled(4))'), parse('ef(uniform(4))')),
    jaxmp.boundary(parse('top_k(0.25, values=pooled(2))'), parse('same_support()')),
)
model, optimizer = Network(cuts), optax.adam(1e-2)


def batch(key):
    """Two half circles, one inside the other."""
    keys = jax.random.split(key)
    y, angle = jnp.arange(32) % 2, jnp.pi * jax.random.uniform(keys[0], (32,))
    x = (1 + y[:, None]) * jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
    return x + 0.1 * jax.random.normal(keys[1], (32, 2)), y


def loss(params, feedback, x, y):
    logits, feedback = model.apply(params, x, feedback)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
    return nats, (feedback, None)


@jax.jit
def step(params, slots, feedback, key):
    (nats, _), grads, feedback = jaxmp.value_and_grad(loss)(params, feedback, *batch(key))
    updates, slots = optimizer.update(grads, slots)
    return optax.apply_updates(params, updates), slots, feedback, nats


x, y = batch(jax.random.key(0))
params = model.init(jax.random.key(1), x)
feedback = jaxmp.init_feedback(cuts, [jax.ShapeDtypeStruct((32, 32), 'float32')] * 2)
slots, losses = optimizer.init(params), []
for i in range(100):
    params, slots, feedback, nats = step(params, slots, feedback, jax.random.key(i))
    losses.append(float(nats))
bits = [cut.bits(jnp.zeros((32, 32))) for cut in cuts]
forward = jax.jit(model.apply)
accuracy = {
    name: float((forward(params, x, state)[0].argmax(1) == y).mean())
    for name, state in (('on', feedback), ('off', None))
}
print(losses[0], losses[-1], accuracy, bits)
