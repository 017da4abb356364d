"""Gradients that come late: the updates of a loop by hand, and known answers on a quadratic."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmp.exchange import mean
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes.types import ModelState
from jaxmp.training import loop
from jaxmp.training.across import within
from jaxmp.training.experiment import experiment_of
from jaxmp.training.footprint import footprint
from jaxmp.training.groups import rest
from jaxmp.training.late import corrected
from jaxmp.training.step import Rules, create, train_step
from jaxmp.training.trainer import Trainer
from tests.runs import config_of, records
from tests.test_copies import TEXT
from tests.test_pretrained import small, tiny

RATE, CURVATURE = 0.1, 1.5
FIRST = {'w': np.array([8.0, -3.0]), 'b': np.array(2.0)}


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def gradient(params, step):
    """Of a quadratic whose centre moves, so that no step is like another."""
    return jax.tree.map(lambda p: CURVATURE * (p - jnp.sin(1.0 * step)), params)


class Quadratic:
    """A runtime of one stage, whose gradients are known."""

    stages, last, replicas = (0,), 0, 1

    def init(self, key):
        return ModelState({0: FIRST}, {0: {}}, ())

    def value_and_grad(self, state, step, key):
        return (), {0: gradient(state.params[0], step)}, state

    def at(self, stage, f, *trees, spent=()):
        return f(None, *trees)


def places(optimizer, steps, delay):
    """The parameters before each step."""
    rules, across = Rules(rest(1, optimizer, mean), delays=(delay,)), within(())
    state, seen = create(rules, Quadratic(), across, jax.random.key(0)), []
    step = jax.jit(lambda state, number: train_step(rules, Quadratic(), across, (state, number))[0])
    for number in range(steps):
        seen.append(state.model.params[0])
        state = step(state, number)
    return [*seen, state.model.params[0]]


def by_hand(delay, steps, strength):
    """The same by a list of gradients."""
    optimizer = optax.adam(RATE)
    params, seen, due = FIRST, [], []
    state, before = optimizer.init(params), jax.tree.map(jnp.zeros_like, FIRST)
    for step in range(steps):
        seen.append(params)
        due.append(gradient(params, step))
        if step < delay:
            continue
        u, state = optimizer.update(due[step - delay], state, params)
        moved = jax.tree.map(lambda u, last: u + strength * (u - last), u, before)
        params = optax.apply_updates(params, moved)
        before = u
    return [*seen, params]


@pytest.mark.parametrize('delay', [1, 3])
@pytest.mark.parametrize(('text', 'strength'), [('none', 0), ('predict(0.5)', 0.5)])
def test_updates_are_those_of_a_list_of_gradients(delay, text, strength):
    found = places(corrected(optax.adam(RATE), delay, text), 8, delay)
    for a, b in zip(found, by_hand(delay, 8, strength), strict=True):
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-12)


@pytest.mark.parametrize('delay', [1, 2, 4])
@pytest.mark.parametrize('word', ['none', 'predict', 'predict(0.5)'])
def test_on_a_quadratic_the_error_falls_by_the_largest_root(delay, word):
    """Of z^(N+1) - z^N + rate h (1 + c - c / z), where the correction's c is 0 without it."""
    pull = RATE * CURVATURE
    ahead = {'predict': float(delay), 'predict(0.5)': 0.5}.get(word, 0.0)
    root = max(abs(np.roots([1, -1, *[0] * (delay - 1), pull * (1 + ahead), -pull * ahead])))
    optimizer, p = corrected(optax.sgd(RATE), delay, word), jnp.array(1.0)

    def step(carry, _):
        (p, *before), state = carry
        update, state = optimizer.update(CURVATURE * before[-1], state, p)
        return ([p + update, p, *before[:-1]], state), p

    moved = jax.lax.scan(step, ([p] * (delay + 1), optimizer.init(p)), None, 240)[1]
    seen = jnp.concatenate([jnp.ones(delay), moved])  # the first steps move nothing
    top = [np.abs(seen[i : i + 60]).max() for i in (120, 180)]  # a root may turn
    assert (top[1] / top[0]) ** (1 / 60) == pytest.approx(root, rel=0.01)


def test_weights_that_are_predicted_are_those_ahead():
    """p = w + c u, and w moves as without a correction by the same gradients."""
    optimizer = optax.sgd(RATE, 0.9)
    found = places(corrected(optimizer, 2, 'predict'), 7, 2)
    state, w = optimizer.init(FIRST), FIRST
    for step, after in enumerate(found[1:]):
        if step < 2:
            continue
        u, state = optimizer.update(gradient(found[step - 2], step - 2), state, w)
        w = optax.apply_updates(w, u)
        ahead = jax.tree.map(lambda w, u: w + 2 * u, w, u)
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(ahead), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12)


def digits(**changes):
    tiny = {'train_examples': 64, 'test_examples': 16, 'batch_size': 16, 'width': 2, 'epochs': 3}
    return config_of('digits_resnet', **tiny, model='tests.tiny_stages:build', **changes)


MPMD = {
    'runtime': 'mpmd',
    'num_microbatches': 2,
    'fwd': 'ef21(uniform(2))',
    'bwd': 'ef(uniform(4))',
}


@pytest.mark.slow
@pytest.mark.parametrize(
    'changes',
    [
        {'correction': 'predict(0.5)'},
        {'correction': 'predict', 'delay_by_stage': True, **MPMD},
    ],
)
def test_a_run_with_late_gradients_is_resumed_to_the_bit(tmp_path, changes):
    with jax.enable_x64(False):
        config, begun = (digits(delay=3, clip_norm=0.5, **changes) for _ in 'ab')
        begun.epochs = 1
        whole = loop.train_and_evaluate(config, tmp_path / 'whole', quiet=True, draw=False)
        loop.train_and_evaluate(begun, tmp_path / 'parts', quiet=True, draw=False)
        parts = loop.train_and_evaluate(config, tmp_path / 'parts', quiet=True, draw=False)
        on_time = loop.train_and_evaluate(digits(), tmp_path / 'on', quiet=True, draw=False)
    assert parts['test'] == whole['test'] != on_time['test']
    strip = lambda rows: [{k: v for k, v in row.items() if k != 'seconds'} for row in rows]
    assert strip(records(tmp_path / 'parts')) == strip(records(tmp_path / 'whole'))


TIED = {**TEXT, 'runtime': 'mpmd', 'clip_norm': 0.5}
FROZEN = {'train': 'stage1.layers.*', 'runtime': 'mpmd', 'epochs': 2, 'num_microbatches': 2}


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['a tied table', 'a frozen stage, whose messages are kept'])
def test_both_ways_to_be_late_learn_the_same(tmp_path, kind):
    """A pipeline that stays full, and one program in which gradients wait."""
    with jax.enable_x64(False):
        if kind == 'a tied table':
            configs = [config_of('text_gpt2', **TIED, delay=1) for _ in 'ab']
        else:
            folder = tiny(tmp_path / 'model')
            configs = [small(folder, **FROZEN, delay=1) for _ in 'ab']
        configs[1].parallel.runtime = 'local'
        run = lambda i: loop.train_and_evaluate(configs[i], tmp_path / str(i), quiet=True)
        found, wanted = (run(i)['test'] for i in (0, 1))
    for mode in ('on', 'off'):
        assert found[mode]['last']['loss'] == pytest.approx(wanted[mode]['last']['loss'], rel=1e-5)


def test_memory_is_said_of_gradients_that_wait_or_weights_of_then():
    """In a pipeline a stage but the last has weights of then, in place of their gradients."""
    sizes = lambda stage, **changes: footprint(experiment_of(digits(**changes)), [stage])
    last = len(experiment_of(digits()).task.stages) - 1
    for stage, changes, weights, gradients in (
        (0, {}, 1, 3), (0, MPMD, 3, 1), (last, MPMD, 1, 3),
        (0, {'delay_by_stage': True}, 1, 3), (last, {'delay_by_stage': True, **MPMD}, 1, 1),
    ):  # fmt: skip
        on_time = sizes(stage, **{k: v for k, v in changes.items() if k != 'delay_by_stage'})
        late = sizes(stage, delay=2, **changes)
        assert late['parameters'] == weights * on_time['parameters']
        assert late['gradients'] == gradients * on_time['gradients']
        micro_batches = 3 if changes == MPMD and stage == 0 else 1  # six for two
        assert late['activations'] == micro_batches * on_time['activations']


def clipped(config, rate):
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate))


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'correction': 'predict'}, "correction='predict' is of late gradients, .*give a delay"),
        ({'delay': 1, 'elastic': True}, 'delay=1 with .*elastic=True: a replica that joins'),
        (
            {'delay': 1, 'parallel.schedule': 'gpipe', **MPMD},
            "schedule='gpipe' empties .*delay=1 it stays",
        ),
        ({'delay': 1, 'profile': True, **MPMD}, 'profile=True shows .*delay=1 steps overlap'),
        (
            {'delay': 2, 'fwd': 'klt(3, by_gradient=0.5)', 'bwd': 'klt(3)'},
            'with .*delay=2 have not',
        ),
        ({'parallel.schedule': 'async(delay=1)', **MPMD}, 'stays full is config.optimizer.delay=N'),
        ({'delay_by_stage': True}, 'delay_by_stage=True is of late gradients, .*give a delay'),
        ({'delay': -1}, 'delay=-1 is not a whole number from 0'),
        (
            {'delay': 1, 'correction': 'predict(x)'},
            r"correction='predict\(x\)' .*, nor one with a strength .*, such as 'predict\(0.5\)'",
        ),
        (
            {'delay': 1, 'correction': 'scale(0.5)'},
            r"correction='scale\(0.5\)' is not one of 'none', 'predict', .*'predict\(0.5\)'; "
            'it lost to none, and left; commit a88a3d2 has it',
        ),
        (
            {'delay': 1, 'correction': 'compensate'},
            "correction='compensate' is not one of 'none', .*; it gained nothing, and left",
        ),
        (
            {'delay': 1, 'delay_by_stage': True, 'optimizer.name': f'{__name__}:clipped'},
            "clipped' clips .*delay_by_stage=True a step has .*take config.optimizer.clip_norm",
        ),
    ],
)
def test_what_late_gradients_do_not_go_with(changes, message):
    with pytest.raises(ValueError, match=message):
        experiment_of(digits(**changes))


def test_a_seed_begins_with_nothing_of_the_run_before_it():
    """It ended within an epoch whose boundaries are not those of the run, as if it diverged."""
    with jax.enable_x64(False):
        config = digits(delay=2, phases='raw@:1', **MPMD)
        config.probe = 'off'
        trainer = Trainer(experiment_of(config), ProcessGroup())
        other = config.copy_and_resolve_references()
        other.seed = 5
        order = np.arange(64)

        def first_epoch():
            state = trainer.create()
            *_, (state, _, _) = trainer.epoch(0, state, order)
            return trainer.drained(state)

        clean = first_epoch()
        of_other = trainer.of_seed(other)
        list(itertools.islice(of_other.epoch(0, of_other.create(), order[::-1]), 2))
        again = first_epoch()
    assert all(len(row) == 2 for s in (again, clean) for row in s.waiting.values())
    for a, b in zip(*(jax.tree.leaves(s.model.params) for s in (clean, again)), strict=True):
        np.testing.assert_array_equal(a, b)
