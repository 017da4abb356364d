"""Two network namespaces, of which one reaches a single port of the other, and commands in both.

    unshare -Urn python tests/one_port.py PORT '[[COMMAND], [COMMAND, ...]]'

The first namespace, a host of the address `HOST`, runs the first list of commands, the second one
the second. No interface joins them: what connects to the port in the second namespace is led to it
in the first, as by a firewall with one rule. The status is 1 if a command fails.
"""

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import threading

HOST = '10.78.0.1'
CLONE_NEWNET, SIOCSIFFLAGS, SIOCSIFADDR, SIOCSIFNETMASK = 0x40000000, 0x8914, 0x8916, 0x891C
UP = 0x1


def settle():
    """Gives the loopback of this namespace the address of the host."""
    address = lambda text: struct.pack('HH4s8x', socket.AF_INET, 0, socket.inet_aton(text))
    with socket.socket() as s:
        name = lambda text: struct.pack('16s', text.encode())
        fcntl.ioctl(s, SIOCSIFFLAGS, name('lo') + struct.pack('h14x', UP))
        fcntl.ioctl(s, SIOCSIFADDR, name('lo:1') + address(HOST))
        fcntl.ioctl(s, SIOCSIFNETMASK, name('lo:1') + address('255.255.255.255'))


def run(commands):
    """Runs commands beside each other; whether one has failed."""
    running = [subprocess.Popen(command) for command in commands]
    return max([p.wait() != 0 for p in running])


def lead(server, port):
    """Leads what connects to a socket of the other namespace to the port of this one."""

    def pump(source, target):
        while content := source.recv(2**16):
            target.sendall(content)
        target.shutdown(socket.SHUT_WR)

    while True:
        far = server.accept()[0]
        try:
            near = socket.create_connection((HOST, port))
        except (
            ConnectionRefusedError
        ):  # nobody listens yet: who connects is told so, and tries again
            far.close()
            continue
        for pair in ((far, near), (near, far)):
            threading.Thread(target=pump, args=pair, daemon=True).start()


def main(port, text):
    """Runs the commands."""
    port, (here, there) = int(port), json.loads(text)
    parent, child = socket.socketpair()
    settle()
    with socket.create_server((HOST, 0)) as closed:
        if not os.fork():
            if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), 'no second namespace')
            settle()
            with socket.socket() as other:
                assert other.connect_ex(closed.getsockname()), 'only one port is open'
            with socket.create_server((HOST, port)) as server:
                socket.send_fds(child, [b'port'], [server.fileno()])
            sys.exit(run(there))
        fds = socket.recv_fds(parent, 4, 1)[1]
    server = socket.socket(fileno=fds[0])
    threading.Thread(target=lead, args=(server, port), daemon=True).start()
    failed = run(here)
    sys.exit(max(failed, os.waitstatus_to_exitcode(os.wait()[1])))


if __name__ == '__main__':
    main(*sys.argv[1:])
