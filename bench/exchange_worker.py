"""One replica of `slow_exchange.py` as a process; see `workers.serve`.

exchange_worker.py coordinator_address replicas replica
"""

from __future__ import annotations

import itertools
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from workers import interfaces, serve

from jaxmp import data, exchange
from jaxmp.exchange import AXIS, bytes_of, over
from jaxmp.runtimes.placement import device_mesh

WIDTHS = (64, 2240, 2240, 10)  # 5.19 million parameters
BATCH, RATE = 64, 0.05


def make(key: Any) -> list[dict[str, Any]]:
    """Kernels and biases of the network."""
    sides = list(itertools.pairwise(WIDTHS))
    keys = jax.random.split(key, len(sides))
    kernel = lambda k, a, b: jax.random.normal(k, (a, b)) * (2 / a) ** 0.5
    return [{'w': kernel(k, *s), 'b': jnp.zeros(s[1])} for k, s in zip(keys, sides, strict=True)]


def loss(params: list[dict[str, Any]], x: Any, y: Any) -> Any:
    """Cross-entropy of the images' digits."""
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer['w'] + layer['b'])
    logits = x @ params[-1]['w'] + params[-1]['b']
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


class Worker:
    """This process's replica."""

    def __init__(self, n: int) -> None:
        self.n, self.mesh = n, device_mesh(replica=n)
        self.place = NamedSharding(self.mesh, P(AXIS))
        images = data.load('digits').train
        self.x = images.x.reshape(len(images.x), -1).astype(np.float32) / 255
        self.y = images.y
        self.count = 0

    def spread(self, tree: Any) -> Any:
        """One replica's arrays as this process's slice of those of all."""
        row = lambda a: np.asarray(a)[None]
        put = lambda a: jax.make_array_from_process_local_data(
            self.place, row(a), (self.n, *a.shape)
        )
        return jax.tree.map(put, tree)

    def build(self, text: str, momentum: float) -> dict[str, Any]:
        """Makes network, optimizer and exchange; says what the exchange will send."""
        e, optimizer = exchange.parse(text), optax.sgd(RATE, momentum)
        params = jax.jit(make)(jax.random.key(0))
        held = jax.jit(lambda p: e.init(p, self.n))(params)
        self.state = self.spread((params, optimizer.init(params), held))
        self.count = 0

        def device(state: Any, x: Any, y: Any, key: Any) -> Any:
            params, memory, held = jax.tree.map(lambda a: a[0], state)
            value, grads = jax.value_and_grad(loss)(params, x[0], y[0])
            grads, held = exchange.reduced(e, grads, held, key, over())
            updates, memory = optimizer.update(grads, memory, params)
            params, held = e.after_update(optax.apply_updates(params, updates), held, key, over())
            return jax.tree.map(lambda a: a[None], ((params, memory, held), value))

        specs = P(AXIS), P(AXIS), P(AXIS), P()
        run = jax.shard_map(
            device, mesh=self.mesh, in_specs=specs, out_specs=P(AXIS), check_vma=False
        )
        self.run = jax.jit(run, donate_argnums=0)
        size = sum(a.size for a in jax.tree.leaves(params))
        return {'parameters': size, **bytes_of(e, params, self.n)}

    def steps(self, n: int) -> dict[str, Any]:
        """Trains ``n`` steps, each waited for: their seconds, and this replica's losses."""
        seconds, losses, me = [], [], jax.process_index()
        for _ in range(n):
            order = data.order(0, self.count // 8, len(self.x))
            at = (self.count % 8 * self.n + me) * BATCH
            rows = np.take(order, range(at, at + BATCH), mode='wrap')
            start = time.perf_counter()
            x, y = self.spread((self.x[rows], self.y[rows]))
            key = jax.random.fold_in(jax.random.key(1), self.count)
            self.state, value = self.run(self.state, x, y, key)
            jax.block_until_ready(self.state)
            seconds.append(time.perf_counter() - start)
            losses.append(float(value.addressable_data(0)[0]))
            self.count += 1
        return {'seconds': seconds, 'losses': losses}

    def sent(self) -> dict[str, int]:
        """Bytes that left this namespace so far."""
        return interfaces()


if __name__ == '__main__':
    serve(Worker, *sys.argv[1:])
