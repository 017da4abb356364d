"""What a codec leaves of a language model's activations, on a sample that the package holds.

The first token of a sequence, the attention sink, has up to 140 times the norm of the others.
Random numbers have no such token, so a codec may be good on them and lose everything here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.feedback import Channel
from jaxmp.spec import parse
from jaxmp.wire import Codec, Ctx, Like, like

SAMPLE = Path(__file__).parents[1] / 'data' / 'smollm2.npz'  # of SmolLM2-135M; see its NOTICE
LARGE = 1.5  # times the error on normal data: the median is; the worst, twice that
SPOILT = 0.3  # of its norm: an error with which the median token is spoilt, if the codec has less


class Errors(NamedTuple):
    """Errors of tokens, each as a part of the token's norm.

    Attributes:
      median: of all tokens.
      worst: of all tokens; above 1 the message is worse than none.
      sink: of the first token.
      normal: the median on normal data, where all tokens and channels are alike.
    """

    median: float
    worst: float
    sink: float
    normal: float

    @property
    def breaks(self) -> bool:
        """Whether a token is worse than lost, or most are spoilt, and that because of the sink."""
        large = LARGE * self.normal
        return self.worst > max(1, 2 * large) or self.median > max(SPOILT, large)

    def __str__(self) -> str:
        """The errors in a table: median, worst, sink."""
        text = '; '.join(f'{e:.2g}' for e in self[:3])
        return f'{text}: **breaks**' if self.breaks else text


@functools.cache
def sample(name: str = 'act_15') -> np.ndarray:
    """What block 15 of a language model sends on for 48 tokens, float32 ``(1, 48, 576)``."""
    with np.load(SAMPLE) as data:
        return data[name].astype(np.float32)


def errors(codec: Codec) -> Errors:
    """The errors of a codec on the sample.

    Raises:
      TypeError or ValueError: if the codec needs of the context what a text has not.

    >>> import jaxmp
    >>> for codec in jaxmp.uniform(8), jaxmp.outliers(jaxmp.uniform(8)):
    ...     print(round(errors(codec).median, 2), errors(codec).breaks)
    1.54 True
    0.03 False
    """
    x = jnp.asarray(sample())
    ctx = Ctx.example(x)._replace(key=jax.random.key(1))  # not that of the normal data
    some = parse('top_k(0.1)').codec

    @jax.jit
    def lost(x: jax.Array) -> jax.Array:
        """The error of each token."""
        informed = ctx._replace(indices=some.indices(some.encode(x, ctx), like(x), ctx))
        y = codec.decode(codec.encode(x, informed), like(x), informed)
        squares = lambda a: jnp.sum(a * a, -1)
        return jnp.sqrt(squares(y - x) / squares(x)).reshape(-1)

    real, normal = (np.asarray(lost(a)) for a in (x, jax.random.normal(jax.random.key(0), x.shape)))
    return Errors(*map(float, (np.median(real), real.max(), real[0], np.median(normal))))


def warnings_of(channels: Iterable[Channel], model_input: Like) -> list[str]:
    """A line for each channel of activations that breaks on text, if the model's input is text.

    Args:
      channels: those of the forward direction; each codec is judged once.
      model_input: shape and dtype of what enters the first stage: token ids are integers.
    """
    if not jnp.issubdtype(model_input.dtype, jnp.integer):
        return []
    named = {c.codec: str(c.codec if c.codec.origin else c) for c in channels}
    return [line for codec, name in named.items() if (line := _warning(codec, name))]


@functools.cache
def _warning(codec: Codec, name: str) -> str:
    try:
        measured = errors(codec)
    except (TypeError, ValueError):  # a codec that a text alone does not feed
        return ''
    worst, median = measured.worst, measured.median
    if not measured.breaks:
        return ''
    return (
        f'{name}: on activations of a pretrained language model the median token arrives with '
        f'an error of {median:.2g} of its norm, the worst with {worst:.2g}: one scale '
        f'for a few huge elements and all others. Write outliers({name})'
    )
