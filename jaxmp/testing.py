"""`check`: the laws that every codec and every feedback rule keeps, for tests of your own.

Shape and dtype are kept, the bits are those of the payload, finite stays finite, and what a `Law`
promises besides holds. A message crosses as bytes between two separate programs, so a receiver that
peeks at the sender's data fails.

    from jaxmp.testing import Law, check, sample

    def test_mine():
        check(mine(3), Law(spoilt=sample, alone=True))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmp.feedback import Channel, direct
from jaxmp.feedback.channel import EndStates, Rx, Tx
from jaxmp.spec import Names, parse
from jaxmp.wire import Codec, Ctx, Payload, bits

# Compiling dominates. The programs are XLA's as ever, with their machine code made in a hurry.
QUICK: dict[str, bool | int] = {'xla_backend_optimization_level': 0}
if jax.__version_info__ < (0, 11):  # later ones do not know the first
    QUICK |= {'xla_cpu_use_fusion_emitters': False, 'xla_cpu_parallel_codegen_split_count': 1}
SAMPLES, INNER = 4, (7, 43)  # 301 elements a sample, 1204 in all: more than a block of 256, odd
BAD = (1, 3, 20)  # where NaN and infinity stand: sample 1


def special(inner: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Float32 tensors of samples of shape ``inner``, a normal one and what codecs break on."""
    r = np.random.default_rng(0)
    normal = r.standard_normal((SAMPLES, *inner)).astype(np.float32)
    largest = np.finfo(np.float32).max

    def put(*values: np.floating | float) -> np.ndarray:
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
    brain = normal.astype(jnp.bfloat16)  # by numpy: a module that is imported computes nothing
    return {
        'tiny': normal[:2, :3, 0],
        'float16': half,
        'float16 largest': np.where(half > 1, np.finfo(np.float16).max, half),
        'float16 nan': FLOAT32['nan'].astype(np.float16),
        'bfloat16': brain,
        'bfloat16 largest': np.where(brain > 1, jnp.finfo(jnp.bfloat16).max, brain),
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

    bound: Callable[[np.ndarray], np.ndarray | float] | None = None
    spoilt: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None
    idempotent: bool = False
    kept: float | None = None
    alone: bool = False


# What a NaN or an infinity spoils: values of `Law.spoilt`.


def element(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Only the element itself."""
    return ~np.isfinite(x)


def tensor(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """All of the tensor."""
    return np.full_like(element(x, y), element(x, y).any())


def feature(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The feature, in every sample."""
    return np.broadcast_to(element(x, y).any(0), x.shape)


def sent_of_sample(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What is sent of the sample."""
    return sample(x, y) & (y != 0) & (x != 0)


def sample(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The whole sample."""
    bad = element(x, y).reshape(len(x), -1).any(1)
    return np.broadcast_to(bad.reshape(-1, *[1] * (x.ndim - 1)), x.shape)


def row(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The row, along the last axis."""
    return np.broadcast_to(element(x, y).any(-1, keepdims=True), x.shape)


def sent(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The element itself, if it is sent."""
    return element(x, y) & (y != 0)


def sent_of_tensor(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What is sent of the tensor."""
    return tensor(x, y) & (y != 0)


def blocks(size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """The block of ``size`` elements, in the order of the flattened tensor."""

    def spoilt(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        flat = element(x, y).reshape(-1)
        bad = np.pad(flat, (0, -flat.size % size)).reshape(-1, size).any(1)
        return np.repeat(bad, size)[: flat.size].reshape(x.shape)

    spoilt.__name__ = f'blocks({size})'
    return spoilt


SPOILT = element, sent, row, sample, sent_of_sample, feature, tensor, sent_of_tensor

# The check.


def context(like: jax.ShapeDtypeStruct) -> Ctx:
    """A key, ids and (for same_support) six positions a sample, one of them sent as a zero."""
    n = int(np.prod(like.shape[1:]))
    indices = np.linspace(0, n - 1, min(6, n)).astype(np.int32)
    indices[1] = ~indices[1]
    rows = like.shape[0]
    return Ctx(jax.random.key(7), jnp.arange(rows), jnp.tile(indices, (rows, 1)))


class Ends(NamedTuple):
    """The two ends of a channel, each a compiled program of its own."""

    send: Callable[[np.ndarray, Tx, Ctx], tuple[Payload, Tx]]
    recv: Callable[[Payload, Rx, Ctx], tuple[Array, Rx]]
    init: Callable[[], EndStates]

    def cross(self, x: np.ndarray, tx: Tx, rx: Rx, ctx: Ctx) -> tuple[Payload, np.ndarray, Tx, Rx]:
        """One message, as bytes: the payload, what arrives, and the next states."""
        m, tx = self.send(x, tx, ctx)
        y, rx = self.recv(as_bytes(m), rx, ctx)
        return m, np.asarray(y), tx, rx


def ends(channel: Channel, like: jax.ShapeDtypeStruct) -> Ends:
    """Sender and receiver for tensors like ``like``, each compiled by itself."""
    recv = jax.jit(lambda m, rx, ctx: channel.recv(m, rx, like, ctx), compiler_options=QUICK)
    send = jax.jit(channel.send, compiler_options=QUICK)
    return Ends(send, recv, lambda: channel.init(like))


def as_bytes(payload: Payload) -> Payload:
    """The payload after a trip as bytes."""
    read = lambda a: np.frombuffer(np.asarray(a).tobytes(), a.dtype).reshape(a.shape)
    return jax.tree.map(read, payload)


def check(
    channel: str | Channel | Codec,
    law: Law = Law(),  # noqa: B008
    inputs: Mapping[str, np.ndarray] = INPUTS,
    names: Names | None = None,
) -> None:
    """Checks every law for one codec or feedback rule over ``inputs``.

    Args:
      channel: it, or its text as `jaxmp.parse` reads it.
      law: what it promises beyond the common laws.
      inputs: name to tensor; those of one shape and dtype share a compilation. `Law.alone` is
        checked if 'normal' is among them.
      names: your own codecs, as in `jaxmp.parse`.

    A codec whose field ``samples`` is ``'alone'`` is checked for `Law.alone`, too.

    Raises:
      AssertionError: naming the law and the input.
      TypeError: if ``channel`` or ``law`` is of another type.
    """
    channel = parse(channel, names) if isinstance(channel, str) else channel
    channel = direct(channel) if isinstance(channel, Codec) else channel
    if not isinstance(channel, Channel) or not isinstance(law, Law):
        raise TypeError(
            f'check({channel!r}, {law!r}): give a codec or a feedback rule, called as top_k(0.1) '
            'is, or its text, and a Law'
        )
    text = str(channel)
    compiled: dict[tuple, Ends] = {}
    results: dict[str, np.ndarray] = {}
    for name, x in inputs.items():
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        pair = compiled.setdefault((x.shape, x.dtype), ends(channel, like))
        ctx = context(like)
        tx, rx = pair.init()
        m, y, _, _ = pair.cross(x, tx, rx, ctx)
        results[name] = y
        where = f'{text} of {name}'
        came, kept = (f'{a.dtype}{list(a.shape)}' for a in (y, x))
        _keeps(came != kept, where, 'shape and dtype', f'expected {kept} as sent, came {came}')
        size, said = 8 * sum(a.nbytes for a in jax.tree.leaves(m)), bits(channel, like, ctx)
        _keeps(size != said, where, 'bits', f'jaxmp.bits says {said}, the message has {size}')
        _check_values(where, law, x.astype(np.float64), y.astype(np.float64), x.dtype)
        if law.idempotent and np.isfinite(x.astype(np.float64)).all():
            tx, rx = pair.init()
            again = pair.cross(y, tx, rx, ctx)[1]
            _keeps(again != y, where, 'idempotent', 'expected C(C(x)) = C(x) to the bit, differs')

    promised = channel.codec.samples == 'alone' and channel == direct(channel.codec)
    if law.alone or promised:
        _check_alone(text, results)


def _check_alone(text: str, results: dict[str, np.ndarray]) -> None:
    if 'normal' not in results:
        return
    for name in {'outlier', 'largest', 'nan', 'inf'} & results.keys():
        touched = results[name] != results['normal']
        touched[BAD[0]] = False
        say = f'other samples are not touched by sample {BAD[0]}; they changed'
        _keeps(touched, f'{text} of {name}', 'alone', say)


def _keeps(broken: np.ndarray | bool, where: str, law: str, text: str) -> None:
    """Raises AssertionError with a law, what was expected and what came, and where it is broken."""
    count, first = np.size(broken), np.argwhere(broken)[:1].tolist()
    places = f' in {np.sum(broken)} of {count} elements, first {first}' if count > 1 else ''
    assert not np.any(broken), f'{where}: law {law}: {text}{places}'


def _check_values(where: str, law: Law, x: np.ndarray, y: np.ndarray, dtype: np.dtype) -> None:
    nans = ~np.isfinite(y)
    if not np.isfinite(x).all():
        if law.spoilt is not None:
            expected, source = law.spoilt(x, y), np.argwhere(~np.isfinite(x))[0].tolist()
            fits = [f.__name__ for f in SPOILT if np.array_equal(f(x, y), nans)]
            name, meant = getattr(law.spoilt, '__name__', law.spoilt), [*fits, 'f(x, y) -> mask'][0]
            cure = f'if it is to, say Law(spoilt={meant})' if nans.any() else 'let NaN survive'
            say = f'{x[tuple(source)]} in element {source} may spoil {np.sum(expected)} elements, '
            say += f'it spoilt {nans.sum()}; {cure}; they differ'
            _keeps(nans != expected, where, f'spoilt={name}', say)
        return
    _keeps(nans, where, 'finite', 'a finite x arrives finite; mind a scale of 0 and overflow; NaN')
    info = jnp.finfo(dtype)
    rounding = 0.0 if dtype == np.float32 else float(info.eps)
    if law.bound is not None:
        bound = np.broadcast_to(law.bound(x), x.shape)
        slack = float(info.tiny) if np.any(bound) else 0.0
        excess = np.abs(x - y) - bound - rounding * (np.abs(x) + bound) - slack
        i = np.unravel_index(excess.argmax(), x.shape)
        worst = f'where C({x[i]:.6g}) is {y[i]:.6g} it exceeds {bound[i]:.6g} by {excess[i]:.3g};'
        _keeps(excess > 0, where, 'bound', f'an error is within its bound; {worst} too large')
    if law.kept is not None:
        lost, all_ = (np.square(a).reshape(len(a), -1).sum(1) for a in (x - y, x))
        most, came = 1 - law.kept, (lost / np.maximum(all_, info.tiny)).max()
        say = f'|x - C(x)|^2 is at most {most:.6g} |x|^2 in a sample, and came as {came:.6g};'
        _keeps(lost > most * all_, where, f'kept={law.kept}', f'{say} too much was lost')
