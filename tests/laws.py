"""What every codec and every feedback rule promises, as laws over a table SPECS x INPUTS.

For your own codec write ``laws.check('mine(3)', names={'mine': mine})`` in a test; a `Law` adds
what yours promises beyond the common laws. A message crosses as bytes between two separate
programs, so a receiver that peeks at the sender's data fails.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp import Ctx
from tests.runs import QUICK

SAMPLES, INNER = 4, (7, 43)  # 301 elements a sample, 1204 in all: more than a block of 256, odd
BAD = (1, 3, 20)  # where NaN and infinity stand: sample 1
EPS = 2.0**-23


def special(inner: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Float32 tensors of samples of shape ``inner``, a normal one and what codecs break on."""
    r = np.random.default_rng(0)
    normal = r.standard_normal((SAMPLES, *inner)).astype(np.float32)
    largest = np.finfo(np.float32).max

    def put(*values: float) -> np.ndarray:
        x = normal.copy()
        for i, value in enumerate(values):
            x[BAD[0], BAD[1] + i, BAD[2]] = value
        return x

    return {
        'normal': normal,
        'relu': np.maximum(normal, 0),
        'zeros': np.zeros_like(normal),
        'constant': np.full_like(normal, -1.3),
        'outlier': put(1e6),
        'denormal': normal * np.float32(1e-40),
        'huge': (r.uniform(-3, 3, normal.shape) * 1e38).astype(np.float32),
        'largest': put(largest, -largest),
        'nan': put(np.nan),
        'inf': put(np.inf, -np.inf),
    }


def others() -> dict[str, np.ndarray]:
    """Other shapes and dtypes."""
    normal = FLOAT32['normal']
    half = normal.astype(np.float16)
    brain = jnp.asarray(normal, jnp.bfloat16)
    return {
        'tiny': normal[:2, :3, 0],
        'float16': half,
        'float16 largest': np.where(half > 1, np.finfo(np.float16).max, half),
        'float16 nan': FLOAT32['nan'].astype(np.float16),
        'bfloat16': np.asarray(brain),
        'bfloat16 largest': np.asarray(jnp.where(brain > 1, jnp.finfo(jnp.bfloat16).max, brain)),
    }


FLOAT32 = special(INNER)
INPUTS = FLOAT32 | others()


class Law(NamedTuple):
    """What a codec promises beyond shape, dtype, size and finiteness.

    Attributes:
      bound: float64 ``x -> max |x - C(x)|``, elementwise, in exact arithmetic; None promises none.
      spoilt: ``(x, y) -> mask`` of what is not finite if ``x`` is not.
      idempotent: ``C(C(x)) = C(x)`` to the bit.
      kept: ``|x - C(x)|^2 <= (1 - kept) |x|^2`` for every sample; None promises nothing.
      alone: a sample's result does not depend on the other samples.
    """

    bound: Callable[[np.ndarray], Any] | None = None
    spoilt: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    idempotent: bool = False
    kept: float | None = None
    alone: bool = False


# What a NaN or an infinity spoils.


def element(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    del y
    return ~np.isfinite(x)


def tensor(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.full_like(element(x, y), element(x, y).any())


def feature(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.broadcast_to(element(x, y).any(0), x.shape)


def sent_of_sample(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bad = element(x, y).reshape(len(x), -1).any(1)
    return bad.reshape(-1, *[1] * (x.ndim - 1)) & (y != 0) & (x != 0)


def sample(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    bad = element(x, y).reshape(len(x), -1).any(1)
    return np.broadcast_to(bad.reshape(-1, *[1] * (x.ndim - 1)), x.shape)


def sent(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return element(x, y) & (y != 0)


def sent_of_tensor(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return tensor(x, y) & (y != 0)


def blocks(size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def spoilt(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        flat = element(x, y).reshape(-1)
        bad = np.pad(flat, (0, -flat.size % size)).reshape(-1, size).any(1)
        return np.repeat(bad, size)[: flat.size].reshape(x.shape)

    return spoilt


# Error bounds. Each adds the rounding of its own float32 arithmetic.


def half_ulp(bits: int, least: float, largest: float) -> Callable[[np.ndarray], Any]:
    """Rounding to a float of ``bits`` bits of precision, which saturates."""

    def bound(x: np.ndarray) -> np.ndarray:
        inside = np.clip(x, -largest, largest)
        return np.abs(x - inside) + 2.0**-bits * np.abs(inside) + least

    return bound


def steps(bits: int, of_a_step: float = 0.5) -> Callable[[np.ndarray], Any]:
    def bound(x: np.ndarray) -> np.ndarray:
        return of_a_step * (x.max() - x.min()) / (2**bits - 1) + 4 * EPS * np.abs(x).max()

    return bound


def block_steps(bits: int, size: int = 64, of_a_step: float = 0.5) -> Callable[[np.ndarray], Any]:
    def bound(x: np.ndarray) -> np.ndarray:
        flat = x.reshape(-1)
        rows = np.pad(flat, (0, -flat.size % size), mode='edge').reshape(-1, size)
        most = np.abs(rows).max(1)
        end = (2.0**-11 + 4 * EPS) * most + 2.0**-40 * np.abs(x).max()
        width = rows.max(1) - rows.min(1) + 2 * end
        each = of_a_step * width / (2**bits - 1) + end
        return np.repeat(each, size)[: flat.size].reshape(x.shape)

    return bound


def scaled(bits: int) -> Callable[[np.ndarray], Any]:
    """The largest code stops one step short of the scale, which float16 rounds and bounds."""

    def bound(x: np.ndarray) -> np.ndarray:
        s = np.minimum(np.abs(x).max(0), 65504.0)
        beyond = np.maximum(np.abs(x) - 65504.0, 0)
        return beyond + s / 2 ** (bits - 1) + 2.0**-10 * s + 2e-6

    return bound


def relative_steps(bits: int) -> Callable[[np.ndarray], Any]:
    def bound(x: np.ndarray) -> np.ndarray:
        a = np.abs(x).reshape(len(x), -1)
        some = a >= np.finfo(np.float32).tiny
        logs = np.log(np.where(some, a, 1))
        width = np.where(some, logs, -np.inf).max(1) - np.where(some, logs, np.inf).min(1)
        step = np.maximum(width, 0) / max(1, 2 ** (bits - 1) - 2) / 2 + 4e-5
        return np.where(some, np.expm1(step)[:, None] * a, a).reshape(x.shape)

    return bound


def nothing(x: np.ndarray) -> float:
    del x
    return 0.0


def itself(x: np.ndarray) -> np.ndarray:
    """What a selection promises: an element is sent or taken as zero."""
    return np.abs(x)


def off_the_mean(x: np.ndarray) -> np.ndarray:
    """Every magnitude becomes the sample's mean."""
    flat = np.abs(x).reshape(len(x), -1)
    mean = flat.mean(1, keepdims=True)
    return (np.maximum(np.abs(flat - mean), mean) + 1e-5 * mean).reshape(x.shape)


def of_the_norm(levels: int) -> Callable[[np.ndarray], Any]:
    def bound(x: np.ndarray) -> np.ndarray:
        norm = np.sqrt(np.square(x.reshape(len(x), -1)).sum(1)) * (1 + 1e-5)
        return np.broadcast_to((norm / levels).reshape(-1, *[1] * (x.ndim - 1)), x.shape)

    return bound


FP16 = half_ulp(11, 2.0**-25, 65504.0)
SPECS: dict[str, Law] = {
    'raw': Law(nothing, element, True, 1.0, alone=True),
    'fp16': Law(FP16, element, True),
    'bf16': Law(half_ulp(8, 1e-38, float(jnp.finfo(jnp.bfloat16).max)), element, True),
    'uniform(4)': Law(steps(4), tensor, True),
    'uniform(4, rounding=stochastic)': Law(steps(4, 1.0), tensor),
    'max_scaled(4)': Law(scaled(4), feature),
    'block(4)': Law(block_steps(4), blocks(64)),
    'block(3, 128, stochastic)': Law(block_steps(3, 128, 1.0), blocks(128)),
    'log_scale(4)': Law(relative_steps(4), sent_of_sample, alone=True),
    'top_k(0.1)': Law(itself, element, True, 0.1, alone=True),
    'top_k(0.4, values=log_scale(4), indices=bitmap)': Law(None, sent_of_sample, alone=True),
    'polar(0.5, block=32)': Law(None, blocks(32)),
    'same_support()': Law(itself, sent, True),
    'one_bit': Law(off_the_mean, sample, alone=True),
    'natural': Law(itself, element),
    'ef(bf16)': Law(half_ulp(8, 1e-38, float(jnp.finfo(jnp.bfloat16).max)), element),
    'ef21(uniform(8))': Law(steps(8), tensor),
    'ef_mixed(top_k(0.4, values=log_scale(4)))': Law(None, sent_of_sample),
    'aqsgd(max_scaled(6), examples=9)': Law(scaled(6), feature),
}
FLOAT32_SPECS: dict[str, Law] = {
    **{f'uniform({b})': Law(steps(b), tensor, True) for b in (1, 2, 3, 5, 6, 7, 8)},
    **{f'max_scaled({b})': Law(scaled(b), feature) for b in (2, 3, 5, 6, 7, 8)},
    **{f'block({b})': Law(block_steps(b), blocks(64)) for b in (1, 2, 3, 5, 6, 7, 8)},
    'block(2, size=32)': Law(block_steps(2, 32), blocks(32)),
    **{f'log_scale({b})': Law(relative_steps(b), sent_of_sample) for b in (2, 3, 5, 6, 7, 8)},
    'top_k(1.0)': Law(nothing, element, True, 1.0),
    'top_k(0.001, indices=int32)': Law(itself, sent, True, 0.001),
    'top_k(0.1, values=fp16, indices=packed)': Law(None, element, True),
    'top_k(0.3, values=uniform(4), indices=block_local)': Law(None, sent_of_tensor),
    'polar_sign(0.5, 16, randomised)': Law(None, blocks(16)),
    'polar(0.5, 16, scl(2))': Law(None, blocks(16)),
    'rotate(fp16, 64)': Law(None, blocks(64)),
    'rotate(polar(0.5, 32), 32)': Law(None, blocks(32)),
    'top_k(0.3, values=polar(0.5, 32))': Law(),
    'ef(polar(0.25, 32))': Law(None, blocks(32)),
    'random_k(0.3)': Law(itself, sent, True, alone=True),
    'per_token(top_k(0.1))': Law(itself, element, True),
    'random_k(0.3, values=uniform(2, stochastic))': Law(),
    'unbiased_random_k(1.0)': Law(nothing, element, True, 1.0),
    'as_bool': Law(),
    'qsgd(3)': Law(of_the_norm(3), alone=True),
    'qsgd(100)': Law(of_the_norm(100)),
    'ef(one_bit)': Law(None, sample),
    'same_support(values=fp16)': Law(None, sent, True),
    'ef21(top_k(0.1, values=fp16, indices=bitmap))': Law(None, element),
}


def context(like: jax.ShapeDtypeStruct) -> Ctx:
    """A key, ids and (for same_support) six positions a sample, one of them sent as a zero."""
    n = int(np.prod(like.shape[1:]))
    at = np.linspace(0, n - 1, min(6, n)).astype(np.int32)
    at[1] = ~at[1]
    rows = like.shape[0]
    return Ctx(jax.random.key(7), jnp.arange(rows), jnp.tile(at, (rows, 1)))


class Ends(NamedTuple):
    """The two ends of a channel, each a compiled program of its own."""

    send: Callable
    recv: Callable
    init: Callable

    def cross(self, x: Any, tx: Any, rx: Any, ctx: Ctx) -> tuple[Any, Any, Any, Any]:
        """One message, as bytes: the payload, what arrives, and the next states."""
        m, tx = self.send(x, tx, ctx)
        y, rx = self.recv(as_bytes(m), rx, ctx)
        return m, np.asarray(y), tx, rx


def ends(channel: jaxmp.Channel, like: jax.ShapeDtypeStruct) -> Ends:
    """Compiles sender and receiver for tensors like ``like``."""
    recv = jax.jit(lambda m, rx, ctx: channel.recv(m, rx, like, ctx), compiler_options=QUICK)
    send = jax.jit(channel.send, compiler_options=QUICK)
    return Ends(send, recv, lambda: channel.init(like))


def as_bytes(payload: Any) -> Any:
    """The payload after a trip as bytes."""
    raw = jax.tree.map(lambda a: (np.asarray(a).tobytes(), a.dtype, a.shape), payload)
    return jax.tree.map(
        lambda a: np.frombuffer(a[0], a[1]).reshape(a[2]),
        raw,
        is_leaf=lambda a: isinstance(a, tuple) and len(a) == 3 and isinstance(a[0], bytes),
    )


def check(
    text: str,
    law: Law = Law(),  # noqa: B008
    inputs: dict[str, np.ndarray] = INPUTS,
    names: dict[str, Any] | None = None,
) -> None:
    """Checks every law for one channel text over ``inputs``.

    Args:
      text: the channel, as `jaxmp.parse` reads it.
      law: what it promises beyond the common laws.
      inputs: name to tensor; those of one shape and dtype share a compilation.
      names: your own codecs, as in `jaxmp.parse`.

    Raises:
      AssertionError: naming the law and the input.
    """
    channel = jaxmp.parse(text, names)
    compiled: dict[tuple, Ends] = {}
    results: dict[str, np.ndarray] = {}
    for name, x in inputs.items():
        like = jaxmp.like(x)
        pair = compiled.setdefault((x.shape, x.dtype), ends(channel, like))
        ctx = context(like)
        m, y, _, _ = pair.cross(x, *pair.init(), ctx)
        results[name] = y
        where = f'{text} of {name}'
        assert (y.shape, y.dtype) == (x.shape, x.dtype), f'{where}: shape and dtype are kept'
        size = sum(np.asarray(a).nbytes for a in jax.tree.leaves(m))
        assert 8 * size == jaxmp.bits(channel, like, ctx), f'{where}: bits are those of the payload'
        _check_values(where, law, x.astype(np.float64), y.astype(np.float64), x.dtype)
        if law.idempotent and np.isfinite(x.astype(np.float64)).all():
            again = pair.cross(y, *pair.init(), ctx)[1]
            assert (again == y).all(), f'{where}: idempotent'

    if law.alone:
        _check_alone(text, results)


def check_together(laws: dict[str, Law], inputs: dict[str, np.ndarray]) -> None:
    """Checks the values of codecs in one program for all of them, for long tensors.

    Args:
      laws: codec texts and what they promise.
      inputs: name to tensor, all of one shape and dtype.

    Raises:
      AssertionError: naming the law, the codec and the input.
    """
    codecs = {text: jaxmp.parse(text).codec for text in laws}

    def decode(ms: dict[str, Any], like: Any, ctx: Ctx) -> dict[str, Any]:
        return {t: c.decode(ms[t], like, ctx) for t, c in codecs.items()}

    def encode(x: Any, ctx: Ctx) -> dict[str, Any]:
        return {t: c.encode(x, ctx) for t, c in codecs.items()}

    like = jaxmp.like(inputs['normal'])
    results = {}
    pair = ends(jaxmp.direct(jaxmp.Codec(encode, decode)), like)
    for name, x in inputs.items():
        m, _ = pair.send(x, (), context(like))
        results[name] = jax.tree.map(np.asarray, pair.recv(as_bytes(m), (), context(like))[0])
    for text, law in laws.items():
        for name, x in inputs.items():
            y = results[name][text].astype(np.float64)
            _check_values(f'{text} of {name}', law, x.astype(np.float64), y, x.dtype)
        if law.alone:
            _check_alone(text, {name: ys[text] for name, ys in results.items()})


def _check_alone(text: str, results: dict[str, np.ndarray]) -> None:
    rest = [i for i in range(SAMPLES) if i != BAD[0]]
    for name in {'outlier', 'largest', 'nan', 'inf'} & results.keys():
        same = results[name][rest] == results['normal'][rest]
        assert same.all(), f'{text} of {name}: other samples are not touched'


def _check_values(where: str, law: Law, x: np.ndarray, y: np.ndarray, dtype: Any) -> None:
    if not np.isfinite(x).all():
        if law.spoilt is not None:
            spoilt, expected = ~np.isfinite(y), law.spoilt(x, y)
            assert (spoilt == expected).all(), f'{where}: what is not finite'
        return
    assert np.isfinite(y).all(), f'{where}: finite stays finite'
    info = jnp.finfo(dtype)
    rounding = 0.0 if dtype == np.float32 else float(info.eps)
    if law.bound is not None:
        bound = law.bound(x)
        slack = float(info.tiny) if np.any(bound) else 0.0
        excess = np.abs(x - y) - bound - rounding * (np.abs(x) + bound) - slack
        assert (excess <= 0).all(), f'{where}: error exceeds its bound by {excess.max():.3g}'
    if law.kept is not None:
        lost, all_ = (np.square(a).reshape(len(a), -1).sum(1) for a in (x - y, x))
        assert (lost <= (1 - law.kept) * all_).all(), f'{where}: contraction'
