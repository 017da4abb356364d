"""`frozen_adam`: Adam whose momentum is exchanged, compressed, after its variance is frozen."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxmp.exchange.averages import mean
from jaxmp.exchange.collectives import Collectives, Grads
from jaxmp.exchange.layout import Exchange, Rule, State, exchange_of
from jaxmp.wire import widened
from jaxmp.wire.words import check_whole, word


@word
def frozen_adam(
    rule: Rule | Exchange,
    warmup: int = 1,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Exchange:
    r"""1-bit Adam: Adam on uncompressed means at first, then a compressed momentum, v frozen.

    .. math:: \text{warm-up: } g = \mathrm{mean}\, g_i,\quad m \leftarrow b_1 m + (1 - b_1) g,\quad
              v \leftarrow b_2 v + (1 - b_2) g^2

    .. math:: \text{then: } m \leftarrow \mathrm{rule}(b_1 m + (1 - b_1) g_1, \dots,
              b_1 m + (1 - b_1) g_n)

    The optimizer gets, with Adam's corrections of the bias,

    .. math:: y = \hat m / (\sqrt{\hat v} + \epsilon) \text{ where } v > 0, \text{ else } 0

    so it is plain SGD: ``config.optimizer.name='sgd'`` with momentum 0. An element whose gradient
    was always zero has v = 0: its momentum is the compression's error alone, in no known unit, and
    it does not move. Weight decay there is AdamW's. Clipping would clip the quotient:
    ``config.optimizer.clip_norm=0``. Adam after a compressed gradient squares the compression's
    error in v; here v never sees it.

    Args:
      rule: rule, or exchange of gradients, of the momentum: ``double_squeeze(one_bit)``.
      warmup: epochs before v is frozen, 1 or more.
      b1: the momentum, in (0, 1): there is nothing else to exchange.
      b2: the decay of v, in [0, 1).
      eps: added to the root.

    Raises:
      TypeError: if ``rule`` is neither a rule nor an exchange.
      ValueError: if a number is out of range, or the rule has momentum or shares parameters.

    References:
      1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed,
      arXiv 2102.02888.
    """
    exchange = exchange_of('frozen_adam', rule)
    check_whole('frozen_adam warmup', warmup, 'a number of epochs, 1 or more')
    if not (0 < b1 < 1 and 0 <= b2 < 1 and eps >= 0) or exchange.momentum:
        raise ValueError(
            f'frozen_adam b1={b1}, b2={b2}, eps={eps}: b1 is in (0, 1), b2 in [0, 1), eps is not '
            'negative, and the rule has no momentum of its own'
        )

    def init(grads: Grads, n: int) -> State:
        wide = jax.eval_shape(widened, grads)  # a square leaves the range of float16
        zeros = lambda: jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), wide)
        counts = {name: jnp.zeros((), jnp.int32) for name in ('steps', 'seen')}  # of m, of v
        return {'m': zeros(), 'v': zeros(), **counts, 'held': exchange.init(wide, n)}

    def warm(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        g, _ = mean.reduce(widened(grads), (), key, via)
        v = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, state['v'], g)
        counts = {'steps': state['steps'] + 1, 'seen': state['seen'] + 1}
        state = {**state, 'm': _moved(b1, state, g), 'v': v, **counts}
        return _quotient(state, grads, b1, b2, eps), state

    def reduce(grads: Grads, state: State, key: Array, via: Collectives) -> tuple[Grads, State]:
        m, inner = exchange.reduce(_moved(b1, state, widened(grads)), state['held'], key, via)
        state = {**state, 'm': m, 'steps': state['steps'] + 1, 'held': inner}
        return _quotient(state, grads, b1, b2, eps), state

    first, last = (Exchange(init, f, momentum=b1) for f in (warm, reduce))
    return last._replace(by_epoch=(first,) * warmup + (last,))


def _moved(b1: float, state: State, grads: Grads) -> Grads:
    """The next momentum."""
    return jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state['m'], grads)


def _quotient(state: State, grads: Grads, b1: float, b2: float, eps: float) -> Grads:
    """Momentum over the root of the variance, both without their bias, in the gradients' dtypes."""

    def one(m: Array, v: Array, g: Array) -> Array:
        m, v = m / (1 - b1 ** state['steps']), v / (1 - b2 ** state['seen'])
        # 0 m, so that a momentum that is not finite is seen
        return jnp.where(v > 0, m / (jnp.sqrt(v) + eps), 0 * m).astype(g.dtype)

    return jax.tree.map(one, state['m'], state['v'], grads)
