"""Laws of the codecs over the tables of tests/laws.py, and what single codecs promise besides."""

import contextlib
import itertools
import re
import zlib
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.fft

import jaxmp
from jaxmp import Ctx, codecs, testing
from jaxmp.codecs import dependent, extremes, polarsearch, rans, select
from jaxmp.codecs.polarcode import Code
from jaxmp.contrib.dct import cosines, of_cosines
from jaxmp.grammar import sinks
from jaxmp.wire import pack, unpack
from tests import laws
from tests.base import slow


@pytest.mark.parametrize(
    'text', slow(laws.SPECS, lambda text: re.search('klt|ef_mixed|0.4|aqsgd|128', text))
)
def test_laws(text):
    laws.check(text, laws.SPECS[text])


BETWEEN = re.compile(r'(uniform|max_scaled|block|log_scale)\([3567]\)')  # the other widths


@pytest.mark.parametrize('text', slow(laws.FLOAT32_SPECS, BETWEEN.fullmatch))
def test_laws_float32(text):
    laws.check(text, laws.FLOAT32_SPECS[text], laws.FLOAT32)


def test_a_law_of_samples_alone_without_a_normal_tensor_to_compare_with():
    testing.check('fp16', testing.Law(alone=True), {'nan': testing.FLOAT32['nan']})


@pytest.mark.slow
@pytest.mark.parametrize('wrapper', laws.WRAPPERS)
def test_laws_of_rows(wrapper):
    """Of codecs that compare samples see `test_the_wider_codec_is_for_wide_ranges`."""
    codecs = laws.one_of_each_word()
    assert {c.samples for c in codecs.values()} == {'alone', 'joined', 'compared'}
    spared = [t for t, c in codecs.items() if c.samples == 'compared' or 'same_support' in t]
    laws.check_rows(wrapper, {t: c for t, c in codecs.items() if t not in spared})


def test_random_rows_are_not_alike():
    for text in 'per_token(uniform(1, stochastic))', 'per_chunk(uniform(1, stochastic), 70)':
        y = round_trip(
            text, np.tile(np.linspace(0, 1, 70, dtype='f4'), (2, 4, 1)), Ctx(jax.random.key(0))
        )
        assert len(np.unique(y.reshape(8, 70), axis=0)) == 8


def test_a_gradient_knows_the_positions_of_each_row():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 10)), jnp.float32)
    rows = (
        jaxmp.parse(f'per_token({c}values=uniform(8)))') for c in ('top_k(0.2, ', 'same_support(')
    )
    cut = jaxmp.boundary(*rows)

    @jax.jit
    def both(x):
        y, pull = jax.vjp(lambda x: cut.cross(x, cut.init(x))[0], x)
        return y, pull(jnp.ones_like(y))[0]

    y, gradient = both(x)
    assert ((y != 0).sum(-1) == 2).all()
    np.testing.assert_array_equal(gradient, y != 0)


def test_a_law_of_samples_is_checked_where_a_codec_promises_it():
    promising = jaxmp.uniform(4)._replace(samples='alone')
    with pytest.raises(AssertionError, match='other samples are not touched'):
        testing.check(promising, inputs=testing.FLOAT32)


@pytest.mark.parametrize('given', [(3,), (None,), (jaxmp.top_k,), ('fp16', 0.1)])
def test_what_is_no_codec_or_no_law_is_told(given):
    with pytest.raises(TypeError, match=r'^check\(.*\): give a codec .*, or its text, and a Law$'):
        testing.check(*given)


LONG = (  # those that scale by the extremes, a sum or a norm of many numbers, and a few others
    *('uniform(4)', 'uniform(4, rounding=stochastic)', 'max_scaled(4)', 'block(4)', 'block(8)'),
    *('log_scale(4)', 'log_scale(2)', 'top_k(0.4, values=log_scale(4), indices=bitmap)'),
    *('top_k(0.3, values=uniform(4), indices=block_local)', 'one_bit', 'natural', 'qsgd(3)'),
    *('polar(0.5, block=32)', 'rotate(fp16, 64)', 'fp16', 'same_support(values=fp16)'),
)


@pytest.mark.slow
@pytest.mark.parametrize('inner', [(32, 64), (256, 256)])
def test_laws_of_long_samples(inner):
    """XLA reduces rows of some 2,000 elements in pieces; the tables' samples have 301."""
    table = laws.SPECS | laws.FLOAT32_SPECS
    laws.check_together({text: table[text] for text in LONG}, laws.special(inner))


def round_trip(text, x, ctx=None):
    """``C(x)`` through two programs."""
    pair = laws.ends(jaxmp.parse(text), jaxmp.like(x))
    return pair.cross(x, *pair.init(), Ctx() if ctx is None else ctx)[1]


# Bit packing.


@pytest.mark.parametrize(
    ('shape', 'widths'), [((2, 9), range(1, 32)), ((64,), (1, 3, 6, 12, 17))], ids=str
)
def test_pack_inverts_and_counts_bytes(shape, widths):
    """Along the last axis, which is padded to whole runs."""
    count = shape[-1]
    codes = np.random.default_rng(count).integers(0, 2**31, shape, dtype=np.uint32)
    codes = {w: np.where(np.arange(count) == 0, 2**w - 1, codes >> (31 - w)) for w in widths}

    @partial(jax.jit, compiler_options=laws.QUICK)
    def both(codes):
        packed = {w: pack(c.astype(np.uint32), w) for w, c in codes.items()}
        return packed, {w: unpack(p, w, count) for w, p in packed.items()}

    packed, back = both(codes)
    for width in widths:
        p, b = packed[width], back[width]
        assert p.dtype == np.uint8
        assert p.shape == (*shape[:-1], packed_bytes(count, width))
        assert b.dtype == (np.uint8 if width <= 8 else np.uint16 if width <= 16 else np.uint32)
        np.testing.assert_array_equal(b, codes[width])


def packed_bytes(count, width):
    """The lowest set bit of the width is its smallest part, which sets the number of runs."""
    runs = max(1, 8 // (width & -width))
    return -(-count // runs) * runs * width // 8


def test_pack_of_bytes_and_of_int32():
    codes = np.arange(16) % 8
    packed = [pack(jnp.asarray(codes, dtype), 3) for dtype in ('uint8', 'int32')]
    np.testing.assert_array_equal(*packed)
    assert packed[0].size == 6


# Positions.

CODINGS = ('int32', 'packed', 'bitmap', 'block_local', 'elias_fano')
SUPPORTS = {  # ascending positions below n
    'one': (1, [[0]]),
    'few': (5, [[0, 4], [2, 3]]),
    'all': (600, [range(600)]),
    'full block': (700, [[*range(256, 512), 699], [0, *range(444, 700)]]),
    'empty blocks': (1300, [[0, 1, 1299], [1297, 1298, 1299], [255, 256, 511]]),
}


@pytest.mark.parametrize('case', SUPPORTS)
def test_index_codings(case):
    n, at = SUPPORTS[case]
    at = np.asarray([list(row) for row in at], np.int32)
    rows, k = at.shape

    @partial(jax.jit, compiler_options=laws.QUICK)
    def trip(at):
        words = select.bitmap(at, n)
        sent = [getattr(codecs, name).encode(words, at, n) for name in CODINGS]
        read = [
            getattr(codecs, name).decode(m, n, k) for name, m in zip(CODINGS, sent, strict=True)
        ]
        return sent, read

    sent, read = trip(at)
    blocks, low = -(-n // 256), min(range(20), key=lambda low: k * low + ((n - 1) >> low))
    want = {
        'int32': 4 * rows * k,
        'packed': rows * packed_bytes(k, max(1, (n - 1).bit_length())),
        'bitmap': 4 * rows * -(-n // 32),
        'block_local': rows * (k + packed_bytes(blocks, 9)),
        'elias_fano': rows * 4 * -(-(k + ((n - 1) >> low)) // 32)
        + (rows * packed_bytes(k, low) if low else 0),
    }
    for name, m, back in zip(CODINGS, sent, read, strict=True):
        np.testing.assert_array_equal(back, at, err_msg=name)
        assert jaxmp.nbytes(m) == want[name], name


@pytest.mark.parametrize(
    ('text', 'bits'),
    [  # bits an element
        ('top_k(0.5, values=fp16, indices=int32)', 24.0),
        ('top_k(0.5, values=fp16, indices=bitmap)', 9.0),
        ('top_k(0.1, values=fp16, indices=int32)', 4.8),
        ('top_k(0.1, values=fp16, indices=bitmap)', 2.6),
        ('top_k(0.02, values=fp16, indices=int32)', 0.96),
        ('top_k(0.02, values=fp16, indices=bitmap)', 1.32),
        ('top_k(0.1, values=fp16, indices=packed)', 3.2),
        ('top_k(0.1, values=fp16, indices=block_local)', 2.4 + 9 / 256),
        # SparseLoCo's 64 of 4096: 10.5 bits each, positions and two levels per chunk included
        (
            'per_chunk(top_k(0.015625, values=k_means(2), indices=elias_fano), 4096)',
            10.5 * 64 / 4096,
        ),
        ('top_k(0.4, values=log_scale(4), indices=bitmap)', 2.6),
        ('ef_mixed(top_k(0.1))', 4.2),
        ('random_k(0.1)', 3.2),
        ('uniform(4)', 4.0),
        ('per_token(uniform(8))', 8 + 2 * 32 / 64),
        ('per_sample(uniform(8))', 8 + 2 * 32 / 32**2 / 64),
        ('per_chunk(uniform(4), 96)', 4 + 2 * 32 / 96),
        ('block(4, size=32)', 5.0),
        ('max_scaled(4)', 4.16),
        ('fp16', 16.0),
        ('aqsgd(uniform(2), examples=50000)', 2.0),
    ],
)
def test_bits_an_element(text, bits):
    x = jax.ShapeDtypeStruct((100, 32, 32, 64), 'float32')
    each = jaxmp.bits(jaxmp.parse(text), x) / x.size
    assert each == pytest.approx(bits, abs=2e-3)


# Selection.


def test_top_k_keeps_what_lax_top_k_keeps():
    r = np.random.default_rng(1)
    n, k = 40, 10
    rows = {
        'normal': r.standard_normal(n),
        'few': np.where(np.arange(n) % 9 == 0, 1.0, 0.0),
        'tied': np.round(r.standard_normal(n)),
        'constant': np.full(n, -2.5),
        'zeros': np.zeros(n),
        'denormal': 1e-40 * r.standard_normal(n),
        'inf': np.where(np.arange(n) == 33, -np.inf, r.standard_normal(n)),
    }
    x = np.stack(list(rows.values())).astype(np.float32)
    codec = jaxmp.parse('top_k(0.25, indices=block_local)').codec

    @partial(jax.jit, compiler_options=laws.QUICK)
    def keep(x):
        m = codec.encode(x, Ctx())
        return codec.decode(m, jaxmp.like(x), Ctx()), codec.indices(m, jaxmp.like(x), Ctx())

    y, support = keep(x)
    at = np.sort(jax.lax.top_k(jnp.abs(x), k)[1], axis=1)
    want = np.zeros_like(x)
    np.put_along_axis(want, at, np.take_along_axis(x, at, 1), 1)
    np.testing.assert_array_equal(y, want)
    np.testing.assert_array_equal(np.maximum(support, ~support), at)
    tiny = np.finfo(x.dtype).tiny  # a denormal counts as a zero, as in XLA's arithmetic on a CPU
    np.testing.assert_array_equal(support < 0, np.abs(np.take_along_axis(x, at, 1)) < tiny)


def test_values_of_a_selection_go_through_their_codec():
    x = laws.INPUTS['normal']
    flat = x.reshape(len(x), -1)
    k = select.count(flat.shape[1], 0.4)
    at = np.sort(np.argsort(-np.abs(flat), axis=1, kind='stable')[:, :k], axis=1)
    kept = round_trip('log_scale(4)', np.take_along_axis(flat, at, 1))
    want = np.zeros_like(flat)
    np.put_along_axis(want, at, kept, 1)
    y = round_trip('top_k(0.4, values=log_scale(4), indices=packed)', x)
    np.testing.assert_allclose(y, want.reshape(x.shape), rtol=1e-6)


def test_chunks_are_samples():
    """19 of 64 elements each, the last with 52 numbers; 8 of each chunk are sent."""
    x = laws.INPUTS['normal']
    text = 'top_k(0.125, values=lloyd(2), indices=packed)'
    rows = np.pad(x.reshape(-1), (0, -x.size % 64)).reshape(-1, 64)
    want = round_trip(text, rows).reshape(-1)[: x.size].reshape(x.shape)
    np.testing.assert_array_equal(round_trip(f'per_chunk({text}, 64)', x), want)
    assert ((want.reshape(-1)[:1152].reshape(18, 64) != 0).sum(1) == 8).all()


def test_the_wider_codec_is_for_wide_ranges():
    r = np.random.default_rng(3)
    scales = r.permutation(10.0 ** np.arange(11))[:, None]
    x = (r.uniform(0.5, 1, (11, 40)) * r.choice([-1, 1], (11, 40)) * scales).astype(np.float32)
    high = scales > 1e7  # int(11 * 0.75) = 8 by the narrower codec
    want = np.where(high, round_trip('lloyd(4)', x), round_trip('lloyd(1)', x))
    np.testing.assert_array_equal(round_trip('adaptive(lloyd(1), lloyd(4), 0.25)', x), want)
    low, rich = (round_trip(f'per_sample(uniform({bits}))', x) for bits in (2, 8))
    y = round_trip('adaptive(uniform(2), uniform(8), 0.25)', x)
    np.testing.assert_array_equal(y, np.where(high, rich, low))
    channel = jaxmp.parse('per_chunk(adaptive(lloyd(3), lloyd(4)), 64)')
    assert jaxmp.bits(channel, jaxmp.Like((64, 64), 'float32')) == 64 * (3.5 * 64 + 16 + 1)


SPIKY = (
    *('lloyd(1)', 'lloyd(2)', 'lloyd(3)', 'lloyd(4)', 'lloyd(5)', 'lloyd(2, unbiased=True)'),
    *('trellis(1)', 'trellis(2)', 'trellis(3)', 'trellis(2, 4)', 'trellis(2, unbiased=True)'),
)


def test_a_spike_spoils_no_more_than_the_size_of_the_others_after_a_rotation():
    """It becomes plus or minus a constant everywhere, which may lie on a threshold."""
    block = 256
    forms = {text: jaxmp.parse(f'rotate({text}, {block})').codec for text in SPIKY}
    cross = laws.all_together(forms)
    normal = np.random.default_rng(0).standard_normal((4, block)).astype(np.float32)
    for spike in (0, 3, 10, 30, 100, 1000, 1e5):
        x = normal.copy()
        x[:, 7] += spike
        for text, y in cross(x, Ctx(jax.random.key(1))).items():
            error = np.delete(np.asarray(y) - x, 7, 1)
            assert np.sqrt(np.square(error).mean()) < 2, (text, spike)


def test_real_activations_need_a_range_for_few_elements():
    """The first token of a sequence sets the range of the tensor, and the others get no level.

    Random numbers do not show it: there, 8 bits of `uniform` are finer than 4 of any codec.
    """
    with np.load(sinks.SAMPLE) as data:
        tensors = {name: data[name].astype(np.float32) for name in data}
    most = {'block(8)': 0.012, 'per_token(uniform(8))': 0.04, 'nvfp4': 0.12, 'mx(4)': 0.18}
    codecs = {text: jaxmp.parse(text).codec for text in (*most, 'uniform(8)')}
    cross = laws.all_together(codecs)
    for name, x in tensors.items():
        ys = {text: np.asarray(y) for text, y in cross(x, Ctx()).items()}
        norm = lambda a: np.sqrt(np.square(a).sum(-1))
        error = {text: np.median(norm(y - x) / norm(x)) for text, y in ys.items()}
        assert all(error[text] < bound for text, bound in most.items()), (name, error)
        if name.startswith('act'):
            assert error['uniform(8)'] > 0.9, (name, error)


def test_trellis_searches_no_longer_than_a_short_sample():
    """A block of a rotation is a sample of 64 elements, not a run of 256 of which 192 are zeros."""
    encode = jax.make_jaxpr(jaxmp.trellis(2).encode)(jaxmp.Like((10, 64), 'float32'), Ctx())
    lengths = {eqn.params['length'] for eqn in encode.eqns if eqn.primitive.name == 'scan'}
    assert lengths == {64}


def test_sparseloco_sends_64_of_4096_values_in_two_bits():
    like = jaxmp.Like((3, 64, 128), 'float32')
    text = 'per_chunk(top_k(0.015625, values=lloyd(2), indices=packed), 4096)'
    assert jaxmp.bits(jaxmp.parse(text), like) == 6 * (64 * (2 + 12) + 16)
    assert str(jaxmp.parse(text)) == text


def crossed(text):
    """``C(x)`` without `jax.jit`."""

    def cross(x, key):
        C = jaxmp.parse(text).codec
        return C.decode(C.encode(x, Ctx(key)), jaxmp.like(x), Ctx(key))

    return cross


CODE = Code(4, (2, 3))  # not all of a kind, so that the search splits it
LOOPS = {  # loops and reductions by a Python function, which JAX compiles when called by themselves
    'top_k': crossed('top_k(0.3)'),
    'lloyd': crossed('lloyd(2)'),
    'random_k': crossed('random_k(0.3)'),
    'the range of uniform and block': lambda x, key: extremes.span(x, 1),
    'the range of log_scale': lambda x, key: extremes.magnitudes(x, 1),
    'the search of polar': lambda x, key: polarsearch.successive(CODE, x),
    'its list': lambda x, key: polarsearch.successive_list(CODE, x, 2),
}


@pytest.mark.parametrize('name', LOOPS)
def test_an_eager_call_compiles_once(name, caplog):
    def call(seed):
        jax.block_until_ready(LOOPS[name](jnp.ones((4, 10)) * seed, jax.random.key(seed)))

    call(0)
    with jax.log_compiles():
        call(1)
        assert 'Compiling' not in caplog.text
        jax.jit(lambda x: x + 1)(1)
    assert 'Compiling' in caplog.text


# Chance. A variable with values in [lo, hi] has a deviation of at most (hi - lo) / 2.

DRAWS = 4000
UNBIASED = {  # E C(x) / x, and how far the ends of the range are rounded
    'uniform(2, rounding=stochastic)': (1.0, 0.0),
    'block(2, size=32, rounding=stochastic)': (1.0, 2.0**-11),
    'random_k(0.5)': (0.5, 0.0),
    'random_k(0.5, values=block(1, 32, stochastic))': (0.5, 2.0**-11),
}


def draws(text, x):
    channel = jaxmp.parse(text)

    def cross(key):
        m, _ = channel.send(x, (), Ctx(key))
        return channel.recv(m, (), jaxmp.like(x), Ctx(key))[0]

    keys = jax.random.split(jax.random.key(0), DRAWS)
    run = jax.jit(lambda keys: jax.lax.map(cross, keys), compiler_options=laws.QUICK)
    return np.asarray(run(keys), np.float64)


@pytest.mark.parametrize('text', UNBIASED)
def test_unbiased(text):
    x = np.random.default_rng(2).standard_normal((2, 20)).astype(np.float32)
    share, ends = UNBIASED[text]
    y = draws(text, x)
    width = max(x.max(), 0) - min(x.min(), 0)
    allowed = 5 * width / 2 / np.sqrt(DRAWS) + ends * np.abs(x).max()
    assert np.abs(y.mean(0) - share * x).max() <= allowed
    assert y.std(0).max() > 0.1, 'it does draw'
    if text == 'random_k(0.5)':
        assert ((y != 0).sum(2) == 10).all(), 'exactly K'
        assert ((y != 0) == (y != 0)[:, :1]).all(), 'one set for all samples'
        energy = np.square(x).sum()
        lost = np.square(x - y).sum((1, 2)).mean()
        assert abs(lost - 0.5 * energy) <= 5 * energy / 2 / np.sqrt(DRAWS)


@pytest.mark.parametrize(('codec', 'shrunk'), [('lloyd(1', 0.65), ('trellis(2', 0.92)])
def test_an_unbiased_scale_does_not_shrink(codec, shrunk):
    """Random signs before a Hadamard matrix are nearly a random rotation."""
    x = np.random.default_rng(2).standard_normal((2, 20)).astype(np.float32)
    along = lambda text: (draws(text, x).mean(0) * x).sum() / np.square(x).sum()
    assert along(f'rotate({codec}), 128)') == pytest.approx(shrunk, abs=0.01)
    assert along(f'rotate({codec}, unbiased=True), 128)') == pytest.approx(1, abs=1e-3)
    y = draws(f'rotate({codec}, unbiased=True), 128)', x)
    assert np.abs(y.mean(0) - x).max() < 0.05 * np.abs(x).max()


# Levels.


@pytest.mark.parametrize('bits', [1, 4, 8])
def test_uniform_ends_and_levels(bits):
    x = laws.INPUTS['relu'] - np.float32(0.125)
    y = round_trip(f'uniform({bits})', x)
    assert len(np.unique(y)) <= 2**bits
    assert (y.min(), y.max()) == (x.min(), x.max())
    assert (y[x == x.min()] == x.min()).all(), 'zeros of a ReLU stay one value'


def test_uniform_of_a_constant_is_exact():
    x = laws.INPUTS['constant']
    np.testing.assert_array_equal(round_trip('uniform(3)', x), x)
    np.testing.assert_array_equal(round_trip('block(3)', x), x)


def test_one_outlier_spoils_a_block_and_not_all():
    x = laws.INPUTS['outlier']
    error = np.abs(round_trip('block(8)', x) - x).reshape(-1)
    assert (error > 0.05).sum() <= 64


def test_spikes_are_exact_and_leave_the_range_to_the_rest():
    """The third of each sample is its largest other number; in the first it is an infinity."""
    x = laws.INPUTS['normal'].reshape(4, -1).copy()
    x[:, 40], x[:, 0], x[0, 99] = 1e6, -3e4, np.inf
    spike = np.zeros(x.shape, bool)
    np.put_along_axis(spike, np.argsort(-np.abs(x), 1)[:, :3], True, 1)
    y, rest = round_trip('spikes(uniform(8), 3)', x), np.where(spike, 0, x)
    np.testing.assert_array_equal(y[spike], x[spike])
    np.testing.assert_array_equal(y[~spike], round_trip('uniform(8)', rest)[~spike])
    assert np.abs(y[~spike] - x[~spike]).max() < 0.02


@pytest.mark.parametrize('bits', [2, 5])
def test_log_scale_keeps_signs_and_zeros(bits):
    x = laws.INPUTS['relu'] - laws.INPUTS['relu'][:, ::-1]
    y = round_trip(f'log_scale({bits})', x)
    np.testing.assert_array_equal(np.sign(y), np.sign(x))
    for sample in y:
        assert len(np.unique(np.abs(sample[sample != 0]))) <= 2 ** (bits - 1) - 1


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_a_sample_with_no_other_number_than_a_bad_one(bad):
    x = np.array([[bad, bad, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.float32)
    y = round_trip('log_scale(4)', x)
    np.testing.assert_array_equal(np.isnan(y[0]), [True, True, False, False])
    np.testing.assert_array_equal(y[1], 0)
    assert np.isfinite(y[2]).all()


# A mesh of Explicit axes, which `jax.make_mesh` makes by default.


def put(mesh, tree, spec):
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, spec))


@pytest.mark.parametrize('states', slow(['batch', 'everywhere'], 'batch'.__eq__))
@pytest.mark.parametrize(
    'pair', [('block(4)', 'ef(uniform(6))'), ('ef21(top_k(0.1))', 'same_support()')]
)
def test_a_boundary_crosses_explicit_axes_with_the_numbers_of_one_device(pair, states):
    cut = jaxmp.boundary(*map(jaxmp.parse, pair))
    x = jnp.asarray(laws.INPUTS['normal'].reshape(4, -1))
    w, like = jnp.full(x.shape[1], 0.5), jaxmp.like(x)

    def loss(w, feedback, x, key):
        h, feedback = cut.cross(x * w, feedback, Ctx(key))
        return jnp.mean(h**2), (feedback, None)

    step = jax.jit(jaxmp.value_and_grad(loss))

    def two_steps(w, feedback, x):
        for seed in range(2):
            _, grads, feedback = step(w, feedback, x, jax.random.key(seed))
        return grads, feedback

    want = two_steps(w, cut.init(like), x)
    mesh, over = jax.make_mesh((4,), ('data',)), jax.sharding.PartitionSpec('data')
    feedback = put(mesh, cut.init(like), over) if states == 'batch' else cut.init(like)
    for context in jax.set_mesh(mesh), contextlib.nullcontext():
        with context:
            got = two_steps(
                put(mesh, w, jax.sharding.PartitionSpec()), feedback, put(mesh, x, over)
            )
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize('text', laws.one_of_each_word())
def test_a_codec_by_itself_names_the_cure_for_explicit_axes(text):
    if text == 'raw':  # it computes nothing
        return
    x = put(
        jax.make_mesh((4,), ('data',)), laws.INPUTS['normal'], jax.sharding.PartitionSpec('data')
    )
    with pytest.raises(
        ValueError, match=r"Explicit axes \('data',\) of a mesh; send it through Bound"
    ):
        jaxmp.parse(text).codec.encode(x, laws.context(jaxmp.like(x)))


# Bad input.

SAMPLES_NEEDED = 'got shape \\(8,\\); axis 0 is the sample'
REFUSED = [  # text, shape, context, what the message says
    ('top_k(0.5)', (8,), Ctx(), SAMPLES_NEEDED),
    ('random_k(0.5)', (8,), Ctx(jax.random.key(0)), SAMPLES_NEEDED),
    ('log_scale(4)', (8,), Ctx(), SAMPLES_NEEDED),
    ('random_k(0.5)', (2, 8), Ctx(), r'random_k needs ctx.key; pass Ctx\(key=jax.random.key'),
    ('uniform(4, stochastic)', (2, 8), Ctx(), 'stochastic rounding needs ctx.key; pass Ctx'),
    ('block(4, 64, stochastic)', (2, 8), Ctx(), 'stochastic rounding needs ctx.key; pass Ctx'),
    ('same_support()', (2, 8), Ctx(), 'forward message, and it has none; use it as bwd'),
    ('aqsgd(raw, examples=4)', (2, 8), Ctx(), 'aqsgd needs ctx.ids; the data pipeline must yield'),
]


ARRAYS = {  # what came, and what the error says
    'a pytree': ({'a': np.zeros((2, 8), 'f4')}, TypeError, 'one array, got dict; send the arrays'),
    'a number': (1.0, TypeError, r'one array, got float; .* a number as jnp.array\(\[number\]\)'),
    'a scalar': (np.zeros((), 'f4'), ValueError, r'one axis .* got shape \(\); send x\[None\]'),
    'no samples': (np.zeros((0, 8), 'f4'), ValueError, r'got shape \(0, 8\); do not send empty'),
    'no elements': (
        np.zeros((4, 0), 'f4'),
        ValueError,
        r'got shape \(4, 0\); do not send empty',
    ),
    'float8': (np.zeros((2, 8), jnp.float8_e4m3fn), TypeError, 'got float8_e4m3fn; send x.astype'),
    'complex': (
        np.zeros((2, 8), 'c8'),
        TypeError,
        r'got complex64; send jnp.stack\(\[x.real, x.im',
    ),
    'integers': (np.zeros((2, 8), 'i4'), TypeError, 'float64, got int32; send x.astype'),
    'truths': (np.zeros((2, 8), bool), TypeError, 'float64, got bool; send x.astype'),
}
TAKERS = (
    *('fp16', 'uniform(4)', 'max_scaled(4)', 'block(4)', 'log_scale(4)', 'top_k(0.1)', 'one_bit'),
    *('random_k(0.1)', 'unbiased_random_k(0.1)', 'natural', 'qsgd(3)', 'polar(0.5, 16)', 'as_bool'),
    *('rotate(fp16, 16)', 'per_token(top_k(0.1))', 'same_support()', 'ef(raw)', 'aqsgd(raw, 9)'),
)


@pytest.mark.parametrize('what', ARRAYS)
def test_refused_arrays(what):
    """By every codec and rule, in the same words, and before anything is compiled."""
    x, error, says = ARRAYS[what]
    for text in TAKERS:
        channel = jaxmp.parse(text)
        with pytest.raises(error, match=says):
            channel.send(x, channel.init(jaxmp.like(x))[0], laws.context(jnp.zeros((2, 8))))
    b = jaxmp.boundary(jaxmp.parse('ef(uniform(4))'), jaxmp.parse('ef21(top_k(0.1))'))
    with pytest.raises(error, match=says):
        b.init(x)
    with pytest.raises(error, match=says):
        b.cross(x, b.init(jnp.zeros((2, 8))))


@pytest.mark.parametrize(('text', 'shape', 'ctx', 'says'), REFUSED)
def test_refused_at_the_crossing(text, shape, ctx, says):
    channel = jaxmp.parse(text)
    x = jnp.zeros(shape)
    with pytest.raises(ValueError, match=says):
        jax.eval_shape(channel.send, x, channel.init(jaxmp.like(x))[0], ctx)


@pytest.mark.parametrize('n', [2, 64])
def test_cosines_are_those_of_scipy(n):
    """In both directions, for sums of two terms in another order than a matrix product's."""
    jit = partial(jax.jit, compiler_options=laws.QUICK)
    with jax.enable_x64(True):
        x = np.random.default_rng(n).standard_normal((3, n))
        y = scipy.fft.dct(x, norm='ortho')
        np.testing.assert_allclose(jit(cosines)(x), y, atol=1e-5)
        np.testing.assert_allclose(jit(of_cosines)(y), x, atol=1e-5)


# Asymmetric numeral systems.


def logistic(rows, columns):
    """Whole numbers of sizes from 1/16 to 32, and each row's table."""
    r, size = np.random.default_rng(0), 2.0 ** np.linspace(-4, 5, rows)
    x = np.round(r.logistic(size=(rows, columns)) * size[:, None] / np.log(4)).astype(np.int32)
    of = rans.table_of(np.abs(x).mean(1, keepdims=True))
    return x, np.broadcast_to(of, x.shape)


def test_rans_takes_what_its_tables_say():
    """Every number comes back, for the logarithm of its probability; a lane's state is beside."""
    x, table = logistic(24, 800)
    t = rans.tables()
    most = ((t.frequency > 0).sum(1) // 2)[table]
    stream, states, used = jax.jit(rans.encode, static_argnums=2)(x, table, 8000)
    want = np.clip(x, -most, most)
    np.testing.assert_array_equal(jax.jit(rans.decode)(stream, states, table)[0], want)
    assert (want != x).mean() < 1e-3
    share = t.frequency[table, want + rans.LARGEST] / 4096
    bits = -np.log2(share).sum()
    held = np.log2(np.asarray(states, np.float64)).sum() - 16 * len(states)
    assert 16 * int(used) + held == pytest.approx(bits, rel=1e-3)
    assert not np.asarray(stream)[int(used) :].any()
    _, counts = np.unique(x[12], return_counts=True)
    entropy = -(counts * np.log2(counts / 800)).sum()
    assert -np.log2(share[12]).sum() < 1.03 * entropy


def test_rans_says_that_a_stream_was_too_short():
    x, table = logistic(8, 300)
    stream, states, used = rans.encode(x, table, 20)
    assert int(used) > 20 == len(stream)
    assert rans.decode(stream, states, table)[0].shape == x.shape


@pytest.fixture(scope='module')
def dependent_numbers():
    """Normal numbers of many sizes in steps, their tables, numbers and quantisers."""
    r, size = np.random.default_rng(0), 2.0 ** np.arange(-4, 6)
    x = np.float32(r.standard_normal((len(size), 6000)) * size[:, None])
    table = np.asarray(dependent.table_of(jnp.abs(x).mean(1)))[:, None]
    table = np.broadcast_to(table, x.shape)
    x[3, 7], x[4, 8], x[5, 9] = np.nan, np.inf, 1e9
    return x, table, *map(np.asarray, jax.jit(dependent.chosen)(x, table))


def test_the_receiver_follows_the_quantisers_of_dependent_numbers(dependent_numbers):
    """By the numbers alone, of whatever size; what is not finite is sent as a small one."""
    _, table, numbers, quantisers = dependent_numbers
    words = 30_000
    stream, states, used = jax.jit(rans.encode, static_argnums=2)(
        numbers, table + (rans.TABLES * quantisers).astype(np.uint8), words
    )
    assert int(used) < words
    found = jax.jit(partial(rans.decode, machine=dependent.MACHINE))(stream, states, table)
    np.testing.assert_array_equal(found[0], numbers)
    np.testing.assert_array_equal(found[1], quantisers)
    assert 0.2 < quantisers.mean() < 0.6
    assert np.abs(numbers[[3, 4], [7, 8]]).max() <= 1
    assert numbers[5, 9] > 3


def test_dependent_numbers_err_less_than_rounded_ones(dependent_numbers):
    """By .6 dB or more where they take two bits or more, of which a bit is 6 dB."""
    x, table, *together = dependent_numbers
    x, size = x[6:], np.abs(x[6:]).mean(1)
    rounded = np.round(x).astype(int), np.zeros(x.shape, int)
    tables = (np.asarray(rans.table_of(size))[:, None], table[6:])
    loss, found = [], []
    for (numbers, quantisers), of in zip((rounded, [a[6:] for a in together]), tables, strict=True):
        error = np.square(x - dependent.level_of(numbers, quantisers)).mean(1)
        share = (rans.tables().frequency / 4096)[of + rans.TABLES * quantisers, numbers + 255]
        found.append(-np.log2(np.maximum(share, 1e-9)).mean(1))
        loss.append(10 * np.log10(error) + 6.02 * found[-1])
    assert (loss[0] - loss[1] > 0.6).all()
    np.testing.assert_allclose(dependent.bits_of(size), found[1], rtol=0.02)


def test_no_path_is_cheaper_than_that_of_dependent_numbers():
    """Of six numbers all 64 paths of parities, each with every number that its table has."""
    x = np.float32(np.random.default_rng(5).standard_normal(6))
    table = np.full(6, int(dependent.table_of(jnp.float32(0.8))), np.uint8)
    share = (rans.tables().frequency / 4096)[table[0] + np.array([0, rans.TABLES])]
    bits = -np.log2(np.maximum(share, 1e-9))
    every = np.arange(-rans.LARGEST, rans.LARGEST + 1)
    least = np.inf
    for parities in itertools.product((0, 1), repeat=6):
        state, cost = 0, 0.0
        for value, parity in zip(x, parities, strict=True):
            q = dependent.MACHINE.quantiser[state]
            level = np.sign(every) * np.maximum(np.abs(every) - 0.5 * q, 0)
            costs = np.square(value - level) + dependent.PRICE * bits[q]
            cost += costs[every % 2 == parity].min()
            state = dependent.MACHINE.after[state][parity]
        least = min(least, cost)
    numbers, quantisers = map(np.asarray, dependent.chosen(x, table))
    cost = np.square(x - np.asarray(dependent.level_of(numbers, quantisers)))
    cost = cost + dependent.PRICE * bits[quantisers, numbers + rans.LARGEST]
    assert cost.sum() == pytest.approx(least, rel=0.02)


def test_rans_has_the_same_tables_everywhere():
    """They are never sent; a float that is rounded otherwise on some machine would be an error."""
    t = rans.tables()
    assert (t.frequency.sum(1) == 4096).all()
    assert zlib.crc32(t.frequency.tobytes()) == 3438968100
    assert zlib.crc32(t.frequency[: rans.TABLES].tobytes()) == 2570030131


def broken(encode):
    """A codec that sends what ``encode`` makes of a tensor of float32."""
    return jaxmp.Codec(encode, lambda m, like, ctx: m)


@pytest.mark.parametrize(
    ('codec', 'law', 'name', 'message'),
    [
        (
            broken(lambda x, ctx: x + 0 * x.max(-1, keepdims=True)),
            testing.Law(spoilt=testing.sample), 'nan',
            r'law spoilt=sample: nan in element \[1, 3, 20\] may spoil 301 elements, it spoilt 43; '
            r'if it is to, say Law\(spoilt=row\); they differ in 258 of 1204 elements',
        ),
        (
            broken(lambda x, ctx: x.sum() * x), testing.Law(spoilt=testing.blocks(7)), 'nan',
            r'law spoilt=blocks\(7\): nan .* it spoilt 1204; .* say Law\(spoilt=tensor\)',
        ),
        (
            broken(lambda x, ctx: jnp.nan_to_num(x)), testing.Law(spoilt=testing.sample), 'nan',
            'law spoilt=sample: .* 301 elements, it spoilt 0; let NaN survive; they differ in 301',
        ),
        (
            broken(lambda x, ctx: x / x), testing.Law(), 'zeros',
            'law finite: a finite x arrives finite; mind a scale of 0 and overflow; NaN in 1204 of',
        ),
        (
            broken(lambda x, ctx: x + 1), testing.Law(bound=lambda x: 0.5), 'zeros',
            r'law bound: .*; where C\(0\) is 1 it exceeds 0\.5 by 0\.5; too large in 1204 of 1204',
        ),
        (
            broken(lambda x, ctx: x / 2), testing.Law(kept=0.9), 'constant',
            r'law kept=0\.9: .* at most 0\.1 \|x\|\^2 in a sample, and came as 0\.25; too much was',
        ),
        (
            broken(lambda x, ctx: x / 2), testing.Law(idempotent=True), 'constant',
            r'law idempotent: expected C\(C\(x\)\) = C\(x\) to the bit, differs in 1204 of 1204',
        ),
    ],
)  # fmt: skip
def test_a_law_that_is_broken_says_what_was_expected_and_what_came(codec, law, name, message):
    with pytest.raises(AssertionError, match=f'of {name}: {message}'):
        testing.check(codec, law, {name: testing.FLOAT32[name]})
