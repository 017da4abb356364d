"""Links: streams between processes; an emulated slow one takes the time of its bytes."""

import queue
import socket
import time
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp.distributed import streams
from jaxmp.distributed.process_group import ProcessGroup
from jaxmp.runtimes import links
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
    lanes = [links.Lane(lambda m: m, None, emulated) for _ in range(2)]
    start = time.monotonic()
    sent = [Future() for _ in range(8)]
    arrived = [lane.carry(s) for lane in lanes for s in sent]
    for s in sent:
        s.set_result(message)
    found = [links.wait(a) for a in arrived]
    assert all(m is message for m in found)
    assert 0.21 <= time.monotonic() - start < 0.42


def test_what_goes_wrong_on_a_lane_reaches_who_waits():
    lane = links.Lane(lambda m: 1 / 0)
    sent = Future()
    arrived = lane.carry(sent)
    sent.set_result(None)
    with pytest.raises(ZeroDivisionError):
        links.wait(arrived)


def test_a_stream_carries_messages_and_admits_only_who_knows_its_secret(monkeypatch):
    told = queue.Queue()
    monkeypatch.setattr(streams, 'gathered', lambda mesh, row: told.put(bytes(row)))
    monkeypatch.setattr(streams, '_home', ['127.0.0.1'])
    message = {
        'a': jnp.arange(5, dtype=jnp.bfloat16)[None],
        'b': jnp.array([[True, False]]),
        'c': jnp.zeros((1, 0)),
        'd': jnp.arange(300_000, dtype=jnp.uint32)[None],
    }
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(streams._accepted, None)
        address, port, secret = told.get(timeout=10).rstrip(b'\0').decode().split()
        at = address, int(port)
        socket.create_connection(at).close()
        with socket.create_connection(at) as stranger:
            stranger.sendall(b'x' * streams.SECRET)
            assert not stranger.recv(1), 'closed'
        line = socket.create_connection(at)
        line.sendall(secret.encode())
        with line, accepted.result(10) as other:
            ends = [streams.Stream(end, pool) for end in (line, other)]
            other.settimeout(10)
            sent = [pool.submit(ends[0].send, message) for _ in range(2)]
            for one in sent:
                found = ends[1].receive(message)
                one.result(10)
                jax.tree.map(np.testing.assert_array_equal, found, message)
                assert {k: a.dtype for k, a in found.items()} == {
                    k: a.dtype for k, a in message.items()
                }
                put = jax.device_put(found['d'], jax.devices('cpu')[0])
                assert put.unsafe_buffer_pointer() == found['d'].ctypes.data, 'a copy waits'
            line.close()
            with pytest.raises(ConnectionError, match='other end of a link has ended'):
                ends[1].receive(message)


@pytest.mark.parametrize('key', ['link_rate', 'link_delay'])
def test_other_runtimes_have_no_links_to_slow(key):
    wanted = rf"{key}=1.5 is read by config\.parallel\.runtime='mpmd' alone, and it is 'spmd'"
    settings = config(runtime='spmd')
    settings.parallel[key] = 1.5
    with pytest.raises(ValueError, match=wanted):
        experiment.experiment_of(settings, task())
