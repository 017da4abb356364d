"""Addresses of the processes of a run, connections to them, and the secret that strangers lack."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import sys
import time
from pathlib import Path

TOKEN = 'JAXMP_TOKEN'  # the environment variable that holds the secret
SHORT = 16  # letters; a random text of fewer can be found by trying
ANSWER = 5.0  # seconds in which a machine accepts a connection


class ProcessGroupError(RuntimeError):
    """An error of the group: processes with different settings, or a process that has failed."""


def host_and_port(text: str) -> tuple[str, int]:
    """Host and port that a text names.

    Raises:
      ValueError: if it names none.

    >>> host_and_port('10.0.0.1:9876'), host_and_port('[::1]:80')
    (('10.0.0.1', 9876), ('::1', 80))
    """
    host, _, port = text.rpartition(':')
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f'{text!r}, as address of the coordinator, is not host:port, such as '
            '10.0.0.1:9876, with a port up to 65535'
        )
    return host.strip('[]'), int(port)


def secret(file: str | None) -> str:
    """The secret of the run: the text of ``file``, else of the environment variable, else empty.

    Blanks, line ends and a byte order mark around it, which editors and shells add, do not count.

    Raises:
      ProcessGroupError: if the file cannot be read or is empty.
    """
    try:
        text = Path(file).read_text(encoding='utf-8') if file else os.environ.get(TOKEN, '')
    except (OSError, ValueError) as error:
        raise ProcessGroupError(f'cannot read the token file: {error}; give a text file') from error
    text = text.strip().strip('\ufeff').strip()
    if file and not text:
        raise ProcessGroupError(f'the token file {file} is empty; write a random text to it')
    return text


def token_of(file: str | None, host: str) -> str:
    """The secret of the run, which is empty at most if ``host`` is a loopback address.

    Raises:
      ProcessGroupError: if it is missing, or its file cannot be read.
    """
    token = secret(file)
    if not token and not is_loopback(host):
        raise ProcessGroupError(
            f'any machine that reaches {host} could join this run: give all processes the same '
            f'secret text, by the environment variable {TOKEN} or by --token_file'
        )
    if 0 < len(token) < SHORT:
        tell(f'the secret has {len(token)} letters, which can be guessed: openssl rand -hex 16')
    if file and os.name == 'posix' and (mode := os.stat(file).st_mode & 0o777) & 0o077:
        tell(f'other users may read the secret in {file}, of mode {mode:o}; chmod 600 {file}')
    return token


def tell(text: str) -> None:
    """Says what is not as it should be, and ends nothing."""
    print(f'jaxmp: {text}', file=sys.stderr, flush=True)


def is_loopback(host: str) -> bool:
    """Whether ``host`` is a loopback address or name on every machine.

    >>> is_loopback('localhost'), is_loopback('127.0.0.1'), is_loopback('10.0.0.1')
    (True, True, False)
    """
    try:
        return host == 'localhost' or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def own_address(host: str) -> str:
    """The address on which process 0 listens: that of ``host``, or '' for all of this machine.

    It listens on all addresses if ``host`` is not an address of this machine (as with network
    address translation), cannot be resolved yet, or resolves to loopback only on this machine (as
    in Debian's /etc/hosts).
    """
    try:
        resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):  # UnicodeError: ``host`` is not a valid name
        return ''
    for family, *_, address in resolved:
        if ipaddress.ip_address(address[0]).is_loopback and not is_loopback(host):
            return ''
        with contextlib.suppress(OSError), socket.socket(family) as trial:
            trial.bind(address)
            return str(address[0])
    return ''


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on ``address``, or on all addresses for ''.

    Raises:
      ProcessGroupError: if the port is in use.
    """
    dual = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual or ':' in address else socket.AF_INET
    try:
        server = socket.create_server(
            (address, port), family=family, backlog=4096, dualstack_ipv6=dual
        )
    except OSError as error:
        raise ProcessGroupError(
            f'port {port} cannot be used: {error}; give another port'
        ) from error
    if hasattr(socket, 'TCP_DEFER_ACCEPT'):  # Linux keeps who says nothing to itself, for 60 s
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 60)
    return server


def reach(address: tuple[str, int], patience: float, wrong: str, advice: str) -> socket.socket:
    """A connection to ``address``, for which it tries as many seconds as ``patience`` says.

    Raises:
      ProcessGroupError: if there is none then: ``wrong``, where and why, and ``advice``.
    """
    end = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(address, ANSWER)
        except OSError as error:
            if time.monotonic() > end:
                where = f'{address[0]}:{address[1]}'
                raise ProcessGroupError(f'{wrong} at {where} ({error}); {advice}') from error
            time.sleep(0.2)
