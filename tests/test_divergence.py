"""The divergence of the next token, measured and predicted from one backward pass."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import parse
from jaxmp.boundary.pipeline import pipeline
from jaxmp.data.tokenizer import byte_level
from jaxmp.training.evaluation import divergence, language_model, perplexity, stagewise
from tests.test_decoder import opened, save

BLOCKS = np.random.default_rng(0).integers(0, 37, (16, 12)).astype(np.int32)


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    """A random decoder in three stages, of sharper logits than a new one has."""
    folder = save(tmp_path_factory.mktemp('llama3'), 'llama3')
    _, stages, variables = opened(folder, 3)
    sharper = lambda path, a: 8 * a if 'norm' in jax.tree_util.keystr(path[:2]) else a
    variables = [jax.tree_util.tree_map_with_path(sharper, v) for v in variables]
    return language_model.LanguageModel('random', stages, tuple(variables), byte_level())


def logits(model, channel):
    pipe = pipeline(model.stages, channel, parse('raw'))
    rows = []
    for i in range(0, len(BLOCKS), 4):
        x, ctx = jnp.asarray(BLOCKS[i : i + 4]), stagewise.context(i, BLOCKS[i : i + 4])
        likes = pipe.likes(model.variables, x, train=False)
        states = stagewise.init_feedback(pipe.boundaries, likes)
        rows.append(pipe.apply(model.variables, states, x, ctx, train=False)[0])
    return jnp.concatenate(rows)[:, :-1]


def test_the_measured_one_is_that_of_the_whole_models_distributions(model):
    found = perplexity.scores(model, BLOCKS, {t: parse(t) for t in ('raw', 'block(4)')}, 4)
    p, q = (jax.nn.log_softmax(logits(model, parse(t))) for t in ('raw', 'block(4)'))
    kl = np.asarray((jnp.exp(p) * (p - q)).sum(-1).mean(-1), np.float64)
    assert kl.mean() > 1e-4
    assert found['block(4)'].kl.value == pytest.approx(kl.mean(), rel=0.01)
    assert found['block(4)'].kl.error == pytest.approx(kl.std(ddof=1) / 4, rel=0.02)
    assert found['raw'].kl.value == pytest.approx(0, abs=1e-7)


class Softmax(nn.Module):
    """A last stage whose Fisher information is known."""

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(5, use_bias=False)(x)


def test_squares_of_gradients_are_the_diagonal_of_the_fisher_information():
    r"""Of logits W'x by x it is ``sum_v p_v W_cv^2 - (sum_v p_v W_cv)^2``."""
    last, x = Softmax(), jax.random.normal(jax.random.key(1), (2, 4, 3))
    variables = last.init(jax.random.key(0), x)
    model = language_model.LanguageModel(
        'known', (nn.Embed(5, 3), last), ({}, variables), byte_level()
    )
    tokens = jnp.zeros((2, 4), jnp.int32)
    ctx = stagewise.context(0, tokens)
    squares = [
        divergence.gradients(model, [x], ctx, jax.random.key(seed))[0] ** 2 for seed in range(600)
    ]
    W, p = variables['params']['Dense_0']['kernel'], jax.nn.softmax(last.apply(variables, x))
    known = jnp.einsum('btv,cv->btc', p, W**2) - jnp.einsum('btv,cv->btc', p, W) ** 2
    found = np.mean(squares, 0)
    np.testing.assert_allclose(found[:, :-1], known[:, :-1], rtol=0.25, atol=0.01)
    assert not found[:, -1].any()  # no text follows the last token


CODECS = 'per_token(uniform(8))', 'mx(8)', 'nvfp4', 'block(4)', 'per_token(rotate(lloyd(4), 8))'


@pytest.mark.slow
@pytest.mark.parametrize('text', CODECS)
def test_the_prediction_is_what_is_measured(model, text):
    """One draw of labels, all boundaries together."""
    measured = perplexity.scores(model, BLOCKS, {t: parse(t) for t in ('raw', text)}, 4)[text]
    predicted = divergence.predictions(model, BLOCKS, {text: parse(text)}, 4)[text]
    assert predicted.shape == (16, 2)
    assert predicted.sum(1).mean() == pytest.approx(measured.kl.value, rel=0.3)
