"""What tests need that need no more than the base install."""

import os
import pathlib

import pytest

from jaxmp.testing import QUICK

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLAGS = ' '.join(f'--{k}={v}' for k, v in QUICK.items())  # compiles in less than half the time
ENV = {**os.environ, 'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': FLAGS}
STARTED = []  # processes of a test


def slow(cases, which):
    """Cases of a test, of which those with ``which(case)`` run with ``-m slow`` alone."""
    marked = lambda c: pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.slow)
    return [marked(c) if which(c) else c for c in cases]


def end_started():
    """Ends what a test that failed has left running, of which a later one would be accused."""
    while STARTED:
        with STARTED.pop() as process:
            process.kill()
