"""Links: messages between processes; an emulated slow one takes the time of its bytes."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.exchange import parse
from jaxmp.net import arrays
from jaxmp.net.connect import processes
from jaxmp.net.group import ProcessGroup
from jaxmp.runtimes import links
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.placement import Elsewhere
from jaxmp.runtimes.types import ByReplica
from jaxmp.training import experiment, sizes
from jaxmp.training.trainer import Trainer
from tests.test_probe import COUNT, config, task


def made(**parallel):
    settings = config(probe='off', fwd='uniform(4)', bwd='raw', runtime='mpmd', num_microbatches=2)
    settings.parallel.update(parallel)
    exp = experiment.experiment_of(settings, task())
    return exp, Trainer(exp, ProcessGroup())


def losses_and_seconds(exp, trainer):
    """Of an epoch whose programs are compiled."""
    order, found = np.arange(COUNT), []
    *_, (state, _, _) = trainer.epoch(0, trainer.create(), order)
    start = time.perf_counter()
    for _, values, _ in trainer.epoch(1, state, order):
        found += list(values['loss'])
    return found, time.perf_counter() - start, state


def test_a_slow_link_takes_the_time_of_its_bytes(monkeypatch):
    exp, fast = made()
    [row] = sizes.message_bytes(exp)
    steps = COUNT // 16
    bits = 8 * (row['forward'] + row['backward'])
    delay = 0.05
    rate = bits * steps / (1e6 * 0.6)
    expected = 0.6 + steps * 2 * delay  # of the last micro-batch forward, and of its gradient
    _, slow = made(link_rate=rate, link_delay=1e3 * delay)
    without, _, _ = losses_and_seconds(exp, fast)
    found, seconds, state = losses_and_seconds(exp, slow)
    assert found == without
    assert len(found) == steps
    assert expected <= seconds  # of the one without a link a busy machine says nothing
    monkeypatch.setattr(links.time, 'sleep', None)  # a test of the model waits for no link
    assert slow.evaluate(state, True)['loss'] > 0


def test_messages_follow_each_other_and_both_ways_do_not_wait():
    """Eight at once, 20 ms each on the wire and 50 ms on the way: 210 ms, in both directions."""
    emulated, message = (0.4, 50.0), np.zeros(1000, np.uint8)
    lanes = [links.Lane(lambda m, _: m, emulated) for _ in range(2)]
    start = time.monotonic()
    sent = [Future() for _ in range(8)]
    arrived = [lane.carry(s) for lane in lanes for s in sent]
    for s in sent:
        s.set_result(message)
    found = [links.wait(a) for a in arrived]
    assert all(m is message for m in found)
    assert 0.21 <= time.monotonic() - start < 0.42


def test_what_goes_wrong_on_a_lane_reaches_who_waits():
    lane = links.Lane(lambda m, _: 1 / 0)
    sent = Future()
    arrived = lane.carry(sent)
    sent.set_result(None)
    with pytest.raises(ZeroDivisionError):
        links.wait(arrived)


def test_messages_between_processes_arrive_as_they_were():
    """In their order, on both ways; on a CPU none is copied to become an array of JAX."""
    [device], message = (
        jax.devices('cpu')[:1],
        {
            'a': jnp.arange(5, dtype=jnp.bfloat16)[None],
            'b': jnp.array([[True, False]]),
            'c': jnp.zeros((1, 0)),
            'd': jnp.arange(300_000, dtype=jnp.uint32)[None],
        },
    )
    like = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), message)
    with processes(2) as groups:
        places = [np.array([[device, Elsewhere(1)]]), np.array([[Elsewhere(0), device]])]
        opened = [links.opener(p, g) for p, g in zip(places, groups, strict=True)]
        there = [make(0, 0, 1, like) for make in opened]
        back = [make(0, 1, 0, like) for make in opened]
        for k in range(3):
            sent = [Future(), Future()]
            moved = [there[0].carry(sent[0]), back[1].carry(sent[1])]
            arrived = [there[1].carry(None), back[0].carry(None)]
            for i, one in enumerate(sent):
                one.set_result({**message, 'a': message['a'] + k + 10 * i})
            for i, (m, a) in enumerate(zip(moved, arrived, strict=True)):
                found = links.wait(a)
                m.result(10)
                wanted = sent[i].result()
                jax.tree.map(np.testing.assert_array_equal, found, wanted)
                assert [a.dtype for a in found.values()] == [a.dtype for a in wanted.values()]
        address = groups[0].address('x')
        groups[0].send(1, address, *arrays.buffers([message['d']]))
        [found] = arrays.filled(groups[1].receive(0, address), [like['d']])
        put = jax.device_put(found, device)
        assert put.unsafe_buffer_pointer() == found.ctypes.data, 'a copy waits'


@pytest.mark.parametrize('text', ['scatter_gather(block(8), block(8))', 'local_sgd(2)'])
def test_replicas_in_two_processes_are_those_of_one(text):
    """Two of three are in one process: a reduction, what follows an update, and its condition."""
    rule, devices = parse(text), jax.devices()[:3]
    parts = np.random.default_rng(0).standard_normal((3, 2, 3000)).astype('float32')

    def exchanged(via, grads, state, words):
        key = jax.random.wrap_key_data(words)
        grads, state = rule.reduce(grads, state, key, via)
        return rule.after_update(grads, state, key, via)

    def steps(columns):
        rows = columns.here[0]
        state = columns.at(0, lambda via, grads: rule.init(grads, via.size), by(rows, 0))
        for t in range(2):
            words = jax.random.key_data(jax.random.key(t))
            both = columns.at(0, exchanged, by(rows, t), state, words)
            state = ByReplica({r: both[r][1] for r in rows})
        for r in rows:
            assert all(a.devices() == {devices[r]} for a in jax.tree.leaves(both[r]))
        return jax.device_get(both)

    by = lambda rows, t: ByReplica({r: [jax.device_put(parts[r, t], devices[r])] for r in rows})
    wanted = steps(Columns([[d] for d in devices]))
    with processes(2) as groups, ThreadPoolExecutor(2) as threads:
        places = [[*devices[:2], Elsewhere(1)], [Elsewhere(0), Elsewhere(0), devices[2]]]
        columns = [Columns([[d] for d in p], None, g) for p, g in zip(places, groups, strict=True)]
        found = list(threads.map(steps, columns))
    for r in range(3):
        one = found[r // 2][r]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), one, wanted[r])


@pytest.mark.parametrize('key', ['link_rate', 'link_delay'])
def test_other_runtimes_have_no_links_to_slow(key):
    wanted = rf"{key}=1.5 is read by config\.parallel\.runtime='mpmd' alone, and it is 'spmd'"
    settings = config(runtime='spmd')
    settings.parallel[key] = 1.5
    with pytest.raises(ValueError, match=wanted):
        experiment.experiment_of(settings, task())


def test_no_thread_waits_for_a_message_that_is_never_made():
    lane = links.Lane(lambda message, address: message, (1e3, 0.0))
    lane.carry(Future())
    made = Future()
    made.set_result(jnp.ones(3))
    message, _ = lane.carry(made).result(timeout=60)
    assert message.sum() == 3


def test_late_gradients_run_what_has_its_message_backwards_first():
    arriving, first = {}, links.first_usable
    backward, forward = tasks = [('B', 0, 0), ('F', 0, 8)]
    coming, next_one = Future(), Future()
    arriving.update({backward: coming})
    assert first(tasks, arriving, ()) == forward  # the first stage waits for no message forwards
    arriving.update({forward: next_one})
    next_one.set_result((None, time.monotonic() + 0.05))  # arrived over a slow link, in 50 ms
    assert first(tasks, arriving, ()) == forward
    told = Future()  # of the norm of all gradients, which a step may end with
    told.set_result((None, 0.0))
    arriving.update({forward: Future()})
    assert first(tasks, arriving, [told]) is None
    coming.set_result((None, 0.0))
    assert first(tasks, arriving, [told]) == backward
    arriving[backward] = Future()
    arriving[backward].set_exception(RuntimeError('lost'))
    with pytest.raises(RuntimeError, match='lost'):
        first(tasks, arriving, ())
