"""python train.py [--config=configs/x.py] [--workdir=...] [--config.key=value ...].

With --config.runtime=mpmd the stages, with --config.replicas the replicas, may run in several
processes, which a cluster starts, or python -m jaxmp.launch, or you: the same command everywhere
with --coordinator, --processes and --process behind it; see docs/running.md.
"""

import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

ROOT = Path(__file__).resolve().parent
CONFIG = config_flags.DEFINE_config_file(
    'config', str(ROOT / 'configs' / 'digits_resnet.py'), 'What to train.', lock_config=True
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


def main(argv: list[str]) -> None:
    """Trains what the flags say; a mistake in them ends with one line, not a traceback."""
    if len(argv) > 1:
        sys.exit(
            f'train.py: unexpected arguments {argv[1:]}; options are written --config.key=value'
        )
    import jax
    from absl import logging

    from jaxmp.checkpoint import WorkdirError
    from jaxmp.devices import keep_compiled
    from jaxmp.run import DivergedError, devices, run, team_of
    from jaxmp.team import Address, Team
    from jaxmp.training.replicas import DriftError
    from jaxmp.watch import TeamError

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    config, team = CONFIG.value, Team()
    keep_compiled()
    place = COORDINATOR.value, PROCESSES.value, PROCESS.value
    try:
        team = team_of(config, Address(*place, TOKEN_FILE.value, HEARTBEAT.value))
        if (count := devices(config)) > 1:  # a CPU as that many devices
            jax.config.update('jax_num_cpu_devices', max(1, count // team.count))
        workdir = WORKDIR.value or Path('runs') / config.name
        summary = run(config, workdir, team, tensorboard=TENSORBOARD.value)
        team.close()
    except (
        ValueError, FileNotFoundError, ImportError, WorkdirError, DivergedError, DriftError,
        TeamError,
    ) as error:  # fmt: skip
        team.fail(f'{type(error).__name__}: {error}')
        sys.exit(f'train.py: {type(error).__name__}: {error}')
    except BaseException as error:
        team.fail(f'{type(error).__name__}: {next(iter(str(error).splitlines()), "")[:300]}')
        raise
    sys.exit(143 if summary is None else 0)


if __name__ == '__main__':
    app.run(main)
