"""python train.py [--config=NAME or FILE] [--workdir=DIR] [--config.key=value ...]; see --help."""

import os
import signal
import sys

ENDED = b'train.py: stopped by Ctrl-C; the same command begins again\n'

if __name__ == '__main__':  # what is imported below takes a second
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, ENDED), os._exit(130)))

from jaxmp.__main__ import main  # noqa: E402

if __name__ == '__main__':
    main(['train', *sys.argv[1:]])
