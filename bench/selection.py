"""Cost of exact TopK selection, packing and unpacking on one CPU thread.

Unit: one memcpy of the same tensor (`np.copyto` between touched arrays), in CPU-seconds, best of
the repeats, all functions interleaved. Run: python bench/selection.py [repeats]   (half a minute)
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import best, compiled, header, keep_freed_pages

from jaxmp.codecs import select

FRACTION, BATCH, WIDTHS = 0.1, 100, (65536, 32768, 16384)
STEP_SECONDS = 2.0  # ResNet-18, batch 100: the low end of what was measured


def library_dense(x, k):
    at = lax.top_k(jnp.abs(x), k)[1]
    return select.scatter(select.gather(x, at), at, x.shape[1])


def cases(x, k):
    n = x.shape[1]

    def encode(x):
        words = select.k_largest(x, k)
        return words, select.gather(x, select.positions(words, k))

    def decode(words, values):
        return select.scatter(values, select.positions(words, k), n)

    def dense(x):
        at = select.positions(select.k_largest(x, k), k)
        return select.scatter(select.gather(x, at), at, n)

    words, values = jax.jit(encode)(x)
    at = select.positions(words, k)
    tied = jnp.where(jnp.abs(x) < 2, 0, x)  # fewer than k are left: zeros tie at the threshold
    host, target = np.asarray(x), np.zeros_like(x)
    return {
        'memcpy': lambda: np.copyto(target, host),
        'k_largest': compiled(lambda x: select.k_largest(x, k), x),
        'k_largest, ties': compiled(lambda x: select.k_largest(x, k), tied),
        'positions': compiled(lambda w: select.positions(w, k), words),
        'bitmap': compiled(lambda s: select.bitmap(s, n), at),
        'gather': compiled(select.gather, x, at),
        'scatter': compiled(lambda v, s: select.scatter(v, s, n), values, at),
        'encode': compiled(encode, x),
        'decode': compiled(decode, words, values),
        'dense TopK': compiled(dense, x),
    }


def measure(n, repeats):
    x = jax.random.normal(jax.random.key(0), (BATCH, n))
    k = select.count(n, FRACTION)
    seconds = best(cases(x, k), repeats)
    if n == WIDTHS[0]:
        library = compiled(lambda x: library_dense(x, k), x)
        seconds |= best({'lax.top_k dense': library}, min(repeats, 3))
    print(f'\n({BATCH}, {n}) float32, K = {k}\n{"step":20}{"ms":>10}{"x memcpy":>10}')
    for name, s in seconds.items():
        print(f'{name:20}{1e3 * s:10.2f}{s / seconds["memcpy"]:10.2f}')
    return seconds


def bars(tables):
    wide = tables[0]
    unit = wide['memcpy']
    pairs = 2 * sum(t['encode'] + t['decode'] for t in tables)
    yield 'dense TopK, x memcpy', wide['dense TopK'] / unit, '<=', 12
    yield 'lax.top_k dense / dense TopK', wide['lax.top_k dense'] / wide['dense TopK'], '>=', 8
    yield 'encode (values and bitmap), x memcpy', wide['encode'] / unit, '<=', 20
    yield 'six encode and decode pairs, ms', 1e3 * pairs, '<=', 80
    yield f'the same, % of a {STEP_SECONDS:.0f} s step', 100 * pairs / STEP_SECONDS, '<=', 3


def main(repeats=15):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before XLA counts its threads
    keep_freed_pages()
    print(f'{header()}, one thread, best of {repeats}')
    tables = [measure(n, repeats) for n in WIDTHS]
    print()
    missed = 0
    for name, value, sense, bar in bars(tables):
        passed = value <= bar if sense == '<=' else value >= bar
        missed += not passed
        print(f'{"pass" if passed else "FAIL"}  {name:40}{value:8.2f} {sense} {bar}')
    sys.exit(1 if missed else 0)


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
