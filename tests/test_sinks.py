"""What codecs leave of a language model's activations, on the committed sample."""

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.grammar import sinks
from jaxmp.training import dry_run, experiment, loop
from tests.base import slow
from tests.runs import config_of

# Text: bounds of the errors of the median token, the worst and the sink; None: the word breaks.
REAL = {
    'raw': (0, 0, 0),
    'bf16': (0.003, 0.004, 0.004),
    'fp16': (3e-4, 4e-4, 4e-4),
    'block(8)': (0.012, 0.02, 0.02),
    'block(4)': (0.2, 0.3, 0.06),
    'mx(8)': (0.03, 0.05, 0.04),
    'mx(4)': (0.18, 0.2, 0.13),
    'nvfp4': (0.11, 0.13, 0.1),
    'per_token(uniform(8))': (0.04, 0.08, 0.05),
    'per_token(rotate(lloyd(4), 64))': (0.1, 0.12, 0.06),
    'spikes(rotate(lloyd(4)), 64)': (0.11, 0.5, 0.01),
    'outliers(uniform(8))': (0.04, 0.06, 0.03),
    'outliers(lloyd(4))': (0.15, 0.4, 0.01),
    'outliers(rotate(lloyd(4)))': (0.09, 0.11, 0.03),
    'outliers(rotate(trellis(2)))': (0.23, 0.33, 0.03),
    'outliers(rotate(lloyd(4), 64), causal=True)': (0.08, 0.09, 0.02),
    'rotate(lloyd(2))': (0.36, 0.8, 0.15),  # without a level for magnitudes alike: .33, 18, .38
    'rotate(trellis(2))': (0.31, 0.8, 0.15),
    'max_scaled(4)': (0.1, 0.15, 0.15),
    'top_k(0.1)': (0.5, 0.7, 0.1),
    'uniform(8)': None,
    'uniform(4)': None,
    'lloyd(4)': None,
    'one_bit': None,
    'rotate(uniform(8))': None,  # no token is worse than lost; the median is, by 30 times its error
    'rotate(max_scaled(4))': None,
    'rotate(lloyd(4))': None,
    'rotate(block(4))': None,
    'rotate(lloyd(1))': (0.6, 0.8, 0.15),
    'rotate(trellis(3))': (0.16, 0.7, 0.15),
    'rotate(lloyd(2), 64)': (0.31, 0.4, 0.05),
}


OTHERS = 'rotate(lloyd(2))', 'rotate(trellis(2))', 'rotate(lloyd(1))', 'rotate(trellis(3))'


@pytest.mark.parametrize('text', slow(REAL, OTHERS.__contains__))
def test_errors_on_real_activations(text):
    found = sinks.errors(jaxmp.parse(text).codec)
    assert found.breaks == (REAL[text] is None), found
    assert found.breaks == ('breaks' in str(found))
    if REAL[text] is not None:
        assert all(a <= b for a, b in zip(found, REAL[text], strict=False)), found


def test_a_codec_with_large_errors_everywhere_does_not_break_there():
    found = sinks.errors(jaxmp.parse('unbiased_random_k(0.1)').codec)
    assert found.normal > 2.5
    assert not found.breaks


def test_a_run_on_text_is_warned_and_no_other():
    channels = [jaxmp.parse(t) for t in ('ef21(uniform(8))', 'outliers(lloyd(4))', 'uniform(4)')]
    text = jaxmp.Like((8, 16), 'int32')
    [first, second] = sinks.warnings_of([*channels, channels[0]], text)
    assert first.startswith('uniform(8): on activations of a pretrained language model')
    assert first.endswith('Write outliers(uniform(8))')
    assert second.startswith('uniform(4): ')
    assert sinks.warnings_of(channels, jaxmp.Like((8, 28, 28, 1), 'float32')) == []
    assert sinks.warnings_of([jaxmp.parse('klt(2, patch=5)')], text) == []  # 48 tokens


def test_a_dry_run_of_text_warns_and_one_of_images_does_not(monkeypatch, capsys):
    monkeypatch.setattr(dry_run, 'first_update', lambda made: 0.0)
    for name in 'text_gpt2', 'digits_resnet':
        dry_run.dry_run(config_of(name, fwd='uniform(8)'), loop.ProcessGroup())
        said = ' '.join(capsys.readouterr().out.split())
        warned = 'warning: uniform(8): on activations of a pretrained language model' in said
        assert warned == (name == 'text_gpt2'), said


def test_the_warnings_are_of_every_boundary_and_phase():
    changes = {'fwd': 'raw;outliers(lloyd(4));lloyd(4)', 'phases': 'uniform(4)@:1', 'epochs': 2}
    exp = experiment.experiment_of(config_of('text_gpt2', **changes))
    assert [w.partition(':')[0] for w in experiment.warnings_on(exp)] == [
        'lloyd(4)',
        'uniform(4)',
    ]


@functools.partial(jax.jit, static_argnums=0)
def there_and_back(codec, x):
    return codec.decode(codec.encode(x, jaxmp.Ctx()), jaxmp.like(x), jaxmp.Ctx())


def test_huge_elements_do_not_overflow_in_half_precision():
    """27,300 is within 2.4 times of float16's largest number."""
    x = jnp.asarray(sinks.sample()) * 8  # 190,000
    codecs = ('fp16', 'block(4)', 'max_scaled(8)', 'outliers(lloyd(4))', 'bf16', 'outliers(fp16)')
    for text in codecs:
        c = jaxmp.parse(text).codec
        y = there_and_back(c, x)
        assert np.isfinite(np.asarray(y)).all(), text
        if text in ('bf16', 'block(4)', 'outliers(lloyd(4))', 'outliers(fp16)'):
            assert float(jnp.abs(y - x).max() / jnp.abs(x).max()) < 0.02, text


def test_the_sample_is_the_one_of_its_notice():
    digest = hashlib.sha256(sinks.SAMPLE.read_bytes()).hexdigest()
    assert digest in sinks.SAMPLE.with_suffix('.NOTICE').read_text()


def test_what_compresses_nothing_is_said():
    exp = experiment.experiment_of(
        config_of(
            'text_gpt2', stages=1, fwd='uniform(4)', bwd='raw', exchange='all_gather(one_bit)'
        )
    )
    fwd, exchange = experiment.warnings_on(exp)
    assert fwd.startswith("config.fwd='uniform(4)' compresses nothing, of one stage; give config.")
    assert exchange.startswith("config.exchange='all_gather(one_bit)' compresses nothing, of one r")
