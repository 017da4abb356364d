"""Cost of the uniform quantiser with packing, and of unpacking, on one CPU thread or accelerator.

Unit: one memcpy of the same tensor, (100, 65536) float32, in CPU-seconds, best of the repeats, all
functions interleaved. Run: python bench/quantise.py [repeats]
On an accelerator the tensor is (4096, 65536), a GiB, the unit is reading and writing it there once,
by a program like the others, and seconds are wall seconds. The bars are a CPU's.
"""

import os
import sys
import time

import jax
import numpy as np
from timing import best, compiled, header, keep_freed_pages

import jaxmp
from jaxmp import Ctx

BARS = {'pack': 2.5, 'unpack': 2.0}
OTHERS = (
    *('lloyd(1)', 'lloyd(2)', 'lloyd(3)', 'trellis(2)', 'rotate(lloyd(2))', 'mx(4)', 'nvfp4'),
    *('rotate(lloyd(4), 64)', 'rotate(lloyd(2), 64)', 'rotate(trellis(2), 64)'),
    *('outliers(rotate(lloyd(4), 64), causal=True)', 'outliers(rotate(trellis(2), 64))'),
    *('max_scaled(4)', 'block(4)', 'log_scale(4)', 'top_k(0.1)', 'fp16'),
)


def unit_of(x, cpu):
    """The function that the others are compared with."""
    if not cpu:
        return compiled(lambda x: -x, x)
    host, target = np.asarray(x), np.zeros(x.shape, np.float32)
    return lambda: np.copyto(target, host)


def main(repeats):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(cores)])  # before XLA counts its threads
    keep_freed_pages()
    if not (cpu := jax.default_backend() == 'cpu'):
        os.sched_setaffinity(0, cores)
    x = jax.random.normal(jax.random.key(0), (100 if cpu else 4096, 65536))
    functions = {'memcpy': unit_of(x, cpu)}
    like, ctx = jaxmp.like(x), Ctx(jax.random.key(1))
    names = [f'uniform({b})' for b in (2, 4, 6, 8)] + list(OTHERS)
    for name in names:
        codec = jaxmp.parse(name).codec
        encode = compiled(lambda x, c=codec: c.encode(x, ctx), x)
        decode = compiled(lambda m, c=codec: c.decode(m, like, ctx), encode())
        functions |= {f'{name} pack': encode, f'{name} unpack': decode}
    seconds = best(functions, repeats, time.process_time if cpu else time.perf_counter)
    unit = seconds.pop('memcpy')
    print(header(), f'memcpy {1e3 * unit:.2f} ms', sep='\n')
    missed = 0
    for name, s in seconds.items():
        kind, barred = name.split()[-1], name.startswith('uniform')
        passed = s / unit <= BARS[kind]
        missed += barred and not passed
        bar = f'<= {BARS[kind]}  {"pass" if passed else "FAIL"}' if cpu else ''
        print(f'{name:50}{1e3 * s:8.2f} ms {s / unit:6.2f} x  {bar * barred}')
    sys.exit(1 if missed and cpu else 0)


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
