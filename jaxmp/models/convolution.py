"""`convolve`: the convolution of this package's models, in the forms that are fast on a CPU.

XLA:CPU computes most convolutions near the speed of a matrix product of the same size. Three are
slow there and become matrix products: the kernel's gradient of a layer with a large map, for which
XLA transposes the whole input, a layer whose kernel is larger than its image, and a layer with a
large kernel and few channels. A fourth, of 3 x 3 places and many channels, needs fewer products
than XLA takes (`jaxmp.models.winograd`). Other platforms keep XLA's forms.
``bench/convolution.py`` measures the layers of ResNet-18; those of LeNet are in docs/LOG.md.

Shapes: B batch; H, W image; h, w map; C, O input and output channels; k, l kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxmp.models.winograd import images, padded, varying, winograd, winograd_kernel_gradient

LAYOUT = ('NHWC', 'HWIO', 'NHWC')
LARGE = 4096  # h w C from which products over patches are faster than XLA's form
BAND = 5, 6, 256  # kernel rows at least; widths of the kernel in a row, channel pairs at most
CHANNELS = 64, 128  # from which the transforms of 3 x 3 places pay, and those for its gradient,
PLACES, WORK = 512, 1 << 26  # where B h w and B h w C O are at least these: they cost compiling
ROWS, ELEMENTS = 2048, 3 << 19  # of one matrix of patches, at most, so that it stays in cache

Pair = tuple[int, int]
Pads = tuple[Pair, Pair]


def _patches(x: Array, size: Pair, strides: Pair, padding: Pads, out: Pair) -> Array:
    """The ``k l C`` inputs of each place of the map, ``(B, h, w, k l C)``."""
    x = padded(x, padding)
    (s, t), (rows, cols) = strides, ((n - 1) * s + 1 for n, s in zip(out, strides, strict=True))
    taps = [(i, j) for i in range(size[0]) for j in range(size[1])]
    return jnp.concatenate([x[:, i : i + rows : s, j : j + cols : t] for i, j in taps], -1)


def _input_gradient(g: Array, kernel: Array, padding: Pads) -> Array:
    """Of stride 1: the convolution with the turned kernel.

    XLA's own transposition has the same speed, but a tenth of it within a switch or a loop.
    """
    rest = lambda n, pads: (n - 1 - pads[0], n - 1 - pads[1])
    pads = rest(kernel.shape[0], padding[0]), rest(kernel.shape[1], padding[1])
    if _filtered(g, kernel, (1, 1), pads, CHANNELS[0]):
        return winograd(g, kernel, pads, turned=True)
    return _own(g, kernel[::-1, ::-1].swapaxes(2, 3), (1, 1), pads)


def _kernel_gradient(x: Array, g: Array, size: Pair, strides: Pair, padding: Pads) -> Array:
    """``sum over B h w of patches(x) g``, one product for as many images as stay in cache."""
    (B, h, w, O), C = g.shape, x.shape[-1]
    columns = size[0] * size[1] * C
    most = min(ROWS // (h * w), ELEMENTS // (h * w * columns))
    m = max((m for m in range(1, most + 1) if B % m == 0), default=1)

    dtype = jnp.promote_types(g.dtype, jnp.float32)

    def add(total, images):
        x, g = images
        patches = _patches(x, size, strides, padding, (h, w)).reshape(-1, columns)
        # The smaller matrix is the transposed one: XLA:CPU transposes a large one slowly.
        over_rows = (((0,), (0,)), ((), ()))
        g = g.reshape(-1, O)
        return total + lax.dot_general(g, patches, over_rows, preferred_element_type=dtype), None

    split = lambda a: a.reshape(B // m, m, *a.shape[1:])
    total = varying(jnp.zeros((O, columns), dtype), g)
    total, _ = lax.scan(add, total, (split(x), split(g)))
    return total.reshape(O, *size, C).transpose(1, 2, 3, 0).astype(x.dtype)


def _dense(x: Array, kernel: Array, strides: Pair, padding: Pads) -> Array:
    """The convolution as one product with the matrix ``(H W C, h w O)`` of the whole layer."""
    B, H, W, C = x.shape
    k, l, _, O = kernel.shape
    zero = jnp.zeros((), kernel.dtype)

    def starts(image, taps, stride, pads):
        firsts = range(-pads[0], image + pads[1] - taps + 1, stride)
        return [(first, image - taps - first, 0) for first in firsts]

    rows = starts(H, k, strides[0], padding[0])
    cols = starts(W, l, strides[1], padding[1])
    keep = (0, 0, 0)
    shifted = [lax.pad(kernel, zero, [row, col, keep, keep]) for row in rows for col in cols]
    matrix = jnp.stack(shifted, 3).reshape(H * W * C, -1)
    return (x.reshape(B, -1) @ matrix).reshape(B, len(rows), len(cols), O)


def _banded(x: Array, kernel: Array, strides: Pair, padding: Pads) -> Array:
    """The convolution as one product of each ``k`` rows of the image, whole, with a band matrix."""
    dtype = x.dtype
    wide = jnp.promote_types(dtype, jnp.float32)  # its gradients are sums of many terms
    x, kernel = padded(x.astype(wide), padding), kernel.astype(wide)
    (B, H, W, C), (k, l, _, O) = x.shape, kernel.shape
    s, t = strides
    h, w = (H - k) // s + 1, (W - l) // t + 1
    lines = x.reshape(B, H, W * C)
    rows = jnp.concatenate([lines[:, i : i + (h - 1) * s + 1 : s] for i in range(k)], -1)
    zero, keep = jnp.zeros((), wide), (0, 0, 0)
    shifted = [
        lax.pad(kernel, zero, [keep, (j, W - l - j, 0), keep, keep]) for j in range(0, w * t, t)
    ]
    matrix = jnp.stack(shifted, 3).reshape(k * W * C, w * O)
    return (rows.reshape(B * h, -1) @ matrix).reshape(B, h, w, O).astype(dtype)


def _filtered(x: Array, kernel: Array, strides: Pair, padding: Pads, least: int) -> bool:
    """Whether the layer is one of those that `winograd` does faster, forward or backward."""
    (B, H, W, _), (C, O) = x.shape, kernel.shape[2:]
    h, w = (n + sum(pads) - 2 for n, pads in zip((H, W), padding, strict=True))
    places = B * h * w
    if kernel.shape[:2] != (3, 3) or strides != (1, 1) or x.dtype.itemsize < 4:
        return False
    large = min(C, O) >= least and places >= PLACES and places * C * O >= WORK
    return large and images(B, h, w) > 0


def _fast(x: Array, kernel: Array, strides: Pair, padding: Pads) -> Array:
    """The convolution in the form that is fast on a CPU."""
    product = _product(x, kernel)
    if product is None and _filtered(x, kernel, strides, padding, CHANNELS[0]):
        return winograd(x, kernel, padding)
    return (product or _own)(x, kernel, strides, padding)


def _small(x: Array, kernel: Array) -> bool:
    """Whether the kernel has at least as many places as the image."""
    return 1 < kernel.shape[0] * kernel.shape[1] >= x.shape[1] * x.shape[2]


def _wide(x: Array, kernel: Array) -> bool:
    """Whether the kernel is large, and its channels too few to keep a product busy."""
    (k, l, C, O), (rows, widths, pairs) = kernel.shape, BAND
    return k >= rows and x.shape[2] <= widths * l and pairs >= C * O


def _product(x: Array, kernel: Array):
    """The form of the whole convolution as one product, if that is the fast one on a CPU."""
    return _dense if _small(x, kernel) else _banded if _wide(x, kernel) else None


def _own(x: Array, kernel: Array, strides: Pair, padding: Pads) -> Array:
    """XLA's convolution."""
    return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=LAYOUT)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _convolution(x: Array, kernel: Array, strides: Pair, padding: Pads) -> Array:
    form = lambda f: functools.partial(f, strides=strides, padding=padding)
    return lax.platform_dependent(x, kernel, cpu=form(_fast), default=form(_own))


def _forward(x, kernel, strides, padding):
    return _convolution(x, kernel, strides, padding), (x, kernel)


def _backward(strides, padding, operands, g):
    def gradients(f):
        f = functools.partial(f, strides=strides, padding=padding)
        return lambda x, kernel, g: jax.vjp(f, x, kernel)[1](g)

    def products(x, kernel, g):
        if strides == (1, 1):
            dx = _input_gradient(g, kernel, padding)
        else:
            [dx] = jax.vjp(lambda x: _own(x, kernel, strides, padding), x)[1](g)
        if _filtered(x, kernel, strides, padding, CHANNELS[1]):
            return dx, winograd_kernel_gradient(x, g, padding)
        return dx, _kernel_gradient(x, g, kernel.shape[:2], strides, padding)

    product = _product(*operands)
    cpu = products if product is None else gradients(product)
    return lax.platform_dependent(*operands, g, cpu=cpu, default=gradients(_own))


_convolution.defvjp(_forward, _backward)


def convolve(
    lhs: Float[Array, 'B H W C'],
    rhs: Float[Array, 'k l C O'],
    window_strides: Pair,
    padding: Any,
    **rest: object,
) -> Float[Array, 'B h w O']:
    """`jax.lax.conv_general_dilated` for `flax.linen.Conv`, with gradients that a CPU does fast.

    Convolutions with dilation, groups, a precision or a layout other than NHWC, and those that
    XLA:CPU does fast, are XLA's own. The others have no forward-mode derivative.

    Args:
      lhs: input.
      rhs: kernel.
      window_strides: of rows and columns.
      padding: 'SAME', 'VALID' or pairs.
      **rest: further arguments of `jax.lax.conv_general_dilated`.

    >>> import flax.linen as nn
    >>> layer = nn.Conv(64, (3, 3), conv_general_dilated=convolve)
    """
    default = functools.partial(lax.conv_general_dilated, lhs, rhs, window_strides, padding, **rest)
    out = jax.eval_shape(default)
    numbers = lambda layout: lax.conv_dimension_numbers(lhs.shape, rhs.shape, layout)
    plain = {'lhs_dilation': (1, 1), 'rhs_dilation': (1, 1), 'feature_group_count': 1}
    plain |= {'precision': None, 'dimension_numbers': numbers(LAYOUT)} if lhs.ndim == 4 else {}
    options = {**rest, 'dimension_numbers': numbers(rest.get('dimension_numbers'))}
    if not options.items() <= plain.items() or lhs.ndim != 4 or not out.size:
        return default()
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(lhs.shape[1:3], rhs.shape[:2], window_strides, padding)
    strides, padding = (window_strides[0], window_strides[1]), tuple(map(tuple, padding))
    large = out.shape[1] * out.shape[2] * lhs.shape[-1] >= LARGE
    filtered = _filtered(lhs, rhs, strides, padding, CHANNELS[0])
    if not large and not filtered and _product(lhs, rhs) is None:
        return default()
    return _convolution(varying(lhs, rhs), varying(rhs, lhs), strides, padding)
