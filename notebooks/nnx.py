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
# # flax.nnx: a compressed boundary inside a module
#
# A model of flax.nnx keeps its own state: parameters, BatchNorm's statistics, random streams. Here
# it also keeps the feedback states of a boundary, and the training loop is the ordinary nnx loop
# with one line changed.

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
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxmp
import jaxmp.nnx
from jaxmp import data

EPOCHS, BATCH = 8, 64

# %% [markdown]
# ## The model
#
# Two ordinary modules, and a third one that holds both and the crossing between them. The crossing
# is made for the shape of what crosses it, because feedback states have a row per sample.

# %%
digits = data.load('digits')


def scaled(x):
    """Images as floats with mean 0 and variance 1."""
    return (x.astype(jnp.float32) / 255 - digits.mean[0]) / digits.std[0]


class Front(nnx.Module):
    def __init__(self, width, *, rngs):
        self.linear, self.norm = nnx.Linear(64, width, rngs=rngs), nnx.BatchNorm(width, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.linear(x.reshape(len(x), -1))))


class Back(nnx.Module):
    def __init__(self, width, *, rngs):
        self.hidden, self.logits = nnx.Linear(width, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, h):
        return self.logits(self.dropout(nnx.relu(self.hidden(h))))


class Net(nnx.Module):
    def __init__(self, cut, width=128, *, rngs):
        self.front, self.back = Front(width, rngs=rngs), Back(width, rngs=rngs)
        self.cut = jaxmp.nnx.Crossing(cut, jnp.ones((BATCH, width)))

    def __call__(self, x):
        return self.back(self.cut(self.front(x)))


# %% [markdown]
# ## The loop
#
# `jaxmp.nnx.value_and_grad` stands in place of `nnx.value_and_grad`: it also carries the state
# that the backward channel makes in the backward pass. With another gradient the crossing raises
# an error rather than lose that state.


# %%
def loss(model, x, y):
    logits = model(scaled(x))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    value, grads = jaxmp.nnx.value_and_grad(loss)(model, x, y)
    optimizer.update(model, grads)
    return value


@nnx.jit
def accuracy(model, x, y):
    return 100 * (model(scaled(x)).argmax(-1) == y).mean()


def train(cut):
    """The trained model, and its test accuracy in % with the boundary open."""
    model, (x, y) = Net(cut, rngs=nnx.Rngs(0)), digits.train[:2]
    optimizer = nnx.Optimizer(model, optax.adam(2e-3), wrt=nnx.Param)
    for epoch in range(EPOCHS):
        order = data.order(0, epoch, len(y))
        for at in order[: len(y) // BATCH * BATCH].reshape(-1, BATCH):
            train_step(model, optimizer, x[at], y[at])
    model.eval(compress=False)  # BatchNorm, dropout and the crossing, for batches of any size
    return model, accuracy(model, digits.test.x, digits.test.y)


# %% [markdown]
# Three boundaries: the tensors themselves, small floats of 4 and 8 bits, and such floats with
# feedback in both directions, which sends at the next step what was lost in this one.
# The bits are those of the packed messages.

# %%
TEXTS = {
    'raw': ('raw', 'raw'),
    'floats': ('nvfp4', 'mx(8)'),
    'with feedback': ('ef(mx(4))', 'ef(mx(4))'),
}
models = {}
for name, (fwd, bwd) in TEXTS.items():
    cut = jaxmp.boundary(jaxmp.parse(fwd), jaxmp.parse(bwd))
    models[name], right = train(cut)
    bits = [n / (BATCH * 128) for n in cut.bits(jnp.ones((BATCH, 128)))]
    print(f'{name:13}  {bits[0]:5.2f} and {bits[1]:5.2f} bits an element, open {right:5.1f} %')

# %% [markdown]
# One seed and 360 test images: one image is 0.28 points, so small differences say nothing.
#
# The states are variables of the module, and the optimizer's `wrt=nnx.Param` leaves them alone:

# %%
states = nnx.state(models['with feedback'], (jaxmp.nnx.ForwardFeedback, jaxmp.nnx.BackwardFeedback))
print(jax.tree.map(jnp.shape, nnx.to_pure_dict(states)))

# %% [markdown]
# ## The same modules as stages of a pipeline
#
# `jaxmp.nnx.stage` makes a stage of a module's class. `jaxmp.pipeline` and all runtimes (one
# program, one program over a mesh, a program per stage) take it as they take a Linen module. The
# variables of the trained modules go in, and the same answers come out.

# %%
trained = models['with feedback']
stages = jaxmp.nnx.stage(Front, 128), jaxmp.nnx.stage(Back, 128)
pipe = jaxmp.pipeline(stages, *(jaxmp.parse(text) for text in TEXTS['with feedback']))
variables = tuple(
    stage.variables(module)
    for stage, module in zip(stages, (trained.front, trained.back), strict=True)
)
x = scaled(digits.test.x)
forward = jax.jit(pipe.apply, static_argnames='train')
logits, *_ = forward(variables, None, x, train=False)  # None: the boundaries are open
print('largest difference of the logits:', jnp.abs(logits - trained(x)).max())

# %% [markdown]
# More: [flax.nnx](../docs/nnx.md) in the documentation, with a step of the runtime that
# gives every stage a program of its own.
