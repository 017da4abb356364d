"""`connect`: the processes of a run meet at a switch, by default in process 0.

`take_part`: a spare process waits until one of them does not come back, and takes its part.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxmp.net.address import ProcessGroupError, host_and_port, reach, token_of
from jaxmp.net.group import LONG, ProcessGroup
from jaxmp.net.keys import Keys, keys_of
from jaxmp.net.messages import TO_SPARE, read
from jaxmp.net.peer import ANSWER, Peer
from jaxmp.net.sockets import SWITCH, Line, Sockets, put, url
from jaxmp.net.switch import Switch
from jaxmp.net.views import BEAT, Terms
from jaxmp.terminal import command, first

LAST = 1.0  # seconds in which the others hear from the switch in process 0 why all end


class Address(NamedTuple):
    """The place of a process in its group.

    Attributes:
      coordinator: ``host:port`` of the switch, by default in process 0.
      processes: number of processes.
      process: number of this process.
      token_file: file with the secret that all processes share; default the environment variable
        `JAXMP_TOKEN`.
      silent: seconds without a sign of life, or without any work done, after which a process counts
        as failed.
      back: seconds for which the others wait until a process that has failed is back.
      start: seconds in which all processes have to come.
    """

    coordinator: str | None
    processes: int | None
    process: int | None
    token_file: str | None = None
    silent: float = 60.0
    back: float = 0.0
    start: float = 50.0


def connect(
    address: Address, parts: Sequence[int], about: dict[str, Any], what: str = 'stage'
) -> ProcessGroup:
    """Connects to the other processes, and waits until all are there.

    Args:
      address: address of this process.
      parts: the place of each stage or replica; the places are divided among the processes.
      about: settings that must be the same in all processes; JSON.
      what: kind of the parts, ``'stage'`` or ``'replica'``.

    Raises:
      ProcessGroupError: if a process does not connect or has other settings, the port is in use,
        or processes on several hosts have no secret.
      ValueError: if there are more processes than parts, or the address is invalid.
    """
    if address.processes == 1:
        return ProcessGroup()
    endpoint(address)  # whoever gave another one needs no secret yet
    owner = owners(1 + max(parts), int(address.processes or 0), what)
    names, process = names_of([owner[part] for part in parts], what), int(address.process or 0)
    place, keys = entrance(address)
    terms = Terms(names, len(names), address.start, address.silent, address.back)
    switch = Switch(keys, *place) if process == 0 else None
    ending = functools.partial(end, names[process], LAST if switch else 0.0)
    about = {**about, 'processes': len(names)}
    peer = Peer(place, keys, process, terms, about, ending, inside=names[0])
    peer.announce('starting', LONG)
    group = ProcessGroup(peer, peer.ready())
    if switch:
        group.after.append(switch.close)
    return group


def endpoint(address: Address) -> tuple[str, int]:
    """Host and port of the switch; raises ValueError if the address is invalid."""
    coordinator, processes, process = address[:3]
    if coordinator is None or processes is None or process is None:
        names = ('coordinator', 'processes', 'process')
        lacking = [f'--{n}' for n, a in zip(names, address, strict=False) if a is None]
        raise ValueError(f'give {" and ".join(lacking)} too; a process of several needs all three')
    if not 0 <= process < processes:
        raise ValueError(f'process {process} is not one of {processes}; give 0 to {processes - 1}')
    if not address.silent >= 1:
        raise ValueError(f'--silent={address.silent} is too short; give 1 second or more')
    if not 0 <= address.back < math.inf:
        raise ValueError(f'--back={address.back} is no time to wait; give 0 seconds or more')
    if not 1 <= address.start < math.inf:
        raise ValueError(f'--start-timeout={address.start} is too short; give 1 second or more')
    return host_and_port(coordinator)


def entrance(address: Address) -> tuple[tuple[str, int], Keys]:
    """Host and port of the switch, and the keys of the run.

    Raises:
      ProcessGroupError: if the secret is missing, or its file cannot be read.
      ValueError: if the address is invalid.
    """
    host, port = endpoint(address)
    return (host, port), keys_of(token_of(address.token_file, host))


def take_part(address: Address) -> Address | None:
    """The address with the number of a process that does not come back; None after the run.

    It can be any but that in which the switch runs, with which the others lose each other.

    Args:
      address: without a number.

    Raises:
      ProcessGroupError: if there is no switch, or it has another secret.
      ValueError: if the address has a number, or no time to wait for a process.
    """
    if address.process is not None or not address.back:
        raise ValueError(
            f'a spare process gets its number, and --back, from the run that it waits for; got '
            f'--process={address.process} and --back={address.back:g}: leave --process out, and '
            'give all the same --back, such as --back=60'
        )
    switch, keys = entrance(address._replace(process=0))
    reach(switch, address.start, 'nobody answers', 'start the run, and check its port').close()
    sockets = Sockets(keys)
    socket = sockets.calling(f'-1.{secrets.token_hex(8)}', address.silent)
    line, numbers = Line(socket, SWITCH, url(*switch), address.silent), list[int | None]()
    take = lambda _, name, frames: numbers.append(read(frames, TO_SPARE)['process'])
    # The first answer shows that the secret is the same; then the switch may be lost for a while.
    heard, patience, number = time.monotonic(), ANSWER, None
    while number is None and time.monotonic() - heard < patience:
        line.look(time.monotonic())
        put(socket, SWITCH, {'kind': 'spare'})
        sockets.serve(BEAT, take)
        while numbers:
            heard, patience, number = time.monotonic(), address.silent + address.back, numbers.pop()
        time.sleep(BEAT / 4)
    sockets.close()
    if patience == ANSWER:
        raise ProcessGroupError(
            f'the switch at {url(*switch)} has not answered within {ANSWER:g} s: it has '
            'another token, is stopped, or is no switch of this run'
        )
    return None if number is None else address._replace(process=number)


def owners(parts: int, processes: int, what: str = 'stage') -> list[int]:
    """The number of the process of each part (stage or replica), in runs of equal length.

    Raises:
      ValueError: if there are more processes than parts.

    >>> owners(4, 2)
    [0, 0, 1, 1]
    """
    if processes > parts:
        raise ValueError(
            f'{parts} {what}s run in at most {parts} processes, got {processes}; start fewer, or '
            'give --processes=1 for a single process'
        )
    return [i * processes // parts for i in range(parts)]


def names_of(owners: Sequence[int], what: str = 'stage') -> tuple[str, ...]:
    """The name of each process in messages, given the process of each stage or replica.

    >>> names_of([0, 0, 1])
    ('process 0 (stages 0, 1)', 'process 1 (stage 2)')
    """
    rows = [[str(s) for s, o in enumerate(owners) if o == p] for p in range(max(owners) + 1)]
    one = lambda p, row: f'process {p} ({what}{"s" * (len(row) > 1)} {", ".join(row)})'
    return tuple(one(p, row) for p, row in enumerate(rows))


@contextlib.contextmanager
def processes(count: int, **terms: float) -> Iterator[list[ProcessGroup]]:
    """Groups of this process, as so many have them; their messages go by the network."""
    place, keys = '127.0.0.1', keys_of(secrets.token_hex())
    agreed = Terms(names_of(range(count)), count, **terms)
    with contextlib.closing(Switch(keys, place, 0)) as switch, ThreadPoolExecutor(count) as threads:
        peers = [Peer((place, switch.port), keys, i, agreed) for i in range(count)]
        try:
            views = list(threads.map(Peer.ready, peers))
            yield [ProcessGroup(peer, view) for peer, view in zip(peers, views, strict=True)]
        finally:
            list(threads.map(Peer.close, peers))


def end(name: str, seconds: float, why: str) -> None:
    """Ends this process from any of its threads, some seconds after it has said the cause."""
    text = why if why.startswith(f'{name}: ') else f'{name}: stopped: {why}'
    sys.stdout.flush()
    if first(why.partition(', at ')[0]):  # a time of day may differ
        os.write(2, f'{command()}: {text}\n'.encode())
    time.sleep(seconds)
    os._exit(1)
