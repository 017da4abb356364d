"""Codecs below one bit per element: signs as a codeword of a polar code, and one scale per block.

A tensor is cut into blocks of N elements. Each block is reproduced as ``c s``. The signs s are a
codeword that K bits select; `successive` search finds one that agrees with the elements where they
are large. ``c = <x, s> / N`` is the best scale for these signs. It is sent as bfloat16, which has
float32's range in 16 bits, so that gradients of 1e-8 keep their scale. A message takes
``K / N + 16 / N`` bits per element.

`polar_sign` uses the signs of the elements only; `polar` also uses their magnitudes, which lowers
the error at every rate. Both first multiply the tensor by random signs that both ends draw from the
crossing's key, so that structured data, such as data of one sign, compress as well as random data.
The sum of two codewords does not decode to the sum of two tensors: average what is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxmp.codecs import polarcode
from jaxmp.codecs.dense import bf16, saturated
from jaxmp.codecs.polarcode import Code, check_size
from jaxmp.codecs.polarsearch import Ratios, successive, successive_list
from jaxmp.wire import KEY, Codec, Ctx, Like, compute_dtype, pack, unpack, wide
from jaxmp.wire.words import Origin, check_whole, known, named, word

WORD, NOISE = 0, 1  # sub-streams of the crossing's key


@known
class Search(NamedTuple):
    """The rule by which an encoder chooses the codeword.

    Attributes:
      word: ``(code, ratios, ctx) -> signs`` of a codeword; ratios and signs are ``(N, blocks)``.
      origin: the call that built it (`jaxmp.wire.words`).
    """

    word: Callable[[Code, Ratios, Ctx], Ratios]
    origin: Origin | None = None


def _randomised(code: Code, llr: Ratios, ctx: Ctx) -> Ratios:
    key = ctx.fold(NOISE).key_of('a polar codec')
    return successive(code, llr, jax.random.logistic(key, llr.shape, llr.dtype))


argmax = named('argmax', Search(lambda code, llr, ctx: successive(code, llr)))
"""Every bit gets its more likely value: 3 to 10 % less distortion than `randomised`."""

randomised = named('randomised', Search(_randomised))
"""Every bit is drawn from its posterior, ``P(u = 1) = 1 / (1 + e^L)``, as the proofs assume."""


@word
def scl(paths: int) -> Search:
    """The most likely of ``paths`` candidates: 2 to 8 % less distortion than `argmax`.

    Args:
      paths: number of candidates, 2 to 32; 4 to 8 are usual. 8 take about 15 times as long as
        `argmax`.

    Raises:
      ValueError: if ``paths`` is out of range.
    """
    check_whole('scl paths', paths, 'an integer from 2 to 32; write scl(8)', 2, 32)
    return Search(lambda code, llr, ctx: successive_list(code, llr, paths))


@word
def polar(rate: float, block: int = 1024, search: Search = argmax) -> Codec:
    """Signs as a polar codeword chosen by signs and magnitudes, and one scale per block.

    ``C(x) = c s`` with ``c = <x, s> / N``. s is the codeword that ``search`` finds for the
    log-likelihood ratios ``beta x / rms(x)``, with ``1 - E h2(sigma(beta x)) = rate``, x normal. On
    normal data the relative squared error is .89, .74 and .54 at rates .1, .25 and .5. Data with
    heavy tails need ``rotate(polar(...))``. A NaN or an infinity makes its whole block useless.

    Args:
      rate: message bits per element, in (0, 1]; ``floor(rate block)`` bits are sent per block.
      block: N, a power of two. The last block of a tensor is padded with zeros.
      search: ``argmax``, ``randomised`` or ``scl(paths)``.

    Raises:
      ValueError: if ``rate`` or ``block`` is out of range, or the context has no key.

    >>> import jaxmp
    >>> x = jax.ShapeDtypeStruct((4, 2048), 'float32')
    >>> jaxmp.bits(jaxmp.parse('polar(0.25)'), x) / x.size
    0.265625

    References:
      Polar Codes are Optimal for Lossy Source Coding, arXiv 0903.0307.
    """
    _check('polar', rate, block, search)

    def ratios(x: Array) -> Array:
        return polarcode.slope(rate) * x

    return _codec(lambda: polarcode.code(block, rate, polarcode.soft_source), ratios, search)


@word
def polar_sign(rate: float, block: int = 1024, search: Search = argmax) -> Codec:
    """Signs as a polar codeword chosen by the signs alone, and one scale per block.

    It is `polar` with the log-likelihood ratios ``sign(x) ln((1 - D) / D)``, ``1 - h2(D) = rate``,
    ``sign(0) = 1``: lossy compression of a fair bit source. A reproduced sign is wrong with a
    probability near D. The error is larger than that of `polar` at every rate below 1.

    Args:
      rate: message bits per element, in (0, 1].
      block: N, a power of two.
      search: ``argmax``, ``randomised`` or ``scl(paths)``.

    Raises:
      ValueError: if ``rate`` or ``block`` is out of range, or the context has no key.
    """
    _check('polar_sign', rate, block, search)

    def ratios(x: Array) -> Array:
        return polarcode.ratio(rate) * jnp.where(x < 0, -1, 1)

    return _codec(lambda: polarcode.code(block, rate, polarcode.hard_source), ratios, search)


def _check(name: str, rate: object, block: int, search: object) -> None:
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise TypeError(f'{name} rate must be a number in (0, 1], got {rate!r}')
    check_size(f'{name} block', block)
    if not isinstance(search, Search):
        got = getattr(search, '__name__', type(search).__name__)
        raise TypeError(f'{name} search must be argmax, randomised or scl(8), got {got}')
    polarcode.check_rate(name, rate, block)


def _codec(code_of: Callable[[], Code], ratios: Callable[[Array], Array], search: Search) -> Codec:
    """The steps of both codecs: cut into blocks, apply random signs, search, compute the scale."""

    def encode(x: Array, ctx: Ctx) -> dict[str, Array]:
        x, code, size = wide(x), code_of(), x.size
        x, rms = _blocks(x, code.size)
        flip = _flips(ctx, x.shape)
        llr = jnp.nan_to_num(jnp.where(flip, -1, 1) * ratios(x)).astype(jnp.float32)
        s = search.word(code, llr, ctx)
        c = rms * _mean(x * jnp.where((s < 0) ^ flip, -1, 1), size)
        inputs = polarcode.transform((s < 0).astype(jnp.uint8))
        word = inputs[np.array(code.sent)].T
        return {'word': pack(word, 1), 'scale': bf16.encode(c, ctx)}

    def decode(m: dict[str, Array], like: Like, ctx: Ctx) -> Array:
        code = code_of()
        word = unpack(m['word'], 1, len(code.sent)).T
        inputs = jnp.zeros((code.size, word.shape[1]), jnp.uint8)
        bits = polarcode.transform(inputs.at[np.array(code.sent)].set(word))
        flip = _flips(ctx, bits.shape)
        scales = jax.ShapeDtypeStruct(m['scale'].shape, compute_dtype(like))
        c = bf16.decode(m['scale'], scales, ctx)
        x = jnp.where((bits > 0) ^ flip, -c, c).T.reshape(-1)
        return saturated(x[: like.size].reshape(like.shape), like.dtype)

    return Codec(encode, decode, needs=KEY)


def _blocks(x: Array, n: int) -> tuple[Float[Array, 'n blocks'], Float[Array, ' blocks']]:
    """The tensor in blocks of n elements, one per column, divided by their root mean squares."""
    flat = x.reshape(-1)
    x = jnp.pad(flat, (0, -flat.size % n)).reshape(-1, n).T
    peak = jnp.max(jnp.abs(x), axis=0)
    some = ~(peak < jnp.finfo(x.dtype).tiny)
    # Two factors, because 1 / peak may overflow float32 (XLA divides by multiplying).
    root = jnp.where(some, jax.lax.rsqrt(jnp.where(some, peak, 1)), 0)
    x = x * root * root
    rms = jnp.sqrt(_mean(x * x, flat.size))
    return x / jnp.where(some, rms, 1), rms * peak


def _mean(x: Float[Array, 'n blocks'], size: int) -> Float[Array, ' blocks']:
    """Mean of each block; the last block of a tensor of ``size`` elements may hold fewer than n."""
    n, blocks = x.shape
    return x.sum(0) / np.minimum(n, size - n * np.arange(blocks)).astype(x.dtype)


def _flips(ctx: Ctx, shape: tuple[int, ...]) -> Array:
    """Random signs of the crossing; true means minus."""
    size, blocks = shape
    key = ctx.fold(WORD).key_of('a polar codec')
    words = jax.random.bits(key, (-(-size // 8), blocks), jnp.uint8)
    bits = words[:, None] >> jnp.arange(8, dtype=jnp.uint8)[None, :, None] & 1
    return bits.reshape(-1, blocks)[:size] > 0
