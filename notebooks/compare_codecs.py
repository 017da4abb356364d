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
# # Compare codecs at equal bytes
#
# What a codec loses, and what that does to training, says little without its price. Here every
# codec gets the same number of bytes, and makes the best of them.

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
from bisect import bisect_left

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import jaxmp
from jaxmp import data

SEEDS, EPOCHS, BATCH, WIDTH = 3, 6, 64, 128
BUDGETS = 2, 4  # bits an element

# %% [markdown]
# ## The same bytes for all
#
# A family of codecs has a knob: the bits of a quantiser, the share that TopK keeps. For a budget,
# take the largest setting whose message fits; `jaxmp.bits` reads its size from its arrays without
# computing it.

# %%
KEPT = [k / 100 for k in range(99, 0, -1)]  # descending, as the bits
FAMILIES = {
    'uniform': ('uniform({})', range(8, 0, -1)),
    'TopK, float32 values': ('top_k({})', KEPT),
    'TopK, 4-bit log values': ('top_k({}, values=log_scale(4), indices=bitmap)', KEPT),
}
cut_like = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)
OVERHEAD = 0.01  # bits an element: the range that a quantiser sends along


def size(text):
    """Bits an element of the message."""
    return jaxmp.bits(jaxmp.parse(text), cut_like) / cut_like.size


def fit(family, budget):
    """The largest setting of a family within the budget, as a text."""
    form, settings = FAMILIES[family]
    fits = lambda setting: size(form.format(setting)) <= budget + OVERHEAD
    return form.format(settings[bisect_left(settings, True, key=fits)])


chosen = {(f, b): fit(f, b) for f in FAMILIES for b in BUDGETS}
for (_, budget), text in sorted(chosen.items(), key=lambda c: c[0][1]):
    print(f'{budget} bits: {text:50} {size(text):.3f}')

# %% [markdown]
# ## A network with one cut
#
# The codecs compete forward; backward all send 8 bits an element. The seeds are trained side by
# side under one compilation (`jax.vmap`).

# %%
digits = data.load('digits')
x, y, test_x, test_y = (jnp.asarray(a) for split in (digits.train, digits.test) for a in split)
x, test_x = ((a.astype(jnp.float32) / 255 - digits.mean[0]) / digits.std[0] for a in (x, test_x))
STEPS = len(y) // BATCH
orders = np.stack(
    [[data.order(s, e, len(y))[: STEPS * BATCH] for e in range(EPOCHS)] for s in range(SEEDS)]
).reshape(SEEDS, EPOCHS * STEPS, BATCH)
optimizer = optax.adam(1e-3)


class Front(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(nn.Dense(WIDTH)(x.reshape(len(x), -1)))


class Back(nn.Module):
    @nn.compact
    def __call__(self, h):
        return nn.Dense(10)(nn.relu(nn.Dense(WIDTH)(h)))


def nats(back, h, y):
    """The loss as a function of what arrives at the second stage, and the logits."""
    logits = Back().apply(back, h)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), logits


def train(text):
    """Test accuracy in %, compressed, of each seed; and the weights."""
    cut = jaxmp.boundary(jaxmp.parse(text), jaxmp.parse('raw' if text == 'raw' else 'uniform(8)'))

    def loss(weights, feedback, x, y):
        h, feedback = cut.cross(Front().apply(weights[0], x), feedback)
        value, logits = nats(weights[1], h, y)
        return value, (feedback, logits)

    def step(state, at):
        weights, slots, feedback = state
        _, grads, feedback = jaxmp.value_and_grad(loss)(weights, feedback, x[at], y[at])
        updates, slots = optimizer.update(grads, slots)
        return (optax.apply_updates(weights, updates), slots, feedback), None

    @jax.jit
    @jax.vmap
    def whole(key, order):
        weights = Front().init(key, x[:1]), Back().init(key, jnp.zeros((1, WIDTH)))
        state = weights, optimizer.init(weights), cut.init(cut_like)
        (weights, _, _), _ = jax.lax.scan(step, state, order)
        h = Front().apply(weights[0], test_x)
        _, (_, logits) = loss(weights, cut.init(h), test_x, test_y)
        return 100 * (logits.argmax(-1) == test_y).mean(), weights

    accuracy, weights = whole(jax.random.split(jax.random.key(0), SEEDS), orders)
    return np.asarray(accuracy), weights


raw, weights = train('raw')
print(f'raw: {raw.mean():.1f} %')

# %% [markdown]
# ## What is lost of an activation, and of a gradient
#
# The tensors at the cut of a network that was trained without compression. The error is $|x -
# C(x)|^2 / |x|^2$.

# %%
front, back = jax.tree.map(lambda w: w[0], weights)  # of the first seed
h = Front().apply(front, x[:BATCH])
gradient = jax.grad(lambda h: nats(back, h, y[:BATCH])[0])(h)
tensors = {'activation': h, 'gradient': gradient}


def error(text):
    """The relative squared error of a codec on each of the tensors."""
    channel = jaxmp.parse(text)

    @jax.jit
    def lost(a):
        message, _ = channel.send(a, (), jaxmp.Ctx())
        received, _ = channel.recv(message, (), jaxmp.like(a), jaxmp.Ctx())
        return jnp.sum((a - received) ** 2) / jnp.sum(a**2)

    return [float(lost(a)) for a in tensors.values()]


figure, panels = plt.subplots(1, 2, figsize=(9, 3.5), layout='constrained', sharey=True)
for family in FAMILIES:
    texts = [chosen[family, b] for b in BUDGETS]
    for axes, errors in zip(panels, np.transpose([error(t) for t in texts]), strict=True):
        axes.semilogy([size(t) for t in texts], errors, 'o-', label=family)
for axes, name in zip(panels, tensors, strict=True):
    axes.set(xlabel='bits an element', title=f'{name} at the cut')
    axes.set_xticks(BUDGETS)
panels[0].set_ylabel('relative squared error')
panels[0].legend(frameon=False, fontsize='small')
plt.show()

# %% [markdown]
# ## What that does to training

# %%
found = {key: train(text)[0] for key, text in chosen.items()}
error_of = lambda values: values.std(ddof=1) / len(values) ** 0.5
print(f'{"raw":50} 32.00 bits  {raw.mean():5.1f} ± {error_of(raw):.1f} %')
for key, values in sorted(found.items(), key=lambda c: (c[0][1], -c[1].mean())):
    text = chosen[key]
    print(f'{text:50} {size(text):5.2f} bits  {values.mean():5.1f} ± {error_of(values):.1f} %')

# %%
bars, axes = plt.subplots(figsize=(6, 3.5), layout='constrained')
for at, family in enumerate(FAMILIES):
    own = [found[family, b] for b in BUDGETS]
    places = np.arange(len(BUDGETS)) + 0.2 * (at - 1)
    axes.errorbar(
        places,
        [v.mean() for v in own],
        [error_of(v) for v in own],
        fmt='o',
        capsize=3,
        label=family,
    )
axes.axhline(raw.mean(), color='gray', linestyle='--', label='raw')
axes.set_xticks(range(len(BUDGETS)), [f'{b} bits an element' for b in BUDGETS])
axes.set(ylabel='test accuracy, %', title=f'Digits, one cut, {SEEDS} seeds, mean and its error')
axes.legend(frameon=False, fontsize='small')
plt.show()

# %% [markdown]
# A small network on small images: the order of the codecs here is not that of every task. The
# tables of [the report](../docs/report/report.md) do the same for a ResNet on CIFAR-10, and
# `jaxmp.sweep` does it for yours.
