"""`build`: a GPT-2 whose stages end in learned projections, so that few channels cross a boundary.

A codec sends every channel in few bits; here the network itself learns which few it needs. What
crosses is a smaller tensor, which a channel may compress further. What each stage knows anyway
need not be sent either: later stages may embed the tokens themselves.

It is a model of one's own, with two keys of its own, as `configs/few_bits.py` sets them::

    model.name               study.bottleneck:build
    model.bottleneck         channels that cross a boundary; 0: all
    model.embed_every_stage  whether each later stage adds its own embedding of the tokens
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from jaxmp.config import Config
from jaxmp.data import Dataset
from jaxmp.models import pretrained
from jaxmp.models.checkpoint import open_checkpoint
from jaxmp.models.huggingface import local
from jaxmp.models.layers import product
from jaxmp.training.tasks.gpt2 import gpt2_task
from jaxmp.training.tasks.task import Collections, Task, is_traced
from study import principal


def build(config: Config, dataset: Dataset) -> Task:
    """The task of the GPT-2 that ``config`` describes, with narrow boundaries and embeddings.

    One that begins with weights (``model.path``) begins with the principal components of its
    activations too; see `study.principal`.

    Raises:
      ValueError: as `gpt2_task` and `narrowed`; if there is no later stage to embed, or bits
        would be counted against other channels than the weights have.
    """
    c = config.model
    checkpoint = open_checkpoint(local(c.path)) if c.path else None
    plain = gpt2_task(config, dataset, checkpoint)
    stages: Any = plain.stages  # of `jaxmp.models.gpt2`
    width = stages[0].config.width
    if c.embed_every_stage and len(stages) == 1:
        raise ValueError(
            'config.model.embed_every_stage=True is for stages after the first, and '
            'config.model.stages=1 has none; give 2 or more'
        )
    if c.bottleneck and width != c.width:
        raise ValueError(
            f'config.model.width={c.width}, and the weights in {c.path} have {width} '
            f'channels, against which bits are counted; give --config.model.width={width}'
        )
    vocabulary = stages[0].config.vocabulary if c.embed_every_stage else 0
    x = jax.ShapeDtypeStruct((1, *plain.like.shape), plain.like.dtype)

    def read(stage: int) -> Collections:
        assert checkpoint, 'components are of weights'
        return pretrained.read(checkpoint, stages, stage)

    network = principal.Network(stages, read, dataset.train.x, vocabulary)
    components = functools.cache(functools.partial(principal.components, network))

    def start(stage: int, variables: Collections, key: Array) -> Collections:
        drawn = plain.start(stage, variables, key)
        params = {**variables.get('params', {}), **drawn['params']}
        if c.path and not is_traced(variables):
            params |= principal.fitted(components, stage, params)
        return {**drawn, 'params': params}

    narrow = narrowed(stages, x, c.bottleneck, vocabulary)
    return plain._replace(stages=narrow, start=start, export=None)


class Projection(nn.Module):
    """``x W`` of the last axis; at first the common channels as they are, and zeros.

    Attributes:
      features: width of the output.
    """

    features: int

    @nn.compact
    def __call__(self, x: Float[Array, '... K']) -> Float[Array, '... N']:
        """Maps ``(..., K)`` to ``(..., features)``."""
        kernel = self.param('kernel', _identity, (x.shape[-1], self.features), x.dtype)
        y = product(x.reshape(-1, x.shape[-1]), kernel.T)
        return y.reshape(*x.shape[:-1], self.features)


def _identity(key: Array, shape: tuple[int, int], dtype: DTypeLike) -> Array:
    return jax.numpy.eye(*shape, dtype=dtype)


class Narrow(nn.Module):
    """A stage between two projections; its parameters keep their names.

    Attributes:
      inner: the stage.
      wider: channels that it takes; 0: its input is not a narrow one.
      narrower: channels that leave; 0: all of its output.
      table: tokens and channels of the embedding that it adds to its input, zeros at first; None:
        it adds none.
    """

    inner: nn.Module
    wider: int = 0
    narrower: int = 0
    table: tuple[int, int] | None = None

    def setup(self) -> None:
        """Creates the projections and the embedding."""
        nn.share_scope(self, self.inner)
        self.widen = Projection(self.wider) if self.wider else None
        self.narrow = Projection(self.narrower) if self.narrower else None
        if self.table:
            self.tokens = nn.Embed(*self.table, embedding_init=nn.initializers.zeros)

    @property
    def reads_tokens(self) -> bool:
        """Whether it needs the tokens beside its input; see `jaxmp.boundary.pipeline.Stage`."""
        return self.table is not None

    def __call__(
        self, x: Array, train: bool = False, tokens: Int[Array, 'B T'] | None = None
    ) -> Array:
        """The stage's output, narrow if it crosses a boundary.

        Raises:
          ValueError: if the tokens are missing, which ``init`` alone does without.
        """
        x = self.widen(x) if self.widen else x
        if self.table:
            if tokens is None and not self.is_initializing():
                raise ValueError('this stage embeds the tokens too; give them as tokens=')
            ids = jax.numpy.zeros(x.shape[:-1], int) if tokens is None else tokens
            x = x + self.tokens(ids)
        y: PyTree = self.inner(x, train)  # pyright: ignore
        return self.narrow(y) if self.narrow else y


def narrowed(
    stages: Sequence[Any], x: jax.ShapeDtypeStruct, channels: int, vocabulary: int = 0
) -> tuple[Any, ...]:
    r"""Stages that send ``channels`` channels (the last axis), whatever their own width.

    .. math:: m = E\, f_s(x),\quad f_{s+1}(D\, m),\quad
              E \in R^{K \times C},\ D \in R^{C \times K}

    E and D are trained with the network, end to end; at first they keep the first K channels and
    leave out the rest (`study.principal` has others, for a trained network). A boundary that
    is not wider than K has no projections.

    Args:
      stages: Linen modules with ``__call__(x, train)``.
      x: shape and dtype of an input of the first one.
      channels: K; 0: all cross.
      vocabulary: number of tokens that later stages embed; 0: they embed none.

    Raises:
      TypeError: if a stage is no Linen module.
      ValueError: if there is no boundary wider than K.

    >>> import jax.numpy as jnp
    >>> class Layer(nn.Module):
    ...     width: int
    ...     @nn.compact
    ...     def __call__(self, x, train=False):
    ...         return nn.Dense(self.width)(x)
    >>> a, b = narrowed([Layer(8), Layer(3)], jax.ShapeDtypeStruct((4, 5), jnp.float32), 2)
    >>> y, _ = a.init_with_output(jax.random.key(0), jnp.ones((4, 5)))
    >>> y.shape, b.wider
    ((4, 2), 8)

    References:
      Compare Subspace networks, arXiv 2506.01260; Residual bottleneck models, arXiv 2604.11947.
    """
    if odd := [type(s).__name__ for s in stages if not isinstance(s, nn.Module)]:
        raise TypeError(f'a bottleneck takes Linen stages, and {odd[0]} is none')
    sent, wholes = x, []
    for stage in stages[:-1]:
        variables = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
        sent = jax.eval_shape(lambda x, s=stage, v=variables: s.init_with_output(v, x)[0], sent)
        wholes.append(sent.shape[-1])
    narrow = [0 < channels < width for width in wholes]
    if channels and not any(narrow):
        raise ValueError(f'a bottleneck of {channels} channels: no boundary has more channels')
    wider = [0, *(width * is_narrow for width, is_narrow in zip(wholes, narrow, strict=True))]
    narrower = [*(channels * is_narrow for is_narrow in narrow), 0]
    tables = [None, *((vocabulary, width) if vocabulary else None for width in wholes)]
    rows = zip(stages, wider, narrower, tables, strict=True)
    return tuple(Narrow(*row) if any(row[1:]) else row[0] for row in rows)
