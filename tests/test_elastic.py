"""Replicas that come and go: the hub, rounds between JAX worlds, and a kill -9 in a round."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import data
from jaxmp.distributed import frames, hub, member
from jaxmp.distributed.member import BehindError, Member
from jaxmp.exchange import pieces
from jaxmp.net.address import TOKEN, ProcessGroupError, listen
from jaxmp.net.connect import Address
from jaxmp.net.group import ProcessGroup
from jaxmp.training import elastic, experiment, loop
from tests.runs import config_of, known_model, pids, start, text_of

QUICK = hub.Patience(start=20.0, silent=1.0, late=3.0)


class Served:
    """A hub in a thread, and what it said."""

    def __init__(self, count, patience=QUICK):
        self.said, self.members = [], []
        server = listen('127.0.0.1', 0)
        self.address = server.getsockname()
        self.hub = hub.Hub(server, count, 'secret', patience, self.said.append)
        self.thread = threading.Thread(target=self.hub.serve)
        self.thread.start()

    def member(self, k, token='secret'):
        self.members.append(Member(self.address, k, token, 5.0))
        return self.members[-1]

    def close(self):
        for m in self.members:
            m.leave()
        self.hub.stop()
        self.thread.join()


@pytest.fixture
def three():
    served = Served(3)
    yield served
    served.close()


def at_once(*calls):
    """The results, or errors, of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.exception(30) or f.result() for f in [pool.submit(c) for c in calls]]


def joined(served, replicas=(0, 1, 2), step=0, digest=1):
    """Members of a run that begins."""
    members = [served.member(k) for k in replicas]
    at_once(*(lambda m=m: m.join(step, digest, {}) for m in members))
    return members


def meet(m, step=1, digest=1):
    """The view and the messages of a gathering in which each sends its number."""
    return m.gathering(step, digest, lambda view, gather: (view.members, gather(b'%d' % m.replica)))


ALL = ((0, 1, 2), [b'0', b'1', b'2'])
TWO = ((0, 1), [b'0', b'1'])


def test_all_receive_all_messages_in_order(three):
    members = joined(three)
    for step in (1, 2):
        assert at_once(*(lambda m=m, s=step: meet(m, s) for m in members)) == [ALL] * 3
    assert three.said == ['replicas 0, 1, 2 begin at step 0; there are replicas 0, 1, 2']


@pytest.mark.parametrize(
    ('sent', 'wrong'),
    [
        (frames.frame({'kind': 'a'}, b'abc')[:-1], OSError),
        (frames.SIZES.pack(2**31, 0), ValueError),  # more than an object of JSON may have
        (frames.SIZES.pack(2, 2**62) + b'{}', ValueError),  # more than memory holds
        (frames.SIZES.pack(2, 0) + b'[]', ValueError),
    ],
)
def test_a_frame_is_read_whole_or_refused(sent, wrong):
    near, far = socket.socketpair()
    with near, far:
        content = os.urandom(10**5)
        near.sendall(frames.frame({'kind': 'a'}, content) + frames.frame({'kind': 'b'}))
        assert frames.read_frame(far) == ({'kind': 'a'}, content)
        assert frames.read_frame(far) == ({'kind': 'b'}, b'')
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises(wrong):
            frames.read_frame(far)


def test_the_command_takes_addresses_as_all_processes_do(monkeypatch, capsys):
    """Brackets around IPv6, whose loopback needs no secret either."""
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr(hub, 'own_address', lambda host: host)
    monkeypatch.setattr(hub, 'listen', lambda *where: where)
    monkeypatch.setattr(hub, 'Hub', lambda where, *_: SimpleNamespace(serve=lambda: print(where)))
    assert hub.main(['--address=[::1]:9876', '--replicas=2']) == 0
    assert capsys.readouterr().out == "('::1', 9876)\n"
    wrong = {'127.0.0.1:65536': 'not host:port.* up to 65535', '10.0.0.1:80': 'any machine that re'}
    for where, problem in wrong.items():
        with pytest.raises(SystemExit):
            hub.main([f'--address={where}', '--replicas=2'])
        assert re.search(problem, capsys.readouterr().err)


def test_strangers_change_nothing(three):
    """Noise, a large first frame, silence, a wrong secret, another run; and the run begins."""
    big = frames.SIZES.pack(2**31, 2**60)
    noises = (b'GET / HTTP/1.1\r\n\r\n', big, frames.frame({'kind': 'join'}), b'')
    strangers = [socket.create_connection(three.address) for _ in noises]
    for sock, noise in zip(strangers, noises, strict=True):
        sock.sendall(noise)
    with pytest.raises(ProcessGroupError, match='another token'):
        three.member(0, 'guess').join(0, 1, {})
    with pytest.raises(ProcessGroupError, match='no replica 7 of 3'):
        three.member(7).join(0, 1, {})
    members = joined(three)
    assert at_once(*(lambda m=m: meet(m) for m in members)) == [ALL] * 3
    with pytest.raises(ProcessGroupError, match=r'has seed=1 \(there: None\)'):
        three.member(2).join(0, 1, {'seed': 1})
    assert at_once(*(lambda m=m: meet(m) for m in members)) == [ALL] * 3
    for sock in strangers:
        sock.close()


def test_a_lost_member_leaves_the_round_and_joins_the_next(three):
    """The others, which have sent already, send again as two; a third brings the state."""
    members = joined(three)
    pair = ThreadPoolExecutor(2)
    rounds = [pair.submit(meet, m) for m in members[:2]]
    time.sleep(0.2)
    assert not any(r.done() for r in rounds)
    members[2].leave()
    assert [r.result(5) for r in rounds] == [TWO] * 2
    back = three.member(2)
    joins = pair.submit(back.join, 0, 7, {})
    assert members[0].asked.wait(5)
    members[0].provide(9, 1, b'state')
    assert joins.result(5) == member.Welcome(9, b'state', False)
    assert at_once(*(lambda m=m: meet(m, 10) for m in (*members[:2], back))) == [ALL] * 3
    assert three.said[1:] == [
        'replica 2 left after step 0: the connection is lost; replicas 0, 1 go on',
        'replica 2 joined at step 9; there are replicas 0, 1, 2',
    ]


def test_a_member_that_is_silent_or_late_or_differs_is_left_behind(three, monkeypatch):
    """A heartbeat keeps a member that computes, though not for ever."""
    monkeypatch.setattr(member, 'BEAT', 0.2)
    members = joined(three)
    began = time.time()
    assert at_once(*(lambda m=m: meet(m) for m in members[:2])) == [TWO] * 2
    assert 3 <= time.time() - began < 8
    assert 'replica 2 left after step 0: it is 3 s later than the first' in three.said[-1]
    with pytest.raises(BehindError, match='later than the first'):
        meet(members[2])
    members[1]._closed.set()  # no more heartbeats
    assert meet(members[0], 2) == ((0,), [b'0'])
    assert 'replica 1 left after step 1: no sign of life for 1 s' in three.said[-1]
    members[0].leave()
    members = joined(three)
    found = at_once(*(lambda m=m: meet(m, 3, 1 + (m.replica == 1)) for m in members))
    assert [found[0], found[2]] == [((0, 2), [b'0', b'2'])] * 2
    assert isinstance(found[1], BehindError)
    assert 'its shared parameters differ' in str(found[1])


def test_those_with_the_most_steps_decide_the_state_and_the_last_leave_it(three):
    members = [three.member(k) for k in range(3)]
    steps = {0: (4, 'old'), 1: (8, 'new'), 2: (6, 'new')}

    def join(m):
        welcome = m.join(*steps[m.replica], {})
        if welcome.provide:
            m.provide(welcome.step, 'new', b'the new one')
        return welcome

    found = at_once(*(lambda m=m: join(m) for m in members))
    assert [w.step for w in found] == [8, 8, 8]
    assert [w.state for w in found] == [b'the new one', b'', b'']
    ends = [lambda m=m: m.close(9, True, lambda: b'the last one') for m in members]
    at_once(*ends)
    assert three.member(1).join(8, 'new', {}) == member.Welcome(9, b'the last one', False)


# Rounds between JAX worlds.


class Flat(nn.Module):
    """A dense layer of the flattened input. Compiles in no time."""

    features: int

    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(jnp.tanh(x.reshape(len(x), -1)))


WORDS = {
    'train_examples': 180, 'test_examples': 72, 'batch_size': 36, 'epochs': 3, 'width': 12,
    'replicas': 3, 'lr': 0.05,
}  # fmt: skip


def small(monkeypatch, exchange, **changes):
    known_model(monkeypatch, 'flat', lambda classes, width: (Flat(width), Flat(classes)))
    words = {**WORDS, 'model': 'flat', 'exchange': exchange, **changes}
    return config_of('digits_dataparallel', **words)


class Replica:
    """A replica of a run in this process, without signals, records and checkpoints."""

    def __init__(self, config, k, served, folder):
        self.exp, self.folder = experiment.experiment_of(config), folder
        self.trainer = elastic.ElasticTrainer(self.exp, k, folder)
        self.meetings, self.k, self.served = self.trainer.meetings, k, served

    def train(self, until=10**9, then=lambda: None):
        """Trains from the initial state, and calls ``then`` after step ``until``."""
        self.meetings.member = self.served.member(self.k)
        state, config, n = self.trainer.create(), self.exp.config, self.exp.epoch_steps
        state = self.trainer.enter(state)
        self.began, meet = int(state.step), self.trainer.meet

        def meeting(state, number):
            state = meet(state, number)
            if number == until:
                then()
            return state

        self.trainer.meet = meeting
        for epoch in range(self.began // n, config.epochs):
            order = data.order(config.seed, epoch, len(self.exp.data.train.y))
            left = order[(int(state.step) - epoch * n) * config.batch_size :]
            for after, _, _ in self.trainer.epoch(epoch, state, left):
                state = after
        whole = self.meetings.whole(state)
        self.trainer.leave(state, True)
        return whole


STREAMED = 'diloco(4, all_gather(ef(one_bit)), fragments=2, delay=1, mix=0.5)'


def test_a_piece_makes_its_values_in_the_order_of_its_operations():
    """Not by addresses in memory: every process asks the cache for the same compiled program."""
    jaxpr = jax.make_jaxpr(lambda x: [x * k for k in range(32)])(np.ones(2)).jaxpr
    assert pieces._Step.of(jaxpr, {}, 0).makes == jaxpr.outvars


def test_three_worlds_train_like_three_devices(monkeypatch, tmp_path):
    """Parameters and all states of streamed rounds; what is shared has the same bits."""
    config = small(monkeypatch, STREAMED)
    served = Served(3, hub.PATIENCE)
    replicas = [Replica(config, k, served, tmp_path) for k in range(3)]
    found = at_once(*(r.train for r in replicas))
    served.close()
    trainer = loop.prepare(config, ProcessGroup())
    exp = experiment.experiment_of(config)
    state = trainer.create()
    for epoch in range(config.epochs):
        order = data.order(config.seed, epoch, len(exp.data.train.y))
        for after, _, _ in trainer.epoch(epoch, state, order):
            state = after
    rows = lambda k: jax.tree.map(lambda a: np.asarray(a)[k], (state.model.params, state.exchange))
    for k, own in enumerate(found):
        pairs = zip(
            jax.tree.leaves((own.model.params, own.exchange)), jax.tree.leaves(rows(k)), strict=True
        )
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    shared = [jax.tree.leaves(exp.exchange.shared(s.exchange[0][0])) for s in found]
    assert all(
        (a == b).all() for other in shared[1:] for a, b in zip(shared[0], other, strict=True)
    )


def test_inner_steps_go_on_while_a_round_travels(monkeypatch, tmp_path):
    """Rounds of 0.3 s each, hidden behind two steps of 0.2 s."""
    slow = hub.Hub._share
    monkeypatch.setattr(hub.Hub, '_share', lambda self: (time.sleep(0.3), slow(self))[1])
    served = Served(2, hub.PATIENCE)
    config = small(monkeypatch, 'diloco(5, mean, delay=2)', replicas=2)
    replicas = [Replica(config, k, served, tmp_path) for k in range(2)]
    turn, waited = replicas[0].meetings.turn, []

    def timed(*args):
        time.sleep(0.2)  # of computing
        began = time.time()
        state = turn(*args)
        waited.append(time.time() - began)
        return state

    monkeypatch.setattr(replicas[0].meetings, 'turn', timed)
    at_once(*(r.train for r in replicas))
    served.close()
    assert len(waited) == 15
    assert sorted(waited)[-3] < 0.15  # but for the first round, which is compiled


def test_a_replica_that_was_cut_off_joins_at_the_step_of_the_others(monkeypatch, tmp_path):
    """Parameters have the same bits at the end, and a stochastic rule's too."""
    config = small(monkeypatch, 'diloco(4, all_gather(ef(qsgd(4))))', epochs=8, replicas=2)
    served = Served(2, hub.PATIENCE)
    replicas = [Replica(config, k, served, tmp_path) for k in range(2)]

    def twice():
        with contextlib.suppress(BehindError):
            replicas[1].train(6, lambda: replicas[1].meetings.member.leave())
        return replicas[1].train()

    found = at_once(replicas[0].train, twice)
    served.close()
    assert replicas[1].began in range(8, 41, 4)
    assert 'replica 1 left after step 4: the connection is lost' in served.said[1]
    shared = [jax.tree.leaves(s.exchange[0][0]['parts'][0]['start']) for s in found]
    assert all((a == b).all() for a, b in zip(*shared, strict=True))
    assert [int(s.step) for s in found] == [40, 40]


REFUSED = {
    'all_gather(ef(one_bit))': 'needs all replicas in every step',
    'local_sgd(4)': r'diloco\(30, mean, outer=sgd\(1.0\)\) as local SGD',
    'diloco(4, all_gather(ef21(one_bit)))': 'depend on who was there before',
    'diloco(4, scatter_gather(fp16, ef(one_bit)))': 'depend on who was there before',
}


@pytest.mark.parametrize('text', REFUSED)
def test_exchanges_that_need_everyone_are_refused(text, monkeypatch, tmp_path):
    exp = experiment.experiment_of(small(monkeypatch, text))
    with pytest.raises(ValueError, match=REFUSED[text]):
        elastic.ElasticTrainer(exp, 0, tmp_path)


def test_what_cannot_be_elastic_is_refused():
    for changes in ({'replicas': 2, 'runtime': 'mpmd'}, {'replicas': 1}):
        with pytest.raises(ValueError, match='several replicas of one program each'):
            elastic.check(config_of(**changes), Address('127.0.0.1:1', 2, 0))
    with pytest.raises(ValueError, match='one process per replica, got 2 processes'):
        elastic.check(config_of(replicas=3, batch_size=36), Address('127.0.0.1:1', 2, 0))


# Processes.

PLUGIN = """
import pathlib, time
import flax.linen as nn, jax.numpy as jnp
from jaxmp.training import elastic

class Flat(nn.Module):
    features: int
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(self.features)(jnp.tanh(x.reshape(len(x), -1)))

def build(config, dataset):
    pace, batches = pathlib.Path(__file__).with_name('pace'), elastic.ElasticTrainer.batches
    def slow(trainer, order):
        for batch in batches(trainer, order):
            time.sleep(0.1 * pace.exists())
            yield batch
    elastic.ElasticTrainer.batches = slow
    return Flat(12), Flat(dataset.classes)
"""


def wait_for(condition, process, limit=60):
    """Waits until something is so, while a process runs; returns the seconds that took."""
    began = time.time()
    while not condition():
        assert process.poll() is None, process.stdout.read().decode()[-3000:]
        assert time.time() - began < limit
        time.sleep(0.05)
    return time.time() - began


@pytest.mark.slow
def test_kill_9_of_one_of_three_in_a_round(tmp_path):
    """The others go on within 10 s, the killed one joins, and all end with the same numbers."""
    (tmp_path / 'plugin.py').write_text(PLUGIN)
    (tmp_path / 'pace').touch()
    folder, views = tmp_path / 'run', tmp_path / 'run' / 'members.jsonl'
    words = {**WORDS, 'model': f'{tmp_path}/plugin.py:build', 'epochs': 14, 'train_examples': 1404}
    words |= {'exchange': 'diloco(10, all_gather(ef(one_bit)))', 'checkpoint_every': 1}
    before = (sys.executable, '-m', 'jaxmp.launch', '--processes', '3', '--elastic', '--')
    process = start(folder, *before, name='digits_dataparallel', elastic=True, **words)
    seen = lambda: [json.loads(row)['members'] for row in views.read_text().splitlines()]
    try:
        wait_for(lambda: views.exists() and (folder / 'checkpoints' / '39').exists(), process)
        os.kill(pids(folder, 2)[0], signal.SIGKILL)
        assert wait_for(lambda: seen()[-1] == [0, 1], process) < 10
        wait_for(lambda: seen()[-1] == [0, 1, 2], process)
        (tmp_path / 'pace').unlink()
        out, code = text_of(process)
    finally:
        process.kill()
    assert code == 0, out[-3000:]
    assert re.search(
        r'replica 2 left after step \d+: the connection is lost; replicas 0, 1 go', out
    )
    assert 'process 2 was killed by SIGKILL; started again, 2 times more at most' in out
    assert re.search(r'replica 2 joined at step \d+; there are replicas 0, 1, 2', out)
    ends = [folder, folder / 'replicas' / '1', folder / 'replicas' / '2']
    ends = [json.loads((Path(w) / 'summary.json').read_text()) for w in ends]
    losses = [s['test']['on']['last']['loss'] for s in ends]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] < 0.75 * ends[0]['history']['on']['loss'][0]
