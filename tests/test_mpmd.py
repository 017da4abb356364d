"""A program each stage against one program: the same losses, parameters and feedback states."""

import dataclasses
import socket
import subprocess
import sys
from functools import partial

import jax
import jax.export
import numpy as np
import pytest

from jaxmp import Ctx, boundary, mpmd, parse, schedule, transport
from jaxmp.stage import Feed, messages
from tests import mpmd_worker as worker
from tests.runs import ENV, ROOT

RUNS = ((1, schedule.one_f_one_b), (4, schedule.gpipe), (8, schedule.one_f_one_b))
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def tree_close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(close, jax.device_get(a), jax.device_get(b))


def assert_states(states, variables, slots, boundaries):
    """Variables and both ends of every link equal the one-program pipeline's."""
    for s, state in states.items():
        tree_close(dict(state.variables), variables[s])
    for link, b in enumerate(boundaries):
        left, right = states[link].right, states[link + 1].left
        for name, channel, tx, rx in (
            ('fwd', b.fwd, left.tx, right.rx),
            ('bwd', b.bwd, right.tx, left.rx),
        ):
            assert len(tx) == len(rx) == (1 if channel.per_example else len(slots))
            for m, (sent, received) in enumerate(zip(tx, rx, strict=True)):
                want, other = getattr(slots[m], name)[link]
                tree_close(sent, want)
                tree_close(received, want if channel.mirrored else other)


@pytest.mark.parametrize('case', worker.CASES)
def test_equals_one_program(case):
    boundaries = worker.model(case).boundaries
    for micros, make in RUNS if case == 'ef' else RUNS[1:]:
        want, variables, slots = worker.one_program(case, micros)
        losses, states, moved = worker.several_programs(case, micros, make)
        close(losses, want)
        assert_states(states, variables, slots, boundaries)
        for link, (b, stage) in enumerate(zip(boundaries, worker.STAGES, strict=False)):
            x = jax.ShapeDtypeStruct((worker.SAMPLES, stage.width), float)
            assert tuple(8 * n for n in moved[link]) == tuple(micros * n for n in b.bits(x))


@pytest.mark.parametrize('make', [schedule.one_f_one_b, schedule.gpipe])
def test_saved_inputs_are_the_schedules(make, monkeypatch):
    """1F1B keeps S - s inputs however many micro-batches there are, GPipe all of them."""
    kept, do = {}, mpmd._Desk.do

    def count(desk, task):
        do(desk, task)
        s = desk.stage.index
        kept[s] = max(kept.get(s, 0), len(desk.saved))

    monkeypatch.setattr(mpmd._Desk, 'do', count)
    worker.several_programs('ef', 8, make)
    assert tuple(kept.values()) == schedule.saved_inputs(make(4, 8))
    assert (tuple(kept.values()) == (4, 3, 2, 1)) == (make is schedule.one_f_one_b)


def test_every_program_of_every_stage_lowers_for_cuda():
    machine = worker.built('ef21')
    states, (x, y, ctx) = machine.init(jax.random.key(0)), next(worker.batches(1))
    lower = lambda f, *given: jax.export.export(f, platforms=['cuda'])(*given)
    arrived = [None, *(messages(b, s.y) for b, s in zip(
        worker.model('ef21').boundaries, machine.stages.values(), strict=False)), None]  # fmt: skip
    for s, stage in machine.stages.items():
        stage = dataclasses.replace(stage, options=None)  # nothing of the CPU's
        state, key = states[s], jax.random.key_data(ctx.key)
        feed = Feed(x if s == 0 else None, y if stage.loss else None, ctx, np.int32(0), 1.0)
        left, right = arrived[s], arrived[s + 1]

        def forward(key, *given, feed=feed, stage=stage):
            at = feed._replace(ctx=feed.ctx._replace(key=jax.random.wrap_key_data(key)))
            return stage.forward(given[0], at, *given[1:])

        def backward(key, saved, *given, feed=feed, stage=stage):
            at = feed._replace(x=None, ctx=feed.ctx._replace(key=jax.random.wrap_key_data(key)))
            return stage.backward(*given[:2], at, saved, *given[2:])

        slot = lambda end, i: end[i][0] if end[i] else ()
        ends = slot(state.left, 1), slot(state.right, 0)
        given = key, state.variables, left and left[0], *ends
        saved = jax.eval_shape(jax.jit(forward), *given)[0]
        params = state.variables['params']
        total = stage.zeros(params, feed.y)
        ends = slot(state.right, 1), slot(state.left, 0)
        for program in (
            lower(jax.jit(forward), *given),
            lower(jax.jit(backward), key, saved, total, params, right and right[1], *ends),
        ):
            assert program.platforms == ('cuda',)


def where(states):
    """Addresses of the feedback states of all stages."""
    return [
        a.unsafe_buffer_pointer()
        for s in states.values()
        for a in jax.tree.leaves((s.left, s.right))
    ]


def test_a_step_writes_its_states_in_place_and_a_prediction_takes_none():
    """Else every step copies every table (AQ-SGD, 439 MiB an end: 10 times the step)."""
    rules = parse('aqsgd(uniform(4), 20)'), parse('ef21(uniform(4))')
    x, y = np.ones((8, 3)), np.ones((8, 2))
    machine = mpmd.mpmd(
        (worker.Layer(5), worker.Layer(2)), [boundary(*rules)], worker.loss,
        schedule.one_f_one_b(2, 2), x[:4], jax.devices()[:2], worker.QUICK, train=True,
    )  # fmt: skip
    states, ctx = machine.init(jax.random.key(0)), Ctx(ids=np.arange(8))
    before = where(states)
    machine.predict(states, x, ctx)
    assert where(states) == before
    assert where(machine.step(states, x, y, ctx).states) == before
    assert all(a.is_deleted() for s in states.values() for a in jax.tree.leaves((s.left, s.right)))


def test_stages_lie_on_their_devices():
    machine = worker.built('ef')
    assert list(machine.devices) == jax.devices()[:4]
    for s, state in machine.init(jax.random.key(0)).items():
        assert all(a.devices() == {jax.devices()[s]} for a in jax.tree.leaves(state))


def test_init_equals_the_pipelines():
    variables, _ = worker.model('ef').init(
        jax.random.key(0), np.zeros((worker.SAMPLES, 9)), train=True
    )
    states = worker.built('ef').init(jax.random.key(0))
    tree_close([dict(states[s].variables) for s in range(4)], list(variables))


def free_port():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


def run_processes(folder, n, case, make, micros):
    """Runs n processes to their end, or to ours; returns what each of them saved."""
    address, outs = f'127.0.0.1:{free_port()}', [folder / f'{i}.npz' for i in range(n)]
    logs = [(folder / f'{i}.log').open('w+') for i in range(n)]
    command = [sys.executable, '-m', 'tests.mpmd_worker', address]
    running = []
    try:
        for i in range(n):
            rest = [str(a) for a in (i, n, case, make, micros, outs[i])]
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
    assert codes == [0] * n, texts
    return [dict(np.load(out)) for out in outs]


@pytest.mark.parametrize(
    ('processes', 'case', 'make', 'micros'),
    [
        (2, 'ef', 'gpipe', 4),
        (4, 'ef21', 'one_f_one_b', 4),
    ],
)
def test_processes_equal_one_process(tmp_path, processes, case, make, micros):
    saved = run_processes(tmp_path, processes, case, make, micros)
    for i, one in enumerate(saved):  # every link is open before what takes long is compiled
        names = one.pop('compiled').tolist()
        opened = [k for k, name in enumerate(names) if name == 'open_links']
        assert len(opened) == (i > 0) + (i < processes - 1)
        assert max(opened) < min(names.index(n) for n in ('_init', '<lambda>', 'swap'))
    losses, states, moved = worker.several_programs(case, micros, getattr(schedule, make))
    found = {name: a for one in saved for name, a in one.items()}
    close(found.pop('loss'), np.asarray(losses))
    for link in range(3):
        assert tuple(found.pop(f'moved/{link}')) == moved[link]
    for s, state in states.items():
        for i, leaf in enumerate(jax.tree.leaves(state)):
            close(found.pop(f'{s}/{i}'), leaf)
    assert not found
    stages = [{int(name[0]) for name in one if name[0].isdigit()} for one in saved]
    assert stages == [set(range(i, i + 4 // processes)) for i in range(0, 4, 4 // processes)]


def test_a_batch_of_another_size_is_refused():
    machine = worker.built('ef')
    with pytest.raises(
        ValueError, match='x of a batch of 5 came to a pipeline built for 1 micro-batches'
    ):
        machine.step({}, np.zeros((5, 9)), np.zeros((5, 4)), Ctx())


def test_numbers_that_do_not_fit_are_refused():
    pipe, x = worker.model('ef'), jax.ShapeDtypeStruct((worker.SAMPLES, 9), float)
    tasks = schedule.gpipe(4, 2)
    with pytest.raises(ValueError, match='4 stages need a boundary between each two'):
        mpmd.mpmd(worker.STAGES, pipe.boundaries[:2], worker.loss, tasks, x, train=True)
    with pytest.raises(ValueError, match='4 stages need a schedule of as many, got 3'):
        worker.built('ef').follow(schedule.gpipe(3, 2))
    with pytest.raises(ValueError, match='far links this process'):
        transport.far(*jax.devices()[:2], (None, None))
