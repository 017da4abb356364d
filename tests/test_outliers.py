"""`outliers`: what it sends apart, its size, its causal form, and what it is for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx
from tests import laws


def round_trip(text, x):
    pair = laws.ends(jaxmp.parse(text), jaxmp.like(x))
    tx, rx = pair.init()
    return pair.cross(x, tx, rx, Ctx())[1]


def with_a_sink(shape, at=(0, 5)):
    """Normal data, of which a token is 1000 times the others and a channel 50 times."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    x[..., 3] *= 50
    x[:, at[1]] *= 1000
    return x


def test_heavy_elements_are_sent_apart():
    """They are those of V, and the others have the error of the codec at their own size."""
    x = with_a_sink((3, 32, 64))
    y = round_trip('outliers(lloyd(3), 1, 1, values=bf16)', x)
    heavy = np.zeros(x.shape, bool)
    heavy[:, 5], heavy[..., 3] = True, True
    np.testing.assert_array_equal(y[heavy], np.asarray(jnp.asarray(x, jnp.bfloat16), 'f4')[heavy])
    assert np.std((y - x)[~heavy]) < 0.22  # Lloyd-Max of 3 bits: .186
    alone = round_trip('lloyd(3)', x)
    assert np.std((alone - x)[~heavy]) > 10


@pytest.mark.parametrize('size', [0, 1e-39, 1.2e-38, 2e-37, 1e-30])
@pytest.mark.parametrize(
    'text', ['outliers(lloyd(4))', 'outliers(mx(4))', 'outliers(lloyd(4), causal=True)', 'nvfp4']
)
def test_a_token_of_zeros_among_small_ones_stays_small(text, size):
    """The gradient of a text's last token is zero, and those of the others 1e-5 or less.

    What comes for it after one crossing is near the least number, with zeros beside it.
    """
    x = np.random.default_rng(0).standard_normal((2, 32, 64)).astype(np.float32) * 1e-6
    x[:, -1] = 0
    x[:, -1, ::16] = size
    error = round_trip(text, x) - x
    assert np.sum(error**2) < 0.02 * np.sum(x**2)
    assert np.abs(error[:, -1]).max() < 1e-8


def test_what_lies_in_both_is_sent_in_16_bits():
    """A sink's largest element is most of its norm, and 8 bits are not enough for it."""
    x = with_a_sink((2, 32, 64))
    y = round_trip('outliers(lloyd(2), 1, 1)', x)
    both = np.abs(y / x - 1)[:, 5, 3]
    assert both.max() < 2**-8
    error = np.abs(y - x)[:, 5] / np.abs(x[:, 5]).max(1, keepdims=True)
    assert 1e-4 < np.delete(error, 3, 1).max() <= 2**-4


def test_bits():
    like = jaxmp.Like((2, 256, 576), 'float32')
    n, values = 256 * 576, 8.25 * (2 * 576 + 4 * 256)
    apart = values + 16 * (2 * 4 + 2 + 4)  # what lies in both, and the places
    for text, scales in (('outliers(fp16)', 8 * 256), ('outliers(fp16, scaled=False)', 0)):
        assert jaxmp.bits(jaxmp.parse(text), like) == 2 * (16 * n + apart + scales)
    causal = jaxmp.parse('outliers(trellis(2), causal=True)')
    assert jaxmp.bits(causal, like) == 2 * 256 * (2 * 576 + 16 + 4 * (16 + 10))


def test_few_tokens_and_channels_are_not_all_heavy():
    x = with_a_sink((2, 64))  # a token per sample, none of which is heavy, and 5 is a channel
    y = round_trip('outliers(lloyd(2), 2, 1, values=raw)', x)
    assert (y[:, 5] == x[:, 5]).all()
    assert (y != x).sum() == 2 * 63
    round_trip('outliers(raw, 100, 100)', with_a_sink((2, 3, 5), at=(0, 1)))


def test_a_pixel_is_a_token():
    x = with_a_sink((2, 32, 16))
    y = round_trip('outliers(lloyd(4), 1, 1)', x)
    image = round_trip('outliers(lloyd(4), 1, 1)', x.reshape(2, 4, 8, 16))
    np.testing.assert_array_equal(image, y.reshape(image.shape))


def test_in_the_causal_form_a_token_does_not_depend_on_later_ones():
    x = with_a_sink((2, 16, 64))
    later = x.copy()
    later[:, 9:] = 7 * with_a_sink((2, 7, 64), at=(0, 2))
    for text, same in (('outliers(lloyd(3), causal=True)', True), ('outliers(lloyd(3))', False)):
        a, b = round_trip(text, x), round_trip(text, later)
        assert (a[:, :9] == b[:, :9]).all() == same, text


def test_over_a_rule_the_state_is_of_what_is_left():
    """The difference of `ef` holds no heavy element, and what arrives has them all."""
    x = with_a_sink((1, 32, 64))
    rule = jaxmp.parse('outliers(ef(lloyd(2)), 1, 1, scaled=False)')
    m, error = jax.jit(rule.send)(jnp.asarray(x), rule.init(jaxmp.like(x))[0], Ctx())
    assert float(jnp.abs(error).max()) < 4
    y = np.asarray(jax.jit(lambda m: rule.recv(m, (), jaxmp.like(x), Ctx())[0])(m))
    assert (np.linalg.norm((y - x)[:, 5]) < 0.03 * np.linalg.norm(x[:, 5])).all()


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('outliers(3)', 'codec or rule such as lloyd'),
        ('outliers(raw, values=ef(raw))', 'values must be a codec'),
        ('outliers(raw, tokens=-1)', 'a number of tokens'),
        ('outliers(raw, channels=1.5)', 'a number of channels'),
        ('outliers(raw, scaled=2)', 'True or False'),
        ('outliers(klt(2), causal=True)', 'causal is for a codec'),
        ('outliers(aqsgd(raw, 9))', r'write aqsgd\(outliers'),
        ('ef21(outliers(klt(2)))', 'rules do not nest'),
    ],
)
def test_errors(text, message):
    with pytest.raises(jaxmp.SpecError, match=message):
        jaxmp.parse(text)
    assert (
        jax.tree.leaves(jaxmp.parse('direct(outliers(raw))').init(jaxmp.Like((2, 3), 'f4'))) == []
    )
