"""flax.nnx: stages against the same Linen stages, and boundaries inside a module."""

import re
import subprocess
import sys
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmp
from jaxmp.nnx import Crossing, stage, value_and_grad
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.local import Local
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.placement import place
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.types import Model
from tests import pipelines
from tests.base import ENV, QUICK, ROOT, slow

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
rounded = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # statistics are float32
M = 2  # micro-batches


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def wave(key, shape, dtype=float, out_sharding=None):
    """The same initial weights in both libraries."""
    del key, out_sharding
    return jnp.sin(jnp.arange(np.prod(shape), dtype=dtype)).reshape(shape)


class LinenLayer(nn.Module):
    """As `Layer`; its dropout's mask is of the key that an nnx stage gives its first stream."""

    width: int

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.width, kernel_init=wave, param_dtype=x.dtype, name='linear')(x)
        x = nn.BatchNorm(not train, momentum=0.9, param_dtype=x.dtype, name='norm')(x)
        stream = jax.random.fold_in(self.scope.rngs['dropout'].rng, 0)
        return jnp.tanh(
            nn.Dropout(0.2, deterministic=not train)(x, rng=jax.random.fold_in(stream, 0))
        )


class Layer(nnx.Module):
    """An ordinary nnx module: modes by ``train()`` and ``eval()``, its own random stream."""

    def __init__(self, inputs, width, *, rngs):
        self.linear = nnx.Linear(inputs, width, kernel_init=wave, param_dtype=float, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, param_dtype=float, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.one = jnp.ones(width)  # a bare array, which Flax takes for static while it traces

    def __call__(self, x):
        return jnp.tanh(self.dropout(self.norm(self.linear(x)))) * self.one


LINEN = LinenLayer(12), LinenLayer(4)
NNX = stage(Layer, 9, 12), stage(Layer, 12, width=4)


def ran(kind, stages):
    """Two steps of gradient descent and an evaluation; a list of what each gives by stage."""
    model, local = pipelines.model('ef21', M, stages), kind == 'local'
    make, compiled = partial(Local, model), partial(jax.jit, compiler_options=QUICK)
    if not local:
        columns = Columns(place(1, len(stages), apart=True), pipelines.OPTIONS)
        runtime = {'spmd': Spmd, 'mpmd': Mpmd}[kind]
        make, compiled = partial(runtime, model, columns, options=pipelines.OPTIONS), lambda f: f
    training, found = make(), []
    state, step = training.init(jax.random.key(0)), compiled(training.value_and_grad)
    own = (lambda tree, s: tree[s]) if local else (lambda tree, s: tree[s][0])
    memory = (
        (lambda f, s: pipelines.parts_of(f, s, model.boundaries))
        if local
        else (lambda f, s: training.unpack(f)[s][0])
    )
    for batch in pipelines.batches(M, 1):
        means, grads, state = step(state, batch, jax.random.key(1))
        parts = [
            (own(grads, s), own(state.model_state, s), memory(state.feedback, s)) for s in (0, 1)
        ]
        found.append(jax.device_get((means if local else means[0], parts)))
        params = jax.tree.map(lambda p, g: p - 0.1 * g, state.params, grads)
        state = state._replace(params=params)
    outputs, _ = compiled(make(train=False).predict)(state, batch, jax.random.key(2))
    return [*found, np.asarray(outputs)]


wanted = cache(partial(ran, 'local', LINEN))


@pytest.mark.filterwarnings('ignore:scatter inputs')  # nnx's statistics are float32
@pytest.mark.parametrize('kind', slow(['local', 'spmd', 'mpmd'], 'local'.__ne__))
def test_nnx_stages_equal_linen_stages(kind):
    """Gradients, statistics, memories and means, under dropout, micro-batches and EF21."""
    found, want = (jax.tree.leaves(r) for r in (ran(kind, NNX), wanted()))
    assert len(found) == 3 * (2 + 2 * (4 + 2) + 4) + 1
    for a, b in zip(found[:-1], want[:-1], strict=True):
        (close if a.dtype == float else rounded)(a, b)
    rounded(found[-1], want[-1])  # the evaluation, by those statistics


# A boundary inside a module.


class Net(nnx.Module):
    """`NNX` as one module, without dropout."""

    def __init__(self, cut, rngs):
        self.front, self.back = Layer(9, 12, rngs=rngs), Layer(12, 4, rngs=rngs)
        self.cut = Crossing(cut, jnp.ones((8, 12)))

    def __call__(self, x, times=1):
        h = self.front(x)
        for _ in range(times):
            h = self.cut(h)
        return self.back(h)


def cut_of(fwd, bwd):
    return jaxmp.boundary(jaxmp.parse(fwd), jaxmp.parse(bwd))


FED_BACK = 'ef21(top_k(0.3))', 'ef(uniform(4))'


def squares(model, x, y, **kwargs):
    out = model(x, **kwargs)
    return jnp.mean((out - y) ** 2), out


def quick(model):
    """Without dropout, of which a module has its own random stream."""
    model.set_attributes(nnx.Dropout, deterministic=True)
    return model


@pytest.mark.filterwarnings('ignore:scatter inputs')
def test_a_module_with_a_boundary_equals_a_pipeline():
    """Loss, gradients, statistics and both feedback states, over three steps."""
    model = quick(Net(cut_of(*FED_BACK), nnx.Rngs(0)))
    still = [stage(lambda rngs, k=k: quick(Layer(*k, rngs=rngs))) for k in ((9, 12), (12, 4))]
    pipe = jaxmp.pipeline(still, *(jaxmp.parse(t) for t in FED_BACK))
    variables, feedback = pipe.init(jax.random.key(0), jnp.ones((8, 9)))

    def loss(params, feedback, variables, x, y):
        held = tuple({**v, 'params': p} for v, p in zip(variables, params, strict=True))
        out, after, feedback = pipe.apply(held, feedback, x, jaxmp.Ctx(jax.random.key(0)))
        return jnp.mean((out - y) ** 2), (feedback, after)

    one = nnx.jit(value_and_grad(squares, has_aux=True))
    other = jax.jit(jaxmp.value_and_grad(loss), compiler_options=QUICK)
    for batch in pipelines.batches(M, 1):
        params = tuple(v['params'] for v in variables)
        (want, variables), grads, feedback = other(
            params, feedback, variables, batch['x'], batch['y']
        )
        (value, _), found = one(model, batch['x'], batch['y'])
        close(value, want)
        same = lambda tree: jax.tree.leaves(tree)  # by sorted names in both
        jax.tree.map(close, [same(found[k]) for k in ('front', 'back')], [same(g) for g in grads])
        states = model.cut.fwd.get_value(), model.cut.bwd.get_value()
        jax.tree.map(close, states, (feedback.fwd[0], feedback.bwd[0]))
        rounded(model.front.norm.mean[...], variables[0]['state']['norm']['mean'])
    assert all(jnp.abs(a).sum() > 0 for a in jax.tree.leaves(states))


def linear(fwd='ef21(fp16)', bwd='ef(fp16)'):
    """A module of one product and a crossing, and its boundary."""
    cut = cut_of(fwd, bwd)
    rngs = nnx.Rngs(0)
    product = nnx.Linear(9, 12, use_bias=False, kernel_init=wave, param_dtype=float, rngs=rngs)
    return cut, nnx.Dict(front=product, cut=Crossing(cut, jnp.ones((8, 12))))


def crossed_twice(model, x):
    h = model.front(x)
    return jnp.sum(jnp.sin(model.cut(model.cut(h))))


X = np.sin(np.arange(72.0)).reshape(8, 9)


def test_what_is_crossed_twice_has_one_memory():
    """The backward state flows through the last crossing first, and is not summed."""
    cut, model = linear()
    feedback, kernel = cut.init(jnp.ones((8, 12))), model.front.kernel[...]

    def loss(kernel, feedback):
        h, feedback = cut.cross(X @ kernel, feedback)
        h, feedback = cut.cross(h, feedback)
        return jnp.sum(jnp.sin(h)), (feedback, None)

    for _ in range(2):
        (want, _), gradient, feedback = jaxmp.value_and_grad(loss)(kernel, feedback)
        value, grads = value_and_grad(crossed_twice)(model, X)
        close(value, want)
        close(grads['front']['kernel'].get_value(), gradient)
        jax.tree.map(close, model.cut.bwd.get_value(), feedback.bwd)


def test_a_backward_state_is_never_lost_silently():
    _, model = linear()
    before = model.cut.bwd.get_value()
    for transform in (nnx.grad, nnx.value_and_grad, lambda f: nnx.jit(nnx.grad(nnx.remat(f)))):
        with pytest.raises(TypeError, match='use that one in place of '):
            transform(crossed_twice)(model, X)
    assert jnp.isfinite(crossed_twice(model, X))  # a forward needs no gradient
    jax.tree.map(close, model.cut.bwd.get_value(), before)
    _, stateless = linear(bwd='fp16')
    value, grads = nnx.value_and_grad(crossed_twice)(stateless, X)
    other, same = value_and_grad(crossed_twice)(linear(bwd='fp16')[1], X)
    jax.tree.map(close, (value, nnx.state(grads)), (other, nnx.state(same)))


def test_further_arguments_change_too():
    """A stream and a variable; an array, a number and a text stay what they are."""
    _, model = linear()
    streams, seen = nnx.Rngs(0), nnx.Variable(jnp.zeros(()))

    def noisy(model, x, scale, streams, *, seen, word):
        assert (type(scale), word) == (int, 'word')
        out = model.cut(model.front(x)) * scale + streams.normal((8, 12))
        seen[...] += len(x)
        return jnp.sum(jnp.sin(out))

    values = [
        value_and_grad(noisy)(model, X, 2, streams, seen=seen, word='word')[0] for _ in range(2)
    ]
    assert values[0] != values[1]
    assert (streams.default.count[...], seen[...]) == (2, 16)


def test_a_crossing_is_opened_as_a_mode_is_set():
    _, model = linear()
    model.cut.set_attributes(compress=False)
    close(model.cut(X), X)  # of any shape
    model.cut.train(compress=True)
    with pytest.raises(ValueError, match='buffers are per batch position'):
        model.cut(X)


# Stages.


def test_equal_stages_share_programs_and_variables_go_in_and_out():
    one, other = stage(Layer, 5, width=5), stage(Layer, 5, width=5)
    assert one == other != stage(Layer, 5, width=6)
    assert len({one, other}) == 1
    variables = one.init({'params': jax.random.key(0)})
    changed = jax.tree.map(lambda a: a + 1, variables)
    jax.tree.map(close, other.variables(one.module(changed)), changed)
    assert {k: sorted(v) for k, v in variables.items()} == {
        'params': ['linear', 'norm'],
        'state': ['norm'],
    }


class Noisy(nnx.Module):
    """Two random streams, a list of layers, and a ``train`` of its own."""

    def __init__(self, *, rngs):
        self.layers = nnx.List([nnx.Linear(6, 6, rngs=rngs) for _ in range(2)])
        self.drops = nnx.List([nnx.Dropout(0.5, rngs=rngs) for _ in range(2)])

    def __call__(self, x, train):
        drops = [d(jnp.ones_like(x), deterministic=not train) for d in self.drops]
        self.sow(nnx.Intermediate, 'sown', x)
        return jnp.stack([l(x) for l in self.layers]), jnp.stack(drops)


@pytest.mark.filterwarnings('ignore:.*Using .Module.sow:DeprecationWarning')
def test_streams_differ_and_need_a_key():
    noisy, x = stage(Noisy), jnp.ones((4, 6))
    variables, keys = noisy.init({'params': jax.random.key(0)}), jax.random.split(jax.random.key(1))
    assert set(variables['params']['layers']) == {'0', '1'}
    run = lambda key: noisy.apply(variables, x, mutable=[], rngs={'dropout': key}, train=True)[0][1]
    (a, b), (c, _) = run(keys[0]), run(keys[1])
    assert (a != b).any()
    assert (a != c).any()
    close(run(keys[0])[1], b)
    close(noisy.apply(variables, x, train=False)[1], 1)
    with pytest.raises(ValueError, match='has a variable params/layers/0/bias, which the given'):
        noisy.module({'params': {}})
    with pytest.raises(ValueError, match='Noisy draws random numbers and got no key; pass ctx='):
        noisy.apply(variables, x, train=True)


REFUSED = {
    'an object': (lambda: jaxmp.pipeline([nn.Dense(2), Layer(2, 2, rngs=nnx.Rngs(0))], *UNIFORM),
                  r'stage 1 is a Layer; a stage is a Flax Linen module such as nn.Dense\(8\), or '
                  r'jaxmp\.nnx\.stage\(Module, \.\.\.\) of an nnx module'),
    'a class': (lambda: programs(Model((Layer,), (), None, None, X)),
                'stage 0 is the class Layer;'),
    'a module': (lambda: stage(Layer(2, 2, rngs=nnx.Rngs(0))),
                 r'makes an nnx.Module, got an object of type Layer; write stage\(Layer, \.\.\.\)'),
    'a list': (lambda: stage(Layer, [2, 2]),
               r'stage\(Layer, \.\.\.\) takes hashable arguments.*give tuples for lists'),
    'Linen': (lambda: stage(lambda rngs: nn.Dense(2)).init({'params': jax.random.key(0)}),
              'takes what makes an nnx.Module, and <lambda> made an object of type Dense'),
    'a boundary': (lambda: stage(Net, cut_of('raw', 'raw')).init({'params': jax.random.key(0)}),
                   'Net holds a jaxmp.nnx.Crossing.*cut the module there into two stages'),
    'a channel': (lambda: Crossing(UNIFORM[0], X), r'got an object of type Channel; write jaxmp\.'),
}  # fmt: skip
UNIFORM = [jaxmp.parse('uniform(4)')] * 2


@pytest.mark.parametrize('case', REFUSED)
def test_what_is_no_stage_is_refused(case):
    do, message = REFUSED[case]
    with pytest.raises(TypeError, match=message):
        do()


CHECKS = """
assert losses[-1] < 0.1 < 2 < losses[0], losses
assert model(x).shape == logits.shape == (32, 10)  # compressed again
assert jnp.isfinite(means[0][0])
assert [set(gradients[s][0]) for s in (0, 1)] == [{'linear', 'norm'}, {'kernel', 'bias'}]
"""


@pytest.mark.slow
def test_the_code_of_the_page_runs():
    blocks = re.findall(r'```python\n(.*?)```', (ROOT / 'docs' / 'nnx.md').read_text(), re.S)
    done = subprocess.run(
        [sys.executable, '-W', 'error', '-c', '\n'.join([*blocks, CHECKS])],
        cwd=ROOT, env=ENV, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
