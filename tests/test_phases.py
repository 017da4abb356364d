"""Epochs in which another codec stands in for the channels, in every runtime."""

import numpy as np
import pytest

import jaxmp
from jaxmp.metrics import by_phases
from jaxmp.net.group import ProcessGroup
from jaxmp.training import experiment, sizes
from jaxmp.training.trainer import Trainer
from tests.base import slow
from tests.runs import config_of, known_model
from tests.test_portable import RUNTIMES, Flat, steps


def made(**words):
    fixed = {'model': 'flat', 'width': 24, 'train_examples': 64, 'batch_size': 32, 'epochs': 3}
    fixed |= {'fwd': 'ef21(uniform(2))', 'bwd': 'ef(uniform(2))', 'phases': 'raw@:1'}
    return experiment.experiment_of(config_of(**fixed | words))


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    known_model(monkeypatch, 'flat', lambda classes, width: (Flat(width), Flat(classes)))


def losses(exp):
    """The loss of each step, by epoch."""
    trainer, order, rows = Trainer(exp, ProcessGroup()), np.arange(64), []
    state = trainer.create()
    for number in range(exp.config.epochs):
        row, state = steps(trainer, state, order, number)
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    'runtimes', slow([['local', 'mpmd'], list(RUNTIMES)], lambda r: len(r) > 2)
)
def test_a_phase_replaces_the_channels_in_its_epochs(runtimes):
    """Like a run without it until then, and alike in every runtime."""
    own, *weaned = (
        losses(made(phases=p, runtime=r))
        for p, r in (('raw@:1', 'local'), *(('raw@:1; raw@-1:', r) for r in runtimes))
    )
    for found in weaned:
        np.testing.assert_allclose(found, weaned[0], rtol=1e-4)
    np.testing.assert_array_equal(weaned[0][:2], own[:2])
    assert np.all(weaned[0][2] != own[2])


@pytest.mark.slow
def test_replicas_have_phases_too():
    """Two replicas, whose mean loss is shown; alike in every runtime, in the phase and after."""
    two = {'replicas': 2, 'phases': 'raw@1:2'}
    found = [losses(made(runtime=r, **two)) for r in RUNTIMES]
    plain = losses(made(runtime='local', phases='', replicas=2))
    for row in found:
        np.testing.assert_allclose(row, found[0], rtol=1e-4)
    np.testing.assert_array_equal(found[0][0], plain[0])
    assert np.all(found[0][1:] != plain[1:])


@pytest.mark.slow
def test_a_rule_goes_on_with_other_bits():
    """Few bits, then more: the basis of the first phase serves the second."""
    # Of seed 0 the rounding of one program flips a code on a CPU without AVX-512.
    rule, words = 'klt({}, refresh=2)', {'phases': '', 'epochs': 2, 'seed': 2}
    words |= dict.fromkeys(('fwd', 'bwd'), rule.format(4))
    at = [r for r in RUNTIMES if r != 'spmd']  # which has no states that are not per sample
    runs = [made(**words | {'runtime': r, 'phases': f'{rule.format(2)}@:1'}) for r in at]
    found = [losses(exp) for exp in runs]
    for row in found:
        np.testing.assert_allclose(row, found[0], rtol=1e-4)
    four = losses(made(runtime='local', **words))
    assert np.all(found[0] != four)
    [phase] = sizes.phase_bytes(runs[0])
    [row] = sizes.message_bytes(runs[0])
    codes = 32 * 24 // 8  # of one bit of each number
    assert row['forward'] + row['backward'] - phase['bytes'] == 2 * 2 * codes
    with pytest.raises(
        ValueError, match=r'klt\(2, refresh=3\) cannot go on with the states of klt'
    ):
        made(**words | {'phases': 'klt(2, refresh=3)@:1'})
    with pytest.raises(ValueError, match=r'klt\(2\) cannot go on with the states of ef21'):
        made(phases='klt(2)@:1')


def test_each_boundary_may_have_its_codec_in_a_phase(monkeypatch):
    known_model(
        monkeypatch, 'flat', lambda classes, width: (Flat(width), Flat(width), Flat(classes))
    )
    [phase] = made(phases='lloyd(1) & raw | raw & lloyd(2)@1:').phases
    first, second = phase.boundaries
    sent = [str(c.codec) for c in (first.fwd, second.fwd, first.bwd, second.bwd)]
    assert sent == ['lloyd(1)', 'raw', 'raw', 'lloyd(2)']
    assert phase.text == 'lloyd(1) & raw | raw & lloyd(2)'
    with pytest.raises(ValueError, match=r'has 3 codecs and the model 2 boundaries; give one, or'):
        made(phases='raw & raw & raw@1:')


def test_both_ends_are_primed_with_what_a_phase_sent():
    x = np.random.default_rng(0).standard_normal((2, 40)).astype('f4')
    channel = jaxmp.warm(jaxmp.parse('ef21(top_k(0.1))'), jaxmp.uniform(4))
    tx, rx = channel.init(jaxmp.like(x))
    m, tx = channel.send(x, tx, jaxmp.Ctx())
    y, rx = channel.recv(m, rx, jaxmp.like(x), jaxmp.Ctx())
    np.testing.assert_array_equal(tx, rx)
    np.testing.assert_array_equal(tx, y)
    assert 0 < np.abs(y - x).max() < 0.5


def test_the_directions_of_a_phase_have_codecs_of_their_own():
    exp = made(phases='uniform(8) | raw@2:')
    [phase] = exp.phases
    [cut], [row] = phase.boundaries, sizes.message_bytes(exp, phase.boundaries)
    assert phase.text == 'uniform(8) | raw'
    assert (row['forward'], row['backward']) == (32 * 24 + 8, 32 * 24 * 4)
    like = jaxmp.like(np.zeros((2, 40), 'f4'))
    sent = [jaxmp.bits(way, like) for way in (cut.fwd, cut.bwd)]
    assert sent == [jaxmp.bits(jaxmp.parse(text), like) for text in ('uniform(8)', 'raw')]


def test_bytes_count_every_phase():
    exp = made(phases='raw@:1; uniform(8)@2:3; raw@3:', epochs=4)
    rows = sizes.phase_bytes(exp)
    [row] = sizes.message_bytes(exp)
    full, eight, own = (2 * 32 * 24 * 4, 2 * (32 * 24 + 8), row['forward'] + row['backward'])
    assert [(p['codec'], p['start'], p['stop'], p['bytes']) for p in rows] == [
        ('raw', 0, 1, full), ('uniform(8)', 2, 3, eight), ('raw', 3, 4, full)
    ]  # fmt: skip
    assert 4 * own + by_phases({'bytes': [row], 'phases': rows}, 4) == 2 * full + eight + own


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        ({'phases': 'raw'}, "'raw' is not a codec and some of 3 epochs"),
        ({'phases': 'raw@3:'}, 'is not a codec and some of'),
        ({'phases': 'raw@:1; raw@:2'}, 'epoch 0, counted from 0, is in two phases'),
        ({'phases': 'ef(raw)@2:'}, 'a phase keeps the feedback rules'),
        ({'phases': 'top_k@2:'}, 'needs its arguments'),
        ({'phases': 'raw | top_k@2:'}, 'needs its arguments'),
        ({'phases': 'raw & @:1'}, "config.phases='raw & @:1': .* lacks a codec beside"),
        ({'phases': 'raw | raw | raw@2:'}, 'is not a codec and some of'),
    ],
)
def test_what_is_no_phase_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        made(**words)
