"""`python -m study COMMAND ...`: the commands of the papers' study, run in a clone."""

import importlib
import signal
import sys

from jaxmp.terminal import hint

COMMANDS = {
    'report': ('study.report.command', 'tables, figures and verdicts of finished runs'),
    'bench': ('study.bench.command', 'score channels: bits, error, time, steps, time over links'),
    'nats': ('study.nats', 'a table of nats lost by codec, of a pretrained language model'),
    'polar': ('study.polar', 'the report on polar codes, from the rows of two benches'),
}


def main() -> None:
    """Runs a command; its modules, which take seconds to import, are imported here."""
    name = sys.argv[1] if sys.argv[1:] else '--help'
    if name in ('--help', '-h', 'help'):
        rows = '\n'.join(
            f'  python -m study {name:6} {line}' for name, (_, line) in COMMANDS.items()
        )
        sys.exit(print(f'usage: python -m study COMMAND ...\n\n{rows}'))
    if name not in COMMANDS:
        sys.exit(
            f'study: no command {name!r}{hint(name, COMMANDS)}; there are {", ".join(COMMANDS)}'
        )
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(importlib.import_module(COMMANDS[name][0]).main(sys.argv[2:]))


if __name__ == '__main__':
    main()
