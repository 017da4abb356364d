"""One program over four devices against one program on one."""

import functools
from functools import partial
from operator import itemgetter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmp
from jaxmp import Ctx, Links, parse
from jaxmp.devices import device_mesh
from jaxmp.micro import take
from jaxmp.models import gpt2
from jaxmp.models.mlp import mlp
from jaxmp.schedule import check, one_f_one_b, saved_inputs
from jaxmp.spmd import Parts, spmd, tasks
from jaxmp.transport import permuted
from tests.laws import QUICK

S, B, D, CLASSES = 4, 2, 8, 3  # stages, samples a micro-batch, width
jit = partial(jax.jit, compiler_options=QUICK)


def squared(out, y):
    return jnp.mean((out - y) ** 2)


PARTS = Parts(*mlp(S, D, CLASSES), squared)


def make(fwd, bwd, micro=1, parts=PARTS):
    return spmd(parts, parse(fwd), parse(bwd), device_mesh(stage=S), micro)


def data(micro, steps=3):
    r = np.random.default_rng(0)
    x, y = (r.standard_normal((steps, micro * B, n)) for n in (5, CLASSES))
    return x, y, [r.permutation(20)[: micro * B] for _ in range(steps)]


def shapes(pipe, x):
    return jax.eval_shape(pipe.init, jax.random.key(0), x)


# Equality.

PAIRS = [
    ('top_k(0.3)', 'uniform(6, stochastic)'),
    ('ef(uniform(4))', 'ef(top_k(0.3))'),
    ('ef21(top_k(0.3))', 'ef_mixed(top_k(0.3), accumulate=True)'),
    ('ef_mixed(top_k(0.3))', 'ef21(uniform(4))'),
    ('aqsgd(uniform(4, stochastic), examples=20)', 'aqsgd(top_k(0.3), examples=20)'),
    ('ef(top_k(0.3))', 'ef21(same_support())'),
]
CASES = [(*pair, m) for i, pair in enumerate(PAIRS) for m in (4, (1, 8)[i % 2])]


@functools.cache
def one_program(fwd, bwd):
    """A micro-batch through `jaxmp.pipeline`, and the states of its boundaries."""
    pipe = jaxmp.pipeline(make(fwd, bwd).modules(), parse(fwd), parse(bwd))

    def loss(variables, links, x, y, ctx):
        out, _, links = pipe.apply(variables, links, x, ctx)
        return squared(out, y), (links, None)

    h = jax.ShapeDtypeStruct((B, D), 'float64')
    return jit(jaxmp.value_and_grad(loss)), jaxmp.init_feedback(pipe.boundaries, [h] * (S - 1))


@functools.cache
def parameters():
    """Random parameters, zero where a device has no use for them, in float64."""
    params = make('raw', 'raw').init(jax.random.key(1), np.zeros((B, 5)))[0]
    return jax.tree.map(lambda a: np.asarray(a, np.float64), jax.device_get(params))


def looped(micro_step, variables, slots, x, y, ctx):
    """The micro-batches one after the other, each with its slot (a table goes from one to all)."""
    results, slots = [], list(slots)
    for m in range(len(x) // B):
        cut = slice(m * B, (m + 1) * B)
        at = ctx.fold(m)._replace(ids=ctx.ids[cut])
        links = slots[m % len(slots)]
        (loss, _), grads, slots[m % len(slots)] = micro_step(variables, links, x[cut], y[cut], at)
        results.append(jax.device_get((loss, grads)))
    return jax.tree.map(lambda *a: sum(a) / len(a), *results), slots


def close(a, b):
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), a, b)


def check_states(pipe, links, slots):
    """Both ends of every boundary, in every slot, against a local boundary's."""
    for side, channel, back in (('fwd', pipe.fwd, 0), ('bwd', pipe.bwd, 1)):
        tx, rx = jax.device_get(getattr(links, side))
        for m, slot in enumerate(slots):
            for b, (here_tx, here_rx) in enumerate(getattr(slot, side)):
                close(take(channel, jax.tree.map(itemgetter(b + back), tx), m), here_tx)
                want = here_tx if channel.mirrored else here_rx
                close(take(channel, jax.tree.map(itemgetter(b + 1 - back), rx), m), want)


@pytest.mark.parametrize(('fwd', 'bwd', 'micro'), CASES)
def test_four_devices_are_one_program(fwd, bwd, micro):
    """Three steps of SGD in float64: loss, parameters and the states of both ends."""
    with jax.enable_x64(True):
        pipe, place = make(fwd, bwd, micro), NamedSharding(device_mesh(stage=S), P('stage'))
        x, y, ids = data(micro)
        params, variables = parameters(), pipe.variables(parameters())
        links = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), shapes(pipe, x[0])[1])
        params, links = jax.device_put((params, links), place)
        micro_step, start = one_program(fwd, bwd)
        slots = [start] * (1 if pipe.fwd.per_example else micro)

        @jit
        def step(params, links, x, y, ctx):
            loss, grads, links = pipe.value_and_grad(params, links, x, y, ctx)
            return loss, jax.tree.map(descend, params, grads), links

        for t in range(3):
            ctx = Ctx(jax.random.key(t), ids[t])
            loss, params, links = step(params, links, x[t], y[t], ctx)
            (want, grads), slots = looped(micro_step, variables, slots, x[t], y[t], ctx)
            variables = jax.tree.map(descend, variables, grads)
            close(loss, want)
            close(pipe.variables(jax.device_get(params)), variables)
        check_states(pipe, links, slots)


def descend(p, g):
    return p - 0.3 * g


def test_blocks_of_a_gpt2():
    """Embedding and scores at the ends, equal blocks between: as one program, in float64."""
    sizes = gpt2.Config(vocabulary=11, positions=8, width=8, blocks=2, heads=2)
    nats = lambda logits, y: gpt2.next_token_loss(logits, y).mean()
    channels = parse('ef21(uniform(4))'), parse('ef(uniform(6))')
    with jax.enable_x64(True):
        pipe = spmd(Parts(*gpt2.equal(sizes, 2), nats), *channels, device_mesh(stage=2), 2)
        tokens = np.random.default_rng(0).integers(0, 11, (2 * B, 8))
        ctx = Ctx(jax.random.key(0), np.arange(2 * B))
        params, links = pipe.init(jax.random.key(1), tokens)
        loss, grads, _ = jit(pipe.value_and_grad)(params, links, tokens, tokens, ctx)
        local = jaxmp.pipeline(pipe.modules(), *channels)

        def whole(variables, links, x, y, ctx):
            out, _, links = local.apply(variables, links, x, ctx)
            return nats(out, y), (links, None)

        [cut] = local.boundaries
        own = cut.init(jax.ShapeDtypeStruct((B, 8, 8), 'float64'))
        start = Links((own.fwd,), (own.bwd,))
        variables = pipe.variables(jax.device_get(params))
        step = jit(jaxmp.value_and_grad(whole))
        (want, of), _ = looped(step, variables, [start] * 2, tokens, tokens, ctx)
        close(loss, want)
        close(pipe.variables(jax.device_get(grads)), of)


def test_init():
    """Slices that no device uses are zero; states are zero, in slots; stages differ."""
    x = np.ones((4 * B, 5))
    pipe = make('ef21(raw)', 'aqsgd(raw, examples=9)', 4)
    params, links = pipe.init(jax.random.key(0), x)
    used = {
        k: [np.any([np.any(a[i]) for a in jax.tree.leaves(params[k])]) for i in range(S)]
        for k in params
    }
    assert used == {
        'first': [True, False, False, False],
        'stages': [True] * S,
        'last': [False] * 3 + [True],
    }
    kernels = [a for a in jax.tree.leaves(params['stages']) if a.ndim == 3]
    assert not np.array_equal(kernels[0][0], kernels[0][1])
    assert jax.tree.map(jnp.shape, links) == Links(((S, 4, B, D),) * 2, ((S, 9, D),) * 2)
    assert all(a.sharding.spec == P('stage') for a in jax.tree.leaves((params, links)))


def test_the_scan_is_a_schedule():
    """Valid, in the order of 1F1B, and a message is used in the scan tick after it was sent."""
    for stages, micros in ((1, 1), (4, 1), (4, 8), (3, 32)):
        plan = tasks(stages, micros)
        check(plan)
        assert max(saved_inputs(plan)) == min(micros, 2 * stages - 1)
        when = {t[1:]: t.tick // 2 for t in plan}
        for s in range(1, stages):
            for m in range(micros):
                assert when[s, m, 'F'] == when[s - 1, m, 'F'] + 1
                assert when[s - 1, m, 'B'] == when[s, m, 'B'] + 1
        assert in_order(plan) == in_order(one_f_one_b(stages, micros))


def in_order(plan):
    return [t[1:] for t in sorted(plan, key=lambda t: (t.stage, t.kind, t.tick))]


# Bytes and memory of the compiled program.


def compiled(fwd, bwd, micro):
    pipe = make(fwd, bwd, micro)
    x, y = (jax.ShapeDtypeStruct((micro * B, n), 'float32') for n in (5, CLASSES))
    ctx = jax.eval_shape(lambda: Ctx(jax.random.key(0)))
    return pipe, x, jit(pipe.value_and_grad).lower(*shapes(pipe, x), x, y, ctx).compile()


@pytest.mark.parametrize(
    ('fwd', 'bwd'),
    [
        ('ef21(top_k(0.3, values=fp16, indices=bitmap))', 'ef(same_support(values=fp16))'),
        ('uniform(4)', 'ef_mixed(top_k(0.2))'),
    ],
)
def test_bits_are_the_bytes_of_the_collectives(fwd, bwd):
    pipe, x, program = compiled(fwd, bwd, 2)
    forward, backward = permuted(program.as_text())
    assert (8 * forward, 8 * backward) == pipe.bits(x)
    h = jax.ShapeDtypeStruct((B, D), 'float32')
    assert 8 * forward == jaxmp.bits(pipe.fwd, h)


def gpipe(pipe, micro):
    """All forwards, then all backwards: a scan through `Boundary.cross`, and its gradient."""
    edge = jaxmp.boundary(pipe.fwd, pipe.bwd, jaxmp.ppermute('stage', S))

    def device(params, x, y):
        params, s = jax.tree.map(lambda a: a[0], params), jax.lax.axis_index('stage')
        x, y = (a.reshape(micro, B, -1) for a in (x, y))

        def loss(params):
            apply = lambda name, module, x: module.apply({'params': params[name]}, x)

            def tick(h, t):
                m = jnp.clip(t - s, 0, micro - 1)
                h = jnp.where(s == 0, apply('first', pipe.parts.first, x[m]), h)
                out = apply('stages', pipe.parts.stages[0], h)
                here = squared(apply('last', pipe.parts.last, out), y[m])
                return edge.cross(out, edge.init(out))[0], jnp.where(t == m + S - 1, here, 0)

            h = jax.lax.pcast(jnp.zeros((B, D)), 'stage', to='varying')
            losses = jax.lax.scan(tick, h, jnp.arange(micro + S - 1))[1]
            return jnp.sum(jnp.where(s == S - 1, losses, 0)) / micro

        return jax.tree.map(lambda a: a[None], jax.value_and_grad(loss)(params))

    specs = P('stage'), P(), P()
    return jax.shard_map(device, mesh=pipe.mesh, in_specs=specs, out_specs=P('stage'))


def test_memory_does_not_grow_with_micro_batches():
    """1F1B's working memory is flat; GPipe's, of the same loss and gradients, is not."""
    used = {'1f1b': [], 'gpipe': []}
    for micro in (8, 32):
        pipe, x, program = compiled('raw', 'raw', micro)
        y = jax.ShapeDtypeStruct((micro * B, CLASSES), 'float32')
        other = jit(gpipe(pipe, micro)).lower(shapes(pipe, x)[0], x, y).compile()
        for name, p in (('1f1b', program), ('gpipe', other)):
            used[name].append(p.memory_analysis().temp_size_in_bytes)
        if micro == 8:
            check_same(pipe, program, other)
    assert used['1f1b'][1] == used['1f1b'][0]
    assert used['gpipe'][1] > 2 * used['gpipe'][0] > 4 * used['1f1b'][0]


def check_same(pipe, program, other):
    place = NamedSharding(pipe.mesh, P('stage'))
    x, y = (a[0].astype('float32') for a in data(8, 1)[:2])
    params = jax.tree.map(lambda a: a.astype('float32'), parameters())
    params, links = jax.device_put((params, shapes(pipe, x)[1]), place)
    loss, grads, _ = program(params, links, x, y, Ctx(jax.random.key(0)))
    want, want_grads = other(params, x, y)
    np.testing.assert_allclose(loss, np.sum(want), rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6), grads, want_grads)


def made_of(jaxpr, shape):
    """Names of what makes arrays of a shape, loops and their bodies included."""
    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, 'shape', None) == shape for v in eqn.outvars):
            yield eqn.primitive.name
        for body in jaxprs_in_params(eqn.params):
            yield from made_of(body, shape)


def test_a_tick_touches_a_tables_rows_only():
    """Else a step costs the size of the table, in every tick twice: 17.5 s for 1.3."""
    rule = 'aqsgd(uniform(4), examples=21)'
    pipe, (x, y) = make(rule, rule, 4), (np.zeros((4 * B, n), 'float32') for n in (5, CLASSES))
    ctx = Ctx(jax.random.key(0), np.arange(4 * B))
    step = jax.make_jaxpr(pipe.value_and_grad)(*shapes(pipe, x), x, y, ctx)
    # Two ends, two directions: their rows are written; shard_map's axis goes, the loop carries on.
    assert sorted(made_of(step.jaxpr, (21, D))) == ['scan', *['scatter'] * 4, *['squeeze'] * 4]


# Other platforms, bad input.


def test_the_step_lowers_for_cuda():
    pipe = make('ef21(top_k(0.3, values=fp16, indices=bitmap))', 'ef(uniform(4))', 8)
    x, y = (jax.ShapeDtypeStruct((8 * B, n), 'float32') for n in (5, CLASSES))
    step = jax.export.export(jax.jit(pipe.value_and_grad), platforms=['cuda'])
    made = step(*shapes(pipe, x), x, y)
    assert (made.platforms, made.nr_devices) == (('cuda',), S)
    assert made.mlir_module().count('stablehlo.collective_permute') >= 4  # two arrays a direction


def wrong(**changes):
    args = {'parts': PARTS, 'fwd': parse('raw'), 'bwd': parse('raw'), 'mesh': device_mesh(stage=S)}
    return spmd(**(args | changes))


@pytest.mark.parametrize(
    ('changes', 'says'),
    [
        (
            {'parts': Parts(*mlp(3, D, CLASSES), squared)},
            r'3 stages on a mesh of 4 devices; .*device_mesh\(stage=3\), or cut .* into 4 stages',
        ),
        (
            {'parts': PARTS._replace(stages=(*PARTS.stages[1:], nn.Dense(D)))},
            'the stages differ, and one program runs them all; .* mpmd',
        ),
        ({'micro': 0}, 'micro 0 is not a number of micro-batches; give 1 or more'),
        (
            {'mesh': jax.sharding.Mesh(np.array(jax.devices()[:S]), ('x',))},
            r"a mesh of one axis 'stage', got \('x',\)",
        ),
    ],
)
def test_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        wrong(**changes)


@pytest.mark.parametrize(
    ('stage', 'batch', 'says'),
    [
        (PARTS.stages[0], 6, 'a batch of 6 does not divide into 4 micro-batches; make the batch'),
        (nn.Dense(9), 8, r'a stage made float32\[2, 9\] of float32\[2, 8\]; equal stages keep'),
        (
            nn.Sequential([nn.BatchNorm(use_running_average=False)]),
            8,
            r"stages has variables \['batch_stats'\] besides params",
        ),
    ],
)
def test_init_refuses(stage, batch, says):
    pipe = make('raw', 'raw', 4, PARTS._replace(stages=(stage,) * S))
    with pytest.raises(ValueError, match=says):
        shapes(pipe, np.zeros((batch, 5), 'float32'))


def test_links_of_other_shapes_are_refused():
    x, y = np.zeros((8, 5), 'float32'), np.zeros((8, CLASSES), 'float32')
    params, links = shapes(make('ef(raw)', 'raw', 2), x)
    with pytest.raises(ValueError, match=r'links were made for .* keep batch size and micro'):
        jax.eval_shape(make('ef(raw)', 'raw', 4).value_and_grad, params, links, x, y)


def test_channels_and_devices():
    with pytest.raises(TypeError, match='boundary fwd must be a channel'):
        wrong(fwd=jaxmp.raw)
    with pytest.raises(ValueError, match='5 stages need 5 devices, there are 4; on a CPU start'):
        device_mesh(stage=5)
