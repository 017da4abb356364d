"""A training step of a GPT-2: tokens a second against torch, and what the codecs cost.

The step is forward, backward and AdamW, float32, no dropout, the same sizes on both sides; torch is
transformers' GPT2LMHeadModel (left out where torch is not installed). The pipelines have four
stages in one program and tied tables. Steps of all settings are interleaved, so that a busy machine
slows them alike; the figures that count are the ratios. CPU-seconds are meaningful on one core.

Run: python bench/gpt2.py [--cores=1] [--width=256] [--blocks=8] ...   (defaults: three minutes)
On an accelerator the seconds are wall seconds, and torch runs there too.
"""

import argparse
import os
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = {'width': 256, 'blocks': 8, 'heads': 8, 'length': 256, 'batch': 8, 'vocabulary': 8192}
    for name, default in {'cores': 1, **sizes, 'repeats': 8}.items():
        parser.add_argument(f'--{name}', type=int, default=default)
    return parser.parse_args()


ARGUMENTS = arguments()
if hasattr(os, 'sched_setaffinity'):  # before jax and torch count the cores
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: ARGUMENTS.cores])

import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from timing import header, keep_freed_pages  # noqa: E402

import jaxmp  # noqa: E402
from jaxmp.models import gpt2, layers, tied  # noqa: E402

CODECS = {
    'raw': ('raw', 'raw'),
    'Top10 %, indices reused': ('top_k(0.1)', 'same_support()'),
    'Top10 %, separate': ('top_k(0.1)', 'top_k(0.1)'),
    'uniform 4-bit': ('uniform(4)', 'uniform(4)'),
}
RATE = 3e-4


def stages_of(a, n):
    return gpt2.gpt2(
        gpt2.Config(a.vocabulary, a.length, a.width, a.blocks, a.heads), min(n, a.blocks)
    )


def ours(a, tokens, stages, fwd, bwd):
    """A step of a pipeline as a function of nothing."""
    model = jaxmp.pipeline(stages, jaxmp.parse(fwd), jaxmp.parse(bwd))
    optimizer = optax.adamw(RATE)
    variables, feedback = model.init(jax.random.key(0), tokens)
    params = tied.WTE.share([v['params'] for v in variables])
    params = jax.tree.map(lambda x: x.copy(), params)  # donated, so no array may be there twice

    def loss(params, feedback):
        variables = tuple({'params': p} for p in params)
        logits, _, feedback = model.apply(variables, feedback, tokens)
        return layers.next_token_nats(logits, tokens).mean(-1).mean(), (feedback, None)

    def step(params, state, feedback):
        (nats, _), grads, feedback = jaxmp.value_and_grad(loss)(params, feedback)
        updates, state = optimizer.update(tied.WTE.add(grads), state, params)
        return tied.WTE.share(optax.apply_updates(params, updates)), state, feedback, nats

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    now = [params, jax.jit(optimizer.init)(params), feedback]

    def run():
        *now[:], nats = step(*now)
        return float(nats)

    return run


def theirs(a, tokens):
    """The same step in torch."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = 'cpu' if jax.default_backend() == 'cpu' else 'cuda'
    torch.set_num_threads(a.cores)
    precise = getattr(jax.config, 'jax_default_matmul_precision', None) in ('highest', 'float32')
    torch.backends.cuda.matmul.allow_tf32 = not precise  # as JAX, which has it by default
    off = {'resid_pdrop': 0.0, 'embd_pdrop': 0.0, 'attn_pdrop': 0.0, 'use_cache': False}
    sizes = {'vocab_size': a.vocabulary, 'n_positions': a.length, 'n_embd': a.width}
    layers = {'n_layer': a.blocks, 'n_head': a.heads, 'bos_token_id': 0, 'eos_token_id': 0}
    config = transformers.GPT2Config(**sizes, **layers, **off)
    model = transformers.GPT2LMHeadModel(config).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=1e-4)
    given = torch.tensor(np.asarray(tokens, np.int64), device=device)

    def run():
        optimizer.zero_grad()
        loss = model(input_ids=given, labels=given).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return run


def measure(runs, repeats):
    """CPU-seconds and wall seconds ``(repeats, 2)`` of each, after two steps that do not count."""
    found = {name: [] for name in runs}
    for _ in range(repeats + 2):
        for name, run in runs.items():
            start = time.process_time(), time.perf_counter()
            run()
            found[name].append((time.process_time() - start[0], time.perf_counter() - start[1]))
    return {name: np.array(s[2:]) for name, s in found.items()}


def main(a):
    keep_freed_pages()
    tokens = jax.random.randint(jax.random.key(1), (a.batch, a.length), 0, a.vocabulary)
    runs = {'one stage': ours(a, tokens, stages_of(a, 1), 'raw', 'raw')}
    runs |= {name: ours(a, tokens, stages_of(a, 4), *texts) for name, texts in CODECS.items()}
    try:
        runs['torch'] = theirs(a, tokens)
    except ImportError as error:
        print(f'no torch ({error})')
    found = measure(runs, a.repeats)
    sizes = ', '.join(f'{k} {v}' for k, v in vars(a).items())
    print(f'{header()}\n{sizes}')
    print(f'{"":26}{"CPU s":>9}{"wall s":>9}{"tokens/s":>10}{"CPU / raw":>11}{"best CPU":>10}')
    clock = 0 if jax.default_backend() == 'cpu' else 1
    plain = found['raw'][:, clock]
    for name, s in found.items():
        cpu, wall = np.median(s, axis=0)
        ratio = np.median(s[:, clock] / plain)
        rate = a.batch * a.length / wall
        print(f'{name:26}{cpu:9.3f}{wall:9.3f}{rate:10.0f}{ratio:11.3f}{s[:, 0].min():10.3f}')


if __name__ == '__main__':
    main(ARGUMENTS)
