"""The boundary and the pipeline against loops written by hand, on one device and over four."""

import re
from functools import partial
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from jaxmp import Ctx, FeedbackState, parse
from tests.base import slow
from tests.laws import QUICK

B, D = 4, 24
jit = partial(jax.jit, compiler_options=QUICK)

PAIRS = [  # forward, backward, boundaries
    ('ef(log_scale(3))', 'ef(uniform(3))', 2),
    ('ef21(uniform(3))', 'ef21(log_scale(3))', 1),
    ('ef_mixed(top_k(0.4, values=uniform(4)))', 'ef_mixed(top_k(0.3), accumulate=True)', 1),
    ('aqsgd(log_scale(4), examples=9)', 'aqsgd(uniform(3), examples=9)', 2),
    ('block(3, 32, stochastic)', 'uniform(3, stochastic)', 1),
    ('top_k(0.3)', 'ef(same_support())', 1),
    ('random_k(0.4)', 'same_support(values=fp16)', 1),
]


def tree_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def tree_close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-12), a, b)


def network(seed=0):
    """Weights of three stages, inputs and targets of three steps, ids."""
    r = np.random.default_rng(seed)
    weights = [jnp.asarray(r.standard_normal((D, D)) / np.sqrt(D)) for _ in range(3)]
    x, target = (jnp.asarray(r.standard_normal((3, B, D))) for _ in range(2))
    ids = jnp.asarray([[0, 3, 8, 2], [1, 3, 5, 7], [8, 0, 3, 4]])
    return weights, x, target, ids


def stage(w, x):
    return jnp.tanh(x @ w)


def chain(boundaries, weights, feedback, x, ctx):
    """Stages and boundaries through the public `cross`."""
    crossed = []
    for i, w in enumerate(weights):
        if i:
            x, at = boundaries[i - 1].cross(x, feedback.at(i - 1), ctx.fold(i))
            crossed.append(at)
        x = stage(w, x)
    return x, FeedbackState.join(crossed)


def squared(boundaries, weights, feedback, x, target, ctx):
    y, feedback = chain(boundaries, weights, feedback, x, ctx)
    return jnp.mean((y - target) ** 2), (feedback, y)


# Oracle: stage by stage, with a jax.vjp of each stage and a hand loop of send and recv.


def by_hand(fwd, bwd, weights, states, x, target, ctx):
    """One step. ``states`` is ``[(fwd tx, fwd rx, bwd tx, bwd rx)]``, one entry a boundary."""
    states, supports, pulls = [list(s) for s in states], [], []
    for i, w in enumerate(weights):
        if i:
            s, at = states[i - 1], ctx.fold(i).fold(0)
            like = jaxmp.like(x)
            m, s[0] = fwd.send(x, s[0], at)
            supports.append(fwd.codec.indices(m, like, at))
            x, s[1] = fwd.recv(m, s[1], like, at)
        x, pull = jax.vjp(stage, w, x)
        pulls.append(pull)
    loss, pull = jax.vjp(lambda y: jnp.mean((y - target) ** 2), x)
    (g,) = pull(jnp.ones_like(loss))
    grads = []
    for i in reversed(range(len(weights))):
        gw, g = pulls[i](g)
        grads.insert(0, gw)
        if i:
            s, at = states[i - 1], ctx.fold(i).fold(1)._replace(indices=supports[i - 1])
            like = jaxmp.like(g)
            m, s[2] = bwd.send(g, s[2], at)
            g, s[3] = bwd.recv(m, s[3], like, at)
    return loss, grads, states


def as_links(fwd, bwd, states):
    """States of both ends as a local boundary holds them: one copy where they are equal."""

    def ends(channel, tx, rx):
        if channel.shared_state:
            tree_close(tx, rx)  # to the bit: test_feedback.py
        return (tx, () if channel.shared_state else rx)

    return FeedbackState(
        tuple(ends(fwd, s[0], s[1]) for s in states), tuple(ends(bwd, s[2], s[3]) for s in states)
    )


@pytest.mark.parametrize(
    ('fwd', 'bwd', 'n'), slow(PAIRS, lambda pair: re.match('ef|random_k', pair[0]))
)
def test_boundary_is_the_loop_by_hand(fwd, bwd, n):
    """Loss, gradients and states of three steps; float64, because flipped roundings cascade."""
    with jax.enable_x64(True):
        fwd, bwd = parse(fwd), parse(bwd)
        b = jaxmp.boundary(fwd, bwd)
        weights, x, target, ids = network()
        weights = weights[: n + 1]
        step = jit(jaxmp.value_and_grad(partial(squared, [b, b])))
        hand = jit(partial(by_hand, fwd, bwd))
        feedback = jaxmp.init_feedback([b] * n, [x[0]] * n)
        states = [(*fwd.init(jaxmp.like(x[0])), *bwd.init(jaxmp.like(x[0])))] * n
        for t in range(3):
            ctx = Ctx(jax.random.key(t), ids[t])
            (loss, _), grads, feedback = step(weights, feedback, x[t], target[t], ctx)
            want, want_grads, states = hand(weights, states, x[t], target[t], ctx)
            tree_close((loss, grads), (want, want_grads))
            tree_close(feedback, as_links(fwd, bwd, states))
        assert all(np.abs(g).max() > 0 for g in grads)


def test_raw_is_no_boundary_at_all():
    b = jaxmp.boundary(parse('raw'), parse('raw'))
    weights, x, target, _ = network()
    feedback = jaxmp.init_feedback([b, b], [x[0], x[0]])

    def plain(weights, x, target):
        for w in weights:
            x = stage(w, x)
        return jnp.mean((x - target) ** 2), x

    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1), has_aux=True))(
        weights, x[0], target[0]
    )

    def crossed(wx, feedback, target):
        return squared([b, b], wx[0], feedback, wx[1], target, Ctx())

    run = jax.jit(jaxmp.value_and_grad(crossed))
    (loss, y), grads, _ = run((weights, x[0]), feedback, target[0])
    tree_equal(((loss, y), grads), want)


# Micro-batches.


def test_scanned_microbatches_are_the_loop_by_hand():
    """The forward state goes through the micro-batches in order, the backward state in reverse."""
    fwd, bwd = parse('ef21(uniform(3))'), parse('ef(log_scale(3))')
    b = jaxmp.boundary(fwd, bwd)
    with jax.enable_x64(True):
        (w, _, _), x, target, _ = network()

        def loss(w, feedback, x, target):
            def tick(feedback, batch):
                y, feedback = b.cross(stage(w, batch[0]), feedback)
                return feedback, jnp.mean((y - batch[1]) ** 2)

            feedback, losses = jax.lax.scan(tick, feedback, (x, target))
            return losses.sum(), (feedback, losses)

        def hand(w, x, target):
            (ftx, frx), (btx, brx) = (c.init(jaxmp.like(x[0])) for c in (fwd, bwd))
            kept, total = [], jnp.zeros_like(w)
            for i in range(3):
                h, pull = jax.vjp(lambda w, i=i: stage(w, x[i]), w)
                like = jaxmp.like(h)
                m, ftx = fwd.send(h, ftx, Ctx())
                y, frx = fwd.recv(m, frx, like, Ctx())
                kept.append((pull, 2 * (y - target[i]) / y.size, fwd.codec.indices(m, like, Ctx())))
            for pull, g, support in reversed(kept):
                m, btx = bwd.send(g, btx, Ctx(indices=support))
                g, brx = bwd.recv(m, brx, jaxmp.like(g), Ctx(indices=support))
                total += pull(g)[0]
            return total, ftx, btx

        _, grads, feedback = jit(jaxmp.value_and_grad(loss))(w, b.init(x[0]), x, target)
        want, ftx, btx = jit(hand)(w, x, target)
        tree_close((grads, feedback.fwd[0], feedback.bwd[0]), (want, ftx, btx))
        assert np.abs(btx).max() > 0


# What value_and_grad is for.


def linear(b, w, feedback, x, g, ctx=None):
    y, feedback = b.cross(w * x, feedback, ctx)
    products = jax.lax.optimization_barrier(y * g)  # or some programs sum with FMA
    return jnp.sum(products), (feedback, y)


REMEMBERS = 'ef(uniform(2))', 'ef21(uniform(2))', 'aqsgd(raw, 9)', 'klt(3)'
BARE = {  # functions of a loss (w, x) -> scalar that are not value_and_grad
    'grad': jax.grad,
    'value_and_grad': jax.value_and_grad,
    'jit': lambda f: jax.jit(jax.grad(jax.jit(f))),
    'vjp': lambda f: lambda w, x: jax.vjp(f, w, x)[1](1.0),
    'checkpoint': lambda f: jax.grad(jax.checkpoint(f)),
    'vmap': lambda f: jax.vmap(jax.grad(f), (None, 0)),
    'of vmap': lambda f: jax.grad(lambda w, x: jax.vmap(f, (None, 0))(w, x).sum()),
    'cond': lambda f: jax.grad(lambda w, x: jax.lax.cond(x[0, 0, 0] > 0, f, f, w, x[0])),
    'second': lambda f: jax.grad(jax.grad(f)),
}


@pytest.mark.parametrize(
    ('way', 'bwd'), [*((w, REMEMBERS[0]) for w in BARE), *(('grad', bwd) for bwd in REMEMBERS[1:])]
)
def test_a_bare_grad_over_a_backward_state_is_refused(way, bwd):
    """One crossing, or micro-batches in a scan; not a forward alone, nor without state."""

    def losses(bwd):
        b = jaxmp.boundary(parse('ef(bf16)'), parse(bwd))
        feedback, ctx = b.init(jnp.ones((B, D))), Ctx(ids=jnp.arange(B))
        cross = lambda w, x, feedback: b.cross(w * x, feedback, ctx)

        def scanned(w, x):
            tick = lambda feedback, x: cross(w, x, feedback)[::-1]
            return jnp.sum(jax.lax.scan(tick, feedback, jnp.stack([x, x]))[1] ** 2)

        return lambda w, x: jnp.sum(cross(w, x, feedback)[0] ** 2), scanned

    w, x = jnp.ones(()), jnp.ones((2, B, D))
    x = x if way in ('vmap', 'of vmap', 'cond') else x[0]
    for loss in losses(bwd):
        with pytest.raises(TypeError, match=r'another function than jaxmp.value_and_grad .* use'):
            jax.eval_shape(BARE[way](loss), w, x)
        jax.eval_shape(loss, w, jnp.ones((B, D)))
    for loss in losses('bf16'):
        jax.eval_shape(BARE[way](loss), w, x)


def test_value_and_grad_finds_the_state_wherever_it_goes():
    """Through micro-batches that are recomputed, examples apart, and a branch."""
    b = jaxmp.boundary(parse('ef(bf16)'), parse('ef21(bf16)'))

    def loss(w, feedback, x):
        cross = jax.checkpoint(jax.jit(lambda feedback, x: b.cross(w * x, feedback)[::-1]))
        skip = lambda feedback, x: (feedback, x)
        tick = lambda feedback, x: jax.lax.cond(x[0, 0] > 2, skip, cross, feedback, x)
        feedback, y = jax.lax.scan(jax.vmap(tick), feedback, x)
        return jnp.sum(y**2), (feedback, None)

    x = jnp.arange(3 * 5 * B * D, dtype='f4').reshape(3, 5, B, D) / 700
    feedback = jax.tree.map(lambda a: jnp.stack([a] * 5), b.init(x[0, 0]))
    _, grads, feedback = jit(jaxmp.value_and_grad(loss))(jnp.ones(()), feedback, x)
    assert grads != 0
    assert np.abs(feedback.bwd[0]).max() > 0
    frozen = lambda w: jnp.sum(w * b.cross(x[0, 0], b.init(x[0, 0]))[0])
    assert jax.grad(frozen)(1.0) != 0, 'of what comes after the boundary alone'


def test_an_unused_boundary_keeps_its_state():
    b = jaxmp.boundary(parse('ef21(uniform(3))'), parse('ef(uniform(3))'))
    weights, x, target, _ = network()
    both = jit(jaxmp.value_and_grad(partial(squared, [b, b])))
    start = jaxmp.init_feedback([b, b], [x[0], x[0]])
    _, _, feedback = both(weights, start, x[0], target[0], Ctx())

    def first_only(weights, feedback, x, target):
        one = FeedbackState(feedback.fwd[:1], feedback.bwd[:1])
        loss, (one, y) = squared([b], weights[:2], one, x, target, Ctx())
        return loss, (
            FeedbackState((one.fwd[0], feedback.fwd[1]), (one.bwd[0], feedback.bwd[1])),
            y,
        )

    _, _, after = jit(jaxmp.value_and_grad(first_only))(weights, feedback, x[1], target[1])
    for side in ('fwd', 'bwd'):
        before, now = getattr(feedback, side), getattr(after, side)
        tree_equal(now[1], before[1])
        assert np.abs(now[1][0]).max() > 0
        assert not np.array_equal(now[0][0], before[0][0])


def test_checkpoint_changes_no_number():
    with jax.enable_x64(True):  # recomputed sums differ in the last bit
        b = jaxmp.boundary(parse('ef21(block(3, 32, stochastic))'), parse('ef(uniform(3))'))
        weights, x, target, _ = network()
        weights = weights[:2]

        def run(wrap):
            step = jit(jaxmp.value_and_grad(wrap(partial(squared, [b]))))
            feedback, results = jaxmp.init_feedback([b], [x[0]]), []
            for t in range(2):
                *result, feedback = step(weights, feedback, x[t], target[t], Ctx(jax.random.key(t)))
                results.append((result, feedback))
            return results

        tree_close(run(jax.checkpoint), run(lambda f: f))


def test_the_rule_needs_no_key_and_keeps_dtype():
    b = jaxmp.boundary(parse('uniform(4)'), parse('ef(uniform(4))'))
    x = jnp.ones((B, D), 'bfloat16')
    step = jit(jaxmp.value_and_grad(partial(linear, b)))
    (_, y), grads, feedback = step(jnp.ones(D, 'bfloat16'), b.init(x), x, x)
    assert y.dtype == grads.dtype == 'bfloat16'
    assert feedback.bwd[0].dtype == 'float32'


# Bad input.


def cross(fwd, bwd, shape=(B, D), made_for=(B, D), ctx=None):
    b = jaxmp.boundary(parse(fwd), parse(bwd))
    feedback = jax.eval_shape(lambda: b.init(jax.ShapeDtypeStruct(made_for, 'float32')))

    def grad(feedback, x):
        def loss(x, feedback):
            y, feedback = b.cross(x, feedback, ctx)
            return jnp.sum(y), (feedback, None)

        return jaxmp.value_and_grad(loss)(x, feedback)[1]

    return jax.eval_shape(grad, feedback, jax.ShapeDtypeStruct(shape, 'float32'))


REFUSED = [
    (
        ('raw', 'same_support()'),
        'same_support reuses the positions of the forward message, and it has none',
    ),
    (
        ('uniform(4)', 'ef(same_support())'),
        'use it as bwd with a forward channel over top_k or ran',
    ),
    (('same_support()', 'raw'), 'use it as bwd'),
    (
        ('ef(raw)', 'raw', (128, D), (100, D)),
        r'feedback.fwd has buffers .*100.* a tensor of',
    ),
    (
        ('raw', 'ef21(raw)', (3, D)),
        r'feedback.bwd has buffers .* shape \(3, 24\) .* keep the batch size',
    ),
    (('aqsgd(raw, 9)', 'raw', (B, 5)), 'feedback.fwd has buffers'),
    (('aqsgd(raw, 9)', 'raw'), "aqsgd needs ctx.ids; the data pipeline must yield 'id'"),
    (('raw', 'aqsgd(raw, 9)'), "aqsgd needs ctx.ids; the data pipeline must yield 'id'"),
    (('raw', 'random_k(0.1)'), 'random_k needs ctx.key'),
]


@pytest.mark.parametrize(('args', 'says'), REFUSED)
def test_refused(args, says):
    with pytest.raises(ValueError, match=says):
        cross(*args)


@pytest.mark.parametrize(
    'fwd',
    ['top_k(0.3)', 'ef(top_k(0.3))', 'ef21(top_k(0.3))', 'ef_mixed(top_k(0.3))', 'random_k(0.2)'],
)
def test_same_support_works_with_positions(fwd):
    assert cross(fwd, 'same_support()', ctx=Ctx(jax.random.key(0))).shape == (B, D)


@pytest.mark.parametrize('side', ['fwd', 'bwd'])
def test_a_boundary_takes_channels(side):
    ends = {'fwd': parse('raw'), 'bwd': parse('raw')} | {side: jaxmp.raw}
    with pytest.raises(TypeError, match=f'boundary {side} must be a channel, got .* write direct'):
        jaxmp.boundary(**ends)


def test_second_order_and_forward_mode():
    """As the docstring says: forward-mode differentiation raises."""
    b = jaxmp.boundary(parse('raw'), parse('raw'))
    x = jnp.ones((B, D))
    with pytest.raises(TypeError, match='jvp'):
        jax.jvp(lambda x: b.cross(x, b.init(x))[0], (x,), (x,))


def test_states_of_several_boundaries_need_a_shape_each():
    b = jaxmp.boundary(parse('ef(raw)'), parse('raw'))
    with pytest.raises(ValueError, match='2 boundaries got 1 shapes; give one shape per boundary'):
        jaxmp.init_feedback([b, b], [jnp.ones((B, D))])


# The pipeline.


class Stage(nn.Module):
    width: int
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(self.width)(x))
        return jnp.tanh(nn.Dropout(self.dropout, deterministic=not train)(x))


def made(fwd, bwd, dropout=0.0):
    model = jaxmp.pipeline([Stage(w, dropout) for w in (6, 7, 5)], parse(fwd), parse(bwd))
    x = jnp.asarray(np.random.default_rng(4).standard_normal((B, 8)), 'float32')
    return SimpleNamespace(model=model, x=x, **named(model.init(jax.random.key(0), x)))


def named(pair):
    return dict(zip(('variables', 'feedback'), pair, strict=True))


def test_open_boundaries_are_the_uncompressed_model():
    p = made('uniform(1)', 'uniform(1)')
    x = p.x
    for stage, own in zip(p.model.stages, p.variables, strict=True):
        x = stage.apply(own, x)
    y, variables, feedback = p.model.apply(p.variables, None, p.x)
    np.testing.assert_array_equal(y, x)
    tree_equal(variables, p.variables)
    assert feedback is None
    closed = jit(p.model.apply)(p.variables, p.feedback, p.x)[0]
    assert np.abs(closed - x).max() > 0.1


def test_a_channel_a_boundary():
    fwd, bwd = ['ef(uniform(2))', 'raw'], ['raw', 'ef21(top_k(0.5))']
    model = jaxmp.pipeline([Stage(w) for w in (6, 7, 5)], *([*map(parse, c)] for c in (fwd, bwd)))
    one = [jaxmp.boundary(parse(f), parse(b)) for f, b in zip(fwd, bwd, strict=True)]
    x = jnp.ones((B, 8))
    variables, feedback = jax.eval_shape(model.init, jax.random.key(0), x)
    likes = model.likes(variables, x)
    assert [l.shape for l in likes] == [(B, 6), (B, 7)]
    bits = [[b.bits(l) for b, l in zip(of, likes, strict=True)] for of in (model.boundaries, one)]
    assert bits[0] == bits[1]
    shapes = jax.tree.map(jnp.shape, feedback)
    assert shapes == FeedbackState((((B, 6), ()), ((), ())), (((), ()), ((B, 7), ())))


@pytest.mark.parametrize('side', ['fwd', 'bwd'])
@pytest.mark.parametrize('n', [1, 3])
def test_a_wrong_number_of_channels(side, n):
    ends = {'fwd': parse('raw'), 'bwd': parse('raw')} | {side: [parse('raw')] * n}
    says = f'3 stages have 2 boundaries, and {side} has {n} channels; give one for all or one'
    with pytest.raises(ValueError, match=says):
        jaxmp.pipeline([Stage(3)] * 3, **ends)


def test_a_pipeline_needs_a_stage():
    with pytest.raises(ValueError, match='at least one stage'):
        jaxmp.pipeline([], parse('raw'), parse('raw'))
    lonely = jaxmp.pipeline([Stage(3)], parse('raw'), parse('raw'))
    assert lonely.init(jax.random.key(0), jnp.ones((B, 2)))[1] == FeedbackState((), ())


def trainer(p):
    """A training step on a key: loss and new variables, gradients, new feedback."""

    def loss(variables, feedback, ctx):
        y, variables, feedback = p.model.apply(variables, feedback, p.x, ctx, train=True)
        return jnp.mean(y**2), (feedback, variables)

    run = jit(jaxmp.value_and_grad(loss))
    return lambda key: run(p.variables, p.feedback, Ctx(jax.random.key(key)))


def test_training_updates_statistics_and_states_and_evaluation_nothing():
    p = made('ef21(uniform(3))', 'ef(uniform(3))')
    (_, variables), grads, feedback = trainer(p)(0)
    for before, after, grad in zip(p.variables, variables, grads, strict=True):
        assert after.keys() == {'params', 'batch_stats'}
        tree_equal(after['params'], before['params'])
        mean = ('batch_stats', 'BatchNorm_0', 'mean')
        assert not np.array_equal(get(after, mean), get(before, mean))
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), feedback, p.feedback)
    assert all(jax.tree.leaves(changed))

    kept = jax.tree.map(np.copy, (variables, feedback))
    _, same, _ = jit(p.model.apply)(variables, feedback, p.x)
    tree_equal(same, variables)
    tree_equal((variables, feedback), kept)


def get(tree, path):
    for word in path:
        tree = tree[word]
    return tree


def test_dropout_draws_from_the_context():
    p = made('raw', 'raw', dropout=0.5)
    step = trainer(p)
    first, again, other = (step(key)[0][0] for key in (0, 0, 1))
    assert first == again != other


def test_tokens_that_a_stage_misses_are_an_error():
    class Reader(nn.Module):
        reads_tokens = True

        @nn.compact
        def __call__(self, x, train=False, tokens=None):
            return x

    model = jaxmp.pipeline((Reader(), Reader()), parse('raw'), parse('raw'))
    with pytest.raises(
        ValueError, match=r'Reader reads the tokens .* is no integers; give token ids'
    ):
        model.init(jax.random.key(0), jnp.ones((1, 3, 4)))
