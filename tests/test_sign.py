"""What the codecs of gradients promise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx, parse
from tests.laws import QUICK

D = 400


def normal(size=D, seed=0):
    return np.random.default_rng(seed).standard_normal((1, size))


def coder(text, like):
    """``C`` as a function of a tensor and a key, compiled once."""
    C = parse(text).codec

    def code(x, key):
        return C.decode(C.encode(x, Ctx(key)), like, Ctx(key))

    return jax.jit(code, compiler_options=QUICK)


def code(text, x, key=0):
    return np.asarray(coder(text, jaxmp.like(x))(x, jax.random.key(key)))


def draws(text, x, count=2000):
    """``count`` independent codings of ``x``."""
    C = parse(text).codec
    one = lambda key: C.decode(C.encode(x, Ctx(key)), x, Ctx(key))
    keys = jax.random.split(jax.random.key(3), count)
    return np.asarray(jax.jit(jax.vmap(one), compiler_options=QUICK)(keys), np.float64)


def test_fp16_rounds_to_eleven_bits_and_keeps_its_grid():
    r = np.random.default_rng(0)
    x = (2.0 ** r.uniform(-14, 16, (1, D)) * r.choice([-1, 1], (1, D))).astype(np.float32)
    x = np.clip(x, -65504, 65504)
    assert (np.abs(code('fp16', x) - x) <= 2.0**-11 * np.abs(x)).all()
    grid = x.astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(code('fp16', grid), grid)
    np.testing.assert_array_equal(code('fp16', grid * 0 + 1e9), grid * 0 + 65504)


def test_one_bit_loses_exactly_this_much():
    """|x - C(x)|^2 = (1 - delta) |x|^2, delta = |x|_1^2 / (D |x|_2^2), in float64."""
    with jax.enable_x64(True):
        x = normal()
        lost = np.sum((x - code('one_bit', x)) ** 2)
    delta = np.sum(np.abs(x)) ** 2 / (D * np.sum(x**2))
    np.testing.assert_allclose(lost, (1 - delta) * np.sum(x**2), rtol=1e-12)


def test_one_bit_of_zero_is_positive_and_has_its_size():
    x = np.array([[0.0, -0.0, -4.0, 2.0]], np.float32)
    assert code('one_bit', x).tolist() == [[1.5, 1.5, -1.5, 1.5]]
    for size in (8, 9, 4000):
        like = jax.ShapeDtypeStruct((1, size), 'float32')
        assert jaxmp.bits(parse('one_bit'), like) == 8 * (-(-size // 8) + 4)


def test_as_bool_loses_the_sign():
    x = np.array([[0.0, -4.0, 2.0]], np.float32)
    assert code('as_bool', x).tolist() == [[0.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    ('text', 'bound'),
    [
        ('natural', lambda x: np.sum(x**2) / 8),
        ('qsgd(4)', lambda x: min(D / 16, D**0.5 / 4) * np.sum(x**2)),
        ('qsgd(64)', lambda x: min(D / 64**2, D**0.5 / 64) * np.sum(x**2)),
        ('unbiased_random_k(0.1)', lambda x: (10 - 1) * np.sum(x**2)),
    ],
)
def test_unbiased_with_bounded_variance(text, bound):
    """The error of a mean of n is an n-th of a draw's, and none of it lies along x."""
    x = normal().astype(np.float32)
    y = draws(text, x)[:, 0]
    n = len(y)
    assert np.sum((y.mean(0) - x[0]) ** 2) <= 1.5 * bound(x) / n
    along = y @ x[0] / np.sum(x**2)
    assert abs(along.mean() - 1) <= 5 * along.std() / n**0.5 + 1e-6
    squares = np.sum((y - x[0]) ** 2, 1)
    assert squares.mean() - 5 * squares.std() / n**0.5 <= bound(x)
    assert squares.mean() >= 0.02 * bound(x)  # and it is random at all


def test_unbiased_random_k_in_bfloat16():
    """4000 / 300 is no bfloat16: each value is rounded once, and not by a rounded factor, too."""
    x = np.abs(normal(4000)).astype(jnp.bfloat16)
    y = code('unbiased_random_k(0.075)', x)
    kept = y != 0
    off = y[kept].astype(np.float64) / x[kept].astype(np.float64) * 300 / 4000 - 1
    assert kept.sum() == 300
    assert np.abs(off).max() <= 2.0**-8
    assert abs(off.mean()) <= 5 * off.std() / 300**0.5


@pytest.mark.parametrize('size', [0.5, 2.0])
def test_unbiased_random_k_in_float16(size):
    """D / K is beyond its largest number; what the product makes too large, saturates."""
    x = np.full((1, 70_000), size, np.float16)
    y = code('unbiased_random_k(1e-5)', x)
    assert y[y != 0].tolist() == [np.float16(min(70_000 * size, 65504))]


def test_natural_is_exact_on_zero_and_powers_of_two():
    x = np.array([[0, 1, -2, 2.0**-126, -(2.0**100), 0.375]], np.float32)
    for key in range(3):
        y = code('natural', x, key)
        np.testing.assert_array_equal(y[:, :-1], x[:, :-1])
        assert y[0, -1] in (0.25, 0.5)
    assert jaxmp.bits(parse('natural'), jax.ShapeDtypeStruct((1, 800), 'float32')) == 9 * 800


def test_natural_is_unbiased_below_the_normal_numbers():
    """Two powers of two, the smaller being zero."""
    C, x = parse('natural').codec, jnp.full((1, 4000), np.uint32(3 << 21)).view(jnp.float32)
    words = np.asarray(C.decode(C.encode(x, Ctx(jax.random.key(0))), x, Ctx()).view(jnp.uint32))
    assert set(np.unique(words)) == {0, 1 << 23}
    assert abs(np.mean(words > 0) - 0.75) < 5 * 0.43 / 4000**0.5


def test_qsgd_of_one_element_is_exact():
    x = np.zeros((1, 33), np.float32)
    x[0, 7] = -1.1
    np.testing.assert_array_equal(code('qsgd(3)', x), x)


@pytest.mark.parametrize('levels', [0, 40000, True, 1.5])
def test_qsgd_refuses(levels):
    with pytest.raises(ValueError, match=r'qsgd levels .* is not an integer from 1 to 32767'):
        jaxmp.qsgd(levels)


@pytest.mark.parametrize('text', ['natural', 'qsgd(4)', 'unbiased_random_k(0.1)'])
def test_random_codecs_need_a_key(text):
    with pytest.raises(ValueError, match=r'needs ctx\.key'):
        parse(text).codec.encode(jnp.ones((1, 3)), Ctx())


@pytest.mark.parametrize('text', ['random_k(0.1)', 'unbiased_random_k(0.1)'])
def test_random_k_adds(text):
    """C(a) + C(b) = C(a + b) where the key is shared, in float64."""
    with jax.enable_x64(True):
        a, b = normal(), normal(seed=1)
        C = coder(text, jaxmp.like(a))
        key = jax.random.key(0)
        np.testing.assert_allclose(C(a, key) + C(b, key), C(a + b, key), rtol=1e-12)


def test_top_k_with_memory():
    """C(p) + e = p to the bit, and the error shrinks by the kept share."""
    C, p = parse('ef(top_k(0.1))'), normal().astype(np.float32)
    m, e = C.send(p, jnp.zeros_like(p), Ctx())
    y = np.asarray(C.codec.decode(m, jaxmp.like(p), Ctx()))
    np.testing.assert_array_equal(y + np.asarray(e), p)
    assert np.sum(np.asarray(e) ** 2) <= 0.9 * np.sum(p**2)
    np.testing.assert_array_equal(code('top_k(0.1)', y), y)
