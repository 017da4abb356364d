"""Replicas in training: equal to one on the joined batch, resumed to the bit, watched for drift."""

import json
import os
import signal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import exchange
from jaxmp.models import lenet
from jaxmp.net.group import ProcessGroup
from jaxmp.training import checkpoint, experiment, loop
from jaxmp.training.replicas import DriftError
from jaxmp.training.trainer import Trainer
from jaxmp.wire import nbytes
from tests.runs import (
    LAUNCH,
    SMALL,
    config_of,
    handed,
    known_model,
    pids,
    records,
    start,
    text_of,
    wait_for_steps,
)


class Flat(nn.Module):
    """A dense layer of the flattened input. Compiles in no time."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(jnp.tanh(x.reshape(len(x), -1)))


@pytest.fixture(autouse=True)
def flat(monkeypatch):
    known_model(monkeypatch, 'flat', lambda classes, width: (Flat(width), Flat(classes)))


def small(**changes):
    words = {**SMALL, 'model': 'flat', 'width': 24, 'checkpoint_every': 1, 'cosine': 0}
    return config_of('digits_dataparallel', **{**words, **changes})


def test_two_and_four_replicas_train_like_one(tmp_path):
    """Float32 sums in another order: losses to 1e-5; boundaries inside every replica."""
    found = []
    for n in (1, 2, 4):
        config = small(replicas=n, exchange='mean')
        summary = loop.train_and_evaluate(config, tmp_path / str(n), quiet=True)
        found.append([r['loss'] for r in records(tmp_path / str(n))])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)
    assert summary['exchange']['handed'] == summary['exchange']['compiled']


@pytest.mark.slow
def test_both_compressions_in_one_table(tmp_path, capsys):
    """Cuts between stages inside each replica, gradients between replicas."""
    rules = {'fwd': 'ef21(uniform(4))', 'bwd': 'ef(uniform(4))'}
    config = small(**rules, exchange='dgc(0.05, momentum=0.5, warmup=1)', epochs=1, momentum=0.0)
    summary = loop.train_and_evaluate(config, tmp_path, draw=False)
    out = capsys.readouterr().out
    sent = summary['exchange']
    assert sent['handed'] == sent['compiled']
    assert sent['uncompressed'] == 4 * summary['parameters']
    assert sent['handed']['all-gather'] < 0.1 * sent['uncompressed']
    (row,) = summary['bytes']
    assert row['uncompressed'] == 4 * 16 * 24  # of one replica
    for number in (row['forward'], row['backward'], sent['sent'], sent['server']['down']):
        assert f'{number:,}' in out


def state_of(workdir, config):
    s = experiment.experiment_of(config)
    trainer = Trainer(s, ProcessGroup())
    found, _ = checkpoint.Checkpoints(workdir).restore(trainer.export(trainer.create()))
    state = trainer.load(trainer.create(), found)
    return trainer, state.replace(key=jax.random.key_data(state.key))


KILLED = {**SMALL, 'epochs': 3, 'checkpoint_every': 1, 'cosine': 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ('text', 'before'), [('power_sgd(1)', ()), ('double_squeeze(one_bit)', LAUNCH)]
)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, text, before):
    """kill -9, one of two processes if there are two, then to the end: equal to the bit.

    And equal to both replicas in one process, but for the rounding of another program.
    """
    words = {**KILLED, 'exchange': text}
    whole, cut, here = (tmp_path / name for name in ('whole', 'cut', 'here'))
    run_ = lambda workdir: start(workdir, *before, name='digits_dataparallel', **words)
    out, code = text_of(run_(whole))
    assert code == 0, out[-2000:]
    process = run_(cut)
    wait_for_steps(process, cut, 5)
    os.kill(pids(cut, 1)[0] if before else process.pid, signal.SIGKILL)
    out, code = text_of(process)
    assert code == (137 if before else -signal.SIGKILL), out[-2000:]
    assert not before or 'stopped: process 1 (replica 1) has lost its connection' in out
    assert len(records(cut)) < len(records(whole)) == 9
    out, code = text_of(run_(cut))
    assert code == 0, out[-2000:]
    assert 'resuming from step' in out
    assert records(cut) == records(whole)
    config = config_of('digits_dataparallel', **words)
    loop.train_and_evaluate(config, here, quiet=True)
    losses = [[r['loss'] for r in records(w)] for w in (cut, here)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    a, b = (json.loads((w / 'summary.json').read_text()) for w in (cut, here))
    assert (a['processes'], b['processes']) == (2 if before else 1, 1)
    assert a['exchange'] == b['exchange']
    assert a['exchange']['handed'] == a['exchange']['compiled']
    errors = [np.asarray(x) for x in jax.tree.leaves(state_of(here, config)[1].exchange)]
    assert all(np.any(x) for x in errors if x.size > 100)
    assert any(not np.array_equal(x[0], x[1]) for x in errors)


@pytest.mark.slow
def test_shared_parameters_that_drift_are_named(tmp_path):
    """Replicas differ between rounds and what they share does not; after a restart, too."""
    config = small(replicas=4, exchange='diloco(3, all_gather(ef(one_bit)), fragments=2)', epochs=1)
    summary = loop.train_and_evaluate(config, tmp_path, quiet=True)
    assert summary['exchange']['handed'] == summary['exchange']['compiled']
    trainer, state = state_of(tmp_path, config)
    trainer.check(state)
    kernel = state.model.params[0]['Dense_0']['kernel']
    assert not np.array_equal(kernel[0], kernel[1])
    trainer.check(state)
    state.exchange[0][0]['parts'][1]['start'][0] += np.arange(4)[:, None, None] == 2
    with pytest.raises(DriftError, match=r'replica 2 differ from the others of 4, first at .*'):
        trainer.check(state)


class Plain(nn.Module):
    """A stage without parameters."""

    @nn.compact
    def __call__(self, x, train=False):
        return jnp.tanh(x)


def test_a_stage_without_parameters_does_not_drift(monkeypatch):
    known_model(monkeypatch, 'flat', lambda classes, width: (Plain(), Flat(classes)))
    config = small(replicas=2, runtime='mpmd', exchange='mean')
    trainer = loop.prepare(config, ProcessGroup())
    trainer.check(trainer.create())


def test_a_replica_that_drifts_is_named(tmp_path, monkeypatch):
    """One bit of one parameter, and an adder that errs; the checkpoint kept is from before."""
    words = {'replicas': 4, 'exchange': 'all_gather(ef(one_bit))'}
    loop.train_and_evaluate(small(**words, epochs=1), tmp_path, quiet=True)
    config = small(**words, epochs=3)
    trainer, state = state_of(tmp_path, config)
    trainer.check(state)
    params = state.model.params
    kernel = np.array(params[1]['Dense_0']['kernel'])
    kernel.view(np.uint32)[2, 3, 4] ^= 1
    kernel = jax.device_put(kernel, params[1]['Dense_0']['kernel'].sharding)
    last = {**params[1], 'Dense_0': {**params[1]['Dense_0'], 'kernel': kernel}}
    broken = state.replace(model=state.model._replace(params={**params, 1: last}))
    says = r'parameters of replica 2 differ from the others of 4, first at .*kernel'
    with pytest.raises(DriftError, match=says):
        trainer.check(broken)
    two = small(replicas=2, exchange='mean')
    pair = loop.prepare(two, ProcessGroup())
    begun = pair.create()
    halves = jax.tree.map(np.array, begun.model.params)
    halves[0]['Dense_0']['bias'][1] += 1
    halves = jax.tree.map(lambda a, b: jax.device_put(a, b.sharding), halves, begun.model.params)
    with pytest.raises(DriftError, match='the 2 replicas differ, and none has a maj'):
        pair.check(begun.replace(model=begun.model._replace(params=halves)))
    parse = exchange.parse
    rule = parse(words['exchange'])

    def corrupt(grads, held, key, via):  # a device that adds wrongly
        grads, held = rule.reduce(grads, held, key, via)
        return jax.tree.map(lambda g: g + 1e-6 * (via.index == 2), grads), held

    wrong = {words['exchange']: rule._replace(reduce=corrupt)}
    monkeypatch.setattr(exchange, 'parse', lambda text, names: wrong.get(text) or parse(text))
    with pytest.raises(DriftError, match='replica 2 differ'):
        loop.train_and_evaluate(config, tmp_path)
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['5']


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'replicas': 3}, r'config.parallel.replicas=3 does not divide config.batch_size=32'),
        ({'replicas': 0}, 'config.parallel.replicas=0 is not a whole number from 1'),
        ({'num_microbatches': 3}, r'config.batch_size=32 / 2 replicas; a step takes that many'),
        ({'exchange': 'top_k(0.1)'}, 'is not an exchange between replicas'),
        ({'exchange': 'dgc(0.1)'}, r'would add a second; set config.optimizer.momentum=0'),
        ({'exchange': 'dgc(0.1)', 'optimizer': 'adamw'}, 'has moments of its own; take sgd'),
        ({'fwd': 'aqsgd(raw, examples=examples)'}, 'of several replicas another meets an example'),
    ],
)
def test_a_bad_setting_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        experiment.experiment_of(small(**change))


def test_lenet_has_the_size_of_the_thesis():
    def count(side):
        x, sizes = jnp.zeros((1, side, side, 1)), []
        for stage in lenet():
            x, v = stage.init_with_output(jax.random.key(0), x)
            sizes += [a.size for a in jax.tree.leaves(v)]
        return sum(sizes)

    assert jax.eval_shape(lambda: jnp.zeros(count(28))).size == 21_840
    with pytest.raises(ValueError, match='positive width'):
        lenet(width=0)


@pytest.mark.parametrize('text', ['local_sgd(3)', 'diloco(3, mean, fragments=2)'])
def test_a_tied_table_is_sent_once_per_round(text):
    """The first stage's; the last stage takes its copy from there."""
    config = config_of('text_gpt2', replicas=2, width=8, blocks=2, stages=2, heads=2, exchange=text)
    exp = experiment.experiment_of(config)
    rows = jax.ShapeDtypeStruct((8, *exp.data.train.x.shape[1:]), np.int32)
    batch = {'x': rows, 'y': rows, 'id': jax.ShapeDtypeStruct((8,), np.int32)}
    counts, shapes = handed(exp, batch)
    assert counts == {'all-reduce': nbytes(shapes)}
