"""CPU and wall of messages between two processes: `jaxmp.net` and the plain connection before it.

python bench/net_messages.py [--out FILE]

A row per network, way and size: CPU-ms of sender and receiver (and of the switch, where messages go
through it) and wall-ms per message, median of the rounds. Arrays become buffers at one end, and
arrays in aligned memory at the other. At most four messages are under way. Networks: the loopback,
and the lab's link of 100 Mbit/s where this machine can have it (`emulated_network`).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import emulated_network
import numpy as np

from jaxmp.net.address import reach
from jaxmp.net.arrays import aligned, buffers, filled
from jaxmp.net.keys import keys_of
from jaxmp.net.peer import Peer
from jaxmp.net.switch import Switch
from jaxmp.net.views import Terms
from jaxmp.runtimes.world import listen
from jaxmp.training.summary import provenance

SIZES = {'64 KiB': (1 << 16, 100), '4 MiB': (1 << 22, 20)}
ROUNDS, AHEAD, PORT = 3, 4, 7078
WAYS = 'stream', 'net, direct', 'net, switch'
TERMS = Terms(('sender', 'receiver'), 2)


def cpu() -> float:
    """CPU seconds of this process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return own.ru_utime + own.ru_stime


class Plain:
    """Both directions over one TCP connection each, without frames and encryption."""

    def __init__(self, end: int, host: str) -> None:
        if end:
            with listen(host, PORT + 1) as server:
                lines = [server.accept()[0] for _ in range(2)]
        else:
            lines = [reach((host, PORT + 1), 30, 'no receiver', 'start it') for _ in range(2)]
        for line in lines:
            line.settimeout(None)
            line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.out, self.back = lines[::-1] if end else lines

    def send(self, array: np.ndarray) -> None:
        """Sends an array to the other end."""
        self.out.sendall(b''.join(buffers([array])))

    def receive(self, like: np.ndarray) -> np.ndarray:
        """The next array of the other end."""
        whole, came = aligned(like.nbytes), 0
        while came < whole.size:
            came += self.back.recv_into(whole.data[came:])
        return whole.view(like.dtype).reshape(like.shape)

    def close(self) -> None:
        """Closes nothing: the process ends."""


class Net:
    """A peer of `jaxmp.net`, directly or through the switch."""

    def __init__(self, end: int, host: str, direct: bool) -> None:
        self.peer = Peer((host, PORT), keys_of('bench'), end, TERMS, direct=direct)
        self.view, self.end = self.peer.ready(), end
        self.sent = self.received = 0
        self.send(np.zeros(1))
        self.receive(np.zeros(1))
        time.sleep(1.0)  # the shorter way is found

    def send(self, array: np.ndarray) -> None:
        """Sends an array to the other end."""
        self.peer.send(self.view, 1 - self.end, self.sent, 'message', *buffers([array]))
        self.sent += 1

    def receive(self, like: np.ndarray) -> np.ndarray:
        """The next array of the other end."""
        message = self.peer.receive(self.view, 1 - self.end, self.received, 'message')
        self.received += 1
        return filled(message, [like])[0]

    def close(self) -> None:
        """Leaves."""
        self.peer.close()


def play(way: str, end: int, host: str) -> None:
    """One end: prints a JSON row per size and round, ``(size, CPU-ms, wall-ms)`` per message."""
    line = Plain(end, host) if way == 'stream' else Net(end, host, way == 'net, direct')
    token, size_of = np.zeros(1, np.uint8), lambda name: np.ones(SIZES[name][0] // 4, np.float32)
    for _ in range(ROUNDS):
        for name, (_, count) in SIZES.items():
            array = size_of(name)
            line.send(token)
            line.receive(token)
            start, before = time.monotonic(), cpu()
            for i in range(count):
                if end:
                    assert line.receive(array)[-1] == 1
                    line.send(token)
                else:
                    line.send(array)
                    if i >= AHEAD:
                        line.receive(token)
            for _ in range(0 if end else min(AHEAD, count)):
                line.receive(token)
            per = 1e3 / count
            row = name, per * (cpu() - before), per * (time.monotonic() - start)
            print(json.dumps(row), flush=True)
    line.close()


def serve(host: str) -> None:
    """The switch; prints its CPU seconds when its input has a line."""
    Switch(keys_of('bench'), host, PORT)
    start = cpu()
    print('ready', flush=True)
    for _ in sys.stdin:
        print(cpu() - start, flush=True)


def measured(way: str, host: str, inside: Callable[..., Sequence[str]]) -> list[dict[str, object]]:
    """Rows of one way."""
    script = sys.executable, os.path.abspath(__file__)
    pipes = {'stdout': subprocess.PIPE, 'text': True}
    switch = subprocess.Popen(inside(0, *script, 'serve', host), stdin=subprocess.PIPE, **pipes)
    assert switch.stdout
    assert switch.stdin
    try:
        switch.stdout.readline()
        at = host if way != 'stream' else host.replace('10.77.0.1', '10.77.0.2')
        run = lambda end: subprocess.Popen(inside(end, *script, way, str(end), at), **pipes)
        ends = [run(1), run(0)]
        words = [end.communicate(timeout=300)[0].splitlines() for end in ends]
        switch.stdin.write('\n')
        switch.stdin.flush()
        total = 1e3 * float(switch.stdout.readline())
    finally:
        switch.kill()
        switch.wait()
    rows = []
    for name in SIZES:
        parts = [[json.loads(w) for w in lines if json.loads(w)[0] == name] for lines in words]
        rows.append(
            {
                'way': way,
                'size': name,
                'sender_cpu_ms': round(statistics.median(r[1] for r in parts[1]), 2),
                'receiver_cpu_ms': round(statistics.median(r[1] for r in parts[0]), 2),
                'wall_ms': round(statistics.median(r[2] for r in parts[1]), 2),
            }
        )
    if way == 'net, switch':  # all that it did, laid on the large messages
        rows[-1]['switch_cpu_ms_at_most'] = round(total / (ROUNDS * SIZES['4 MiB'][1]), 2)
    return rows


def main(argv: Sequence[str]) -> None:
    """Measures all ways on all networks; or plays a part."""
    if argv[:1] == ['serve']:
        return serve(argv[1])
    if argv and argv[0] in WAYS:
        return play(argv[0], int(argv[1]), argv[2])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path)
    args = parser.parse_args(argv)
    rows = [{'made': provenance()}]
    for way in WAYS:
        rows += [{'network': 'loopback', **r} for r in measured(way, '127.0.0.1', lambda _, *c: c)]
    if why := emulated_network.obstacle():
        print(f'no lab: {why}')
    else:
        with emulated_network.lab(2) as lab:
            lab.use(emulated_network.LINKS['100m'])
            for way in WAYS:
                own = measured(way, emulated_network.address(0), lab.inside)
                rows += [{'network': '100m', **r} for r in own]
    text = ''.join(json.dumps(row) + '\n' for row in rows)
    print(text, end='')
    if args.out:
        args.out.write_text(text)
    return None


if __name__ == '__main__':
    main(sys.argv[1:])
