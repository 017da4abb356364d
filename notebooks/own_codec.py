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
# # Write your own codec
#
# A codec is two functions: `encode` makes the message of a tensor, arrays and nothing else, and
# `decode` makes a tensor of the message. Everything else follows: feedback rules, the wire, the
# trainer, the count of bits.

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
import matplotlib.pyplot as plt
import numpy as np

import jaxmp
from jaxmp import testing as laws
from jaxmp.wire import pack, samples, unpack

# %% [markdown]
# ## A ternary quantiser, in 20 lines
#
# Of every sample, what exceeds half of its largest magnitude is sent as a sign, all else as zero;
# one number $s$ per sample, the mean magnitude of what was sent, goes beside it. Codes 0, 1 and 2
# take two bits each, and `pack` puts four of them into a byte.
#
# $$C(x)_i = s \cdot \mathrm{sign}(x_i) \ \text{ if } |x_i| > t \max_j |x_j|, \text{ else } 0$$


# %%
def ternary(t: float = 0.5) -> jaxmp.Codec:
    """A sign or zero for every element, and one magnitude a sample."""

    def encode(x, ctx):
        x = samples(x).astype(jnp.float32)  # (samples, elements)
        most = jnp.abs(x).max(1, keepdims=True)
        large = jnp.abs(x) > t * most
        count = jnp.maximum(large.sum(1, keepdims=True), 1)
        s = jnp.where(large, jnp.abs(x) / count, 0).sum(1, keepdims=True)
        s = jnp.where(jnp.isfinite(most), s, jnp.nan)  # a sample with a NaN must not become zeros
        codes = jnp.where(large, jnp.where(x > 0, 1, 2), 0)
        return pack(codes, 2), jnp.minimum(s, most)

    def decode(message, like, ctx):
        packed, s = message
        codes = unpack(packed, 2, like.size // like.shape[0])
        signs = (codes == 1).astype(jnp.float32) - (codes == 2)
        return (s * signs).reshape(like.shape).astype(like.dtype)

    return jaxmp.Codec(encode, decode)


# %% [markdown]
# Its name goes to `parse`, and it works wherever a codec does: under a feedback rule, or for the
# values of TopK.

# %%
names = {'ternary': ternary}
x = jax.random.normal(jax.random.key(0), (64, 256))
for text in ('ternary()', 'ef21(ternary(0.7))', 'top_k(0.2, values=ternary(), indices=bitmap)'):
    print(f'{text:46} {jaxmp.bits(jaxmp.parse(text, names), x) / x.size:.3f} bits an element')

# %% [markdown]
# ## The laws
#
# `jaxmp.testing` sends 16 tensors through a codec: zeros, constants, outliers, numbers at both
# ends of the range, NaN and infinities, half precision. The message crosses as bytes between two
# separately compiled programs, so a receiver that peeks at the sender's data fails. Every codec
# keeps shape and dtype, reports the bits of its arrays, and keeps finite what is finite. A `Law`
# adds what yours promises: here an error of at most half the sample's largest magnitude, that a
# NaN spoils its own sample and shows, and that samples do not touch each other.


# %%
def half_of_the_largest(x: np.ndarray) -> np.ndarray:
    """What was sent lies in the upper half, what was not in the lower."""
    most = np.abs(x).reshape(len(x), -1).max(1)
    return (0.5 * (1 + 1e-5) * most).reshape(-1, *[1] * (x.ndim - 1))


promise = laws.Law(bound=half_of_the_largest, spoilt=laws.sample, alone=True)
laws.check('ternary()', promise, names=names)
laws.check('ef(ternary())', laws.Law(spoilt=laws.sample), names=names)
print(f'ternary keeps its promise on {len(laws.INPUTS)} tensors: {", ".join(laws.INPUTS)}')

# %% [markdown]
# And a codec that breaks one: without the line for NaN, a sample with a NaN becomes zeros, and
# training would go on as if nothing had happened.


# %%
def silent(t: float = 0.5) -> jaxmp.Codec:
    """The same, with NaN taken for nothing."""
    made = ternary(t)
    return made._replace(encode=lambda x, ctx: made.encode(jnp.nan_to_num(x), ctx))


try:
    laws.check('silent()', promise, {'nan': laws.INPUTS['nan']}, {'silent': silent})
except AssertionError as broken:
    print('refused:', str(broken).splitlines()[0])
else:
    raise SystemExit('the laws let a silent NaN through')

# %% [markdown]
# ## What it does to numbers

# %%
channel = jaxmp.parse('ternary()', names)
message, _ = channel.send(x, (), jaxmp.Ctx())
received, _ = channel.recv(message, (), jaxmp.like(x), jaxmp.Ctx())
figure, axes = plt.subplots(figsize=(5, 3.5), layout='constrained')
axes.plot(x[:8].ravel(), received[:8].ravel(), '.', markersize=2)
axes.set(xlabel='sent, $x$', ylabel='received, $C(x)$', title='ternary(0.5), eight samples')
plt.show()

# %% [markdown]
# To keep it, put it in a file of `jaxmp/codecs/`, name it in `jaxmp/codecs/__init__.py`, and give
# it a line in the table `SPECS` of `tests/laws.py`: then its text works in every config too.
