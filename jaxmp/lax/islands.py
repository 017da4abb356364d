"""Collectives for programs that have none of their own, since the compiler writes them.

Under `jax.jit` alone the compiler moves what lies on the wrong device, uncompressed. An island is a
`jax.shard_map` of one collective in such a program. It works on a mesh of Auto axes and on one of
Explicit axes.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jaxmp.lax.collectives import all_gather, counted, ppermute

Devices = Mesh | AbstractMesh


def roll(
    x: Array, axis_name: str, shift: int = 1, mesh: Devices | None = None, **how: Any
) -> Array:
    """``jnp.roll(x, shift, 0)`` of an array that lies along ``axis_name`` by its axis 0.

    Pipelines that are written as a shift of a stage axis send their activations by it.

    Args:
      x: an array of as many rows as the axis has devices.
      axis_name: of the mesh.
      shift: devices to the right.
      mesh: default the one of `jax.set_mesh`.
      **how: ``fwd``, ``bwd`` and ``key``, as of `jaxmp.lax.ppermute`.

    Raises:
      ValueError: if no mesh has the axis, or if it has another number of devices than ``x`` rows.
    """
    mesh = _mesh(axis_name, mesh)
    n = mesh.shape[axis_name]
    if x.shape[0] != n:
        raise ValueError(f'roll of {x.shape[0]} rows along {axis_name!r}, which has {n} devices')
    ring = [(i, (i + shift) % n) for i in range(n)]
    return jax.shard_map(
        lambda x: ppermute(x, axis_name, ring, **how),
        mesh=mesh, in_specs=P(axis_name), out_specs=P(axis_name), axis_names={axis_name},
    )(x)  # fmt: skip


def reshard(
    x: Array, axis_name: str, axis: int = 0, mesh: Devices | None = None, **how: Any
) -> Array:
    """``x``, which lies in parts of an axis along ``axis_name``, whole on every device.

    Weights of FSDP are gathered by it; their gradients return in parts.

    Args:
      x: an array.
      axis_name: of the mesh.
      axis: the axis of ``x`` that lies along it.
      mesh: default the one of `jax.set_mesh`.
      **how: ``fwd``, ``bwd`` and ``key``, as of `jaxmp.lax.all_gather`.

    Raises:
      ValueError: if no mesh has the axis, or ``x`` no such axis.
    """
    spec = P(*[None] * counted('axis', axis, x.ndim), axis_name)
    return jax.shard_map(
        lambda x: all_gather(x, axis_name, axis=axis, tiled=True, **how),
        mesh=_mesh(axis_name, mesh), in_specs=spec, out_specs=P(),
        axis_names={axis_name}, check_vma=False,
    )(x)  # fmt: skip


def _mesh(axis_name: str, mesh: Devices | None) -> Devices:
    mesh = mesh or jax.sharding.get_abstract_mesh()
    if axis_name not in mesh.axis_names:
        raise ValueError(
            f'no axis {axis_name!r} here, there are {mesh.axis_names}; give mesh= with that axis, '
            'or call inside `with jax.set_mesh(mesh):`'
        )
    return mesh
