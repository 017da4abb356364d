"""A micro-batch: its cut of the batch and its context.

A step takes M equal cuts of its batch, in order. Gradients and loss are means over them; statistics
(BatchNorm) are normalised within a micro-batch and move from one to the next. A feedback buffer
belongs to a position in the batch, so each micro-batch has a slot of its own
(`jaxmp.feedback.per_microbatch`) and no schedule changes a number; M = 1 is the paper's global
buffer. A channel with a state per example has one table, which all micro-batches read and write.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jaxmp.runtimes.placement import Device
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import Input, MicroBatch, Target
from jaxmp.wire import Ctx, Index

Carry = TypeVar('Carry')


def cut(a: Array, num_microbatches: int) -> Array:
    """``(B, ...)`` as ``(M, B / M, ...)``.

    Raises:
      ValueError: if M does not divide B.

    >>> import jax.numpy as jnp
    >>> cut(jnp.arange(6), 3).tolist()
    [[0, 1], [2, 3], [4, 5]]
    """
    if len(a) % num_microbatches:
        raise ValueError(
            f'a batch of {len(a)} does not divide into {num_microbatches} micro-batches; make the '
            'batch a multiple of their number'
        )
    return a.reshape(num_microbatches, -1, *a.shape[1:])


def context(ctx: Ctx, m: Index, num_microbatches: int) -> Ctx:
    """The context of micro-batch ``m``: sub-stream m of the step's key, and its cut of the rest.

    >>> import jax.numpy as jnp
    >>> context(Ctx(ids=jnp.arange(6)), 1, 3).ids.tolist()
    [2, 3]
    """
    part = lambda a: None if a is None else cut(a, num_microbatches)[m]
    return ctx.fold(m)._replace(ids=part(ctx.ids), tokens=part(ctx.tokens), microbatch=m)


def loop(body: Callable[[Carry, PyTree], Carry], carry: Carry, parts: PyTree) -> Carry:
    """The last carry of ``carry = body(carry, parts[m])`` over the leading axis M of ``parts``.

    A scan, except on CPU: there XLA brings only convolutions outside loops, even outside unrolled
    ones, into the form that is fast (ResNet-18 of width 8 steps 14 times faster so).

    >>> import jax.numpy as jnp
    >>> loop(lambda total, x: total + x, jnp.zeros(()), jnp.arange(4.0)).item()
    6.0
    """
    if jax.default_backend() != 'cpu':
        return jax.lax.scan(lambda carry, part: (body(carry, part), None), carry, parts)[0]
    for m in range(len(jax.tree.leaves(parts)[0])):
        carry = body(carry, jax.tree.map(lambda a: a[m], parts))  # noqa: B023
    return carry


def microbatches(
    program: StageProgram, device: Device, count: int, batch: tuple[Input, Target, Ctx]
) -> list[MicroBatch]:
    """The micro-batches of a stage; what is on the host is taken by its programs from there.

    Args:
      program: of the stage.
      device: its device.
      count: how many a batch has.
      batch: input, targets and context, axis 0 the sample.

    Raises:
      ValueError: if they are not of the size the pipeline was built for.
    """
    x, y, ctx = batch
    size = program.x.shape[0]
    for name, a in (('x', x), ('y', y), ('ids', ctx.ids)):
        if a is not None and len(a) != count * size:
            raise ValueError(
                f'{name} of a batch of {len(a)} came to a pipeline built for '
                f'{count} micro-batches of {size}; feedback states are per '
                f'position, so give {count * size}'
            )
    used = x if program.left is None else None, y if program.loss else None, ctx.ids, ctx.tokens
    whole = [_near(a, device) for a in used]
    rows = lambda m: (None if a is None else a[m * size : (m + 1) * size] for a in whole)
    key, parts = jax.device_put(ctx.key, device), []
    for m in range(count):
        x, y, ids, tokens = rows(m)
        parts.append(MicroBatch(x, y, Ctx(key, ids, microbatch=np.int32(m), tokens=tokens)))
    return parts


def _near(a: PyTree, device: Device) -> PyTree:
    """An array whose rows cost little: on the host, or on a device that is no CPU."""
    if a is None:
        return None
    far = isinstance(a, jax.Array) and device.platform != 'cpu'
    return jax.device_put(a, device) if far else np.asarray(a)
