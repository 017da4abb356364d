"""Every runtime against the one-program runtime: the same means, parameters and states."""

import socket
import subprocess
import sys
from functools import cache, partial

import jax
import jax.export
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxmp import Ctx, boundary, parse
from jaxmp.devices import place
from jaxmp.feedback import per_microbatch
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.links import remote_link
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.schedule import gpipe
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.stage import MicroBatch, StageState
from jaxmp.runtimes.types import Model
from tests import pipelines
from tests.runs import ENV, ROOT

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
rounded = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # statistics are float32


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@cache
def wanted(case, n, replicas):
    return pipelines.local(case, n, replicas)


def parts_of(feedback, s, links):
    """What stage s holds of the one-program runtime's states, mirrored ones at both ends."""
    ends = lambda b, way: getattr(feedback, way)[b]
    receiver = lambda b, way, mirrored: ends(b, way)[0 if mirrored else 1]
    left = right = ((), ())
    if s:
        fwd = links[s - 1].fwd
        left = receiver(s - 1, 'fwd', fwd.mirrored), ends(s - 1, 'bwd')[0]
    if s < len(links):
        bwd = links[s].bwd
        right = ends(s, 'fwd')[0], receiver(s, 'bwd', bwd.mirrored)
    return (*left, *right)


def assert_equal(leaves, case, n, replicas):
    """``(name, stage, replica) -> leaves`` equal the one-program runtime's; all are there."""
    _, states = wanted(case, n, replicas)
    stages = pipelines.STAGES if replicas == 1 else pipelines.SHORT
    links = pipelines.cuts(case, n, len(stages) - 1)
    seen = 0
    for r, state in enumerate(states):
        for s in range(len(stages)):
            want = state.params[s], state.model_state[s], parts_of(state.feedback, s, links)
            check = close, rounded, close
            for name, tree, same in zip(state._fields, want, check, strict=True):
                found = leaves(name, s, r)
                for a, b in zip(found, jax.tree.leaves(tree), strict=True):
                    same(np.asarray(a), b)
                    seen += 1
    return seen


RUNS = [(kind, case, n, 1) for kind in ('mpmd', 'spmd') for case in pipelines.CASES for n in (1, 4)]
RUNS += [(kind, 'ef21', n, 2) for kind in ('mpmd', 'spmd') for n in (1, 4)]


@pytest.mark.parametrize(('kind', 'case', 'n', 'replicas'), RUNS)
def test_a_runtime_equals_one_program(kind, case, n, replicas):
    found, model, runtime = pipelines.apart(kind, case, n, replicas)
    close(np.array(found), np.array(wanted(case, n, replicas)[0]))
    leaves = lambda name, s, r: jax.tree.leaves(getattr(model, name)[s][r])
    assert assert_equal(leaves, case, n, replicas)
    for s, rows in model.params.items():
        for r, tree in rows.items():
            device = runtime.columns.devices[r, s]
            assert all(a.devices() == {device} for a in jax.tree.leaves(tree))


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def run_processes(folder, count, *what):
    """Runs processes to their end, or to ours; returns what each of them saved."""
    address, outs = f'127.0.0.1:{free_port()}', [folder / f'{i}.npz' for i in range(count)]
    logs = [(folder / f'{i}.log').open('w+') for i in range(count)]
    command = [sys.executable, '-m', 'tests.pipelines', address]
    running = []
    try:
        for i in range(count):
            rest = [str(a) for a in (i, count, *what, outs[i])]
            running.append(
                subprocess.Popen(
                    command + rest, env=ENV, cwd=ROOT, stdout=logs[i], stderr=subprocess.STDOUT
                )
            )
        codes = [p.wait(timeout=240) for p in running]
    finally:
        for p in running:
            p.kill()
            p.wait()
        texts = [(f.seek(0), f.read()[-2000:], f.close())[1] for f in logs]
    assert codes == [0] * count, texts
    return [dict(np.load(out)) for out in outs]


@pytest.mark.parametrize(
    ('processes', 'case', 'n', 'replicas'), [(2, 'ef', 4, 1), (4, 'ef21', 1, 1), (4, 'ef21', 4, 2)]
)
def test_processes_equal_one_program(tmp_path, processes, case, n, replicas):
    saved = run_processes(tmp_path, processes, case, n, replicas)
    for i, one in enumerate(saved if replicas == 1 else ()):
        # Every link is open before what takes long is compiled.
        names = one['compiled'].tolist()
        opened = [k for k, name in enumerate(names) if name == 'open_links']
        assert len(opened) == (i > 0) + (i < processes - 1)
        assert max(opened) < min(names.index(n) for n in ('init', '_forward', 'swap'))
    found = {k: a for one in saved for k, a in one.items() if k not in ('means', 'compiled')}
    means = [one['means'] for one in saved if 'means' in one]
    close(np.concatenate(means, 1), np.array(wanted(case, n, replicas)[0]))

    def leaves(name, s, r):
        keys = [k for k in found if k.startswith(f'{name}/{s}/{r}/')]
        return [found[k] for k in sorted(keys, key=lambda k: int(k.rsplit('/', 1)[1]))]

    assert assert_equal(leaves, case, n, replicas) == len(found)


# Bytes, memory, other platforms.


def test_what_travels_over_a_mesh_is_the_payload():
    """Bits of the channels, messages handed over and operands of the compiled permutes agree."""
    _, _, runtime = pipelines.apart('spmd', 'direct', 1, 1)
    links = pipelines.cuts('direct', 1, 3)
    sizes = [b.bits(jax.ShapeDtypeStruct((pipelines.SAMPLES, s.width), float)) for b, s in zip(
        links, pipelines.STAGES, strict=False)]  # fmt: skip
    assert {l: tuple(8 * n for n in pair) for l, pair in runtime.collectives().items()} == dict(
        enumerate(sizes)
    )
    assert (8 * runtime.payload() / pipelines.STEPS == sizes).all()


def table_model(n):
    rules = (parse('aqsgd(uniform(4), 21)'), parse('ef21(uniform(4))'))
    cut = boundary(*(per_microbatch(c, n) for c in rules))
    x = jax.ShapeDtypeStruct((pipelines.SAMPLES, 9), float)
    return Model(pipelines.SHORT, (cut,), lambda x, key: x, pipelines.loss, x, n)


def batch_of(n):
    x, y = np.ones((pipelines.SAMPLES * n, 9)), np.ones((pipelines.SAMPLES * n, 4))
    return {'x': x, 'y': y, 'id': np.arange(len(x), dtype=np.int32)}


def where(state):
    """Addresses of the feedback states of all stages."""
    return [a.unsafe_buffer_pointer() for a in jax.tree.leaves(state.feedback)]


def test_a_step_writes_its_states_in_place_and_a_prediction_takes_none():
    """Else every step copies every table (AQ-SGD, 439 MiB an end: 10 times the step)."""
    runtime = Mpmd(table_model(2), Columns([jax.devices()[:2]]), options=pipelines.OPTIONS)
    state, key = runtime.init(jax.random.key(0)), jax.random.key(1)
    before = where(state)
    runtime.predict(state, batch_of(2), key)
    assert where(state) == before
    assert where(runtime.value_and_grad(state, batch_of(2), key)[2]) == before
    assert all(a.is_deleted() for a in jax.tree.leaves(state.feedback))


def made_of(jaxpr, shape):
    """Names of what makes arrays of a shape, loops and their bodies included."""
    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, 'shape', None) == shape for v in eqn.outvars):
            yield eqn.primitive.name
        for body in jaxprs_in_params(eqn.params):
            yield from made_of(body, shape)


def test_a_tick_touches_a_tables_rows_only():
    """Else a step costs the size of the table, in every tick twice: 17.5 s for 1.3."""
    runtime = Spmd(table_model(2), Columns([jax.devices()[:2]]))
    state, key = runtime.init(jax.random.key(0)), jax.random.key(1)
    step = jax.make_jaxpr(runtime.step)(runtime._state(state), batch_of(2), key)
    width = pipelines.SHORT[0].width
    makers = set(made_of(step.jaxpr, (21, width)))
    assert 'scatter' in makers
    assert not makers & {'select_n', 'cond', 'concatenate', 'pad'}


@pytest.mark.parametrize('kind', [Mpmd, Spmd])
def test_a_step_lowers_for_cuda(kind):
    runtime = kind(pipelines.model('ef21', 1), Columns([jax.devices()[:4]]))
    state = runtime.init(jax.random.key(0))
    batch, words = batch_of(1), jax.random.key_data(jax.random.key(1))
    lower = lambda f, *given: jax.export.export(jax.jit(f), platforms=['cuda'])(*given).platforms
    if kind is Spmd:
        step = lambda words, *given: runtime.step(*given, jax.random.wrap_key_data(words))[1:]
        assert lower(step, words, runtime._state(state), batch) == ('cuda',)
        return
    for s, program in enumerate(runtime.programs):
        own = jax.tree.map(np.asarray, StageState(*(part[s][0] for part in state)))
        message = jax.tree.map(zeros, program.left and program.left.messages(program.x)[0])
        after = jax.tree.map(zeros, program.right and program.right.messages(program.y)[1])

        def both(words, own, message, after, program=program, s=s):
            x, y = (batch['x'], None) if s == 0 else (None, batch['y'])
            ctx = Ctx(jax.random.wrap_key_data(words), batch['id'])
            given = MicroBatch(x, y, ctx)
            state, out, residuals = program.forward(own, given, message)
            total = program.init_total(own.params, batch['y'])
            return out, program.backward(state, total, residuals, (given, after))

        assert lower(both, words, own, message, after) == ('cuda',)


def zeros(like):
    return np.zeros(like.shape, like.dtype)


def test_numbers_that_do_not_fit_are_refused():
    model, columns = pipelines.model('ef', 1), Columns([jax.devices()[:4]])
    with pytest.raises(ValueError, match='4 stages need a boundary between each two, 3 in all'):
        Mpmd(model._replace(boundaries=model.boundaries[:2]), columns)
    with pytest.raises(ValueError, match='need a schedule of as many, got 3 and 1'):
        Mpmd(model, columns, gpipe(3, 1))
    runtime = Mpmd(model, columns)
    with pytest.raises(ValueError, match='x of a batch of 5 came to a pipeline built for 1 micro'):
        runtime.drivers[0].step(runtime._of(runtime.init(jax.random.key(0)), 0), np.ones((5, 9)), 0)
    with pytest.raises(ValueError, match='remote_link links this process'):
        remote_link(*jax.devices()[:2], (None, None))
    with pytest.raises(ValueError, match='8 stages of 2 replicas need 8 devices in a process, the'):
        place(2, 4, apart=True)
