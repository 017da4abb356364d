"""CPU-ms a token of a fine-tuning step, ours in four stages against transformers on torch.

Both read the same GGUF file, train the same parts with AdamW after clipping the norm, in float32,
on one core and with one thread each; steps are in turns, so that a busy machine slows both alike.
The figure that counts is the ratio. Ours is the step of `train.py --config=finetune`, once with raw
messages and once with --codec both ways. Low-rank updates of torch are a wrapper of nn.Linear, as
PEFT's.

Run: taskset -c 0 python bench/finetune.py FILE.gguf [--train='lora(8)'] [--batch=2]
     [--length=128] [--steps=6] [--codec=CODEC] [--out=RESULT.json]
Needs the extras gguf and parity, and accelerate; two minutes, 5 GB.
"""

import argparse
import json
import os
import time
from pathlib import Path

for name in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS'):
    os.environ[name] = '1'

import jax  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from timing import keep_freed_pages  # noqa: E402

from jaxmp.config import complete  # noqa: E402
from jaxmp.config.files import load  # noqa: E402
from jaxmp.net.group import ProcessGroup  # noqa: E402
from jaxmp.training import loop  # noqa: E402
from jaxmp.training.summary import provenance  # noqa: E402


def ours(a, codec):
    """A step over the batch, and the CPU-seconds of compiling it."""
    c = load('finetune')
    c.model.path, c.model.train = a.file, a.train
    c.data.sequence_length, c.batch_size, c.fwd, c.bwd = a.length, a.batch, codec, codec
    trainer = loop.prepare(complete(c), ProcessGroup())
    state = [trainer.create()]
    runtime, rules = trainer.during(trainer.exp.boundaries(0)), trainer.rules(0)
    batch = next(iter(trainer.batches(np.arange(a.batch))))
    compiled = trainer.bound(runtime, rules)

    def step():
        state[0], values = compiled(state[0], batch)
        return float(np.asarray(values['loss']).mean())

    start = time.process_time()
    step()
    return step, time.process_time() - start, batch['x']


class Low(torch.nn.Module):
    """A linear layer with a low-rank update."""

    def __init__(self, whole, rank):
        """Wraps ``whole``."""
        super().__init__()
        self.whole, self.scale = whole, 2.0
        shape = whole.weight.shape
        self.a = torch.nn.Parameter(torch.randn(rank, shape[1]) * shape[1] ** -0.5)
        self.b = torch.nn.Parameter(torch.zeros(shape[0], rank))

    def forward(self, x):
        """The sum of both."""
        return self.whole(x) + (x @ self.a.T) @ self.b.T * self.scale


def theirs(a, tokens):
    """A step of transformers' model over the same batch."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    file = Path(a.file)
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32, attn_implementation='sdpa'
    ).train()
    low = a.train.startswith('lora')
    for name, p in model.named_parameters():
        p.requires_grad_(not low and (a.train == 'all' or 'embed' not in name))
    if low:
        rank = int(a.train[5:].split(',')[0].rstrip(')'))
        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, child in list(part.named_children()):
                    if isinstance(child, torch.nn.Linear):
                        setattr(part, name, Low(child, rank))
    trained = [p for p in model.parameters() if p.requires_grad]
    rule = torch.optim.AdamW(trained, lr=2e-4, weight_decay=1e-4)
    x = torch.tensor(np.asarray(tokens).astype(np.int64))

    def step():
        rule.zero_grad(set_to_none=True)
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        rule.step()
        return loss.item()

    step()
    return step


def main():
    """Measures."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument('file')
    p.add_argument('--train', default='lora(8)')
    p.add_argument('--batch', type=int, default=2)
    p.add_argument('--length', type=int, default=128)
    p.add_argument('--steps', type=int, default=6)
    p.add_argument('--codec', default='')
    p.add_argument('--out')
    a = p.parse_args()
    keep_freed_pages()
    steps, compiling, losses, tokens = {}, {}, {}, None
    for codec in ['raw'] + [a.codec] * bool(a.codec):
        steps[codec], compiling[codec], tokens = ours(a, codec)
    steps['torch'] = theirs(a, tokens)
    seconds = {name: [] for name in steps}
    for _ in range(a.steps):
        for name, step in steps.items():
            start = time.process_time()
            losses[name] = step()
            seconds[name].append(time.process_time() - start)
    each = lambda f: {name: round(float(np.median(f(s))), 3) for name, s in seconds.items()}
    row = {
        'train': a.train, 'batch': a.batch, 'length': a.length,
        'cpu_ms_a_token': each(lambda s: 1e3 * np.array(s) / (a.batch * a.length)),
        'of_torch': each(lambda s: np.array(s) / np.array(seconds['torch'])),
        'loss_after': {n: round(v, 4) for n, v in losses.items()},
        'cpu_seconds_to_compile': {n: round(s, 1) for n, s in compiling.items()},
        'versions': {'torch': torch.__version__, 'jax': jax.__version__},
        **provenance(),
    }  # fmt: skip
    print(json.dumps(row, indent=1))
    if a.out:
        Path(a.out).write_text(json.dumps(row, indent=1) + '\n')


if __name__ == '__main__':
    main()
