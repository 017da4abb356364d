"""A link with a rate and a delay, in user space: a tunnel device in each of two namespaces.

A packet read at one end waits until the link is free, is then on it for its length divided by the
rate, and is written at the other end a delay later; both directions alike and independent.
Nothing is dropped. As a network card does, the devices take packets of up to 64 KiB of TCP, which
the link carries as frames (TSO): one costs a core as much as a frame would.
Run by `emulated_network.py`: relay.py namespace namespace bits_a_second seconds
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from pathlib import Path

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
IFF_TUN_NO_PI_VNET_HDR = 0x5001
CHECKSUM_TSO4 = 0x3
HEADER = struct.Struct('=BBHHHH')  # before a packet: struct virtio_net_hdr
IP_TCP = 52  # bytes of headers in each frame
LARGEST = 65536 + HEADER.size


def tunnel(namespace: str, name: str) -> int:
    """Enters the namespace and makes a tunnel device there; its file descriptor."""
    with open(Path('/run/netns') / namespace) as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f'cannot enter {namespace}')
    fd = os.open('/dev/net/tun', os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, TUNSETIFF, struct.pack('16sH22x', name.encode(), IFF_TUN_NO_PI_VNET_HDR))
    fcntl.ioctl(fd, TUNSETOFFLOAD, CHECKSUM_TSO4)
    return fd


def carried(packet: bytes) -> int:
    """Bytes of a packet's frames on the link."""
    size, part = len(packet) - HEADER.size, HEADER.unpack_from(packet)[3]
    frames = -(-(size - IP_TCP) // part) if part else 1
    return size + (frames - 1) * IP_TCP


class Lane:
    """One direction: packets on their way, with the time at which each arrives."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source, self.target = source, target
        self.seconds_a_byte, self.delay = 8 / rate, delay
        self.free = 0.0
        self.way: deque[tuple[float, bytes]] = deque()

    def take(self, now: float) -> None:
        """Takes in what waits at the source."""
        try:
            for _ in range(64):
                packet = os.read(self.source, LARGEST)
                self.free = max(self.free, now) + carried(packet) * self.seconds_a_byte
                self.way.append((self.free + self.delay, packet))
        except BlockingIOError:
            pass

    def give(self, now: float) -> None:
        """Hands over what has arrived."""
        while self.way and self.way[0][0] <= now:
            with contextlib.suppress(OSError):  # its device is not up yet: the packet is lost
                os.write(self.target, self.way.popleft()[1])

    def due(self) -> float:
        """When the next packet arrives."""
        return self.way[0][0] if self.way else float('inf')


def run(lanes: list[Lane]) -> None:
    """Moves packets until standard input is closed, as it is when the parent ends."""
    by_source = {lane.source: lane for lane in lanes}
    while True:
        wait = min(lane.due() for lane in lanes) - time.monotonic()
        ready = select.select([0, *by_source], [], [], min(max(wait, 0), 1))[0]
        if 0 in ready:
            return
        now = time.monotonic()
        for fd in ready:
            by_source[fd].take(now)
        for lane in lanes:
            lane.give(now)


def main(left: str, right: str, rate: str, delay: str) -> None:
    a, b = tunnel(left, 'tun-right'), tunnel(right, 'tun-left')
    print('ready', flush=True)
    link = float(rate), float(delay)
    run([Lane(a, b, *link), Lane(b, a, *link)])


if __name__ == '__main__':
    main(*sys.argv[1:])
