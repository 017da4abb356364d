"""A slow network inside one machine: a network namespace a stage, limited links between neighbours.

Stages stand in a chain. Stage s has the address 10.77.0.(s+1) on its own loopback and a veth pair
to each neighbour, so that the route to an address, not the address, says over which link packets
go: a link can be changed while connections are open. A rate is set by a token bucket (`tc tbf`) at
both ends of the pair; a link with a delay goes through `relay.py` instead, because not every
kernel has netem, and so may one without (`Lab.use`). Buffers are deep: no link here loses packets.
TCP is reno (cubic may be refused in a namespace) with windows up to 32 MB and no slow start after
idle, as on a host that was tuned for long links. It waits 3 s before it sends again: a link that
becomes longer under an open connection would otherwise seem to have lost packets, after which reno
takes minutes to use it. Frames are jumbo, 9,000 bytes, unless asked
otherwise: headers and acknowledgements then are about 1 % and not 7 %, of raw and of compressed
messages alike.

All processes have one host name, and every namespace has a hosts file that maps it to the stage's
own address: that is how gloo finds it. What a killed run left behind is removed at the next start.

`python bench/emulated_network.py` measures what plain TCP reaches on every link.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
PREFIX = 'jaxmp-lab-'
NETNS = Path('/etc/netns')
PORT = 7077
MTU = 9000
PATIENCE = 'rto_min 3s'
TUNING = (
    'net.ipv4.tcp_congestion_control=reno',
    'net.ipv4.tcp_slow_start_after_idle=0',
    'net.ipv4.tcp_rmem=4096 1048576 33554432',
    'net.ipv4.tcp_wmem=4096 1048576 33554432',
    'net.ipv4.conf.all.rp_filter=0',
    'net.ipv4.conf.default.rp_filter=0',
    'net.ipv4.ip_forward=1',
)


class Link(NamedTuple):
    """What joins two neighbours; ``rate`` in bits a second (0: no limit), ``delay`` one way."""

    rate: float
    delay: float = 0.0


LINKS = {
    'none': Link(0),
    '1g': Link(1e9),
    '500m': Link(500e6),
    '300m': Link(300e6),
    '100m': Link(100e6),
    '200m+50ms': Link(200e6, 0.05),
    '200m+150ms': Link(200e6, 0.15),
}


def obstacle() -> str | None:
    """Why this machine cannot run the lab, or None."""
    if platform.system() != 'Linux':
        return f'network namespaces are a feature of Linux, this is {platform.system()}'
    if os.geteuid() != 0:
        return 'network namespaces need root'
    missing = [tool for tool in ('ip', 'tc') if shutil.which(tool) is None]
    if missing:
        return f'{" and ".join(missing)} not found; install iproute2'
    done = subprocess.run(['ip', 'netns', 'add', f'{PREFIX}try'], capture_output=True, text=True)
    if done.returncode:
        return f'a namespace cannot be made here: {done.stderr.strip()}'
    _run('ip', 'netns', 'delete', f'{PREFIX}try')
    return None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f'{" ".join(command)}: {done.stderr.strip()}')
    return done.stdout


def address(stage: int) -> str:
    """The address of a stage."""
    return f'10.77.0.{stage + 1}'


class Lab:
    """Namespaces of a chain of stages; made by `lab`."""

    def __init__(self, stages: int, mtu: int) -> None:
        self.stages, self.mtu = stages, mtu
        self.relays: list[subprocess.Popen] = []

    def inside(self, stage: int, *command: str) -> list[str]:
        """``command`` as a command inside the namespace of a stage."""
        return ['ip', 'netns', 'exec', f'{PREFIX}{stage}', *command]

    def _ip(self, stage: int, words: str) -> None:
        _run('ip', '-n', f'{PREFIX}{stage}', *words.split())

    def build(self) -> None:
        """Makes namespaces and veth pairs, without a limit."""
        for s in range(self.stages):
            _run('ip', 'netns', 'add', f'{PREFIX}{s}')
            hosts = NETNS / f'{PREFIX}{s}' / 'hosts'
            hosts.parent.mkdir(parents=True, exist_ok=True)
            hosts.write_text(f'127.0.0.1 localhost\n{address(s)} {socket.gethostname()}\n')
            for line in TUNING:
                _run(*self.inside(s, 'sysctl', '-qw', line))
            self._ip(s, 'link set lo up')
            self._ip(s, f'address add {address(s)}/32 dev lo')
        for s in range(self.stages - 1):
            self._ip(s, f'link add right type veth peer name left netns {PREFIX}{s + 1}')
            self._ip(s, f'link set right up mtu {self.mtu}')
            self._ip(s + 1, f'link set left up mtu {self.mtu}')
        self._route('')

    def _route(self, kind: str) -> None:
        """Sends everything over the veth pairs (kind '') or over the tunnels ('tun-')."""
        for s in range(self.stages):
            for t in set(range(self.stages)) - {s}:
                device, hop = (f'{kind}left', s - 1) if t < s else (f'{kind}right', s + 1)
                via = '' if hop == t else f'via {address(hop)} '
                on = ' onlink' if via else ''
                words = f'{address(t)} {via}dev {device} src {address(s)}{on} {PATIENCE}'
                self._ip(s, f'route replace {words}')

    def use(self, link: Link, relayed: bool = False) -> None:
        """Makes every hop such a link, under connections that stay open.

        Args:
          link: the link.
          relayed: whether relays set the rate of one without a delay too. They count every byte,
            where the bucket lets what it holds pass at once, but they need a processor.
        """
        for s in range(self.stages - 1):
            for stage, device in ((s, 'right'), (s + 1, 'left')):
                self._limit(stage, device, 0 if link.delay or relayed else link.rate)
        if link.delay or relayed:
            self._start_relays(link)
            self._route('tun-')
        else:
            self._route('')
            self._stop_relays()

    def _limit(self, stage: int, device: str, rate: float) -> None:
        tc = ['tc', '-n', f'{PREFIX}{stage}', 'qdisc']
        if not rate:
            subprocess.run([*tc, 'delete', 'dev', device, 'root'], capture_output=True)
            return
        # A small bucket: what it holds after a pause passes at once, free of the limit.
        burst = max(self.mtu + 500, int(rate / 8 * 3e-4))
        words = f'replace dev {device} root tbf rate {rate:.0f}bit burst {burst} limit 8000000'
        _run(*tc, *words.split())

    def _start_relays(self, link: Link) -> None:
        self._stop_relays()
        for s in range(self.stages - 1):
            ends = f'{PREFIX}{s}', f'{PREFIX}{s + 1}'
            command = [sys.executable, str(HERE / 'relay.py'), *ends]
            command += [str(link.rate), str(link.delay)]
            relay = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self.relays.append(relay)
            assert relay.stdout
            if relay.stdout.readline() != b'ready\n':
                raise RuntimeError(f'the relay between {" and ".join(ends)} did not start')
            for stage, device in ((s, 'tun-right'), (s + 1, 'tun-left')):
                self._ip(stage, f'link set {device} up mtu {self.mtu} txqueuelen 30000')

    def seconds(self) -> float:
        """CPU-seconds of the relays until now."""
        ticks = 0
        for relay in self.relays:
            after = Path(f'/proc/{relay.pid}/stat').read_text().rsplit(')', 1)[1].split()
            ticks += int(after[11]) + int(after[12])
        return ticks / os.sysconf('SC_CLK_TCK')

    def _stop_relays(self) -> None:
        for relay in self.relays:
            relay.kill()
            relay.communicate()
        self.relays = []

    def close(self) -> None:
        """Ends the relays and removes every namespace of the lab."""
        self._stop_relays()
        sweep()


def sweep() -> None:
    """Removes whatever a lab left: processes in its namespaces, namespaces, hosts files."""
    for line in _run('ip', 'netns', 'list').splitlines():
        name = line.split()[0]
        if name.startswith(PREFIX):
            for pid in _run('ip', 'netns', 'pids', name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(['ip', 'netns', 'delete', name], capture_output=True)
    for path in NETNS.glob(f'{PREFIX}*'):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        NETNS.rmdir()


@contextlib.contextmanager
def lab(stages: int, mtu: int = MTU) -> Iterator[Lab]:
    """A chain of namespaces, gone at the end whatever happened; one at a time on a machine.

    Raises:
      RuntimeError: if another lab is running.
    """
    with open(Path(tempfile.gettempdir()) / f'{PREFIX}lock', 'w') as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RuntimeError('another lab is running on this machine; wait for it') from None
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit('terminated'))
        sweep()
        made = Lab(stages, mtu)
        try:
            made.build()
            yield made
        finally:
            made.close()
            signal.signal(signal.SIGTERM, before)


def probe(made: Lab, link: Link) -> dict[str, float]:
    """What plain TCP reaches from stage 0 to stage 1: bits a second, and the round trip in ms."""
    size = int((link.rate or 8e9) / 8 * 1.5)
    skip = size // 2 if link.delay else 1  # the ramp of a long link is no part of its rate
    ask = [sys.executable, str(HERE / 'emulated_network.py')]
    server = subprocess.Popen(
        made.inside(1, *ask, 'serve', str(size), str(skip)), stdout=subprocess.PIPE, text=True
    )
    try:
        trips = json.loads(_run(*made.inside(0, *ask, 'send', str(size))))
        rate = json.loads(server.communicate(timeout=60)[0])
    finally:
        server.kill()
        server.wait()
    return {'tcp_bits': rate, 'round_trip_ms': trips}


def _serve(size: int, skip: int) -> None:
    """Receives ``size`` bytes, prints the rate from byte ``skip`` on, then echoes single bytes."""
    with socket.create_server((address(1), PORT)) as server:
        peer = server.accept()[0]
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    got, first, since, room = 0, 0, 0.0, bytearray(1 << 18)
    while got < size:
        got += peer.recv_into(room, min(len(room), size - got))
        if not first and got >= skip:
            first, since = got, time.perf_counter()
    print(8 * (got - first) / (time.perf_counter() - since))
    while peer.send(peer.recv(1)):
        pass


def _send(size: int) -> None:
    """Sends ``size`` bytes, then prints the median round trip of a byte in ms."""
    peer = socket.socket()
    for _ in range(100):
        if peer.connect_ex((address(1), PORT)) == 0:
            break
        time.sleep(0.05)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    chunk = bytes(1 << 18)
    for at in range(0, size, len(chunk)):
        peer.sendall(chunk[: size - at])
    trips = []
    for _ in range(11):
        start = time.perf_counter()
        peer.sendall(b'x')
        peer.recv(1)
        trips.append(1e3 * (time.perf_counter() - start))
    print(sorted(trips[1:])[5])


def main(*words: str) -> None:
    """Probes every link; or plays one end of a probe."""
    if words:
        return {'serve': _serve, 'send': _send}[words[0]](*map(int, words[1:]))
    if why := obstacle():
        return print(f'skipped: {why}')
    with lab(2) as made:
        for name, link in LINKS.items():
            made.use(link)
            found = probe(made, link)
            print(
                f'{name:12}{found["tcp_bits"] / 1e6:10.1f} Mbit/s{found["round_trip_ms"]:10.2f} ms',
                flush=True,
            )


if __name__ == '__main__':
    main(*sys.argv[1:])
