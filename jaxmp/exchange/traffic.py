"""How many bytes an exchange moves: on a ring, and over a parameter server."""

from __future__ import annotations

from typing import Any

import jax
from jaxtyping import Array

from jaxmp.exchange.collectives import metered, sent
from jaxmp.exchange.layout import Exchange
from jaxmp.wire import nbytes


def bytes_of(exchange: Exchange, params: Any, n: int) -> dict[str, Any]:
    """Bytes a step of one of n replicas; a mean over the steps between two averages of parameters.

    Args:
      exchange: what is shared, and how.
      params: of a replica, or their shapes.
      n: number of replicas.

    Returns:
      ``uncompressed`` (the gradient), ``handed`` (operand bytes by kind of collective), ``sent``
      (what a replica sends for them on a ring) and ``server`` (the same messages over a parameter
      server: its bytes up and down).
    """
    counts: dict[str, int] = {}
    via = metered(n, counts)

    def step(params: Any, state: Any, key: Array) -> Any:
        grads, state = exchange.apply(params, state, key, via)
        return exchange.settle(grads, state, via)

    state = jax.eval_shape(lambda: exchange.init(params, n))
    jax.eval_shape(step, params, state, jax.random.key(0))
    handed = {k: v // exchange.every for k, v in counts.items()}
    return {
        'uncompressed': nbytes(params),
        'handed': handed,
        'sent': sent(handed, n),
        'server': served(handed, params, n),
    }


def served(handed: dict[str, int], params: Any, n: int) -> dict[str, int]:
    """The same messages of n replicas over a parameter server, as one's bytes up and down.

    What all-reduce adds goes up and comes back as it is; messages that do not add (all-gather) go
    up, and the server sends back their mean, uncompressed; of an exchange that compresses both ways
    (all-to-all, then all-gather) the parts go up, and all replies come down.
    """
    added, parts = handed.get('all-reduce', 0), handed.get('all-to-all', 0)
    alone = handed.get('all-gather', 0)
    if parts:
        return {'up': added + parts, 'down': added + n * alone}
    return {'up': added + alone, 'down': added + (nbytes(params) - added if alone else 0)}
