"""`Blocks`: a frozen kernel as the blocks of a GGUF file, widened where it is used.

A block is a run of 32 or 256 weights of a row: codes of a few bits, and their scales. Its bytes
stay as the file has them. A layer's kernel is widened inside the compiled step, in the forward and
again in the backward, so that no kernel of 32 bits waits from one to the other.

Every product of a scale and a code fits the 24 bits of a float32, or nothing is added to it. So
the numbers are those of the package ``gguf`` to the bit, however a compiler joins the operations.

References:
  QLoRA: Efficient Finetuning of Quantized LLMs, arXiv 2305.14314.
"""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, UInt8

from jaxmp.models.layers import contract, product

PIECE = 4096  # rows of an output layer that are widened together


class Size(NamedTuple):
    """Of a block: weights and bytes."""

    weights: int
    nbytes: int


_NUMBERS = {'F32': jnp.float32, 'F16': jnp.float16, 'BF16': jnp.bfloat16}
KINDS = {
    'F32': Size(1, 4), 'F16': Size(1, 2), 'BF16': Size(1, 2), 'Q4_0': Size(32, 18),
    'Q4_1': Size(32, 20), 'Q5_0': Size(32, 22), 'Q5_1': Size(32, 24), 'Q8_0': Size(32, 34),
    'Q2_K': Size(256, 84), 'Q3_K': Size(256, 110), 'Q4_K': Size(256, 144), 'Q5_K': Size(256, 176),
    'Q6_K': Size(256, 210),
}  # fmt: skip


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=['rows', 'kind'], meta_fields=['kinds', 'width']
)
@dataclass(frozen=True)
class Blocks:
    """Kernels ``(..., N, K)``, each in one of some kinds of blocks.

    Attributes:
      rows: bytes of the rows, ``(..., N, bytes)``; those of a kind with fewer end with zeros.
      kind: the number of each kernel's kind; None where there is one.
      kinds: their names.
      width: weights of a row, K.
    """

    rows: UInt8[Array, '... N bytes']
    kind: Int[Array, '...'] | None
    kinds: tuple[str, ...]
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the kernels."""
        return *self.rows.shape[:-1], self.width

    def __getitem__(self, rows: Int[Array, '...']) -> Blocks:
        """Some rows of a kernel."""
        return replace(self, rows=self.rows[rows])

    def cut(self, start: Int[Array, ''], count: int) -> Blocks:
        """``count`` rows of a kernel from ``start`` on, which a compiler need not know."""
        return replace(self, rows=jax.lax.dynamic_slice_in_dim(self.rows, start, count))

    def widened(self, dtype: DTypeLike = jnp.float32) -> Float[Array, '... K']:
        """Rows of one kernel."""
        ways = [functools.partial(_widened, kind, self.width) for kind in self.kinds]
        if self.kind is None:
            return ways[0](self.rows).astype(dtype)
        return jax.lax.switch(self.kind, ways, self.rows).astype(dtype)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        """All kernels in float32, for numpy; one is widened at a time."""
        if self.rows.ndim == 2:
            return np.asarray(jax.jit(Blocks.widened)(self), dtype)
        each = (jax.tree.map(operator.itemgetter(i), self) for i in range(len(self.rows)))
        return np.stack([np.asarray(one, dtype) for one in each])


def empty(shape: tuple[int, int], kinds: tuple[str, ...]) -> Blocks:
    """Blocks of zeros for a kernel ``(N, K)`` in one of some kinds.

    >>> empty((2, 512), ('Q4_K', 'Q6_K')).rows.shape
    (2, 420)
    """
    rows = jnp.zeros((shape[0], max(row_bytes(kind, shape[1]) for kind in kinds)), jnp.uint8)
    return Blocks(rows, jnp.zeros((), jnp.int32) if kinds[1:] else None, kinds, shape[1])


def weights_in(tree: PyTree) -> int:
    """How many numbers a tree has, weights in blocks among them.

    >>> weights_in({'in_blocks': empty((2, 64), ('Q4_0',)), 'array': jnp.zeros(3)})
    131
    """
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: isinstance(leaf, Blocks))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def row_bytes(kind: str, width: int) -> int:
    """Bytes of a row of ``width`` weights.

    >>> row_bytes('Q4_0', 64)
    36
    """
    return width // KINDS[kind].weights * KINDS[kind].nbytes


def _widened(kind: str, width: int, rows: Array) -> Array:
    """``scale * code + least`` of all weights, in float32."""
    lead = rows.shape[:-1]
    blocks = rows[..., : row_bytes(kind, width)].reshape(*lead, -1, KINDS[kind].nbytes)
    scale, code, least = _parts(kind, blocks)
    y = scale[..., None] * code.reshape(*scale.shape, -1).astype(jnp.float32)
    y = y if least is None else y + least[..., None]
    return y.reshape(*lead, width)


# The kinds, each as llama.cpp packs it; runs of a block have scales of their own in those of _K.


def _half(blocks: Array, start: int) -> Array:
    """The number of 16 bits at ``start`` of each block, ``(..., 1)``."""
    part = blocks[..., None, start : start + 2]
    return jax.lax.bitcast_convert_type(part, jnp.float16).astype(jnp.float32)


def _signed(b: Array) -> Array:
    return jax.lax.bitcast_convert_type(b, jnp.int8)


def _codes(b: Array, bits: int, run: int) -> Array:
    """Codes of some bits: of each run of bytes first all lowest ones."""
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]
    split = b.reshape(*b.shape[:-1], -1, 1, run) >> shifts
    return (split & (2**bits - 1)).reshape(*b.shape[:-1], -1)


def _centred(code: Array, zero: int) -> Array:
    return code.astype(jnp.int8) - jnp.int8(zero)


def _q5(b: Array) -> Array:
    """Four bits of each code, after a fifth of each."""
    return _codes(b[..., 4:], 4, 16) | (_codes(b[..., :4], 1, 1) << 4)


def _of_12_bytes(b: Array) -> tuple[Array, Array]:
    """Scales and offsets of the eight runs of a block, from two of 16 bits and 16 of 6 bits."""
    low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
    scale = jnp.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], -1)
    least = jnp.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], -1)
    return _half(b, 0) * scale, -_half(b, 2) * least


def _parts(kind: str, b: Array) -> tuple[Array, Array, Array | None]:
    """Scales, codes, and what is added to their products, of blocks ``(..., nbytes)``."""
    match kind:
        case 'Q4_0':
            return _half(b, 0), _centred(_codes(b[..., 2:], 4, 16), 8), None
        case 'Q4_1':
            return _half(b, 0), _codes(b[..., 4:], 4, 16), _half(b, 2)
        case 'Q5_0':
            return _half(b, 0), _centred(_q5(b[..., 2:]), 16), None
        case 'Q5_1':
            return _half(b, 0), _q5(b[..., 4:]), _half(b, 2)
        case 'Q8_0':
            return _half(b, 0), _signed(b[..., 2:]), None
        case 'Q2_K':
            scale, least = _half(b, 80) * (b[..., :16] & 15), _half(b, 82) * (b[..., :16] >> 4)
            return scale, _codes(b[..., 16:80], 2, 32), -least
        case 'Q3_K':
            code = _codes(b[..., 32:96], 2, 32) | (_codes(b[..., :32], 1, 32) << 2)
            scale = _codes(b[..., 96:104], 4, 8) | (_codes(b[..., 104:108], 2, 4) << 4)
            return _half(b, 108) * _centred(scale, 32), _centred(code, 4), None
        case 'Q4_K':
            scale, least = _of_12_bytes(b)
            return scale, _codes(b[..., 16:], 4, 32), least
        case 'Q5_K':
            scale, least = _of_12_bytes(b)
            return scale, _codes(b[..., 48:], 4, 32) | (_codes(b[..., 16:48], 1, 32) << 4), least
        case 'Q6_K':
            code = _codes(b[..., :128], 4, 64) | (_codes(b[..., 128:192], 2, 32) << 4)
            return _half(b, 208) * _signed(b[..., 192:208]), _centred(code, 32), None
        case _:  # numbers, each a block
            number = jax.lax.bitcast_convert_type(b, _NUMBERS[kind]).astype(jnp.float32)
            return number[..., None], jnp.ones((*b.shape[:-1], 1), jnp.int8), None


# Products.


@jax.custom_vjp
def _product(x_MK: Float[Array, 'M K'], w_NK: Blocks) -> Float[Array, 'M N']:
    """``x w'``; the backward widens again what the forward has widened."""
    return product(x_MK, w_NK.widened(x_MK.dtype))


def _forward(x_MK: Array, w_NK: Blocks) -> tuple[Array, tuple[Blocks, Array]]:
    return _product(x_MK, w_NK), (w_NK, jnp.zeros((), x_MK.dtype))


def _backward(saved: tuple[Blocks, Array], g_MN: Array) -> tuple[Array, None]:
    w_NK, like = saved
    gx = contract(g_MN.astype(like.dtype), w_NK.widened(like.dtype), 1, 0)
    return gx.astype(like.dtype), None


_product.defvjp(_forward, _backward)


def times(x_MK: Float[Array, 'M K'], w_NK: Array | Blocks) -> Float[Array, 'M N']:
    """``x w'`` in the dtype of ``x``, of a kernel that may be in blocks.

    >>> times(jnp.ones((1, 32)), empty((2, 32), ('Q8_0',))).tolist()
    [[0.0, 0.0]]
    """
    if isinstance(w_NK, Blocks):
        return _product(x_MK, w_NK)
    return product(x_MK, w_NK.astype(x_MK.dtype))


def logits(x_MC: Float[Array, 'M C'], w_VC: Array | Blocks) -> Float[Array, 'M V']:
    """``x w'`` of an output layer, of which blocks are widened 4,096 rows at a time."""
    if not isinstance(w_VC, Blocks):
        return times(x_MC, w_VC)
    V = w_VC.shape[0]
    n = min(PIECE, V)

    def piece(y: Array, start: Array) -> tuple[Array, None]:  # the last begins earlier
        part = times(x_MC, w_VC.cut(start, n))
        return jax.lax.dynamic_update_slice_in_dim(y, part, start, 1), None

    like = jax.eval_shape(times, x_MC, w_VC)
    starts = jnp.minimum(jnp.arange(0, V, n), V - n)
    return jax.lax.scan(piece, jnp.zeros(like.shape, like.dtype), starts)[0]
