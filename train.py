"""python train.py [--config=configs/x.py] [--workdir=...] [--config.key=value ...].

With --config.runtime=mpmd the stages, with --config.replicas the replicas, may run in several
processes, which a cluster starts, or python -m jaxmp.launch, or you: the same command everywhere
with --coordinator, --processes and --process behind it; see docs/running.md.
"""

import difflib
import importlib.util
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any


def leave(*_: Any) -> None:
    """Ends at a Ctrl-C with one line, whatever is being imported, compiled or written."""
    shown = '\x1b[?25h' if os.isatty(2) else ''  # the cursor, which a progress bar hides
    text = 'stopped by Ctrl-C; the same command begins again or goes on from the last checkpoint'
    os.write(2, f'{shown}train.py: {text}\n'.encode())
    os._exit(130)


if __name__ == '__main__':  # what is imported below takes a second
    signal.signal(signal.SIGINT, leave)

import ml_collections  # noqa: E402
from absl import app, flags  # noqa: E402
from ml_collections import config_flags  # noqa: E402

ROOT = Path(__file__).resolve().parent
DEFAULT = str(ROOT / 'configs' / 'digits_resnet.py')
CONFIG = config_flags.DEFINE_config_file(
    'config', None, f'What to train; default {DEFAULT}.', lock_config=True
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Where the run is kept; default runs/<config.name>.')
TENSORBOARD = flags.DEFINE_bool('tensorboard', False, 'Also write TensorBoard event files.')
COORDINATOR = flags.DEFINE_string('coordinator', None, 'host:port of process 0; the next port too.')
PROCESSES = flags.DEFINE_integer('processes', None, 'How many processes there are.')
TOKEN_FILE = flags.DEFINE_string(
    'token_file', None, 'Holds the secret that all processes share; default $JAXMP_TOKEN.'
)
HEARTBEAT = flags.DEFINE_float(
    'heartbeat_timeout', 60.0, 'Seconds of silence after which a process counts as gone.'
)
PROCESS = flags.DEFINE_integer('process', None, 'Number of this process, from 0.')
KINDS = {bool: 'True or False', int: 'a whole number', float: 'a number', str: 'a text'}


def parse(argv: list[str]) -> list[str]:
    """What is left of ``argv`` without its flags; a mistake in them ends with one line."""
    path = DEFAULT
    for i, text in enumerate(argv):
        if found := re.fullmatch('--?config(?:=(.*))?', text):
            path = found[1] if found[1] is not None else ''.join(argv[i + 1 : i + 2])
            break
    else:
        argv.insert(1, f'--config={path}')
    try:
        left = flags.FLAGS(argv)
        CONFIG.value.to_dict()
    except Exception as error:  # a Python file and two libraries raise nearly anything
        sys.exit(f'train.py: {mistake(path, argv, error)}')
    return left


def mistake(path: str, argv: list[str], error: Exception) -> str:
    """What is wrong with the flags ``argv``, in one line; ``error`` is what they raised."""
    try:
        config = load(path)
    except Exception as cause:
        return (
            f'--config={path}: {one_line(cause)}; give a Python file with get_config(), such as '
            'configs/digits_resnet.py'
        )
    keys = [found[1] for text in argv if (found := re.match(r'--?(?:no)?config\.([^=]*)', text))]
    for key in (k for k in keys if k not in config):
        near = difflib.get_close_matches(key, list(config), n=1)
        hint = f' (did you mean config.{near[0]}?)' if near else ''
        return f'no key config.{key}{hint}; {path} has {", ".join(config)}'
    said = ' '.join(str(error).split())
    for key in (k for k in keys if said.startswith(f'flag --config.{k}=')):
        kind = KINDS.get(type(config[key]), 'another kind')
        return f'{said}; config.{key} is {kind}, such as {config[key]!r}'
    return f'{said}; --help lists the flags, of which --config comes first'


def load(path: str) -> ml_collections.ConfigDict:
    """The configuration of the file ``path``, or ``path:argument``."""
    file, _, argument = path.partition(':')
    spec = importlib.util.spec_from_file_location('config', file)
    if not Path(file).is_file() or spec is None or spec.loader is None:
        raise ValueError('there is no such Python file')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(*[argument] if argument else [])
    if not isinstance(config, ml_collections.ConfigDict):
        raise TypeError(f'get_config() gives a {type(config).__name__}, not a ConfigDict')
    return config


def one_line(error: BaseException) -> str:
    """Kind and text of an error."""
    return ' '.join([f'{type(error).__name__}:', *str(error).split()])


def main(argv: list[str]) -> None:
    """Trains what the flags say; a mistake in them ends with one line, not a traceback."""
    if len(argv) > 1:
        sys.exit(
            f'train.py: unexpected arguments {argv[1:]}; options are written --config.key=value'
        )
    import jax
    from absl import logging

    from jaxmp.devices import keep_compiled
    from jaxmp.run import devices, run, team_of
    from jaxmp.team import Address, Team

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    config, team = CONFIG.value, Team()
    keep_compiled()
    place = COORDINATOR.value, PROCESSES.value, PROCESS.value
    try:
        team = team_of(config, Address(*place, TOKEN_FILE.value, HEARTBEAT.value))
        if team.count > 1:
            signal.signal(signal.SIGINT, lambda *_: team.fail('stopped by Ctrl-C'))
        if (count := devices(config)) > 1:  # a CPU as that many devices
            jax.config.update('jax_num_cpu_devices', max(1, count // team.count))
        workdir = WORKDIR.value or Path('runs') / config.name
        summary = run(config, workdir, team, tensorboard=TENSORBOARD.value)
        team.close()
    except BaseException as error:
        said = expected(error)
        team.fail(
            said or f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")[:300]}'
        )
        if said is None:
            raise
        sys.excepthook = lambda *_: None  # of threads that a library has left behind
        sys.exit(f'train.py: {said}')
    sys.exit(143 if summary is None else 0)


def expected(error: BaseException) -> str | None:
    """The line that an error ends the run with; None for one whose traceback is wanted."""
    import jax

    from jaxmp.files import WorkdirError
    from jaxmp.run import DivergedError
    from jaxmp.training.replicas import DriftError
    from jaxmp.watch import TeamError

    full = isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)
    if full or isinstance(error, MemoryError):
        return f'no memory: {one_line(error)}; lower config.batch_size or config.width'
    known = ValueError, OSError, ImportError, WorkdirError, DivergedError, DriftError, TeamError
    return one_line(error) if isinstance(error, known) else None


if __name__ == '__main__':
    app.run(main, flags_parser=parse)
