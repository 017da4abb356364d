"""A run saved under one runtime goes on under another, with one replica and with two."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.net.group import ProcessGroup
from jaxmp.training import checkpoint, experiment, loop
from jaxmp.training.trainer import Trainer
from tests.runs import config_of, known_model

RUNTIMES = ('local', 'spmd', 'mpmd')
CUT = 2 * 32  # examples before the checkpoint
ROUNDS = 'diloco(2, all_gather(ef21(uniform(4))), delay=1)'  # cut while a round is on its way


class Flat(nn.Module):
    """A dense layer of the flattened input. Compiles in no time."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(jnp.tanh(x.reshape(len(x), -1)))


BUFFERS = 'ef21(uniform(4))', 'ef(uniform(4))'
# The checkpoint is between two parts of a basis.
BASES = 'klt(1.5, refresh=2, by_gradient=1)', 'klt(2, refresh=1)'


def made(classes, width):
    return Flat(width), Flat(classes)


def small(runtime, replicas, channels):
    words = {'model': 'flat', 'width': 24, 'train_examples': 160, 'batch_size': 32, 'epochs': 1}
    words |= {'fwd': channels[0], 'bwd': channels[1], 'num_microbatches': 2}
    words |= {'exchange': ROUNDS, 'clip_norm': 1.0}
    return config_of('digits_dataparallel', **words, runtime=runtime, replicas=replicas)


def steps(trainer, state, order, epoch=0):
    """Losses of the steps of an epoch over ``order``, and the state after them."""
    losses = []
    for after, values, _ in trainer.epoch(epoch, state, order):
        state = after
        losses += np.ravel(values['loss']).astype(float).tolist()
    return losses, state


@pytest.fixture(
    scope='module',
    params=[
        (1, BUFFERS),
        pytest.param((2, BUFFERS), marks=pytest.mark.slow),
        pytest.param((1, BASES), marks=pytest.mark.slow),
    ],
    ids=['one replica', 'two replicas', 'bases'],
)
def saved(request, tmp_path_factory):
    """By runtime: trainer, setting, folder of a checkpoint, and the losses of a whole run."""
    found, order = {}, np.random.default_rng(0).permutation(160)
    with pytest.MonkeyPatch.context() as patch:
        known_model(patch, 'flat', made)
        for runtime in RUNTIMES if request.param[1] is BUFFERS else ('local', 'mpmd'):
            s = experiment.experiment_of(small(runtime, *request.param))
            trainer, folder = (
                Trainer(s, ProcessGroup()),
                tmp_path_factory.mktemp(runtime),
            )
            first, state = steps(trainer, trainer.create(), order[:CUT])
            kept = checkpoint.Checkpoints(folder)
            kept.save(2, trainer.export(state), {})
            kept.close()
            rest, _ = steps(trainer, state, order[CUT:])
            found[runtime] = trainer, s, folder, first + rest
        yield found, order, 1e-4 if request.param[1] is BUFFERS else 2e-3  # of rounded bases


@pytest.mark.parametrize('to', RUNTIMES)
@pytest.mark.parametrize('of', RUNTIMES)
def test_a_run_goes_on_under_another_runtime(saved, of, to):
    """As if nothing had happened; under the same one to the bit. Nothing is lost in between."""
    found, order, rtol = saved
    if {of, to} - found.keys():
        pytest.skip('spmd refuses bases, see below')
    _, _, folder, want = found[of]
    trainer, _, _, there = found[to]
    kept = checkpoint.Checkpoints(folder)
    read, _ = kept.restore(trainer.export(trainer.create()))
    kept.close()
    state = trainer.load(trainer.create(), read)
    assert int(state.step) == 2
    trainer.check(state)
    again = checkpoint.portable.to_pieces(trainer.export(state))
    again = checkpoint.portable.from_pieces([again])
    jax.tree.map(np.testing.assert_array_equal, again, read)
    memory = [part[k] for part in read.parts.values() for k in ('feedback', 'opt_state')]
    assert all(np.any(a) for tree in memory for a in jax.tree.leaves(tree) if np.size(a) > 30)
    losses, _ = steps(trainer, state, order[CUT:])
    if of == to:
        assert losses == want[2:]
    np.testing.assert_allclose(losses, want[2:], rtol=rtol)
    np.testing.assert_allclose(losses, there[2:], rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize('replicas', [1, 2])
def test_a_finished_run_given_again(tmp_path, monkeypatch, capsys, replicas):
    """Under another runtime, without its summary, and with more epochs: its table, each time."""
    known_model(monkeypatch, 'flat', made)

    def given(runtime, epochs):
        config = small(runtime, replicas, BUFFERS)
        config.epochs = epochs
        summary = loop.train_and_evaluate(config, tmp_path, draw=False)
        assert 'bytes per step' in capsys.readouterr().out
        return summary

    first = given('local', 1)
    for runtime in RUNTIMES[1:]:
        assert given(runtime, 1) == first
    for runtime in RUNTIMES[1:]:  # killed after the last checkpoint
        (tmp_path / 'summary.json').unlink()
        (row,), (sent,) = (given(runtime, 1)[k] for k in ('moved', 'bytes'))
        assert row['payload'] == [sent['forward'], sent['backward']]
    for epochs, runtime in enumerate(RUNTIMES, 2):
        assert given(runtime, epochs)['steps'] == epochs * first['steps']


def test_a_state_without_a_row_per_sample_is_not_for_spmd(monkeypatch):
    known_model(monkeypatch, 'flat', made)
    exp = experiment.experiment_of(small('spmd', 1, BASES))
    with pytest.raises(ValueError, match=r'not a row per sample \(16\).*use mpmd or local'):
        Trainer(exp, ProcessGroup()).create()
