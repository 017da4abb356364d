"""What a run tells while it goes: the probe of its boundaries, callbacks, progress, tables."""

import sys
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxmp import Task, data
from jaxmp.config import complete
from jaxmp.metrics import ACCURACY
from jaxmp.net.group import ProcessGroup
from jaxmp.training import experiment, loop, summary
from jaxmp.training.probe import prober
from jaxmp.training.tasks.task import score_classes
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir import trackers
from tests.runs import records

COUNT, WIDE, CLASSES = 48, 30, 5


class Dense(nn.Module):
    """A stage whose passes are written by hand below."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(x)


def task():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(COUNT, 8)).astype(np.float32), np.arange(COUNT, dtype=np.int32)
    split = data.Split(x, y % CLASSES)
    found = data.Dataset('own', split, split, CLASSES, (), ())
    stages = Dense(WIDE), Dense(CLASSES)
    return Task(found, stages, lambda x, key: jnp.asarray(x), score_classes, ACCURACY)


def config(**changes):
    parallel = {k: changes.pop(k) for k in ('runtime', 'num_microbatches') if k in changes}
    own = {'batch_size': 16, 'epochs': 2, 'optimizer': {'lr': 0.1}, 'probe': 'epochs'}
    return complete({**own, 'parallel': parallel, **changes})


def after_an_epoch(settings):
    """Engine and state."""
    exp = experiment.experiment_of(settings, task())
    trainer = Trainer(exp, ProcessGroup())
    order = np.arange(COUNT)[::-1]
    *_, (state, _, _) = trainer.epoch(0, trainer.create(), order)
    return exp, trainer, state


def top_tenth(p):
    kept = np.argsort(-np.abs(p), axis=1)[:, : WIDE // 10]
    y = np.zeros_like(p)
    np.put_along_axis(y, kept, np.take_along_axis(p, kept, 1), 1)
    return y


def by_hand(exp, part, size):
    """Sent and seen at the boundary of two dense stages: TopK of h + e, 4 bits of the gradient."""
    (w0, b0), (w1, b1) = (
        [np.asarray(part[s]['params']['Dense_0'][k], np.float64) for k in ('kernel', 'bias')]
        for s in (0, 1)
    )
    ids = data.order(0, 0, COUNT)[:size]
    x, y = exp.data.train.x[ids], exp.data.train.y[ids]
    h = x @ w0 + b0
    seen = top_tenth(h + np.asarray(part[0]['feedback'].right_tx[0], np.float64))
    logits = seen @ w1 + b1
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    loss = -np.log(p[np.arange(size), y]).mean()
    g = ((p - np.eye(CLASSES)[y]) / size) @ w1.T
    lo, hi = g.min(), g.max()
    quantized = lo + np.round((g - lo) / (hi - lo) * 15) / 15 * (hi - lo)
    return loss, (h, seen), (g, quantized)


def test_the_probe_is_what_one_computes_by_hand():
    count, ways = 2, {'fwd': 'ef(top_k(0.1))', 'bwd': 'uniform(4)'}
    exp, trainer, state = after_an_epoch(config(**ways, runtime='mpmd', num_microbatches=count))
    before = jax.tree.map(np.array, state.model)
    rows = prober(exp)(trainer.export(state))
    found = trainer.export(state)
    loss, *crossings = by_hand(exp, [found.parts[f'{s}.0'] for s in (0, 1)], 16 // count)
    assert [(r['boundary'], r['direction']) for r in rows] == [(1, 'forward'), (1, 'backward')]
    for row, (x, y) in zip(rows, crossings, strict=True):
        wanted = np.linalg.norm(y - x) / np.linalg.norm(x)
        assert row['error'] == pytest.approx(wanted, rel=1e-4)
        assert row['loss'] == pytest.approx(loss, rel=1e-4)
    buffer = found.parts['0.0']['feedback'].right_tx
    assert buffer.shape == (count, 16 // count, WIDE)
    assert rows[0]['feedback'] == pytest.approx(np.sqrt(np.sum(buffer**2)), rel=1e-5)
    assert rows[0]['feedback'] > 0
    assert rows[1]['feedback'] == 0.0
    cut = exp.model.boundaries[0].bits(jax.ShapeDtypeStruct((16 // count, WIDE), 'float32'))
    assert [r['bits'] * (16 // count) * WIDE for r in rows] == list(cut)
    jax.tree.map(np.testing.assert_array_equal, before, state.model)


def test_shared_states_count_once_and_raw_has_no_error():
    text = f'aqsgd(uniform(4), examples={COUNT})'
    exp, trainer, state = after_an_epoch(config(fwd=text, bwd='raw', num_microbatches=2))
    sent, gradient = prober(exp)(trainer.export(state))
    table = trainer.export(state).parts['0.0']['feedback'].right_tx
    assert table.shape == (COUNT, WIDE)
    assert sent['feedback'] == pytest.approx(np.sqrt(np.sum(table**2)), rel=1e-5)
    assert 0 < sent['error'] < 0.2  # of an activation the table knows already
    assert (gradient['error'], gradient['feedback'], gradient['bits']) == (0.0, 0.0, 32.0)


def test_callbacks_get_every_record_and_the_probe_changes_none(tmp_path, capsys):
    ways = {'fwd': 'ef21(uniform(4))', 'bwd': 'ef(uniform(4))', 'phases': 'raw@:2'}
    on, off, seen = tmp_path / 'on', tmp_path / 'off', []
    for epochs in (2, 3):  # ends, and goes on
        settings = config(**ways, epochs=epochs)
        loop.train_and_evaluate(settings, on, task(), callbacks=[seen.append], draw=False)
    test = ['train', 'test', 'test']
    probed = ['train', 'boundary', 'boundary', 'test', 'test']  # once the warm-up has ended
    assert [r['kind'] for r in seen] == [*test, *probed, *probed]
    untimed = [{k: v for k, v in r.items() if k != 'seconds'} for r in seen]
    assert untimed == records(on)
    loop.train_and_evaluate(config(**ways, epochs=3, probe='off'), off, task(), draw=False)
    assert records(off) == [r for r in records(on) if r['kind'] != 'boundary']
    assert capsys.readouterr().err.count('test accuracy off ') == 6


def test_a_run_without_compression_is_shown_once(tmp_path, capsys):
    settings = config(probe='off', epochs=1, fwd='raw', bwd='raw')
    found = loop.train_and_evaluate(settings, tmp_path, task(), draw=False)
    out, said = capsys.readouterr()
    assert found['test']['off'] == found['test']['on']
    assert f'test accuracy {found["test"]["on"]["last"]["accuracy"]:.2%}\n' in said
    assert ' none ' in out
    assert ' off ' not in out + said
    shared = {'text': 'all_gather(fp16)', 'replicas': 2, 'uncompressed': 4, 'sent': 2}
    found |= {'processes': 1, 'exchange': {**shared, 'server': {'up': 2, 'down': 2}}}
    console = Console(width=120)
    console.print(summary.tables(found)[0])
    assert 'bwd raw, exchange all_gather(fp16)' in capsys.readouterr().out


class Fake:
    """Notes the calls of its methods."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*given, **named):
            self.calls.append((name, *given, named))
            return self

        return call


def test_trackers_name_each_number_once(tmp_path, monkeypatch):
    board, wandb = Fake(), Fake()
    monkeypatch.setitem(sys.modules, 'tensorboardX', SimpleNamespace(SummaryWriter=board.open))
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    test = {'kind': 'test', 'step': 9, 'epoch': 1, 'loss': 0.5}
    edge = {'kind': 'boundary', 'step': 9, 'epoch': 1, 'boundary': 2, 'direction': 'backward'}
    rows = [test | {'compression': 'off'}, test | {'compression': 'on'}, edge | {'error': 0.25}]
    names = {'test/off/loss': 0.5, 'test/on/loss': 0.5, 'boundary/2/backward/error': 0.25}
    for _ in range(2):  # the second goes on with the first
        made = trackers.tensorboard(tmp_path), trackers.wandb(tmp_path, {'name': 'n'})
        with made[0] as first, made[1] as second:
            assert not board.calls or board.calls[-1][0] == 'close'  # nothing before a record
            for row in rows:
                first(row)
                second(row)
    assert board.calls[1:5] == [
        *(('add_scalar', k, v, 9, {}) for k, v in names.items()),
        ('close', {}),
    ]
    starts = [named for name, *_, named in wandb.calls if name == 'init']
    assert len(starts) == 2
    assert starts[0] == starts[1]
    assert starts[0]['resume'] == 'allow'
    logged = [given[0] for name, *given in wandb.calls if name == 'log']
    assert logged == 2 * [{'step': 9, k: v} for k, v in names.items()]
    assert wandb.calls[-1][0] == 'finish'


@pytest.mark.parametrize(('make', 'package'), [('tensorboard', 'tensorboardX'), ('wandb', 'wandb')])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, make, package):
    monkeypatch.setitem(sys.modules, package, None)
    wanted = rf'--{make} needs the extra: pip install "jaxmp\[{make}\]"'
    with pytest.raises(ImportError, match=wanted):
        getattr(trackers, make)(tmp_path, *[{}][: make == 'wandb']).__enter__()
