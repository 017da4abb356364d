r"""`corrected`: an optimizer whose gradients come N steps late, as in a pipeline that stays full.

Step t computes the gradient :math:`g_t` at the parameters :math:`p_t`, and moves them by
:math:`g_{t-N}` (`jaxmp.training.step`), so that N + 1 batches are under way at once and no stage
waits for a message. The first N steps move nothing, and the gradients of the last N are not used.
N = 1 is PipeDream-2BW. With `delay_by_stage`, as in PipeDream, stage s of S waits only as long as
its own way to the last stage and back takes, with the last one on time:

.. math:: N_s = \lceil N (S - 1 - s) / (S - 1) \rceil

A correction makes up for it. With :math:`u_t`, the optimizer's update by :math:`g_{t-N}`:

* ``none``: :math:`p_{t+1} = p_t + u_t`
* ``predict(c)``: :math:`p_{t+1} = p_t + u_t + c\,(u_t - u_{t-1})`. The sum of all steps is
  :math:`p_t = w_t + c\,u_{t-1}`: the gradient is taken where the parameters :math:`w` will be, if
  each of the N updates under way is as the last one (c = N, the default). With momentum this is
  SpecTrain's and XPipe's prediction; as error feedback, the error of a late update is added to the
  next one; c < 1 looks ahead as Nesterov's momentum does.

References:
  PipeDream-2BW, arXiv 2006.09503. Gradients one step late, and error feedback: arXiv 2606.30634, of
  which the abstract alone was at hand, so that the equation is ours. SpecTrain, arXiv 1809.02839.
  XPipe, arXiv 1911.04610. Nesterov's method for pipelines, arXiv 2505.01099. Rates by delay:
  PipeMare, arXiv 1910.05124.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmp.boundary import Boundary
from jaxmp.config import KEYS, Config
from jaxmp.exchange.collectives import Grads, Params


class Corrected(NamedTuple):
    """The state of an optimizer whose gradients are late.

    Attributes:
      last: the last update.
      state: of the optimizer.
      places: nothing, of a correction that has left; checkpoints of before have the name.
    """

    last: Params
    state: optax.OptState
    places: tuple[()] = ()


def corrected(
    optimizer: optax.GradientTransformation, delay: int, correction: str = 'none'
) -> optax.GradientTransformation:
    """``optimizer``, which makes up for gradients that come ``delay`` steps late.

    Args:
      optimizer: what moves the parameters.
      delay: N; the first update is by the gradient at the parameters of `init`.
      correction: 'none' or 'predict', perhaps with its number.

    >>> optimizer = corrected(optax.sgd(1.0), 1, 'predict')
    >>> state, seen = optimizer.init(8.0), [8.0, 8.0]
    >>> for then in range(2):  # of p * p / 4
    ...     update, state = optimizer.update(seen[then] / 2, state, seen[-1])
    ...     seen.append(float(seen[-1] + update))
    >>> seen
    [8.0, 8.0, 0.0, -4.0]
    """
    word, strength = strength_of(correction, delay)
    if not delay or word == 'none':
        return optimizer

    def init(params: Params) -> Corrected:
        return Corrected(jax.tree.map(jnp.zeros_like, params), optimizer.init(params))

    def update(updates: Grads, state: Any, params: Params = None) -> tuple[Any, Corrected]:
        updates, inner = optimizer.update(updates, state.state, params)
        ahead = lambda u, before: u + strength * (u - before)
        return jax.tree.map(ahead, updates, state.last), Corrected(updates, inner)

    return optax.GradientTransformation(init, update)


def delays_of(delay: int, by_stage: bool, stages: int, copied: bool) -> tuple[int, ...]:
    """Steps that the gradients of each stage are late; none where all are on time.

    Args:
      delay: N, the largest.
      by_stage: whether a stage waits only as long as its own way takes.
      stages: their number.
      copied: whether the first and the last stage have copies of a table, which move together.

    >>> delays_of(4, True, 4, False), delays_of(1, True, 4, True), delays_of(1, False, 2, False)
    ((4, 3, 2, 0), (1, 1, 1, 1), (1, 1))
    """
    if not delay:
        return ()
    if not by_stage:
        return (delay,) * stages
    row = [-(-delay * (stages - 1 - s) // max(1, stages - 1)) for s in range(stages)]
    return (*row[:-1], delay if copied else 0)


def mixed(delays: Sequence[int]) -> bool:
    """Whether a step has gradients of several batches; each group then clips by its own norm."""
    return len({*delays}) > 1


def check_delay(config: Config, cuts: Sequence[Boundary], stages: int) -> None:
    """Raises ValueError for what late gradients do not go with.

    Args:
      config: of the run.
      cuts: all boundaries that it uses.
      stages: their number.
    """
    c, parallel = config.optimizer, config.parallel
    if not c.delay:
        for key, idle in ('correction', 'none'), ('delay_by_stage', False):
            if c[key] != idle:
                raise ValueError(
                    f'config.optimizer.{key}={c[key]!r} is of late gradients, and '
                    'config.optimizer.delay=0; give a delay, or leave it out'
                )
        return
    if c.delay_by_stage and stages == 1:
        raise ValueError(
            'config.optimizer.delay_by_stage=True of one stage, whose gradients would be on time; '
            'leave it out, or cut the model'
        )
    # Each of these needs in a step what with late gradients comes in a later one.
    late = f'config.optimizer.delay={c.delay}'
    if parallel.elastic:
        raise ValueError(
            f'{late} with config.parallel.elastic=True: a replica that joins has no gradients '
            'under way; leave one of them out'
        )
    if parallel.schedule != KEYS['parallel.schedule'].default:
        raise ValueError(
            f'config.parallel.schedule={parallel.schedule!r} empties the pipeline after every '
            f'step, and with {late} it stays full; leave one of them out'
        )
    if parallel.profile:
        raise ValueError(
            f'config.parallel.profile=True shows a step from its first action to its last, and '
            f'with {late} steps overlap; leave one of them out'
        )
    for cut in cuts:
        if 'spread' in cut.fwd.needs:
            raise ValueError(
                f'{cut.fwd} weighs activations by the last gradients, which with {late} have not '
                'come; take by_gradient=0, or no delay'
            )


def strength_of(correction: str, delay: int) -> tuple[str, float]:
    """The word of a correction, and its number.

    >>> strength_of('predict', 4), strength_of('predict(0.5)', 4), strength_of('none', 4)
    (('predict', 4.0), ('predict', 0.5), ('none', 0.0))
    """
    word, number = re.fullmatch(r'(\w+)(?:\((.+)\))?', correction).groups()  # pyright: ignore
    usual = {'none': 0, 'predict': delay}
    return word, float(number if number else usual[word])
