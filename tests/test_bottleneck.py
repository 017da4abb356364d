"""Learned projections at boundaries: what crosses, what they are at first, and tied tables."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.models import gpt2, gpt2_file, principal
from jaxmp.models.bottleneck import narrowed
from jaxmp.net.group import ProcessGroup
from jaxmp.plan import stages as plan_stages
from jaxmp.training import experiment, sizes, task, tasks
from jaxmp.training.trainer import Trainer
from tests.runs import config_of

RAW = jaxmp.parse('raw')


class Layer(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.width)(x)


def test_the_first_channels_cross_until_it_has_learned_better():
    x = np.random.default_rng(0).standard_normal((3, 5), np.float32)
    plain = Layer(8), Layer(6), Layer(2)
    stages = narrowed(plain, jax.ShapeDtypeStruct(x.shape, x.dtype), 7)
    assert stages[2] is plain[2]  # six channels are no more than seven
    kept, y, want = [], x, x
    for stage, alone in zip(stages, plain, strict=True):
        y, variables = stage.init_with_output(jax.random.key(1), y)
        want = alone.apply({'params': {'Dense_0': variables['params']['Dense_0']}}, want)
        if stage is stages[0]:
            assert y.shape == (3, 7)
            want = want.at[:, 7:].set(0)
        kept.append(sorted(variables['params']))
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
    assert kept == [['Dense_0', 'narrow'], ['Dense_0', 'widen'], ['Dense_0']]


@pytest.mark.slow
def test_a_gpt2_with_a_bottleneck_trains_alike_in_stages_of_their_own():
    """Its table stays tied, projections and embeddings learn, and three of eight channels cross."""
    found, order = [], np.arange(64)
    for runtime in ('local', 'spmd', 'mpmd'):
        config = config_of('text_gpt2', width=8, heads=2, blocks=2, stages=2, runtime=runtime)
        config.update(epochs=1, parallel={'num_microbatches': 2})
        config.data.update(train_examples=64, sequence_length=16)
        config.model.update(bottleneck=3, embed_every_stage=True)
        exp = experiment.experiment_of(config)
        trainer, losses = Trainer(exp, ProcessGroup()), []
        state = trainer.create()
        for after, values, _ in trainer.epoch(0, state, order):
            state, losses = after, losses + np.ravel(values['loss']).tolist()
        found.append(losses)
    for losses in found[1:]:
        np.testing.assert_allclose(losses, found[0], rtol=1e-5)
    [row] = sizes.message_bytes(exp)
    assert row['uncompressed'] == 4 * 16 * 16 * 3
    first, last = (state.model.params[s][0] for s in (0, 1))
    np.testing.assert_array_equal(first['wte'], last['wte'])
    assert not np.array_equal(first['narrow']['kernel'], jnp.eye(8, 3))
    assert not np.array_equal(last['widen']['kernel'], jnp.eye(3, 8))
    assert np.any(last['tokens'])
    assert 'tokens' not in first


def test_a_later_stage_adds_its_embedding_of_the_tokens():
    tokens, key = jnp.array([[3, 1, 3]]), jax.random.key(0)
    sizes = gpt2.Config(vocabulary=5, positions=3, width=4, blocks=2, heads=2)
    plain = gpt2.gpt2(sizes, 2)
    stages = gpt2.gpt2(dataclasses.replace(sizes, embed_every_stage=True), 2)
    model = jaxmp.pipeline(stages, RAW, RAW)
    alone, _ = jaxmp.pipeline(plain, RAW, RAW).init(key, tokens)
    (first, last), _ = model.init(key, tokens)
    table = last['params'].pop('tokens')
    assert jax.tree.all(jax.tree.map(np.array_equal, (first, last), alone))
    assert table.shape == (5, 4)
    assert not table.any()
    table = jnp.arange(20.0).reshape(5, 4)
    hidden = plain[0].apply(first, tokens) + table[tokens]
    want = plain[1].apply(last, hidden)
    last['params']['tokens'] = table
    y, _, _ = model.apply((first, last), None, tokens)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


def test_tokens_that_a_stage_misses_are_an_error():
    sizes = gpt2.Config(vocabulary=5, positions=3, width=4, heads=2, embed_every_stage=True)
    stages = gpt2.Stage(sizes, 1), gpt2.Stage(sizes, 1)
    model = jaxmp.pipeline(stages, RAW, RAW)
    with pytest.raises(
        ValueError, match=r'Stage reads the tokens .* is no integers; give token ids'
    ):
        model.init(jax.random.key(0), jnp.ones((1, 3, 4)))


def test_what_tokens_tell_and_the_largest_components_arrive():
    """Four directions and a mean per token of eight channels, seen often, are all there is."""
    rng = np.random.default_rng(0)
    tokens = np.repeat(np.arange(3), 4000)
    means, some = rng.standard_normal((3, 8)), rng.standard_normal((4, 8))
    x = means[tokens] + rng.standard_normal((12000, 4)) @ some
    parts = [(x[i::5], tokens[i::5]) for i in range(5)]
    e, d, table = principal.principal(parts, 4, 3)
    np.testing.assert_allclose(x @ e @ d + table[tokens], x, atol=0.01)
    assert np.abs(x @ e @ d - x).max() > 0.5
    np.testing.assert_allclose(d @ e, np.eye(4), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('everywhere', [True, False])
def test_a_trained_network_starts_with_its_principal_components(tmp_path, everywhere):
    def of(runtime='local', **model):
        config = config_of('text_gpt2', width=8, heads=2, blocks=2, stages=2, runtime=runtime)
        config.update(epochs=1, model=model, fwd='raw', bwd='raw')
        config.data.update(train_examples=64, sequence_length=16)
        exp = experiment.experiment_of(config)
        return exp, Trainer(exp, ProcessGroup()).create().model.params

    def hidden(exp, params):
        """What the second stage's first block takes."""
        x = jnp.asarray(exp.data.train.x[:64])
        h = exp.task.stages[0].apply({'params': params[0]}, x)
        if 'widen' in params[1]:
            h = h @ params[1]['widen']['kernel']
        return h + params[1]['tokens'][x] if 'tokens' in params[1] else h

    exp, params = of()
    exp.task.export(str(tmp_path), tuple({'params': params[s]} for s in (0, 1)))
    want = hidden(exp, params)
    narrow = {'path': str(tmp_path), 'bottleneck': 5, 'embed_every_stage': everywhere}
    exp, params = of(**narrow)
    error = lambda params: np.square(hidden(exp, params) - want).mean() / np.var(want)
    left = error(params)
    eye = {'narrow': {'kernel': jnp.eye(8, 5)}}, {'widen': {'kernel': jnp.eye(5, 8)}}
    first_channels = error({s: {**params[s], 'tokens': 0 * want[0], **eye[s]} for s in (0, 1)})
    assert left < (0.05 if everywhere else 0.25) < 0.3 < first_channels
    _, apart = of('mpmd', **narrow)
    for s in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, apart[s][0], params[s])
    shapes = jax.eval_shape(Trainer(exp, ProcessGroup()).create).model.params  # as elastic runs do
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), shapes, params)
    with pytest.raises(ValueError, match=r'have 8 channels, .* give --config.model.width=8'):
        of(**narrow, width=16)


@pytest.mark.slow
def test_the_probe_of_a_plan_gives_the_tokens_to_every_stage():
    config = config_of('text_gpt2', width=8, heads=2, blocks=2, stages=2)
    config.data.update(train_examples=64, sequence_length=16)
    config.model.update(bottleneck=3, embed_every_stage=True)
    exp = experiment.experiment_of(config)
    params = Trainer(exp, ProcessGroup()).create().model.params
    rows = plan_stages.passes(exp, [{'params': params[s]} for s in (0, 1)])(False)
    assert [len(row) for row in rows] == [2, 2]


def test_embeddings_of_no_later_stage_are_refused_and_those_of_some_not_written(tmp_path):
    with pytest.raises(ValueError, match=r'config.model.stages=1 has none; give 2 or more'):
        tasks.task_of(config_of('text_gpt2', stages=1, embed_every_stage=True))
    stages = gpt2.gpt2(gpt2.Config(3, 2, 4, 2, 2, embed_every_stage=True), 2)
    with pytest.raises(ValueError, match='no place for embeddings at every stage'):
        gpt2_file.write(str(tmp_path), stages, ())
    x, key = jnp.ones((1, 2, 4)), jax.random.key(0)
    with pytest.raises(ValueError, match='embeds the tokens too; give them as tokens='):
        stages[1].apply(stages[1].init(key, x), x)


def test_a_start_of_ones_own_keeps_its_projections():
    made = tasks.task_of(config_of('text_gpt2', width=8, heads=2, stages=2, blocks=2))
    old = made._replace(start=lambda stage, variables, key: {'params': {'wte': 1}})
    found = task.narrow(old, 3).start(0, {'params': {'wte': 0, 'narrow': 2}}, None)
    assert found == {'params': {'wte': 1, 'narrow': 2}}


def test_what_cannot_be_narrowed_is_refused():
    x = jax.ShapeDtypeStruct((3, 5), np.float32)
    with pytest.raises(ValueError, match='8 channels: no boundary has more channels'):
        narrowed([Layer(8), Layer(2)], x, 8)
    with pytest.raises(TypeError, match='takes Linen stages, and function is none'):
        narrowed([Layer(8), lambda x: x], x, 2)
