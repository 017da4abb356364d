"""Messages between processes: what arrives, who is told what, and what strangers get (nothing)."""

import contextlib
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import zmq

from jaxmp.launch.switch import main as command
from jaxmp.net import connect
from jaxmp.net.address import TOKEN, ProcessGroupError, token_of
from jaxmp.net.arrays import ALIGNMENT, buffers, filled
from jaxmp.net.blame import LOST, nobody
from jaxmp.net.connect import Address, take_part
from jaxmp.net.delivery import Delivery
from jaxmp.net.group import ProcessGroup
from jaxmp.net.keys import keys_of
from jaxmp.net.peer import Peer
from jaxmp.net.register import GRACE, RETURN, Register
from jaxmp.net.sockets import HANDSHAKE, LARGEST, PIECE, SWITCH, Sockets, address_of, put
from jaxmp.net.switch import Switch
from jaxmp.net.views import Terms, ViewChangedError
from jaxmp.training import agreement
from jaxmp.training.agreement import settings_of
from jaxmp.training.together import together as together_of
from tests.base import ENV, slow
from tests.runs import LAUNCH, config_of

KEYS = keys_of('the-secret-of-this-test')
NAMES = 'process 0 (stage 0)', 'process 1 (stage 1)', 'process 2 (stages 2, 3)'
TERMS = Terms(NAMES, 3, start=20.0, silent=20.0, back=20.0)
TWO = TERMS._replace(names=NAMES[:2], least=2)


def together(*calls):
    """What calls give that wait for each other, or the text of their errors."""
    got = [None] * len(calls)

    def run(i, call):
        try:
            got[i] = call()
        except (ProcessGroupError, ViewChangedError) as error:
            got[i] = str(error)

    threads = [threading.Thread(target=run, args=item, daemon=True) for item in enumerate(calls)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    return got


class Run:
    """A switch and its peers, in this process."""

    def __init__(self):
        self.said, self.peers = [], []
        self.switch = Switch(KEYS, '127.0.0.1', 0, self.said.append)
        self.place = '127.0.0.1', self.switch.port

    def peer(self, i, terms=TERMS, **given):
        self.peers.append(Peer(given.pop('place', self.place), KEYS, i, terms, **given))
        return self.peers[-1]

    def groups(self, terms=TERMS, **given):
        peers = [self.peer(i, terms, **given) for i in range(len(terms.names))]
        return [
            ProcessGroup(p, v)
            for p, v in zip(peers, together(*(p.ready for p in peers)), strict=True)
        ]

    def close(self):
        together(*(p.close for p in self.peers))
        self.switch.stop()
        assert not self.switch.thread.is_alive()


@pytest.fixture
def run():
    made = Run()
    yield made
    made.close()


LINK, BACK, BY_SWITCH = range(3)  # ways to a process, the best first


def is_open(peer, to, way=LINK):
    """Whether a way of a peer to another process is open: it takes a question there."""
    delivery, answers = peer._delivery(peer._places[to][0]), []
    question = {'kind': 'ask', 'view': 0, 'asked': 0}
    peer._do(lambda: answers.append(put(*delivery.ways[way], question)))
    while not answers:
        time.sleep(0.01)
    return answers[0]


def up(peer, to, way=LINK):
    """Waits until a way is open."""
    end = time.monotonic() + 10
    while not is_open(peer, to, way):
        assert time.monotonic() < end


# Messages.


def test_messages_arrive_by_step_and_tag_whatever_their_order(run):
    a, b, c = run.groups()
    for step in (2, 1):
        for tag in ('gradient', 'activation'):
            a.peer.send(a.view, 1, step, tag, f'{step} {tag}'.encode(), b'', b'more')
    c.peer.send(c.view, 1, 1, 'activation', b'of another')
    for step in (1, 2):
        for tag in ('activation', 'gradient'):
            message = b.peer.receive(b.view, 0, step, tag)
            assert [bytes(m) for m in message] == [f'{step} {tag}'.encode(), b'', b'more']
    assert bytes(b.peer.receive(b.view, 2, 1, 'activation')[0]) == b'of another'
    assert not b.peer._mail


@pytest.mark.parametrize('direct', [True, False])
def test_a_buffer_is_whole_however_many_frames_it_took(run, direct, monkeypatch):
    a, b = run.groups(TWO, direct=direct)
    if direct:
        up(a.peer, 1)
    frames = []
    send = lambda socket, *parts: frames.append(len(parts)) or put(socket, *parts)
    monkeypatch.setattr('jaxmp.net.delivery.put', send)
    message = [os.urandom(n) for n in (0, PIECE, PIECE + 1, 2 * PIECE + 7)]
    a.peer.send(a.view, 1, 1, 'x', *message)
    assert [bytes(m) for m in b.peer.receive(b.view, 0, 1, 'x')] == message
    assert max(frames) >= 2 + 1 + 1 + 2 + 3  # after the way and the head


@pytest.mark.parametrize('direct', [True, False])
def test_arrays_travel_without_a_copy_on_the_way_out(run, direct, monkeypatch):
    a, b = run.groups(TWO, direct=direct)
    array = np.arange(300_000, dtype=np.float32).reshape(3, -1)
    a.peer.send(a.view, 1, 0, 'first', b'')
    b.peer.receive(b.view, 0, 0, 'first')
    if direct:
        up(a.peer, 1)
    sent = []
    put = lambda socket, *frames: sent.append(frames) or True
    monkeypatch.setattr('jaxmp.net.delivery.put', put)
    a.peer.send(a.view, 1, 1, 'x', *buffers([array]))
    while not sent:
        time.sleep(0.01)
    assert np.shares_memory(np.frombuffer(sent[0][-1], np.uint8), array)
    monkeypatch.undo()  # lost until now, so it goes again
    [got] = filled(b.peer.receive(b.view, 0, 1, 'x'), [array])
    assert np.array_equal(got, array)
    assert got.ctypes.data % ALIGNMENT == 0


def test_a_message_may_be_shorter_than_its_array_and_not_longer():
    like = [np.zeros((2, 2), np.float32), np.zeros(3, np.uint8)]
    words = buffers([np.float32([1, 2]), np.zeros(0, np.uint8)])
    a, b = filled(words, like)
    assert a.tolist() == [[1, 2], [0, 0]]
    assert b.tolist() == [0, 0, 0]
    for wrong in (buffers([np.zeros(5, np.float32), b[:0]]), words[:1]):
        with pytest.raises(ValueError, match=r'a message of .* bytes came for arrays of \[16, 3\]'):
            filled(wrong, like)


def test_only_other_members_are_sent_messages(run):
    a, _ = run.groups(TWO)
    for to in (0, 2):
        with pytest.raises(ValueError, match=rf'process {to} is not in the view; send to .* \[1\]'):
            a.peer.send(a.view, to, 0, 'x')


def test_the_switch_is_told_of_phases_and_waits(run):
    a, b = run.groups(TWO)
    work = lambda: run.switch._register.seats[0].last['work']

    def until(condition):
        end = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < end, work()
            time.sleep(0.01)

    with a.phase('compiling', 300):
        until(lambda: work()[1:3] == ['compiling', 300])
        waits = [(8, 'later'), (7, 'gradient')]
        calls = [lambda w=w: a.peer.receive(a.view, 1, *w) for w in waits]
        with ThreadPoolExecutor(2) as threads:
            received = [threads.submit(call) for call in calls]
            until(lambda: work()[3:6] == [7, 1, 'gradient'])
            for wait in waits:
                b.peer.send(b.view, 0, *wait, b'')
            assert [r.result(10)[0].nbytes for r in received] == [0, 0]
    until(lambda: work()[1:4] == ['working', TWO.silent, None])


def test_decisions_are_the_same_in_all(run):
    groups = run.groups()
    rng = np.random.default_rng(0).standard_normal((3, 2, 3))
    want = np.sum(rng, 0)
    for got in together(*(lambda g=g: g.total(rng[g.index]) for g in groups)):
        assert got.tobytes() == want.tobytes()
    rows = [[i, {'text': 'ä\n'}] for i in range(3)]
    assert together(*(lambda g=g: g.share(rows[g.index]) for g in groups)) == [rows] * 3
    for asked in ((), (2,)):
        calls = (lambda g=g, a=asked: any(g.share(g.index in a)) for g in groups)
        assert together(*calls) == [bool(asked)] * 3
    assert together(*(g.barrier for g in groups)) == [None] * 3
    assert groups[1].names == NAMES
    assert together(*(g.close for g in groups)) == [None] * 3


@pytest.mark.parametrize('late', [0, 1, 3])
@pytest.mark.parametrize('asked', [None, 1])
def test_steps_agree_on_all_values_and_on_when_to_stop(run, late, asked):
    """An agreement that is read later lets the first process go on before the other has begun."""
    groups, second, last = run.groups(TWO), threading.Event(), 150

    def steps(i):
        for n in range(1, last + 1):
            if n == 2 and i == 0:
                second.set()
            yield n, {'loss': float(n * 10**i)}

    def run_of(i):
        if i and late:
            assert second.wait(20)
        stopped = lambda: i == asked
        found = together_of(groups[i], steps(i), (last, ['loss']), stopped, late=late)
        return [(state, values['loss'].tolist(), stop) for state, values, stop in found]

    first, other = together(lambda: run_of(0), lambda: run_of(1))
    assert first == other
    values = [v for _, row, _ in first for v in row]
    assert values == [11.0 * n for n in range(1, first[-1][0] + 1)]
    assert [stop for *_, stop in first] == [False] * (len(first) - 1) + [asked is not None]
    assert first[-1][0] == last if asked is None else first[-1][0] < last


# Who comes, who does not, and who goes.


def test_settings_that_differ_are_named_to_all(run):
    a, b = run.peer(0, about={'lr': 0.1, 'x': [1]}), run.peer(1, about={'lr': 0.2, 'x': [1]})
    said = together(a.ready, b.ready)
    text = (
        'process 1 (stage 1) was started with lr=0.2 (first: 0.1); start all with the same settings'
    )
    other = (
        'process 0 (stage 0) was started with lr=0.1 (first: 0.2); start all with the same settings'
    )
    assert said in ([text] * 2, [other] * 2)


def test_who_does_not_come_is_named(run):
    terms, ended = TERMS._replace(start=1.0), []
    a, b = (run.peer(i, terms, end=ended.append) for i in (0, 2))
    text = 'process 1 (stage 1) did not connect within 1 s; start all, or give all a longer '
    text += '--start-timeout'
    assert together(a.ready, b.ready) == [text] * 2
    assert ended == [text] * 2
    with pytest.raises(ProcessGroupError, match='did not connect'):
        a.send(None, 1, 0, 'x')


def test_who_computes_other_numbers_ends_alone_where_a_run_is_under_way(run):
    """The others wait for another one in its place."""
    a, b = run.groups(TWO._replace(back=9.0))
    b.peer._say = b.peer._look = lambda *_: None  # as if it were killed
    b.peer._do(lambda: b.peer._control.disconnect(b.peer._control.last_endpoint))
    compare = lambda g, text: agreement.compare(g, {'x': text}, 'has other x than', lambda _: 'y')
    why = 'process 1 (stage 1) has other x than process 0 (stage 0), in x (x: 2, process 0: 1); y'

    def comes(text):
        """What the others and a process with a text are told, in a view of their own."""
        with pytest.raises(ViewChangedError):
            a.barrier()
        late = run.peer(1, a.peer.terms)
        _, view = together(a.again, late.ready)
        return together(lambda: compare(a, '1'), lambda: compare(ProcessGroup(late, view), text))

    assert comes('2') == [why, why]
    assert comes('1') == [None, None]
    b.peer._closing = True


def test_two_of_one_number_are_told_so(run):
    peers = [run.peer(i) for i in (0, 1, 1)]
    text = 'two processes are process 1 (stage 1); give each its own number'
    assert together(*(p.ready for p in peers)) == [text] * 3


def test_nobody_at_the_port_is_said():
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    with pytest.raises(ProcessGroupError, match=f'nobody answers at 127.0.0.1:{port} .*check'):
        Peer(('127.0.0.1', port), KEYS, 0, TWO._replace(start=0.3))


def test_a_cause_ends_all(run):
    groups = run.groups()
    waits = [lambda g=g: g.peer.receive(g.view, 0, 1, 'x') for g in groups[:2]]
    text = 'process 2 (stages 2, 3): out of memory'
    assert together(*waits, lambda: groups[2].fail('out of memory')) == [text, text, None]
    end = time.monotonic() + 5
    while f'the run has ended: {text}' not in run.said and time.monotonic() < end:
        time.sleep(0.01)  # the groups may hear of it first
    assert f'the run has ended: {text}' in run.said


@pytest.mark.parametrize('follows', [False, True])
def test_the_cause_is_the_first_one(run, follows):
    """Of a process that is lost where nobody may come in its place, and of what follows from it."""
    a, b = run.groups(TWO._replace(back=0.0))

    def fails():
        try:
            if not follows:
                b.receive(0, (b.view, 1, 'x'))
        except (ViewChangedError, ProcessGroupError) as error:
            b.fail(f'an error that follows: {error}')
        b.fail('a collective of another library has ended', follows)
        return b.peer._error

    a.peer._say = a.peer._look = lambda *_: None
    a.peer._do(lambda: a.peer._control.disconnect(a.peer._control.last_endpoint))
    [said] = together(fails)
    assert re.fullmatch(r'process 0 \(stage 0\) has lost its connection: it was .*, at \S+', said)


@pytest.mark.parametrize(('back', 'least'), slow([(0.0, 2), (5.0, 4)], (5.0, 4).__eq__))
def test_a_switch_that_is_lost_with_its_process_is_named(relay, run, back, least):
    """As of a process that has lost its connection, and not before the time to make it again."""
    line, terms = relay(run.switch.port), TWO._replace(back=back)
    there = {'inside': NAMES[0], 'place': ('127.0.0.1', line.port)}
    peers = run.peer(0, terms, **there), run.peer(1, terms, inside=NAMES[0])
    views = together(*(p.ready for p in peers))
    line.cut()  # it is made again
    time.sleep(1.5)
    assert not peers[0]._error
    began = time.monotonic()
    run.switch.stop()
    [said] = together(lambda: peers[1].receive(views[1], 0, 1, 'x'))
    assert re.fullmatch(rf'{re.escape(f"{NAMES[0]} {LOST}")}, at \S+?{nobody(back)}', said)
    assert least < time.monotonic() - began < least + 6


def test_who_has_left_owes_nothing_but_what_is_missing(run):
    a, b = run.groups(TWO)
    a.peer.send(a.view, 1, 3, 'x', b'last')
    a.peer.close()
    assert bytes(b.peer.receive(b.view, 0, 3, 'x')[0]) == b'last'
    with pytest.raises(ProcessGroupError, match=r"process 0 \(stage 0\) has left, and owes 'y' of"):
        b.peer.receive(b.view, 0, 3, 'y')


def test_who_leaves_waits_for_what_is_about_to_be_sent(run, monkeypatch):
    """The other may hear that it has left before a message that it had begun to send."""
    a, _ = run.groups(TWO)
    send, closing = Delivery.send, []

    def slow_send(self, words, parts):
        time.sleep(0.3)
        closing.append(a.peer._closing)
        send(self, words, parts)

    monkeypatch.setattr(Delivery, 'send', slow_send)
    a.peer.send(a.view, 1, 3, 'x', b'last')
    a.peer.close()
    assert closing == [False]


def test_what_a_connection_without_a_name_says_is_dropped(run):
    """libzmq names one so whose own name a later connection has; its switch goes on."""
    context = zmq.Context()
    guests = [context.socket(zmq.DEALER) for _ in range(8)]
    for guest in guests:
        guest.linger, guest.curve_serverkey = 1000, KEYS.server.public
        guest.curve_publickey, guest.curve_secretkey = KEYS.client
        guest.connect(f'tcp://127.0.0.1:{run.switch.port}')
        guest.send_multipart([b'no JSON'])
    a, b = run.groups(TWO)
    assert together(lambda: a.share(1), lambda: b.share(2)) == [[1, 2], [1, 2]]
    assert run.switch.thread.is_alive()
    for guest in guests:
        guest.close(0)
    context.term()


def test_processes_come_and_go(run):
    """Fewer than all make a view: who leaves ends it, and so does who comes, when it is ready."""
    terms = TERMS._replace(least=1)
    groups = run.groups(terms)
    wait = lambda g: g.peer.receive(g.view, 0, 1, 'x')
    calls = [lambda g=g: wait(g) for g in groups[:2]]
    changed = 'process 2 (stages 2, 3) has left'
    assert together(*calls, groups[2].peer.close) == [changed, changed, None]
    with pytest.raises(ViewChangedError):
        groups[0].peer.send(groups[0].view, 1, 1, 'x')
    views = together(*(lambda g=g: g.peer.ready(g.index) for g in groups[:2]))
    assert [v.members for v in views] == [(0, 1)] * 2
    groups = [ProcessGroup(p, v) for p, v in zip(run.peers, views, strict=False)]
    late = run.peer(2, terms)
    time.sleep(0.3)  # it is there, compiles, and stops nobody
    assert together(*(lambda g=g: any(g.share(False)) for g in groups)) == [False] * 2

    def again(g):
        with pytest.raises(ViewChangedError, match=r'process 2 \(stages 2, 3\) asks for'):
            wait(g)
        return g.peer.ready('old')

    views = together(*(lambda g=g: again(g) for g in groups), lambda: late.ready('new'))
    assert [v.members for v in views] == [(0, 1, 2)] * 3
    assert views[2].values == {0: 'old', 1: 'old', 2: 'new'}
    assert views[2].number > groups[0].view.number


# Connections that are lost, and ways that open and close.


class Relay:
    """A port that hands on to another one, notes all bytes, and can lose them or cut."""

    def __init__(self, target):
        self.target, self.seen, self.pairs, self.deaf = target, bytearray(), [], False
        self.flips = 0  # bits to change, one in each long part towards who has connected
        self.server = socket.create_server(('127.0.0.1', 0))
        self.port = self.server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                a = self.server.accept()[0]
                try:
                    b = socket.create_connection(('127.0.0.1', self.target))
                except OSError:  # nobody listens there any more
                    a.close()
                    continue
                self.pairs.append((a, b))
                for x, y in ((a, b), (b, a)):
                    threading.Thread(target=self._hand, args=(x, y, y is a), daemon=True).start()

    def _hand(self, x, y, back):
        with contextlib.suppress(OSError):
            while part := x.recv(65536):
                self.seen += part
                if self.flips and back and len(part) > 1000:
                    part, self.flips = part[:500] + bytes([part[500] ^ 4]) + part[501:], 0
                if not self.deaf:
                    y.sendall(part)

    def cut(self):
        """Ends all connections; new ones are made."""
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            for s in pair:
                with contextlib.suppress(OSError):
                    s.shutdown(socket.SHUT_RDWR)
                s.close()

    def close(self):
        self.server.close()
        self.cut()


@pytest.fixture
def relay():
    made = []
    yield lambda port: made.append(Relay(port)) or made[-1]
    for r in made:
        r.close()


def ring(groups, steps, between=lambda step: None, size=1000, first=0):
    """Each sends to the next, and receives what was sent, each step."""

    def go(g):
        slowest, n = 0.0, len(groups)
        for step in range(first, first + steps):
            start = time.monotonic()
            g.peer.send(g.view, (g.index + 1) % n, step, 'x', bytes([step % 256]) * size)
            [got] = g.peer.receive(g.view, (g.index - 1) % n, step, 'x')
            assert got == bytes([step % 256]) * size
            slowest = max(slowest, time.monotonic() - start)
            if g.index == 0:
                between(step)
        return slowest

    return together(*(lambda g=g: go(g) for g in groups))


def test_what_a_lost_connection_to_the_switch_lost_goes_again(relay, run):
    line = relay(run.switch.port)
    a, b = (run.peer(i, TWO, direct=False, place=('127.0.0.1', line.port)) for i in (0, 1))
    groups = [ProcessGroup(p, v) for p, v in zip((a, b), together(a.ready, b.ready), strict=True)]
    lost = ring(groups, 4, lambda step: line.cut(), size=200_000)
    assert max(lost) < 10
    assert all(p._view.number == groups[0].view.number and p._inside for p in (a, b))


def test_a_cut_between_neighbours_is_mended_by_way_of_the_switch(relay, run):
    terms = TWO._replace(silent=4.0)
    peers = [run.peer(i, terms) for i in (0, 1)]
    lines = [relay(int(p._about['address'].rpartition(':')[2])) for p in peers]
    for p, line in zip(peers, lines, strict=True):
        p._about['address'] = f'tcp://127.0.0.1:{line.port}'
    groups = [
        ProcessGroup(p, v) for p, v in zip(peers, together(*(p.ready for p in peers)), strict=True)
    ]
    assert max(ring(groups, 2)) < 2
    for p in peers:
        up(p, 1 - p.process)
    before = len(lines[0].seen), len(lines[1].seen)
    ring(groups, 3, size=50_000, first=2)
    assert all(
        len(line.seen) - n > 100_000 for line, n in zip(lines, before, strict=True)
    )  # direct
    for line in lines:
        line.deaf = True  # not closed: packets are lost, and nobody is told
    assert 0.3 < max(ring(groups, 3, first=5)) < terms.silent
    assert not is_open(peers[0], 1)
    for line in lines:
        line.deaf = False
        line.cut()
    for p in peers:
        up(p, 1 - p.process)  # it is used again
    assert max(ring(groups, 3, first=8)) < 1


@pytest.mark.parametrize('spoilt', ['the switch', 'a neighbour', 'by a stranger at the port'])
def test_a_connection_that_libzmq_gives_up_is_made_anew(relay, run, spoilt):
    """A bit is changed under way to who has connected, or a stranger answers at the port."""
    line, terms = relay(run.switch.port), TWO._replace(silent=8.0)
    peers = [run.peer(i, terms, place=('127.0.0.1', line.port)) for i in (0, 1)]
    inner = relay(int(peers[1]._about['address'].rpartition(':')[2]))
    peers[1]._about['address'] = f'tcp://127.0.0.1:{inner.port}' * (spoilt == 'a neighbour')
    peers[0]._about['address'] = ''
    views = together(*(p.ready for p in peers))
    groups = [ProcessGroup(p, v) for p, v in zip(peers, views, strict=True)]
    if spoilt == 'a neighbour':
        up(peers[0], 1)
    if spoilt.startswith('by'):
        with socket.create_server(('127.0.0.1', 0)) as stranger:
            line.target = stranger.getsockname()[1]
            line.cut()
            for _ in range(4):  # of both processes, for messages and for all else
                guest = stranger.accept()[0]
                guest.sendall(b'HTTP/1.1 400 Bad Request\r\n\r\n'.ljust(100))
                guest.close()
        line.target = run.switch.port
        line.cut()
    else:
        (inner if spoilt == 'a neighbour' else line).flips = 1
    lost = ring(groups, 3, size=50_000, first=1)
    assert max(lost) < terms.silent, lost
    assert not line.flips
    if spoilt == 'a neighbour':
        up(peers[0], 1)
    assert max(ring(groups, 2, first=5)) < 1
    assert not any(p._error for p in peers)


def test_the_switch_comes_back_at_another_address_of_its_name(run, monkeypatch):
    host, resolve = ['127.0.0.1'], socket.getaddrinfo
    moved = lambda name, *rest, **words: resolve(
        host[0] if name == 'first.test' else name, *rest, **words
    )
    monkeypatch.setattr(socket, 'getaddrinfo', moved)
    terms, place = TWO._replace(silent=8.0), ('first.test', run.switch.port)
    a, b = run.groups(terms, direct=False, place=place)
    run.switch.stop()
    host[0] = '127.0.0.2'
    run.switch = Switch(KEYS, *host, run.switch.port)
    assert max(ring([a, b], 2)) < terms.silent


def test_messages_take_the_way_that_the_other_has_opened(run):
    a, b = run.peer(0, TWO), run.peer(1, TWO, direct=False)  # none may connect to process 1
    groups = [ProcessGroup(p, v) for p, v in zip((a, b), together(a.ready, b.ready), strict=True)]
    ring(groups, 1)
    up(b, 0)
    up(a, 1, BACK)
    assert not is_open(a, 1)
    before = groups[0].peer._delivery(groups[0].peer._places[1][0])
    ring(groups, 2, first=1)
    assert all(s.way == before.ways[BACK] for s in before.sent.values())


def test_delivery_by_itself(monkeypatch):
    """A way's answer confirms what came, and tells of what went there before and did not come."""
    out, shut = [], set()
    put = lambda socket, *frames: socket not in shut and not out.append((socket, frames[-2:]))
    monkeypatch.setattr('jaxmp.net.delivery.put', put)
    sends, takes = Delivery([('link', 'b'), ('switch', 's', 'b')], 1), Delivery([('back', 'a')], 1)
    sent = lambda: [(socket, words['number']) for socket, (words, _) in out]

    def arrives(words):
        """Whether a message or question is new, and the answer."""
        new = takes.answer(('back', 'a'), words)
        return new, out.pop()[1][1]

    for n in range(3):
        sends.send({'n': n}, [b'x'])
    assert sent() == [('link', 0), ('link', 1), ('link', 2)]
    messages = [words for _, (words, _) in out]
    for n in (0, 2):  # the second is lost
        new, answer = arrives(messages[n])
        assert new
        sends.confirm(('link', 'b'), answer)
    assert [*sends.sent] == [1]
    out.clear()
    sends.look()
    _, question = out.pop()[1]
    new, answer = arrives(question)
    assert not new
    sends.confirm(('switch', 's', 'b'), answer)  # of another way: nothing is known of the link
    assert not out
    sends.confirm(('link', 'b'), answer)
    assert sent() == [('link', 1)]
    out.clear()
    shut.add('link')
    sends.look()
    assert sent() == [('switch', 1)]
    [(_, (again, _))] = out
    assert arrives(again)[0]
    assert not arrives(messages[1])[0]  # it was only late
    shut.add('switch')
    sends.send({'n': 3}, [b'x'])
    assert sends.sent[3].way is None
    sends.begin(2)
    assert not sends.sent
    sends.confirm(('link', 'b'), answer)  # of the last view
    assert not arrives({**again, 'view': 0})[0]
    assert arrives({**again, 'view': 2})[0]


def test_a_connection_that_an_earlier_message_ends_is_not_read():
    """As where the switch says that a process has gone whose last message is there, too."""
    heard, told = Sockets(KEYS), Sockets(KEYS)
    port = heard.listening(SWITCH, '127.0.0.1')
    ends, end = [told.calling(name, 20.0) for name in ('a', 'b')], time.monotonic() + 10
    for call in ends:
        call.connect(address_of(port))
    came = set()
    while len(came) < 2 and time.monotonic() < end:
        for call in ends:
            put(call, SWITCH, {})
        heard.serve(0.1, lambda _, name, frames: came.add(name))
    for name in came:
        put(port, name, {'kind': 'state'})
    time.sleep(0.5)  # both are there
    read = []

    def take(call, name, frames):
        read.append(call)
        other = ends[call is ends[0]]
        other.disconnect(address_of(port))
        while other.poll(0):  # as if its message had gone with the connection
            other.recv_multipart()

    told.serve(1.0, take)
    assert len(read) == 1
    for sockets in (heard, told):
        sockets.close()


# Strangers.


BAD = [
    b'', b'GET / HTTP/1.1\r\n\r\n', b'\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03',
    b'\xff\0\0\0\0\0\0\0\x01\x7f', b'\xff' * 64, b'[' * 60000,
    b'\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE' + b'\0' * 47 + b'\x06' + struct.pack('>Q', 2**62),
    b'\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL' + b'\0' * 48 + b'\x04\x26\x05READY' + b'\0' * 31,
]  # fmt: skip


SILENT = weakref.WeakSet()


def flood(port, count):
    """Connections that are silent, drip, or send garbage; Linux keeps the silent ones to itself."""
    held = []
    for i in range(count):
        held.append(socket.create_connection(('127.0.0.1', port), 5))
        with contextlib.suppress(OSError):
            held[-1].sendall(BAD[i % len(BAD)] or os.urandom(500) * (i % 3))
        if not (BAD[i % len(BAD)] or i % 3):
            SILENT.add(held[-1])
    return held


def guests(port, context):
    """Sockets without a key, with a wrong one, and that expect another server; each says hello."""
    other = keys_of('another secret')
    for pair, server in ((None, None), (other.client, KEYS.server), (KEYS.client, other.server)):
        guest = context.socket(zmq.DEALER)
        guest.linger, guest.identity = 0, b'1.guest'
        if pair:
            guest.curve_publickey, guest.curve_secretkey = pair
            guest.curve_serverkey = server.public
        guest.connect(f'tcp://127.0.0.1:{port}')
        guest.send(b'{"kind": "hello"}')
        yield guest


def is_closed(connection):
    """Whether the other end closes a connection within the time of a handshake."""
    connection.settimeout(HANDSHAKE / 1e3 + 3)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    connection.close()
    return True


@pytest.mark.parametrize(
    ('count', 'direct'),
    [(40, True), pytest.param(500, True, marks=pytest.mark.slow),
     pytest.param(500, False, marks=pytest.mark.slow)],
)  # fmt: skip
def test_strangers_are_let_in_nowhere_and_delay_nobody(run, count, direct, monkeypatch):
    """At the switch and, where messages go directly, at a peer."""
    groups = run.groups(TWO, direct=direct)
    ring(groups, 1)
    taken, take, victim = [], run.switch._take, groups[1].peer
    note = lambda name, message: taken.append(name) or take(name, message)
    monkeypatch.setattr(run.switch, '_take', note)
    ports = [run.switch.port]
    if direct:
        up(groups[0].peer, 1)
        ports.append(int(victim._about['address'].rpartition(':')[2]))
    held, context, stop = [], zmq.Context(), threading.Event()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def drip():
        while not stop.wait(0.2):
            for s in held[:: 1 + len(held) // 10]:
                with contextlib.suppress(OSError):
                    s.sendall(b' ')

    def come():
        for port in ports:
            held.extend(flood(port, count))

    dripping = threading.Thread(target=drip, daemon=True)
    flooding = threading.Thread(target=come, daemon=True)
    strangers = [guest for port in ports for guest in guests(port, context)]
    dripping.start()
    flooding.start()
    slowest, step, end = 0.0, 1, time.monotonic() + (2 if count < 100 else 8)
    while time.monotonic() < end:
        slowest = max(slowest, *ring(groups, 10, first=step))
        step += 10
    flooding.join(20)
    late = Peer(run.place, KEYS, 0, TWO)  # an honest one meanwhile, which is told of its rival
    with pytest.raises(ProcessGroupError, match='two processes are process 0'):
        late.ready()
    late.close()
    assert slowest < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 << 10  # KiB
    assert len(held) == count * len(ports)
    assert taken
    assert not any('guest' in name for name in taken)
    assert not any(guest.poll(0) for guest in strangers)
    assert victim._mail == {}
    assert all(map(is_closed, {*held} - {*SILENT}))  # the dripping too
    stop.set()
    dripping.join(5)
    for s in held:
        s.close()
    context.destroy(0)


def test_no_memory_is_kept_for_what_a_stranger_announces(run):
    """8 GiB, which the machine may have: the connection ends before a part of it has come."""
    a, _ = run.groups(TWO)
    greeting = b'\xff\0\0\0\0\0\0\0\x01\x7f\x03\0CURVE' + b'\0' * 47
    for port in (run.switch.port, int(address_of(a.peer._door).rpartition(':')[2])):
        with socket.create_connection(('127.0.0.1', port)) as stranger:
            stranger.sendall(greeting + b'\x06' + struct.pack('>Q', 2**33) + bytes(1 << 16))
            began = time.monotonic()
            assert is_closed(stranger)
            assert time.monotonic() - began < HANDSHAKE / 2e3


def test_a_frame_has_256_kib_at_most():
    heard, says = Sockets(KEYS), Sockets(KEYS)
    port, call = heard.listening(SWITCH, '127.0.0.1'), says.calling('a', 20.0)
    call.connect(address_of(port))
    came, end = [], time.monotonic() + 10
    while not came and time.monotonic() < end:
        put(call, SWITCH, bytes(LARGEST))
        heard.serve(0.1, lambda _, name, frames: came.append(len(frames[0])))
    assert came[0] == LARGEST
    with pytest.raises(ValueError, match='a frame of 262145 bytes, and others take 262144 at most'):
        put(call, SWITCH, bytes(LARGEST + 1))
    for sockets in (heard, says):
        sockets.close()


@pytest.mark.skipif(not hasattr(socket, 'TCP_DEFER_ACCEPT'), reason='only Linux waits for a byte')
def test_silent_strangers_take_no_files(run):
    a, _ = run.groups(TWO)
    ports = run.switch.port, int(address_of(a.peer._door).rpartition(':')[2])
    files = lambda: len(os.listdir('/proc/self/fd'))
    with contextlib.ExitStack() as stack:
        before = files()
        for port in 50 * ports:
            stack.enter_context(socket.create_connection(('127.0.0.1', port)))
        time.sleep(0.3)
        assert files() < before + 120


def test_the_limit_of_open_files_is_raised():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1] - 1, limits[1]))
    Sockets(KEYS).close()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_secret_that_can_be_guessed_or_read_is_said(tmp_path, monkeypatch, capsys):
    file = tmp_path / 'token'
    file.write_text('0123456789abcdef')
    for mode, text, said in (
        (0o600, '0123456789abcdef', ''),
        (0o600, '0123456789abcde', 'the secret has 15 letters, which can be guessed: openssl rand'),
        (
            0o640,
            '0123456789abcdef',
            f'other users may read the secret in {file}, of mode 640; chmod',
        ),
    ):
        file.write_text(text)
        file.chmod(mode)
        assert token_of(str(file), '10.0.0.1') == text
        told = capsys.readouterr().err
        assert said in told if said else not told
    monkeypatch.setenv(TOKEN, '')
    assert token_of(None, 'localhost') == ''
    assert not capsys.readouterr().err


HERE = {
    'kind': 'here', 'about': json.loads(json.dumps(TWO._asdict())), 'address': '', 'view': 0,
    'ready': False, 'value': None, 'work': [0, 'x', 60, None, -1, '', 0], 'members': [], 'left': [],
}  # fmt: skip
ASK = {'kind': 'ask', 'view': 1, 'asked': 0}
MESSAGE = {**ASK, 'kind': 'message', 'number': 0, 'step': 0, 'tag': 'x', 'pieces': []}
UNREADABLE = [
    b'{', b'[]', b'{}', b'null', b'"here"', b'\xff\xfe', b'[' * 60_000, b'{"kind": []}',
    {'kind': 'unknown'}, {'kind': 'fail'}, {'kind': 'fail', 'why': 1, 'alone': False},
]  # fmt: skip
UNREADABLE += [{k: v for k, v in HERE.items() if k != key} for key in HERE]
UNREADABLE += [{**HERE, key: value} for key, value in (
    ('about', {}), ('about', {**HERE['about'], 'names': 'x'}), ('view', '1'), ('view', 1e99),
    ('view', 2**60), ('work', []), ('work', [float('nan'), 'x', 60, None, -1, '', 0]),
    ('work', ['0', 'x', 60, None, -1, '', 0]), ('members', [[0, 'x']]), ('members', {'0': 'x'}),
    ('left', [None]), ('address', None), ('ready', 1),
)]  # fmt: skip
BETWEEN = [{k: v for k, v in MESSAGE.items() if k != key} for key in MESSAGE]
BETWEEN += [{**MESSAGE, 'pieces': pieces} for pieces in ([2], [-1], ['x'], None)]
BETWEEN += [{**ASK, 'asked': 'x'}, {**ASK, 'kind': 'has', 'number': 'x'}, {**ASK, 'view': 2**70}]


@pytest.mark.parametrize('place', ['switch', 'process'])
def test_what_cannot_be_read_is_dropped_and_said_once(run, capsys, place):
    """At any port, of one that has the secret: as of another version."""
    groups, members = run.groups(TWO), Sockets(KEYS)
    victim, bad = groups[1].peer, [*UNREADABLE, *BETWEEN]
    at_switch = f'tcp://127.0.0.1:{run.switch.port}', SWITCH
    address, name = at_switch if place == 'switch' else (address_of(victim._door), victim._name)

    def says(own, address, name, heads):
        call, end = members.calling('x', 20.0), time.monotonic() + 10
        call.identity = own
        call.connect(address)
        while not put(call, *name, b'{}'):
            assert time.monotonic() < end
            time.sleep(0.01)
        for words in heads:
            put(call, *name, words)

    says(b'1.other', address, [name], bad)
    for own in (b'x', b'9' * 20, b'77.other', b'-5.x', b'x/d', b'1.other/d', b'\xff\xfe'):
        says(own, address, [name], [*bad, HERE])
        says(own + b'.', address, [name, 'nobody'], bad)
    for kind in ('', '/d'):  # forwarded
        says(b'1.third/d' + kind.encode(), *at_switch[:1], [SWITCH, victim._name + kind], bad)
    assert max(ring(groups, 20)) < 2
    time.sleep(1.5)  # signs of life
    assert max(ring(groups, 2, first=20)) < 2
    assert run.switch.thread.is_alive()
    assert not any(g.peer._error for g in groups)
    members.close()
    said = capsys.readouterr().err.splitlines()
    assert 1 <= len(said) <= 3  # of the switch and of two processes
    assert all(line.startswith('jaxmp: dropped a message of ') for line in said)


def test_a_squatter_is_told_nothing_and_believed_nothing():
    """Whoever listens at the switch's port before it does, even with keys of its own."""
    false = keys_of('another secret')
    switch = Switch(false, '127.0.0.1', 0)
    relay = Relay(switch.port)  # records what is said to the false one
    with pytest.raises(
        ProcessGroupError, match=f'port {relay.port} cannot be used: .*give another'
    ):
        Switch(KEYS, '127.0.0.1', relay.port)
    terms = TWO._replace(start=2.0)
    peer = Peer(('127.0.0.1', relay.port), KEYS, 0, terms, {'lr': 'a setting'})
    with pytest.raises(
        ProcessGroupError, match=r'has not answered since .*another token, is stopped, or'
    ):
        peer.ready('a value')
    peer.close()
    switch.stop()
    relay.close()
    assert len(relay.seen) > 100
    for word in (b'secret', b'setting', b'value', *KEYS.client, *KEYS.server):
        assert word not in relay.seen


def test_a_process_with_another_token_is_told_so():
    """Also where the switch is in a process, which is not lost."""
    switch = Switch(keys_of('another secret'), '127.0.0.1', 0)
    terms, place = TWO._replace(start=4.0, back=0.0), ('127.0.0.1', switch.port)
    peer = Peer(place, KEYS, 1, terms, inside=NAMES[0])
    with pytest.raises(ProcessGroupError, match=r'\(stage 0\) has not .* it has another token'):
        peer.ready()
    peer.close()
    switch.stop()


@pytest.mark.parametrize('direct', [True, False])
def test_a_sniffer_reads_neither_the_token_nor_what_is_sent(relay, run, direct):
    """All bytes that pass: at the switch, or between neighbours."""
    line = relay(run.switch.port)
    given = {'place': ('127.0.0.1', line.port), 'about': {'lr': 'setting'}, 'direct': direct}
    peers = [run.peer(i, TWO, **given) for i in (0, 1)]
    inner = [relay(int(p._about['address'].rpartition(':')[2])) for p in peers if direct]
    for p, r in zip(peers, inner, strict=False):
        p._about['address'] = f'tcp://127.0.0.1:{r.port}'
    views = together(*(lambda p=p: p.ready('value') for p in peers))
    groups = [ProcessGroup(p, v) for p, v in zip(peers, views, strict=True)]
    together(*(lambda g=g: g.share('a decision') for g in groups))
    if direct:
        up(peers[0], 1)
    payload = b'payload' * 10_000
    peers[0].send(views[0], 1, 1, 'tagged', payload)
    assert peers[1].receive(views[1], 0, 1, 'tagged')[0] == payload
    assert any(len(r.seen) > len(payload) for r in (inner if direct else [line]))
    words = b'secret', b'setting', b'value', b'decision', b'payload', b'tagged', b'process 1'
    for word in (*words, *KEYS.client, *KEYS.server):
        assert not any(word in r.seen for r in (line, *inner))


def test_a_log_that_takes_no_lines_does_not_stop_the_switch():
    block = threading.Event()

    def say(text):
        block.wait(30)

    switch = Switch(KEYS, '127.0.0.1', 0, say)
    peers = [Peer(('127.0.0.1', switch.port), KEYS, i, TWO) for i in (0, 1)]
    views = together(*(p.ready for p in peers))
    assert views[0].members == (0, 1)
    together(*(p.close for p in peers))
    switch.stop()
    assert not switch.thread.is_alive()
    block.set()


# The register, without sockets or a clock.


class Desk:
    """A register, and what it has told each identity last."""

    def __init__(self, terms=TERMS):
        self.terms, self.said, self.told, self.now = terms, [], {}, 100.0
        self.register = Register(self.said.append)
        self.register.look(self.now)

    def hear(self, identity, kind='here', view=0, ready=False, idle=0.0, wait=(), **words):
        work = words.pop('work', None) or (idle, 'working', self.terms.silent, *wait)
        base = {'kind': kind, 'view': view, 'ready': ready, 'work': work}
        base |= {'about': self.terms._asdict(), 'address': 'a', 'value': None}
        rest = {'left': [], 'members': []}
        self.register.take(identity, {**base, **rest, **words}, self.now)
        self.read()

    def look(self, seconds=0.0, lost=(), heard=()):
        """Time goes on in small steps, in which ``heard`` give signs of life."""
        end = self.now + seconds
        while True:
            for identity in heard:
                state = self.told.get(identity, {})
                self.hear(identity, view=state.get('view', 0))
            for identity in lost:
                self.register.unreachable(identity, self.now)
            self.register.look(self.now)
            self.read()
            if self.now >= end:
                return
            self.now += 0.5

    def read(self):
        while self.register.out:
            identity, message = self.register.out.popleft()
            self.told[identity] = message

    def begin(self, identities=('0.a', '1.a', '2.a')):
        for identity in identities:
            self.hear(identity, ready=True, value=identity)
        assert self.register.on


def test_a_view_begins_when_all_are_ready_and_says_what_each_said():
    desk = Desk()
    for identity in ('0.a', '1.a'):
        desk.hear(identity, ready=True, value=identity)
    desk.hear('2.a')
    assert not desk.told['0.a']['on']
    desk.hear('2.a', ready=True, value='2.a')
    for state in desk.told.values():
        assert (state['view'], state['on']) == (1, True)
        assert [value for _, (_, _, value) in state['members']] == ['0.a', '1.a', '2.a']


@pytest.mark.parametrize('how', ['killed', 'silent'])
def test_a_lost_process_ends_the_view_and_another_takes_its_place(how):
    desk = Desk()
    desk.begin()
    alive, limit = ('0.a', '2.a'), GRACE if how == 'killed' else TERMS.silent
    desk.look(limit, lost=['1.a'] if how == 'killed' else (), heard=alive)
    assert desk.register.on
    desk.look(1.5, lost=['1.a'] if how == 'killed' else (), heard=alive)
    why = 'has lost its connection: it was killed' if how == 'killed' else 'was silent for 20 s'
    assert not desk.told['0.a']['on']
    assert desk.told['0.a']['why'].startswith(f'process 1 (stage 1) {why}')
    for identity in alive:
        desk.hear(identity, view=1, ready=True)
    desk.hear('1.b', ready=True)
    assert (desk.told['1.b']['view'], desk.told['1.b']['on']) == (2, True)
    desk.hear('1.a', view=1)  # it was only stopped
    assert desk.register.seats[1].name == '1.b'


def test_one_that_was_killed_is_replaced_at_once():
    desk = Desk()
    desk.begin()
    desk.hear('1.b', ready=True)
    assert desk.register.on
    desk.look(lost=['1.a'])
    desk.hear('1.b', ready=True)
    assert desk.told['0.a']['why'] == 'process 1 (stage 1) was started again'


def test_who_replaces_one_that_is_not_known_to_be_dead_is_told_to_wait():
    desk = Desk()
    desk.begin()
    alive, waits = ('0.a', '2.a'), ('1.b',)
    desk.look(5.0, heard=alive)
    desk.look(4.0, heard=alive + waits)
    assert desk.told['1.b']['kind'] == 'wait'
    assert desk.told['1.b']['why'] == (
        'this process waits until another one, process 1 (stage 1), is given up, in 11 s, and '
        'takes its place'
    )
    desk.look(12.0, heard=alive)
    for identity in alive:
        desk.hear(identity, view=1, ready=True)
    desk.hear('1.b', ready=True)
    assert (desk.register.number, desk.register.on) == (2, True)


def test_who_comes_with_other_flags_of_jax_ends_alone():
    config = config_of(model='lenet', runtime='mpmd')
    about = {**settings_of(config), **TERMS._asdict()}
    with jax.enable_x64(True):
        other = {**settings_of(config), **TERMS._asdict()}
    desk = Desk()
    for identity in ('0.a', '1.a', '2.a'):
        desk.hear(identity, ready=True, about=about)
    desk.hear('1.b', about=other)
    why = "process 1 (stage 1) was started with JAX_ENABLE_X64='True' (first: 'False'); start all "
    assert desk.told['1.b'] == {'kind': 'failed', 'why': why + 'with the same settings'}
    assert desk.register.on


def test_the_launcher_says_how_long_a_start_may_take():
    words = [*LAUNCH[:-2], '1', '--start-timeout', '7', '--', sys.executable, '-c']
    out = subprocess.check_output([*words, 'import sys; print(sys.argv[1])'], env=ENV, text=True)
    assert out == '--start-timeout=7\n'
    with pytest.raises(ValueError, match='--start-timeout=0 is too short; give 1 second or more'):
        connect.endpoint(Address('10.0.0.1:80', 2, 0, start=0))


def test_who_ends_alone_leaves_its_part_to_another():
    desk = Desk()
    desk.begin()
    desk.hear('1.a', 'fail', why='process 1 (stage 1) has other data', alone=True)
    assert desk.told['1.a'] == {'kind': 'failed', 'why': 'process 1 (stage 1) has other data'}
    for identity in ('0.a', '2.a'):
        assert desk.told[identity]['why'] == 'process 1 (stage 1) has other data'
        desk.hear(identity, view=1, ready=True)
    desk.hear('1.b', ready=True)
    assert desk.register.on


def test_a_part_is_offered_again_where_a_spare_process_does_not_come():
    desk = Desk(TERMS._replace(back=60.0))
    asked = lambda name: desk.hear(name, 'spare') or desk.told[name]['process']
    desk.begin()
    alive = '0.a', '2.a'
    desk.look(GRACE + 1, lost=['1.a'], heard=alive)
    for identity in alive:
        desk.hear(identity, view=1, ready=True)
    desk.look(31.0, heard=alive)
    assert (asked('-1.a'), asked('-1.b')) == (1, None)
    desk.look(9.0, heard=alive)
    assert asked('-1.b') is None
    desk.look(2.0, heard=alive)
    assert (asked('-1.b'), asked('-1.c')) == (1, None)


def test_a_spare_process_takes_the_part_of_one_that_does_not_come_back():
    """Once, after half of the time; what comes later has no part any more."""
    desk = Desk()
    asked = lambda name: desk.hear(name, 'spare') or desk.told[name]['process']
    assert asked('-1.a') is None
    desk.begin()
    alive = '0.a', '2.a'
    desk.look(GRACE + 1, lost=['1.a'], heard=alive)
    for identity in alive:
        desk.hear(identity, view=1, ready=True)
    assert asked('-1.a') is None
    desk.look(TERMS.back / 2 + 1)
    assert (asked('-1.a'), asked('-1.a'), asked('-1.b')) == (1, None, None)
    desk.hear('1.c', ready=True)
    assert (desk.register.number, desk.register.on) == (2, True)
    assert asked('-1.b') is None
    desk.hear('1.a', view=1)  # it was only stopped
    desk.look(GRACE / 2 + 1)
    desk.hear('1.c', view=2)
    desk.hear('1.a', view=1)
    assert 'two processes are process 1' in desk.told['1.a']['why']
    assert desk.register.on


def test_a_spare_process_is_told_what_is_wrong(run, monkeypatch):
    own = Address(f'127.0.0.1:{run.switch.port}', 2, None, silent=1.0, back=60.0)
    for wrong in (own._replace(process=1), own._replace(back=0.0)):
        with pytest.raises(ValueError, match='leave --process out, and give all the same --back'):
            take_part(wrong)
    monkeypatch.setattr(connect, 'ANSWER', 1.0)
    monkeypatch.setenv(TOKEN, 'another')
    with pytest.raises(ProcessGroupError, match='it has another token, is stopped, or is no'):
        take_part(own)


def test_who_does_not_come_back_ends_all():
    desk = Desk()
    desk.begin()
    alive = '0.a', '2.a'
    desk.look(GRACE + 1, lost=['1.a'], heard=alive)
    for identity in alive:
        desk.hear(identity, view=1, ready=True)
    desk.look(TERMS.back + 2)
    why = desk.told['0.a']['why']
    assert 'process 1 (stage 1) has lost its connection' in why
    assert why.endswith(nobody(20))
    desk.hear('2.a')
    assert desk.told['2.a'] == {'kind': 'failed', 'why': why}
    desk.begin(('0.b', '1.b', '2.b'))  # another run at the same switch


def test_a_new_switch_learns_the_view_from_its_members():
    old, new = Desk(), Desk()
    old.begin()
    state = {'members': [*old.register.members.items()]}
    for identity in ('0.a', '1.a'):
        new.hear(identity, view=1, **state)
        assert (new.told[identity]['view'], new.told[identity]['on']) == (1, True)
    new.look(RETURN / 2, heard=('0.a', '1.a'))
    assert new.register.on
    new.look(RETURN, heard=('0.a', '1.a'))
    assert new.told['0.a']['why'] == 'process 2 (stages 2, 3) did not come to the new switch'


def test_a_new_switch_that_hears_of_two_views_has_the_later():
    """The old one was killed when it had told one of two that the view has begun."""
    desk = Desk(TWO)
    place = {'members': [[0, ['0.a', '', 'x']], [1, ['1.a', '', 'y']]]}
    desk.hear('0.a', view=5, **place)
    desk.hear('1.a', view=6, **place)
    desk.look(1.5)
    assert desk.told['0.a']['view'] == 6
    desk.hear('0.a', view=5, ready=True)
    desk.look(1.5)
    assert desk.told['0.a']['on']
    assert dict(desk.told['0.a']['members']) == dict(place['members'])


def test_a_switch_that_was_stopped_itself_blames_nobody():
    desk = Desk()
    desk.begin()
    desk.now += 1000
    desk.look()
    assert desk.register.on


WAITS = {0: (7, 1, 'gradient', 30.0), 1: (8, 0, 'activation', 30.0)}


def test_who_does_nothing_is_given_up_by_name_and_may_be_replaced():
    """Process 1 hangs; a thread of it waits for the next step's message, which is no excuse."""
    desk = Desk(TWO)
    desk.begin(('0.a', '1.a'))
    for i, identity in enumerate(('0.a', '1.a')):
        desk.hear(identity, view=1, idle=30.0, wait=WAITS[i])
    desk.look()
    why = desk.told['1.a']['why']
    assert why.startswith('process 1 (stage 1) has done nothing since ')
    assert "(working, at most 20 s) and owes process 0 (stage 0) 'gradient' of step 7" in why
    assert desk.told['1.a']['kind'] == 'failed'
    assert desk.told['0.a']['kind'] == 'state'
    assert desk.told['0.a']['why'] in why
    desk.hear('0.a', view=1, ready=True)
    desk.hear('1.b', ready=True)
    assert desk.told['0.a']['on']


def test_processes_that_wait_for_each_other_are_ended_by_name():
    desk = Desk(TWO)
    desk.begin(('0.a', '1.a'))
    for i, identity in enumerate(('0.a', '1.a')):
        desk.hear(identity, view=1, idle=30.0, wait=(7, 1 - i, 'x', 30.0))
    desk.look()
    for i, identity in enumerate(('0.a', '1.a')):
        assert desk.told[identity]['kind'] == 'failed'
        assert f"owes {NAMES[i]} 'x' of step 7 since" in desk.told[identity]['why']


def test_an_announced_phase_has_its_own_limit():
    desk = Desk(TWO)
    desk.begin(('0.a', '1.a'))
    for idle in (100.0, 301.0):
        desk.hear('0.a', view=1, idle=idle, wait=(1, 1, 'x', idle))
        desk.hear('1.a', view=1, work=(idle, 'compiling', 300.0))
        desk.look()
        assert desk.register.on == (idle < 300)
    assert '(compiling, at most 300 s)' in desk.told['1.a']['why']


@pytest.mark.parametrize(
    ('address', 'said'),
    [('nowhere', 'is not host:port'), ('192.0.2.1:80', 'could join this run: give all processes')],
)
def test_the_command_says_what_is_wrong(monkeypatch, capsys, address, said):
    monkeypatch.delenv('JAXMP_TOKEN', raising=False)
    with pytest.raises(SystemExit, match='2'):
        command(['--address', address])
    assert said in capsys.readouterr().err


def test_a_process_that_was_stopped_does_not_count_that_as_idleness(run):
    a, _ = run.groups(TWO)
    a.peer._worked -= 100
    a.peer._looked -= 10  # its threads have not run since
    while time.monotonic() - a.peer._looked > 2:
        time.sleep(0.01)
    assert time.monotonic() - a.peer._worked < 2


def test_keys_follow_from_the_whole_token_and_are_all_different():
    pairs = {*KEYS, *keys_of('the-secret-of-this-tesT'), *keys_of('')}
    assert len({pair.private for pair in pairs}) == 6


def test_a_failed_network_thread_is_said(run, monkeypatch):
    a, _ = run.groups(TWO)
    monkeypatch.setattr(a.peer, '_look', lambda now: 1 / 0)
    with pytest.raises(ProcessGroupError, match='its network thread failed: ZeroDivisionError'):
        a.peer.receive(a.view, 1, 0, 'x')
