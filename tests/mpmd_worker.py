"""Three steps of a small uneven pipeline, by `jaxmp.mpmd` or by one program; also run as a process.

python -m tests.mpmd_worker address process processes case schedule micros out.npz
"""

import functools
import logging
import re
import signal
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jaxmp
from jaxmp import Ctx, Links, mpmd, parse, schedule, value_and_grad

SAMPLES, STEPS, RATE, EXAMPLES = 4, 3, 0.1, 70  # samples of a micro-batch

# The programs are XLA's as ever, with their machine code made in a hurry.
QUICK = {'xla_backend_optimization_level': 0, 'xla_cpu_use_fusion_emitters': False}

# A pair of channels for each of the three boundaries; together all rules over both codecs.
CASES = {
    'direct': (
        'top_k(0.3) | uniform(4)',
        'uniform(4, stochastic) | ef(top_k(0.2))',
        'aqsgd(top_k(0.3), examples) | ef(same_support())',
    ),
    'ef': (
        'ef(top_k(0.3)) | ef(uniform(4))',
        'ef(uniform(3)) | top_k(0.3)',
        'top_k(0.3) | ef(same_support())',
    ),
    'ef21': (
        'ef21(top_k(0.3)) | ef21(uniform(4))',
        'ef21(uniform(3)) | ef21(top_k(0.2))',
        'aqsgd(uniform(4), examples) | ef_mixed(top_k(0.2))',
    ),
    'ef_mixed': (
        'ef_mixed(top_k(0.2)) | ef_mixed(top_k(0.3, uniform(4)))',
        'ef_mixed(top_k(0.4), True) | ef_mixed(top_k(0.3), True)',
        'random_k(0.5) | ef21(same_support(values=fp16))',
    ),
}


class Layer(nn.Module):
    """A dense layer, with BatchNorm and dropout where asked."""

    width: int
    norm: bool = False
    drop: bool = False

    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(self.width, param_dtype=x.dtype)(x)
        if self.norm:
            x = nn.BatchNorm(not train, momentum=0.9, param_dtype=x.dtype, dtype=x.dtype)(x)
        x = nn.Dropout(0.2, deterministic=not (train and self.drop))(x)
        return jnp.tanh(x)


STAGES = (Layer(12, norm=True), Layer(5), Layer(16, norm=True, drop=True), Layer(4))


def loss(y, target):
    return jnp.mean((y - target) ** 2), {'size': jnp.mean(jnp.abs(y))}


def model(case):
    pairs = [[parse(t, {'examples': EXAMPLES}) for t in p.split(' | ')] for p in CASES[case]]
    return jaxmp.pipeline(STAGES, *(list(c) for c in zip(*pairs, strict=True)))


def batches(micros):
    r = np.random.default_rng(micros)
    for step in range(STEPS):
        x, y = (r.standard_normal((SAMPLES * micros, n)) for n in (9, 4))
        ids = r.permutation(EXAMPLES)[: SAMPLES * micros].astype(np.int32)
        yield x, y, Ctx(jax.random.key(100 + step), ids)


@functools.partial(jax.jit, compiler_options=QUICK)
def descend(params, grads):
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads)


@functools.cache
def one_step(case):
    pipe = model(case)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def grad(variables, links, x, y, ctx):
        def run(params, links):
            given = [{**v, 'params': p} for v, p in zip(variables, params, strict=True)]
            out, after, links = pipe.apply(given, links, x, ctx, train=True)
            value, aux = loss(out, y)
            return value, (links, (after, aux))

        return value_and_grad(run)([v['params'] for v in variables], links)

    return grad


def first_links(case):
    likes = [jax.ShapeDtypeStruct((SAMPLES, s.width), float) for s in STAGES]
    return jaxmp.init_feedback(model(case).boundaries, likes[:-1])


@functools.cache
def one_program(case, micros):
    """Losses, variables and links of the one-program pipeline, micro-batch by micro-batch."""
    shared = [b.fwd.per_example for b in model(case).boundaries]
    states = built(case).init(jax.random.key(0))
    variables = jax.device_get([s.variables for s in states.values()])
    slots, losses = [first_links(case)] * micros, []
    for x, y, ctx in batches(micros):
        before, total, sums = variables, 0, None
        for m in range(micros):
            rows = slice(m * SAMPLES, (m + 1) * SAMPLES)
            at = ctx._replace(ids=ctx.ids[rows]).fold(m)
            (value, (variables, aux)), grads, links = jax.device_get(
                one_step(case)(variables, slots[m], x[rows], y[rows], at)
            )
            slots[m] = links
            slots = [share(s, links, shared) for s in slots]
            total += np.array([value, aux['size']]) / micros
            grads = jax.tree.map(lambda g: g / micros, grads)
            sums = grads if sums is None else jax.tree.map(np.add, sums, grads)
        losses.append(total)
        variables = [
            {**v, 'params': jax.tree.map(lambda p, g: p - RATE * g, b['params'], g)}
            for v, b, g in zip(variables, before, sums, strict=True)
        ]
    return losses, variables, slots


def share(slot, links, shared):
    """A per-example table is one for all micro-batches."""
    fwd = [new if s else old for s, new, old in zip(shared, links.fwd, slot.fwd, strict=True)]
    return Links(tuple(fwd), slot.bwd)


@functools.cache
def built(case, devices=None):
    tasks, x = schedule.one_f_one_b(4, 1), jax.ShapeDtypeStruct((SAMPLES, 9), float)
    return mpmd.mpmd(
        STAGES, model(case).boundaries, loss, tasks, x, devices, compiler_options=QUICK, train=True
    )


def several_programs(case, micros, make, devices=None):
    """Losses (where the last stage is), states of the stages here, bytes of the last step."""
    machine = built(case, devices).follow(make(4, micros))
    states, losses = machine.init(jax.random.key(0)), []
    for x, y, ctx in batches(micros):
        result = machine.step(states, x, y, ctx)
        states = {}
        for s, state in result.states.items():
            params = descend(state.variables['params'], result.grads[s])
            states[s] = state._replace(variables={**state.variables, 'params': params})
        losses.append(result.loss and np.array([result.loss, result.aux['size']]))
    return losses, states, result.moved


class Compiled(logging.Handler):
    """The names of the functions that JAX compiles, in order."""

    def __init__(self):
        super().__init__()
        self.names = []
        jax.config.update('jax_log_compiles', True)
        log = logging.getLogger('jax._src.interpreters.pxla')
        log.addHandler(self)
        log.propagate = False

    def emit(self, record):
        self.names += re.findall(r'^Compiling jit\((.*?)\)', record.getMessage())


def main(address, process, processes, case, make, micros, out):
    signal.alarm(300)  # whatever becomes of the parent
    compiled = Compiled()
    jax.config.update('jax_enable_x64', True)
    jax.config.update('jax_cpu_collectives_implementation', 'gloo')
    jax.distributed.initialize(address, int(processes), int(process), initialization_timeout=60)
    losses, states, moved = several_programs(case, int(micros), getattr(schedule, make))
    arrays = {f'{s}/{i}': a for s, st in states.items() for i, a in enumerate(jax.tree.leaves(st))}
    arrays['compiled'] = np.array(compiled.names)
    arrays |= {f'moved/{link}': np.array(n) for link, n in moved.items()}
    if losses[0] is not None:
        arrays['loss'] = np.array(losses)
    np.savez(out, **{k: np.asarray(a) for k, a in arrays.items()})


if __name__ == '__main__':
    main(*sys.argv[1:])
