"""A parameter that two stages hold: its bytes are counted, and an exchange may compress them."""

import functools
import io
import json
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from jaxmp import exchange
from jaxmp.exchange.copies import ENDS, Copies
from jaxmp.models import gpt2
from jaxmp.net.connect import processes
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.training import checkpoint, experiment, parallel, sizes, summary
from jaxmp.training.evaluate import model_of
from jaxmp.training.evaluation import crosstest
from jaxmp.training.trainer import Trainer
from jaxmp.training.workdir import locks
from tests.laws import QUICK
from tests.runs import config_of

LIKE = jax.ShapeDtypeStruct((40, 16), 'float32')


def counting(grads, state, key, via):
    """The mean times the number of steps, which is all that the exchange remembers."""
    grads, _ = exchange.mean.reduce(grads, (), key, via)
    return [(state + 1) * g for g in grads], state + 1


COUNTED = exchange.Exchange(lambda grads, n: jnp.zeros(()), counting)


def three_steps(rule, devices):
    """Sums and states of three steps, and what each gradient was."""
    rule = exchange.parse(rule) if isinstance(rule, str) else rule
    copies = Copies(rule, LIKE, dict(zip(ENDS, devices, strict=True)))
    state, parts, found = copies.init(), [], []
    for t in range(3):
        part = np.random.default_rng(t).standard_normal((2, *LIKE.shape)).astype('float32')
        own = {e: jax.device_put(p, d) for e, p, d in zip(ENDS, part, devices, strict=True)}
        sums, state = copies.add(own, state, jax.random.key(t))
        assert all(sums[e].devices() == {d} for e, d in zip(ENDS, devices, strict=True))
        parts.append(part)
        found.append([np.asarray(sums[e]) for e in ENDS])
    return copies, np.array(parts), np.array(found), state


@pytest.mark.parametrize('text', ['mean', 'all_gather(ef21(uniform(4)))', 'power_sgd(2)'])
def test_both_copies_get_the_same_sum(text):
    """To the bit, over two devices and on one; what travels is what the compiled program moves."""
    two, parts, far, state = three_steps(text, tuple(jax.devices()[:2]))
    one, _, near, _ = three_steps(text, (jax.devices()[0],) * 2)
    for found in (far, near):
        np.testing.assert_array_equal(found[:, 0], found[:, 1])
    np.testing.assert_allclose(near, far, atol=1e-5)
    if text == 'mean':
        np.testing.assert_array_equal(far[:, 0], parts[:, 0] + parts[:, 1])
        assert state == ()
    else:
        assert 0 < np.abs(far[:, 0] - parts.sum(1)).max() < 10
        assert sorted(state) == sorted(ENDS)
    moved, whole = two.traffic(), 4 * LIKE.shape[0] * LIKE.shape[1]
    assert moved['handed'] == moved['compiled'] > 0
    assert (moved['handed'] == whole) == (text == 'mean')
    assert text == 'mean' or moved['handed'] < whole / 4
    assert one.traffic() == {'handed': moved['handed'], 'compiled': 0}


@pytest.mark.parametrize('rule', ['mean', 'all_gather(ef21(uniform(4)))', COUNTED])
def test_copies_in_two_processes_are_those_of_one(rule):
    devices = tuple(jax.devices()[:2])
    one, parts, wanted, states = three_steps(rule, devices)
    with processes(2) as groups, ThreadPoolExecutor(2) as threads:

        def steps(i):
            swap = functools.partial(groups[i].swapped, [0, 1], 'table')
            copies = Copies(one.exchange, LIKE, {ENDS[i]: devices[i]}, swap)
            state = copies.init()
            for t in range(3):
                part = jax.device_put(parts[t, i], devices[i])
                sums, state = copies.add({ENDS[i]: part}, state, jax.random.key(t))
                np.testing.assert_allclose(sums[ENDS[i]], wanted[t][i], rtol=1e-6, atol=1e-6)
            assert sums[ENDS[i]].devices() == {devices[i]}
            return copies.traffic(), state, sums[ENDS[i]]

        found = list(threads.map(steps, range(2)))
    np.testing.assert_array_equal(found[0][2], found[1][2])
    handed = one.traffic()['handed']
    for end, (traffic, state, _) in zip(ENDS, found, strict=True):
        assert traffic == {'handed': handed, 'compiled': handed}
        assert (state == ()) == (states == ())
        if state:
            same = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
            jax.tree.map(same, state[end], states[end])


def test_a_state_may_be_a_number():
    """Over two devices, which share no array without an axis, as on one."""
    for devices in (tuple(jax.devices()[:2]), (jax.devices()[0],) * 2):
        _, parts, found, state = three_steps(COUNTED, devices)
        for t, (part, sums) in enumerate(zip(parts, found, strict=True), 1):
            np.testing.assert_allclose(sums, [t * part.sum(0)] * 2, rtol=1e-6)
        assert {e: (float(n), n.shape) for e, n in state.items()} == dict.fromkeys(ENDS, (3.0, ()))


TEXT = {'width': 8, 'heads': 1, 'blocks': 2, 'stages': 2, 'sequence_length': 8}
TEXT |= {'train_examples': 48, 'batch_size': 16, 'epochs': 2, 'fwd': 'raw', 'bwd': 'raw'}
SQUEEZED = 'double_squeeze(block(4))'


def small(**changes):
    return config_of('text_gpt2', **{**TEXT, 'runtime': 'mpmd', **changes})


def tables(state):
    """The copies that the stages hold."""
    return [np.asarray(state.model.params[i][0]['wte']) for i in (0, 1)]


@pytest.mark.parametrize(
    ('name', 'norm', 'told'),
    [('text_gpt2', 1.0, False), ('digits_resnet', 1.0, True), ('digits_resnet', 0.0, False)],
)
def test_stages_tell_each_other_the_norm_that_clips(name, norm, told):
    """With a trained table in two stages that is the norm after its copies are summed."""
    exp = experiment.experiment_of(config_of(name, runtime='mpmd', **{'optimizer.clip_norm': norm}))
    assert model_of(exp, exp.model.boundaries).normed is told


@pytest.mark.slow
def test_a_compressed_table_trains_and_goes_on_to_the_bit(tmp_path, monkeypatch):
    """Copies stay equal; a run that goes on from a checkpoint ends like one that was not cut."""
    ends = lambda sizes, n, cuts: (
        gpt2.Stage(sizes, 0, embeds=True),
        gpt2.Stage(sizes, 0, scores=True),
    )
    monkeypatch.setattr(gpt2, 'gpt2', ends)
    quick = functools.partial(Mpmd, options=tuple(QUICK.items()))
    monkeypatch.setattr(parallel, 'Mpmd', quick)
    s = experiment.experiment_of(small(tied_exchange=SQUEEZED))
    made, order = Trainer(s, ProcessGroup()), np.arange(48)
    *_, (whole, _, _) = made.epoch(0, made.create(), order)
    first, last = tables(whole)
    np.testing.assert_array_equal(first, last)
    assert not np.array_equal(first, tables(made.create())[0])
    *_, (cut, _, _) = made.epoch(0, made.create(), order[:16])
    kept = checkpoint.Checkpoints(tmp_path)
    kept.save(1, made.export(cut), {})
    found, _ = kept.restore(made.export(made.create()))
    kept.close()
    cut = made.load(made.create(), found)
    (tmp_path / 'config.json').write_text(json.dumps(s.config.to_dict()))
    scored = crosstest.load(tmp_path)  # in one program, where nothing is exchanged
    np.testing.assert_array_equal(scored.state.model.params[0]['wte'], tables(cut)[0])
    *_, (cut, _, _) = made.epoch(0, cut, order[16:])
    assert np.any(jax.tree.leaves(cut.copies)[0])
    unkeyed = (state.replace(key=jax.random.key_data(state.key)) for state in (cut, whole))
    jax.tree.map(np.testing.assert_array_equal, *unkeyed)

    second = [{i: {1: own[0]} for i, own in part.items()} for part in whole.model[:2]]
    elsewhere = whole.model._replace(params=second[0], model_state=second[1])
    assert made.weights(whole)
    assert made.weights(whole.replace(model=elsewhere)) is None  # of replica 0 nothing is here

    bytes_ = sizes.table_bytes(s)['tied']
    [*links, row] = made.moved()['moved']
    ways = [bytes_['forward'], bytes_['backward']]
    assert row == {'boundary': 'token table', 'payload': ways, 'collectives': ways}
    assert bytes_['uncompressed'] == 256 * 8 * 4 > 7 * ways[0]
    shown = shown_tables(s, bytes_, [*links, row])
    assert [line.count(f' {ways[0]:,} ') for line in shown if 'token table' in line] == [2, 4]


def shown_tables(s, tied, moved):
    """Lines of the closing tables."""
    best = {'epoch': 1, 'loss': 1.0, 'accuracy': 0.5}
    test = {mode: {'best': best, 'last': best} for mode in ('off', 'on')}
    found = {'name': 'n', 'fwd': 'f', 'bwd': 'b', 'measure': 'accuracy', 'test': test}
    found |= {'bytes': sizes.message_bytes(s), 'tied': tied, 'moved': moved}
    found |= {'config': {'epochs': 1}, 'steps': 1, 'phases': []}
    console = Console(file=io.StringIO(), width=100)
    for table in summary.tables({**found, 'processes': 2, 'interface': 0}):
        console.print(table)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'runtime': 'local'}, "this model sends none; take 'mean', or several stages of gpt2"),
        ({'stages': 1}, 'this model sends none'),
        ({'tied': False}, 'several stages of gpt2 with config.model.tied=True and'),
        ({'tied_exchange': 'local_sgd(4)'}, 'shares parameters in place of gradients'),
        ({'tied_exchange': 'momentum(all_gather(fp16))'}, 'brings a momentum'),
        ({'tied_exchange': 'dgc(0.1, momentum=0.0, warmup=2)'}, 'has epochs of its own'),
        ({'tied_exchange': 'top_k(0.1)'}, r'write mean, all_gather\(top_k\(0.1\)\)'),
    ],
)
def test_an_exchange_that_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        experiment.experiment_of(small(**{'tied_exchange': SQUEEZED, **change}))


def test_tables_that_are_not_tied_are_not_exchanged():
    """Each stage begins with a table of its own, and the last one may be on time."""
    late = {'delay': 1, 'correction': 'predict', 'delay_by_stage': True}
    two = [experiment.experiment_of(small(tied=tied, **late)) for tied in (True, False)]
    assert [s.delays for s in two] == [(1, 1), (1, 0)]
    assert [bool(sizes.table_bytes(s)) for s in two] == [True, False]
    found = []
    for runtime in 'mpmd', 'local':
        s = experiment.experiment_of(small(tied=False, **late, runtime=runtime))
        made = Trainer(s, ProcessGroup())
        rows = [*made.epoch(0, made.create(), np.arange(48))]
        begun, end = (
            [
                np.asarray(v['params'][name])
                for v, name in zip(made.weights(state), ('wte', 'lm_head'), strict=True)
            ]
            for state in (made.create(), rows[-1][0])
        )
        assert not np.allclose(*begun)
        found.append((np.ravel([v['loss'] for _, v, _ in rows]), end))
        assert all(np.any(new != old) for new, old in zip(end, begun, strict=True))
    (mpmd, ends), (local, same) = found
    np.testing.assert_allclose(mpmd, local, rtol=1e-5)
    np.testing.assert_allclose(ends, same, atol=1e-5)


def test_a_table_begins_alike_in_one_stage_and_in_several(tmp_path):
    """To the bit; weights that have one table are not trained as two."""
    found = []
    for n in 1, 2:
        s = experiment.experiment_of(small(stages=n, runtime='local'))
        made = Trainer(s, ProcessGroup())
        found.append(made.weights(made.create()))
    one, *two = (v['params']['wte'] for v in (*found[0], *found[1]))
    for copy in two:
        np.testing.assert_array_equal(copy, one)
    s.task.export(tmp_path, found[1])
    with pytest.raises(
        ValueError, match=r'tied=False, and the weights in .* have one table to emb'
    ):
        experiment.experiment_of(small(tied=False, path=str(tmp_path)))


def test_a_run_from_before_the_key_goes_on(tmp_path):
    """What lacks the key has the default; another value is another run."""
    old = {'optimizer': {'lr': 0.1}}
    (tmp_path / 'config.json').write_text(json.dumps(old))
    locks.claim(tmp_path, {**old, 'tied_exchange': 'mean'})
    with pytest.raises(locks.WorkdirError, match=r"tied_exchange='mean' \(now 'power_sgd"):
        locks.claim(tmp_path, {**old, 'tied_exchange': 'power_sgd(2)'})
