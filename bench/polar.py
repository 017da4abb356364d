"""Polar codes as a lossy source code: distortion against rate, the thesis's table, and speed.

Writes rows; `python -m study.report polar` makes table and picture of them. Fair random bits, one
seed; the standard error is that over blocks. Speed in CPU-seconds on one core, whole codecs: a
message of a float32 tensor, and the tensor of a message. Run: python bench/polar.py   (8 minutes)
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import best, keep_freed_pages, stem

import jaxmp
from jaxmp import Ctx
from jaxmp.codecs import polarcode
from jaxmp.codecs.polarcode import bhattacharyya, code, genie, hard_source
from jaxmp.codecs.polarsearch import successive, successive_list
from jaxmp.testing import QUICK
from jaxmp.training.summary import provenance

SIZES, RATES = (256, 512, 1024, 2048, 4096), (0.1, 0.3, 0.5, 0.7, 0.9)
THESIS = {  # its section 3.2.2: three blocks a cell
    256: (0.37369792, 0.24088542, 0.14453125, 0.07942708, 0.02604167),
    512: (0.36653646, 0.21614583, 0.13151042, 0.07291667, 0.02213542),
    1024: (0.3531901, 0.21386719, 0.13151042, 0.06445312, 0.02018229),
    2048: (0.35579427, 0.21809896, 0.12906901, 0.06852214, 0.02001953),
}
SEARCHES = [(s, 'genie') for s in ('argmax', 'randomised', 'scl(4)', 'scl(8)')]
SEARCHES += [(s, 'bhattacharyya') for s in ('argmax', 'randomised')]
SPEED = ('polar_sign(0.5)', 'polar(0.5)', 'polar(0.5, search=randomised)')
SPEED += ('polar(0.5, search=scl(4))', 'polar(0.5, search=scl(8))', 'rotate(polar(0.5))')
# Machine code made in a hurry: distortion needs no speed, and compiling dominates.


def source(size, blocks, rate):
    """Fair bits, their log-likelihood ratios, and logistic noise."""
    r = np.random.default_rng((size, round(1000 * rate)))
    x = r.integers(0, 2, (size, blocks), np.uint8)
    llr = (polarcode.ratio(rate) * (1.0 - 2.0 * x)).astype(np.float32)
    return x, llr, r.logistic(size=llr.shape).astype(np.float32)


def wrong(x, signs, made):
    """Share of wrong bits of every block; the word must be one of the code's."""
    word = (np.asarray(signs) < 0).astype(np.uint8)
    inputs = np.asarray(polarcode.transform(jnp.asarray(word)))
    assert not np.delete(inputs, made.sent, 0).any()
    return (word != x).mean(0)


def row(size, rate, each, **more):
    error = each.std(ddof=1) / len(each) ** 0.5
    bound = {'kind': 'distortion', 'size': size, 'rate': rate, 'bound': polarcode.distortion(rate)}
    return bound | more | {'mean': each.mean(), 'error': error, 'blocks': len(each)}


def distortions(size, rate, blocks):
    x, llr, noise = source(size, blocks, rate)
    made = {f.__name__: code(size, rate, hard_source, f) for f in (genie, bhattacharyya)}

    def search(llr, noise):
        ours, theirs = made.values()
        first = successive(ours, llr), successive(ours, llr, noise)
        lists = successive_list(ours, llr, 4), successive_list(ours, llr, 8)
        return *first, *lists, successive(theirs, llr), successive(theirs, llr, noise)

    found = jax.jit(search, compiler_options=QUICK)(llr, noise)
    for (name, construction), word in zip(SEARCHES, found, strict=True):
        each = wrong(x, word, made[construction])
        line = row(size, rate, each, search=name, construction=construction)
        if (name, construction) == ('randomised', 'bhattacharyya') and size in THESIS:
            line |= {'thesis': THESIS[size][RATES.index(rate)], 'deviation': each.std(ddof=1)}
        yield line


def speeds(blocks, size, repeats):
    """CPU-nanoseconds a source bit."""
    x = jax.random.normal(jax.random.key(0), (blocks, size))
    like, ctx, seconds, functions = jaxmp.like(x), Ctx(jax.random.key(1)), {}, {}
    for text in SPEED:
        codec = jaxmp.parse(text).codec
        start = time.process_time()
        encode = jax.jit(lambda x, c=codec: c.encode(x, ctx)).lower(x).compile()
        m = encode(x)
        middle = time.process_time()
        decode = jax.jit(lambda m, c=codec: c.decode(m, like, ctx)).lower(m).compile()
        seconds[text] = middle - start, time.process_time() - middle
        functions[text, 'encode'] = lambda f=encode: jax.block_until_ready(f(x))
        functions[text, 'decode'] = lambda f=decode, m=m: jax.block_until_ready(f(m))
    for f in functions.values():
        f()
    took = best(functions, repeats)
    for text in SPEED:
        each = {f'{end}_ns': 1e9 * took[text, end] / x.size for end in ('encode', 'decode')}
        compiling = dict(zip(('compile_encode_s', 'compile_decode_s'), seconds[text], strict=True))
        setting = {'codec': text, 'size': size, 'blocks': blocks, 'repeats': repeats}
        yield {'kind': 'speed'} | setting | each | compiling
    for n in SIZES:
        start = time.process_time()
        genie(n, hard_source(0.5))
        yield {'kind': 'construction', 'size': n, 'seconds': time.process_time() - start}


def main():
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--parts', nargs='+', default=['distortion', 'speed'])
    ask.add_argument('--blocks', type=int, default=400)
    ask.add_argument('--sizes', type=int, nargs='+', default=SIZES)
    ask.add_argument('--repeats', type=int, default=7)
    ask.add_argument('--out', type=Path, help='results without their ending')
    args = ask.parse_args()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before XLA counts its threads
    keep_freed_pages()
    out = args.out or Path(__file__).parent / 'results' / stem('polar')
    command = ' '.join(['bench/polar.py', *sys.argv[1:]])
    with out.with_suffix('.jsonl').open('a') as file:

        def write(found):
            print(json.dumps(found, default=float), file=file, flush=True)
            print(found)

        write({'kind': 'run', 'command': command, **provenance()})
        if 'speed' in args.parts:
            for found in speeds(512, 1024, args.repeats):
                write(found)
        for size in args.sizes if 'distortion' in args.parts else ():
            for rate in RATES:
                for found in distortions(size, rate, args.blocks):
                    write(found)


if __name__ == '__main__':
    main()
