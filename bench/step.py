"""CPU-seconds of a ResNet-18 training step with and without compression, in one process.

Steps of all settings are interleaved, so that a busy machine slows them alike; the figure that
counts is the ratio. Run: python bench/step.py [width] [repeats] [batch]   (64 8 100: five minutes)
On an accelerator the seconds are wall seconds.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import header, keep_freed_pages

import jaxmp
from jaxmp.models import resnet18

SETTINGS = {
    'raw': ('raw', 'raw'),
    'Top10 %': ('top_k(0.1)', 'top_k(0.1)'),
    'fw4-bw8': ('uniform(4)', 'uniform(8)'),
    'EF21 + Top10 %': ('ef21(top_k(0.1))', 'ef21(top_k(0.1))'),
}


def stepper(width, batch, fwd, bwd, size=32):
    """A compiled training step and its state: plain SGD, as its cost is the same everywhere."""
    model = jaxmp.pipeline(resnet18(10, width), jaxmp.parse(fwd), jaxmp.parse(bwd))
    x = jax.random.normal(jax.random.key(1), (batch, size, size, 3))
    y = jnp.arange(batch) % 10

    def loss(params, feedback, stats):
        variables = tuple({'params': p, **r} for p, r in zip(params, stats, strict=True))
        logits, variables, feedback = model.apply(variables, feedback, x, train=True)
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return nll, (feedback, tuple({'batch_stats': v['batch_stats']} for v in variables))

    def step(params, stats, feedback):
        (nll, stats), grads, feedback = jaxmp.value_and_grad(loss)(params, feedback, stats)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), stats, feedback, nll

    variables, feedback = model.init(jax.random.key(0), x, train=True)
    params = tuple(v['params'] for v in variables)
    stats = tuple({'batch_stats': v['batch_stats']} for v in variables)
    return jax.jit(step, donate_argnums=(0, 1, 2)), (params, stats, feedback)


def main(width=64, repeats=8, batch=100):
    keep_freed_pages()
    cpu = jax.default_backend() == 'cpu'
    clock = time.process_time if cpu else time.perf_counter
    steppers = {n: stepper(width, batch, *texts) for n, texts in SETTINGS.items()}
    seconds = {n: [] for n in SETTINGS}
    for _ in range(repeats + 2):
        for name, (step, state) in steppers.items():
            start = clock()
            *state, nll = step(*state)
            float(nll)
            seconds[name].append(clock() - start)
            steppers[name] = step, state
    print(f'{header()}\nResNet-18 width {width}, batch {batch}, {repeats} interleaved steps')
    print(f'{"":16}{"median s":>10}{"best s":>10}{"median of ratios":>20}')
    plain = np.array(seconds['raw'][2:])
    for name, all_seconds in seconds.items():
        s = np.array(all_seconds[2:])
        print(f'{name:16}{np.median(s):10.3f}{s.min():10.3f}{np.median(s / plain):20.3f}')


if __name__ == '__main__':
    main(*map(int, sys.argv[1:]))
