"""The switch by itself: `jaxmp switch --address 10.0.0.1:9876`."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from jaxmp.net.address import TOKEN, ProcessGroupError, host_and_port, token_of
from jaxmp.net.keys import keys_of
from jaxmp.net.switch import Switch


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog='jaxmp switch',
        description='The place where the processes of a run meet.',
    )
    parser.add_argument('--address', required=True, help='host:port by which all reach it')
    parser.add_argument('--token_file', help=f'file with the secret; default ${TOKEN}')
    args = parser.parse_args(argv)
    try:
        host, port = host_and_port(args.address)
        keys = keys_of(token_of(args.token_file, host))
        switch = Switch(keys, host, port, lambda text: print(text, flush=True))
    except (ProcessGroupError, ValueError) as error:
        parser.error(str(error))
    with contextlib.suppress(KeyboardInterrupt):
        switch.thread.join()
        return 1  # its thread has failed, and said why
    return 0


if __name__ == '__main__':
    sys.exit(main())
