"""Memory that the process keeps between steps, instead of returning it to the system."""

from __future__ import annotations

import ctypes
from pathlib import Path

import jax
import jax.monitoring

from jaxmp.runtimes.placement import cores

LONG = 1.0  # seconds of a compilation or a step after which freed pages are returned
LARGE, MANY = 4 << 20, 1 << 16  # bytes of a block that is mapped by itself, and how many may be
# Of mallopt in glibc's malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -3, -4, -8
FEW = 4  # cores up to which threads share one arena; measured with 2 and with 16
DRIVER = Path('/dev/nvidiactl')  # is there where NVIDIA's driver is
_keeping: list[bool] = []  # True once the process keeps freed pages


def keep_freed_pages() -> None:
    """Lets glibc keep freed memory, which XLA:CPU allocates again at each step.

    Otherwise each step faults in all its temporary memory page by page: for ResNet-18 and batch
    100, 48,055 pages a step at width 16, 268,880 at width 64, a quarter of its time. One arena is
    needed as well, because the arenas of threads hold at most 64 MB and map what is larger. Threads
    take it only if none has allocated before: the call has to come before JAX's first computation.
    Without glibc nothing happens, nor with more than `FEW` cores or a GPU: there the threads that
    compile wait for the one arena (`train.py` on 16 cores takes 36 s instead of 18, with an H100
    75 instead of 20), and with a GPU steps take its memory.
    """
    mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
    if mallopt is not None and cores() <= FEW and not _on_gpu():
        mallopt(ARENA_MAX, 1)
        mallopt(MMAP_MAX, 0)  # no block is mapped by itself, however large
        mallopt(MMAP_THRESHOLD, LARGE)
        mallopt(TRIM_THRESHOLD, -1)  # never by itself
        jax.monitoring.register_event_duration_secs_listener(_after)
        _keeping.append(True)


def _on_gpu() -> bool:
    """Whether JAX will compute on a GPU, before it has looked for one."""
    return getattr(jax.config, 'jax_platforms', None) != 'cpu' and DRIVER.exists()


def release_freed_pages() -> None:
    """Returns freed memory to the system once, after what is not done again, such as reading.

    Without glibc nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)


def pages_after_step(seconds: float) -> None:
    """Keeps freed memory after a short step; returns it after one of more than `LONG` seconds.

    To take pages again costs little of a long step, which holds more than it needs in one heap: a
    small block in the place of a large one lets the next large one grow the heap. So after a long
    step large blocks are mapped by themselves, and return to the system when they are freed.
    """
    if _keeping:
        ctypes.CDLL(None).mallopt(MMAP_MAX, MANY if seconds > LONG else 0)
    if seconds > LONG:
        release_freed_pages()


def _after(event: str, duration_secs: float, **kwargs: str | int) -> None:
    """Returns what a long compilation has freed."""
    if event.endswith('backend_compile_duration') and duration_secs > LONG:
        release_freed_pages()
