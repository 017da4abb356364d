"""Replicas that come and go: their rounds, rounds between JAX worlds, and a kill -9 in a round."""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmp import data
from jaxmp.exchange import pieces
from jaxmp.net.connect import Address, names_of
from jaxmp.net.group import ProcessGroup
from jaxmp.net.keys import keys_of
from jaxmp.net.peer import Peer
from jaxmp.net.switch import Switch
from jaxmp.net.views import Terms
from jaxmp.training import experiment, loop
from jaxmp.training.elastic import run as elastic
from jaxmp.training.elastic.member import BehindError, Member, Welcome
from tests.runs import config_of, known_model, pids, start, text_of

KEYS = keys_of('secret')


class Served:
    """A switch in a thread, and what it said."""

    def __init__(self, count, **terms):
        self.said, self.members = [], []
        self.switch = Switch(KEYS, '127.0.0.1', 0, self.said.append)
        self.terms = Terms(names_of(range(count), 'replica'), 1, **{'silent': 20.0, **terms})

    def member(self, k):
        self.members.append(Member(Peer(('127.0.0.1', self.switch.port), KEYS, k, self.terms)))
        return self.members[-1]

    def tells(self, text):
        """Whether a line that has come, or comes within seconds, begins so."""
        end = time.monotonic() + 5
        while time.monotonic() < end:
            if any(line.startswith(text) for line in self.said):
                return True
            time.sleep(0.01)
        return False

    def close(self):
        at_once(*(m.leave for m in self.members))
        self.switch.close()


@pytest.fixture
def three():
    served = Served(3)
    yield served
    served.close()


def at_once(*calls):
    """The results, or errors, of calls that wait for each other."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.exception(30) or f.result() for f in [pool.submit(c) for c in calls]]


def nothing():
    raise AssertionError('nobody lacks the state')


def joined(served, replicas=(0, 1, 2), step=0, digest=1):
    """Members of a run that begins."""
    members = [served.member(k) for k in replicas]
    welcomes = at_once(*(lambda m=m: m.join(step, digest, nothing) for m in members))
    assert welcomes == [Welcome(step, b'')] * len(members)
    return members


def meet(m, step=1, digest=1):
    """The members and the messages of a round in which each sends its number."""
    return m.gathering(step, digest, lambda members, gather: (members, gather(b'%d' % m.replica)))


ALL = ((0, 1, 2), [b'0', b'1', b'2'])
TWO = ((0, 1), [b'0', b'1'])


def test_all_receive_all_messages_in_order(three):
    members = joined(three)
    for step in (1, 2):
        assert at_once(*(lambda m=m, s=step: meet(m, s) for m in members)) == [ALL] * 3
    names = 'process 0 (replica 0), process 1 (replica 1) and process 2 (replica 2)'
    assert three.tells(f'view 1: {names}')
    assert [m.views for m in members] == [[(0, (0, 1, 2))]] * 3


def test_a_lost_member_leaves_the_round_and_joins_after_the_next(three):
    """The others, which have sent already, send again as two; the third waits for their state."""
    members = joined(three)
    pair = ThreadPoolExecutor(2)
    rounds = [pair.submit(meet, m) for m in members[:2]]
    time.sleep(0.2)
    assert not any(r.done() for r in rounds)
    members[2].leave()
    assert [r.result(5) for r in rounds] == [TWO] * 2
    assert three.tells('view 1 has ended: process 2 (replica 2) has left')
    back = three.member(2)
    joins = ThreadPoolExecutor(1).submit(back.join, 0, 7, nothing)
    time.sleep(0.3)
    assert at_once(*(lambda m=m: meet(m, 5) for m in members[:2])) == [TWO] * 2
    for m in members[:2]:
        m.applied(4, 1, nothing)  # a round before
    assert not joins.done()
    assert at_once(*(lambda m=m: meet(m, 6) for m in members[:2])) == [TWO] * 2  # under way
    for m in members[:2]:
        m.applied(9, 5, lambda: b'state')
    assert joins.result(5) == Welcome(9, b'state')
    assert at_once(*(lambda m=m: meet(m, 10) for m in (*members[:2], back))) == [ALL] * 3
    assert members[0].views[1:] == [(1, (0, 1)), (5, (0, 1)), (9, (0, 1, 2))]


def test_who_has_all_messages_gives_them_to_who_has_not(three):
    """Member 0 had all of a round, and 1 had not those of 2, which has gone: both have the same."""
    members = joined(three)
    receive, asked, done = members[1].peer.receive, threading.Event(), threading.Event()

    def late(view, source, step, tag):
        if source == 2 and not asked.is_set():
            asked.set()
            assert done.wait(10)
            members[2].leave()
        return receive(view, source, step, tag)

    members[1].peer.receive = late
    send = members[2].peer.send
    members[2].peer.send = lambda view, to, *rest: send(view, to, *rest) if to == 0 else None
    with ThreadPoolExecutor(3) as pool:
        first, second, _ = (pool.submit(meet, m, 4) for m in members)
        assert first.result(10) == ALL
        done.set()
        time.sleep(0.3)
        assert not second.done()
        after = pool.submit(meet, members[0], 8)
        assert second.result(10) == ALL
        assert meet(members[1], 8) == after.result(10) == TWO


def test_a_member_that_hangs_or_differs_is_left_behind():
    """One that computes is not, though its round is late."""
    served = Served(3, silent=2.0)
    try:
        members = joined(served)
        began = time.monotonic()
        rounds = ThreadPoolExecutor(2)
        pair = [rounds.submit(meet, m) for m in members[:2]]
        while time.monotonic() - began < 4:
            members[2].peer.progress()
            time.sleep(0.1)
        assert not any(p.done() for p in pair)
        assert [p.result(10) for p in pair] == [TWO] * 2
        assert served.tells('view 1 has ended: process 2 (replica 2) has done nothing since')
        with pytest.raises(BehindError, match='has done nothing since'):
            # It has the messages of round 1, and may not yet know of its end.
            [meet(members[2], step) for step in (1, 2)]
        members = [*members[:2], served.member(2)]
        joins = ThreadPoolExecutor(1).submit(members[2].join, 0, 1, nothing)
        time.sleep(0.3)
        assert at_once(*(lambda m=m: meet(m, 2) for m in members[:2])) == [TWO] * 2
        for m in members[:2]:
            m.applied(2, 2, lambda: b'state')
        assert joins.result(5).step == 2

        def odd():
            try:
                return meet(members[1], 3, 7)
            finally:
                members[1].leave()

        calls = (lambda m=m: meet(m, 3) for m in members[::2])
        first, second, third = at_once(*calls, odd)
        assert first == second == ((0, 2), [b'0', b'2'])
        assert isinstance(third, BehindError)
        assert 'its shared parameters differ' in str(third)
    finally:
        served.close()


def test_those_with_the_most_steps_decide_the_state(three):
    members = [three.member(k) for k in range(3)]
    steps = {0: (4, 'old'), 1: (8, 'new'), 2: (6, 'new')}
    state = lambda m: lambda: b'of %d' % m.replica
    found = at_once(*(lambda m=m: m.join(*steps[m.replica], state(m)) for m in members))
    assert found == [Welcome(8, b'of 1'), Welcome(8, b''), Welcome(8, b'')]
    assert at_once(*(lambda m=m: meet(m, 9) for m in members)) == [ALL] * 3


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

    pace = 0.0  # seconds of a step besides its own

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
            time.sleep(self.pace)
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


@pytest.mark.slow
def test_three_worlds_train_like_three_devices(monkeypatch, tmp_path):
    """Parameters and all states of streamed rounds; what is shared has the same bits."""
    config = small(monkeypatch, STREAMED)
    served = Served(3)
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


@pytest.mark.slow
def test_inner_steps_go_on_while_a_round_travels(monkeypatch, tmp_path):
    """Rounds of 0.3 s each, hidden behind two steps of 0.2 s."""
    slow = Member._gather
    monkeypatch.setattr(Member, '_gather', lambda *args: (time.sleep(0.3), slow(*args))[1])
    served = Served(2)
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


@pytest.mark.slow
def test_a_replica_that_was_cut_off_joins_at_the_step_of_the_others(monkeypatch, tmp_path):
    """Parameters have the same bits at the end, and a stochastic rule's too."""
    config = small(monkeypatch, 'diloco(4, all_gather(ef(qsgd(4))))', epochs=8, replicas=2)
    served = Served(2)
    replicas = [Replica(config, k, served, tmp_path) for k in range(2)]
    replicas[0].pace = 0.3  # so that it has not finished before the other is back

    def twice():
        with contextlib.suppress(BehindError):
            replicas[1].train(6, lambda: replicas[1].meetings.member.leave())
        return replicas[1].train()

    found = at_once(replicas[0].train, twice)
    served.close()
    assert replicas[1].began in range(8, 41, 4)
    assert served.tells('view 1 has ended: process 1 (replica 1) has left')
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
from jaxmp.training.elastic import run as elastic

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


def wait_for(condition, process, limit=150):
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
    ended = 'has lost its connection', 'was started again'  # whichever is noticed first
    assert any(f'view 1 has ended: process 2 (replica 2) {how}' in out for how in ended)
    assert 'process 2 was killed by SIGKILL; started again, 2 times more at most' in out
    ends = [folder, folder / 'replicas' / '1', folder / 'replicas' / '2']
    ends = [json.loads((Path(w) / 'summary.json').read_text()) for w in ends]
    losses = [s['test']['on']['last']['loss'] for s in ends]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] < 0.75 * ends[0]['history']['on']['loss'][0]
