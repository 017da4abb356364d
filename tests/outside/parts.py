"""Parts of an experiment that the package does not know: imported by the names in own.py alone."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp
import jaxmp.nnx
from jaxmp.data import Dataset, Split
from jaxmp.exchange import Rule
from jaxmp.runtimes.schedule import timed


# A data set: two moons, as points and not images.
def moons(config):
    r = np.random.default_rng(config.seed)

    def split(count):
        angle, y = r.uniform(0, np.pi, count), r.integers(0, 2, count)
        moon = np.stack([np.cos(angle), np.sin(angle)], 1) * (1 - 2 * y[:, None])
        x = moon + y[:, None] * np.array([1.0, 0.5]) + r.normal(0, 0.1, (count, 2))
        return Split(x.astype(np.float32), y.astype(np.int32))

    return Dataset('moons', split(320), split(200), classes=2, mean=(), std=())


# A model of three stages: Linen, flax.nnx, and Linen with statistics.
class Hidden(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.tanh(nn.Dense(self.width)(x))


class Block(nnx.Module):
    def __init__(self, width, *, rngs):
        self.linear, self.dropout = nnx.Linear(width, width, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return nnx.tanh(self.dropout(self.linear(x)))


class Head(nn.Module):
    classes: int

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        return nn.Dense(self.classes)(x)


def network(config, dataset):
    width = config.model.width
    return Hidden(width), jaxmp.nnx.stage(Block, width), Head(dataset.classes)


# A codec: signs, and one magnitude per sample, as two numbers of 16 bits.
def _encode(x, ctx):
    rows = x.reshape(len(x), -1)
    scale = jnp.abs(rows).mean(1, keepdims=True).astype(jnp.float16)
    return {'signs': jnp.packbits(rows > 0, axis=1), 'scale': scale}


def _decode(message, like, ctx):
    count = int(np.prod(like.shape[1:]))
    signs = jnp.unpackbits(message['signs'], axis=1, count=count).astype(like.dtype) * 2 - 1
    return (signs * message['scale'].astype(like.dtype)).reshape(like.shape)


signs = jaxmp.Codec(_encode, _decode)


# A feedback rule: error feedback that forgets a part of its error.
def leaky(codec: jaxmp.Codec, keep: float = 0.9) -> jaxmp.Channel:
    plain = jaxmp.ef(codec)

    def send(x, error, ctx):
        message, error = plain.send(x, error, ctx)
        return message, keep * error

    return plain._replace(send=send)


# An exchange: every replica takes the sum of the signs of all.
def majority(scale: float = 0.1) -> Rule:
    def reduce(grads, state, key, via):
        votes = via.all_reduce([jnp.sign(g) for g in grads])
        return [scale * jnp.sign(v) for v in votes], state

    return Rule(lambda grads, n: (), reduce)


# A metric, an optimizer, a schedule of the rate, a schedule of the pipeline.
def margin(output, y):
    rows = jnp.arange(len(y))
    return output[rows, y] - output[rows, 1 - y]


of_nothing = jaxmp.Metric('F1', 'f1')


def lion(config, rate):
    return optax.lion(rate, weight_decay=config.optimizer.weight_decay)


def clipped(config, rate):
    return optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(rate, 0.9))


def levelled(config, rate):
    """Divides by the mean magnitude of all gradients, which no norm tells."""

    def update(grads, state, params=None):
        sizes = [jnp.abs(g).mean() for g in jax.tree.leaves(grads)]
        return jax.tree.map(lambda g: -config.optimizer.lr * g / sum(sizes), grads), state

    return optax.GradientTransformation(lambda params: (), update)


def warmup(config, steps_per_epoch):
    return optax.linear_schedule(0.0, config.optimizer.lr, steps_per_epoch)


def all_forward_first(stages, microbatches):
    tasks = [('F', m) for m in range(microbatches)] + [('B', m) for m in range(microbatches)]
    return timed({s: [(kind, s, m) for kind, m in tasks] for s in range(stages)})
