"""`asked`: the command line of `jaxmp pays` and `jaxmp plan`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmp.config.files import base_of
from jaxmp.net.address import TOKEN, host_and_port
from jaxmp.net.speed import Link, parse


class Asked(NamedTuple):
    """What a command line asks for.

    Attributes:
      base: the configuration: its name, or its file.
      changes: texts ``key=value`` that change it.
      link: between neighbouring stages; None where it is to be measured.
      peer: host and port of the other machine, where that is to be measured.
      listens: whether this machine is the other one.
      token_file: file with the secret of both machines.
      error: the largest.
      percent: of perplexity that all activations may add; None: the default.
      seconds: of the probe.
      codecs: further channels.
      out: the file to write.
      candidates: whether codecs that were not chosen are shown too.
    """

    base: str
    changes: Sequence[str]
    link: Link | None
    peer: tuple[str, int] | None
    listens: bool
    token_file: str | None
    error: float
    percent: float | None
    seconds: float
    codecs: Sequence[str]
    out: Path
    candidates: bool = False

    def config(self) -> tuple[Any, dict[str, Any]]:
        """The configuration with the command line's values, and these values.

        Raises:
          ValueError: if there is no such file or key, or a value is of another type.
        """
        return changed(self.base, self.changes)


def asked(argv: Sequence[str] | None, prog: str, description: str | None, out: str) -> Asked:
    """What a command line asks for; one that makes no sense ends the process.

    Args:
      argv: the command line.
      prog: name of the command.
      description: for ``--help``.
      out: the file that is written by default.

    Raises:
      ValueError: if a link or an address is none.
    """
    parser = argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument('--config', help='its name, or a Python file; default as in `jaxmp train`')
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument('--link', help='between stages, such as 100mbit,50ms')
    where.add_argument('--peer', help='HOST:PORT of a second machine, to measure it and the link')
    where.add_argument('--listen', help='HOST:PORT: be that second machine, until Ctrl-C')
    parser.add_argument('--token_file', help=f'with the secret of both machines; default ${TOKEN}')
    parser.add_argument('--error', type=float, default=0.1, help='largest error; default 0.1')
    parser.add_argument(
        '--percent', type=float,
        help='of perplexity that the activations of all boundaries together may add; of a '
        'pretrained language model, default 1',
    )  # fmt: skip
    parser.add_argument('--seconds', type=float, default=60, help='of the probe; default 60')
    parser.add_argument('--codecs', default='', help='further channels, with ; between them')
    parser.add_argument('--out', type=Path, default=Path(out), help=f'default {out}')
    if prog == 'jaxmp plan':
        every = 'show the codecs that were not chosen too'
        parser.add_argument('--candidates', action='store_true', help=every)
    args, rest = parser.parse_known_args(argv)
    for text in rest:
        if not (text.startswith('--config.') and '=' in text):
            parser.error(f'unexpected {text!r}; keys are written --config.key=value')
    if not (args.error >= 0 and args.seconds > 0):
        parser.error('--error is a number from 0, and --seconds one above 0')
    if args.percent is not None and not args.percent >= 0:
        parser.error('--percent is a number from 0')
    address = args.peer or args.listen
    return Asked(
        args.config or base_of(rest),
        [text.removeprefix('--config.') for text in rest],
        parse(args.link) if args.link is not None else None,
        host_and_port(address) if address else None,
        bool(args.listen),
        args.token_file,
        args.error,
        args.percent,
        args.seconds,
        [t.strip() for t in args.codecs.split(';') if t.strip()],
        args.out,
        getattr(args, 'candidates', False),
    )


def changed(name: str, texts: Sequence[str]) -> tuple[Any, dict[str, Any]]:
    """The configuration with the values of texts ``key=value``, and these values.

    Raises:
      ValueError: if there is no such file or key, or a value is of another type.
    """
    from jaxmp.config import complete, flat, load
    from jaxmp.config.change import put

    try:
        config = complete(load(name))
    except (TypeError, ValueError) as error:
        raise ValueError(f'--config={name}: {error}') from None
    for text in texts:
        put(config, text)
    values = flat(config.to_dict())
    return config, {key: values[key] for key in (t.partition('=')[0] for t in texts)}
