"""Replicas of a pipeline of equal stages: a mesh of replica x stage, messages along both axes.

Along ``'stage'`` travel activations and their gradients (`jaxmp.spmd`); along ``'replica'`` every
device shares the gradients of its own slice of the parameters with the same stage of the other
replicas (`jaxmp.exchange`). Each replica takes an equal cut of the batch. Parameters, feedback
states and the optimiser's are arrays ``(R, S, ...)``, a slice a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp import exchange as ex
from jaxmp.exchange import Exchange, bytes_of, over
from jaxmp.feedback import Channel
from jaxmp.spmd import AXIS, Parts, Spmd, spmd
from jaxmp.wire import Ctx, Like, nbytes

AXES = P(ex.AXIS, AXIS)


class GridState(flax.struct.PyTreeNode):
    """What a step changes, every array ``(R, S, ...)``."""

    params: Any
    links: Any
    opt_state: Any
    exchange: Any


@dataclass(frozen=True)
class Grid:
    """Replicas of a pipeline over a mesh; see `grid`."""

    pipe: Spmd
    exchange: Exchange
    optimiser: optax.GradientTransformation
    mesh: Mesh

    @property
    def replicas(self) -> int:
        """R."""
        return self.mesh.shape[ex.AXIS]

    def init(self, key: Array, x: Array | Like) -> GridState:
        """The state before the first step, each slice on its device, all replicas alike.

        Args:
          key: randomness of the initial parameters.
          x: an input of the batch of all replicas, ``(B, ...)``.

        Raises:
          ValueError: if the batch does not divide into replicas and micro-batches; or as
            `jaxmp.spmd.Spmd.init`.
        """
        own = self._own(x)

        def make(key: Array) -> GridState:
            params, links = self.pipe.fresh(key, jnp.zeros(own.shape, own.dtype))
            each = jax.vmap(
                lambda p: (self.optimiser.init(p), self.exchange.init(p, self.replicas))
            )
            one = GridState(params, links, *each(params))
            return jax.tree.map(lambda a: jnp.broadcast_to(a, (self.replicas, *a.shape)), one)

        return jax.jit(make, out_shardings=NamedSharding(self.mesh, AXES))(key)

    def step(
        self, state: GridState, x: Array, y: Array, ctx: Ctx | None = None
    ) -> tuple[GridState, Array]:
        """One optimiser step of all replicas; returns the next state and the mean loss.

        Replica i takes the i-th of R equal cuts of the batch, in the context
        ``ctx.fold(0).fold(i)``; the exchange of stage s draws from ``ctx.fold(1).fold(s)``, alike
        in all replicas. A channel that remembers examples has a table in every replica: keep an
        example at one.

        Args:
          state: from `init` or the last step.
          x: input of all replicas, ``(B, ...)``.
          y: targets, ``(B, ...)``.
          ctx: key, another in every step where something draws, and ids of this step.

        Raises:
          ValueError: as `init`, if the batch is not of the size that ``state`` was made for, or
            something draws and there is no key.
        """
        ctx, own = ctx or Ctx(), jax.eval_shape(lambda t: jax.tree.map(lambda a: a[0], t), state)
        self.pipe.check(own.links, self.pipe.crossing(own.params, self._own(x)))
        of_batch = None if ctx.ids is None else P(ex.AXIS)
        # Nothing is differentiated through a collective: a boundary and an exchange name what they
        # send. So check_vma has nothing to guard, and a model's own scans need not pass it.
        run = jax.shard_map(
            self._device,
            mesh=self.mesh,
            in_specs=(AXES, (P(ex.AXIS), P(ex.AXIS)), P(), of_batch),
            out_specs=(AXES, P()),
            check_vma=False,
        )
        return run(state, (x, y), ctx.key, ctx.ids)

    def _device(
        self, state: GridState, batch: tuple[Array, Array], key: Array | None, ids: Array | None
    ) -> tuple[GridState, Array]:
        own, via = jax.tree.map(lambda a: a[0, 0], state), over()
        ctx = Ctx(key, ids)
        at = ctx.fold(0).fold(via.index)
        loss, grads, links = self.pipe.local(own.params, own.links, *batch, at)
        shared = ctx.fold(1).fold(lax.axis_index(AXIS)).key
        grads, held = self.exchange.apply(grads, own.exchange, shared, via)
        updates, opt_state = self.optimiser.update(grads, own.opt_state, own.params)
        params = optax.apply_updates(own.params, updates)
        params, held = self.exchange.settle(params, held, via)
        after = GridState(params, links, opt_state, held)
        return jax.tree.map(lambda a: a[None, None], after), lax.pmean(loss, ex.AXIS)

    def bytes(self, x: Array | Like) -> dict[str, Any]:
        """Bytes a step, in the form of a run's summary.

        Args:
          x: input of the batch of all replicas.

        Returns:
          ``bytes``: a row a boundary of one replica; ``exchange``: of one device, as
          `jaxmp.exchange.bytes_of`.
        """
        own, micro = self._own(x), self.pipe.micro
        forward, backward = (micro * n // 8 for n in self.pipe.bits(own))
        params, _ = jax.eval_shape(self.pipe.fresh, jax.random.key(0), own)
        full = micro * nbytes(self.pipe.crossing(params, own))
        row = {'uncompressed': full, 'forward': forward, 'backward': backward}
        slice_of = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params)
        shared = bytes_of(self.exchange, slice_of, self.replicas)
        rows = [{'boundary': i, **row} for i in range(1, len(self.pipe.parts.stages))]
        return {'bytes': rows, 'exchange': {'replicas': self.replicas, **shared}}

    def _own(self, x: Array | Like) -> Like:
        """A replica's cut of the batch."""
        if x.shape[0] % self.replicas:
            raise ValueError(
                f'a batch of {x.shape[0]} does not divide into {self.replicas} replicas; each '
                'takes an equal cut'
            )
        return jax.ShapeDtypeStruct((x.shape[0] // self.replicas, *x.shape[1:]), x.dtype)


def grid(
    parts: Parts,
    channels: tuple[Channel, Channel],
    exchange: Exchange,
    optimiser: optax.GradientTransformation,
    mesh: Mesh,
    micro: int = 1,
) -> Grid:
    """Replicas of a pipeline, one stage of one replica a device of ``mesh``.

    Args:
      parts: embedding, stages, head and loss; see `jaxmp.spmd.Parts`.
      channels: of the activations, and of their gradients.
      exchange: of the parameters' gradients, from `jaxmp.exchange.parse`.
      optimiser: elementwise; a norm over all parameters would be that of a device's slice.
      mesh: ``device_mesh(replica=R, stage=S)``.
      micro: micro-batches a step of a replica, M.

    Raises:
      ValueError: if the mesh has other axes, or the exchange changes with the epochs; or as
        `jaxmp.spmd.spmd`.
    """
    if exchange.phases:
        raise ValueError(
            'the exchange changes with the epochs, and a step knows none; give one of '
            'exchange.phases, or of dgc without a warm-up'
        )
    if mesh.axis_names != (ex.AXIS, AXIS):
        raise ValueError(
            f"grid needs a mesh of the axes 'replica' and 'stage', got {mesh.axis_names}; make it "
            'with jaxmp.devices.device_mesh(replica=R, stage=S)'
        )
    row = Mesh(mesh.devices[0], (AXIS,), axis_types=mesh.axis_types[1:])
    return Grid(spmd(parts, *channels, row, micro), exchange, optimiser, mesh)
