"""Whether this JAX computes right sums: a program that jax 0.10.2 compiles wrongly on CPUs."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

ROWS = (
    40_000  # above 32,768 rows, of a width that no vector has, the loop of its last rows is wrong
)


@functools.lru_cache(maxsize=1)
def check_compiler() -> None:
    r"""Computes :math:`\sum_j (I x_i)_j^2 = i^2` for rows :math:`x_i = (i, 0, 0)`, once a process.

    It takes a quarter of a CPU-second.

    Raises:
      ValueError: if the compiled program gives something else.
    """
    i = np.arange(ROWS, dtype=np.float32)
    x = np.stack([i, 0 * i, 0 * i], axis=1)
    square = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3, dtype=row.dtype) @ row) ** 2)))
    wrong = int(np.sum(np.abs(np.asarray(square(x)) - i**2) > 1e-3 * i**2))
    if wrong:
        raise ValueError(
            f'jax {jax.__version__} computes {wrong:,} of {ROWS:,} sums wrongly on '
            f'{jax.devices()[0].device_kind}, so no number of a run would be right; allowed is a '
            'jax whose sums are right, such as 0.10.1: python -m pip install "jax==0.10.1" '
            '(of jax 0.10.2 on a CPU, XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type= helps too)'
        )
