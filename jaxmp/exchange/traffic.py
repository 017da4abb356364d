"""Bytes that an exchange sends: on a ring, and over a parameter server."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.exchange.collectives import AXIS, Grads, Params, metered, over, sent
from jaxmp.exchange.hlo import operands
from jaxmp.exchange.layout import Exchange, State
from jaxmp.wire import nbytes

Bytes = dict[str, Any]  # numbers by name, and dicts of numbers by kind


def bytes_of(exchange: Exchange, params: Params, n: int) -> Bytes:
    """Bytes per step of one of n replicas; a mean over ``exchange.period`` steps.

    Args:
      exchange: the exchange.
      params: parameters of a replica, or their shapes.
      n: number of replicas.

    Returns:
      ``uncompressed`` (the gradient), ``handed`` (operand bytes by kind of collective), ``sent``
      (bytes that a replica sends for them on a ring) and ``server`` (bytes up and down if the same
      messages go over a parameter server).
    """
    counts: dict[str, int] = {}
    via = metered(n, counts)

    def step(params: Params, state: State, key: Array) -> tuple[Params, State]:
        grads, state = exchange.reduce(params, state, key, via)
        return exchange.after_update(grads, state, key, via)

    state = jax.eval_shape(lambda: exchange.init(params, n))
    jax.eval_shape(step, params, state, jax.random.key(0))
    handed = {k: v // exchange.period for k, v in counts.items()}
    return {
        'uncompressed': nbytes(params),
        'handed': handed,
        'sent': sent(handed, n),
        'server': served(handed, params, n),
    }


def served(handed: dict[str, int], params: Params, n: int) -> dict[str, int]:
    """Bytes up and down per replica if the same messages of n replicas go over a parameter server.

    Operands of an all-reduce go up, and their sum, of the same size, comes down. Messages of an
    all-gather go up, and the server returns their mean uncompressed. If an exchange compresses in
    both directions (all-to-all, then all-gather), the parts go up and all replies come down.
    """
    added, parts = handed.get('all-reduce', 0), handed.get('all-to-all', 0)
    alone = handed.get('all-gather', 0)
    if parts:
        return {'up': added + parts, 'down': added + n * alone}
    return {'up': added + alone, 'down': added + (nbytes(params) - added if alone else 0)}


def compiled_operands(exchange: Exchange, params: Params, mesh: Mesh) -> dict[str, int]:
    """Operand bytes per step of the compiled exchange's collectives, by kind.

    Args:
      exchange: the exchange.
      params: parameters of a replica, or their shapes.
      mesh: the devices of the replicas.
    """

    def device(grads: Grads, state: State, key: Array) -> tuple[Params, State]:
        grads, state = jax.tree.map(lambda a: a[0], (grads, state))
        via = over()
        grads, state = exchange.reduce(grads, state, key, via)
        return jax.tree.map(lambda a: a[None], exchange.after_update(grads, state, key, via))

    state = jax.eval_shape(lambda: exchange.init(params, mesh.size))
    stack = lambda a: jax.ShapeDtypeStruct((mesh.size, *a.shape), a.dtype)
    run = jax.shard_map(device, mesh=mesh, in_specs=(P(AXIS), P(AXIS), P()), out_specs=P(AXIS))
    lowered = jax.jit(run).lower(*jax.tree.map(stack, (params, state)), jax.random.key(0))
    program: Any = lowered.compile()
    return {k: v // exchange.period for k, v in operands(program.as_text()).items()}
