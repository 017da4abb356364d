"""CPU-milliseconds of a training step over AQ-SGD tables of growing size, under each runtime.

A step reads and writes the rows of its batch, so the size of a table must not matter. LeNet of
width 64, batch 32, runs in one program and as two stage programs in this process; where there are
two devices, LeNet also runs over them as one program (`jaxmp.runtimes.spmd`). The status is 1 if a
step over the largest table takes more than twice the time of one over the smallest.

XLA_FLAGS=--xla_force_host_platform_device_count=2 python bench/tables.py [repeats]
(20: two minutes on 2 cores)
"""

import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from timing import header, keep_freed_pages

import jaxmp
from jaxmp import Ctx
from jaxmp.feedback import per_microbatch
from jaxmp.models import lenet
from jaxmp.runtimes.columns import Columns
from jaxmp.runtimes.mpmd import Mpmd
from jaxmp.runtimes.spmd import Spmd
from jaxmp.runtimes.types import Model

EXAMPLES, BATCH, BAR = (400, 14_080, 56_192), 32, 2.0  # 8 KiB an example and end, in float32
ROW = 2048  # floats of an example at LeNet's boundary
FWD, BWD = 'aqsgd(uniform(4), examples)', 'uniform(8)'


def channels(examples):
    """Forward and backward channel."""
    return jaxmp.parse(FWD, {'examples': examples}), jaxmp.parse(BWD)


def loss(logits, y):
    """Cross-entropy, and nothing besides."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), None


def descend(params, grads):
    """Plain SGD, as its cost is the same everywhere."""
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)


def one_program(examples):
    """A step of LeNet in one program."""
    model = jaxmp.pipeline(lenet(10, 64), *channels(examples))
    x = jnp.zeros((BATCH, 28, 28, 1))
    variables, feedback = model.init(jax.random.key(0), x, train=True)

    def score(params, feedback, x, y, ctx):
        logits, _, feedback = model.apply(params, feedback, x, ctx, train=True)
        return loss(logits, y)[0], (feedback, None)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, feedback, x, y, ctx):
        _, grads, feedback = jaxmp.value_and_grad(score)(params, feedback, x, y, ctx)
        return descend(params, grads), feedback

    return step, (variables, feedback)


def apart(kind, devices, examples):
    """A step of LeNet by a runtime whose stages are apart."""
    cut = jaxmp.boundary(*(per_microbatch(c, 1) for c in channels(examples)))
    x = jax.ShapeDtypeStruct((BATCH, 28, 28, 1), jnp.float32)
    model = Model(tuple(lenet(10, 64)), (cut,), lambda x, key: x, loss, x)
    runtime = kind(model, Columns([devices]))
    update = lambda via, params, grads: descend(params, grads)

    def step(state, x, y, ctx):
        batch = {'x': x, 'y': y, 'id': ctx.ids}
        _, grads, state = runtime.value_and_grad(state, batch, ctx.key)
        params = {s: runtime.at(s, update, p, grads[s]) for s, p in state.params.items()}
        return (state._replace(params=params),)

    return step, (runtime.init(jax.random.key(0)),)


def stage_programs(examples):
    """A step of LeNet as two stage programs in this process."""
    return apart(Mpmd, jax.devices()[:1] * 2, examples)


def over_devices(examples):
    """A step of LeNet as one program over two devices."""
    return apart(Spmd, jax.devices()[:2], examples)


def milliseconds(make, examples, repeats):
    """Median CPU-milliseconds of a step, after two that do not count."""
    step, state = make(examples)
    r, taken = np.random.default_rng(0), []
    for t in range(repeats + 2):
        ids = jnp.asarray(r.permutation(examples)[:BATCH].astype(np.int32))
        x, y = r.standard_normal((BATCH, 28, 28, 1)).astype(np.float32), r.integers(0, 10, BATCH)
        ctx = Ctx(jax.random.key(t), ids)
        jax.block_until_ready((state, ctx))
        start = time.process_time()
        state = step(*state, x, y, ctx)
        jax.block_until_ready(state)
        taken.append(time.process_time() - start)
    return 1e3 * float(np.median(taken[2:]))


def main(repeats=20):
    """Prints a row a runtime; returns whether all kept to the bar."""
    keep_freed_pages()
    print(f'{header()}, batch {BATCH}, median of {repeats} steps, {FWD} and {BWD}')
    print(f'{"table MiB an end":24}' + ''.join(f'{n * ROW * 4 / 2**20:10.0f}' for n in EXAMPLES))
    kinds = [one_program, stage_programs, *([over_devices] if len(jax.devices()) > 1 else [])]
    kept = True
    for make in kinds:
        found = [milliseconds(make, n, repeats) for n in EXAMPLES]
        good = found[-1] <= BAR * found[0]
        kept = kept and good
        row = ''.join(f'{ms:10.0f}' for ms in found)
        print(f'{make.__name__:24}{row}{"" if good else f"   more than {BAR} times"}')
    return kept


if __name__ == '__main__':
    sys.exit(not main(*map(int, sys.argv[1:])))
