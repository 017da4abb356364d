"""Bits, error and time of gradient codecs on normal, Laplacian and real gradient vectors.

A vector is one sample, as `dataparallel` sends it; all have the length of the real one, the
gradient of ResNet-18 (width 16) on the embedded digits after 50 steps. Error: ``|x - C(x)|^2 /
|x|^2`` of one message; time: CPU-nanoseconds an element on one core.
Run: python bench/gradients.py [--codecs TEXT ...]   (5 minutes), then python -m study.report polar
"""

import argparse
import json
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from timing import best, keep_freed_pages, stem

import jaxmp
from jaxmp import Ctx
from jaxmp.data import digits
from jaxmp.models import resnet18
from jaxmp.training.summary import provenance

CODECS = [
    *('fp16', 'bf16', 'uniform(8)', 'uniform(4)', 'uniform(2)', 'block(4)', 'block(1)'),
    *('top_k(0.1, values=fp16)', 'top_k(0.1, values=fp16, indices=packed)'),
    *('top_k(0.01, values=fp16, indices=packed)', 'random_k(0.1, values=fp16)'),
    *('polar_sign(0.25)', 'polar_sign(0.5)', 'polar(0.1)', 'polar(0.25)', 'polar(0.5)'),
    *('polar(1.0)', 'polar(0.1, search=scl(8))', 'polar(0.25, search=scl(8))'),
    *('polar(0.5, search=scl(8))', 'polar(0.5, search=randomised)', 'polar(0.5, block=4096)'),
    *('rotate(polar(0.1))', 'rotate(polar(0.25))', 'rotate(polar(0.5))', 'rotate(polar(1.0))'),
    *('rotate(polar(0.5, search=scl(8)))', 'rotate(uniform(2))', 'rotate(polar_sign(0.5))'),
    *('top_k(0.1, values=polar(1.0))', 'top_k(0.1, values=polar(0.5), indices=packed)'),
    *('random_k(0.5, values=rotate(polar(0.5)))', 'unbiased_random_k(0.1)'),
    *('one_bit', 'natural', 'qsgd(127)', 'qsgd(7)', 'qsgd(1)'),
]
STEPS, BATCH, SEED = 50, 64, 0


def real():
    """The gradient of a batch after training for a while, as one vector."""
    model = jaxmp.pipeline(resnet18(10, 16), jaxmp.parse('raw'), jaxmp.parse('raw'))
    data = digits.load()
    order = np.random.default_rng(SEED).permutation(len(data.train.x))
    x = jnp.asarray((data.train.x[order] / 255.0 - data.mean) / data.std, jnp.float32)
    y = jnp.asarray(data.train.y[order])
    variables, _ = model.init(jax.random.key(SEED), x[:BATCH], train=True)
    optimizer = optax.sgd(0.02, momentum=0.9)

    def loss(params, stats, x, y):
        given = tuple({'params': p, **s} for p, s in zip(params, stats, strict=True))
        logits, given, _ = model.apply(given, None, x, train=True)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return nll, tuple({'batch_stats': v['batch_stats']} for v in given)

    @jax.jit
    def step(state, x, y):
        params, stats, memory, _ = state
        (_, stats), grads = jax.value_and_grad(loss, has_aux=True)(params, stats, x, y)
        move, memory = optimizer.update(grads, memory)
        return optax.apply_updates(params, move), stats, memory, grads

    params = tuple(v['params'] for v in variables)
    stats = tuple({'batch_stats': v['batch_stats']} for v in variables)
    state = params, stats, optimizer.init(params), params
    for i in range(STEPS):
        at = slice(i * BATCH % 1280, i * BATCH % 1280 + BATCH)
        state = step(state, x[at], y[at])
    return ravel_pytree(state[3])[0][None]


def vectors():
    found = np.asarray(real())
    r = np.random.default_rng(SEED)
    return {
        'normal': r.standard_normal(found.shape).astype(np.float32),
        'Laplacian': r.laplace(size=found.shape).astype(np.float32),
        'gradient': found,
    }


def measure(text, given, repeats):
    """A row a vector."""
    channel = jaxmp.parse(text)
    x = given['normal']
    like, ctx = jaxmp.like(x), Ctx(jax.random.key(SEED))
    encode = jax.jit(lambda x: channel.codec.encode(x, ctx))
    decode = jax.jit(lambda m: channel.codec.decode(m, like, ctx))
    m = encode(x)
    ends = {'encode': lambda: jax.block_until_ready(encode(x))}
    ends['decode'] = lambda: jax.block_until_ready(decode(m))
    ends['decode']()
    took = {f'{end}_ns': 1e9 * s / x.size for end, s in best(ends, repeats).items()}
    for name, x in given.items():
        m = encode(x)
        wide, y = x.astype(float), np.asarray(decode(m), float)
        yield {
            'kind': 'codec',
            'codec': text,
            'vector': name,
            'elements': x.size,
            'bits': 8 * jaxmp.nbytes(m) / x.size,
            'nmse': np.sum(np.square(wide - y)) / np.sum(np.square(wide)),
        } | took


def scalars(rate):
    """Relative squared error of the best entropy-coded scalar quantiser of normal numbers.

    Equal steps with a wider zero, reproduced by their centroids; over all widths of the zero, with
    the step that spends ``rate`` bits.
    """
    x = np.linspace(0, 8, 16001)
    p = np.exp(-x * x / 2)
    p /= p.sum()

    def bits_and_error(zero, step):
        cell = np.where(x < zero * step, 0, 1 + np.floor((x - zero * step) / step)).astype(int)
        mass = np.bincount(cell, p)
        centre = np.bincount(cell, p * x)[1:] / np.maximum(mass[1:], 1e-300)
        signed = np.concatenate([mass[:1], mass[1:] / 2, mass[1:] / 2])
        signed = signed[signed > 0]
        return -np.sum(signed * np.log2(signed)), 1 - np.sum(mass[1:] * centre**2)

    def error(zero):
        low, high = 0.05, 8.0
        for _ in range(30):
            step = (low + high) / 2
            low, high = (step, high) if bits_and_error(zero, step)[0] > rate else (low, step)
        return bits_and_error(zero, high)[1]

    return min(error(zero) for zero in np.linspace(0.5, 2, 31))


def main():
    ask = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    ask.add_argument('--codecs', nargs='+', default=CODECS, help='texts of codecs')
    ask.add_argument('--repeats', type=int, default=3)
    ask.add_argument('--out', type=Path, help='results without their ending')
    args = ask.parse_args()
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])  # before XLA counts its threads
    keep_freed_pages()
    out = args.out or Path(__file__).parent / 'results' / stem('gradients')
    command = ' '.join(['bench/gradients.py', *sys.argv[1:]])
    given = vectors()
    with out.with_suffix('.jsonl').open('a') as file:

        def write(found):
            print(json.dumps(found, default=float), file=file, flush=True)
            print(found)

        write({'kind': 'run', 'command': command, 'seed': SEED, **provenance()})
        for rate in (0.1, 0.25, 0.5, 1.0):
            write({'kind': 'scalars', 'bits': rate, 'nmse': scalars(rate)})
        for text in args.codecs:
            for found in measure(text, given, args.repeats):
                write(found)


if __name__ == '__main__':
    main()
