"""`winograd`: a convolution of 3 x 3 places with 4 products for each output where 9 are usual.

Minimal filtering F(2 x 2, 3 x 3) of "Fast Algorithms for Convolutional Neural Networks"
(arXiv 1509.09308): each tile of 4 x 4 inputs gives 2 x 2 outputs. With a tile ``d``, a kernel
``k`` and outputs ``y``, for each pair of channels,

    y = A' ((G k G') * (B' d B)) A,

so that the sum over channels is 16 matrix products. The transforms are sums; they pay where there
are channels enough (`jaxmp.models.convolution`). The tiles of as many images as stay in cache are
transformed and multiplied together.

Shapes: B batch; H, W image; h, w map; C, O input and output channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

TILES = 64, 512  # at least, at most in one matrix product

Pads = tuple[tuple[int, int], tuple[int, int]]
Grid = Sequence[Sequence[Array]] | Array


def varying(x: Array, other: Array) -> Array:
    """``x`` also along those axes of `jax.shard_map` along which ``other`` varies."""
    axes, others = (jax.typeof(a).manual_axis_type.varying for a in (x, other))
    return lax.pcast(x, tuple(others - axes), to='varying')


def _twice(f: Callable, grid: Grid) -> Grid:
    """``f`` of each row of the grid, and of each column of what that gives."""
    once = lambda grid: list(zip(*(f(*row) for row in grid), strict=True))
    return once(once(grid))


# Each transform along one axis; the last two are the transposes of `_output` and `_kernel`.
_input = lambda a, b, c, d: (a - c, b + c, c - b, b - d)
_kernel = lambda a, b, c: (a, (a + b + c) / 2, (a - b + c) / 2, c)
_output = lambda a, b, c, d: (a + b + c, b - c - d)
_from_output = lambda a, b: (a, a + b, a - b, -b)
_to_kernel = lambda a, b, c, d: (a + (b + c) / 2, (b - c) / 2, (b + c) / 2 + d)


def _tiles(f: Callable, size: int, x: Array) -> Grid:
    """``f`` of the ``size`` rows of all tiles, then of their columns, each ``(tiles, C)``.

    Tiles begin at every second row and column.
    """

    def along(axis: int, x: Array):
        n = x.shape[axis] - size + 1
        return f(*(lax.slice_in_dim(x, i, i + n, 2, axis) for i in range(size)))

    return [[a.reshape(-1, a.shape[-1]) for a in along(2, row)] for row in along(1, x)]


def padded(x: Array, padding: Pads) -> Array:
    """The images with zeros around them, or cut where a number is negative."""
    sides = (0, 0), *padding, (0, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), [(*side, 0) for side in sides])


def _whole(x: Array, h: int, w: int, padding: Pads) -> Array:
    """The images, padded so that their tiles are whole."""
    (top, bottom), (left, right) = padding
    return padded(x, ((top, bottom + h % 2), (left, right + w % 2)))


def images(batch: int, h: int, w: int) -> int:
    """How many of ``batch`` images have their tiles in one product, or 0: too few or too many.

    Never all of them: XLA undoes a loop of one step, and what it makes of that takes 1.6 times as
    long.
    """
    tiles = -(-h // 2) * -(-w // 2)
    fit = (m for m in range(1, batch) if batch % m == 0 and m * tiles <= TILES[1])
    m = max(fit, default=0)
    return m if m * tiles >= TILES[0] else 0


def winograd(
    x: Float[Array, 'B H W C'],
    kernel: Float[Array, '3 3 C O'],
    padding: Pads,
    *,
    turned: bool = False,
) -> Float[Array, 'B h w O']:
    """The convolution of stride 1; `images` of the batch and the map is not 0.

    ``turned``, for the gradient by the input: the kernel is ``(3, 3, O, C)``, turned by half a
    circle. To exchange the channels of the kernel instead would take longer than the products.
    """
    if turned:
        kernel = kernel[::-1, ::-1]
    channels = ((1,), (int(turned),)), ((), ())
    h, w = (n + sum(pads) - 2 for n, pads in zip(x.shape[1:3], padding, strict=True))
    m, factors = images(len(x), h, w), _twice(_kernel, kernel)

    def some(_, x):
        rows = zip(_tiles(_input, 4, _whole(x, h, w, padding)), factors, strict=True)
        sums = [
            [lax.dot_general(a, b, channels) for a, b in zip(*row, strict=True)] for row in rows
        ]
        place = lambda a: a.reshape(m, -(-h // 2), -(-w // 2), -1)
        y = [[place(a) for a in row] for row in _twice(_output, sums)]
        y = jnp.stack([jnp.stack(row, 3) for row in y], 2)  # m, h / 2, 2, w / 2, 2, O
        return None, y.reshape(m, h + h % 2, w + w % 2, -1)[:, :h, :w]

    _, y = lax.scan(some, None, x.reshape(-1, m, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])


def winograd_kernel_gradient(
    x: Float[Array, 'B H W C'], g: Float[Array, 'B h w O'], padding: Pads
) -> Float[Array, '3 3 C O']:
    """The gradient of `winograd` by its kernel, of the gradient ``g`` by its result."""
    h, w = g.shape[1:3]
    m = images(len(x), h, w)

    def add(total, pair):
        x, g = _whole(pair[0], h, w, padding), _whole(pair[1], h, w, ((0, 0), (0, 0)))
        tiles, gradients = _tiles(_input, 4, x), _tiles(_from_output, 2, g)
        return [
            [t + a.T @ b for t, a, b in zip(*row, strict=True)]
            for row in zip(total, tiles, gradients, strict=True)
        ], None

    split = lambda a: a.reshape(-1, m, *a.shape[1:])
    zero = varying(jnp.zeros((x.shape[-1], g.shape[-1]), x.dtype), g)
    total, _ = lax.scan(add, [[zero] * 4] * 4, (split(x), split(g)))
    return jnp.stack([jnp.stack(row) for row in _twice(_to_kernel, total)])
