"""`narrowed`: stages whose ends are learned projections, so that few channels cross a boundary.

A codec sends every channel in few bits; here the network itself learns which few it needs. What
crosses is a smaller tensor, which a channel may compress further.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jaxmp.models.layers import product


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
    """

    inner: nn.Module
    wider: int = 0
    narrower: int = 0

    def setup(self) -> None:
        """Creates the projections."""
        nn.share_scope(self, self.inner)
        self.widen = Projection(self.wider) if self.wider else None
        self.narrow = Projection(self.narrower) if self.narrower else None

    @property
    def reads_tokens(self) -> bool:
        """Whether the stage reads the tokens of the model's input."""
        return getattr(self.inner, 'reads_tokens', False)

    def __call__(self, x: Array, train: bool = False, **kwargs: object) -> Array:
        """The stage's output, narrow if it crosses a boundary."""
        x = self.widen(x) if self.widen else x
        y: PyTree = self.inner(x, train, **kwargs)  # pyright: ignore
        return self.narrow(y) if self.narrow else y


def narrowed(stages: Sequence[Any], x: jax.ShapeDtypeStruct, channels: int) -> tuple[Any, ...]:
    r"""Stages that send ``channels`` channels (the last axis), whatever their own width.

    .. math:: m = E\, f_s(x),\quad f_{s+1}(D\, m),\quad
              E \in R^{K \times C},\ D \in R^{C \times K}

    E and D are trained with the network, end to end; at first they keep the first K channels and
    leave out the rest (`jaxmp.models.principal` has others, for a trained network). A boundary that
    is not wider than K has no projections.

    Args:
      stages: Linen modules with ``__call__(x, train)``.
      x: shape and dtype of an input of the first one.
      channels: K, 1 or more.

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
    widths, sent = [0], x
    for stage in stages[:-1]:
        variables = {'params': jax.random.key(0), 'dropout': jax.random.key(1)}
        sent = jax.eval_shape(lambda x, s=stage, v=variables: s.init_with_output(v, x)[0], sent)
        widths.append(sent.shape[-1] if sent.shape[-1] > channels else 0)
    if not any(widths):
        raise ValueError(f'a bottleneck of {channels} channels: no boundary has more channels')
    ends = zip(stages, widths, [*widths[1:], 0], strict=True)
    narrow = lambda stage, wider, sends: Narrow(stage, wider, channels if sends else 0)
    return tuple(narrow(*row) if any(row[1:]) else row[0] for row in ends)
