"""Cost of the uniform quantiser with packing, and of unpacking, on one CPU thread.

Unit: one memcpy of the same tensor, (100, 65536) float32, in CPU-seconds, best of the repeats, all
functions interleaved. Run: python bench/quantise.py [repeats]
"""

import os
import sys

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


def main(repeats):
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before XLA counts its threads
    keep_freed_pages()
    x = jax.random.normal(jax.random.key(0), (100, 65536))
    host, target = np.asarray(x), np.zeros(x.shape, np.float32)
    functions = {'memcpy': lambda: np.copyto(target, host)}
    like, ctx = jaxmp.like(x), Ctx(jax.random.key(1))
    names = [f'uniform({b})' for b in (2, 4, 6, 8)] + list(OTHERS)
    for name in names:
        codec = jaxmp.parse(name).codec
        encode = compiled(lambda x, c=codec: c.encode(x, ctx), x)
        decode = compiled(lambda m, c=codec: c.decode(m, like, ctx), encode())
        functions |= {f'{name} pack': encode, f'{name} unpack': decode}
    seconds = best(functions, repeats)
    unit = seconds.pop('memcpy')
    print(header(), f'memcpy {1e3 * unit:.2f} ms', sep='\n')
    missed = 0
    for name, s in seconds.items():
        kind, barred = name.split()[-1], name.startswith('uniform')
        passed = s / unit <= BARS[kind]
        missed += barred and not passed
        bar = f'<= {BARS[kind]}  {"pass" if passed else "FAIL"}'
        print(f'{name:50}{1e3 * s:8.2f} ms {s / unit:6.2f} x  {bar * barred}')
    sys.exit(1 if missed else 0)


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
