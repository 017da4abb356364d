"""Every runtime against one plain program: the same means, parameters and states."""

import subprocess
import sys
from collections import defaultdict
from concurrent.futures import Future
from functools import cache, partial

import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jaxmp import Ctx, boundary, parse
from jaxmp.feedback import per_microbatch
from jaxmp.launch.__main__ import free_port
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.norms import Norms
from jaxmp.runtimes.placement import place
from jaxmp.runtimes.schedules import SCHEDULES, gpipe, named
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.stage import programs
from jaxmp.runtimes.state import MicroBatch
from jaxmp.runtimes.types import Model
from jaxmp.training.parallel import RUNTIMES
from jaxmp.wire import nbytes
from tests import pipelines
from tests.base import ENV, FLAGS, ROOT, slow

close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
rounded = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)  # statistics are float32


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


@cache
def wanted(case, n, replicas, late=0):
    return pipelines.local(case, n, replicas, late)


def assert_equal(leaves, case, n, replicas, once=False, late=0):
    """``(name, stage, replica) -> leaves`` equal the one-program runtime's; all are there.

    ``once``: a state that both ends share is at its sender alone.
    """
    _, states = wanted(case, n, replicas, late)
    stages = pipelines.STAGES if replicas == 1 else pipelines.SHORT
    links = pipelines.cuts(case, n, len(stages) - 1)
    seen = 0
    for r, state in enumerate(states):
        for s in range(len(stages)):
            want = (
                state.params[s],
                state.model_state[s],
                pipelines.parts_of(state.feedback, s, links, once),
            )
            check = close, rounded, close
            for name, tree, same in zip(state._fields, want, check, strict=True):
                found = leaves(name, s, r)
                for a, b in zip(found, jax.tree.leaves(tree), strict=True):
                    same(np.asarray(a), b)
                    seen += 1
    return seen


REPLICATED = [case for case in pipelines.REPLICATED if case != 'ef21']  # which 'rounds' has
RUNS = [(case, n, 1) for case in pipelines.CASES for n in (1, 4)]
RUNS += [('ef21', 1, 2), *((case, 4, 2) for case in REPLICATED)]
# One after the other, so that a worker computes what is wanted of all once.
RUNS = [(kind, *run) for run in RUNS for kind in RUNTIMES]


@cache
def kept(*run):
    """A run that two tests look at."""
    return pipelines.run(*run)


TWICE = ('spmd', 'ef21', 4, 1), ('mpmd', 'ef21', 4, 1)
MAIN = *TWICE, ('mpmd', 'rounds', 4, 2)


def beside_main(run):
    """All runs but those in which each of feedback, micro-batches and replicas is there once."""
    return run not in MAIN


@pytest.mark.parametrize(('kind', 'case', 'n', 'replicas'), slow(RUNS, beside_main))
def test_a_runtime_equals_one_program(kind, case, n, replicas):
    run = kind, case, n, replicas
    found, model, _, runtime = (kept if run in TWICE else pipelines.run)(*run)
    close(np.array(found), np.array(wanted(case, n, replicas)[0]))
    part = cache(lambda name, s: runtime.rows(getattr(model, name)[s]))
    leaves = lambda name, s, r: jax.tree.leaves(part(name, s)[r])
    assert assert_equal(leaves, case, n, replicas, runtime.together)
    for s, rows in () if runtime.together else model.params.items():
        for r, tree in rows.items():
            device = runtime.columns.devices[r, s]
            assert all(a.devices() == {device} for a in jax.tree.leaves(tree))


LATE = [('mpmd', case, n, 1, late) for case in pipelines.CASES for n, late in [(1, 2), (4, 1)]]
LATE += [('mpmd', case, 4, 2, 1) for case in pipelines.REPLICATED]
BY_STAGE = (2, 2, 1, 0)
LATE += [('mpmd', case, n, 1, BY_STAGE) for case in pipelines.CASES for n in (1, 4)]
LATE += [('mpmd', case, 4, 2, (2, 0)) for case in pipelines.REPLICATED]
LATE += [('spmd', 'ef21', 4, 1, BY_STAGE)]
LATE += [('spmd', 'ef21', 4, 1, 1), ('spmd', 'rounds', 4, 2, 1), ('local', 'rounds', 4, 2, 1)]


@pytest.mark.parametrize(
    ('kind', 'case', 'n', 'replicas', 'late'),
    slow(LATE, lambda c: c[:4] != ('mpmd', 'ef21', 4, 1)),
)
def test_late_gradients_equal_those_of_one_program(kind, case, n, replicas, late):
    """Under mpmd they come late; elsewhere they wait."""
    found, model, _, runtime = pipelines.run(kind, case, n, replicas, late=late)
    close(np.array(found), np.array(wanted(case, n, replicas, late)[0]))
    leaves = lambda name, s, r: jax.tree.leaves(runtime.rows(getattr(model, name)[s])[r])
    assert assert_equal(leaves, case, n, replicas, runtime.together, late)


@pytest.mark.parametrize('kind', slow(['mpmd', 'spmd'], 'spmd'.__eq__))
def test_a_stage_run_again_gives_the_same(kind):
    """``remat``: the dropout of a micro-batch and its statistics too, also in two halves."""
    split = {'schedule': 'zb_h2'} if kind == 'mpmd' else {}
    found, model, *_ = pipelines.run(kind, 'direct', 1, 1, remat=True, **split)
    close(np.array(found), np.array(wanted('direct', 1, 1)[0]))
    leaves = lambda name, s, r: jax.tree.leaves(getattr(model, name)[s][r])
    assert assert_equal(leaves, 'direct', 1, 1)


class Deep(nn.Module):
    """Layers, one after another."""

    layers = 4

    @nn.compact
    def __call__(self, x, train):
        for _ in range(self.layers):
            x = pipelines.Layer(96)(x, train)
        return x


@pytest.mark.parametrize(('remat', 'times'), [(False, 3.1), (True, 4.1)])
def test_operations_of_a_stage(remat, times):
    """Forward and backward of a stage in the middle, in units of its forward alone.

    The stage is deep: a backward cut in two may not pull a gradient through its layers twice.
    """
    x = jax.ShapeDtypeStruct((64, 96), np.float32)
    cut, layer = boundary(parse('raw'), parse('raw')), Deep()
    _, program, _ = programs(Model((layer,) * 3, (cut,) * 2, None, pipelines.loss, x, remat=remat))
    state, message = jax.eval_shape(program.init, jax.random.key(0)), program.left.messages(x)[0]
    batch = MicroBatch(None, None, Ctx(jax.random.key(0)))
    sums = jax.eval_shape(program.init_accumulator, state.params, None)
    count = lambda f, *given: jax.jit(f).lower(*given).compile().cost_analysis()['flops']
    after, _, residuals = jax.eval_shape(program.forward, state, batch, message)
    backward = count(program.backward, after, sums, residuals, (batch, message))
    forward = count(program.predict, state, batch, message)
    total = count(program.forward, state, batch, message) + backward
    assert times - 1 < total / forward < times
    # Cut in two, it is as much, and a gradient per layer is handed on, no residual.
    _, later, _ = jax.eval_shape(program.backward_input, after, residuals, (batch, message))
    assert remat or nbytes(later.pull) == Deep.layers * nbytes(x)
    later = program.joined(state.params, residuals, later)
    parts = [count(program.backward_input, after, residuals, (batch, message))]
    parts.append(count(program.backward_weights, state.params, sums, later))
    assert remat or 0.4 < parts[0] / sum(parts) < 0.6
    assert sum(parts) < 1.05 * backward


class Plain(nn.Module):
    """A stage without parameters."""

    @nn.compact
    def __call__(self, x, train):
        return jnp.tanh(x)


@pytest.mark.parametrize('kind', slow(['mpmd', 'spmd'], 'spmd'.__eq__))
def test_a_stage_may_have_no_parameters(kind, monkeypatch):
    monkeypatch.setattr(pipelines, 'STAGES', (pipelines.Layer(5), Plain(), pipelines.Layer(4)))
    want, [state] = pipelines.local('direct', 1, 1)
    split = {'schedule': 'zb_h2'} if kind == 'mpmd' else {}
    found, model, *_ = pipelines.run(kind, 'direct', 1, 1, **split)
    close(np.array(found), np.array(want))
    assert state.params[1] == model.params[1][0] == {}
    for s in (0, 2):
        jax.tree.map(close, model.params[s][0], state.params[s])


def test_every_schedule_equals_one_program():
    """Each split or not, under its own order of the same compiled stages."""
    *_, runtime = kept('mpmd', 'ef21', 4, 1)
    [driver] = runtime.drivers.values()
    some = {'zb_h2(2, 1)': named('zb_h2(2, 1)')}  # halves of the last micro-batch alone
    for name, schedule in {**SCHEDULES, **some}.items():
        driver.follow(schedule(4, 4))
        found, model, _ = pipelines.steps(runtime, 'ef21', 4)
        close(np.array(found), np.array(wanted('ef21', 4, 1)[0]), err_msg=name)
        leaves = lambda part, s, r, model=model: jax.tree.leaves(getattr(model, part)[s][r])
        assert assert_equal(leaves, 'ef21', 4, 1)


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


SPREAD = [('spmd', 2, case, 4, 1) for case in pipelines.CASES]
SPREAD += [('spmd', 2, case, 4, 2) for case in REPLICATED]


@pytest.mark.parametrize(
    ('kind', 'processes', 'case', 'n', 'replicas', 'schedule', 'delay', 'late'),
    slow(
        [
            ('mpmd', 2, 'direct', 4, 1, 'zb_v', 0, 0),
            ('mpmd', 4, 'ef21', 1, 1, '1f1b', 80, 0),
            ('mpmd', 4, 'rounds', 4, 2, 'zb_h2', 0, 0),
            *(('mpmd', p, case, 4, 1, '1f1b', 0, 1) for p in (2, 4) for case in pipelines.CASES),
            *(('mpmd', p, 'ef21', 4, 1, '1f1b', 0, BY_STAGE) for p in (2, 4)),
            ('mpmd', 4, 'rounds', 4, 2, '1f1b', 0, 2),
            ('mpmd', 4, 'rounds', 4, 2, '1f1b', 0, (2, 0)),
            ('local', 2, 'direct', 4, 2, '1f1b', 0, 0),
            ('spmd', 4, 'direct', 4, 2, '1f1b', 0, 0),
            *((*case, '1f1b', 0, 0) for case in SPREAD),
        ],
        lambda case: case != ('mpmd', 2, 'direct', 4, 1, 'zb_v', 0, 0),
    ),
)
def test_processes_equal_one_program(
    tmp_path, kind, processes, case, n, replicas, schedule, delay, late
):
    """Several lanes per device; links that take 80 ms per message; replicas that are apart.

    Of spmd a replica over two processes, each in one of its own, and a process for every device.
    """
    saved = run_processes(tmp_path, processes, kind, case, n, replicas, schedule, delay, late)
    waits = 2 * (processes - 1) * delay / 1e3
    assert min(saved[0]['seconds'][1:]) >= waits  # the first step compiles
    extra = 'means', 'seconds'
    found = {k: a for one in saved for k, a in one.items() if k not in extra}
    means = [one['means'] for one in saved if 'means' in one]
    close(np.concatenate(means, 1), np.array(wanted(case, n, replicas, late)[0]))

    def leaves(name, s, r):
        keys = [k for k in found if k.startswith(f'{name}/{s}/{r}/')]
        return [found[k] for k in sorted(keys, key=lambda k: int(k.rsplit('/', 1)[1]))]

    assert assert_equal(leaves, case, n, replicas, kind == 'local', late) == len(found)


# Bytes, memory, other platforms.


def test_what_travels_over_a_mesh_is_the_payload():
    """Bits of the channels, messages handed over and operands of the compiled permutes agree."""
    *_, runtime = kept('spmd', 'ef21', 4, 1)
    links = pipelines.cuts('ef21', 4, 3)
    sizes = [b.bits(jax.ShapeDtypeStruct((pipelines.SAMPLES, s.width), float)) for b, s in zip(
        links, pipelines.STAGES, strict=False)]  # fmt: skip
    assert {l: tuple(8 * n for n in pair) for l, pair in runtime.collectives().items()} == dict(
        enumerate(sizes)
    )
    assert (8 * runtime.payload() / pipelines.STEPS / 4 == sizes).all()


def table_model(n, **more):
    rules = (parse('aqsgd(uniform(4), 21)'), parse('ef21(uniform(4))'))
    cut = boundary(*(per_microbatch(c, n) for c in rules))
    x = jax.ShapeDtypeStruct((pipelines.SAMPLES, 9), float)
    return Model(pipelines.SHORT, (cut,), lambda x, key: x, pipelines.loss, x, n, **more)


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


def test_a_pipeline_that_stays_full_keeps_what_it_has_begun():
    """Backwards that are to come are at the weights of their forward."""
    columns = Columns([jax.devices()[:2]])
    model = table_model(2, normed=True, delays=(2, 2))
    runtime = Mpmd(model, columns, options=pipelines.OPTIONS)
    state, key, used = runtime.init(jax.random.key(0)), jax.random.key(1), []
    for step in range(4):
        used.append(state.params[0][0])
        _, gradients, state = runtime.value_and_grad(state, batch_of(2), key)
        assert (not gradients) == (step < 2) == (runtime.square is None)
        state = state._replace(params=jax.tree.map(lambda a: a + 0.01, state.params))
    first, last = (runtime.drivers[0].flight.workers[s].saved for s in (0, 1))
    assert first
    assert all(params is used[m // 2] for m, (params, *_) in first.items())
    assert not last
    total = sum(np.vdot(a, a) for a in jax.tree.leaves(gradients))
    close(runtime.square(), total)
    rows, state = runtime.drain(state)
    assert {s: len(row) for s, row in rows.items()} == {0: 2, 1: 2}
    assert not runtime.drain(state)[0]


def test_a_pipeline_that_stays_full_goes_on_while_it_waits_for_a_norm():
    """Else its gradients come too late by the way of the norm, and the next step with them.

    It waits for others once it has done what they wait for: else who hangs is not told apart.
    """
    asked, ended = [], []

    class Far(Norms):
        """Another process tells the norm of a batch once it knows of the batch after."""

        def __init__(self, *where):
            super().__init__(*where)
            self.waited = defaultdict(Future)

        def tell(self, stage, square, batch):
            super().tell(stage, square, batch)
            if stage == 0:
                ended.append(batch)
                self.waited[batch.number - 1].set_result((square, 0.0))

        def coming(self, batch, first):
            asked.append(len(ended))
            return {9: self.waited[batch.number]}

    columns = Columns([jax.devices()[:2]])
    model = table_model(2, normed=True, delays=(1, 1))
    runtime = Mpmd(model, columns, options=pipelines.OPTIONS)
    runtime.drivers[0].norms = Far(columns.devices[0], columns.group)
    state, key = runtime.init(jax.random.key(0)), jax.random.key(1)
    for step in range(3):
        _, gradients, state = runtime.value_and_grad(state, batch_of(2), key)
        assert (not gradients) == (step < 1)
        assert step < 1 or len(ended) == step + 1
    assert asked == [1, 2, 2, 3]  # when its batch is due, and when its number is read


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
    batch, words = batch_of(1), jax.random.key_data(jax.random.key(1))
    lower = lambda f, *given: jax.export.export(jax.jit(f), platforms=['cuda'])(*given).platforms
    if kind is Spmd:
        state = runtime.init(jax.random.key(0))
        step = lambda words, *given: runtime.step(*given, jax.random.wrap_key_data(words))[1:]
        assert lower(step, words, runtime._state(state), batch) == ('cuda',)
        return
    for s, (program, own) in enumerate(zip(runtime.programs, runtime.shapes(), strict=True)):
        message = program.left and program.left.messages(program.x)[0]
        after = program.right and program.right.messages(program.y)[1]

        def both(words, own, message, after, program=program, s=s):
            x, y = (batch['x'], None) if s == 0 else (None, batch['y'])
            ctx = Ctx(jax.random.wrap_key_data(words), batch['id'])
            given = MicroBatch(x, y, ctx)
            state, out, residuals = program.forward(own, given, message)
            total = program.init_accumulator(own.params, batch['y'])
            return out, program.backward(state, total, residuals, (given, after))

        assert lower(both, words, own, message, after) == ('cuda',)


def test_numbers_that_do_not_fit_are_refused():
    model, columns = pipelines.model('ef21', 1), Columns([jax.devices()[:4]])
    with pytest.raises(ValueError, match='4 stages need a boundary between each two, 3 in all'):
        Mpmd(model._replace(boundaries=model.boundaries[:2]), columns)
    with pytest.raises(ValueError, match='need a schedule of as many, got 3 and 1'):
        Mpmd(model, columns, gpipe(3, 1))
    runtime = Mpmd(model, columns)
    with pytest.raises(ValueError, match='x of a batch of 5 came to a pipeline built for 1 micro'):
        runtime.drivers[0].step(runtime._of(runtime.init(jax.random.key(0)), 0), np.ones((5, 9)), 0)
    with pytest.raises(ValueError, match='8 stages of 2 replicas need 8 devices in a process, the'):
        place(2, 4, apart=True)


@pytest.mark.slow  # two processes that compile a whole step
def test_a_program_that_the_cache_kept_runs_branches_in_turn(tmp_path):
    """Collectives of two groups, which XLA ran at once, wrote over foreign memory: a crash."""
    code = 'import jax; jax.config.update("jax_enable_x64", True); from tests import pipelines\n'
    code += 'pipelines.STEPS = 60; found, _ = pipelines.local("rounds", 1, 2); print(found[-1])'
    cache = {'JAX_COMPILATION_CACHE_DIR': tmp_path, 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': 0}
    flags = f'--xla_force_host_platform_device_count=4 {FLAGS}'
    env = {**ENV, **{k: str(v) for k, v in cache.items()}, 'XLA_FLAGS': flags}
    run = lambda: subprocess.run([sys.executable, '-c', code], env=env, capture_output=True)
    first, second = run(), run()
    assert first.stdout
    assert (second.returncode, second.stdout) == (0, first.stdout), second.stderr.decode()
