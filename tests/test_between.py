"""The link between two machines, measured over the loopback and over emulated links."""

import functools
import queue
import socket
import threading
import time

import pytest

from jaxmp.launch.__main__ import free_port
from jaxmp.net.address import TOKEN, ProcessGroupError
from jaxmp.net.peer import Peer
from jaxmp.plan import between

HOST = '127.0.0.1'


class Forwarder:
    """A port that leads to another one over a link of a rate each way and a delay (Mbit/s, ms)."""

    def __init__(self, port, there, back, delay):
        self.port, self.server = port, socket.create_server((HOST, 0))
        self.rates, self.delay = (there, back), delay / 1e3
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self):
        while True:
            far = self.server.accept()[0]
            try:
                near = socket.create_connection((HOST, self.port))
            except OSError:
                far.close()
                continue
            for end in (far, near):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for ends, way in (((far, near), 0), ((near, far), 1)):
                late = queue.SimpleQueue()
                self.start(self.pace, ends[0], late, way)
                self.start(self.deliver, late, ends[1])

    def start(self, run, *args):
        threading.Thread(target=run, args=args, daemon=True).start()

    def pace(self, source, late, way):
        free = time.monotonic()
        while content := source.recv(2**13):
            free = max(free, time.monotonic()) + 8e-6 * len(content) / self.rates[way]
            late.put((free + self.delay, content))

    def deliver(self, late, target):
        while True:
            due, content = late.get()
            time.sleep(max(0.0, due - time.monotonic()))
            target.sendall(content)


def both(caller_port, port, about=({}, {})):
    """What both machines find: (who listens, who calls, seconds)."""
    found = {}

    def end(port, listens):
        try:
            with between.met((HOST, port), listens, about[not listens]) as group:
                found[listens] = between.measured(group)
                group.close()
        except between.CallEndedError as error:  # what was measured stays once the other has left
            found.setdefault(listens, error)
        except Exception as error:
            found[listens] = error

    listening = threading.Thread(target=end, args=(port, True))
    listening.start()
    time.sleep(0.3)
    started = time.monotonic()
    end(caller_port, False)
    seconds = time.monotonic() - started
    listening.join(10)
    return found[True], found[False], seconds


def test_both_ends_of_the_loopback_find_the_same():
    port = free_port()
    here, there, seconds = both(port, port)
    assert (here.there, here.back) == (there.back, there.there)
    assert here.delay == there.delay < 20
    assert min(here[:2]) > 20
    assert seconds < 10


@pytest.mark.slow
def test_a_slow_link_has_its_rates_and_its_delay(monkeypatch):
    """One open port, as a firewall leaves it: no shorter way leads past the emulated link."""
    monkeypatch.setattr(between, 'Peer', functools.partial(Peer, direct=False))
    port = free_port()
    forwarder = Forwarder(port, there=8, back=2, delay=40)
    here, there, seconds = both(forwarder.server.getsockname()[1], port)
    assert there.there == here.back == pytest.approx(8, rel=0.2)
    assert there.back == here.there == pytest.approx(2, rel=0.2)
    assert 39 < there.delay < 60
    assert seconds < 10


def test_nobody_listens(monkeypatch):
    monkeypatch.setattr(between, 'PATIENCE', 0.3)
    with pytest.raises(ProcessGroupError, match=r'nobody listens at .*jaxmp pays --listen='):
        between.met((HOST, free_port()), False, {}).__enter__()


def test_a_secret_is_needed_between_hosts(monkeypatch):
    monkeypatch.delenv(TOKEN, raising=False)
    with pytest.raises(ProcessGroupError, match='same secret text'):
        between.met(('192.0.2.1', 9876), False, {}).__enter__()


def test_both_machines_have_the_same_configuration():
    port = free_port()
    here, there, _ = both(port, port, ({'model.width': 8}, {'model.width': 16}))
    assert isinstance(there, between.CallEndedError)
    said = ' '.join(map(str, (here, there)))
    assert 'model.width=16 (first: 8); start all with the same settings' in said


def test_who_is_left_in_the_middle_is_told():
    """The caller leaves before it has measured anything."""
    port, found = free_port(), {}

    def listens():
        try:
            with between.met((HOST, port), True, {}) as group:
                between.echo(group)
        except between.CallEndedError as error:
            found['error'] = str(error)

    listening = threading.Thread(target=listens)
    listening.start()
    time.sleep(0.3)
    with between.met((HOST, port), False, {}):
        pass
    listening.join(20)
    assert 'the machine that calls has left' in found['error']
