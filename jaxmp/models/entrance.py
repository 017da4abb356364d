"""`Entrance`: a stage whose input first has its channels scaled and shifted.

The two vectors are constants, as BatchNorm's statistics are: no step trains them. `jaxmp fold` sets
them, so that a stage that was trained behind a compressed boundary serves behind an open one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

NAME = 'entrance'  # of the collection of variables


@dataclass(frozen=True)
class Entrance:
    r"""``stage`` of :math:`x_c \mapsto a_c x_c + b_c`; its parameters keep their names.

    The channels are the last axis. Kept are a - 1 and b, zeros at first, as are the statistics of
    stages that are read from a checkpoint instead of drawn. What else is asked of it, such as
    ``reads_tokens``, the stage answers.

    Attributes:
      stage: a `jaxmp.boundary.pipeline.Stage` after a boundary.

    >>> import flax.linen as nn, jax
    >>> model = Entrance(nn.Dense(2))
    >>> variables = model.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> jax.tree.map(jnp.shape, variables['entrance'])
    {'scale_minus_one': (3,), 'shift': (3,)}
    """

    stage: Any

    def __getattr__(self, name: str) -> Any:
        if name == 'stage' or name.startswith('__'):  # a copy begins without its fields
            raise AttributeError(name)
        return getattr(self.stage, name)

    @property
    def with_logits(self) -> Entrance:
        """As that of `jaxmp.models.decoder.Stage`, if the stage has it."""
        return Entrance(self.stage.with_logits)

    def init(self, rngs: Any, x: Array, *args: Any, **kwargs: Any) -> Any:
        """See `jaxmp.boundary.pipeline.Stage`."""
        return self.init_with_output(rngs, x, *args, **kwargs)[1]

    def init_with_output(self, rngs: Any, x: Array, *args: Any, **kwargs: Any) -> Any:
        """See `jaxmp.boundary.pipeline.Stage`.

        Raises:
          ValueError: if ``x`` has no axis of channels behind that of the batch.
        """
        if x.ndim < 2:
            raise ValueError(
                f'config.model.entrance scales channels, the last axis behind that of the batch, '
                f'and {x.dtype.name}{list(x.shape)} crosses a boundary; leave it out'
            )
        output, variables = self.stage.init_with_output(rngs, x, *args, **kwargs)
        zeros = jnp.zeros(x.shape[-1])
        return output, {**variables, NAME: {'scale_minus_one': zeros, 'shift': zeros}}

    def apply(
        self, variables: Any, x: Array, *args: Any, mutable: Any = False, **kwargs: Any
    ) -> Any:
        """See `jaxmp.boundary.pipeline.Stage`; its own collection never changes."""
        vectors = variables[NAME]
        x = (x * (1 + vectors['scale_minus_one']) + vectors['shift']).astype(x.dtype)
        inner = {name: tree for name, tree in variables.items() if name != NAME}
        if isinstance(mutable, list):
            mutable = [name for name in mutable if name != NAME]
        return self.stage.apply(inner, x, *args, mutable=mutable, **kwargs)
