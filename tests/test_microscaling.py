"""Microscaling formats: the bytes of a message are the codes that ml_dtypes defines."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx
from jaxmp.wire import unpack
from tests import laws

E4M3 = ml_dtypes.float8_e4m3fn
ELEMENTS = {8: E4M3, 6: ml_dtypes.float6_e2m3fn, 4: ml_dtypes.float4_e2m1fn}
SHAPE = 16, 1024


def spread():
    """Normal numbers times powers of two, within a block and between blocks; some are halfway."""
    r = np.random.default_rng(0)
    x = r.standard_normal(SHAPE) * 2.0 ** r.integers(-8, 3, SHAPE)
    x[::2] = np.round(x[::2] * 16) / 16
    return (x * np.repeat(2.0 ** r.integers(-30, 30, (SHAPE[0], 32)), 32, 1)).astype(np.float32)


def sent(text, x):
    """The message as numpy has it, and what arrives."""
    pair = laws.ends(jaxmp.parse(text), jaxmp.like(x))
    m, y, _, _ = pair.cross(x, (), (), Ctx())
    return jax.tree.map(np.asarray, m), y


def cast(x, dtype):
    """By ml_dtypes; what is beyond the largest number becomes that."""
    most = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x, -most, most).astype(dtype)


def codes(m, bits, dtype, size):
    words = np.asarray(unpack(jnp.asarray(m['codes']), bits, 32))
    return words.view(dtype).astype(np.float64).reshape(-1, size)


@pytest.mark.parametrize('bits', ELEMENTS)
def test_mx_sends_what_numpy_casts(bits):
    x, dtype = spread(), ELEMENTS[bits]
    rows = x.reshape(-1, 32)
    high = np.floor(np.log2(float(ml_dtypes.finfo(dtype).max)))
    unit = 2.0 ** (np.floor(np.log2(np.abs(rows).max(1, keepdims=True))) - high)
    want = cast(rows / np.float32(unit), dtype)
    m, y = sent(f'mx({bits})', x)
    np.testing.assert_array_equal(
        m['scale'].view(ml_dtypes.float8_e8m0fnu).astype('f8'), unit[:, 0]
    )
    np.testing.assert_array_equal(codes(m, bits, dtype, 32), want.astype('f8'))
    np.testing.assert_array_equal(y.reshape(-1, 32), want.astype('f8') * unit)
    assert len(np.unique(want.view(np.uint8))) > 2 ** (bits - 1), 'many codes occur'


def test_nvfp4_sends_what_numpy_casts():
    x, dtype = spread() / np.float32(2.0**30), ELEMENTS[4]
    x[1:] = np.random.default_rng(1).standard_normal(x[1:].shape)
    rows = x.reshape(-1, 16)
    m, y = sent('nvfp4', x)
    s = m['scale']
    assert np.abs(x).max() / 2688 * (1 - 2.0**-16) <= s <= np.abs(x).max() / 2688
    want = cast(np.abs(rows).max(1) / np.float32(6) / s, E4M3)
    np.testing.assert_array_equal(m['scales'].view(E4M3).astype('f4'), want.astype('f4'))
    unit = want.astype('f4')[:, None] * s
    elements = cast(rows / np.where(unit > 0, unit, 1), dtype)
    np.testing.assert_array_equal(codes(m, 4, dtype, 16), elements.astype('f8'))
    np.testing.assert_array_equal(y.reshape(-1, 16), elements.astype('f8') * unit)


def test_a_block_with_nan_or_infinity_has_the_scale_nan():
    x = spread()
    x[0, 5], x[3, 40] = np.nan, -np.inf
    bad = [0, 3 * 32 + 1]
    scale = sent('mx(8)', x)[0]['scale'].view(ml_dtypes.float8_e8m0fnu).astype('f4')
    assert np.flatnonzero(np.isnan(scale)).tolist() == bad
    scale = sent('nvfp4', x)[0]['scales'].view(E4M3).astype('f4')
    assert np.flatnonzero(np.isnan(scale)).tolist() == [0, 2 * bad[1]]


def test_mx_of_another_width_is_refused():
    with pytest.raises(ValueError, match='mx bits 5 is not 8, 6 or 4; for MXFP4 write mx'):
        jaxmp.mx(5)
