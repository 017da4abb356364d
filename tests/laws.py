"""The codecs and rules of the package as laws over a table SPECS x INPUTS; see `jaxmp.testing`."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp import Channel, Codec, Ctx, Like, parse, testing
from jaxmp.feedback import direct
from jaxmp.testing import *  # noqa: F403
from jaxmp.testing import (
    QUICK,
    Law,
    _check_alone,
    _check_values,
    as_bytes,
    blocks,
    context,
    element,
    feature,
    sample,
    sent,
    sent_of_sample,
    sent_of_tensor,
    tensor,
)
from jaxmp.wire import Need

ends = lru_cache(64)(testing.ends)  # tests of one channel share its programs

EPS = 2.0**-23
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


def row_steps(bits: int, size: int) -> Callable[[np.ndarray], Any]:
    """`steps` of each run of ``size`` elements."""

    def bound(x: np.ndarray) -> np.ndarray:
        runs = np.split(x.reshape(-1), range(size, x.size, size))
        return np.concatenate([np.full(r.size, steps(bits)(r)) for r in runs]).reshape(x.shape)

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


def microscaled(mantissa: int, least: int, most: float) -> Callable[[np.ndarray], Any]:
    """Rounding to a small float times the power of two of a block of 32, which saturates."""

    def bound(x: np.ndarray) -> np.ndarray:
        rows = np.abs(np.pad(x.reshape(-1), (0, -x.size % 32)).reshape(-1, 32))
        below = np.log2(np.maximum(rows.max(1, keepdims=True), 1e-300))
        finest = -126 - least + mantissa
        unit = 2.0 ** np.maximum(np.floor(below) - np.floor(np.log2(most)), finest)
        step = np.maximum(rows, unit * 2.0**least) * 2.0**-mantissa
        each = np.maximum(step / 2, rows - most * unit)
        return each.reshape(-1)[: x.size].reshape(x.shape)

    return bound


def nvfp4(x: np.ndarray) -> np.ndarray:
    """Rounding to E2M1, whose scale is rounded to 4 bits, or to a step of the tensor's."""
    rows = np.abs(np.pad(x.reshape(-1), (0, -x.size % 16)).reshape(-1, 16))
    most = rows.max(1, keepdims=True)
    finest = max(rows.max() / 2688, 2.0**-116) * 2.0**-10
    unit = most / 6 * (1 + 2.0**-4) + finest
    each = np.maximum(rows, unit) / 4 + 2.0**-4 * most + 6 * finest
    return each.reshape(-1)[: x.size].reshape(x.shape)


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


def companded(bits: int) -> Callable[[np.ndarray], Any]:
    """Half a step of the inverse hyperbolic sine over a quarter of the mean magnitude."""

    def bound(x: np.ndarray) -> np.ndarray:
        a = np.abs(x).reshape(len(x), -1)
        knee = a.mean(1, keepdims=True) / 4 * (1 + 2.0**-7) + 1e-35
        ratio = 2 ** (1 / 8) * (1 + 2.0**-7) * a.max(1, keepdims=True) / knee
        step = np.arcsinh(np.maximum(ratio, 1)) / (2 ** (bits - 1) - 0.5)
        u = np.arcsinh(a / knee * (1 + 2.0**-7))
        return (knee * (np.sinh(u + step / 2) - np.sinh(u)) + 0.01 * a).reshape(x.shape)

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
    'lloyd(3)': Law(None, sample, kept=0.0, alone=True),
    'trellis(2, 4)': Law(None, sample, kept=0.0, alone=True),
    'mx(4)': Law(microscaled(1, 0, 6.0), blocks(32), True, kept=0.0),
    'nvfp4': Law(nvfp4, blocks(16), kept=0.0),
    'log_scale(4)': Law(relative_steps(4), sent_of_sample, alone=True),
    'asinh(5)': Law(companded(5), sample, kept=0.0, alone=True),
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
    'klt(3, refresh=2)': Law(),
    'klt(2, refresh=2, entropy=True)': Law(),
    'klt(2, refresh=2, entropy=True, trellis=True)': Law(),
    'outliers(lloyd(4))': Law(alone=True),
    'outliers(klt(2, refresh=2), scaled=False)': Law(),
}
FLOAT32_SPECS: dict[str, Law] = {
    **{f'uniform({b})': Law(steps(b), tensor, True) for b in (1, 2, 3, 5, 6, 7, 8)},
    **{f'max_scaled({b})': Law(scaled(b), feature) for b in (2, 3, 5, 6, 7, 8)},
    **{f'block({b})': Law(block_steps(b), blocks(64)) for b in (1, 2, 3, 5, 6, 7, 8)},
    'block(2, size=32)': Law(block_steps(2, 32), blocks(32)),
    **{f'log_scale({b})': Law(relative_steps(b), sent_of_sample) for b in (2, 3, 5, 6, 7, 8)},
    'k_means(2)': Law(None, sample, kept=0.0),
    'k_means(4)': Law(None, sample, kept=0.0),
    'lloyd(1)': Law(None, sample, kept=0.0),
    'lloyd(2, signed=False)': Law(None, sample),
    'lloyd(5)': Law(None, sample, kept=0.0),
    'lloyd(2, unbiased=True)': Law(None, sample),
    'mx(6)': Law(microscaled(3, 0, 7.5), blocks(32), True, kept=0.0),
    'mx(8)': Law(microscaled(3, -6, 448.0), blocks(32), True, kept=0.0),
    'spikes(max_scaled(4), 3, values=fp16)': Law(None, element),
    'spikes(uniform(4), 2)': Law(steps(4), element),
    'spikes(uniform(4), 1000)': Law(nothing, element, True, 1.0),
    'outliers(uniform(4), tokens=1, channels=0, scaled=False)': Law(),
    'outliers(trellis(2), causal=True)': Law(alone=True),
    'outliers(raw, 3, 10, values=raw, scaled=False)': Law(
        half_ulp(8, 1e-38, float(jnp.finfo(jnp.bfloat16).max))
    ),
    'trellis(1)': Law(None, sample, kept=0.0),
    'trellis(3, unbiased=True)': Law(None, sample),
    'rotate(lloyd(2), 64)': Law(None, blocks(64)),
    'top_k(1.0)': Law(nothing, element, True, 1.0),
    'top_k(0.001, indices=int32)': Law(itself, sent, True, 0.001),
    'top_k(0.1, values=fp16, indices=packed)': Law(None, element, True),
    'top_k(0.3, values=uniform(4), indices=block_local)': Law(None, sent_of_tensor),
    'polar_sign(0.5, 16, randomised)': Law(None, blocks(16)),
    'polar(0.5, 16, scl(2))': Law(None, blocks(16)),
    'rotate(fp16, 64)': Law(None, blocks(64)),
    'dct(fp16, 64)': Law(None, blocks(64)),
    'dct(per_chunk(top_k(0.1), 128), 16)': Law(None, None),
    'rotate(polar(0.5, 32), 32)': Law(None, blocks(32)),
    'top_k(0.3, values=polar(0.5, 32))': Law(),
    'ef(polar(0.25, 32))': Law(None, blocks(32)),
    'random_k(0.3)': Law(itself, sent, True, alone=True),
    'per_token(top_k(0.1))': Law(itself, element, True),
    'per_token(uniform(4))': Law(None, blocks(43), True),
    'per_sample(uniform(4))': Law(None, sample, True),
    'per_chunk(top_k(0.1), 128)': Law(itself, element, True),
    'per_chunk(uniform(4), 50)': Law(row_steps(4, 50), blocks(50), True),
    'per_chunk(top_k(0.25, values=k_means(2), indices=elias_fano), 64)': Law(None, None),
    'per_chunk(max_scaled(4), 5000)': Law(None, element),
    'adaptive(lloyd(2), lloyd(4))': Law(None, sample, kept=0.0),
    'per_chunk(adaptive(lloyd(1), mx(4)), 32)': Law(None, blocks(32)),
    'random_k(0.3, values=uniform(2, stochastic))': Law(),
    'unbiased_random_k(1.0)': Law(nothing, element, True, 1.0),
    'as_bool': Law(),
    'qsgd(3)': Law(of_the_norm(3), alone=True),
    'qsgd(100)': Law(of_the_norm(100)),
    'ef(one_bit)': Law(None, sample),
    'same_support(values=fp16)': Law(None, sent, True),
    'ef21(top_k(0.1, values=fp16, indices=bitmap))': Law(None, element),
}

# Every rule of `jaxmp.spec.RULES`, for tensors (4, 8, 6) of words 0 .. 6 and examples 0 .. 8.
CHANNELS = (
    *('top_k(0.1)', 'ef(uniform(4))', 'ef(random_k(0.3), decay=0.9)', 'ef(top_k(0.2, bf16))'),
    *('direct(bf16)', 'ef21(top_k(0.3))', 'ef21(log_scale(3))', 'ef21(random_k(0.5))'),
    *('ef_mixed(top_k(0.2))', 'ef_mixed(top_k(0.4, values=uniform(4)), accumulate=True)'),
    *('aqsgd(raw, 9)', 'aqsgd(block(3, 32), 9, table=4)', 'aqsgd(log_scale(4), 9, table=2)'),
    *('anchored(fp16, 7)', 'anchored(block(3, 32), 7, window=4, pairs=14, triples=9)'),
    *('anchored(raw, 7, target=True)', 'klt(2, refresh=2)', 'klt(2, refresh=1, by_sample=True)'),
    *('klt(2, refresh=2, entropy=True, patch=2)', 'klt(2, refresh=2, by_gradient=0.3)'),
    *('outliers(klt(2, refresh=2), scaled=False)', 'outliers(ef(lloyd(2)))'),
    'klt(2, refresh=2, entropy=True, fixed=True, middle=True)',
)
# Every word of `jaxmp.exchange.RULES`.
EXCHANGES = (
    *('mean', 'all_reduce(fp16)', 'all_reduce(ef(random_k(0.5)))', 'all_gather(qsgd(4))'),
    *('all_gather(ef(one_bit))', 'all_gather(ef(random_k(0.2)))', 'all_gather(ef21(top_k(0.1)))'),
    *('scatter_gather(ef(one_bit), ef21(uniform(4)))', 'double_squeeze(one_bit)', 'power_sgd(2)'),
    *('dgc(0.01)', 'momentum(all_gather(ef21(top_k(0.1))), 0.5)', 'demo(0.1, 0.9)'),
    *('per_layer(power_sgd(1), 0)', 'bucketed(all_gather(ef(top_k(0.1))), 100)'),
    'per_layer(all_gather(ef(one_bit)), smallest=100)',
    *('frozen_adam(double_squeeze(one_bit))', 'local_sgd(2)'),
    *('diloco(2, all_gather(ef(one_bit)))', 'diloco(1, mean, outer=sgd(0.5))'),
    'diloco(2, power_sgd(1), outer=nesterov(0.5, 0.9), fragments=2, delay=1, mix=0.5)',
)


def donate(state: Any) -> None:
    """Gives all arrays to a step that overwrites them; raises if two of them are one."""
    step = partial(jax.tree.map, lambda a: a + 1)
    jax.block_until_ready(jax.jit(step, donate_argnums=0, compiler_options=QUICK)(state))


# Words over a codec that draws random numbers.
DRAWING = tuple(
    form.format('uniform(4, rounding=stochastic)')
    for form in (
        *('top_k(0.3, values={})', 'random_k(0.3, values={})', 'unbiased_random_k(0.3, values={})'),
        *('per_sample({})', 'per_token({})', 'per_chunk({}, 10)', 'dct({}, 8)', 'spikes({}, 2)'),
        *('spikes(raw, 2, values={})', 'adaptive(raw, {})', 'adaptive({}, raw)', 'rotate({}, 8)'),
        *(
            'outliers({})',
            'same_support(values={})',
            'ef_mixed(top_k(0.2, values={}))',
            'aqsgd({}, 9, table=4)',
        ),
    )
)


WRAPPERS: dict[str, Callable[[np.ndarray], list[np.ndarray]]] = {
    'per_token': lambda x: list(x.reshape(-1, 1, x.shape[-1])),
    'per_sample': lambda x: list(x[:, None]),
    'per_chunk': lambda x: [r[None] for r in np.split(x.reshape(-1), range(64, x.size, 64))],
}


def one_of_each_word() -> dict[str, Codec]:
    """The first codec of the tables that each word makes."""
    words = {text.partition('(')[0]: text for text in reversed((SPECS | FLOAT32_SPECS).keys())}
    joined = 'top_k(0.3, values=uniform(4), indices=block_local)', 'spikes(uniform(4), 2)'
    channels = {text: parse(text) for text in (*words.values(), *joined)}
    return {t: c.codec for t, c in channels.items() if c == direct(c.codec)}


def all_together(codecs: Mapping[str, Codec]) -> Callable[[Any, Ctx], dict[str, Any]]:
    """What each codec decodes of its message, in one program."""

    def cross(x: Any, ctx: Ctx) -> dict[str, Any]:
        return {t: c.decode(c.encode(x, ctx), jaxmp.like(x), ctx) for t, c in codecs.items()}

    return jax.jit(cross, compiler_options=QUICK)


def check_rows(wrapper: str, codecs: Mapping[str, Codec]) -> None:
    """Checks that a word which makes rows codes each row by itself, as ``codec`` alone does.

    Args:
      wrapper: a key of `WRAPPERS`.
      codecs: texts and codecs that do not compare samples; those that need a context are checked
        to leave a row as it is when others change.

    Raises:
      AssertionError: naming the wrapper and the codec.
    """
    x = np.random.default_rng(4).standard_normal((3, 2, 70)).astype(np.float32)
    cut, make = WRAPPERS[wrapper], getattr(jaxmp, wrapper)
    size = (64,) if wrapper == 'per_chunk' else ()
    other = x.copy()
    for row in cut(other)[1::2]:  # views of it
        row *= 9
        row += 5
    wrapped = all_together({t: make(c, *size) for t, c in codecs.items()})
    results = [wrapped(a, Ctx(jax.random.key(3))) for a in (x, other)]
    for text in codecs:
        rows, changed = (cut(np.asarray(r[text])) for r in results)
        for a, b in zip(rows[::2], changed[::2], strict=True):
            assert (a == b).all(), f'{wrapper} of {text}: a row depends on the others'
    keyless = {t: c for t, c in codecs.items() if 'key' not in c.needs}
    for joined in True, False:
        some = {t: c for t, c in keyless.items() if (c.samples == 'joined') == joined}
        alone = all_together(some)
        for i, row in enumerate(cut(x)):
            short = 0 if joined or wrapper != 'per_chunk' else 64 - row.size
            want = alone(np.pad(row, ((0, 0),) * (row.ndim - 1) + ((0, short),)), Ctx())
            for text, y in want.items():
                made = cut(np.asarray(results[0][text]))[i]
                same = made == np.asarray(y)[..., : row.shape[-1]]
                assert same.all(), f'{wrapper} of {text}: row {i} is not that of the codec alone'


def check_needs(channels: Mapping[str, Channel], like: Like, full: Ctx) -> None:
    """Checks that ``needs`` is what a crossing reads of its context, and ``state_of`` is true.

    Without what it does not need a crossing has the same bits; without a need it is refused, or
    `klt` sends another book. A channel belongs to nothing if and only if it has no state.

    Args:
      channels: by text.
      like: of the tensor, with a float32.
      full: a context with all fields.

    Raises:
      AssertionError: naming the channel.
    """
    x = jax.random.normal(jax.random.key(1), like.shape)

    def cross(channel: Channel, ctx: Ctx) -> Any:
        tx, rx = channel.init(like)
        message, tx = channel.send(x, tx, ctx)
        return tx, channel.recv(message, rx, like, ctx)

    def without(ctx: Ctx, fields: Iterable[str]) -> Ctx:
        return ctx._replace(**dict.fromkeys(fields))

    def crossed(less: bool, fields: Mapping[str, Iterable[str]]) -> dict[str, Any]:
        """The crossings in one program, with less of the context or all of it."""
        run = lambda ctx: {
            t: cross(channels[t], without(ctx, f) if less else ctx) for t, f in fields.items()
        }
        return jax.jit(run, compiler_options=QUICK)(full)

    needs = frozenset(get_args(Need))
    spared = {t: needs - c.needs for t, c in channels.items()}
    want, got = crossed(False, spared), crossed(True, spared)
    for text, channel in channels.items():
        same = jax.tree.map(np.array_equal, want[text], got[text])
        assert all(jax.tree.leaves(same)), f'{text} reads more than {sorted(channel.needs)}'
        state = bool(jax.tree.leaves(jax.eval_shape(channel.init, like)))
        assert state == bool(channel.state_of), f'{text} has a state of {channel.state_of!r}'
        for need in channel.needs:
            try:
                less = crossed(True, {text: [need]})[text]
            except ValueError:
                continue
            same = jax.tree.map(np.array_equal, want[text], less)
            assert not all(jax.tree.leaves(same)), f'{text} does not need {need}'


def check_together(laws: Mapping[str, Law], inputs: Mapping[str, np.ndarray]) -> None:
    """Checks the values of codecs in one program for all of them, for long tensors.

    Args:
      laws: codec texts and what they promise.
      inputs: name to tensor, all of one shape and dtype.

    Raises:
      AssertionError: naming the law, the codec and the input.
    """
    codecs = {text: parse(text).codec for text in laws}

    def decode(ms: dict[str, Any], like: Any, ctx: Ctx) -> Any:
        return {t: c.decode(ms[t], like, ctx) for t, c in codecs.items()}

    def encode(x: Any, ctx: Ctx) -> dict[str, Any]:
        return {t: c.encode(x, ctx) for t, c in codecs.items()}

    normal = inputs['normal']
    like = jax.ShapeDtypeStruct(normal.shape, normal.dtype)
    results = {}
    send = jax.jit(encode, compiler_options=QUICK)
    recv = jax.jit(lambda ms, ctx: decode(ms, like, ctx), compiler_options=QUICK)
    for name, x in inputs.items():
        m = as_bytes(send(x, context(like)))
        results[name] = jax.tree.map(np.asarray, recv(m, context(like)))
    for text, law in laws.items():
        for name, x in inputs.items():
            y = results[name][text].astype(np.float64)
            _check_values(f'{text} of {name}', law, x.astype(np.float64), y, x.dtype)
        if law.alone:
            _check_alone(text, {name: ys[text] for name, ys in results.items()})
