"""Learned projections at boundaries: what crosses, what they are at first, and tied tables."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp.models import gpt2
from jaxmp.net.group import ProcessGroup
from jaxmp.plan import stages as plan_stages
from jaxmp.training import experiment, sizes
from jaxmp.training.tasks import named as tasks
from jaxmp.training.trainer import Trainer
from study import principal
from study.bottleneck import Narrow, narrowed
from tests.runs import config_of

RAW = jaxmp.parse('raw')


def narrow(bottleneck=0, embed_every_stage=False, **changes):
    """A GPT-2 of two stages and eight channels, of which so many cross."""
    words = {'width': 8, 'heads': 2, 'blocks': 2, 'stages': 2, 'sequence_length': 16}
    config = config_of('text_gpt2', **{**words, 'train_examples': 64, 'epochs': 1, **changes})
    with config.unlocked():
        config.model.update(bottleneck=bottleneck, embed_every_stage=embed_every_stage)
    config.model.name = 'study.bottleneck:build'
    return config


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
    for runtime in ('local', 'mpmd'):
        exp = experiment.experiment_of(narrow(3, True, runtime=runtime, num_microbatches=2))
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
    assert np.any(last['tokens']['embedding'])
    assert 'tokens' not in first


def test_a_later_stage_adds_its_embedding_of_the_tokens():
    tokens, key = jnp.array([[3, 1, 3]]), jax.random.key(0)
    sizes = gpt2.Config(vocabulary=5, positions=3, width=4, blocks=2, heads=2)
    plain = gpt2.gpt2(sizes, 2)
    stages = narrowed(plain, jax.ShapeDtypeStruct((1, 3), jnp.int32), 0, vocabulary=5)
    model = jaxmp.pipeline(stages, RAW, RAW)
    alone, _ = jaxmp.pipeline(plain, RAW, RAW).init(key, tokens)
    (first, last), _ = model.init(key, tokens)
    table = last['params'].pop('tokens')['embedding']
    assert jax.tree.all(jax.tree.map(np.array_equal, (first, last), alone))
    assert table.shape == (5, 4)
    assert not table.any()
    table = jnp.arange(20.0).reshape(5, 4)
    hidden = plain[0].apply(first, tokens) + table[tokens]
    want = plain[1].apply(last, hidden)
    last['params']['tokens'] = {'embedding': table}
    y, _, _ = model.apply((first, last), None, tokens)
    np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


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
    def of(name='study.bottleneck:build', **changes):
        config = narrow(fwd='raw', bwd='raw', **changes)
        config.model.name = name
        exp = experiment.experiment_of(config)
        return exp, Trainer(exp, ProcessGroup()).create().model.params

    def hidden(exp, params):
        """What the second stage's first block takes."""
        x = jnp.asarray(exp.data.train.x[:64])
        h = exp.task.stages[0].apply({'params': params[0]}, x)
        if 'widen' in params[1]:
            h = h @ params[1]['widen']['kernel']
        return h + params[1]['tokens']['embedding'][x] if 'tokens' in params[1] else h

    exp, params = of('gpt2')
    exp.task.export(str(tmp_path), tuple({'params': params[s]} for s in (0, 1)))
    want = hidden(exp, params)
    changes = {'path': str(tmp_path), 'bottleneck': 5, 'embed_every_stage': everywhere}
    exp, params = of(**changes)
    error = lambda params: np.square(hidden(exp, params) - want).mean() / np.var(want)
    left = error(params)
    eye = {'narrow': {'kernel': jnp.eye(8, 5)}}, {'widen': {'kernel': jnp.eye(5, 8)}}
    first_channels = error(
        {s: {**params[s], 'tokens': {'embedding': 0 * want[0]}, **eye[s]} for s in (0, 1)}
    )
    assert left < (0.05 if everywhere else 0.25) < 0.3 < first_channels
    _, apart = of(runtime='mpmd', **changes)
    for s in (0, 1):
        jax.tree.map(np.testing.assert_array_equal, apart[s][0], params[s])
    shapes = jax.eval_shape(Trainer(exp, ProcessGroup()).create).model.params  # as elastic runs do
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), shapes, params)
    with pytest.raises(ValueError, match=r'have 8 channels, .* give --config.model.width=8'):
        of(**changes, width=16)


@pytest.mark.slow
def test_the_probe_of_a_plan_gives_the_tokens_to_every_stage():
    exp = experiment.experiment_of(narrow(3, True))
    params = Trainer(exp, ProcessGroup()).create().model.params
    rows = plan_stages.passes(exp, [{'params': params[s]} for s in (0, 1)])(False)
    assert [len(row) for row in rows] == [2, 2]


def test_embeddings_of_no_later_stage_are_refused():
    with pytest.raises(ValueError, match=r'config.model.stages=1 has none; give 2 or more'):
        tasks.task_of(narrow(embed_every_stage=True, stages=1))
    x, stage = jnp.ones((1, 2, 4)), Narrow(Layer(4), table=(3, 4))
    with pytest.raises(ValueError, match='embeds the tokens too; give them as tokens='):
        stage.apply(stage.init(jax.random.key(0), x), x)


def test_what_cannot_be_narrowed_is_refused():
    x = jax.ShapeDtypeStruct((3, 5), np.float32)
    with pytest.raises(ValueError, match='8 channels: no boundary has more channels'):
        narrowed([Layer(8), Layer(2)], x, 8)
    with pytest.raises(TypeError, match='takes Linen stages, and function is none'):
        narrowed([Layer(8), lambda x: x], x, 2)
