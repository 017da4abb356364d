"""LoRA over a GGUF file whose frozen kernels are float32, bfloat16 or the file's own blocks.

    taskset -c 0 python bench/quantised_base.py FILE.gguf OUT.json [STEPS]

Each dtype has a process of its own. It trains `lora(8)` on the book of the package for STEPS steps
of 2 x 128 tokens, with remat. Memory is in MB, of 10^6 bytes:

* **kept**: parameters as they are held between steps;
* **reading**: the most that the process has grown while it read them;
* **temporary**: arrays of a step beside its arguments, as XLA counts them;
* **peak**: the most in the steps after the first, beyond a process that has imported JAX alone.

`stage` is the same for the second of four stages alone, which reads its own tensors and no others;
its step is the gradient of a random sum of its output. CPU-ms are those of a token.
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax

from jaxmp.training.footprint import status

IDLE = status('VmRSS')  # of a process that has imported JAX

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

from jaxmp import data  # noqa: E402
from jaxmp.config import complete  # noqa: E402
from jaxmp.config.files import load  # noqa: E402
from jaxmp.net.group import ProcessGroup  # noqa: E402
from jaxmp.runtimes.trained import of_stage, part, whole  # noqa: E402
from jaxmp.training import loop  # noqa: E402
from jaxmp.training.summary import provenance  # noqa: E402
from jaxmp.training.tasks import named  # noqa: E402
from jaxmp.wire import nbytes  # noqa: E402

DTYPES, MB, BATCH, LENGTH, RANK = ('float32', 'bfloat16', 'file'), 1e6, 2, 128, 8


def config_of(file, dtype, stages):
    """The configuration of a run."""
    c = load('finetune')
    c.model.path, c.model.train, c.model.stages = file, f'lora({RANK})', stages
    c.model.param_dtype, c.fwd, c.bwd = dtype, 'raw', 'raw'
    c.model.dtype = 'bfloat16' if dtype == 'bfloat16' else 'float32'
    c.data.sequence_length, c.batch_size = LENGTH, BATCH
    return complete(c)


def peak_from_here():
    """Forgets the peak of the process so far, and what it has freed."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path('/proc/self/clear_refs').write_text('5')


def measured(read, compile_and_run, steps):
    """Bytes and times of reading parameters, and of steps: `compile_and_run` gives XLA's, and one.

    The first step is not counted.
    """
    peak_from_here()
    before = status('VmRSS')
    params = read()
    row = {'kept': nbytes(params), 'reading': status('VmHWM') - before}
    row['temporary'], step = compile_and_run(params)
    del params
    losses = [step()]
    peak_from_here()
    start = time.process_time()
    losses += [step() for _ in range(steps - 1)]
    seconds = time.process_time() - start
    row |= {'peak': status('VmHWM') - IDLE, 'idle': IDLE}
    row = {name: round(size / MB, 1) for name, size in row.items()}
    ms = 1e3 * seconds / (steps - 1) / BATCH / LENGTH
    return row | {'cpu_ms': round(ms, 2), 'losses': losses}


def model(file, dtype, steps):
    """A run of all blocks in one stage."""
    trainer = loop.prepare(config_of(file, dtype, 1), ProcessGroup())
    state = []

    def read():
        state.append(trainer.create())
        return state[0].model.params

    def compile_and_run(params):
        bound: Any = trainer.bound(trainer.during(trainer.exp.boundaries(0)), trainer.rules(0))
        order = data.order(0, 0, len(trainer.exp.data.train.y))[: steps * BATCH]
        batches = list(trainer.batches(order))
        compiled = bound.lower(state[0], batches[0]).compile()
        rest = iter(batches)

        def step():
            state[0], values = bound(state[0], next(rest))
            return float(np.asarray(values['loss']).mean())

        return compiled.memory_analysis().temp_size_in_bytes, step

    return measured(read, compile_and_run, steps)


def stage(file, dtype, steps):
    """The second of four stages alone."""
    task: Any = named.task_of(config_of(file, dtype, 4))
    module, select = task.stages[1], of_stage(task.trained, 1)

    def compile_and_run(params):
        x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, module.config.width))
        low, fixed = part(select, params), part(lambda path: not select(path), params)

        @jax.jit
        def run(low, fixed, x):
            loss = lambda low, x: jnp.vdot(x, module.apply({'params': whole(fixed, low)}, x))
            return jax.value_and_grad(loss, (0, 1))(low, x)

        most = run.lower(low, fixed, x).compile().memory_analysis().temp_size_in_bytes
        return most, lambda: float(jax.block_until_ready(run(low, fixed, x))[0])

    read = lambda s: task.read(s, jax.random.key(0))['params']
    read(0)  # as many blocks: compiles what draws the updates
    return measured(lambda: read(1), compile_and_run, steps)


def exact(file, dtype, steps):
    """Logits and gradients over a base of a dtype against those over float32, adapters not zero."""
    found = []
    for name in ('float32', dtype):
        task: Any = named.task_of(config_of(file, name, 1))
        [module], select = task.stages, of_stage(task.trained, 0)
        params = task.read(0, jax.random.key(0))['params']
        draw = lambda a: 0.02 * jax.random.normal(jax.random.key(a.size), a.shape)
        low = jax.tree.map(draw, part(select, params))
        tokens = jnp.asarray(task.data.train.x[:BATCH], jnp.int32)

        @jax.jit
        def run(low, params, tokens, module=module):
            apply = lambda module, low: module.apply(
                {'params': whole(params, low)}, tokens, tokens=tokens
            )
            loss = lambda low: apply(module, low)[:, :-1, 0].mean()
            return apply(module.with_logits, low), jax.grad(loss)(low)

        found.append(jax.tree.map(np.asarray, run(low, params, tokens)))
    (wanted, gradients), (logits, others) = found
    pairs = list(zip(*map(jax.tree.leaves, (gradients, others)), strict=True))
    off = lambda size: max(float(size(a - b) / size(a)) for a, b in pairs)
    return {
        'logits_equal': bool(np.array_equal(logits, wanted)),
        'gradient_off': off(np.linalg.norm), 'gradient_off_largest': off(lambda a: np.abs(a).max()),
    }  # fmt: skip


def table(rows):
    """The rows in Markdown, as docs/two_desks.md has them."""
    lines = [
        '| SmolLM2 135M | kept, MB | temporary | peak | CPU-ms a token | loss off |',
        '|---|--:|--:|--:|--:|--:|',
    ]
    for r in rows:
        off = f'{r["loss_off"]:.1e}' if 'loss_off' in r else ''
        what = {'model': 'all', 'stage': 'one stage of four'}[r['what']]
        cells = ' | '.join(f'{r[k]:.0f}' for k in ('kept', 'temporary', 'peak'))
        lines.append(f'| {what}, `{r["dtype"]}` | {cells} | {r["cpu_ms"]:.1f} | {off} |')
    return '\n'.join(lines) + '\n'


def main(file, out, steps='16'):
    """One process after another; writes the rows."""
    about, rows = provenance(), []
    for what in ('model', 'stage'):
        for dtype in DTYPES:
            args = [sys.executable, __file__, what, file, dtype, steps]
            text = subprocess.run(args, capture_output=True, text=True, check=True).stdout
            rows.append({'what': what, 'dtype': dtype, **json.loads(text.splitlines()[-1])})
            print(json.dumps(rows[-1]), flush=True)
    args = [sys.executable, __file__, 'exact', file, 'file', steps]
    about |= json.loads(subprocess.run(args, capture_output=True, text=True, check=True).stdout)
    wide = rows[0]['losses']
    for row in rows[: len(DTYPES)]:
        off = [abs(a - b) for a, b in zip(row['losses'], wide, strict=True)]
        row['loss_off'] = max(off)
    about |= {'model': Path(file).name, 'steps': int(steps), 'batch': BATCH, 'length': LENGTH}
    about |= {'rank': RANK, 'file_MB': round(os.path.getsize(file) / MB, 1)}
    Path(out).write_text(json.dumps(about | {'rows': rows}, indent=1) + '\n')


if __name__ == '__main__':
    parts = {'model': model, 'stage': stage, 'exact': exact}
    if sys.argv[1] in parts:
        part_of, file, dtype, steps = sys.argv[1:]
        print(json.dumps(parts[part_of](file, dtype, int(steps))))
    else:
        main(*sys.argv[1:])
