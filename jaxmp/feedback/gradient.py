"""`by_value_and_grad`: refuses a gradient under which the state of a backward channel is lost.

`jaxmp.value_and_grad` differentiates by the backward states too; `jaxmp.boundary` says why. Any
other function, such as `jax.grad` by the parameters, does not, and then they are not perturbed.
"""

from __future__ import annotations

import jax
from jax.custom_derivatives import CustomVJPPrimal
from jaxtyping import Array, PyTree


def by_value_and_grad(x: Array, bwd: PyTree) -> Array:
    """``x``, which can be differentiated only if the backward state ``bwd`` is too, or is none."""
    return _together(x, bwd) if jax.tree.leaves(bwd) else x


@jax.custom_vjp
def _together(x: Array, bwd: PyTree) -> Array:
    return x


def _checked(x: CustomVJPPrimal, bwd: PyTree) -> tuple[Array, None]:
    if not any(a.perturbed for a in jax.tree.leaves(bwd)):
        raise TypeError(
            'a boundary whose backward channel has a state was differentiated by another function '
            'than jaxmp.value_and_grad (of an nnx.Module: jaxmp.nnx.value_and_grad), under which '
            'the state would be lost; use that one in place of jax.grad or jax.value_and_grad'
        )
    return x.value, None


_together.defvjp(_checked, lambda _, g: (g, None), symbolic_zeros=True)
