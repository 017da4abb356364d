"""Groups of parameters: cut and joined, frozen ones left as they are, copies held together."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import path_aware_map

import jaxmp
from jaxmp import config, exchange
from jaxmp.data import Dataset, Split
from jaxmp.models.tied import TiedParameter
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.types import ByReplica
from jaxmp.training import clipping, experiment, groups, loop, portable, sizes
from jaxmp.training.elastic.run import ElasticTrainer
from jaxmp.wire import nbytes
from tests.base import slow
from tests.runs import handed

NUMBERS = {
    'shared': np.linspace(-1, 1, 9, dtype=np.float32).reshape(3, 3),
    'kernel': np.linspace(2, -1, 9, dtype=np.float32).reshape(3, 3),
    'bias': np.float32([0.1, 0.2, 0.3]),
}
NAMES = {'params', 'model_state', 'opt_state', 'exchange', 'feedback', 'tied'}  # in old files too
X = np.random.default_rng(0).standard_normal((12, 3)).astype(np.float32)
Y = X[:, ::-1].copy()


class Layer(nn.Module):
    """A dense layer of two kernels, of which another stage has the first too."""

    @nn.compact
    def __call__(self, x, train=False):
        p = {k: self.param(k, lambda key, a=a: jnp.asarray(a)) for k, a in NUMBERS.items()}
        return jnp.tanh(x @ (p['shared'] + p['kernel']) + p['bias'])


def but_kernels(stage, path):
    return path != ('kernel',)


def biases(stage, path):
    return path == ('bias',)


def task(trained=but_kernels, tied='shared'):
    split = Split(X, Y)
    return jaxmp.Task(
        data=Dataset('lines', split, split, classes=0, mean=(), std=()),
        stages=(Layer(), Layer()),
        prepare=lambda x, key: x,
        score=lambda y, target: {'loss': ((y - target) ** 2).mean(1)},
        metric=jaxmp.Metric('loss', 'loss', higher_is_better=False),
        scores=('loss',),
        tied=TiedParameter((tied,)),
        trained=trained,
    )


def settings(runtime='local', replicas=1, **changes):
    optimizer = {'lr': 0.5, 'schedule': 'constant', 'momentum': 0.9, 'weight_decay': 0.1}
    words = {
        'batch_size': 4,
        'fwd': 'raw',
        'bwd': 'raw',
        'optimizer': optimizer | {'clip_norm': 0.1},
    }
    return config.complete(
        {**words, 'parallel': {'runtime': runtime, 'replicas': replicas}, **changes}
    )


def step(params, memory, rows):
    """A step of the whole model, by optax, of what is trained."""
    rule = optax.chain(
        optax.clip_by_global_norm(0.1), optax.add_decayed_weights(0.1), optax.sgd(0.5, 0.9)
    )

    def loss(params):
        x = X[rows]
        for s in (0, 1):
            x = jnp.tanh(x @ (params['shared'] + NUMBERS['kernel']) + params[f'bias{s}'])
        return jnp.mean((x - Y[rows]) ** 2)

    updates, memory = rule.update(jax.grad(loss)(params), memory or rule.init(params), params)
    return optax.apply_updates(params, updates), memory


@functools.cache
def expected():
    """What is trained after three steps."""
    bias = NUMBERS['bias']
    params, memory = {'shared': NUMBERS['shared'], 'bias0': bias, 'bias1': bias}, None
    for i in range(3):
        params, memory = step(params, memory, slice(4 * i, 4 * i + 4))
    return params


@pytest.mark.parametrize(
    ('runtime', 'replicas'),
    slow([('local', 1), ('local', 2), ('mpmd', 1), ('mpmd', 2), ('spmd', 1)], lambda c: c[1] == 2),
)
def test_what_is_frozen_stays_and_the_rest_learns_as_if_it_were_all(runtime, replicas):
    """Clipped by the norm of what is trained alone; a frozen kernel has no momentum either."""
    made = loop.prepare(settings(runtime, replicas), ProcessGroup(), task())
    for after, _, _ in made.epoch(0, made.create(), np.arange(12)):
        state = after
    parts = made.export(state).parts
    assert len(parts) == 2 * replicas
    for name, part in parts.items():
        params, want = part['params'], expected()
        assert set(params) == {'shared', 'bias'}  # a frozen kernel is in no checkpoint
        np.testing.assert_allclose(params['shared'], want['shared'], rtol=1e-4)
        np.testing.assert_allclose(params['bias'], want[f'bias{name[0]}'], rtol=1e-4)
        momenta = [a for a in jax.tree.leaves(part['opt_state']) if a.ndim]
        assert [a.shape for a in momenta] == [(3, 3), (3,)]
        assert set(part) == NAMES | {'waiting'}
    saved = portable.from_pieces([portable.to_pieces(made.export(state))])
    loaded = made.load(made.create(), saved)
    jax.tree.map(np.testing.assert_array_equal, made.export(loaded).parts, parts)
    for row in made.training.rows(loaded.model.params[0]).values():
        np.testing.assert_array_equal(row['kernel'], NUMBERS['kernel'])
    joined = portable.variables_of(made.exp, saved, sizes.shapes(made.exp)[0])
    for s, variables in enumerate(joined):
        np.testing.assert_array_equal(variables['params']['kernel'], NUMBERS['kernel'])
        np.testing.assert_array_equal(
            variables['params']['bias'], parts[f'{s}.0']['params']['bias']
        )


def test_replicas_exchange_what_is_trained_and_copies_once():
    exp = experiment.experiment_of(settings(replicas=2), task())
    counts, shapes = handed(exp, {'x': X[:2], 'y': Y[:2], 'id': np.arange(2)})
    assert counts == {'all-reduce': nbytes(shapes)}
    assert nbytes(shapes) == 4 * (9 + 3 + 3)


class Fixed(nn.Module):
    """A dense layer whose one kernel `but_kernels` leaves as it is."""

    @nn.compact
    def __call__(self, x, train=False):
        return jnp.tanh(x @ self.param('kernel', lambda key: jnp.asarray(NUMBERS['kernel'])))


def first_is_frozen(runtime, changes=None, fwd='raw', **parallel):
    """An epoch of three stages, of which the first is frozen: trainer, losses, state."""
    config_ = settings(runtime, fwd=fwd, bwd='uniform(8)', optimizer={'momentum': 0.9})
    config_.parallel.update(num_microbatches=2, **parallel)
    three = task()._replace(stages=(Fixed(), Layer(), Layer()), tied=None, **(changes or {}))
    made = loop.prepare(config_, ProcessGroup(), three)
    *_, (state, values, _) = made.epoch(0, made.create(), np.arange(12))
    return made, values['loss'][-1], state


@pytest.mark.parametrize(
    ('runtime', 'parallel'),
    [('mpmd', {}), ('mpmd', {'schedule': 'zb_h1', 'remat': True}), ('spmd', {})],
    ids=str,
)
def test_below_what_is_trained_no_gradient_is_made_or_sent(runtime, parallel):
    local, loss, state = first_is_frozen('local')
    assert local.exp.first == 1
    [first, second] = sizes.message_bytes(local.exp)
    assert first['backward'] == 0 < second['backward']
    made, found, apart = first_is_frozen(runtime, **parallel)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    for s in (1, 2):
        for name, a in state.model.params[s].items():
            np.testing.assert_allclose(apart.model.params[s][0][name], a, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(apart.model.params[0][0]['kernel'], NUMBERS['kernel'])
    assert not [a for a in jax.tree.leaves(apart.opt_state[0]) if a.ndim]  # but a count of steps
    rows = [row['payload'] for row in made.moved()['moved']]
    assert rows == [[r['forward'], r['backward']] for r in sizes.message_bytes(made.exp)]
    if runtime == 'mpmd':
        assert (1, 0) not in made.training.drivers[0].lanes
        kinds = {(a.stage, a.kind) for a in made.training.drivers[0].actions}
        assert not kinds & {(0, 'B'), (0, 'W')}


FORWARD = 'raw', 'per_sample(uniform(8))', 'top_k(0.5, values=fp16)'


@pytest.mark.parametrize('fwd', slow(FORWARD, 'raw'.__ne__))
def test_what_frozen_stages_give_is_sent_once(fwd, monkeypatch):
    """From the second epoch on it costs no bytes, and no number changes."""
    orders = [np.random.default_rng(epoch).permutation(12) for epoch in range(3)]
    ends = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr(loop, 'with_kept', lambda exp, group: exp)
        made, *_ = first_is_frozen('mpmd', fwd=fwd)
        made.again()  # as where a process was lost after that epoch: its receiver has kept nothing
        state, losses, sent = made.create(), [], [made.training.payload().copy()]
        assert not sent[0].any()
        for epoch, order in enumerate(orders):
            for after, values, _ in made.epoch(epoch, state, order):
                state = after
                losses.append(float(np.ravel(values['loss'])[-1]))
            sent.append(made.training.payload().copy())
        ends.append((losses, jax.tree.leaves(state.model.params), np.diff(sent, axis=0)))
    (losses, params, sent), (always, others, full) = ends
    assert losses == always
    jax.tree.map(np.testing.assert_array_equal, params, others)
    np.testing.assert_array_equal(sent[0], full[0])
    assert full[1, 0, 0] > 0
    for epoch in (1, 2):
        np.testing.assert_array_equal(sent[epoch], full[epoch] * [[0, 1], [1, 1]])


def noised(x, key):
    return x if key is None else x + jax.random.normal(key)


class Noisy(Fixed):
    """One that drops some of its output in training."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dropout(0.5, deterministic=not train)(super().__call__(x, train))


@pytest.mark.parametrize(
    ('fwd', 'changes', 'reason'),
    [
        ('ef(top_k(0.5))', {}, r'ef\(top_k\(0.5\)\) has a state'),
        ('qsgd(4)', {}, r'qsgd\(4\) is random'),
        (
            'uniform(8)',
            {},
            r'depends on the others of its micro-batch; per_sample\(unif',
        ),
        ('raw', {'stages': (Noisy(), Layer(), Layer())}, 'a stage before boundary 1 is random'),
        ('raw', {'prepare': noised}, 'the input or a stage b'),
    ],
)
def test_what_changes_is_sent_each_time(fwd, changes, reason):
    config_ = settings('mpmd', fwd=fwd, bwd='raw')
    three = task()._replace(**{'stages': (Fixed(), Layer(), Layer()), 'tied': None, **changes})
    exp = loop.prepare(config_, ProcessGroup(), three).exp
    assert exp.first == 1
    assert exp.kept == 0
    assert re.search(f'^sends activations of frozen stages each time: .*{reason}', exp.sending)


def test_a_model_of_which_nothing_is_trained_is_refused():
    nothing = task(lambda stage, path: path == ('scale',))._replace(tied=None)
    with pytest.raises(ValueError, match='none of the parameters of 2 stages is trained; select'):
        experiment.experiment_of(settings(), nothing)


def test_a_frozen_table_is_no_copy_that_stages_share():
    exp = experiment.experiment_of(settings('mpmd'), task(biases))
    assert [g.homes for g in exp.groups] == [(0,), (1,)]
    with pytest.raises(ValueError, match='of this model sends none'):
        experiment.experiment_of(settings('mpmd', tied_exchange='power_sgd(2)'), task(biases))


@pytest.mark.parametrize('runtime', ['local', 'mpmd'])
def test_a_copy_that_is_missing_is_named(runtime):
    wanted = 'stage 0 has none at its path, but bias, kernel, shared; give a path that both'
    with pytest.raises(ValueError, match=wanted):  # noqa: PT012
        made = loop.prepare(settings(runtime), ProcessGroup(), task(tied='kernels'))
        made.create()


def test_members_share_what_is_trained(tmp_path):
    """Of an elastic run: a replica's own frozen kernels stay beside the shared parameters."""
    exp = experiment.experiment_of(settings(replicas=2, exchange='diloco(2, mean)'), task())
    trainer = ElasticTrainer(exp, 0, tmp_path)
    meetings, params = trainer.meetings, trainer.create().model.params
    later = jax.tree.map(lambda a: a + 1, params)
    later[1]['shared'] += 1
    for public in meetings.shared(later).values():
        for name, a in NUMBERS.items():
            np.testing.assert_array_equal(public[name], a + (name == 'kernel'))


def test_parts_of_replicas_are_put_back():
    tied = groups.Group((0, 1), TiedParameter(('wte',)).selects, 2, optax.sgd(0.1), exchange.mean)
    some = (tied, *groups.rest(2, optax.sgd(0.1), exchange.mean, lambda s, path: path[0] != 'kept'))
    row = lambda n: {'wte': n, 'kept': {'x': 10 * n}, 'h': {'x': n, 'empty': {}}}
    trees = {1: ByReplica({0: row(1), 2: row(2)})}
    parts = groups.split(some, trees)
    assert parts == {
        (1, some[0]): {0: {'wte': 1}, 2: {'wte': 2}},
        (1, some[2]): {r: {'h': {'x': n, 'empty': {}}} for r, n in ((0, 1), (2, 2))},
    }
    assert groups.joined(trees, parts) == trees
    new = {home: jax.tree.map(lambda n: -n, part) for home, part in parts.items()}
    put = {r: {**row(-n), 'kept': {'x': 10 * n}} for r, n in ((0, 1), (2, 2))}
    assert groups.joined(trees, new) == {1: put}


GROUP = {'table': 'slow', 'head': 'fast', 'bias': 'fast'}
TREES = {'table': np.ones((9, 2))}, {'head': {'bias': np.ones(1)}, 'table': np.ones(1)}


def by_name(clip, label):
    """An optimizer of one's own whose rates follow names, perhaps clipped by the norm of all."""
    rates = {'slow': optax.sgd(0.1), 'fast': optax.sgd(1.0)}
    rule = optax.multi_transform(rates, label)
    return optax.chain(optax.clip_by_global_norm(1.0), rule) if clip else rule


LABELS = {
    'of the path': lambda tree: jax.tree.map_with_path(lambda path, _: GROUP[path[0].key], tree),
    'of the keys': lambda tree: {name: GROUP[name] for name in tree},
    'of flax': lambda tree: path_aware_map(lambda path, _: GROUP[path[0]], tree),
    'of its end': lambda tree: jax.tree.map_with_path(lambda path, _: GROUP[path[-1].key], tree),
}


@pytest.mark.parametrize('label', LABELS)
def test_an_optimizer_that_looks_up_names_clips_by_the_norm_of_all(label):
    """It is tried on the names that it will get; what cannot be given the norm is refused."""
    plain, clipped = (by_name(clip, LABELS[label]) for clip in (False, True))
    assert clipping.of_stage(plain, 'own.py:plain', TREES) is plain
    if label == 'of its end':
        with pytest.raises(
            ValueError, match=r"may move parameters .*'SequenceKey'.*clip_norm to cl"
        ):
            clipping.of_stage(clipped, 'own.py:clipped', TREES)
        return
    rule = clipping.of_stage(clipped, 'own.py:clipped', TREES)
    assert isinstance(rule, clipping.WholeNorm)
    grads = {'head': {'bias': jnp.full(1, 3.0)}, 'table': jnp.zeros(1)}
    updates, _ = rule.update(grads, jnp.asarray(4.0), rule.init(grads), grads)
    np.testing.assert_allclose(updates['head']['bias'], -3 / 5, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.shape, b.shape), updates, grads)


def test_an_optimizer_that_fails_on_a_name_says_so():
    other = ({'body': np.ones(3)},)
    with pytest.raises(ValueError, match=r"own.py:rule' fails on arrays .*KeyError: 'body'"):
        clipping.of_stage(by_name(False, LABELS['of the keys']), 'own.py:rule', other)


def late(begins):
    """Clips from a step on."""

    def update(grads, step, params=None):
        scale = jnp.where(step >= begins, jnp.minimum(1, 1 / optax.tree.norm(grads)), 1.0)
        return jax.tree.map(lambda g: g * scale, grads), step + 1

    return optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)


CLIP, SGD = optax.clip_by_global_norm(1.0), optax.sgd(0.1)
OPTIMIZERS = {
    'sgd': (SGD, 'alone'),
    'adamw': (optax.adamw(optax.linear_schedule(0.0, 0.1, 1000)), 'alone'),
    'lion': (optax.lion(0.1), 'alone'),
    'lamb': (optax.lamb(0.1), 'alone'),
    'every 4 steps': (optax.MultiSteps(SGD, 4).gradient_transformation(), 'alone'),
    'frozen in part': (optax.masked(optax.set_to_zero(), lambda tree: [True, False]), 'alone'),
    'clip': (optax.chain(CLIP, SGD), 'normed'),
    'limit never reached': (optax.chain(optax.clip_by_global_norm(1e9), SGD), 'normed'),
    'clip, adam': (optax.chain(CLIP, optax.adam(0.1)), 'normed'),
    'clip, every 2 steps': (optax.chain(CLIP, optax.apply_every(2), SGD), 'normed'),
    'injected': (
        optax.chain(optax.inject_hyperparams(optax.clip_by_global_norm)(max_norm=1.0), SGD),
        'normed',
    ),
    'no NaN, clip': (optax.chain(optax.zero_nans(), CLIP, SGD), 'normed'),
    'if finite': (optax.apply_if_finite(SGD, 5), 'normed'),
    'clip from step 9': (optax.chain(late(9), SGD), 'normed'),
    'every 2 steps clip': (optax.MultiSteps(optax.chain(CLIP, SGD), 2), 'by more'),
    'every 4 steps clip': (optax.MultiSteps(optax.chain(CLIP, SGD), 4), 'by more'),
    'trace, clip': (optax.chain(optax.trace(0.9), CLIP, SGD), 'by more'),
    'ema, clip': (optax.chain(optax.ema(0.9), CLIP, SGD), 'by more'),
    'sum of 2, clip': (optax.chain(optax.apply_every(2), CLIP, SGD), 'by more'),
    'decay, clip': (optax.chain(optax.add_decayed_weights(0.1), CLIP, SGD), 'by more'),
    'dadapt': (optax.contrib.dadapt_adamw(1.0), 'by more'),
    'every 13 steps': (optax.MultiSteps(optax.chain(CLIP, SGD), 13), 'no parameter in 12 steps'),
    'frozen': (optax.set_to_zero(), 'no parameter in 12 steps'),
}


@pytest.mark.parametrize('name', OPTIMIZERS)
def test_an_optimizer_is_taken_where_stages_move_as_one_tree(name):
    """Momentum, sums of steps, NaN and late clipping too; all else is refused."""
    rule, says = OPTIMIZERS[name]
    if says in ('alone', 'normed'):
        is_normed = isinstance(clipping.of_stage(rule, 'own.py:rule'), clipping.WholeNorm)
        assert is_normed == (says == 'normed')
        return
    with pytest.raises(
        ValueError,
        match=f"^config.optimizer.name='own.py:rule' moves.*{says}.*;.*"
        'config.optimizer.clip_norm to clip',
    ):
        clipping.of_stage(rule, 'own.py:rule')
