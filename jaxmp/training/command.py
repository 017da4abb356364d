"""`jaxmp train` and `python train.py`: flags, the text of --help, one-line error messages.

    python train.py [--config=NAME or FILE] [--workdir=DIR] [--config.key=value ...]

With --config.parallel.runtime=mpmd or spmd the stages, and with --config.parallel.replicas=N the
replicas, can run in several processes. A cluster or `jaxmp launch` starts them, or you start the
same command on each host with --coordinator, --processes and --process; see docs/running.md.
"""

from __future__ import annotations

import re
import signal
import sys
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from jaxmp.config import KEYS, KINDS, LEFT_KEYS, Config, Key, Nested, complete, flat, instead_of
from jaxmp.config.files import DEFAULT, PLAIN, base_of, files, find, first_line, load
from jaxmp.plugins import see_beside
from jaxmp.terminal import command, end, hint, near_file
from jaxmp.training.workdir.trackers import Callback

LONGEST = 150  # characters of the channels in a folder's name
CONFIG = config_flags.DEFINE_config_file(
    'config',
    None,
    f'the configuration to train; default {DEFAULT}, of an own model {PLAIN}',
    lock_config=True,
)
WORKDIR = flags.DEFINE_string('workdir', None, 'folder of the run; default runs/NAME-FWD-BWD')
TENSORBOARD = flags.DEFINE_bool('tensorboard', False, 'also write TensorBoard event files')
WANDB = flags.DEFINE_bool('wandb', False, 'also log to Weights & Biases')
DRY_RUN = flags.DEFINE_bool(
    'dry_run', False, 'show stages, messages and memory, run one step, and write nothing'
)
CURVES = flags.DEFINE_bool('curves', True, 'draw the curves of the run at its end')
COORDINATOR = flags.DEFINE_string(
    'coordinator',
    None,
    'host:port of process 0; the next one too where one program runs in several',
)
PROCESSES = flags.DEFINE_integer('processes', None, 'number of processes')
TOKEN_FILE = flags.DEFINE_string(
    'token_file', None, 'file with the secret that all processes share; default $JAXMP_TOKEN'
)
SILENT = flags.DEFINE_float(
    'silent', 60.0, 'seconds without a sign of life, or of work, after which a process has failed'
)
BACK = flags.DEFINE_float(
    'back', 0.0, 'seconds in which a process of mpmd that was killed may be started again'
)
START = flags.DEFINE_float(
    'start_timeout', 50.0, 'seconds in which all processes have to come at the start'
)
SPARE = flags.DEFINE_bool(
    'spare', False, 'wait, and take the part of a process that is not back in half of --back'
)
PROCESS = flags.DEFINE_integer('process', None, 'number of this process, from 0')


def parse(argv: list[str]) -> list[str]:
    """The rest of ``argv`` after its flags are parsed; an invalid flag exits with one line."""
    argv = [re.sub('^--(dry|start|token)-', r'--\1_', a) for a in argv]
    name = base_of(argv)
    for i, text in enumerate(argv):
        if match := re.fullmatch('--?config(?:=(.*))?', text):
            name = match[1] if match[1] is not None else ''.join(argv[i + 1 : i + 2])
            argv[i : i + 1 if match[1] is not None else i + 2] = [f'--config={find(name)}']
            break
    else:
        argv.insert(1, f'--config={find(name)}')
    see_beside(find(name).partition(':')[0])
    if {'--help', '-h'} & {*argv}:
        sys.stdout.write(described(name))
        sys.exit(0)
    try:
        left = flags.FLAGS(argv)
        CONFIG.value.to_dict()
    except Exception as error:  # a Python file and two libraries can raise almost any exception
        end(command('train'), mistake(name, argv, error))
    return left


def mistake(name: str, argv: list[str], error: Exception) -> str:
    """A line that describes the mistake in the flags ``argv``, which raised ``error``."""
    try:
        config = load(name)
    except Exception as cause:
        names = [p.stem for p in files()]
        file = name.partition(':')[0]
        near = near_file(file) or hint(Path(file).stem, names) * (not Path(file).exists())
        near += ''.join(
            f' (config.{key} has left: {now})'
            for key, (_, now) in LEFT_KEYS.items()
            if f'Key "{key.rpartition(".")[2]}"' in str(cause)
        )
        return (
            f'--config={name}: {one_line(cause)}{near}; give a Python file with get_config(), or '
            f'one of {", ".join(names)}'
        )
    values = flat(config.to_dict())
    keys = [match[1] for text in argv if (match := re.match(r'--?(?:no)?config\.([^=]*)', text))]
    for key in (k for k in keys if k not in values):
        near = instead_of(key, values, 'config.')
        return f'no key config.{key}{near}; --help lists the keys of --config={name}'
    text = ' '.join(str(error).split())
    for key in (k for k in keys if text.startswith(f'flag --config.{k}=')):
        kind = KINDS.get(type(values[key]), 'another kind')
        return f'{text}; config.{key} is {kind}, such as {values[key]!r}'
    return f'{text}; --help lists the flags, of which --config comes first'


def described(name: str) -> str:
    """The text of --help: flags, configurations, and the keys of the configuration ``name``."""
    try:
        keys = listing(load(name).to_dict())
    except Exception as error:  # raised by a file of the user
        end(command('train'), mistake(name, [], error))
    defined = flags.FLAGS.get_flags_for_module(__name__)
    rows = [(f'--{f.name}', str(f.help)) for f in defined if f.name != 'config']
    configs = [(f'--config={p.stem}', first_line(p)) for p in files()]
    show = lambda rows: '\n'.join(f'  {left:32}  {right}' for left, right in rows)
    return (
        f'{(__doc__ or "").partition(chr(10) * 2)[2]}\nflags:\n{show(rows)}\n\n'
        f'configurations (a name, or a file of your own; NAME:ARGUMENT):\n{show(configs)}\n\n'
        f'keys of --config={name}, with their values (`jaxmp codecs` lists the words of fwd, bwd '
        f'and exchange):\n{keys}\n'
    )


def listing(config: Nested) -> str:
    """A line per key of ``config``: name, value, meaning."""
    values, rows = flat(config), []
    for name in [*(n for n in KEYS if n in values), *(n for n in values if n not in KEYS)]:
        key, value = KEYS.get(name, Key(None, 'own key')), values[name]
        words = f' ({", ".join(w or "empty" for w in key.words)})' if key.words else ''
        path = ', or own: package.module:name' if key.own else ''
        rows.append((f'--config.{name}={value!r}', f'{key.line.replace("`", "")}{words}{path}'))
    width = max(len(left) for left, _ in rows if len(left) < 45)
    return '\n'.join(f'  {left:{width}}  {right}' for left, right in rows)


def one_line(error: BaseException) -> str:
    """The class and text of an error in one line."""
    return ' '.join([f'{type(error).__name__}:', *str(error).split()])


def main(argv: list[str] | None = None) -> None:
    """Runs the command; an invalid command line exits with one line, not with a traceback."""
    app.run(run, ['train.py', *(sys.argv[1:] if argv is None else argv)], flags_parser=parse)


def run(argv: list[str]) -> None:
    """Trains the configuration that the flags select."""
    if len(argv) > 1:
        end(
            command('train'),
            f'unexpected arguments {argv[1:]}; options are written --config.key=value',
        )
    import jax

    from jaxmp.launch.signals import end_without_memory
    from jaxmp.net.connect import Address, take_part
    from jaxmp.net.group import ProcessGroup
    from jaxmp.training.elastic.run import train_as_member
    from jaxmp.training.loop import devices, process_group_of, train_and_evaluate

    set_up()
    config, group = complete(CONFIG.value), ProcessGroup()
    workdir = Path(WORKDIR.value or default_workdir(config))
    place = COORDINATOR.value, PROCESSES.value, PROCESS.value
    try:
        address = Address(*place, TOKEN_FILE.value, SILENT.value, BACK.value, START.value)
        if config.parallel.elastic and not DRY_RUN.value:
            with tracked(config, workdir, not address.process) as callbacks:
                sys.exit(143 if train_as_member(config, workdir, address, callbacks) is None else 0)
        if SPARE.value and (address := take_part(address)) is None:
            print('the run has ended, and no part was left for this spare process')
            return
        group = process_group_of(config, address)
        if group.count > 1:
            end_without_memory(group.names[group.index])
            signal.signal(signal.SIGINT, lambda *_: group.fail('stopped by Ctrl-C'))
        if (count := devices(config, group.count)) > 1:  # makes a CPU appear as that many devices
            jax.config.update('jax_num_cpu_devices', count)
        if DRY_RUN.value:
            from jaxmp.training.dry_run import dry_run

            dry_run(config, group)
            group.close()
            return
        with tracked(config, workdir) as callbacks:
            summary = train_and_evaluate(
                config, workdir, group=group, callbacks=callbacks, draw=CURVES.value
            )
        group.close()
    except BaseException as error:
        line = expected(error)
        collective = isinstance(error, jax.errors.JaxRuntimeError)  # which lost its other end
        group.fail(line or one_line(error)[:300], follows=collective)
        if line is None:
            raise
        sys.excepthook = lambda *_: None  # for threads that a library has left
        end(command('train'), line)
    sys.exit(143 if summary is None else 0)


def set_up() -> None:
    """What a process does once before it trains: quiet logs, compiled programs and memory kept."""
    from absl import logging

    from jaxmp.runtimes.allocator import keep_freed_pages
    from jaxmp.runtimes.placement import keep_compiled

    logging.set_verbosity(logging.WARNING)  # orbax logs each file that it writes
    keep_compiled()
    keep_freed_pages()


@contextmanager
def tracked(config: Config, workdir: Path, wanted: bool = True) -> Iterator[list[Callback]]:
    """A context with the callbacks that the flags ask for; with none unless they are wanted."""
    from jaxmp.training.workdir.trackers import tensorboard, wandb

    contexts = [tensorboard(workdir)] if wanted and TENSORBOARD.value else []
    contexts += [wandb(workdir, config.to_dict())] if wanted and WANDB.value else []
    with ExitStack() as stack:
        yield [stack.enter_context(m) for m in contexts]


def expected(error: BaseException) -> str | None:
    """The line with which an error ends the run; None if its traceback is to be shown."""
    import jax

    from jaxmp.net.address import ProcessGroupError
    from jaxmp.net.views import ViewChangedError
    from jaxmp.training.loop import DivergedError
    from jaxmp.training.replicas import DriftError
    from jaxmp.training.workdir.locks import WorkdirError

    full = isinstance(error, jax.errors.JaxRuntimeError) and 'RESOURCE_EXHAUSTED' in str(error)
    if full or isinstance(error, MemoryError):
        return f'out of memory: {one_line(error)}; lower config.batch_size or config.model.width'
    classes = (
        ValueError,
        OSError,
        ImportError,
        WorkdirError,
        DivergedError,
        DriftError,
        ProcessGroupError,
        ViewChangedError,
    )
    return one_line(error) if isinstance(error, classes) else None


def default_workdir(config: Config) -> str:
    """``runs/NAME-FWD-BWD``, so that runs with different channels have different folders.

    >>> from jaxmp.config import default
    >>> default_workdir(default())
    'runs/run-raw'
    """
    parts = dict.fromkeys([config.fwd, config.bwd])
    parts |= dict.fromkeys([config.exchange] if config.parallel.replicas > 1 else [])
    channels = '-'.join(re.sub(r'[^\w.=]+', '_', text).strip('_') for text in parts)
    if len(channels) > LONGEST:  # a file's name has at most 255 bytes
        channels = f'{channels[:LONGEST]}-{zlib.crc32(channels.encode()):08x}'
    return f'runs/{config.name}-{channels}'
