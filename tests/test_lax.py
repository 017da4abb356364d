"""`jaxmp.lax`: collectives against those of `jax.lax`, their bytes, states, meshes and refusals."""

import socket
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import lax
from jaxmp.exchange.hlo import operands
from jaxmp.lax import calls
from tests.base import ENV, ROOT, STARTED, slow

N = 4
RING = [(i, (i + 1) % N) for i in range(N)]
CHAIN = RING[:-1]
CALLS = {
    'ppermute ring': lambda module, x, **how: module.ppermute(x, 'i', RING, **how),
    'ppermute chain': lambda module, x, **how: module.ppermute(x, 'i', CHAIN, **how),
    'all_gather': lambda module, x, **how: module.all_gather(x, 'i', **how),
    'all_gather tiled': lambda module, x, **how: module.all_gather(
        x, 'i', axis=1, tiled=True, **how
    ),
    'psum_scatter': lambda module, x, **how: module.psum_scatter(x, 'i', **how),
    'psum_scatter tiled': lambda module, x, **how: module.psum_scatter(
        x, 'i', scatter_dimension=1, tiled=True, **how
    ),
    'all_to_all': lambda module, x, **how: module.all_to_all(x, 'i', 0, 0, **how),
    'all_to_all tiled': lambda module, x, **how: module.all_to_all(x, 'i', 1, 0, tiled=True, **how),
    'psum': lambda module, x, **how: module.psum(x, 'i', **how),
    'pmean': lambda module, x, **how: module.pmean(x, 'i', **how),
}
X = jax.random.normal(jax.random.key(0), (N * N, 8, 64)) * 2  # a device has (4, 8, 64)


def mesh_of(kind=AxisType.Auto, **axes):
    axes = axes or {'i': N}
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def on(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def both(collective, mesh, follow):
    """Of a program around a collective: the loss, the gradient and the value."""

    def inner(x):
        value = lambda x: jnp.sin(collective(jnp.tanh(x)))
        total = lambda x: jax.lax.psum(jnp.sum(value(x) ** 2), 'i')
        loss, grads = jax.value_and_grad(total)(x)
        return loss[None], grads, value(x)[None]

    specs = P() if follow else P('i'), P('i'), P('i')
    return jax.jit(
        jax.shard_map(inner, mesh=mesh, in_specs=P('i'), out_specs=specs, check_vma=follow)
    )


@pytest.mark.parametrize('name', slow(CALLS, lambda name: ' ' in name or name == 'pmean'))
@pytest.mark.parametrize(
    ('follow', 'kind'), [(True, AxisType.Auto), (False, AxisType.Explicit)], ids=['vma', 'explicit']
)
def test_uncompressed_is_jax_lax_to_the_bit(name, follow, kind, monkeypatch):
    """As handed to `jax.lax`, and as packed messages of which each element is sent whole."""
    mesh = mesh_of(kind)
    x, call = on(mesh, X, 'i'), CALLS[name]
    theirs = both(partial(call, jax.lax), mesh, follow)(x)
    ours = both(partial(call, lax), mesh, follow)(x)
    raw = jaxmp.parse('raw')
    monkeypatch.setattr(calls, 'channels_of', lambda *_: (raw, raw))
    packed = both(partial(call, lax), mesh, follow)(x)
    for a, b, c in zip(theirs, ours, packed, strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)


SENT = {  # of a device: the collective, its messages and the shape of each
    'ppermute ring': ('collective-permute', 1, (4, 8, 64)),
    'all_gather': ('all-gather', 1, (4, 8, 64)),
    'psum_scatter': ('all-to-all', 4, (8, 64)),
    'all_to_all tiled': ('all-to-all', 4, (4, 2, 64)),
}


@pytest.mark.parametrize('name', SENT)
@pytest.mark.parametrize('word', ['nvfp4', 'outliers(rotate(lloyd(4), 64), causal=True)'])
def test_the_program_sends_the_messages_and_no_more(name, word):
    kind, count, shape = SENT[name]
    mesh, call = mesh_of(), CALLS[name]
    f = lambda x: call(lax, x, fwd=word)[None]
    program = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i')))
    x = on(mesh, X, 'i')
    message = jaxmp.bits(jaxmp.parse(word), jax.ShapeDtypeStruct(shape, 'float32')) // 8
    assert operands(program.lower(x).compile().as_text()) == {kind: count * message}
    exact = lambda x: call(jax.lax, x)[None]
    exact = jax.jit(jax.shard_map(exact, mesh=mesh, in_specs=P('i'), out_specs=P('i')))(x)
    assert 0 < np.linalg.norm(program(x) - exact) / np.linalg.norm(exact) < 0.2


@pytest.mark.parametrize('word', ['block(4)', 'mx(8)', 'rotate(lloyd(4))'])
def test_a_sum_is_the_same_bits_on_all_devices(word):
    """By type where JAX follows what varies, and in number where it does not."""
    mesh = mesh_of()
    f = lambda x: lax.psum(x, 'i', fwd=word)
    known = jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(X)
    every = jax.shard_map(
        lambda x: f(x)[None], mesh=mesh, in_specs=P('i'), out_specs=P('i'), check_vma=False
    )(X)
    for one in every:
        np.testing.assert_array_equal(one, known)
    exact = np.asarray(X).reshape(N, 4, 8, 64).sum(0)
    assert 0 < np.linalg.norm(known - exact) / np.linalg.norm(exact) < 0.3


HOW = {'fwd': 'nvfp4', 'bwd': 'mx(8)'}
HERE_AND_THERE = [(0, 1), (1, 0)]
TRANSFORMED = {
    'scan': lambda x: jax.lax.scan(lambda h, _: (sent(h), None), x, None, 3)[0],
    'vmap': jax.vmap(lambda x: lax.all_to_all(x, 'i', 0, 0, tiled=True, **HOW)),
    'vmap of a sum': jax.vmap(lambda x: lax.psum(x, 'i', **HOW)),
    'remat': jax.checkpoint(lambda x: sent(x)),
    'a sum over two axes': lambda x: lax.psum(x, ('i', 'j'), **HOW),
    'a gather over two axes': lambda x: lax.all_gather(x, ('i', 'j'), tiled=True, **HOW),
    'a scatter over two axes': lambda x: lax.psum_scatter(
        x, ('i', 'j'), scatter_dimension=1, tiled=True, **HOW
    ),
    'a codec that draws': lambda x: lax.psum(
        x, 'i', fwd='qsgd(4)', bwd='qsgd(4)', key=jax.random.key(0)
    ),
    'a tree': lambda x: lax.all_gather({'x': x, 'n': jnp.arange(4)}, 'i', **HOW)['x'],
    'bfloat16': lambda x: lax.psum_scatter(x.astype(jnp.bfloat16), 'i', tiled=True, **HOW),
    'a vector': lambda x: lax.all_gather(x[0, 0], 'i', **HOW),
}


def sent(x):
    return lax.ppermute(jnp.tanh(x), 'i', HERE_AND_THERE, **HOW)


@pytest.mark.parametrize('name', slow(TRANSFORMED, lambda name: 'gather' in name or 'vmap' in name))
@pytest.mark.parametrize('follow', [True, False], ids=['vma', 'no vma'])
def test_under_the_transformations_of_jax(name, follow):
    """Finite gradients near those without codecs."""
    mesh, spec = mesh_of(i=2, j=2), P(('i', 'j'))

    def gradient(x):
        def total(x):
            part = jnp.sum(TRANSFORMED[name](x).astype(jnp.float32) ** 2)
            axes = tuple(
                a
                for a in ('i', 'j')
                if not follow or a in jax.typeof(part).manual_axis_type.varying
            )
            return jax.lax.psum(part, axes) if axes else part

        return jax.grad(total)(x)

    f = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=follow))
    coded = f(X)
    assert np.isfinite(coded).all()
    assert np.abs(coded).max() > 0


STATEFUL = {
    'all_gather': lambda x, **how: lax.all_gather(x, 'i', **how),
    'psum': lambda x, **how: lax.psum(x, 'i', **how),
    'ppermute': lambda x, **how: lax.ppermute(x, 'i', RING, **how),
}


@pytest.mark.parametrize('name', STATEFUL)
def test_states_go_on_from_step_to_step(name):
    """EF21 of an operand that stays: what arrives tends to it, and so does its gradient."""
    call, word = STATEFUL[name], 'ef21(top_k(0.2))'
    mesh = mesh_of()

    def loss(x, state):
        y, state = call(x, fwd=word, bwd=word, state=state)
        return jnp.sum(y * jnp.arange(y.size).reshape(y.shape)) / y.size, (state, y)

    def steps(x):
        def step(state, _):
            (_, y), grads, state = jaxmp.value_and_grad(loss)(x, state)
            return state, (y, grads)

        state = lax.init(call, x, fwd=word, bwd=word)
        _, (values, grads) = jax.lax.scan(step, state, None, 40)
        return values[jnp.array([0, -1])], grads[jnp.array([0, -1])]

    def exact(x):
        f = lambda x: CALLS[name if name != 'ppermute' else 'ppermute ring'](jax.lax, x)
        weigh = lambda x: jnp.sum((y := f(x)) * jnp.arange(y.size).reshape(y.shape)) / y.size
        return f(x)[None], jax.grad(weigh)(x)[None]

    run = lambda f: jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P(None, 'i'), check_vma=False)
    )(X[:, :2])
    for ours, theirs in zip(run(steps), run(exact), strict=True):
        first, last = (np.linalg.norm(a - theirs[0]) / np.linalg.norm(theirs[0]) for a in ours)
        assert first > 0.3
        assert last < 1e-3


@pytest.mark.parametrize('value', [np.nan, np.inf])
def test_a_number_that_is_none_reaches_all(value):
    mesh = mesh_of()
    x = X.at[0, 0, 0].set(value)
    f = lambda x: jnp.isfinite(lax.psum(x, 'i', fwd='nvfp4')).all()
    assert not jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P())(x)


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('name', ['ppermute', 'psum_scatter', 'psum'])
def test_a_mesh_that_is_manual_in_part(kind, name):
    mesh = mesh_of(kind, i=2, j=2)
    one = {
        'ppermute': lambda x: lax.ppermute(x, 'i', HERE_AND_THERE, **HOW),
        'psum_scatter': lambda x: lax.psum_scatter(x, 'i', tiled=True, **HOW),
        'psum': lambda x: lax.psum(x, 'i', **HOW),
    }[name]
    with jax.set_mesh(mesh):
        x = on(mesh, X, 'i', 'j')
        out = P() if name == 'psum' else P('i')
        f = jax.jit(jax.shard_map(one, in_specs=P('i'), out_specs=out, axis_names={'i'}))
        y = f(x)
    whole = np.asarray(X).reshape(2, 8, 8, 64)
    sums = whole.sum(0)
    exact = {'ppermute': whole[::-1].reshape(16, 8, 64), 'psum_scatter': sums, 'psum': sums}[name]
    assert np.linalg.norm(y - exact) / np.linalg.norm(exact) < 0.2


def bytes_of(f, mesh, x=X):
    f = jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))
    return sum(operands(jax.jit(f).lower(x).compile().as_text()).values())


def test_codecs_of_a_program():
    """Those of a call win; other axes, small arrays and integers are sent as they are."""
    mesh = mesh_of()
    sums = lambda x, **how: lax.all_gather(x, 'i', **how)
    whole = bytes_of(sums, mesh)
    with lax.codecs('nvfp4', 'mx(8)'):
        coded = bytes_of(sums, mesh)
        assert bytes_of(partial(sums, fwd='raw', bwd='raw'), mesh) == whole
        assert bytes_of(partial(sums, fwd='mx(8)'), mesh) > coded
        assert bytes_of(sums, mesh, X.astype(jnp.int32)) == whole
    assert whole > 7 * coded
    with lax.codecs('nvfp4', axes=('j',)):
        assert bytes_of(sums, mesh) == whole
    with lax.codecs('nvfp4', least=X.size):
        assert bytes_of(sums, mesh) == whole
    same = jax.jit(jax.shard_map(sums, mesh=mesh, in_specs=P('i'), out_specs=P('i')))
    before = same(X)
    with lax.codecs('block(4)'):  # the same function, compiled again
        assert np.abs(same(X) - before).max() > 0
    np.testing.assert_array_equal(same(X), before)


def test_the_gradients_of_data_parallelism():
    """The sum that nobody wrote, of parameters that all devices have, through a codec."""
    mesh = mesh_of()
    w = jax.random.normal(jax.random.key(1), (64, 64)) / 8

    def program(enter):
        def loss(w, x):
            h = jnp.tanh(x @ enter(w))
            return jax.lax.pmean(jnp.mean(h**2), 'i')

        f = jax.shard_map(
            jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P('i')), out_specs=P()
        )
        return jax.jit(f)

    plain = program(lambda w: w)
    coded = program(lambda w: lax.pvary(w, 'i', bwd='mx(8)'))
    (a, g), (b, h) = plain(w, X), coded(w, X)
    np.testing.assert_allclose(a, b, rtol=1e-6)
    assert 0 < np.linalg.norm(g - h) / np.linalg.norm(g) < 0.06
    sizes = [operands(f.lower(w, X).compile().as_text()) for f in (plain, coded)]
    assert sizes[0]['all-reduce'] > 4 * 64 * 64
    assert sizes[1]['all-reduce'] < 100  # the loss
    assert sum(sizes[1].values()) < 0.4 * sum(sizes[0].values())


@pytest.mark.parametrize('kind', [AxisType.Auto, AxisType.Explicit])
def test_islands_in_a_program_that_the_compiler_divides(kind):
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        x = on(mesh, X[:N], 'i')
        turned = jax.jit(partial(lax.roll, axis_name='i', fwd='mx(8)'))
        exact = np.roll(X[:N], 1, 0)
        assert np.linalg.norm(turned(x) - exact) / np.linalg.norm(exact) < 0.05
        assert set(operands(turned.lower(x).compile().as_text())) == {'collective-permute'}
        grads = jax.jit(
            jax.grad(lambda x: jnp.sum(lax.roll(x, 'i', fwd='mx(8)', bwd='mx(8)') ** 2))
        )
        assert np.linalg.norm(grads(x) - 2 * x) / np.linalg.norm(2 * x) < 0.1
        gathered = jax.jit(partial(lax.reshard, axis_name='i', fwd='mx(8)', bwd='mx(8)'))
        assert np.linalg.norm(gathered(x) - X[:N]) / np.linalg.norm(X[:N]) < 0.05
        assert gathered(x).sharding.is_fully_replicated
    with pytest.raises(ValueError, match="roll of 8 rows along 'i', which has 4 devices"):
        lax.roll(X[:8], 'i', mesh=mesh)


def test_mistakes_are_told_in_a_line():
    mesh = mesh_of()
    run = lambda f: jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(X)
    cases = {
        r'qsgd\(4\) draws; give key=': lambda x: lax.ppermute(x, 'i', RING, fwd='qsgd(4)'),
        r'ef\(mx\(4\)\) has a state; give state=lax.init': lambda x: lax.psum(
            x, 'i', fwd='ef(mx(4))'
        ),
        r'axis 1 of \(4, 8, 64\) goes to 4 devices; it must have the size 4, or tiled=True':
            lambda x: lax.all_to_all(x, 'i', 1, 0, fwd='mx(8)'),
        r"in 'mx\(9\)'": lambda x: lax.psum(x, 'i', fwd='mx(9)'),
        'split_axis=5 of an array of 3 axes': lambda x: lax.all_to_all(x, 'i', 5, 0, fwd='mx(8)'),
        r'aqsgd\(mx\(4\), 9\) needs the ids of a batch, of which a collective knows nothing':
            lambda x: lax.psum(x, 'i', fwd='aqsgd(mx(4), 9)'),
        'anchored.* needs the tokens': lambda x: lax.psum(x, 'i', fwd='anchored(mx(4), 9)'),
        'same_support.* needs the indices': lambda x: lax.psum(x, 'i', bwd='same_support()'),
        r"in 'power_sgd\(2\)': unknown word": lambda x: lax.psum(x, 'i', fwd='power_sgd(2)'),
    }  # fmt: skip
    for message, f in cases.items():
        with pytest.raises(ValueError, match=message):
            run(f)
    with pytest.raises(ValueError, match=r'ef\(mx\(4\)\) has a state; give it to each call'):
        lax.codecs('ef(mx(4))')
    with pytest.raises(ValueError, match=r'qsgd\(4\) draws; give it to each call, with key='):
        lax.codecs('mx(8)', 'qsgd(4)')
    for message, more in (('8 is no channel', {'fwd': 8}), ('state=float; give', {'state': 1.0})):
        with pytest.raises(TypeError, match=message):
            run(lambda x, more=more: lax.psum(x, 'i', **more))
    enter = lambda x: lax.pvary(x, 'i', bwd='mx(8)')
    enter = jax.shard_map(enter, mesh=mesh, in_specs=P('i'), out_specs=P('i'), check_vma=False)
    with pytest.raises(ValueError, match='pvary sums gradients under check_vma alone'):
        enter(X)
    with pytest.raises(TypeError, match='a state is of one array, got 2'):
        run(lambda x: lax.psum([x, x], 'i', fwd='mx(8)', state=jaxmp.FeedbackState((), ()))[0][0])


ROWS, ROOM, EACH = 9, 40, 2  # rows of a device, those it may receive, slices to each other device


def slices_of(seed):
    """Rows to two experts of each device: offsets and sizes by device, ``(N, N * EACH)``."""
    rng = np.random.default_rng(seed)
    sizes = np.stack([rng.multinomial(ROWS - 1, np.full(N * EACH, 1 / N / EACH)) for _ in range(N)])
    start = np.cumsum(sizes, 1) - sizes + 1  # the first row goes nowhere
    arriving = sizes.reshape(N, N, EACH).swapaxes(0, 1).reshape(N, -1)  # by receiver and sender
    first = 3 + np.cumsum(arriving, 1) - arriving  # three rows are free
    to = first.reshape(N, N, EACH).swapaxes(0, 1).reshape(N, -1)
    return start, sizes, to, arriving


def ragged_by_hand(x, y, start, sizes, to, arriving):
    """What jax.lax.ragged_all_to_all says that it does."""
    y = y.copy()
    for sender in range(N):
        for k in range(N * EACH):
            a, b, count = start[sender, k], to[sender, k], sizes[sender, k]
            y[k // EACH, b : b + count] = x[sender, a : a + count]
    return y


def ragged(mesh, follow, **how):
    """Of all devices' rows: the loss, the gradients of operand and output, and the result."""

    def inner(x, y, *slices):
        (x, y), slices = (a[0] for a in (x, y)), [a[0] for a in slices]

        def loss(x, y):
            def again(carry, _):  # in a scan, whose gradient is taken outside of it
                out = lax.ragged_all_to_all(x * carry, y, *slices, axis_name='i', **how)
                return carry, out

            out = jax.lax.scan(again, x[0, 0] * 0 + 1, None, 1)[1][0]
            return jnp.sum(jnp.sin(out)), out

        (_, out), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, y)
        return jax.tree.map(lambda a: a[None], (out, grads))

    return jax.jit(
        jax.shard_map(inner, mesh=mesh, in_specs=P('i'), out_specs=P('i'), check_vma=follow)
    )


@pytest.mark.parametrize(
    ('how', 'off'), [({}, 0), (HOW, 0.15), ({'bwd': 'mx(8)'}, 0.1), ({'fwd': 'trellis(3)'}, 0.4)]
)
@pytest.mark.parametrize('follow', [True, False], ids=['vma', 'no vma'])
def test_rows_to_experts(how, off, follow):
    """Exact as JAX says where nothing is coded; only rows that arrive are written and return."""
    slices = slices_of(0)
    rng = np.random.default_rng(1)
    x, y = (rng.standard_normal((N, n, 64)).astype(np.float32) for n in (ROWS, ROOM))
    out, (gx, gy) = ragged(mesh_of(), follow, **how)(x, y, *slices)
    exact = ragged_by_hand(x, y, *slices)
    arrived = ragged_by_hand(np.ones_like(x), np.zeros_like(y), *slices) > 0
    assert arrived.sum() == N * (ROWS - 1) * 64
    np.testing.assert_array_equal(np.asarray(out)[~arrived], y[~arrived])
    np.testing.assert_allclose(gy, np.where(arrived, 0, np.cos(y)), rtol=1e-6)
    near = lambda a, b: np.linalg.norm(a - b) <= (off or 1e-7) * np.linalg.norm(b)
    assert near(out, exact)
    start, sizes, to, arriving = slices
    swap = lambda a: a.reshape(N, N, EACH).swapaxes(0, 1).reshape(N, -1)
    back = ragged_by_hand(np.cos(out), np.zeros_like(x), swap(to), arriving, swap(start), sizes)
    assert near(gx, back)
    assert not np.asarray(gx)[:, 0].any()
    if off:
        assert np.abs(out - exact).max() + np.abs(gx - back).max() > 1e-4


def test_rows_to_experts_on_a_gpu_are_the_operation_of_xla():
    """One there and one back, of packed bytes; each transposed call swaps its offsets."""
    x, y = jnp.ones((N, ROWS, 64)), jnp.zeros((N, ROOM, 64))
    traced = ragged(mesh_of(), True, **HOW).trace(x, y, *slices_of(0))
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    calls = [line for line in text.splitlines() if '@ragged_all_to_all' in line]
    assert len(calls) == 2
    row = jax.ShapeDtypeStruct((1, 64), 'float32')
    sizes = [jaxmp.bits(jaxmp.parse(word), row) // 8 for word in HOW.values()]
    assert f'tensor<{ROWS}x{sizes[0]}xui8>, tensor<{ROOM}x{sizes[0]}xui8>' in calls[0]
    assert f'tensor<{ROOM}x{sizes[1]}xui8>, tensor<{ROWS}x{sizes[1]}xui8>' in calls[1]


def test_rows_to_experts_are_packed_and_have_no_state():
    slices = slices_of(0)
    x, y = jnp.ones((N, ROWS, 64)), jnp.zeros((N, ROOM, 64))
    program = ragged(mesh_of(), True, **HOW).lower(x, y, *slices).compile().as_text()
    row = jax.ShapeDtypeStruct((1, 64), 'float32')
    bits = [jaxmp.bits(jaxmp.parse(word), row) for word in HOW.values()]
    assert operands(program)['all-gather'] * 8 == ROWS * bits[0] + ROOM * bits[1]
    with pytest.raises(ValueError, match=r'ef\(mx\(4\)\) has a state, and rows are others in each'):
        jax.eval_shape(ragged(mesh_of(), False, fwd='ef(mx(4))'), x, y, *slices)


EF21 = {'fwd': 'ef21(mx(4))'}
OTHERS = {  # states of another call: what the first ppermute below is given, and what it says
    'of another collective': (lambda x: lax.init(lax.psum, x, 'i', **EF21), EF21),
    'of another codec': (lambda x: lax.init(lax.ppermute, x, 'i', RING, fwd='ef(mx(4))'), EF21),
    'of a smaller operand': (lambda x: lax.init(lax.ppermute, x[0], 'i', RING, **EF21), EF21),
    'of the other direction': (lambda x: lax.init(lax.ppermute, x, 'i', RING, bwd='ef(mx(4))'), {}),
}


@pytest.mark.parametrize('name', OTHERS)
def test_a_state_of_another_call_is_refused(name):
    """Also where its shapes would broadcast, or nothing needs a state."""
    other, how = OTHERS[name]
    f = lambda x: lax.ppermute(x, 'i', RING, **how, state=other(x))[0]
    f = jax.shard_map(f, mesh=mesh_of(), in_specs=P('i'), out_specs=P('i'), check_vma=False)
    with pytest.raises(
        ValueError, match=r'state\.[fb]wd is .* of this call needs .*; give what lax'
    ):
        jax.eval_shape(f, X)


def test_an_axis_that_is_not_there_is_told():
    mesh = mesh_of()
    calls = lax.ppermute, lax.psum, lax.pmean, lax.all_gather
    calls = *(partial(call, fwd='mx(8)') for call in calls), partial(lax.pvary, bwd='mx(8)')
    for call in calls:
        more = (RING,) if call.func is lax.ppermute else ()
        f = lambda x, call=call, more=more: call(x, 'j', *more)
        with pytest.raises(
            NameError, match=r"no axis 'j' here, there are \('i',\); call inside jax"
        ):
            jax.shard_map(f, mesh=mesh, in_specs=P('i'), out_specs=P('i'))(X)
    with pytest.raises(NameError, match=r"no axis 'i' here, there are \(\)"):
        lax.psum(X, 'i', fwd='mx(8)')
    for island in (lax.roll, lax.reshard):
        with pytest.raises(ValueError, match=r"no axis 'i' here, there are \(\); give mesh= with"):
            island(X[:N], 'i', fwd='mx(8)')
        with pytest.raises(ValueError, match=r"no axis 'j' here, there are \('i',\)"):
            island(X[:N], 'j', mesh=mesh)
    with pytest.raises(ValueError, match='axis=3 of an array of 3 axes'):
        lax.reshard(X, 'i', 3, mesh=mesh)
    last = lax.reshard(X, 'i', -1, mesh=mesh, fwd='mx(8)')
    assert np.linalg.norm(last - X) / np.linalg.norm(X) < 0.05


@pytest.mark.parametrize('word', ['trellis(2)', 'klt(3, entropy=True, trellis=True)'])
def test_codecs_with_loops_where_jax_follows_what_varies(word):
    """The carry of a scan must vary from its beginning."""

    def f(x):
        state = lax.init(lax.all_gather, x, 'i', fwd=word)
        return lax.all_gather(x, 'i', fwd=word, state=state)[0]

    y = jax.eval_shape(jax.shard_map(f, mesh=mesh_of(), in_specs=P('i'), out_specs=P('i')), X)
    assert y.shape == (N * N, 4, 8, 64)


def test_a_sum_that_remembers_is_the_same_everywhere_by_type():
    """States begun inside: of a sum, and of the sum of gradients of what all devices have."""
    mesh, word = mesh_of(), 'ef21(mx(4))'
    like = jax.ShapeDtypeStruct((4, 8, 64), jnp.float32)
    how = {'fwd': word, 'state': None}

    def total(x):
        state = lax.init(lax.psum, like, 'i', fwd=word)
        return lax.psum(x, 'i', **{**how, 'state': state})[0]

    known = jax.shard_map(total, mesh=mesh, in_specs=P('i'), out_specs=P())(X)
    assert np.isfinite(known).all()

    def gradients(w, x):
        def loss(w, state):
            w, state = lax.pvary(w, 'i', bwd=word, state=state)
            return jnp.mean(jnp.tanh(x @ w) ** 2), (state, None)

        state = lax.init(lax.pvary, w, 'i', bwd=word)
        return jaxmp.value_and_grad(loss)(w, state)[1]

    f = jax.shard_map(gradients, mesh=mesh, in_specs=(P(), P('i')), out_specs=P())
    assert np.isfinite(jax.jit(f)(jnp.eye(64), X)).all()


@pytest.mark.slow
def test_over_two_processes():
    """The sum has the same bits in both, near the exact one; messages are packed."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(ROOT / 'tests' / 'lax_worker.py'), str(port)]
    environment = {**ENV, 'XLA_FLAGS': ''}
    for index in '01':
        STARTED.append(
            subprocess.Popen([*command, index], env=environment, stdout=subprocess.PIPE, text=True)
        )
    said = [process.communicate(timeout=120)[0] for process in STARTED]
    lines = [text.splitlines()[-1].split() for text in said]  # Gloo says things before
    assert [line[1:2] for line in lines] == [['True'], ['True']]
    assert lines[0] == lines[1]
    total = np.frombuffer(bytes.fromhex(lines[0][0]), np.float32)
    numbers = np.random.default_rng(0).standard_normal((4, 8, 64)).astype(np.float32)
    exact = np.tanh(numbers).reshape(2, -1).sum(0)
    assert np.linalg.norm(total - exact) / np.linalg.norm(exact) < 0.15
    each = jax.ShapeDtypeStruct((2, 8, 64), 'float32')
    bits = sum(jaxmp.bits(jaxmp.parse(word), each) for word in ('nvfp4', 'mx(8)'))
    assert 8 * int(lines[0][2]) == bits


def test_which_codecs_draw():
    """Of all words that need a key those that round at random, and any of one's own."""
    from jaxmp.grammar import ours

    words = [w.example for w in ours() if w.kind == 'codec' and w.example]
    drawing = {text.partition('(')[0] for text in words if calls.draws(jaxmp.parse(text))}
    assert drawing == {'natural', 'qsgd', 'random_k', 'unbiased_random_k'}
    assert calls.draws(jaxmp.parse('block(4, 32, stochastic)'))
    assert not calls.draws(jaxmp.parse('outliers(rotate(lloyd(4), 64), causal=True)'))
    own = jaxmp.raw._replace(needs=frozenset({'key'}), origin=None)
    assert calls.draws(jaxmp.parse('mine', {'mine': own}))


def test_every_other_name_is_that_of_jax():
    assert lax.scan is jax.lax.scan
    assert lax.axis_index is jax.lax.axis_index
    with pytest.raises(AttributeError):
        _ = lax.nothing_of_this_name
