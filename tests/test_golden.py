"""The paper's operators against vectors made with its published code (golden/README.md)."""

import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import Ctx, FeedbackState
from tests.base import slow

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CASES = json.loads((GOLDEN / 'manifest.json').read_text())['cases']
OPERATORS = [c for c in CASES if not c['op'].startswith('chain')]
CHAINS = [c for c in CASES if c['op'].startswith('chain')]


def load(case):
    return dict(np.load(GOLDEN / case['file']))


def channels(case):
    fw, bw, op = case.get('fw_k'), case.get('bw_k'), case['op']
    if op.startswith('quant'):
        name = 'uniform' if op == 'quant' else 'max_scaled'
        return f'{name}({case["fw_bits"]})', f'{name}({case["bw_bits"]})'
    if op == 'aqsgd':
        return f'aqsgd(top_k({fw}), examples={case["n_examples"]})', f'top_k({bw})'
    return {
        'topk': (f'top_k({fw})', f'top_k({bw})'),
        'topk_shared': (f'top_k({fw})', 'same_support()'),
        'ef': (f'ef(top_k({fw}))', f'ef(top_k({bw}))'),
        'ef_published': (f'top_k({fw})', f'ef(top_k({bw}))'),
        'ef21': (f'ef21(top_k({fw}))', f'ef21(top_k({bw}))'),
        'efmixed': tuple(f'ef_mixed(top_k({k}), accumulate=True)' for k in (fw, bw)),
    }[op]


def tolerance(case, x):
    if case['op'] == 'quant':
        return 2e-6 * float(x.max() - x.min())
    if case['op'] == 'quant_acsgd':
        return 1e-6 * float(np.abs(x).max())
    return 0.0 if case['op'] in ('topk', 'topk_shared') else 1e-6


def stepper(b):
    """One forward and one backward crossing; the gradient ``g`` arrives from the next stage."""

    def loss(x, feedback, g, ids):
        y, feedback = b.cross(x, feedback, Ctx(ids=ids))
        return jnp.sum(y * g), (feedback, y)

    return jax.jit(jaxmp.value_and_grad(loss))


def first_visits(case, data, call):
    """AQ-SGD's first visits are sent in full: epoch 0 of the vectors is the warm-up."""
    return case.get('first_visit') == 'full' and (call == 0 or not data['seen'][call - 1].all())


def beside_others(case):
    """Other shares of TopK, and the second layout of a tensor."""
    share = case['op'].startswith('topk') and case['fw_k'] not in (0.1, 0.3)
    return share or (
        case['file'].endswith('_bsd.npz') and case['op'] not in ('topk_shared', 'quant_acsgd')
    )


@pytest.mark.parametrize(
    'case',
    slow(OPERATORS, beside_others),
    ids=lambda c: c['file'][:-4],
)
def test_operator(case):
    data = load(case)
    fwd, bwd = map(jaxmp.parse, channels(case))
    b = jaxmp.boundary(fwd, bwd)
    steps = {w: stepper(jaxmp.boundary(jaxmp.warm(fwd) if w else fwd, bwd)) for w in (False, True)}
    feedback = b.init(data['x'][0])
    for call in range(case['calls']):
        x, g = data['x'][call], data['g'][call]
        ids = data['ids'][call] if 'ids' in data else None
        warm = first_visits(case, data, call)
        (_, y), gx, feedback = steps[warm](x, feedback, g, ids)
        for ours, theirs, near in ((y, data['y'][call], x), (gx, data['gx'][call], g)):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance(case, near))
            if 'quant' not in case['op'] and not warm:
                assert ((np.asarray(ours) != 0) == (theirs != 0)).all(), 'same support'
        check_buffers(case, data, feedback, call)


def check_buffers(case, data, feedback, call):
    names = {'buf': feedback.fwd, 'fw_buf': feedback.fwd, 'bw_buf': feedback.bwd}
    if case['op'] == 'ef_published':
        del names['fw_buf']
    for name, (tx, _) in names.items():
        if name in data:
            np.testing.assert_allclose(tx, data[name][call], rtol=0, atol=1e-6)


CHAIN = {
    'chain_none': ('raw', 'raw'),
    'chain_topk': ('top_k(0.1)', 'top_k(0.1)'),
    'chain_quant': ('uniform(4)', 'uniform(8)'),
    'chain_topk_shared': ('top_k(0.3)', 'same_support()'),
    'chain_ef': ('ef(top_k(0.1))', 'ef(top_k(0.1))'),
    'chain_ef21': ('ef21(top_k(0.1))', 'ef21(top_k(0.1))'),
    'chain_efmixed': ('ef_mixed(top_k(0.1), accumulate=True)',) * 2,
}


class Layer(nn.Module):
    width: int
    last: bool

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        return x if self.last else nn.relu(x)


@pytest.mark.parametrize(
    'case', slow(CHAINS, lambda c: 'ef' in c['file']), ids=lambda c: c['file'][:-4]
)
def test_chain(case):
    """Three SGD steps of a four-stage network, through the public pipeline."""
    data = load(case)
    fwd, bwd = map(jaxmp.parse, CHAIN[case['op']])
    model = jaxmp.pipeline([Layer(w, w == 5) for w in (40, 40, 40, 5)], fwd, bwd)
    _, feedback = model.init(jax.random.key(0), data['x'][0])
    variables = tuple(
        {'params': {'Dense_0': {'kernel': data[f'W{i}'], 'bias': data[f'b{i}']}}} for i in range(4)
    )

    def loss(variables, feedback, x, labels):
        logits, _, feedback = model.apply(variables, feedback, x)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return nll, (feedback, logits)

    grad = jax.jit(jaxmp.value_and_grad(loss))
    near = {'rtol': 0, 'atol': 1e-5}
    for t in range(case['calls']):
        (nll, logits), grads, feedback = grad(variables, feedback, data['x'][t], data['labels'][t])
        np.testing.assert_allclose(nll, data['losses'][t], **near)
        np.testing.assert_allclose(logits, data['logits'][t], **near)
        for i, layer in enumerate(grads):
            np.testing.assert_allclose(
                layer['params']['Dense_0']['kernel'], data[f'dW{i}'][t], **near
            )
            np.testing.assert_allclose(
                layer['params']['Dense_0']['bias'], data[f'db{i}'][t], **near
            )
        for i in range(3):
            for name, side in (('fw_buf', feedback.fwd), ('bw_buf', feedback.bwd)):
                if f'{name}{i}' in data:
                    np.testing.assert_allclose(side[i][0], data[f'{name}{i}'][t], **near)
        variables = jax.tree.map(lambda p, g: p - case['lr'] * g, variables, grads)
    for i, own in enumerate(variables):
        np.testing.assert_allclose(own['params']['Dense_0']['kernel'], data[f'W{i}_final'], **near)
    check_evaluation(model, variables, data, near)


def check_evaluation(model, variables, data, near):
    x = data['x'][-1]
    if 'eval_logits_plain' in data:
        plain = model.apply(variables, None, x)[0]
        np.testing.assert_allclose(plain, data['eval_logits_plain'], **near)
        feedback = FeedbackState(((((), ()),) * 3), ((((), ()),) * 3))
        compressed = model.apply(variables, feedback, x)[0]
        np.testing.assert_allclose(compressed, data['eval_logits_compressed'], **near)
