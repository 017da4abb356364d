"""Arrays as the buffers of a message, without copies on the way out; with one on the way in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

ALIGNMENT = 64  # bytes; of the arrays that XLA on a CPU takes as they are


def buffers(arrays: Iterable[Any]) -> list[memoryview]:
    """The bytes of arrays, which must not change until they have arrived.

    >>> [b.nbytes for b in buffers([np.zeros((2, 3)), np.float32(1)])]
    [48, 4]
    """
    whole = (np.ascontiguousarray(a) for a in arrays)
    return [a.reshape(-1).view(np.uint8).data for a in whole]


def aligned(size: int) -> np.ndarray:
    """Bytes of which `jax.device_put` on a CPU makes an array without a copy.

    >>> aligned(5).ctypes.data % ALIGNMENT
    0
    """
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    return room[start : start + size]


def filled(message: Sequence[memoryview], like: Sequence[Any]) -> list[np.ndarray]:
    """The arrays of a message, each in aligned memory; what the message lacks is zero.

    Args:
      message: a buffer per array, which may be shorter than the array.
      like: arrays, or shapes and dtypes.

    Raises:
      ValueError: if there are more or fewer buffers, or one is longer than its array.

    >>> filled([memoryview(bytes([1, 2]))], [np.zeros(4, np.uint8)])
    [array([1, 2, 0, 0], dtype=uint8)]
    """
    sizes = [math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in like]
    came = [memoryview(m).nbytes for m in message]
    if len(came) != len(sizes) or any(n > most for n, most in zip(came, sizes, strict=True)):
        raise ValueError(
            f'a message of {came} bytes came for arrays of {sizes} bytes; both ends must be of one '
            'version, with the same settings'
        )
    arrays = []
    for buffer, n, size, a in zip(message, came, sizes, like, strict=True):
        whole = aligned(size)
        whole[:n] = np.frombuffer(buffer, np.uint8)
        whole[n:] = 0
        arrays.append(whole.view(a.dtype).reshape(a.shape))
    return arrays
