# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Quickstart: a compressed boundary in your own model
#
# A network is cut in two. The activation that crosses the cut forward, and the gradient that
# crosses it backward, are packed into a few bits, and the network learns with what arrives.

# %% [markdown]
# Open this file in the folder `notebooks/` of a clone, or upload it to Colab. The next cell
# installs jaxmp where it is missing: `SOURCE` is the clone, or `git+` and the repository's address.

# %%
import importlib.util
import subprocess
import sys

SOURCE = '..'
if importlib.util.find_spec('jaxmp') is None:
    subprocess.run([sys.executable, '-m', 'pip', 'install', '-q', SOURCE], check=True)

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax

import jaxmp
from jaxmp import data

EPOCHS, BATCH = 8, 64

# %% [markdown]
# ## Your model and your data
#
# Two ordinary Flax modules; they know nothing of compression. The data are scikit-learn's 8 x 8
# digits, which come with jaxmp.

# %%
digits = data.load('digits')


def scaled(x):
    """Images as floats with mean 0 and variance 1."""
    return (x.astype(jnp.float32) / 255 - digits.mean[0]) / digits.std[0]


class Front(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))


class Back(nn.Module):
    @nn.compact
    def __call__(self, h):
        return nn.Dense(10)(nn.relu(nn.Dense(64)(h)))


front, back = Front(), Back()
x = scaled(digits.train.x[:BATCH])
w1 = front.init(jax.random.key(0), x)
h = front.apply(w1, x)
weights = w1, back.init(jax.random.key(1), h)


def score(logits, y):
    """Cross-entropy in nats, and the share of right answers."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return nats.mean(), (logits.argmax(-1) == y).mean()


# %% [markdown]
# ## The boundary, in ten lines
#
# Forward, floats of 4 bits, 16 of which share a scale; backward, floats of 8 bits, 32 of which do.
# A large number then spoils few others. `cross` is the wire: it packs, unpacks, and lets the
# gradient come back through the other channel.

# %%
cut = jaxmp.boundary(jaxmp.parse('nvfp4'), jaxmp.parse('mx(8)'))
feedback = cut.init(h)  # what feedback rules remember: part of your train state


def loss(weights, feedback, x, y, cut):
    h = front.apply(weights[0], scaled(x))
    h, feedback = cut.cross(h, feedback)
    nats, right = score(back.apply(weights[1], h), y)
    return nats, (feedback, right)


# %% [markdown]
# How many bits is that? The size of a message is read from its arrays, so nothing is left out.

# %%
for way, size in zip(('forward', 'backward'), cut.bits(h), strict=True):
    print(f'{way:8}  {size // 8:6,} bytes a step, {size / h.size:5.2f} bits an element, raw has 32')

# %% [markdown]
# ## Training
#
# Take `jaxmp.value_and_grad` instead of `jax.value_and_grad`: it also returns what the channels
# will remember at the next step. The rest is as ever.

# %%
optimizer = optax.adam(2e-3)


def train(cut):
    """Test accuracy in % after each epoch, the boundary open and compressed."""
    x, y = jnp.asarray(digits.train.x), jnp.asarray(digits.train.y)

    def step(state, at):
        weights, slots, feedback = state
        (nats, _), grads, feedback = jaxmp.value_and_grad(loss)(
            weights, feedback, x[at], y[at], cut
        )
        updates, slots = optimizer.update(grads, slots)
        return (optax.apply_updates(weights, updates), slots, feedback), nats

    @jax.jit
    def epoch(state, order):
        return jax.lax.scan(step, state, order)[0]

    @jax.jit
    def test(weights):
        h = front.apply(weights[0], scaled(digits.test.x))
        received, _ = cut.cross(h, cut.init(h))
        return [100 * score(back.apply(weights[1], z), digits.test.y)[1] for z in (h, received)]

    steps = len(y) // BATCH
    state, found = (weights, optimizer.init(weights), cut.init(h)), []
    for number in range(EPOCHS):
        order = data.order(0, number, len(y))[: steps * BATCH].reshape(steps, BATCH)
        state = epoch(state, order)
        found.append(test(state[0]))
    return found


raw = jaxmp.boundary(jaxmp.parse('raw'), jaxmp.parse('raw'))  # the tensors themselves
curves = {'raw and raw': train(raw), 'nvfp4 and mx(8)': train(cut)}

# %% [markdown]
# Another channel is another text. This is the paper's Top10 %: the largest 10 % of every sample,
# with their positions as a bitmap, in both directions. A network that is trained with it has only
# seen sparse activations, so it is worse with the boundary open.

# %%
top = jaxmp.parse('top_k(0.1, values=fp16, indices=bitmap)')
curves['top_k(0.1) and top_k(0.1)'] = train(jaxmp.boundary(top, top))

# %%
figure, axes = plt.subplots(figsize=(6, 3.5), layout='constrained')
for text, curve in curves.items():
    off, on = zip(*curve, strict=True)
    [line] = axes.plot(range(1, EPOCHS + 1), on, marker='o', label=f'{text}: compressed')
    axes.plot(range(1, EPOCHS + 1), off, '--', color=line.get_color(), label=f'{text}: open')
    print(f'{text:36} compressed {on[-1]:5.1f} %, open {off[-1]:5.1f} %')
axes.set(xlabel='epoch', ylabel='test accuracy, %', title='Digits, one boundary, one seed')
axes.legend(frameon=False, fontsize='small')
axes.set_ylim(bottom=50)
plt.show()

# %% [markdown]
# One seed and 360 test images: one image is 0.28 points, so small differences say nothing.
#
# Several cuts at once: `jaxmp.pipeline([stage, stage, ...], fwd, bwd)` puts a boundary between
# each two stages. What the channels may be: [the algebra](../docs/algebra.md), and the notebook
# [compare codecs](compare_codecs.ipynb).
