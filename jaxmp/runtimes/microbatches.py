"""`microbatches`: the micro-batches of a batch, as a stage sees them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxmp.runtimes.placement import Device
from jaxmp.runtimes.stage import StageProgram
from jaxmp.runtimes.state import MicroBatch
from jaxmp.wire import Ctx


def microbatches(
    program: StageProgram, device: Device, count: int, batch: tuple[Any, Any, Ctx]
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


def _near(a: Any, device: Device) -> Any:
    """An array whose rows cost little: on the host, or on a device that is no CPU."""
    if a is None:
        return None
    far = isinstance(a, jax.Array) and device.platform != 'cpu'
    return jax.device_put(a, device) if far else np.asarray(a)
