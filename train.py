"""python train.py [--config=configs/x.py] [--workdir=...] [--config.key=value ...]."""

import sys
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

ROOT = Path(__file__).resolve().parent
CONFIG = config_flags.DEFINE_config_file(
    'config', str(ROOT / 'configs' / 'digits_resnet.py'), 'What to train.', lock_config=True
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Where the run is kept; default runs/<config.name>.')


def main(argv: list[str]) -> None:
    """Trains what the flags say; a mistake in them ends with one line, not a traceback."""
    if len(argv) > 1:
        sys.exit(
            f'train.py: unexpected arguments {argv[1:]}; options are written --config.key=value'
        )
    import jax
    from absl import logging

    from jaxmp.checkpoint import WorkdirError
    from jaxmp.run import DivergedError, run

    logging.set_verbosity(logging.WARNING)  # orbax tells of every file it writes
    config = CONFIG.value
    jax.config.update('jax_compilation_cache_dir', str(Path('~/.cache/jaxmp').expanduser()))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 1.0)
    try:
        summary = run(config, WORKDIR.value or Path('runs') / config.name)
    except (ValueError, FileNotFoundError, ImportError, WorkdirError, DivergedError) as error:
        sys.exit(f'train.py: {type(error).__name__}: {error}')
    sys.exit(0 if summary else 143)


if __name__ == '__main__':
    app.run(main)
