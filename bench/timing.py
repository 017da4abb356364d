"""How the benches measure: CPU-seconds, best of interleaved repeats, in one process."""

import datetime
import re

import jax

from jaxmp.runtimes.allocator import keep_freed_pages
from jaxmp.training.summary import provenance
from study.bench.cost import best

__all__ = ['best', 'compiled', 'header', 'keep_freed_pages', 'stem']


def header():
    """Hardware, versions and commit."""
    p = provenance()
    return f'{p["hardware"]}, jax {p["versions"]["jax"]}, commit {p["commit"]}'


def stem(kind):
    """File name of today's results of a kind on this machine."""
    dull = {'amd', 'intel', 'r', 'tm', 'cpu', 'processor', 'x'}
    words = re.findall('[a-z0-9]+', provenance()['hardware'].lower())[1:]
    return f'{"-".join(w for w in words if w not in dull)}_{datetime.date.today()}_{kind}'


def compiled(f, *args):
    """``f`` compiled and ready, as a function of nothing."""
    f = jax.jit(f)
    jax.block_until_ready(f(*args))
    return lambda: jax.block_until_ready(f(*args))
