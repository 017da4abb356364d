"""GPT-2 small from a folder of weights: shapes, bytes a step, memory, at batch 8 and sequence 1024.

Random weights are written in Hugging Face's layout to a temporary folder, read back by every stage,
and the training step of configs/wikitext_gpt2.py (four stages, Top10 % with indices reused, AdamW)
is compiled at full size, which tells its memory without running it. Then one step of it runs with
`--batch` sequences, for its time and the memory the process really took.

Run: python bench/gpt2_small.py [--batch=1] [--length=1024]   (defaults: five minutes, 12 GB)
"""

import argparse
import functools
import resource
import tempfile
import time

import jax
import jax.numpy as jnp
import optax
from timing import header

import jaxmp
from jaxmp.models import gpt2, gpt2_file, layers, pretrained, tied
from jaxmp.models.checkpoint import open_checkpoint
from jaxmp.wire import nbytes

FULL = {'batch': 8, 'length': 1024}
CODECS = {
    'raw': ('raw', 'raw'),
    'Top10 %, indices reused': ('top_k(0.1)', 'same_support()'),
    'uniform 4-bit': ('uniform(4)', 'uniform(4)'),
}
GIB = 2**30


def training(stages, fwd, bwd):
    """Pipeline, optimizer, and a step as a function of parameters, states and tokens."""
    model, optimizer = jaxmp.pipeline(stages, jaxmp.parse(fwd), jaxmp.parse(bwd)), optax.adamw(5e-5)

    def loss(params, feedback, tokens):
        variables = tuple({'params': p} for p in params)
        logits, _, feedback = model.apply(variables, feedback, tokens, train=True)
        return layers.next_token_nats(logits, tokens).mean(-1).mean(), (feedback, None)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params, state, feedback, tokens):
        (nats, _), grads, feedback = jaxmp.value_and_grad(loss)(params, feedback, tokens)
        updates, state = optimizer.update(tied.WTE.add(grads), state, params)
        return tied.WTE.share(optax.apply_updates(params, updates)), state, feedback, nats

    return model, optimizer, step


def compiled_memory(stages, codec):
    """Shapes and bytes of the boundaries, and the compiled step's bytes, at full size."""
    model, optimizer, step = training(stages, *CODECS[codec])
    tokens = jax.ShapeDtypeStruct((FULL['batch'], FULL['length']), jnp.int32)
    variables, feedback = jax.eval_shape(functools.partial(model.init), jax.random.key(0), tokens)
    params = tuple(v['params'] for v in variables)
    state = jax.eval_shape(optimizer.init, params)
    memory = step.lower(params, state, feedback, tokens).compile().memory_analysis()
    likes = model.likes(variables, tokens, train=True)
    print(f'\n{codec}')
    for i, (cut, like) in enumerate(zip(model.boundaries, likes, strict=True), 1):
        forward, backward = (bits // 8 for bits in cut.bits(like))
        print(
            f'  boundary {i}: {like.dtype}{list(like.shape)}, {nbytes(like):,} bytes raw; sent '
            f'{forward:,} forward, {backward:,} backward'
        )
    held = memory.argument_size_in_bytes / GIB
    print(f'  parameters and AdamW {held:.2f} GiB, work {memory.temp_size_in_bytes / GIB:.2f} GiB')


def one_step(folder, remat, batch, length):
    """A real step from the weights in ``folder``."""
    stages = stages_of(folder, remat)
    model, optimizer, step = training(stages, *CODECS['Top10 %, indices reused'])
    tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, 50257)
    weights = open_checkpoint(folder)
    params = tuple(pretrained.read(weights, stages, s)['params'] for s in range(len(stages)))
    params = jax.tree.map(lambda a: a.copy(), params)  # donated: no array may be there twice
    _, feedback = jax.jit(model.init)(jax.random.key(0), tokens)
    done = step(params, jax.jit(optimizer.init)(params), feedback, tokens)
    jax.block_until_ready(done)
    start = time.perf_counter(), time.process_time()
    nats = float(step(*done[:3], tokens)[3])
    wall, cpu = time.perf_counter() - start[0], time.process_time() - start[1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        f'\nstep of {batch} x {length} tokens: {wall:.1f} s wall, {cpu:.1f} CPU s, loss '
        f'{nats:.4f} nats; peak memory of the process {peak:.2f} GiB'
    )


def stages_of(folder, remat):
    """Four stages of the network in ``folder``."""
    return pretrained.stages_of(open_checkpoint(folder), 4, remat=remat)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--batch', type=int, default=1)
    parser.add_argument('--length', type=int, default=1024)
    given = parser.parse_args()
    print(header())
    with tempfile.TemporaryDirectory() as folder:
        stages = gpt2.gpt2(gpt2.Config(), 4)
        made = jax.jit(lambda: jaxmp.pipeline(stages, *2 * (jaxmp.parse('raw'),)).init(
            jax.random.key(0), jnp.zeros((1, 8), jnp.int32)
        )[0])()  # fmt: skip
        params = tied.WTE.share([v['params'] for v in made])
        count = sum(a.size for p in params for a in jax.tree.leaves(p)) - params[0]['wte'].size
        gpt2_file.write(folder, stages, tuple({'params': p} for p in params))
        print(f'{count:,} parameters written and read back; batch 8, sequence 1024:')
        del made, params
        for remat in (False, True):
            print(f'\nremat={remat}', end='')
            for codec in CODECS if not remat else ['Top10 %, indices reused']:
                compiled_memory(stages_of(folder, remat), codec)
        one_step(folder, True, given.batch, given.length)


if __name__ == '__main__':
    main()
