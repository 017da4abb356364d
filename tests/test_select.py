"""Laws of exact selection: the index set is `lax.top_k`'s on every kind of row."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from jaxmp.codecs import select
from tests.laws import QUICK

TOP_K_KINDS = {  # rows without NaN, which lax.top_k orders by its own rule
    'normal': lambda r, n: r.standard_normal(n),
    'relu': lambda r, n: np.maximum(r.standard_normal(n), 0),
    'sparse': lambda r, n: np.maximum(r.standard_normal(n) - 2, 0),
    'tied': lambda r, n: np.round(2 * r.standard_normal(n)),
    'equal': lambda r, n: np.full(n, -1.5),
    'zero': lambda r, n: np.where(r.random(n) < 0.5, 0.0, -0.0),
    'denormal': lambda r, n: 1e-40 * r.standard_normal(n),
    'outlier': lambda r, n: np.where(np.arange(n) == n // 2, 6e4, 1e-3 * r.standard_normal(n)),
    'infinite': lambda r, n: np.where(r.random(n) < 0.2, -np.inf, r.standard_normal(n)),
}
KINDS = TOP_K_KINDS | {'nan': lambda r, n: np.where(r.random(n) < 0.2, np.nan, np.inf)}

CASES = [
    *((n, k, 'float32') for n, k in [(1, 1), (5, 1), (33, 33), (288, 287), (65536, 6554)]),
    *((4117, 411, dtype) for dtype in ('float32', 'float16', 'bfloat16', 'float64')),
]


def rows(kinds, n, dtype='float32'):
    r = np.random.default_rng(n)
    return jnp.stack([jnp.asarray(make(r, n)) for make in kinds.values()]).astype(dtype)


def largest(x, k):
    """Sorted index sets by a stable sort of magnitudes: the lowest index wins a tie."""
    magnitude = np.abs(np.asarray(x).astype(np.float64))
    order = [np.lexsort((np.arange(len(m)), -np.nan_to_num(m), ~np.isnan(m))) for m in magnitude]
    return np.sort(np.stack(order)[:, :k], axis=1)


def packed(at, n):
    mask = np.zeros((len(at), -(-n // 32) * 32), bool)
    np.put_along_axis(mask, at, True, axis=1)
    return np.packbits(mask, axis=1, bitorder='little').view('<u4')


def message(x, k):
    words = select.k_largest(x, k)
    support = select.positions(words, k)
    values = select.gather(x, support)
    n = x.shape[1]
    return words, support, values, select.scatter(values, support, n), select.bitmap(support, n)


def dense(x, k):
    return message(x, k)[3]


# Integer work, so that a compilation in a hurry may stand for one as usual.
quick = partial(jax.jit, compiler_options=QUICK)
quick_message = quick(message, static_argnums=1)
quick_dense = quick(dense, static_argnums=1)


@pytest.mark.parametrize(('n', 'k', 'dtype'), CASES)
def test_message(n, k, dtype):
    with jax.enable_x64(dtype == 'float64'):
        x = rows(KINDS, n, dtype)
        at = largest(x, k)
        run = jax.jit(message, static_argnums=1) if n == 65536 else quick_message  # as users do
        words, support, values, back, again = run(x, k)
    assert (words.dtype, support.dtype, again.dtype) == ('uint32', 'int32', 'uint32')
    assert values.dtype == back.dtype == dtype
    np.testing.assert_array_equal(words, packed(at, n))
    np.testing.assert_array_equal(again, words)
    np.testing.assert_array_equal(support, at)

    wide = np.asarray(x).astype(np.float64)
    kept = np.take_along_axis(wide, at, 1)
    np.testing.assert_array_equal(np.asarray(values).astype(np.float64), kept)
    expected = np.zeros_like(wide)
    np.put_along_axis(expected, at, kept, 1)
    np.testing.assert_array_equal(np.asarray(back).astype(np.float64), expected)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_agrees_with_top_k(dtype):
    x = rows(TOP_K_KINDS, 1000, dtype)
    wide = np.abs(np.asarray(x).astype(np.float32))  # of bfloat16, some CPUs flush the smallest
    at = np.sort(jax.jit(lax.top_k, static_argnums=1)(wide, 100)[1], axis=1)
    np.testing.assert_array_equal(quick_message(x, 100)[1], at)


def test_formulations_agree():
    """What runs on other backends, all rows at once, gives what the CPU's row by row gives."""
    x = rows(KINDS, 1000)
    words = quick(jax.vmap(partial(select._k_largest, k=100, count=select._count)))(select._bits(x))
    support = quick(jax.vmap(partial(select._positions, k=100)))(words)
    np.testing.assert_array_equal(words, quick_message(x, 100)[0])
    np.testing.assert_array_equal(support, quick_message(x, 100)[1])


@pytest.mark.parametrize('density', [0.0, 0.5, 1.0])
def test_positions_of_any_bitmap(density):
    """Also with long runs of empty words, of full words, and beyond one block of words."""
    mask = np.random.default_rng(0).random(5000) < density
    mask[[0, 4999]] = True
    at = np.flatnonzero(mask)[None]
    listed = quick(select.positions, static_argnums=1)(packed(at, 5000), at.shape[1])
    np.testing.assert_array_equal(listed, at)


def test_more_hits_than_a_byte_or_a_short_counts():
    n, k = 2**17, 70_000
    words = quick(select.k_largest, static_argnums=1)(jnp.full((1, n), 3.0), k)
    np.testing.assert_array_equal(words, packed(np.arange(k)[None], n))


def test_vmap():
    x = rows(KINDS, 200)
    both = quick(jax.vmap(partial(dense, k=20)))(jnp.stack([x, x[::-1]]))
    one = quick_dense(x, 20)
    np.testing.assert_array_equal(both, jnp.stack([one, one[::-1]]))


@pytest.mark.parametrize('check_vma', [True, False])
def test_shard_map(check_vma):
    devices = len(jax.devices())
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((devices,), ('batch',), axis_types=auto)
    x = jnp.tile(rows(KINDS, 200), (devices, 1))
    batch = PartitionSpec('batch')
    shards = partial(jax.shard_map, mesh=mesh, in_specs=batch, out_specs=batch)
    out = quick(shards(partial(dense, k=20), check_vma=check_vma))(x)
    np.testing.assert_array_equal(out, quick_dense(x, 20))


def test_sits_inside_a_gradient():
    @jax.custom_vjp
    def keep(x):
        return dense(x, 20)

    keep.defvjp(lambda x: (keep(x), None), lambda _, g: (dense(g, 20),))
    x = rows({'normal': KINDS['normal'], 'sparse': KINDS['sparse']}, 200)
    gradient = quick(jax.grad(lambda x: jnp.sum(keep(x) ** 2)))(x)
    np.testing.assert_array_equal(gradient, 2 * quick_dense(x, 20))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_lowers_for_cuda(dtype):
    like = jax.ShapeDtypeStruct((4, 300), dtype)
    exported = jax.export.export(jax.jit(partial(message, k=30)), platforms=['cuda'])(like)
    assert exported.platforms == ('cuda',)
    shapes = [out.shape for out in exported.out_avals]
    assert shapes == [(4, 10), (4, 30), (4, 30), (4, 300), (4, 10)]


@pytest.mark.parametrize(
    ('n', 'fraction', 'k'),
    [
        (65536, 0.1, 6554),
        (65536, 0.05, 3277),
        (65536, 0.02, 1311),
        (288, 0.05, 15),
        (7, 1.0, 7),
        (1, 0.01, 1),
    ],
)
def test_count(n, fraction, k):
    assert select.count(n, fraction) == k


@pytest.mark.parametrize('k', [0, 11])
def test_k_out_of_range(k):
    with pytest.raises(ValueError, match=f'rows of 10 entries needs 1 <= k <= n, got k = {k}'):
        select.k_largest(jnp.zeros((1, 10)), k)


@pytest.mark.parametrize(
    ('n', 'k', 'dtype'),
    [(1, 1, 'float32'), (5, 4, 'float32'), (72, 3, 'float32'), (577, 4, 'bfloat16')],
)
def test_few_of_a_row_are_found_as_many_are(n, k, dtype):
    x = rows(KINDS, n, dtype)
    found = jax.jit(partial(select.few_largest, k=k), compiler_options=QUICK)(x)
    np.testing.assert_array_equal(found, largest(x, k))
